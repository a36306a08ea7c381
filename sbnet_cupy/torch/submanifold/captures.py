"""What maps of tensors keep, in and out of the capture of a CUDA graph."""

import torch

from ...core.graph_memory import capture_on
from ...submanifold.keeping_container import kept_or_made
from .. import _dispatch_state as state


def capture_of(tensor):
    """Return the number of the capture on torch's current stream; 0 if there is none."""
    if not tensor.is_cuda or not torch.cuda.is_current_stream_capturing():
        return 0
    return capture_on(state.current_stream(tensor.get_device()))


def make_kept(kept, key, tensor, make):
    """Return what is kept under a key, or make it of a tensor and keep it; see kept_or_made."""
    return kept_or_made(kept, key, lambda: capture_of(tensor), make)
