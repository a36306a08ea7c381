"""stack_global_pool: the mean, maximum or sum of each image, from its active blocks."""

import math

import numpy as np

from ...core.arrays import array_function, compute_dtype, empty, is_cupy, namespace
from ...core.checks import check_out
from ...dense.conv2d import check_choice
from ..corners import CHUNK_BYTES
from .checks import check_stack, computing
from .fetch import fetch
from .neighbours import Axis, Places
from .per_image import reduce_rows
from .stack_pixel_mask import inside

MODES = ("mean", "max", "sum")


@array_function
def stack_global_pool(x, table, *, mode="mean", out=None):
    """Reduce each image of a stack to one value a channel.

    ``y[n, c]`` is the mean, the maximum or the sum over all ``H * W`` pixels of image ``n``, of
    which those in no active block are 0: the dense layer on masked images. So the divisor of the
    mean is ``H * W`` however many blocks are active, and the maximum is at least 0 unless all are.
    An image without pixels gives 0. Sums are in float32 (float64 for float64), in a fixed order,
    and rounded once. :func:`stack_per_block` brings such values back to the blocks.

    Parameters
    ----------
    x : array, shape (M, b_h, b_w, C)
        Stack; float16, bfloat16, float32 or float64. C-contiguous.
    table : BlockTable
        Of the stage of ``x``.
    mode : "mean", "max" or "sum"
        What is computed.
    out : array, shape (N, C), optional
        Receives the result; it is returned.

    Returns
    -------
    y : array, shape (N, C)
        In the dtype and library of ``x``.

    Raises
    ------
    ShapeError
        If sizes do not fit together.
    DTypeError
        If ``x`` is not of a floating dtype, or ``table`` no BlockTable.
    ValueError
        If ``mode`` is none of those above.

    Source: the dense layer on masked images.

    Examples
    --------
    >>> import numpy as np
    >>> table = block_table(np.eye(4)[None], 2)
    >>> x = np.ones((2, 2, 2, 1))
    >>> stack_global_pool(x, table), stack_global_pool(-x, table, mode="max")
    (array([[0.5]]), array([[0.]]))
    """
    check_choice("mode", mode, MODES)
    check_stack("x", x, table)
    xp, total = namespace(x), compute_dtype(x.dtype)
    shape = (table.batch, x.shape[3])
    if out is None:
        out = empty(shape, x.dtype, x)
    else:
        check_out(out, shape, x.dtype, x, (("x", x), ("table", table.grid)))
    with computing(x):
        places = Places.of(table)
        out[...] = _largest(x, places) if mode == "max" else _sums(x, places, total, mode, xp)
    return out


def _sums(x, places, total, mode, xp):
    values = _of_blocks(x, places, total, lambda pixels: pixels.sum(axis=1, dtype=total), 0)
    sums = reduce_rows(values, places, "add", 0)
    return sums / max(math.prod(places.table.image_size), 1) if mode == "mean" else sums


def _largest(x, places):
    """Maximum of the active pixels, and of 0 where an image has others."""
    xp = namespace(x)
    values = _of_blocks(x, places, x.dtype, lambda pixels: pixels.max(axis=1), -np.inf)
    result = reduce_rows(values, places, "maximum", -np.inf)
    zero = xp.zeros((), x.dtype)
    return xp.where(all_active(places), result, xp.maximum(result, zero))


def all_active(places):
    """Return bool [N, 1]: whether an image has pixels and all are in active blocks."""
    table = places.table
    counts = inside(places).sum(axis=(1, 2), dtype=np.int64)
    pixels = math.prod(table.image_size)
    return (reduce_rows(counts, places, "add", 0) == pixels) & (pixels > 0)


def _of_blocks(x, places, dtype, reduce, fill):
    """Reduce the pixels of each block that are in the image: [m, C]."""
    xp, (bh, bw), channels = namespace(x), places.table.block_size, x.shape[3]
    values = xp.empty((len(places), channels), dtype)
    row_bytes = bh * bw * channels * dtype.itemsize
    step = len(places) if is_cupy(x) else CHUNK_BYTES // max(row_bytes, 1)
    for start in range(0, len(places), max(step, 1)):
        part = slice(start, min(start + max(step, 1), len(places)))
        pixels = xp.empty((part.stop - part.start, bh, bw, channels), dtype)
        fetch(x, places.part(part), Axis(0, 1, bh), Axis(0, 1, bw), pixels, fill)
        values[part] = reduce(pixels.reshape(len(pixels), bh * bw, channels))
    return values
