"""stack_halo: each block with a rim of pixels from the blocks around it."""

import functools
from typing import Any

import numpy as np

from ...core.arrays import array_function, empty, is_cupy, vector_bytes
from ...core.checks import check_result, check_written
from ...core.operator import Operator, Plan
from ...core.sizes import is_integer, pair
from ...errors import ShapeError
from .block_table import TABLE_ARRAYS, TABLE_SIZES, BlockTable, split_table
from .checks import check_stack, computing
from .neighbours import Axis, Places, fetch_by_slices
from .stack_launch import StackHalo, lowest_bits, prepare_stack_halo

FILLS = (0, "-inf", "edge")


@array_function
def stack_halo(x, table, pads, *, fill: Any = 0, out=None):
    """Give each block of a stack a rim of pixels from the blocks around it.

    ``y[m, i, j, c]`` is the pixel ``(hi * b_h - top + i, wi * b_w - left + j)`` of image ``n``,
    with ``(n, hi, wi)`` the place of row ``m``: from the block that has it, or 0 where that block
    is not active. Outside the image it is ``fill``, whatever the memory of blocks that stick out
    holds. Rows that are no block are 0.

    Parameters
    ----------
    x : array, shape (M, b_h, b_w, C)
        Stack; float16, bfloat16, float32 or float64. C-contiguous.
    table : BlockTable
        Of the stage of ``x``.
    pads : int, (int, int) or ((top, bottom), (left, right))
        Width of the rim. It may be wider than a block.
    fill : 0, "-inf" or "edge"
        What lies outside the image: 0 as for a convolution, minus infinity as for max pooling, or
        the nearest pixel of the image as for interpolation. (With "edge", a block from whose rim
        no pixel is in the image holds nothing that is defined.)
    out : array, optional
        Receives the result; it is returned.

    Returns
    -------
    y : array, shape (M, b_h + top + bottom, b_w + left + right, C)
        In the dtype and library of ``x``.

    Raises
    ------
    ShapeError
        If a size is wrong, or ``x`` is not contiguous.
    DTypeError
        If ``x`` is not of a floating dtype, or ``table`` no BlockTable.
    ValueError
        If ``fill`` is none of those above.

    Source: the block with its halo of Ren et al. 2018, arXiv:1801.02108, section 3.1, read from a
    stack instead of an image. Kernel: cuda_src/block_sparse/stack/stack_halo.cu

    Examples
    --------
    >>> import numpy as np
    >>> table = block_table(np.ones((1, 2, 3)), 2)
    >>> x = stack_from_image(np.arange(1.0, 7.0).reshape(1, 2, 3, 1), table)
    >>> stack_halo(x, table, 1)[0, :, :, 0]
    array([[0., 0., 0., 0.],
           [0., 1., 2., 3.],
           [0., 4., 5., 6.],
           [0., 0., 0., 0.]])
    """
    arrays, sizes = split_table(table)
    options = (*sizes, pads, fill)
    plan = STACK_HALO.plan_for((x, *arrays, out), options)
    if out is None:
        out = empty(plan.shape, x.dtype, x)
    else:
        check_written(out, ("x", *TABLE_ARRAYS), (x, *arrays))
    plan.run(x, *arrays, out)
    return out


def resolve_pads(pads):
    """Read the width of a rim as ((top, bottom), (left, right)), or raise ShapeError."""
    if is_integer(pads):
        pads = (pads, pads)
    if not isinstance(pads, list | tuple) or len(pads) != 2:
        raise ShapeError(
            f"pads must be an int, a pair or ((top, bottom), (left, right)), got {pads!r}"
        )
    return tuple(pair(axis, "pads", minimum=0) for axis in pads)


def halo_axes(block, pads):
    """Return the pixels of a block and its rim along both axes."""
    return [Axis(-p[0], 1, b + sum(p)) for b, p in zip(block, pads, strict=True)]


def fill_value(fill):
    """Check ``fill``; return what fetch takes."""
    if isinstance(fill, bool) or not any(type(fill) is type(f) and fill == f for f in FILLS):
        raise ValueError(f"fill must be 0, '-inf' or 'edge', got {fill!r}")
    return -np.inf if fill == "-inf" else fill


def _resolve(specs, options):
    """Check all arguments; return the spec of the result, the table's, the axes and the fill."""
    x, *arrays, out = specs
    *sizes, pads, fill = options
    table = BlockTable(*arrays, *sizes)
    check_stack("x", x, table)
    axes = halo_axes(table.block_size, resolve_pads(pads))
    result = x.new((x.shape[0], axes[0].count, axes[1].count, x.shape[3]))
    check_result(out, result)
    return result, table, axes, fill_value(fill)


def _infer(specs, options):
    """Check all arguments; return the spec of the result."""
    return _resolve(specs, options)[:1]


def _plan(specs, options):
    """Check all arguments; return the plan of the call."""
    x, *_, out = specs
    result, table, axes, fill = _resolve(specs, options)
    if not result.size:
        return Plan((result,), lambda *arrays: None)
    if not table.grid.size:
        return Plan((result,), _no_blocks)
    if x.on_gpu:
        launch = _stack_halo_cuda(x, table, axes, out or result, fill)
        return Plan((result,), launch, launch, operands=(0, 1, 2, 3, 4), by_kernels=True)
    body = functools.partial(_stack_halo_numpy, sizes=options[:2], axes=axes, fill=fill)
    return Plan((result,), body)


def _no_blocks(*arrays):
    """Write a result with no blocks."""
    *_, out = arrays
    out[...] = 0 if is_cupy(out) else np.zeros((), out.dtype)


def _stack_halo_numpy(x, bin_counts, active_block_indices, grid, out, *, sizes, axes, fill):
    """Copy strips from the blocks around."""
    places = Places.of(BlockTable(bin_counts, active_block_indices, grid, *sizes))
    known = len(places)
    out[known:] = np.zeros((), out.dtype)
    with computing(x):
        fetch_by_slices(x, places, axes, out[:known], fill)


def _stack_halo_cuda(x, table, axes, out, fill):
    """Prepare one launch; see cuda_src/block_sparse/stack/stack_halo.cu."""
    halo = StackHalo(
        rows=table.capacity,
        images=table.batch,
        grid=tuple(map(int, table.grid.shape[1:])),
        block=table.block_size,
        image=table.image_size,
        before=tuple(-axis.first for axis in axes),
        after=tuple(a.first + a.count - b for a, b in zip(axes, table.block_size, strict=True)),
        fill=_KERNEL_FILLS[fill],
        lowest=lowest_bits(x.dtype),
    )
    pixel_bytes = x.shape[3] * x.dtype.itemsize
    return prepare_stack_halo(halo, pixel_bytes, vector_bytes(16, x.alignment, out.alignment))


_KERNEL_FILLS = {0: "zero", -np.inf: "lowest", "edge": "nearest"}


STACK_HALO = Operator(
    "stack_halo",
    arrays=("x", *TABLE_ARRAYS, "out"),
    options=(*TABLE_SIZES, "pads", "fill"),
    infer=_infer,
    plan=_plan,
)
