"""global_pool: the sites of each sample reduced to one row, with the gradient."""

import numpy as np

from ..core.arrays import array_function, compute_dtype, namespace
from ..core.graph_memory import memory_of_graphs
from ..dense.conv2d import check_choice
from ..errors import ShapeError
from .sample_pool import SAMPLE_ARGMAX, SAMPLE_MAX, SAMPLE_SUM
from .site_conv import valid_rows
from .sparse_tensor import check_float_tensor, check_grad


@array_function
def global_pool(x, reduce="max"):
    """Reduce all sites of each sample to one row.

    Parameters
    ----------
    x : SparseTensor
        Of a known batch size.
    reduce : "max", "mean" or "sum"
        What is computed, over the sites of the sample. Sums are in float32 (float64 for float64),
        in a fixed order.

    Returns
    -------
    array, shape (batch_size, C)
        In the dtype of the features. A sample without sites gives 0.

    Raises
    ------
    ShapeError
        If the batch size is not known.
    DTypeError, ValueError
        If ``x`` is no SparseTensor of floats, or ``reduce`` is none of those above.

    Examples
    --------
    >>> import numpy as np
    >>> rows = np.array([[0, 0], [0, 1], [1, 5]])
    >>> x = sparse_tensor(np.array([[3.0], [1], [2]]), rows, spatial_shape=8, batch_size=3)
    >>> global_pool(x).ravel(), global_pool(x, "mean").ravel()
    (array([3., 2., 0.]), array([2., 2., 0.]))
    """
    batch = _samples(x, reduce)
    arrays = x.features, sample_of(x.coordinates), None
    return SAMPLE_MAX(arrays, (batch,)) if reduce == "max" else SAMPLE_SUM(arrays, (batch, reduce))


@array_function
def global_pool_grad(grad_y, x, reduce="max"):
    """Compute the gradient of global_pool; that of a maximum goes to the first site that holds it.

    Parameters
    ----------
    grad_y : array, shape (batch_size, C)
        Gradient of the result.
    x, reduce
        As they were given to :func:`global_pool`.

    Returns
    -------
    grad_x : array, shape (N, C)
        In the dtype of ``grad_y``, 0 in rows that are no site.

    Raises
    ------
    ShapeError, DTypeError, ValueError
        As :func:`global_pool` does, or if ``grad_y`` has not the shape of its result.

    Examples
    --------
    >>> import numpy as np
    >>> rows = np.array([[0, 0], [0, 1], [1, 5]])
    >>> x = sparse_tensor(np.array([[3.0], [1], [2]]), rows, spatial_shape=8)
    >>> global_pool_grad(np.array([[10.0], [20.0]]), x).ravel()
    array([10.,  0., 20.])
    """
    batch = _samples(x, reduce)
    check_grad(grad_y, x, (batch, x.channels))
    xp, wide = namespace(grad_y), compute_dtype(grad_y.dtype)
    sample = sample_of(x.coordinates)
    if not len(sample) or not batch:
        return xp.zeros(x.features.shape, grad_y.dtype)
    with memory_of_graphs(grad_y), np.errstate(all="ignore"):
        share = grad_y.astype(wide, copy=False)
        if reduce == "mean":
            share = share / divisors_of(x.coordinates).astype(wide)
        mine = (sample >= 0)[:, None]
        if reduce == "max":
            winner = SAMPLE_ARGMAX((sample, x.features, None), (batch,))
            mine = mine & (winner[sample] == xp.arange(len(sample))[:, None])
        return xp.where(mine, share[sample], wide.type(0)).astype(grad_y.dtype)


def sample_of(coordinates):
    """Return the sample of each row, -1 for rows that are no site, or of no sample; kept."""

    def find():
        sample = coordinates.indices[:, 0]
        with memory_of_graphs(sample):
            real = valid_rows(coordinates) & (sample >= 0) & (sample < coordinates.batch_size)
            return namespace(sample).where(real, sample, np.int32(-1))

    return coordinates._keep("sample", find)


def divisors_of(coordinates):
    """Return how many sites each sample has, at least 1: float64 [batch_size, 1]; kept."""

    def count():
        sample, batch = sample_of(coordinates), coordinates.batch_size
        xp = namespace(sample)
        with memory_of_graphs(sample):
            ones = xp.ones((len(sample), 1))
            return xp.maximum(SAMPLE_SUM((ones, sample, None), (batch, "sum")), 1)

    return coordinates._keep("sites of samples", count)


def _samples(x, reduce):
    check_float_tensor(x)
    return samples_of(x, reduce)


def samples_of(x, reduce):
    """Return the number of samples of a SparseTensor, of any library's arrays; check ``reduce``."""
    check_choice("reduce", reduce, ("max", "mean", "sum"))
    if reduce is None:
        raise ValueError("reduce must be 'max', 'mean' or 'sum', got None")
    if x.batch_size is None:
        raise ShapeError(
            "x must have a known batch size, got None; pass batch_size to sparse_tensor"
        )
    return x.batch_size
