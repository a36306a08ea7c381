"""stack_halo: each block with a rim of pixels from the blocks around it."""

import numpy as np

from ...core.arrays import array_function, empty
from ...core.checks import check_out
from ...core.sizes import is_integer, pair
from ...errors import ShapeError
from .checks import check_stack, computing
from .neighbours import Axis, Places, fetch

FILLS = (0, "-inf", "edge")


@array_function
def stack_halo(x, table, pads, *, fill=0, out=None):
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
    check_stack("x", x, table)
    axes = halo_axes(table.block_size, resolve_pads(pads))
    shape = (len(x), axes[0].count, axes[1].count, x.shape[3])
    if out is None:
        out = empty(shape, x.dtype, x)
    else:
        check_out(out, shape, x.dtype, x, (("x", x), ("table", table.grid)))
    fill = fill_value(fill)
    with computing(x):
        places = Places.of(table)
        known = len(places)
        if known < len(out):
            out[known:] = np.zeros((), out.dtype)
        fetch(x, places, *axes, out[:known], fill)
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
