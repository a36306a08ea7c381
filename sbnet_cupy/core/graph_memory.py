"""Keep memory that CUDA graphs use: what is allocated during a capture is never freed.

CuPy's memory pool does not know about graphs. If an array that a captured graph uses were freed,
the pool would hand out its memory again, and a replay would overwrite the new owner's data.
"""

import contextlib
import ctypes
import sys

import numpy as np

from .arrays import library_of, namespace
from .device import driver
from .torch_memory import capturing_stream

_KEPT = []  # never freed: a graph may be replayed at any time


def is_capturing(array):
    """Whether the current stream is recording a CUDA graph."""
    xp = namespace(array)
    return xp is not np and xp.cuda.runtime.streamIsCapturing(xp.cuda.get_current_stream().ptr)


def capture_on(stream, graph=None, nodes=None, count=None):
    """Return the number of the capture that a stream, given by its address, records; 0 if none.

    The others are of ``ctypes``: where to write the graph, the nodes that its next one comes
    behind, and how many these are.
    """
    status, number = ctypes.c_int(), ctypes.c_uint64()
    found = (status, number, graph, nodes, count)
    found = [None if place is None else ctypes.byref(place) for place in found]
    error = driver().cuStreamGetCaptureInfo_v2(ctypes.c_void_p(stream), *found)
    if error:
        raise RuntimeError(f"cuStreamGetCaptureInfo failed with CUresult {error}")
    return number.value if status.value else 0


def capture_of(array):
    """Return the number of the CUDA graph's capture on the current stream; 0 if there is none.

    Of a tensor it is PyTorch's current stream, of other libraries' arrays there is none.
    """
    library = library_of(array)
    if library is None or not library.native:
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(array, torch.Tensor):
            return 0
        stream = capturing_stream(array)
        return 0 if stream is None else capture_on(stream)
    return capture_on(namespace(array).cuda.get_current_stream().ptr) if is_capturing(array) else 0


def keep_if_capturing(array):
    """Keep an array's memory for good if a graph is being captured."""
    if is_capturing(array):
        _keep(namespace(array), array.data)


_NOTHING = contextlib.nullcontext()


def memory_of_graphs(like):
    """Return a context that keeps everything that CuPy allocates if a graph is being captured."""
    return _memory_of_graph(like) if is_capturing(like) else _NOTHING


@contextlib.contextmanager
def _memory_of_graph(like):
    xp = namespace(like)
    allocate = xp.cuda.get_allocator()

    def allocate_and_keep(size):
        memory = allocate(size)
        _keep(xp, memory)
        return memory

    with xp.cuda.using_allocator(allocate_and_keep):
        yield


def _keep(xp, memory):
    """Keep memory, unless a framework allocated it: those know about their graphs."""
    if not isinstance(memory.mem, xp.cuda.UnownedMemory):
        _KEPT.append(memory)
