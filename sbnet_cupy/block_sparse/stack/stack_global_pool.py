"""stack_global_pool: the mean, maximum or sum of each image, from its active blocks."""

import functools
import math

import numpy as np

from ...core.arrays import array_function, compute_dtype, is_cupy, namespace, vector_bytes
from ...core.checks import check_result
from ...core.compile import cpp_name
from ...core.operator import Operator
from ...dense.conv2d import check_choice
from ..corners import CHUNK_BYTES
from .block_table import TABLE_ARRAYS, TABLE_SIZES, BlockTable
from .checks import check_stack
from .fetch import fetch
from .neighbours import Axis, Places
from .per_image import reduce_rows
from .pooling import call_pool, run_plan
from .stack_pixel_mask import inside
from .stack_pool_launch import StackPool, prepare_stack_global_pool

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

    Source: the dense layer on masked images. Kernel:
    cuda_src/block_sparse/stack/stack_global_pool.cu

    Examples
    --------
    >>> import numpy as np
    >>> table = block_table(np.eye(4)[None], 2)
    >>> x = np.ones((2, 2, 2, 1))
    >>> stack_global_pool(x, table), stack_global_pool(-x, table, mode="max")
    (array([[0.5]]), array([[0.]]))
    """
    return call_pool(STACK_GLOBAL_POOL, x, table, (mode,), out)


def _resolve(specs, options):
    """Check all arguments; return the specs of the result and of the table."""
    x, *arrays, out = specs
    *sizes, mode = options
    check_choice("mode", mode, MODES)
    table = BlockTable(*arrays, *sizes)
    check_stack("x", x, table)
    result = x.new((table.batch, x.shape[3]))
    check_result(out, result)
    return result, table


def _infer(specs, options):
    """Check all arguments; return the spec of the result."""
    return _resolve(specs, options)[:1]


def _plan(specs, options):
    """Check all arguments; return the plan of the call."""
    (result, table), x, mode = _resolve(specs, options), specs[0], options[-1]
    launch = None
    if x.on_gpu and x.size and result.size and table.grid.size:
        pool = StackPool(
            element=cpp_name(x.dtype, "x"), element_bytes=x.dtype.itemsize, rows=table.capacity,
            images=table.batch, grid=tuple(map(int, table.grid.shape[1:])), channels=x.shape[3],
            block=table.block_size, image=table.image_size, alignment=vector_bytes(x.alignment),
        )  # fmt: skip
        launch = prepare_stack_global_pool(pool, mode)
    return run_plan(result, table, launch, functools.partial(_reduce, mode=mode))


def _reduce(x, table, out, *, mode):
    """Reduce each block, then the blocks of each image."""
    xp, places = namespace(x), Places.of(table)
    out[...] = (
        _largest(x, places) if mode == "max" else _sums(x, places, compute_dtype(x.dtype), mode, xp)
    )


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


STACK_GLOBAL_POOL = Operator(
    "stack_global_pool",
    arrays=("x", *TABLE_ARRAYS, "out"),
    options=(*TABLE_SIZES, "mode"),
    infer=_infer,
    plan=_plan,
)
