"""stack_max_pool: max pooling of a stack, across the borders of blocks."""

import functools
from typing import Any

import numpy as np

from ...core.arrays import array_function, is_cupy, namespace
from ...core.operator import Operator
from .block_table import TABLE_ARRAYS, TABLE_SIZES
from .neighbours import Places
from .pooling import (
    call_pool,
    parts,
    pixels_in_windows,
    plan_call,
    read_windows,
    reduce_windows,
    resolve_call,
)
from .stack_pool_launch import prepare_stack_max_pool
from .taps import clear_unlisted


@array_function
def stack_max_pool(
    x, table, *, kernel, strides=None, padding: Any = 0, dilation: Any = 1, ceil_mode=False,
    out=None,
):  # fmt: skip
    """Take the maximum of each window of a stack.

    ``y[p, q, c] = max x[p * sh - top + r * dh, q * sw - left + s * dw, c]`` over the pixels of the
    window that are in the image, for all ``(p, q)`` of active blocks. Pixels in no active block are
    0 and count; those outside the image do not. NaN is larger than all. The result is the stack of
    the stage ``table.after_conv(kernel, strides, padding, dilation, ceil_mode=ceil_mode)``; a
    window without a pixel of the image gives 0, where PyTorch's dense layer gives -inf. A pixel of
    the result has one only where the padding is as wide as the window, or the whole height or
    width of the image lies between the taps of a dilated window.

    Parameters
    ----------
    x : array, shape (M, b_h, b_w, C)
        Stack; float16, bfloat16, float32 or float64. C-contiguous.
    table : BlockTable
        Of the stage of ``x``.
    kernel : int or (int, int)
        Size of the window.
    strides : int or (int, int), optional
        Steps between windows, which must divide the block size; ``kernel`` by default.
    padding : int, (int, int), ((top, bottom), (left, right)), "SAME" or "VALID"
        As for :func:`stack_conv2d`.
    dilation : int or (int, int)
        Distance between the pixels of a window.
    ceil_mode : bool
        Also take a last window that sticks out at the end, as in PyTorch.
    out : array, optional
        Receives the result; it is returned.

    Returns
    -------
    y : array, shape (M, b_h / sh, b_w / sw, C)
        In the dtype and library of ``x``. Rows that are no block are 0.

    Raises
    ------
    ShapeError
        If a size is wrong, or the result is larger than the blocks.
    DTypeError
        If ``x`` is not of a floating dtype, or ``table`` no BlockTable.

    Source: the dense layer on masked images. Kernel:
    cuda_src/block_sparse/stack/stack_max_pool.cu

    Examples
    --------
    >>> import numpy as np
    >>> table = block_table(np.ones((1, 3, 4)), 2)
    >>> x = stack_from_image(-np.arange(1.0, 13.0).reshape(1, 3, 4, 1), table)
    >>> y = stack_max_pool(x, table, kernel=3, strides=2, padding=1)
    >>> y[:, 0, 0, 0]
    array([-1., -2., -5., -6.])
    """
    options = (kernel, strides, padding, dilation, ceil_mode)
    return call_pool(STACK_MAX_POOL, x, table, options, out)


def _infer(specs, options):
    """Check all arguments; return the spec of the result."""
    return resolve_call(specs, options[:2], options[2:])[:1]


def _plan(specs, options):
    """Check all arguments; return the plan of the call."""
    resolved = resolve_call(specs, options[:2], options[2:])
    body = functools.partial(_max_pool, window=resolved[2])
    return plan_call(specs, resolved, prepare_stack_max_pool, body)


def _max_pool(x, table, out, *, window):
    """Reduce blocks with their rims, some rows at a time."""
    places = Places.of(table)
    for part in parts(places, x, window):
        out[part] = largest(x, places.part(part), window)[1]
    clear_unlisted(out, places)


def largest(x, places, window):
    """Return the blocks of some rows with their rims, and the maximum of each window."""
    xp = namespace(x)
    halo = read_windows(x, places, window, x.dtype, fill=-np.inf)
    y = reduce_windows(halo, window, xp.maximum)
    empty_lines = [pixels_in_windows(places, window, axis) == 0 for axis in (0, 1)]
    missed = empty_lines[0][:, :, None] | empty_lines[1][:, None, :]
    if is_cupy(x) or missed.any():
        xp.copyto(y, xp.zeros((), y.dtype), where=missed[..., None])
    return halo, y


STACK_MAX_POOL = Operator(
    "stack_max_pool",
    arrays=("x", *TABLE_ARRAYS, "out"),
    options=(
        *TABLE_SIZES, "kernel", "strides", "padding", "dilation", "ceil_mode",
    ),
    infer=_infer,
    plan=_plan,
)  # fmt: skip
