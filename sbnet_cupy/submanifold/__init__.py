"""Submanifold sparse convolution: features at listed sites of a grid, and nowhere else."""
