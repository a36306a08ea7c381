"""affine_grad: gradients of ``activation(x * scale + shift)``, after a read or a convolution.

A building block of the ops' gradients: their checks are done, and so none are made here.
"""

import functools
from typing import Any, NamedTuple

import numpy as np

from ..core import launch as kernels
from ..core.arrays import compute_dtype, empty, namespace, vector_bytes
from ..core.compile import cpp_name
from ..core.launch import THREADS
from ..core.operator import Operator, Plan
from .activation import ACTIVATIONS, activation_grad

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
    if scale is None and shift is None and activation is None and inside is None:
        return AffineGradients(grad, None, None)
    arrays = (grad, x, scale, shift, inside)
    dx, dscale, dshift = AFFINE_GRAD.plan_for(arrays, (activation, channels_last)).run(*arrays)
    return AffineGradients(
        x=grad if dx is None else dx,
        scale=None if scale is None or x is None else dscale.astype(scale.dtype, copy=False),
        shift=None if shift is None else dshift.astype(shift.dtype, copy=False),
    )


def _infer(specs, options):
    """Return the specs of the gradients of x, scale and shift; None where there is none."""
    grad, x, scale, shift, _ = specs
    return (
        grad.new(grad.shape),
        None if scale is None or x is None else scale.new(scale.shape),
        None if shift is None else shift.new(shift.shape),
    )


def _plan(specs, options):
    """Return the plan of the call, whose sums are not rounded yet; dx is None where it is grad."""
    grad, _, scale, _, inside = specs
    activation, channels_last = options
    same = scale is None and activation is None and inside is None
    fixed = {"activation": activation, "channels_last": channels_last, "same": same}
    if grad.on_gpu and grad.size:
        return Plan(_infer(specs, options), _affine_grad_cuda(specs, **fixed))
    return Plan(_infer(specs, options), functools.partial(_affine_grad_numpy, **fixed))


@np.errstate(all="ignore")  # what overflows is infinite, with no warning, as on a GPU
def _affine_grad_numpy(grad, x, scale, shift, inside, *, activation, channels_last, same):
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


def _affine_grad_cuda(specs, *, activation, channels_last, same):
    """One pass that writes dx, and sums over groups of pixels; then the groups are added up."""
    grad, x, scale, shift, _ = specs
    wide, channels = compute_dtype(grad.dtype), grad.shape[3 if channels_last else 1]
    tables = [table for table in (scale, shift) if table is not None]
    dtype = tables[0].dtype if tables else np.dtype(np.float32)
    as_they_are = all(table.dtype == dtype and table.contiguous for table in tables)
    dtype = dtype if as_they_are else wide
    groups, launch = prepare_sums(grad, x, dtype, activation, channels, channels_last)

    def run(grad, x, scale, shift, inside):
        if not as_they_are:
            xp = namespace(grad)
            scale, shift = (
                t if t is None else xp.ascontiguousarray(t, wide) for t in (scale, shift)
            )
        dx = None if same else empty(grad.shape, grad.dtype, grad)
        sums = empty((2, groups, channels), wide, grad) if tables else None
        launch(grad, x, scale, shift, inside, dx, sums)
        return (dx, None, None) if sums is None else (dx, *sums.sum(axis=1))

    return run


def prepare_sums(grad, x, dtype, activation, channels, channels_last):
    """Return how many groups of pixels are summed up, and the launch.

    ``dtype`` is that of scale and shift. The choice depends on shapes and alignments alone.
    """
    item = grad.dtype.itemsize
    pixels = grad.size // channels
    area = grad.shape[1] * grad.shape[2] if channels_last else grad.shape[2] * grad.shape[3]
    contiguous = channels if channels_last else area
    alignments = [spec.alignment for spec in (grad, x) if spec is not None]
    vector = max(vector_bytes(contiguous * item, *alignments), item)
    count = vector // item
    width, steps = (channels // count, pixels) if channels_last else (channels, pixels // count)
    lanes = min(32, 1 << (width - 1).bit_length()) if channels_last else 1
    tiles = -(-width // lanes)
    rows = THREADS // lanes
    # At least four loads for each thread, and enough groups of all tiles to fill a GPU.
    group = max(4 * rows, -(-steps * tiles // (_GROUPS * rows)) * rows)
    groups = -(-steps // group)
    template = (
        cpp_name(grad.dtype, "grad"),
        f"Bytes<{vector}>::type",
        cpp_name(dtype, "scale"),
        ACTIVATIONS.index(activation),
        channels_last,
        lanes,
    )
    sizes = (pixels, area, channels, group, groups)
    launch = kernels.prepare(
        "dense/affine_grad", "affine_grad", template, tiles * groups, THREADS, 7, sizes,
        persistent=True, dependent=True,
    )  # fmt: skip
    return groups, launch


AFFINE_GRAD = Operator(
    "affine_grad",
    arrays=("grad", "x", "scale", "shift", "inside"),
    options=("activation", "channels_last"),
    infer=_infer,
    plan=_plan,
    results=(),
)
