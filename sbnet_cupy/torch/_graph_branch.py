"""A second branch of a CUDA graph on tensors: :mod:`sbnet_cupy.core.graph_branch` for PyTorch."""

import contextlib

import torch

from ..core.graph_branch import side_stream
from ..core.torch_memory import capturing_stream


@contextlib.contextmanager
def branch(tensor):
    """Give a context for work that may run beside the rest of the block, if that is captured.

    What it reads must be there before the block. What it allocates is of the branch's stream, and
    is only used again by a branch, which begins after all that was put on the main stream so far.
    """
    stream = capturing_stream(tensor)
    if stream is None:
        yield contextlib.nullcontext()
        return
    main, device = torch.cuda.current_stream(tensor.device), tensor.get_device()
    side = torch.cuda.ExternalStream(side_stream(device, stream).ptr, device=tensor.device)
    side.wait_stream(main)
    try:
        yield torch.cuda.stream(side)
    finally:
        main.wait_stream(side)
