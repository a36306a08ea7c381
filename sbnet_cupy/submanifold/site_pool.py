"""Pooling at sites: largest value or average of windows, and its inverse."""

import numpy as np

from ..core.arrays import array_function, compute_dtype, is_cupy, namespace
from ..core.graph_memory import memory_of_graphs
from ..dense.conv2d import check_choice
from . import kernel_map as maps
from .kernel_map import KernelMap
from .site_conv import add, take, valid_rows
from .sparse_tensor import SparseTensor, check_float_tensor, check_grad


@array_function
def sparse_max_pool(
    x, kernel_size, *, stride=None, padding=0, dilation=1, floor=None, onto=None, capacity=None
):
    """Take the largest value of the sites in each window.

    Parameters
    ----------
    x : SparseTensor
        float16, bfloat16, float32 or float64.
    kernel_size, padding, dilation : int or tuple of int
        As for :func:`kernel_map`.
    stride : int or tuple of int, optional
        By default the kernel size.
    floor : float, optional
        What the result is at least. SparseConvNet's pooling has 0.
    onto, capacity
        As for :func:`strided_conv`. Sites of ``onto`` whose window is empty become ``floor``, or 0.

    Returns
    -------
    SparseTensor
        On new sites, in leaf order, or on those of ``onto``. NaN is larger than any number.

    Raises
    ------
    ShapeError, DTypeError, ValueError
        As :func:`kernel_map` does; or if ``x`` is no SparseTensor.

    Source: the MaxPooling of B. Graham's SparseConvNet.

    Examples
    --------
    >>> import numpy as np
    >>> features = np.array([[-3.0], [-1], [-2]])
    >>> x = sparse_tensor(features, np.array([[0, 0], [0, 1], [0, 5]]), spatial_shape=8)
    >>> sparse_max_pool(x, 2).features.ravel()
    array([-1., -2.])
    """
    window = _window(x, kernel_size, stride, padding, dilation, onto, capacity)
    with memory_of_graphs(x.features):
        largest = _largest(x.features, window)
        xp, any_site = namespace(largest), _sites_of_windows(window) > 0
        nothing = largest.dtype.type(0 if floor is None else floor)
        largest = xp.where(any_site[:, None], largest, nothing)
        if floor is not None:
            largest = xp.maximum(largest, largest.dtype.type(floor))
        return _result(largest, window, x.features.dtype)


@array_function
def sparse_max_pool_grad(
    grad_y, x, kernel_size, *, stride=None, padding=0, dilation=1, floor=None, onto=None,
    capacity=None,
):  # fmt: skip
    """Compute the gradient of sparse_max_pool: to the first site that holds the largest value.

    Parameters
    ----------
    grad_y : array, shape (M, C)
        Gradient of the features of the result.
    x, kernel_size, stride, padding, dilation, floor, onto, capacity
        As they were given to :func:`sparse_max_pool`.

    Returns
    -------
    grad_x : array, shape (N, C)
        In the dtype of ``grad_y``. Where ``floor`` is above all values, nothing is added.

    Raises
    ------
    ShapeError, DTypeError, ValueError
        As :func:`sparse_max_pool` does, or if ``grad_y`` has not the shape of its result.

    Source: the MaxPooling of B. Graham's SparseConvNet, which adds to all equal values.

    Examples
    --------
    >>> import numpy as np
    >>> features = np.array([[3.0], [3], [2]])
    >>> x = sparse_tensor(features, np.array([[0, 0], [0, 1], [0, 5]]), spatial_shape=8)
    >>> sparse_max_pool_grad(np.array([[10.0], [20.0]]), x, 2).ravel()
    array([10.,  0., 20.])
    """
    window = _window(x, kernel_size, stride, padding, dilation, onto, capacity)
    _check_grad_of(grad_y, x, window)
    xp, wide = namespace(grad_y), compute_dtype(grad_y.dtype)
    with memory_of_graphs(grad_y):
        largest = _largest(x.features, window)
        left = valid_rows(window.target)[:, None] & xp.ones(largest.shape, bool)
        if floor is not None:
            left &= ~(largest < largest.dtype.type(floor))
        shares = []
        for tap in range(window.taps):
            read = window.rows[tap]
            values = x.features[xp.maximum(read, 0)] if len(x.features) else largest
            same = (values == largest) | ((values != values) & (largest != largest))
            mine = left & same & (read >= 0)[:, None]
            left &= ~mine
            shares.append(xp.where(mine, grad_y, grad_y.dtype.type(0)))
        return _spread(shares, window, wide).astype(grad_y.dtype)


