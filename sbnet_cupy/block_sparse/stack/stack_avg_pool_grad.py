"""stack_avg_pool_grad: from the gradient of the averages to that of the stack."""

from typing import Any

from ...core.arrays import array_function, compute_dtype, namespace
from .checks import computing
from .neighbours import Places
from .pooling import check_pool_grad, resolve_pool, spread, tap_slices, window_taps
from .stack_avg_pool import check_counting, divisors
from .stack_pixel_mask import inside


@array_function
def stack_avg_pool_grad(
    grad_y, x, table, *, kernel, strides=None, padding: Any = 0, ceil_mode=False,
    count_include_pad=True, divisor=None,
):  # fmt: skip
    """Compute the gradient of stack_avg_pool from the gradient of its result.

    ``dx[h, v, c] = sum grad_y[p, q, c] / d[p, q]`` over the windows that read the pixel, in float32
    (float64 for float64), rounded once. Same input, same bits.

    Parameters
    ----------
    grad_y : array, shape (M, b_h / sh, b_w / sw, C)
        Gradient of the result, in the dtype of ``x``. What it holds outside the image and in rows
        that are no block is not read.
    x, table, kernel, strides, padding, ceil_mode, count_include_pad, divisor
        As they were given to :func:`stack_avg_pool`. Of ``x`` only shape and dtype matter.

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

    Source: the transpose of the average as a linear function.

    Examples
    --------
    >>> import numpy as np
    >>> table = block_table(np.ones((1, 4, 4)), 2)
    >>> x, grad_y = np.ones((4, 2, 2, 1)), np.ones((4, 1, 1, 1))
    >>> stack_avg_pool_grad(grad_y, x, table, kernel=2)[0, :, :, 0]
    array([[0.25, 0.25],
           [0.25, 0.25]])
    """
    window = resolve_pool(x, table, kernel, strides, padding, 1, ceil_mode)
    check_counting(count_include_pad, divisor)
    after = check_pool_grad(grad_y, x, table, window)
    xp, total = namespace(x), compute_dtype(x.dtype)
    if not x.size:
        return xp.zeros(x.shape, x.dtype)
    with computing(x):
        places = Places.of(table)
        counted = inside(places.at(after))
        grad = xp.where(counted, grad_y[places.rows].astype(total, copy=False), total.type(0))
        grad = grad / divisors(places, window, count_include_pad, divisor, total)
        down, across = (axis.halo().count for axis in window_taps(window))
        wide = xp.zeros((len(grad), grad.shape[1], across, grad.shape[3]), total)
        for columns in tap_slices(window, 1):
            wide[:, :, columns] += grad
        halo = xp.zeros((len(grad), down, across, grad.shape[3]), total)
        for lines in tap_slices(window, 0):
            halo[:, lines] += wide
        return spread(halo, x, table, window)
