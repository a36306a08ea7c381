"""Benchmarks of the operations; ``sbnet-cupy bench`` runs them."""
