"""Convolutions at sites on tensors: site_conv, and what it is with the maps of each kind."""

from typing import Any

import torch

from ...core.scalars import as_number
from ...dense.packed_weights import PackedWeights
from ...submanifold.feature_rows import check_rows
from ...submanifold.kernel_map import KernelMap, check_kernel_map
from ...submanifold.site_conv import read_weights
from ...submanifold.sparse_tensor import SparseTensor
from ...submanifold.submanifold_conv import features_on, kernel_of
from .._call import call
from .._native import check_tensors, native_weights, spec_of
from ..layers import autocast
from .kept_calls import compute_again
from .kept_weights import kept_weights
from .maps import (
    check_sparse,
    kernel_map_of,
    map_between,
    same_map,
    sites_of,
    untraced,
    valid,
)
from .operations import CONV, filled, transposed_rows


def site_conv(
    features, w, kernel_map, *, groups=1, bias=None, scale=None, residual=None, activation=None,
    precision=None, out=None,
):  # fmt: skip
    """Convolve rows of features over a KernelMap: :func:`sbnet_cupy.site_conv` on tensors.

    Differentiable, twice and more, with respect to ``features``, ``w``, ``bias``, ``scale`` and
    ``residual``. Under ``torch.autocast`` all of them are cast, as torch's convolutions do.

    Parameters
    ----------
    features : tensor, shape (N, C)
        Rows on ``kernel_map.source``.
    w : tensor, shape (*kernel_size, C / groups, K), or PackedWeights of tensors
        Of the dtype of the features. On a GPU a tensor is packed at each call, a
        :class:`sbnet_cupy.PackedWeights` of tensors that need no gradient once.
    kernel_map : KernelMap
        Of :func:`kernel_map` of this module.
    groups, bias, scale, residual, activation, precision
        As for :func:`sbnet_cupy.site_conv`.
    out : tensor, shape (M, K), optional
        Receives the result; contiguous. Where gradients are recorded it is written by a copy.

    Returns
    -------
    y : tensor, shape (M, K)

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ValueError
        As :func:`sbnet_cupy.site_conv`; DTypeError also for what is no tensor.

    Source: Graham et al. 2018, arXiv:1711.10275.

    Examples
    --------
    >>> sites, _ = coordinate_map(torch.tensor([[0, 1], [0, 2], [0, 5]]), spatial_shape=8)
    >>> w = torch.ones(3, 1, 1, requires_grad=True)
    >>> site_conv(torch.ones(3, 1), w, kernel_map(sites, 3, onto=sites)).sum().backward()
    >>> w.grad.ravel()
    tensor([1., 3., 1.])
    """
    check_kernel_map(kernel_map)
    w, scale, bias, precision = kept_weights(w, scale, bias, precision)
    if scale is None and bias is None and precision is None and out is None:
        y = compute_again(features, w, kernel_map, groups, residual, activation)
        if y is not None:
            return y
    weights, (w, scale, bias, precision) = read_weights(w, scale, bias, precision)
    own = w
    features, w, scale, bias, residual = autocast(features, w, scale, bias, residual)
    packed = None
    if weights is not None and own is w and not torch.compiler.is_compiling():
        packed = native_weights(weights)
    made, target = kernel_map, kernel_map.target
    holds = target._kept["valid"] if "valid" in target._kept else valid(target)
    options = (made.kernel_size, made.source.capacity, groups, activation, precision)
    tensors = (features, made.rows, holds, w, scale, bias, residual, out)
    return call(CONV, tensors, options, packed)


