"""global_pool: the sites of each sample reduced to one row, with the gradient."""

import numpy as np

from ..core.arrays import array_function, compute_dtype, namespace
from ..core.graph_memory import memory_of_graphs
from ..dense.conv2d import check_choice
from ..errors import ShapeError
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
        in the order of the rows.

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
    xp, dtype = namespace(x.features), x.features.dtype
    wide = compute_dtype(dtype)
    out = xp.zeros((batch, x.channels), dtype)
    sample = xp.where(valid_rows(x.coordinates), x.indices[:, 0], -1)
    with memory_of_graphs(x.features), np.errstate(all="ignore"):
        for b in range(batch if x.features.size else 0):
            mine = (sample == b)[:, None]
            if reduce == "max":
                values = xp.where(mine, x.features, dtype.type(-np.inf)).max(axis=0)
                out[b] = xp.where(mine.any(), values, dtype.type(0))
                continue
            values = xp.where(mine, x.features.astype(wide, copy=False), wide.type(0))
            total = values.sum(axis=0)
            out[b] = total / xp.maximum(mine.sum(), 1) if reduce == "mean" else total
    return out


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
    out = xp.zeros(x.features.shape, grad_y.dtype)
    sample = xp.where(valid_rows(x.coordinates), x.indices[:, 0], -1)
    with memory_of_graphs(grad_y), np.errstate(all="ignore"):
        for b in range(batch if x.features.size else 0):
            mine = (sample == b)[:, None]
            share = grad_y[b].astype(wide, copy=False)
            if reduce == "max":
                values = xp.where(mine, x.features, x.features.dtype.type(-np.inf))
                first = values.argmax(axis=0)  # of NaN the first, too
                mine = mine & (xp.arange(len(values))[:, None] == first)
            elif reduce == "mean":
                share = share / xp.maximum(mine.sum(), 1)
            out += xp.where(mine, share, wide.type(0)).astype(out.dtype)
    return out


def _samples(x, reduce):
    check_float_tensor(x)
    check_choice("reduce", reduce, ("max", "mean", "sum"))
    if reduce is None:
        raise ValueError("reduce must be 'max', 'mean' or 'sum', got None")
    if x.batch_size is None:
        raise ShapeError(
            "x must have a known batch size, got None; pass batch_size to sparse_tensor"
        )
    return x.batch_size
