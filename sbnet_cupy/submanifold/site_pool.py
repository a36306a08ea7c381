"""Pooling at sites: largest value or average of windows, and its inverse.

Kernels: cuda_src/submanifold/site_pool.cu, launched by site_max.py and site_sum.py.
"""

from typing import Any

import numpy as np

from ..core.arrays import array_function, compute_dtype, namespace
from ..core.graph_memory import memory_of_graphs
from ..core.scalars import as_number
from ..dense.conv2d import check_choice
from . import kernel_map as maps
from .kernel_map import KernelMap
from .site_conv import valid_rows
from .site_max import SITE_MAX, SITE_MAX_GRAD
from .site_sum import SITE_SUM, divisor
from .sparse_tensor import SparseTensor, check_float_tensor, check_grad, sites_of


@array_function
def sparse_max_pool(
    x, kernel_size, *, stride=None, padding: Any = 0, dilation: Any = 1, floor=None, ties="first",
    onto=None, capacity=None,
):  # fmt: skip
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
    ties : "first" or "all"
        Which of equal largest values the gradient goes to; SparseConvNet's goes to all.
    onto, capacity
        As for :func:`strided_conv`. Sites of ``onto`` whose window is empty become ``floor``, or 0.

    Returns
    -------
    SparseTensor
        On new sites, in leaf order, or on those of ``onto``. NaN is larger than any number.

    Raises
    ------
    ShapeError, DTypeError, ValueError
        As :func:`kernel_map` does; or if ``x`` is no SparseTensor, ``floor`` no number, or ``ties``
        none of those above.

    Source: the MaxPooling of B. Graham's SparseConvNet.

    Examples
    --------
    >>> import numpy as np
    >>> features = np.array([[-3.0], [-1], [-2]])
    >>> x = sparse_tensor(features, np.array([[0, 0], [0, 1], [0, 5]]), spatial_shape=8)
    >>> sparse_max_pool(x, 2).features.ravel()
    array([-1., -2.])
    """
    floor = read_floor(floor)
    window = _window(x, kernel_size, stride, padding, dilation, onto, capacity)
    return SparseTensor(_max(x, window, floor, ties), window.target)


@array_function
def sparse_max_pool_grad(
    grad_y, x, kernel_size, *, stride=None, padding: Any = 0, dilation: Any = 1, floor=None,
    ties="first", onto=None, capacity=None,
):  # fmt: skip
    """Compute the gradient of sparse_max_pool: to the sites that hold the largest value.

    Parameters
    ----------
    grad_y : array, shape (M, C)
        Gradient of the features of the result.
    x, kernel_size, stride, padding, dilation, floor, ties, onto, capacity
        As they were given to :func:`sparse_max_pool`.

    Returns
    -------
    grad_x : array, shape (N, C)
        In the dtype of ``grad_y``. Where ``floor`` is above all values, nothing is added.

    Raises
    ------
    ShapeError, DTypeError, ValueError
        As :func:`sparse_max_pool` does, or if ``grad_y`` has not the shape of its result.

    Source: the MaxPooling of B. Graham's SparseConvNet.

    Examples
    --------
    >>> import numpy as np
    >>> features = np.array([[3.0], [3], [2]])
    >>> x = sparse_tensor(features, np.array([[0, 0], [0, 1], [0, 5]]), spatial_shape=8)
    >>> sparse_max_pool_grad(np.array([[10.0], [20.0]]), x, 2).ravel()
    array([10.,  0., 20.])
    """
    floor = read_floor(floor)
    window = _window(x, kernel_size, stride, padding, dilation, onto, capacity)
    _check_grad_of(grad_y, x, window)
    grad_y = _at_sites(grad_y, window)
    back = window.transposed().rows
    arrays = (grad_y, x.features, _max(x, window, floor, ties), window.rows, back, None)
    return SITE_MAX_GRAD(arrays, (ties,))


@array_function
def sparse_avg_pool(
    x, kernel_size, *, stride=None, padding: Any = 0, dilation: Any = 1, count="volume", onto=None,
    capacity=None,
):  # fmt: skip
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
    return SparseTensor(_sum(x.features, window, count), window.target)


@array_function
def sparse_avg_pool_grad(
    grad_y, x, kernel_size, *, stride=None, padding: Any = 0, dilation: Any = 1, count="volume",
    onto=None, capacity=None,
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
    with memory_of_graphs(grad_y), np.errstate(all="ignore"):
        share = _at_sites(grad_y, window).astype(compute_dtype(grad_y.dtype), copy=False)
        share = share / divisor(window.rows, x.coordinates.capacity, count).astype(share.dtype)
        return _sum(share, window.transposed()).astype(grad_y.dtype, copy=False)


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
        On the sites of ``onto``; as for :func:`inverse_conv`, check those of ``x``. Its gradient is
        the sum over the windows: :func:`sparse_unpool_grad`.

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
    back = window.transposed()
    return SparseTensor(_sum(x.features, back), back.target)


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
    return _sum(grad_y, window)


def read_floor(floor):
    """Return the ``floor`` of a sparse_max_pool as a float or None, or raise."""
    hint = "; use None for no floor"
    return None if floor is None else as_number("floor", floor, nan=False, hint=hint)


def _window(x, kernel_size, stride, padding, dilation, onto, capacity):
    """Return the map of a pooling."""
    check_float_tensor(x)
    return maps.kernel_map(
        x.coordinates, kernel_size, stride=kernel_size if stride is None else stride,
        padding=0 if padding is None else padding, dilation=dilation, onto=onto, capacity=capacity,
    )  # fmt: skip


def _made_by(coarse, onto):
    """Return the map of the pooling or convolution of ``onto`` that made the sites ``coarse``."""
    onto = sites_of(onto)
    maps.check_map("onto", onto)
    return maps.made_by(onto, None, coarse)


def _check_grad_of(grad_y, x, window: KernelMap):
    check_grad(grad_y, x, (window.target.capacity, x.channels))


def _max(x, window, floor, ties):
    """Return the largest values of the windows."""
    arrays = (x.features, window.rows, valid_rows(window.target), None)
    return SITE_MAX(arrays, (floor, ties))


def _sum(features, window, count="one"):
    """Return the sums or averages over the windows."""
    return SITE_SUM((features, window.rows, valid_rows(window.target), None), (count,))


def _at_sites(grad_y, window):
    """Return a gradient with 0 in rows that are no site."""
    valid = valid_rows(window.target)[:, None]
    kept = namespace(grad_y).where(valid, grad_y, grad_y.dtype.type(0))
    return kept.astype(grad_y.dtype, copy=False)  # CuPy makes float32 of bfloat16
