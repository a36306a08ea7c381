"""Pooling at sites on tensors."""

from typing import Any

from ...dense.conv2d import check_choice
from ...submanifold.global_pool import samples_of
from ...submanifold.site_pool import read_floor
from ...submanifold.sparse_tensor import SparseTensor
from .convs import inverse_map
from .maps import check_floats, check_sparse, kernel_map_of, sample_of, sites_of, valid
from .operations import sample_max, sample_sum, site_max, site_sum


def sparse_max_pool(
    x, kernel_size, *, stride=None, padding: Any = 0, dilation: Any = 1, floor=None, ties="first",
    onto=None, capacity=None,
):  # fmt: skip
    """Take the largest value in each window: :func:`sbnet_cupy.sparse_max_pool` on tensors.

    Parameters
    ----------
    x : SparseTensor
        Of tensors. Differentiable, twice and more, with respect to its features.
    kernel_size, stride, padding, dilation, floor, onto, capacity
        As for :func:`sbnet_cupy.sparse_max_pool`.
    ties : "first" or "all"
        Which of equal largest values the gradient goes to; SparseConvNet's goes to all.

    Returns
    -------
    SparseTensor
        On new sites, in leaf order, or on those of ``onto``.

    Raises
    ------
    ShapeError, DTypeError, ValueError
        As :func:`sbnet_cupy.sparse_max_pool`; or if ``ties`` is none of those above.

    Source: the MaxPooling of B. Graham's SparseConvNet.

    Examples
    --------
    >>> rows = torch.tensor([[0, 0], [0, 1], [0, 5]])
    >>> x = sparse_tensor(torch.tensor([[-3.0], [-1], [-2]]), rows, spatial_shape=8)
    >>> sparse_max_pool(x, 2).features.ravel()
    tensor([-1., -2.])
    """
    floor = read_floor(floor)
    made = _window(x, kernel_size, stride, padding, dilation, onto, capacity)
    y = site_max(x.features, made.rows, valid(made.target), floor, ties)
    return SparseTensor(y, made.target)


def sparse_avg_pool(
    x, kernel_size, *, stride=None, padding: Any = 0, dilation: Any = 1, count="volume", onto=None,
    capacity=None,
):  # fmt: skip
    """Average the sites in each window: :func:`sbnet_cupy.sparse_avg_pool` on tensors.

    Parameters
    ----------
    x : SparseTensor
        Of tensors. Differentiable, twice and more, with respect to its features.
    kernel_size, stride, padding, dilation, count, onto, capacity
        As for :func:`sbnet_cupy.sparse_avg_pool`.

    Returns
    -------
    SparseTensor
        On new sites, in leaf order, or on those of ``onto``.

    Raises
    ------
    ShapeError, DTypeError, ValueError
        As :func:`sbnet_cupy.sparse_avg_pool`.

    Source: the AveragePooling of B. Graham's SparseConvNet.

    Examples
    --------
    >>> rows = torch.tensor([[0, 0], [0, 1], [0, 5]])
    >>> x = sparse_tensor(torch.tensor([[3.0], [1], [2]]), rows, spatial_shape=8)
    >>> sparse_avg_pool(x, 2).features.ravel()
    tensor([2., 1.])
    """
    check_choice("count", count, ("volume", "active"))
    made = _window(x, kernel_size, stride, padding, dilation, onto, capacity)
    return SparseTensor(site_sum(x.features, made.rows, valid(made.target), count), made.target)


def sparse_unpool(x, *, onto):
    """Give each site the value of its window: :func:`sbnet_cupy.sparse_unpool` on tensors.

    Parameters
    ----------
    x : SparseTensor
        On the sites that a pooling or a :func:`strided_conv` of ``onto`` made. Differentiable,
        twice and more, with respect to its features.
    onto : CoordinateMap or SparseTensor
        The sites that it read.

    Returns
    -------
    SparseTensor
        On the sites of ``onto``.

    Raises
    ------
    ValueError, DTypeError
        As :func:`sbnet_cupy.sparse_unpool`.

    Source: the UnPooling of B. Graham's SparseConvNet.

    Examples
    --------
    >>> rows = torch.tensor([[0, 0], [0, 1], [0, 5]])
    >>> x = sparse_tensor(torch.tensor([[3.0], [1], [2]]), rows, spatial_shape=8)
    >>> sparse_unpool(sparse_max_pool(x, 2), onto=x).features.ravel()
    tensor([3., 3., 2.])
    """
    _check_floats(x)
    fine = sites_of(onto, "onto")
    made = inverse_map(fine, None, x.coordinates)
    return SparseTensor(site_sum(x.features, made.rows, valid(fine)), fine)


def global_pool(x, reduce="max"):
    """Reduce all sites of each sample to one row: :func:`sbnet_cupy.global_pool` on tensors.

    Parameters
    ----------
    x : SparseTensor
        Of tensors, and of a known batch size. Differentiable with respect to its features; the
        gradient of a maximum goes to the first site that holds it.
    reduce : "max", "mean" or "sum"
        What is computed.

    Returns
    -------
    tensor, shape (batch_size, C)
        0 for a sample without sites.

    Raises
    ------
    ShapeError, DTypeError, ValueError
        As :func:`sbnet_cupy.global_pool`.

    Examples
    --------
    >>> rows = torch.tensor([[0, 0], [0, 1], [1, 5]])
    >>> x = sparse_tensor(torch.tensor([[3.0], [1], [2]]), rows, spatial_shape=8, batch_size=3)
    >>> global_pool(x).ravel(), global_pool(x, "mean").ravel()
    (tensor([3., 2., 0.]), tensor([2., 2., 0.]))
    """
    _check_floats(x)
    batch, sample = samples_of(x, reduce), sample_of(x.coordinates)
    if reduce == "max":
        return sample_max(x.features, sample, batch)
    return sample_sum(x.features, sample, batch, reduce)


def _check_floats(x):
    check_floats(check_sparse(x).features)


def _window(x, kernel_size, stride, padding, dilation, onto, capacity):
    """Return the map of a pooling."""
    _check_floats(x)
    return kernel_map_of(
        x.coordinates, kernel_size, onto, stride=kernel_size if stride is None else stride,
        padding=0 if padding is None else padding, dilation=dilation, capacity=capacity,
    )  # fmt: skip
