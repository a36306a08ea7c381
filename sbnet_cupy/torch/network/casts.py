"""Autocast: to which dtype functions convert what they are given.

A convolution that waits takes the dtype of its call, and converts its input and weights itself when
it is computed; autocast is off then. So weights are converted once, and a call may be computed
where autocast is another than where it was made.
"""

import contextlib
import functools

import torch

from .._dispatch_state import without_modes


def dtype_for(x):
    """Return the dtype to which autocast converts now, on the device of x; None where it is off."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def for_waiting(table):
    """Return the dtype to which what waits in a call converts, or None, as where nothing waits."""
    return None if table.weights is None else dtype_for(table)


def is_cast(dtype, to):
    """Whether autocast with the dtype ``to``, or None, converts tensors of a dtype."""
    return to is not None and dtype.is_floating_point and dtype != torch.float64


def after(dtype, to):
    """Return the dtype of a tensor of a dtype that was cast."""
    return to if is_cast(dtype, to) else dtype


def cast(tensor, to):
    """Return a tensor, or None, as autocast with the dtype ``to`` converts it."""
    same = tensor is None or after(tensor.dtype, to) == tensor.dtype
    return tensor if same else tensor.to(to)


def dtype_in(x, func, *args):
    """Return the dtype of what ``func(x, *args)`` makes of a floating-point ``[N, C, H, W]``.

    Under autocast it is wider than that of x where PyTorch computes the function in float32.
    """
    to = dtype_for(x)
    return x.dtype if to is None else _tried(func, args, x.dtype, x.device, to)


def widened(x, func, *args):
    """Return a tensor ``[N, C, H, W]`` in the dtype in which ``func(x, *args)`` is computed."""
    dtype = dtype_in(x, func, *args)
    return x if x.dtype == dtype else x.to(dtype)


@functools.cache
def _tried(func, args, dtype, device, to):
    with torch.inference_mode(), torch.autocast(device.type, to), without_modes():
        return func(torch.zeros(1, 1, 2, 2, dtype=dtype, device=device), *args).dtype


def off(device):
    """Return a context without autocast, for what was converted before."""
    if not torch.is_autocast_enabled(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)
