"""Tensors as native arrays: views of the same memory, torch's stream, torch's allocator.

A body calls :func:`compute` with tensors; the function of the library that it names sees NumPy
arrays, or CuPy arrays on torch's current stream. What that function allocates on a GPU comes from
PyTorch's allocator, so that PyTorch knows of it: also in a CUDA graph, whose memory is its own.
"""

import functools

import numpy as np
import torch
from torch.autograd import forward_ad

from ..block_sparse.active_blocks import ActiveBlocks
from ..core.arrays import ArrayContainer
from ..core.libraries import torch_dtype
from ..errors import DeviceError, DTypeError, ShapeError

_DTYPES = {}  # torch dtype -> NumPy dtype
_STREAMS = {}  # (device, pointer) -> CuPy's object for torch's stream


def compute(function, like, /, *args, allocates=True, **kwargs):
    """Call a function of the library with tensors viewed as arrays; its results are tensors.

    ``like`` says on which device. Tensors that are not contiguous are copied. With ``out`` there is
    nothing to return. ``allocates=False`` promises that the function needs no memory.
    """
    core = getattr(function, "__wrapped__", function)  # without its door: arrays are native here
    args = [_enter(value) for value in args]
    kwargs = {name: _enter(value) for name, value in kwargs.items()}
    leave = _discard if "out" in kwargs else _leave
    if not like.is_cuda:
        return leave(core(*args, **kwargs))
    from cupy import cuda

    device = like.device.index
    if not allocates and device == cuda.runtime.getDevice():
        with native_stream(device):
            return leave(core(*args, **kwargs))
    with cuda.Device(device), native_stream(device), cuda.using_allocator(allocate):
        return leave(core(*args, **kwargs))


def raw_stream(device):
    """Return the address of torch's current stream on a device."""
    # As torch's own generated code asks: torch.cuda.current_stream makes an object at each call.
    return torch._C._cuda_getCurrentRawStream(device)


def native_stream(device):
    """Return torch's current stream on a device as CuPy's object."""
    pointer = raw_stream(device)
    try:
        return _STREAMS[device, pointer]
    except KeyError:
        import cupy

        stream = cupy.cuda.Stream.from_external(torch.cuda.current_stream(device))
        return _STREAMS.setdefault((device, pointer), stream)


def allocate(nbytes):
    """Allocate device memory for CuPy from PyTorch, on the current device and stream."""
    import cupy

    tensor = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    return cupy.cuda.MemoryPointer(_memory_class()(tensor), 0)


@functools.cache
def _memory_class():
    """Return CuPy's kind of memory that holds, and remembers, a tensor."""
    import cupy

    class TensorMemory(cupy.cuda.UnownedMemory):
        def __init__(self, tensor):
            super().__init__(tensor.data_ptr(), tensor.nbytes, tensor, tensor.device.index)
            self.tensor = tensor

    return TensorMemory


def _enter(value):
    """View a tensor, or those in a tuple or container, as native arrays; pass the rest."""
    if isinstance(value, torch.Tensor):
        return view(value)
    if isinstance(value, tuple) and value and isinstance(value[0], torch.Tensor):
        return tuple(map(view, value))
    if isinstance(value, ArrayContainer):
        return value._map_arrays(view)
    return value


def view(tensor):
    """View a tensor as a NumPy or CuPy array of the same memory; copy one that has gaps."""
    dtype = numpy_dtype(tensor.dtype, "tensor")
    tensor = tensor.contiguous()
    if tensor.is_cuda:
        import cupy

        memory = cupy.cuda.UnownedMemory(
            tensor.data_ptr(), tensor.nbytes, tensor, tensor.device.index
        )
        return cupy.ndarray(tuple(tensor.shape), dtype, cupy.cuda.MemoryPointer(memory, 0))
    tensor = tensor.detach()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(dtype)
    return tensor.numpy()


def numpy_dtype(dtype, argument):
    """Return NumPy's name for the torch dtype of an argument, or raise DTypeError."""
    try:
        return _DTYPES[dtype]
    except KeyError:
        return _DTYPES.setdefault(dtype, torch_dtype(dtype, argument))


def _discard(result):
    """Return nothing: the result is the caller's own tensor."""


def _leave(result):
    """Return the tensors behind arrays that a function made; pass what is no array."""
    if isinstance(result, np.ndarray):
        if result.dtype.name == "bfloat16":
            return torch.from_numpy(result.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(result)
    if isinstance(result, tuple | ActiveBlocks):
        return tuple(map(_leave, result))
    owner = result.data.mem.tensor
    dtype = getattr(torch, result.dtype.name)
    if not result.size:
        return torch.empty(result.shape, dtype=dtype, device=owner.device)
    start = result.data.ptr - owner.data_ptr()
    return owner[start : start + result.nbytes].view(dtype).view(result.shape)


def check_tensors(**arguments):
    """Raise unless all arguments that are not None are plain tensors on one CPU or CUDA device."""
    device, compiling = None, torch.compiler.is_compiling()
    forward_mode = not compiling and forward_ad._current_level >= 0
    for name, value in arguments.items():
        if value is None:
            continue
        if not isinstance(value, torch.Tensor):
            kind = f"{type(value).__module__}.{type(value).__name__}"
            raise DTypeError(
                f"{name} must be a torch.Tensor, got {kind}; convert it with torch.as_tensor"
            )
        if device is None:
            device = value.device
            if device.type not in ("cpu", "cuda"):
                raise DeviceError(f"{name} must be on a CPU or CUDA device, got {device}")
        elif value.device != device:
            places = [f"{n} is on {v.device}" for n, v in arguments.items() if v is not None]
            raise DeviceError(
                f"all tensors must be on one device: {', '.join(places)}; use .to(device)"
            )
        if value.layout is not torch.strided:
            raise DTypeError(
                f"{name} must be a strided tensor, got layout {value.layout}; call .to_dense()"
            )
        if not compiling and value.dtype not in _DTYPES:
            numpy_dtype(value.dtype, name)
        if forward_mode and forward_ad.unpack_dual(value).tangent is not None:
            raise NotImplementedError(
                f"{name} has a forward-mode derivative, and the operators of sbnet_cupy have "
                "none; use reverse mode, .backward() or torch.autograd.grad"
            )


def check_contiguous(name, tensor):
    """Raise unless a tensor that is to be written is contiguous."""
    if not tensor.is_contiguous():
        raise ShapeError(
            f"{name} must be contiguous, got shape {tuple(tensor.shape)} with strides "
            f"{tensor.stride()}; make it with torch.empty, or call .contiguous()"
        )