@array_function
def sparse_avg_pool(
    x, kernel_size, *, stride=None, padding=0, dilation=1, count="volume", onto=None, capacity=None
):
    """Average the sites in each window.

    Parameters
    ----------
    x, kernel_size, stride, padding, dilation, onto, capacity
        As for :func:`sparse_max_pool`.
    count : "volume" or "active"
        Divide by the cells of the kernel, as SparseConvNet does, or by the sites in the window.

    Returns
    -------
    SparseTensor
        On new sites, in leaf order, or on those of ``onto``. Sums are in float32 (float64 for
        float64), in the order of the kernel's cells.

    Raises
    ------
    ShapeError, DTypeError, ValueError
        As :func:`sparse_max_pool` does, or if ``count`` is none of those above.

    Source: the AveragePooling of B. Graham's SparseConvNet.

    Examples
    --------
    >>> import numpy as np
    >>> features = np.array([[3.0], [1], [2]])
    >>> x = sparse_tensor(features, np.array([[0, 0], [0, 1], [0, 5]]), spatial_shape=8)
    >>> sparse_avg_pool(x, 2).features.ravel(), sparse_avg_pool(x, 2, count="active").features[1]
    (array([2., 1.]), array([2.]))
    """
    check_choice("count", count, ("volume", "active"))
    window = _window(x, kernel_size, stride, padding, dilation, onto, capacity)
    with memory_of_graphs(x.features), np.errstate(all="ignore"):
        total = _sums(x.features, window)
        total /= _divisor(window, count, total.dtype)
        return _result(total, window, x.features.dtype)


@array_function
def sparse_avg_pool_grad(
    grad_y, x, kernel_size, *, stride=None, padding=0, dilation=1, count="volume", onto=None,
    capacity=None,
):  # fmt: skip
    """Compute the gradient of sparse_avg_pool.

    Parameters
    ----------
    grad_y : array, shape (M, C)
        Gradient of the features of the result.
    x, kernel_size, stride, padding, dilation, count, onto, capacity
        As they were given to :func:`sparse_avg_pool`; the values of the features do not matter.

    Returns
    -------
    grad_x : array, shape (N, C)
        In the dtype of ``grad_y``.

    Raises
    ------
    ShapeError, DTypeError, ValueError
        As :func:`sparse_avg_pool` does, or if ``grad_y`` has not the shape of its result.

    Source: the AveragePooling of B. Graham's SparseConvNet.

    Examples
    --------
    >>> import numpy as np
    >>> rows = np.array([[0, 0], [0, 1], [0, 5]])
    >>> x = sparse_tensor(np.ones((3, 1)), rows, spatial_shape=8)
    >>> sparse_avg_pool_grad(np.array([[10.0], [20.0]]), x, 2).ravel()
    array([ 5.,  5., 10.])
    """
    check_choice("count", count, ("volume", "active"))
    window = _window(x, kernel_size, stride, padding, dilation, onto, capacity)
    _check_grad_of(grad_y, x, window)
    xp, wide = namespace(grad_y), compute_dtype(grad_y.dtype)
    with memory_of_graphs(grad_y), np.errstate(all="ignore"):
        share = grad_y.astype(wide, copy=False) / _divisor(window, count, wide)
        share = xp.where(valid_rows(window.target)[:, None], share, wide.type(0))
        return _sums(share, window.transposed()).astype(grad_y.dtype)


@array_function
def sparse_unpool(x, *, onto):
    """Give each site the value of the window that read it: the inverse of a pooling's sites.

    Parameters
    ----------
    x : SparseTensor
        On the sites that a pooling or a :func:`strided_conv` of ``onto`` made.
    onto : CoordinateMap or SparseTensor
        The sites that it read. If windows overlap, the values of all that read a site are added.

    Returns
    -------
    SparseTensor
        On the sites of ``onto``. Its gradient is the sum over the windows:
        :func:`sparse_unpool_grad`.

    Raises
    ------
    ValueError
        If no pooling or convolution of ``onto`` made the sites of ``x``.
    DTypeError
        If ``x`` is no SparseTensor of floats, or ``onto`` no CoordinateMap.

    Source: the UnPooling of B. Graham's SparseConvNet.

    Examples
    --------
    >>> import numpy as np
    >>> rows = np.array([[0, 0], [0, 1], [0, 5]])
    >>> x = sparse_tensor(np.array([[3.0], [1], [2]]), rows, spatial_shape=8)
    >>> sparse_unpool(sparse_max_pool(x, 2), onto=x).features.ravel()
    array([3., 3., 2.])
    """
    check_float_tensor(x)
    window = _made_by(x.coordinates, onto)
    with memory_of_graphs(x.features), np.errstate(all="ignore"):
        back = window.transposed()
        return _result(_sums(x.features, back), back, x.features.dtype)


