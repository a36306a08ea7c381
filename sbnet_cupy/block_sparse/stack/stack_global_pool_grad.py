"""stack_global_pool_grad: from the gradient of each image's mean, maximum or sum to the stack's."""

import math

import numpy as np

from ...core.arrays import array_function, compute_dtype, empty, namespace
from ...core.checks import check_array
from ...dense.conv2d import check_choice
from .checks import check_like, check_stack, computing
from .neighbours import Places
from .per_image import reduce_rows, rows_of
from .stack_global_pool import MODES, stack_global_pool
from .stack_pixel_mask import inside

_NONE = np.iinfo(np.int64).max  # after all pixels


@array_function
def stack_global_pool_grad(grad_y, x, table, *, mode="mean"):
    """Compute the gradient of stack_global_pool from the gradient of its result.

    For the mean ``dx[m, i, j, c] = grad_y[n, c] / (H * W)`` at every pixel in the image, for the
    sum ``grad_y[n, c]``. The gradient of a maximum goes to the first pixel in the order of rows and
    columns of the image that has it; to none where that is the 0 of a pixel in no active block.

    Parameters
    ----------
    grad_y : array, shape (N, C)
        Gradient of the result, in the dtype of ``x``.
    x, table, mode
        As they were given to :func:`stack_global_pool`. Of ``x`` only shape and dtype matter,
        except for the maximum.

    Returns
    -------
    grad_x : array, shape (M, b_h, b_w, C)
        0 outside the image and in rows that are no block.

    Raises
    ------
    ShapeError
        If sizes do not fit together.
    DTypeError
        If ``x`` is not of a floating dtype, or ``grad_y`` is of another one.
    ValueError
        If ``mode`` is none of "mean", "max" and "sum".

    Source: the transpose of the sum as a linear function, and of the maximum's choice.

    Examples
    --------
    >>> import numpy as np
    >>> table = block_table(np.eye(4)[None], 2)
    >>> stack_global_pool_grad(np.ones((1, 1)), np.ones((2, 2, 2, 1)), table)[:, 0, 0, 0]
    array([0.0625, 0.0625])
    """
    check_choice("mode", mode, MODES)
    check_stack("x", x, table)
    check_array("grad_y", grad_y, shape=(table.batch, x.shape[3]), like=x)
    check_like("grad_y", grad_y, x)
    xp, total = namespace(x), compute_dtype(x.dtype)
    dx = empty(x.shape, x.dtype, x)
    dx[...] = xp.zeros((), x.dtype)
    if not x.size:
        return dx
    with computing(x):
        places = Places.of(table)
        grad = grad_y.astype(total, copy=False)
        if mode == "mean":
            grad = grad / max(math.prod(table.image_size), 1)
        chosen = _first_largest(x, table, places) if mode == "max" else inside(places)
        value = rows_of(grad, places)[:, None, None]
        dx[: len(places)] = xp.where(chosen, value, total.type(0))
    return dx


def _first_largest(x, table, places):
    """Return bool [m, b_h, b_w, C]: the first pixel of each image that has its maximum."""
    xp, (bh, bw), (_, width) = namespace(x), table.block_size, table.image_size
    largest = stack_global_pool(x, table, mode="max")
    y = rows_of(largest, places)[:, None, None]
    pixels = x[places.rows]
    same = inside(places) & ((pixels == y) | ((pixels != pixels) & (y != y)))
    line = places.first_pixels(0)[:, None] + xp.arange(bh)
    column = places.first_pixels(1)[:, None] + xp.arange(bw)
    number = (line[:, :, None] * width + column[:, None, :])[..., None]
    first = xp.where(same, number, _NONE).reshape(len(same), bh * bw, x.shape[3]).min(axis=1)
    winner = reduce_rows(first, places, "minimum", _NONE)
    zero = _first_inactive(table, places.limit)[:, None]
    winner = xp.where(largest == 0, xp.minimum(winner, zero), winner)
    return same & (number == rows_of(winner, places)[:, None, None])


def _first_inactive(table, limit):
    """Return the number of each image's first pixel in no active block, which is 0: int64 [N]."""
    xp, (bh, bw), (height, width) = namespace(table.grid), table.block_size, table.image_size
    line, column = (xp.arange(n) * b for n, b in zip(table.grid.shape[1:], (bh, bw), strict=True))
    number = line[:, None] * width + column
    there = (line < height)[:, None] & (column < width)
    active = (table.grid >= 0) & (table.grid < limit)
    if not active.size:
        return xp.full(table.batch, _NONE)
    return xp.where(there & ~active, number, _NONE).min(axis=(1, 2))
