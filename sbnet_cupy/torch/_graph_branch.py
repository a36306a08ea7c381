"""A second branch of a CUDA graph on tensors: :mod:`sbnet_cupy.core.graph_branch` for PyTorch."""

import contextlib

import torch

from ..core.graph_branch import side_stream
from ..core.launch import joined
from ..core.torch_memory import capturing_stream

_ONE_BRANCH = contextlib.nullcontext(contextlib.nullcontext())


def branch(tensor):
    """Return a context that gives one for work that may run beside the rest of its block.

    It may if the block is captured; else, and where ``tensor`` is None, all is in the order of the
    calls. What it reads must be there before the block. What it allocates is of the branch's
    stream, and is only used again by a branch, which begins after all that was put on the main
    stream so far.
    """
    stream = None if tensor is None else capturing_stream(tensor)
    return _ONE_BRANCH if stream is None else _branch(tensor, stream)


def wait(stream, other):
    """Have a stream wait for all that is on another one so far."""
    stream.wait_stream(other)
    joined(stream.cuda_stream)


def moment(tensor):
    """Return an event of now, from which a branch may begin later on; None outside of a capture."""
    if capturing_stream(tensor) is None:
        return None
    return torch.cuda.current_stream(tensor.device).record_event()


@contextlib.contextmanager
def after(event, device):
    """Within this, work runs beside all since an event of the current stream, which is given.

    What follows waits for it. What it allocates is of the branch's stream.
    """
    main = torch.cuda.current_stream(device)
    stream = side_stream(device.index, main.cuda_stream, "beside")
    side = torch.cuda.ExternalStream(stream.ptr, device=device)
    side.wait_event(event)
    joined(stream.ptr)
    try:
        with torch.cuda.stream(side):
            yield main
    finally:
        wait(main, side)


@contextlib.contextmanager
def _branch(tensor, stream):
    main, device = torch.cuda.current_stream(tensor.device), tensor.get_device()
    side = torch.cuda.ExternalStream(side_stream(device, stream).ptr, device=tensor.device)
    wait(side, main)
    try:
        yield torch.cuda.stream(side)
    finally:
        wait(main, side)
