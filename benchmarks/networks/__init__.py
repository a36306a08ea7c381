"""Benchmarks of whole networks."""
