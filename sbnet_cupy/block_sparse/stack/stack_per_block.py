"""stack_per_block: a value of each image, for each of its blocks."""

import numpy as np

from ...core.arrays import array_function, compute_dtype, empty
from ...core.checks import check_array, check_out
from .block_table import check_table
from .checks import check_stack, computing
from .neighbours import Places
from .per_image import reduce_rows, rows_of


@array_function
def stack_per_block(values, table, *, out=None):
    """Repeat the values of each image for its blocks, to be broadcast over their pixels.

    ``y[m, 0, 0, c] = values[n, c]`` with ``n`` the image of row ``m``; 0 in rows that are no block.
    It brings what was made of a :func:`stack_global_pool` back to the stack, as squeeze and
    excitation does.

    Parameters
    ----------
    values : array, shape (N, C)
        One value for each image and channel.
    table : BlockTable
        Of any stage.
    out : array, optional
        Receives the result; it is returned.

    Returns
    -------
    y : array, shape (M, 1, 1, C)
        In the dtype and library of ``values``.

    Raises
    ------
    ShapeError
        If ``values`` has not one row for each image.
    DTypeError
        If ``values`` is no array, or ``table`` no BlockTable.

    Examples
    --------
    >>> import numpy as np
    >>> table = block_table(np.array([[[1]], [[0]], [[1]]]), 1)
    >>> stack_per_block(np.array([[1.0], [2.0], [3.0]]), table)[:, 0, 0, 0]
    array([1., 3.])
    """
    check_table(table)
    check_array("values", values, ndim=2, like=table.grid)
    check_array("values", values, shape=(table.batch, None))
    shape = (table.capacity, 1, 1, values.shape[1])
    if out is None:
        out = empty(shape, values.dtype, values)
    else:
        check_out(out, shape, values.dtype, values, (("values", values), ("table", table.grid)))
    with computing(values):
        places = Places.of(table)
        out[: len(places), 0, 0] = rows_of(values, places)
        if len(places) < len(out):
            out[len(places) :] = np.zeros((), out.dtype)
    return out


@array_function
def stack_per_block_grad(grad_y, table):
    """Compute the gradient of stack_per_block from the gradient of its result.

    ``dvalues[n, c] = sum grad_y[m, 0, 0, c]`` over the blocks of image ``n``, in float32 (float64
    for float64), rounded once. Same input, same bits.

    Parameters
    ----------
    grad_y : array, shape (M, 1, 1, C)
        Gradient of the result. Rows that are no block are not read.
    table : BlockTable
        As it was given to :func:`stack_per_block`.

    Returns
    -------
    grad_values : array, shape (N, C)
        In the dtype and library of ``grad_y``.

    Raises
    ------
    ShapeError
        If ``grad_y`` is not of that shape.
    DTypeError
        If ``grad_y`` is not of a floating dtype, or ``table`` no BlockTable.

    Examples
    --------
    >>> import numpy as np
    >>> table = block_table(np.ones((1, 1, 3)), 1)
    >>> stack_per_block_grad(np.ones((3, 1, 1, 2)), table)
    array([[3., 3.]])
    """
    check_table(table)
    check_stack("grad_y", grad_y, table.at((1, 1), (0, 0)))
    total = compute_dtype(grad_y.dtype)
    with computing(grad_y):
        places = Places.of(table)
        values = grad_y[places.rows, 0, 0].astype(total, copy=False)
        sums = reduce_rows(values, places, "add", 0)
    dvalues = empty(sums.shape, grad_y.dtype, grad_y)
    dvalues[...] = sums
    return dvalues
