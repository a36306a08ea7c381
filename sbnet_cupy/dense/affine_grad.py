"""affine_grad: gradients of ``activation(x * scale + shift)``, after a read or a convolution.

A building block of the ops' gradients: their checks are done, and so none are made here.
"""

from typing import Any, NamedTuple

import numpy as np

from ..core import launch as kernels
from ..core.arrays import address, compute_dtype, empty, is_cupy, namespace, vector_bytes
from ..core.compile import cpp_name
from ..core.launch import THREADS
from ..core.plans import Plans
from .activation import ACTIVATIONS, activation_grad, same_dtype

_GROUPS = 1024  # sums of one channel that are added up at the end, about


class AffineGradients(NamedTuple):
    """Gradients in the dtypes of ``grad``, ``scale`` and ``shift``; None where there is none."""

    x: Any
    scale: Any
    shift: Any


def affine_grad(grad, x, scale, shift, activation, channels_last, inside=None):
    """Return the gradients of ``activation(x * scale + shift)`` for the gradient ``grad`` of that.

    ``grad`` and ``x`` are (N, H, W, C) or (N, C, H, W), of one dtype. Where ``inside``, bool, one
    channel, is False, nothing was computed: the gradient is 0. ``x`` may be None, for no gradient
    of ``scale``, where there is no activation. ``grad`` itself comes back where it is the
    gradient. Computed in float32 (float64 for float64) and rounded once; see
    cuda_src/dense/affine_grad.cu.

    Examples
    --------
    >>> ones = np.ones((1, 1, 3, 1))
    >>> affine_grad(ones, 2 * ones, np.array([3.0]), np.array([0.5]), "relu", True)[1:]
    (array([6.]), array([3.]))
    """
    same = scale is None and activation is None and inside is None
    if same and shift is None:
        return AffineGradients(grad, None, None)
    body = _affine_grad_cuda if is_cupy(grad) and grad.size else _affine_grad_numpy
    dx, dscale, dshift = body(grad, x, scale, shift, activation, channels_last, inside, same)
    return AffineGradients(
        x=grad if same else dx,
        scale=None if scale is None or x is None else dscale.astype(scale.dtype, copy=False),
        shift=None if shift is None else dshift.astype(shift.dtype, copy=False),
    )


_PLANS = Plans()


@np.errstate(all="ignore")  # what overflows is infinite, with no warning, as on a GPU
def _affine_grad_numpy(grad, x, scale, shift, activation, channels_last, inside, same):
    """Return dx, dscale and dshift, the sums not yet rounded."""
    xp, wide = namespace(grad), compute_dtype(grad.dtype)
    per_channel = (-1,) if channels_last else (-1, 1, 1)
    factor, offset = (
        None if table is None else table.astype(wide, copy=False).reshape(per_channel)
        for table in (scale, shift)
    )
    g = grad.astype(wide, copy=False)
    x = None if x is None else x.astype(wide, copy=False)
    if activation is not None:
        before = x if factor is None else x * factor
        g = activation_grad(g, before if offset is None else before + offset, activation)
    if inside is not None:
        g = xp.where(inside, g, wide.type(0))
    dx = None if same else (g if factor is None else g * factor).astype(grad.dtype, copy=False)
    dscale = None if factor is None or x is None else _channel_sums(g * x, channels_last)
    return dx, dscale, None if offset is None else _channel_sums(g, channels_last)


def _channel_sums(array, channels_last):
    """Sum over all axes but one, an axis at a time: few additions in a row lose few digits."""
    for axis in (2, 1, 0) if channels_last else (3, 2, 0):
        array = array.sum(axis=axis, keepdims=True, dtype=array.dtype)
    return array.reshape(-1)


def _affine_grad_cuda(grad, x, scale, shift, activation, channels_last, inside, same):
    """One pass that writes dx, and sums over groups of pixels; then the groups are added up."""
    wide = compute_dtype(grad.dtype)
    scale, shift = same_dtype(scale, shift, wide)
    dx = None if same else empty(grad.shape, grad.dtype, grad)
    channels = grad.shape[3 if channels_last else 1]
    arrays = (grad, x, scale, shift, inside, dx)
    key = _PLANS.key(arrays, (activation, channels_last))
    plan = _PLANS.get(key) or _PLANS.keep(key, _plan(*arrays, activation, channels, channels_last))
    sums = None
    if scale is not None or shift is not None:
        sums = empty((2, plan.groups, channels), wide, grad)
    plan.run(*arrays, sums)
    return (dx, None, None) if sums is None else (dx, *sums.sum(axis=1))


class _Launch(NamedTuple):
    """The kernel with its parameters, and how many groups of pixels it sums up."""

    groups: int
    run: Any


def _plan(grad, x, scale, shift, inside, dx, activation, channels, channels_last):
    """Choose vectors and groups by shapes and alignments alone."""
    item = grad.dtype.itemsize
    pixels = grad.size // channels
    area = grad.shape[1] * grad.shape[2] if channels_last else grad.shape[2] * grad.shape[3]
    contiguous = channels if channels_last else area
    addresses = [address(array) for array in (grad, x, dx) if array is not None]
    vector = max(vector_bytes(contiguous * item, *addresses), item)
    count = vector // item
    width, steps = (channels // count, pixels) if channels_last else (channels, pixels // count)
    lanes = min(32, 1 << (width - 1).bit_length()) if channels_last else 1
    tiles = -(-width // lanes)
    rows = THREADS // lanes
    # At least four loads for each thread, and enough groups of all tiles to fill a GPU.
    group = max(4 * rows, -(-steps * tiles // (_GROUPS * rows)) * rows)
    groups = -(-steps // group)
    table = scale if scale is not None else shift
    template = (
        cpp_name(grad.dtype, "grad"),
        f"Bytes<{vector}>::type",
        "float" if table is None else cpp_name(table.dtype, "scale"),
        ACTIVATIONS.index(activation),
        channels_last,
        lanes,
    )
    sizes = (pixels, area, channels, group, groups)
    launch = kernels.prepare(
        "dense/affine_grad", "affine_grad", template, tiles * groups, THREADS, 7, sizes,
        persistent=True,
    )
    return _Launch(groups, launch)