@array_function
def sparse_unpool_grad(grad_y, x, *, onto):
    """Compute the gradient of sparse_unpool: the sum over each window.

    Parameters
    ----------
    grad_y : array, shape (N, C)
        Gradient of the features of the result, on the sites of ``onto``.
    x, onto
        As they were given to :func:`sparse_unpool`; the values of the features do not matter.

    Returns
    -------
    grad_x : array, shape (M, C)
        In the dtype of ``grad_y``.

    Raises
    ------
    ValueError, DTypeError
        As :func:`sparse_unpool` does.
    ShapeError
        If ``grad_y`` has not the shape of its result.

    Source: the UnPooling of B. Graham's SparseConvNet.

    Examples
    --------
    >>> import numpy as np
    >>> rows = np.array([[0, 0], [0, 1], [0, 5]])
    >>> x = sparse_tensor(np.array([[3.0], [1], [2]]), rows, spatial_shape=8)
    >>> sparse_unpool_grad(np.array([[1.0], [2.0], [3.0]]), sparse_max_pool(x, 2), onto=x).ravel()
    array([3., 3.])
    """
    check_float_tensor(x)
    window = _made_by(x.coordinates, onto)
    _check_grad_of(grad_y, x, window.transposed())
    with memory_of_graphs(grad_y), np.errstate(all="ignore"):
        return _sums(grad_y, window).astype(grad_y.dtype)


def _window(x, kernel_size, stride, padding, dilation, onto, capacity):
    """Return the map of a pooling."""
    check_float_tensor(x)
    return maps.kernel_map(
        x.coordinates, kernel_size, stride=kernel_size if stride is None else stride,
        padding=0 if padding is None else padding, dilation=dilation, onto=onto, capacity=capacity,
    )  # fmt: skip


def _made_by(coarse, onto):
    """Return the map of the pooling or convolution of ``onto`` that made the sites ``coarse``."""
    onto = onto.coordinates if isinstance(onto, SparseTensor) else onto
    maps.check_map("onto", onto)
    window = maps.found(onto, None, coarse)
    if window is None:
        raise ValueError(
            "onto must be the sites that a pooling or a strided_conv read to make those of x; "
            "there was none"
        )
    return window


def _check_grad_of(grad_y, x, window: KernelMap):
    check_grad(grad_y, x, (window.target.capacity, x.channels))


def _sites_of_windows(window):
    """Return how many sites each window holds."""
    return (window.rows >= 0).sum(axis=0)


def _divisor(window, count, dtype):
    """Return what the sums are divided by, ``[M, 1]`` or a number."""
    if count == "volume":
        return dtype.type(max(window.taps, 1))
    number = namespace(window.rows).maximum(_sites_of_windows(window), 1)
    return number[:, None].astype(dtype)


def _largest(features, window):
    """Return the largest value of each window, -inf where it is empty."""
    xp = namespace(features)
    least = features.dtype.type(-np.inf)
    largest = xp.full((window.target.capacity, features.shape[1]), least, features.dtype)
    for tap in range(window.taps if len(features) else 0):
        taken, here = take(features, window.rows[tap])
        if here is None:
            largest = xp.maximum(largest, taken)
        elif is_cupy(features):
            largest = xp.maximum(largest, xp.where(here, taken, least))
        else:
            largest[here] = np.maximum(largest[here], taken)
    return largest


def _sums(features, window):
    """Return the sums over windows, in the dtype of sums."""
    xp, wide = namespace(features), compute_dtype(features.dtype)
    total = xp.zeros((window.target.capacity, features.shape[1]), wide)
    for tap in range(window.taps if len(features) else 0):
        taken, here = take(features, window.rows[tap])
        add(total, here, taken.astype(wide, copy=False))
    return total


def _spread(shares, window, wide):
    """Return the sums of what each tap gives back to the rows that it read."""
    xp = namespace(shares[0]) if shares else np
    back = window.transposed()
    total = xp.zeros((back.target.capacity, shares[0].shape[1]), wide)
    for tap, share in enumerate(shares if len(shares[0]) else ()):
        taken, here = take(share, back.rows[tap])
        add(total, here, taken.astype(wide, copy=False))
    return total


def _result(values, window, dtype):
    """Return a SparseTensor on the target, 0 in rows that are no site."""
    xp = namespace(values)
    valid = valid_rows(window.target)[:, None]
    values = xp.where(valid, values, values.dtype.type(0)).astype(dtype, copy=False)
    return SparseTensor(values, window.target)
