"""stack_max_pool_grad: from the gradient of the maxima to that of the stack."""

from typing import Any

from ...core.arrays import array_function, compute_dtype, namespace
from .checks import computing
from .neighbours import Places
from .pooling import check_pool_grad, parts, resolve_pool, spread, tap_slices
from .stack_max_pool import largest
from .stack_pixel_mask import inside


@array_function
def stack_max_pool_grad(
    grad_y, x, table, *, kernel, strides=None, padding: Any = 0, dilation: Any = 1, ceil_mode=False
):
    """Compute the gradient of stack_max_pool from the gradient of its result.

    The gradient of a window goes to its largest pixel, the first of several in the order of rows
    and columns; to none where that pixel is in no active block. A pixel that several windows chose
    gets their sum, in float32 (float64 for float64), rounded once. Same input, same bits.

    Parameters
    ----------
    grad_y : array, shape (M, b_h / sh, b_w / sw, C)
        Gradient of the result, in the dtype of ``x``. What it holds outside the image and in rows
        that are no block is not read.
    x, table, kernel, strides, padding, dilation, ceil_mode
        As they were given to :func:`stack_max_pool`.

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

    Source: the transpose of the choice that the maximum makes. Kernel, for networks in training:
    cuda_src/block_sparse/stack/stack_max_pool_grad.cu

    Examples
    --------
    >>> import numpy as np
    >>> table = block_table(np.ones((1, 4, 4)), 2)
    >>> x = stack_from_image(np.arange(16.0).reshape(1, 4, 4, 1), table)
    >>> stack_max_pool_grad(np.ones((4, 1, 1, 1)), x, table, kernel=2)[0, :, :, 0]
    array([[0., 0.],
           [0., 1.]])
    """
    window = resolve_pool(x, table, kernel, strides, padding, dilation, ceil_mode)
    after = check_pool_grad(grad_y, x, table, window)
    with computing(x):
        return _through_maxima(grad_y, x, table, window, after)


def _through_maxima(grad_y, x, table, window, after):
    """Give each window's gradient to its first largest pixel, block by block with rims."""
    xp, total = namespace(x), compute_dtype(x.dtype)
    places = Places.of(table)
    counted = inside(places.at(after))
    grad_halo = None
    for part in parts(places, x, window):
        halo, y = largest(x, places.part(part), window)
        if grad_halo is None:
            grad_halo = xp.zeros((len(places), *halo.shape[1:]), total)
        waiting = xp.broadcast_to(counted[part], y.shape).copy()
        grad, here = grad_y[places.rows][part].astype(total, copy=False), grad_halo[part]
        for lines in tap_slices(window, 0):
            for columns in tap_slices(window, 1):
                value = halo[:, lines, columns]
                chosen = waiting & ((value == y) | ((value != value) & (y != y)))
                here[:, lines, columns] += xp.where(chosen, grad, total.type(0))
                waiting &= ~chosen
    if grad_halo is None:
        return xp.zeros(x.shape, x.dtype)
    return spread(grad_halo, x, table, window)
