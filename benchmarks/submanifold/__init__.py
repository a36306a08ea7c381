"""Benchmarks of features at sites."""
