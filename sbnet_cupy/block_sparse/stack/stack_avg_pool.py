"""stack_avg_pool: average pooling of a stack, across the borders of blocks."""

import functools
from typing import Any

from ...core.arrays import array_function, compute_dtype, namespace
from ...core.checks import check_flag
from ...core.operator import Operator
from .block_table import TABLE_ARRAYS, TABLE_SIZES
from .neighbours import Places
from .pooling import (
    call_pool,
    check_divisor,
    parts,
    pixels_in_windows,
    plan_call,
    read_windows,
    reduce_windows,
    resolve_call,
)
from .stack_pool_launch import prepare_stack_avg_pool
from .taps import clear_unlisted


@array_function
def stack_avg_pool(
    x, table, *, kernel, strides=None, padding: Any = 0, ceil_mode=False, count_include_pad=True,
    divisor=None, out=None,
):  # fmt: skip
    """Average each window of a stack.

    ``y[p, q, c] = (sum x[p * sh - top + r, q * sw - left + s, c]) / d`` for all ``(p, q)`` of
    active blocks. Pixels in no active block count as 0, those outside the image are not summed. The
    divisor ``d`` is the number of the window's pixels that are in the image or its padding; those
    in the image alone, with ``count_include_pad=False``; or ``divisor``. The sum is in float32
    (float64 for float64) and rounded once. The result is the stack of the stage
    ``table.after_conv(kernel, strides, padding, ceil_mode=ceil_mode)``.

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
    ceil_mode : bool
        Also take a last window that sticks out at the end, as in PyTorch.
    count_include_pad : bool
        Whether pixels of the padding count in the divisor.
    divisor : number, optional
        Divides every sum instead.
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

    Source: the dense layer on masked images; the divisors are those of PyTorch's AvgPool2d. Kernel:
    cuda_src/block_sparse/stack/stack_avg_pool.cu

    Examples
    --------
    >>> import numpy as np
    >>> table = block_table(np.ones((1, 2, 2)), 2)
    >>> x = np.ones((1, 2, 2, 1))
    >>> stack_avg_pool(x, table, kernel=3, strides=1, padding=1)[0, :, :, 0]
    array([[0.44444444, 0.44444444],
           [0.44444444, 0.44444444]])
    """
    options = (kernel, strides, padding, ceil_mode, count_include_pad, divisor)
    return call_pool(STACK_AVG_POOL, x, table, options, out)


def _resolve(specs, options):
    """Check all arguments; return the specs of result and table, and the Window."""
    block_size, image_size, kernel, strides, padding, ceil_mode, *counting = options
    window_options = (kernel, strides, padding, 1, ceil_mode)
    resolved = resolve_call(specs, (block_size, image_size), window_options)
    check_counting(*counting)
    return resolved


def _infer(specs, options):
    """Check all arguments; return the spec of the result."""
    return _resolve(specs, options)[:1]


def _plan(specs, options):
    """Check all arguments; return the plan of the call."""
    resolved = _resolve(specs, options)
    counting = dict(zip(("count_include_pad", "divisor"), options[-2:], strict=True))
    prepare = functools.partial(prepare_stack_avg_pool, **counting)
    body = functools.partial(_avg_pool, window=resolved[2], **counting)
    return plan_call(specs, resolved, prepare, body)


def _avg_pool(x, table, out, *, window, count_include_pad, divisor):
    """Sum blocks with their rims, some rows at a time, and divide."""
    xp, total, places = namespace(x), compute_dtype(x.dtype), Places.of(table)
    for part in parts(places, x, window):
        rows = places.part(part)
        sums = reduce_windows(read_windows(x, rows, window, total), window, xp.add)
        sums /= divisors(rows, window, count_include_pad, divisor, total)
        out[part] = sums
    clear_unlisted(out, places)


def check_counting(count_include_pad, divisor):
    """Check the options that decide the divisor."""
    check_flag("count_include_pad", count_include_pad)
    check_divisor(divisor)


def divisors(places, window, count_include_pad, divisor, dtype):
    """Return what the sums are divided by: [m, P, Q, 1], or a number; 1 for an empty window."""
    if divisor is not None:
        return dtype.type(divisor)
    xp = namespace(places.n)
    counts = [pixels_in_windows(places, window, axis, bool(count_include_pad)) for axis in (0, 1)]
    area = counts[0][:, :, None] * counts[1][:, None, :]
    return xp.maximum(area, 1).astype(dtype)[..., None]


STACK_AVG_POOL = Operator(
    "stack_avg_pool",
    arrays=("x", *TABLE_ARRAYS, "out"),
    options=(
        *TABLE_SIZES, "kernel", "strides", "padding", "ceil_mode", "count_include_pad", "divisor",
    ),
    infer=_infer,
    plan=_plan,
)  # fmt: skip
