"""sparse_unfold: the rows that each window of a kernel map reads, side by side."""

import numpy as np

from ..core.arrays import array_function, compute_dtype, namespace
from ..core.checks import check_array
from ..core.graph_memory import memory_of_graphs
from ..core.scalars import as_number
from .feature_rows import check_dtype, check_rows, reads
from .kernel_map import check_kernel_map


@array_function
def sparse_unfold(features, kernel_map, *, fill=0.0):
    """Gather the rows that each row of a kernel map reads.

    ``y[m, t] = features[rows[t, m]]``; ``fill`` where row ``m`` reads none at tap ``t``. A
    convolution is ``y.reshape(M, -1) @ w.reshape(-1, K)``; the neighbourhood of a site with no
    weights is a feature in itself, as in SparseConvNet's ``ShapeContext``.

    Parameters
    ----------
    features : array, shape (N, C)
        float16, bfloat16, float32 or float64; rows on ``kernel_map.source``.
    kernel_map : KernelMap
        Of :func:`kernel_map`.
    fill : float
        What stands where there is no site, rounded to the dtype of the features.

    Returns
    -------
    y : array, shape (M, taps, C)
        In the dtype of the features; ``fill`` in rows that are no site.

    Raises
    ------
    ShapeError, DTypeError
        If ``features`` are no floats, or not on the sites that the map reads.

    Examples
    --------
    >>> import numpy as np
    >>> sites, _ = coordinate_map(np.array([[0, 1], [0, 2], [0, 5]]), spatial_shape=8)
    >>> window = kernel_map(sites, 3, onto=sites)
    >>> sparse_unfold(np.array([[1.0], [2.0], [3.0]]), window)[:, :, 0]
    array([[0., 1., 2.],
           [1., 2., 0.],
           [0., 3., 0.]])
    """
    _check(features, kernel_map)
    fill = as_number("fill", fill)
    xp, rows = namespace(features), kernel_map.rows.T
    with memory_of_graphs(features), np.errstate(over="ignore"):
        fill = xp.asarray(fill, features.dtype)
        if not len(features):
            return xp.full((*rows.shape, features.shape[1]), fill, features.dtype)
        here = reads(rows, len(features))
        y = features[xp.where(here, rows, 0)]
        y[~here] = fill
        return y


@array_function
def sparse_unfold_grad(grad_y, features, kernel_map):
    """Compute the gradient of sparse_unfold: each row adds up what the windows read of it.

    Parameters
    ----------
    grad_y : array, shape (M, taps, C)
        Gradient of the result.
    features, kernel_map
        As they were given to :func:`sparse_unfold`; the values of the features do not matter.

    Returns
    -------
    grad_x : array, shape (N, C)
        In the dtype of ``grad_y``; sums are in float32 (float64 for float64), in the order of the
        taps.

    Raises
    ------
    ShapeError, DTypeError
        As :func:`sparse_unfold` does, or if ``grad_y`` has not the shape of its result.

    Examples
    --------
    >>> import numpy as np
    >>> sites, _ = coordinate_map(np.array([[0, 1], [0, 2], [0, 5]]), spatial_shape=8)
    >>> window = kernel_map(sites, 3, onto=sites)
    >>> sparse_unfold_grad(np.ones((3, 3, 1)), np.ones((3, 1)), window).ravel()
    array([2., 2., 1.])
    """
    _check(features, kernel_map)
    shape = (kernel_map.target.capacity, kernel_map.taps, features.shape[1])
    check_array("grad_y", grad_y, shape=shape, like=features)
    check_dtype("grad_y", grad_y, features)
    xp, wide = namespace(grad_y), compute_dtype(grad_y.dtype)
    total = xp.zeros(features.shape, wide)
    if not grad_y.size:
        return total.astype(grad_y.dtype)
    with memory_of_graphs(grad_y), np.errstate(all="ignore"):
        for tap, readers in enumerate(kernel_map.transposed().rows):
            taken = grad_y[xp.maximum(readers, 0), tap].astype(wide, copy=False)
            total += xp.where((readers >= 0)[:, None], taken, wide.type(0))
        return total.astype(grad_y.dtype)


def _check(features, kernel_map):
    check_kernel_map(kernel_map)
    check_rows(features, kernel_map.rows, sites=kernel_map.source.capacity)
