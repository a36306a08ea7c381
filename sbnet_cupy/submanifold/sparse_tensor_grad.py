"""sparse_tensor_grad: from the gradient of the features of sites to that of the listed rows."""

import numpy as np

from ..core.arrays import array_function, compute_dtype, namespace
from ..core.checks import check_array
from ..core.graph_memory import memory_of_graphs
from ..errors import ShapeError
from .coordinate_map import reduce_rows
from .distinct import row_of_site
from .feature_rows import check_dtype
from .site_arguments import takes_sizes
from .sparse_tensor import check_feature_rows


@takes_sizes
@array_function
def sparse_tensor_grad(
    grad_y, features, indices, *, spatial_shape=None, batch_size=None, mode="unique", order="leaf",
    capacity=None,
):  # fmt: skip
    """Compute the gradient of sparse_tensor with respect to the features.

    Parameters
    ----------
    grad_y : array, shape (N, C)
        Gradient of the features of the result, in their dtype. Rows that are no site are not read.
    features, indices, spatial_shape, batch_size, mode, order, capacity
        As they were given to :func:`sparse_tensor`; the values of the features do not matter.

    Returns
    -------
    grad_features : array, shape (n, C)
        In the dtype of ``grad_y``; 0 for rows that no site has its features of.

    Raises
    ------
    ShapeError, DTypeError, ValueError
        As :func:`sparse_tensor` does, or if ``grad_y`` has not the shape and dtype of its features.

    Source: the input layers of B. Graham's SparseConvNet.

    Examples
    --------
    >>> import numpy as np
    >>> points, features = np.array([[0, 2, 2], [0, 0, 1], [0, 2, 2]]), np.ones((3, 1))
    >>> grid = {"spatial_shape": (4, 4), "mode": "mean"}
    >>> sparse_tensor_grad(np.array([[1.0], [10.0]]), features, points, **grid).ravel()
    array([5., 1., 5.])
    """
    check_feature_rows(features, indices)
    options = spatial_shape, batch_size, mode, order, capacity
    coordinates, inverse, reduction = reduce_rows(indices, *options)
    rows, channels = coordinates.capacity, features.shape[1]
    check_array("grad_y", grad_y, like=features)
    if grad_y.shape != (rows, channels):
        raise ShapeError(
            f"grad_y must have shape {(rows, channels)}, that of the result, got {grad_y.shape}"
        )
    check_dtype("grad_y", grad_y, features)
    with memory_of_graphs(grad_y), np.errstate(all="ignore"):
        if mode in ("sum", "mean"):
            return _shared(grad_y, inverse, reduction.sorted().starts, mode)
        return _of_rows(grad_y, row_of_site(reduction, rows, mode), len(features))


def _shared(grad_y, inverse, starts, mode):
    """Return the gradient of rows of which all that have the same site are added up."""
    xp = namespace(grad_y)
    if not len(grad_y):
        return xp.zeros((len(inverse), grad_y.shape[1]), grad_y.dtype)
    site, there = xp.maximum(inverse, 0), (inverse >= 0)[:, None]
    taken = xp.where(there, grad_y[site], xp.zeros((), grad_y.dtype))
    if mode == "mean":
        number = xp.maximum(starts[1:] - starts[:-1], 1)[site]
        taken = taken.astype(compute_dtype(grad_y.dtype), copy=False)
        taken = taken / number[:, None].astype(taken.dtype)
    return taken.astype(grad_y.dtype, copy=False)  # CuPy makes float32 of bfloat16


def _of_rows(grad_y, row_of, number):
    """Return the gradient of rows of which each site has one."""
    xp = namespace(grad_y)
    out = xp.zeros((number + 1, grad_y.shape[1]), grad_y.dtype)
    out[xp.where(row_of >= 0, row_of, number)] = grad_y  # without a site: to the last place
    return xp.ascontiguousarray(out[:-1])