def sparse_unfold(features, kernel_map, *, fill=0.0):
    """Gather the rows that windows read: :func:`sbnet_cupy.sparse_unfold` on tensors.

    Differentiable, twice and more, with respect to ``features``.

    Parameters
    ----------
    features : tensor, shape (N, C)
        Rows on ``kernel_map.source``.
    kernel_map : KernelMap
        Of :func:`kernel_map` of this module.
    fill : float
        What stands where there is no site.

    Returns
    -------
    y : tensor, shape (M, taps, C)

    Raises
    ------
    ShapeError, DTypeError, DeviceError
        As :func:`sbnet_cupy.sparse_unfold`; DTypeError also for what is no tensor.

    Examples
    --------
    >>> sites, _ = coordinate_map(torch.tensor([[0, 1], [0, 2], [0, 5]]), spatial_shape=8)
    >>> features = torch.tensor([[1.0], [2], [3]], requires_grad=True)
    >>> y = sparse_unfold(features, kernel_map(sites, 3, onto=sites))
    >>> y[:, :, 0].tolist()
    [[0.0, 1.0, 2.0], [1.0, 2.0, 0.0], [0.0, 3.0, 0.0]]
    >>> y.sum().backward()
    >>> features.grad.ravel()
    tensor([2., 2., 1.])
    """
    check_kernel_map(kernel_map)
    sites, rows = kernel_map.source.capacity, kernel_map.rows
    check_tensors(**{"features": features, "kernel_map.rows": rows})
    _check_rows(features, rows, sites)
    fill = as_number("fill", fill)
    if not sites:
        shape = rows.shape[1], rows.shape[0], features.shape[1]
        return filled(features, shape, fill) + features.sum(0)
    there = (rows >= 0) & (rows < sites)
    places, fill = torch.where(there, rows, 0).long(), filled(features, (), fill)
    # One tap after the other: each row's gradient is a sum in the order of the taps.
    taken = [
        torch.where(here[:, None], features.index_select(0, place), fill)
        for here, place in zip(there, places, strict=True)
    ]
    return torch.stack(taken, 1)


@untraced  # as the check of points in sites.py
def _check_rows(features, rows, sites):
    """Raise unless these are rows of features, and the table of a map of so many sites."""
    check_rows(spec_of(features), spec_of(rows), sites=sites)


def submanifold_conv(
    x, w, *, dilation: Any = 1, groups=1, bias=None, scale=None, residual=None, activation=None,
    precision=None, out=None,
):  # fmt: skip
    """Convolve features at the same sites: :func:`sbnet_cupy.submanifold_conv` on tensors.

    Parameters
    ----------
    x : SparseTensor
        Of tensors.
    w, dilation, groups, bias, scale, residual, activation, precision, out
        As for :func:`sbnet_cupy.submanifold_conv`, differentiable as :func:`site_conv` says.

    Returns
    -------
    SparseTensor
        On the coordinates of ``x``.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ValueError
        As :func:`sbnet_cupy.submanifold_conv`; DTypeError also for what is no tensor.

    Source: Graham et al. 2018, arXiv:1711.10275.

    Examples
    --------
    >>> rows = torch.tensor([[0, 1], [0, 2], [0, 5]])
    >>> x = sparse_tensor(torch.ones(3, 1), rows, spatial_shape=8)
    >>> submanifold_conv(x, torch.ones(3, 1, 1)).features.ravel()
    tensor([2., 2., 1.])
    """
    kernel = _kernel_of(x, w)
    made = same_map(x.coordinates, kernel, dilation)
    return _convolve(x, w, made, groups, scale, bias, residual, activation, precision, out)


def strided_conv(
    x, w, *, stride, padding: Any = 0, dilation: Any = 1, groups=1, onto=None, capacity=None,
    bias=None, scale=None, residual=None, activation=None, precision=None, out=None,
):  # fmt: skip
    """Convolve features with a stride: :func:`sbnet_cupy.strided_conv` on tensors.

    Parameters
    ----------
    x : SparseTensor
        Of tensors.
    w, stride, padding, dilation, groups, onto, capacity
        As for :func:`sbnet_cupy.strided_conv`.
    bias, scale, residual, activation, precision, out
        As for :func:`site_conv`.

    Returns
    -------
    SparseTensor
        On new sites, in leaf order, or on those of ``onto``.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ValueError
        As :func:`sbnet_cupy.strided_conv`; DTypeError also for what is no tensor.

    Source: Graham et al. 2018, arXiv:1711.10275.

    Examples
    --------
    >>> rows = torch.tensor([[0, 1], [0, 2], [0, 5]])
    >>> x = sparse_tensor(torch.ones(3, 1), rows, spatial_shape=8)
    >>> strided_conv(x, torch.ones(2, 1, 1), stride=2).indices.tolist()
    [[0, 0], [0, 1], [0, 2]]
    """
    kernel = _kernel_of(x, w)
    made = kernel_map_of(
        x.coordinates, kernel, onto, stride=stride, padding=0 if padding is None else padding,
        dilation=dilation, capacity=capacity,
    )  # fmt: skip
    return _convolve(x, w, made, groups, scale, bias, residual, activation, precision, out)


