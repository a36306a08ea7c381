"""Tensors as native arrays: views of the same memory, torch's stream, torch's allocator.

A body that has no single kernel to launch sees NumPy arrays, or CuPy arrays on torch's current
stream. What it allocates on a GPU comes from PyTorch's allocator, so that PyTorch knows of it: also
in a CUDA graph, whose memory is its own.
"""

import functools
from typing import NamedTuple

import numpy as np
import torch
from torch.autograd import forward_ad

from ..core.libraries import Torch, torch_dtype
from ..core.packed import Packed
from ..core.spec import CPU, ArraySpec, SpecGroup
from ..errors import DeviceError, DTypeError, ShapeError
from . import _dispatch_state as state

DTYPES = {}  # torch dtype -> NumPy dtype, for those that were asked for
_STREAMS = {}  # (device, pointer) -> CuPy's object for torch's stream


def compute(function, tensors):
    """Call a function of native arrays with tensors of the current device, or None, viewed so.

    Tensors that are not contiguous are copied.
    """
    views = [None if tensor is None else view(tensor) for tensor in tensors]
    if not tensors[0].is_cuda:
        return function(*views)
    from cupy import cuda

    with native_stream(tensors[0].get_device()), cuda.using_allocator(allocate):
        return function(*views)


def native_stream(device):
    """Return torch's current stream on a device as CuPy's object."""
    pointer = state.current_stream(device)
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
    memory = cupy.cuda.UnownedMemory(tensor.data_ptr(), nbytes, tensor, tensor.device.index)
    return cupy.cuda.MemoryPointer(memory, 0)


def view(tensor):
    """View a tensor as a NumPy or CuPy array of the same memory; copy one that has gaps."""
    return _enter(tensor.detach().contiguous(), "tensor")


def to_tensor(array):
    """Return the tensor behind a native array that :func:`compute` allocated."""
    if isinstance(array, np.ndarray):
        return torch.from_numpy(array)
    owner = array.data.mem._owner
    dtype = getattr(torch, array.dtype.name)
    if not array.size:
        return torch.empty(array.shape, dtype=dtype, device=owner.device)
    start = array.data.ptr - owner.data_ptr()
    return owner[start : start + array.nbytes].view(dtype).view(array.shape)


def native_weights(weights):
    """Return a PackedWeights or PackedBottleneck of tensors as one of native arrays, always the
    same; None for other arrays, which the checks refuse by name.
    """
    if not isinstance(weights._given()[0], torch.Tensor):
        return None
    if weights._entered is None and any(t.requires_grad for t in weights._arrays()):
        raise DTypeError(
            f"a {type(weights).__name__} gets no gradients, and holds a tensor that requires grad; "
            "pack tensor.detach(), or pass the weights unpacked"
        )
    return weights._map_arrays(_enter_weights)


_enter = Torch().enter
_enter_weights = functools.partial(_enter, argument="weights")


class Description(NamedTuple):
    """What a call needs to know of its tensors, of which some may be None."""

    fields: list  # of their specs, as they are once gaps are closed
    addresses: list  # of their memory, 0 for None
    gaps: bool  # whether one is not contiguous
    requires_grad: bool  # whether one does
    packed: Packed | None  # weights that are packed once


def describe(tensors, is_plain=None, packed=None):
    """Describe tensors, of which some may be None; return None if one is not plain.

    A SpecGroup stands for weights that are packed.
    """
    fields, addresses, gaps, requires_grad = [], [], False, False
    for t in tensors:
        if t is None:
            fields.append(None)
            addresses.append(0)
        elif type(t) is SpecGroup:
            fields.append(t)
            addresses += [0] * len(t.specs)
        elif is_plain is not None and not is_plain(t):
            return None
        else:
            device, address = t.get_device(), t.data_ptr()
            contiguous = t.is_contiguous()
            aligned = device < 0 or not contiguous  # so is a copy
            fields.append((
                t.shape, DTYPES.get(t.dtype), CPU if device < 0 else device, None,
                0 if aligned else address & 15,
            ))  # fmt: skip
            addresses.append(address)
            gaps = gaps or not contiguous
            requires_grad = requires_grad or t.requires_grad
    return Description(fields, addresses, gaps, requires_grad, packed)


def spec_of(tensor):
    """Return the spec of a tensor that may be fake, its gaps closed."""
    device = tensor.device.index if tensor.device.type == "cuda" else CPU
    return ArraySpec(tuple(tensor.shape), numpy_dtype(tensor.dtype, "tensor"), device)


def numpy_dtype(dtype, argument):
    """Return NumPy's name for the torch dtype of an argument, or raise DTypeError."""
    try:
        return DTYPES[dtype]
    except KeyError:
        return DTYPES.setdefault(dtype, torch_dtype(dtype, argument))


def check_tensors(**arguments):
    """Raise unless all arguments that are not None are plain tensors on one CPU or CUDA device."""
    device, compiling = None, torch.compiler.is_compiling()
    forward_mode = not compiling and state.has_forward_mode()
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
        if not compiling and value.dtype not in DTYPES:
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
