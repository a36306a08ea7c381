"""stack_halo_grad: from the gradient of blocks with their rims to that of the stack."""

from typing import Any

from ...core.arrays import array_function, compute_dtype, empty, is_float, namespace
from ...core.checks import check_array, check_contiguous
from ...errors import DTypeError
from .block_table import check_table
from .checks import computing
from .neighbours import Places, add_back
from .stack_halo import fill_value, halo_axes, resolve_pads


@array_function
def stack_halo_grad(grad_y, table, pads, *, fill: Any = 0):
    """Compute the gradient of stack_halo from the gradient of its result.

    ``dx[m, i, j, c]`` is the sum of ``grad_y`` over all places where :func:`stack_halo` puts the
    pixel: its own block, the rims of its neighbours, and with ``fill="edge"`` what lies outside the
    image nearest to it. In float32 (float64 for float64), in a fixed order, rounded once.

    Parameters
    ----------
    grad_y : array, shape (M, b_h + top + bottom, b_w + left + right, C)
        Gradient of the result. Rows that are no block are not read.
    table, pads, fill
        As they were given to :func:`stack_halo`.

    Returns
    -------
    grad_x : array, shape (M, b_h, b_w, C)
        In the dtype of ``grad_y``; 0 outside the image and in rows that are no block.

    Raises
    ------
    ShapeError
        If a size is wrong, or ``grad_y`` is not contiguous.
    DTypeError
        If ``grad_y`` is not of a floating dtype, or ``table`` no BlockTable.
    ValueError
        If ``fill`` is none of those of :func:`stack_halo`.

    Source: the transpose of stack_halo as a linear function.

    Examples
    --------
    >>> import numpy as np
    >>> table = block_table(np.ones((1, 2, 4)), 2)
    >>> stack_halo_grad(np.ones((2, 4, 4, 1)), table, 1)[0, :, :, 0]
    array([[1., 2.],
           [1., 2.]])
    """
    check_table(table)
    axes, fill = halo_axes(table.block_size, resolve_pads(pads)), fill_value(fill)
    check_array("grad_y", grad_y, ndim=4, like=table.grid)
    check_array("grad_y", grad_y, shape=(table.capacity, axes[0].count, axes[1].count, None))
    check_contiguous("grad_y", grad_y)
    if not is_float(grad_y.dtype):
        raise DTypeError(f"grad_y must be of a floating dtype, got {grad_y.dtype}; convert it")
    xp, total = namespace(grad_y), compute_dtype(grad_y.dtype)
    shape = (table.capacity, *table.block_size, grad_y.shape[3])
    with computing(grad_y):
        places = Places.of(table)
        sums = xp.zeros((len(places), *shape[1:]), total)
        add_back(grad_y[places.rows].astype(total, copy=False), places, *axes, sums, fill)
        dx = empty(shape, grad_y.dtype, grad_y)
        dx[: len(places)] = sums
        dx[len(places) :] = xp.zeros((), dx.dtype)
    return dx
