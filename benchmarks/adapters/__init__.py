"""What a call costs the calling thread in PyTorch and in JAX."""
