"""Arrays whose memory begins off a boundary of 16 bytes, and their like on a GPU."""

import numpy as np


def offset(values, start):
    """Return a copy of an array that begins so many of its numbers behind 16 bytes."""
    memory = np.empty(values.size + 16, values.dtype)
    begin = -memory.ctypes.data % 16 // memory.itemsize + start
    part = memory[begin : begin + values.size].reshape(values.shape)
    part[...] = values
    return part


def on_gpu(cupy, array):
    """Return a copy of an array on the GPU, at an address like its own."""
    start, memory = array.ctypes.data % 16, cupy.empty(array.nbytes + 16, np.uint8)
    view = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    view[...] = cupy.asarray(array)
    return view
