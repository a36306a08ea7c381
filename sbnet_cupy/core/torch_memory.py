"""PyTorch's streams and memory for CuPy: one order of work on tensors, and one allocator.

What CuPy allocates so, PyTorch knows of: also in a CUDA graph, whose memory is its own.
"""

import functools

import numpy as np

from .rehearsal import REHEARSING

_STREAMS = {}  # (device, pointer) -> CuPy's object for torch's stream
_DTYPES = {}  # NumPy's -> PyTorch's


def stream_of(device, pointer):
    """Return a stream of PyTorch's, the current one of a device, as CuPy's object."""
    try:
        return _STREAMS[device, pointer]
    except KeyError:
        import cupy
        import torch

        stream = cupy.cuda.Stream.from_external(torch.cuda.current_stream(device))
        return _STREAMS.setdefault((device, pointer), stream)


def capturing_stream(tensor):
    """Return the address of PyTorch's current stream if it records a CUDA graph, else None."""
    import torch

    if torch.compiler.is_compiling() or not tensor.is_cuda:
        return None
    if not torch.cuda.is_current_stream_capturing():
        return None
    return torch.cuda.current_stream(tensor.device).cuda_stream


def allocate(nbytes):
    """Allocate device memory for CuPy from PyTorch, on the current device and stream."""
    import cupy
    import torch

    tensor = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    if REHEARSING.now is not None:
        REHEARSING.now.allocated(tensor)
    return cupy.cuda.MemoryPointer(_memory_class()(tensor), 0)


@functools.cache
def _memory_class():
    """Return CuPy's kind of memory that holds, and remembers, a tensor."""
    import cupy

    class TensorMemory(cupy.cuda.UnownedMemory):
        def __init__(self, tensor):
            super().__init__(tensor.data_ptr(), tensor.nbytes, tensor, tensor.get_device())
            self.tensor = tensor

    return TensorMemory


def to_tensor(array):
    """Return the tensor behind a native array, of NumPy's memory or of :func:`allocate`."""
    import torch

    if isinstance(array, np.ndarray):
        return torch.from_numpy(array)
    owner, shape, nbytes = array.data.mem.tensor, array.shape, array.nbytes
    dtype = _DTYPES.get(array.dtype)
    if dtype is None:
        dtype = _DTYPES[array.dtype] = getattr(torch, array.dtype.name)
    if not nbytes:
        return torch.empty(shape, dtype=dtype, device=owner.device)
    if nbytes != owner.nbytes:  # a part of it
        start = array.data.ptr - owner.data_ptr()
        owner = owner[start : start + nbytes]
    tensor = owner.view(dtype)
    return tensor if len(shape) == 1 else tensor.view(shape)
