"""What every system stands on: arrays, checks, kernels, plans, memory. It knows no system."""
