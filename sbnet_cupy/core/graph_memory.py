"""Memory that CUDA graphs use: what is allocated in a capture stays, as the graph may be replayed.

CuPy's pool knows nothing of graphs: an array that a capture lets go of is given out again, to what
a replay would then overwrite.
"""

import contextlib

import numpy as np

from .arrays import namespace

_KEPT = []  # for good: graphs may be replayed as long as they like


def is_capturing(array):
    """Whether the current stream is recording a CUDA graph."""
    xp = namespace(array)
    return xp is not np and xp.cuda.runtime.streamIsCapturing(xp.cuda.get_current_stream().ptr)


def keep_if_capturing(array):
    """Keep an array's memory if a graph is being captured."""
    if is_capturing(array):
        _keep(namespace(array), array.data)


@contextlib.contextmanager
def memory_of_graphs(like):
    """Within, keep all that CuPy allocates, if a graph is being captured."""
    if not is_capturing(like):
        yield
        return
    xp = namespace(like)
    allocate = xp.cuda.get_allocator()

    def allocate_and_keep(size):
        memory = allocate(size)
        _keep(xp, memory)
        return memory

    with xp.cuda.using_allocator(allocate_and_keep):
        yield


def _keep(xp, memory):
    """Keep memory, unless it is of a framework's allocator: that knows of its graphs."""
    if not isinstance(memory.mem, xp.cuda.UnownedMemory):
        _KEPT.append(memory)
