"""Gradients of ``activation(values * scale + shift)``, which follows a read or a convolution."""

from typing import Any, NamedTuple

from .._arrays import compute_dtype, namespace
from .activation import activation_grad


class AffineGradients(NamedTuple):
    """Of the values, in float32 or float64; of scale and shift, in their own dtypes."""

    values: Any
    scale: Any
    shift: Any


def affine_grad(grad, values, scale, shift, activation, channel_axis, inside=None):
    """Return the gradients for the result's gradient ``grad``; None for a table that is None.

    ``values`` are what scale, shift and activation were applied to, of shape (N, H, W, C) or
    (N, C, H, W). Where ``inside`` is given and False, nothing was computed: the gradient is 0.
    ``values`` may be None where nothing depends on them: no scale and no activation.
    """
    xp, wide = namespace(grad), compute_dtype(grad.dtype)
    per_channel = [1] * grad.ndim
    per_channel[channel_axis] = -1
    factor, offset = (
        None if table is None else table.astype(wide, copy=False).reshape(per_channel)
        for table in (scale, shift)
    )
    grad = grad.astype(wide, copy=False)
    values = None if values is None else values.astype(wide, copy=False)
    if activation is not None:
        before = values if factor is None else values * factor
        grad = activation_grad(grad, before if offset is None else before + offset, activation)
    if inside is not None:
        grad = xp.where(inside, grad, wide.type(0))
    return AffineGradients(
        values=grad if factor is None else grad * factor,
        scale=None if scale is None else channel_sums(grad * values, channel_axis, scale.dtype),
        shift=None if shift is None else channel_sums(grad, channel_axis, shift.dtype),
    )


def channel_sums(array, channel_axis, dtype):
    """Sum over all axes but one, then round to ``dtype``.

    An axis at a time: few additions in a row lose few digits.
    """
    for axis in reversed(range(array.ndim)):
        if axis != channel_axis % array.ndim:
            array = array.sum(axis=axis, keepdims=True, dtype=array.dtype)
    return array.reshape(-1).astype(dtype, copy=False)