def inverse_conv(
    x, w, *, onto, groups=1, bias=None, scale=None, residual=None, activation=None, precision=None,
    out=None,
):  # fmt: skip
    """Undo the sites of a strided convolution: :func:`sbnet_cupy.inverse_conv` on tensors.

    Parameters
    ----------
    x : SparseTensor
        On the sites that a :func:`strided_conv` of ``onto`` made (or a pooling).
    w, groups, bias, scale, residual, activation, precision, out
        As for :func:`site_conv`, with the kernel size of that convolution.
    onto : CoordinateMap or SparseTensor
        The sites that it read.

    Returns
    -------
    SparseTensor
        On the sites of ``onto``.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ValueError
        As :func:`sbnet_cupy.inverse_conv`; DTypeError also for what is no tensor.

    Source: Graham et al. 2018, arXiv:1711.10275.

    Examples
    --------
    >>> rows = torch.tensor([[0, 1], [0, 2], [0, 5]])
    >>> x = sparse_tensor(torch.ones(3, 1), rows, spatial_shape=8)
    >>> y = strided_conv(x, torch.ones(2, 1, 1), stride=2)
    >>> inverse_conv(y, torch.tensor([[[1.0]], [[10.0]]]), onto=x).features.ravel()
    tensor([10.,  1., 10.])
    """
    kernel, fine = _kernel_of(x, w), sites_of(onto, "onto")
    made = inverse_map(fine, kernel, x.coordinates)
    return _convolve(x, w, made, groups, scale, bias, residual, activation, precision, out)


def inverse_map(fine, kernel_size, coarse):
    """Return the map back from sites that a convolution or pooling of ``fine`` made."""
    made = map_between(fine, kernel_size, coarse)
    return KernelMap(transposed_rows(made.rows, fine.capacity), coarse, fine, made.kernel_size)


def transposed_conv(
    x, w, *, stride, padding: Any = 0, output_padding: Any = 0, dilation: Any = 1, groups=1,
    capacity=None, bias=None, scale=None, residual=None, activation=None, precision=None, out=None,
):  # fmt: skip
    """Convolve features transposed: :func:`sbnet_cupy.transposed_conv` on tensors.

    Parameters
    ----------
    x : SparseTensor
        Of tensors.
    w, stride, padding, output_padding, dilation, groups, capacity
        As for :func:`sbnet_cupy.transposed_conv`.
    bias, scale, residual, activation, precision, out
        As for :func:`site_conv`.

    Returns
    -------
    SparseTensor
        On every site that one of ``x`` reaches.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ValueError
        As :func:`sbnet_cupy.transposed_conv`; DTypeError also for what is no tensor.

    Source: Graham et al. 2018, arXiv:1711.10275.

    Examples
    --------
    >>> x = sparse_tensor(torch.ones(2, 1), torch.tensor([[0, 1], [0, 2]]), spatial_shape=4)
    >>> y = transposed_conv(x, torch.tensor([[[1.0]], [[2.0]]]), stride=2)
    >>> y.indices.tolist(), y.features.ravel()
    ([[0, 2], [0, 3], [0, 4], [0, 5]], tensor([1., 2., 1., 2.]))
    """
    kernel = _kernel_of(x, w)
    made = kernel_map_of(
        x.coordinates, kernel, stride=stride, padding=0 if padding is None else padding,
        dilation=dilation, output_padding=output_padding, transposed=True, capacity=capacity,
    )  # fmt: skip
    return _convolve(x, w, made, groups, scale, bias, residual, activation, precision, out)


def _kernel_of(x, w):
    """Return the kernel size that the weights have; check that all are tensors.

    What kind of tensors is for the convolution to check.
    """
    if not (type(x) is SparseTensor and isinstance(x.features, torch.Tensor)):
        check_sparse(x)
    weights = w.w if isinstance(w, PackedWeights) else w
    if not isinstance(weights, torch.Tensor):
        check_tensors(w=weights)
    return kernel_of(x, w)


def _convolve(x, w, made, groups, scale, bias, residual, activation, precision, out):
    """Compute a convolution over a map; return the SparseTensor."""
    residual = features_on(made.target, residual)
    y = site_conv(
        x.features, w, made, groups=groups, bias=bias, scale=scale, residual=residual,
        activation=activation, precision=precision, out=out,
    )  # fmt: skip
    return SparseTensor.computed(y, made.target)
