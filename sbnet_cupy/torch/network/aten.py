"""ATen operators, which graphs of torch.export call, as the public functions that do the same.

So are norms of ``torch``, which have their weights before the statistics.
"""

import functools
import inspect
import sys
import types

import torch
from torch.nn import functional as F

from .._dispatch_state import argument_names, aten_operator
from .handlers import HANDLERS, METADATA, REFUSED


def public(func, args, kwargs):
    """Return (function, args, kwargs) of the public function for an operator's call.

    A call of anything else is returned as it is.
    """
    name, made = aten_operator(func), None
    if name is None:
        made = _NORMS.get(func)
    elif args:
        made = _OTHERS.get(name) or _by_name(func, name.split(".")[0], len(args), tuple(kwargs))
    return (func, args, kwargs) if made is None else made(*args, **kwargs)


@functools.lru_cache(maxsize=4096)
def _by_name(operator, name, count, keywords):
    """Return what makes a call of the function of an operator's name, or None."""
    for space in (torch, torch.Tensor, F):
        function = getattr(space, name, None)
        known = function in HANDLERS or (function is not None and name in METADATA | REFUSED)
        if known and _takes_as(function, operator, count, keywords):
            return functools.partial(_call, function)
    function = getattr(F, name[:-1], None) if name.endswith("_") else None
    if function not in HANDLERS or not _takes_as(function, operator, count, (*keywords, "inplace")):
        return None
    return functools.partial(_call, function, inplace=True)


def _takes_as(function, operator, count, keywords):
    """Whether a function means by so many arguments, and these keywords, what an operator does.

    What is written in C++ is made from the operator's own schema.
    """
    if not isinstance(function, types.FunctionType):
        return "inplace" not in keywords
    given, known = argument_names(operator), list(inspect.signature(function).parameters)
    same = given is not None and known[1:count] == given[1:count]
    return same and set(keywords) <= set(known[count:])


def _call(function, *args, **kwargs):
    return function, args, kwargs


def _batch_norm(
    input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled
):
    norm = running_mean, running_var, weight, bias
    return F.batch_norm, (input, *norm, training, momentum, eps), {}


def _instance_norm(
    input, weight, bias, running_mean, running_var, use_input_stats, momentum, eps, cudnn_enabled
):
    norm = running_mean, running_var, weight, bias
    return F.instance_norm, (input, *norm, use_input_stats, momentum, eps), {}


def _alias(x):
    return torch.Tensor.__getitem__, (x, (slice(None),)), {}


def _slice(x, dim=0, start=None, end=None, step=1):
    end = None if end == sys.maxsize else end
    part = slice(start or None, end, None if step == 1 else step)
    index = (slice(None),) * (dim % x.dim()) + (part,)
    return torch.Tensor.__getitem__, (x, index), {}


def _to(x, *, layout=torch.strided, pin_memory=None, **rest):
    if layout not in (None, torch.strided) or pin_memory:
        given = {"layout": layout, "pin_memory": pin_memory}
        return torch.ops.aten.to.dtype_layout, (x,), given | rest
    return torch.Tensor.to, (x,), rest


def _index(x, indices):
    index = tuple(slice(None) if i is None else i for i in indices)
    return torch.Tensor.__getitem__, (x, index), {}


def _nearest(mode, x, output_size, scale_factors):
    return F.interpolate, (x, output_size, scale_factors, mode), {}


def _bilinear(x, output_size, align_corners, scale_factors):
    return F.interpolate, (x, output_size, scale_factors, "bilinear", align_corners), {}


_NORMS = {torch.batch_norm: _batch_norm, torch.instance_norm: _instance_norm}
# Operators whose functions have other names, or take other arguments. Those that are made here have
# the operators' own after the first.
_OTHERS = {
    "alias.default": _alias,
    "batch_norm.default": _batch_norm,
    "slice.Tensor": _slice,
    "index.Tensor": _index,
    "instance_norm.default": _instance_norm,
    "linalg_vector_norm.default": functools.partial(_call, torch.linalg.vector_norm),
    "log_sigmoid.default": functools.partial(_call, F.logsigmoid),
    "sym_size.int": functools.partial(_call, torch.Tensor.size),
    "to.dtype_layout": _to,
    "upsample_nearest2d.vec": functools.partial(_nearest, "nearest"),
    "_upsample_nearest_exact2d.vec": functools.partial(_nearest, "nearest-exact"),
    "upsample_bilinear2d.vec": _bilinear,
}
