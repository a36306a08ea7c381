"""Sites and maps in a CUDA graph: branches of their own, since they depend on no features.

What finds the sites of the next levels and their maps runs on one, and what lists the tiles of maps
on another, beside the convolutions. Outside of a capture everything is in the order of the calls.
"""

import weakref

import torch

from ...core.graph_branch import side_stream
from ...core.graph_memory import capture_on
from ...core.torch_memory import allocate, capturing_stream
from .. import _dispatch_state as state
from .._graph_branch import wait
from .._native import on_stream

_MOST_CAPTURES = 16  # that are remembered
_MADE = {}  # capture, its main stream -> addresses of the memory that the branch of sites has made


def natively(function, tensor):
    """Call a function that works on native arrays, on a tensor's device and its current stream."""
    device = tensor.get_device()
    if device >= 0 and device != state.current_device():
        with torch.cuda.device(device):
            return on_stream(tensor, function)
    return on_stream(tensor, function)


def find_beside(function, *tensors):
    """Call a function of sites, as ``natively`` does; in a capture, on the branch of sites.

    The function reads the tensors and what belongs to them, and what is kept with sites, which must
    all be made by such calls. It takes no arguments: it views of the tensors what it needs.
    """
    return _beside(function, tensors, "sites")


def list_beside(function, *tensors):
    """Call a function of the tables of maps alike; in a capture, on a branch beside that of sites.

    What it lists is for convolutions alone: no sites are found of it.
    """
    return _beside(function, tensors, "lists")


def _beside(function, tensors, name):
    stream = capturing_stream(tensors[0])
    if stream is None:
        return natively(function, tensors[0])
    device, number = tensors[0].device, tensors[0].get_device()
    main = torch.cuda.current_stream(device)
    sites, side = (
        torch.cuda.ExternalStream(side_stream(number, stream, branch).ptr, device=device)
        for branch in ("sites", name)
    )
    made = _made_in(capture_on(stream), stream)
    given = [tensor for tensor in tensors if tensor is not None]
    others = [tensor for tensor in given if _address(tensor) not in made]
    if others:  # made on the main stream, or before the capture
        wait(side, main)
        for tensor in others:
            tensor.record_stream(side)
    elif name != "sites":
        wait(side, sites)
    with torch.cuda.stream(side):
        result, owned = _call_and_list(function, tensors[0])
    for tensor in owned:  # the branch must not use their memory again, which the main stream reads
        tensor.record_stream(main)
        if name == "sites":
            made.add(_address(tensor))
    wait(main, side)
    return result


def _call_and_list(function, tensor):
    """Return the result of a function, and the tensors that were allocated for it and still are."""
    import cupy

    listed = []

    def allocate_and_list(nbytes):
        memory = allocate(nbytes)
        listed.append(weakref.ref(memory.mem.tensor))
        return memory

    def call():
        with cupy.cuda.using_allocator(allocate_and_list):
            return function()

    result = natively(call, tensor)
    return result, [tensor for tensor in (known() for known in listed) if tensor is not None]


def _address(tensor):
    return tensor.untyped_storage().data_ptr()


def _made_in(*key):
    """Return the addresses of a capture's stream; forget captures that were long ago."""
    if key not in _MADE:
        while len(_MADE) >= _MOST_CAPTURES:
            _MADE.pop(next(iter(_MADE)))
        _MADE[key] = set()
    return _MADE[key]
