"""A second branch of a CUDA graph on tensors: :mod:`sbnet_cupy.core.graph_branch` for PyTorch."""

import contextlib

import torch

from ..core.graph_branch import side_stream
from ..core.torch_memory import capturing_stream

_ONE_BRANCH = contextlib.nullcontext(contextlib.nullcontext())


def branch(tensor):
    """Return a context that gives one for work that may run beside the rest of its block.

    It may if the block is captured; else all is in the order of the calls. What it reads must be
    there before the block. What it allocates is of the branch's stream, and is only used again by
    a branch, which begins after all that was put on the main stream so far.
    """
    stream = capturing_stream(tensor)
    return _ONE_BRANCH if stream is None else _branch(tensor, stream)


@contextlib.contextmanager
def _branch(tensor, stream):
    main, device = torch.cuda.current_stream(tensor.device), tensor.get_device()
    side = torch.cuda.ExternalStream(side_stream(device, stream).ptr, device=tensor.device)
    side.wait_stream(main)
    try:
        yield torch.cuda.stream(side)
    finally:
        main.wait_stream(side)
