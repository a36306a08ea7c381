"""Stateless operations; one file per op, with its NumPy body and its CUDA launch."""
