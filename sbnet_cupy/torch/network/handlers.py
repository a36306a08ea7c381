"""The functions that a StackTensor knows, by the function objects that PyTorch hands over."""

import functools
import inspect

import torch
from torch.nn import functional as F

from .._dispatch_state import builtin_functions

HANDLERS = {}
BORDERED = set()  # handlers of functions that know a padding that was put off

# Told from the wrapper alone, which has the image's shape, dtype and device.
METADATA = {
    "size", "dim", "ndimension", "numel", "nelement", "is_floating_point", "is_complex", "stride",
    "element_size", "is_contiguous", "get_device", "__hash__", "__len__", "storage_offset",
    "is_signed", "is_inference", "is_pinned", "is_shared", "has_names", "type_as_metadata",
    "_is_view", "is_conj", "is_neg", "result_type", "is_same_size", "is_tensor", "is_storage",
    "is_nonzero_metadata",
}  # fmt: skip

# Likewise, of tensors that stand for others.
_SIZES = {torch.Tensor.dim, torch.Tensor.size, torch.Tensor.numel, torch.Tensor.is_floating_point}
_ATTRIBUTES = {"shape", "dtype", "device", "ndim", "is_cuda", "requires_grad"}

# Activations, of one pixel and channel, and copies: from what their argument holds where the input
# is 0 follows what the result holds there.
ACTIVATIONS = {
    "relu": "relu", "relu_": "relu", "relu6": "relu6", "silu": "silu", "gelu": "gelu",
    "hardswish": "hardswish", "hardsigmoid": "hardsigmoid", "sigmoid": "sigmoid",
    "sigmoid_": "sigmoid", "tanh": "tanh", "tanh_": "tanh",
}  # fmt: skip
_OTHER_ACTIVATIONS = """
    elu elu_ hardtanh hardtanh_ selu selu_ celu celu_ mish softplus softsign
    tanhshrink softshrink hardshrink log_sigmoid threshold _threshold threshold_ prelu
"""
_COPIES = {"clone", "detach", "contiguous"}
_BOUNDS = {
    "clamp", "clamp_", "clip", "clip_", "clamp_min", "clamp_min_", "clamp_max", "clamp_max_",
}  # fmt: skip
_KEEP_REST = {
    *ACTIVATIONS, "leaky_relu", "leaky_relu_", *_OTHER_ACTIVATIONS.split(), *_BOUNDS, *_COPIES,
}  # fmt: skip

# What has no meaning for a tensor whose memory holds blocks. "register_hook" and "grad" have
# handlers, which take no padding that was put off, and nothing that was kept of an earlier call.
REFUSED = {
    "data_ptr", "untyped_storage", "storage", "_typed_storage", "set_", "resize_", "resize_as_",
    "share_memory_", "pin_memory", "register_hook", "register_post_accumulate_grad_hook",
    "retain_grad", "as_strided", "as_strided_", "__dlpack__", "__cuda_array_interface__", "apply_",
    "map_", "detach_", "swapaxes_", "swapdims_", "transpose_", "squeeze_", "unsqueeze_", "t_",
    "grad",
}  # fmt: skip
INSTEAD = {  # what gives what a refused function would
    "retain_grad": "register_hook or torch.autograd.grad, which give its gradient as an image",
    "resize_as_": "torch.empty_like; nn.CrossMapLRN2d calls it, nn.LocalResponseNorm does not",
}

BINARY = """
    add sub subtract mul multiply div divide true_divide pow maximum minimum fmax fmin where lerp
    addcmul addcdiv eq ne lt le gt ge not_equal greater less greater_equal less_equal logical_and
    logical_or logical_xor fmod remainder floor_divide atan2 rsub masked_fill copysign hypot
    bitwise_and bitwise_or bitwise_xor xlogy logaddexp
    add_ sub_ mul_ div_ masked_fill_ addcmul_ addcdiv_ lerp_ copy_ multiply_ divide_ subtract_
    __add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ __truediv__
    __rtruediv__ __itruediv__ __div__ __rdiv__ __idiv__ __pow__ __rpow__ __ipow__ __eq__ __ne__
    __lt__ __le__ __gt__ __ge__ __and__ __or__ __xor__ __mod__ __floordiv__ __iand__ __ior__
    fill_ zero_
"""
# Of which a tensor of integers is an operand or an index, or gives its shape or dtype alone.
OF_INTEGERS = {
    *BINARY.split(), *_BOUNDS, "__getitem__", "index_select", "cat", "stack", "max", "min", "to",
    "type_as", "expand_as", "view_as", "reshape_as",
}  # fmt: skip

_SPACES = (torch, torch.Tensor, F, builtin_functions, torch.special)


def handles(*names):
    """Register a function for all PyTorch functions and methods of some names."""

    def register(handler):
        for name in names:
            found = [getattr(space, name) for space in _SPACES if hasattr(space, name)]
            for func in found:
                HANDLERS[func] = handler
        return handler

    return register


def is_of_shape(func):
    """Whether a function reads a shape, a dtype or a device, which a tensor without memory has."""
    owner = getattr(func, "__self__", None)  # of an attribute that is read
    return func in _SIZES or getattr(owner, "__name__", None) in _ATTRIBUTES


def keeps_rest(name, given):
    """Whether what a function makes holds, where the input is 0, what it makes of what x holds.

    ``given`` are its arguments after x. Tensors as bounds may differ from pixel to pixel.
    """
    if name in _BOUNDS and any(isinstance(bound, torch.Tensor) for bound in given):
        return False
    return name in _KEEP_REST


@functools.lru_cache(maxsize=4096)
def takes(handler, count, names):
    """Whether a handler takes so many arguments and keywords of these names; some have others."""
    try:
        inspect.signature(handler).bind(None, *range(count), **dict.fromkeys(names))
    except TypeError:
        return False
    return True
