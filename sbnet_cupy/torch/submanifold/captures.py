"""What maps of tensors keep, in and out of the capture of a CUDA graph."""

from ...core.graph_memory import capture_of
from ...submanifold.keeping_container import kept_or_made


def make_kept(kept, key, tensor, make):
    """Return what is kept under a key, or make it of a tensor and keep it; see kept_or_made."""
    return kept_or_made(kept, key, lambda: capture_of(tensor), make)
