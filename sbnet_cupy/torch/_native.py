"""Tensors as native arrays: views of the same memory, torch's stream, torch's allocator.

A body that has no single kernel to launch sees NumPy arrays, or CuPy arrays on torch's current
stream. What it allocates on a GPU comes from PyTorch's allocator.
"""

from typing import NamedTuple

import torch
from torch.autograd import forward_ad

from ..core.libraries import TORCH_DTYPES as DTYPES
from ..core.libraries import Torch
from ..core.libraries import torch_dtype as numpy_dtype
from ..core.operator import Plan
from ..core.packed import Packed
from ..core.spec import CPU, ArraySpec, SpecGroup
from ..core.torch_memory import allocate, stream_of
from ..errors import DeviceError, DTypeError
from . import _dispatch_state as state


def compute(function, tensors):
    """Call a function of native arrays with tensors of the current device, or None, viewed so.

    Tensors that are not contiguous are copied.
    """
    return on_stream(tensors[0], function, *views(*tensors))


def on_stream(tensor, function, *arrays):
    """Call a function of native arrays as work on a tensor, which is on the current device."""
    if not tensor.is_cuda:
        return function(*arrays)
    from cupy import cuda

    device = tensor.get_device()
    stream = state.current_stream(device)
    if stream == cuda.get_current_stream(device).ptr:
        with cuda.using_allocator(allocate):
            return function(*arrays)
    with stream_of(device, stream), cuda.using_allocator(allocate):
        return function(*arrays)


def native_stream(device):
    """Return torch's current stream on a device as CuPy's object."""
    return stream_of(device, state.current_stream(device))


def view(tensor):
    """View a tensor as a NumPy or CuPy array of the same memory; copy one that has gaps."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    return _enter(tensor.contiguous(), "tensor")


def views(*tensors):
    """View tensors likewise, or None."""
    return [None if tensor is None else view(tensor) for tensor in tensors]


def native_weights(weights):
    """Return a PackedWeights or PackedBottleneck of tensors as one of native arrays, always the
    same; None for other arrays, which the checks refuse by name.
    """
    given = weights._given()
    if not isinstance(given[0], torch.Tensor):
        return None
    for tensor in given:
        if tensor is not None and tensor.requires_grad:
            raise DTypeError(
                f"a {type(weights).__name__} gets no gradients, and holds a tensor that requires "
                "grad; pack tensor.detach(), or pass the weights unpacked"
            )
    return weights._map_arrays(lambda tensor: _enter(tensor, "weights"))


_enter = Torch().view


class Description(NamedTuple):
    """What a call needs to know of its tensors, of which some may be None."""

    fields: list  # of their specs, as they are once gaps are closed
    addresses: list  # of their memory, 0 for None
    gaps: bool  # whether one is not contiguous
    requires_grad: bool  # whether one does
    packed: Packed | None  # weights that are packed once
    plan: Plan | None = None  # of the call, where it is known


def describe(tensors, is_plain=None, packed=None):
    """Describe tensors, of which some may be None; return None if one is not plain.

    A SpecGroup stands for weights that are packed. Shapes come as PyTorch has them, which are equal
    to tuples and are made faster.
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
            device, address, alignment = t.get_device(), t.data_ptr(), 0
            if not t.is_contiguous():
                gaps = True  # a copy is aligned
            elif device >= 0:
                alignment = address & 15
            place = CPU if device < 0 else device
            fields.append((t.shape, DTYPES.get(t.dtype), place, None, alignment))
            addresses.append(address)
            requires_grad = requires_grad or t.requires_grad
    return Description(fields, addresses, gaps, requires_grad, packed)


def spec_of(tensor, gaps=False):
    """Return the spec of a tensor that may be fake, its gaps closed unless they are asked for."""
    device = tensor.device.index if tensor.device.type == "cuda" else CPU
    strides = tensor.stride() if gaps and not tensor.is_contiguous() else None
    return ArraySpec(tuple(tensor.shape), numpy_dtype(tensor.dtype, "tensor"), device, strides)


def check_not_traced():
    """Raise inside of ``torch.jit.trace``, where sizes are tensors."""
    if not torch.compiler.is_compiling() and torch.jit.is_tracing():
        raise RuntimeError(
            "layers of blocks cannot be traced by torch.jit.trace, to which sizes are tensors; use "
            "torch.export.export, with a capacity"
        )


def no_tensor(name, value):
    """Return the error about an argument that is no tensor."""
    if value is None:
        return DTypeError(f"{name} must be a torch.Tensor, got None")
    return DTypeError(
        f"{name} must be a torch.Tensor, got {type(value).__name__}; convert it with "
        "torch.as_tensor"
    )


def check_tensors(optional=(), /, **arguments):
    """Raise unless all arguments are plain tensors on one CPU or CUDA device.

    Those that ``optional`` names may be None.
    """
    device, compiling = None, torch.compiler.is_compiling()
    forward_mode = not compiling and state.has_forward_mode()
    given = {n: value for n, value in arguments.items() if value is not None or n not in optional}
    for name, value in given.items():
        if not isinstance(value, torch.Tensor):
            if value is None:
                raise DTypeError(f"{name} must be a torch.Tensor, got None")
            kind = f"{type(value).__module__}.{type(value).__name__}"
            instead = getattr(type(value), "instead", "convert it with torch.as_tensor")
            raise DTypeError(f"{name} must be a torch.Tensor, got {kind}; {instead}")
        if device is None:
            device = value.device
            if device.type not in ("cpu", "cuda"):
                raise DeviceError(f"{name} must be on a CPU or CUDA device, got {device}")
        elif value.device != device:
            places = [f"{next(iter(given))} is on {device}"]
            for n, v in given.items():
                if isinstance(v, torch.Tensor) and v.device != device:
                    places.append(f"{n} is on {v.device}")
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
