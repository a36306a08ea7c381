"""Convolutions at sites for JAX, over the maps of :mod:`.sites`."""

from typing import Any

import jax.numpy as jnp

import sbnet_cupy as core

from ..core.checks import check_array
from ..dense.packed_weights import PackedWeights
from ..submanifold import sparse_tensor
from ..submanifold.feature_rows import check_rows, reads
from ..submanifold.kernel_map import check_kernel_map
from ..submanifold.site_conv import SITE_CONV, read_weights
from ..submanifold.sparse_tensor import SparseTensor
from ..submanifold.submanifold_conv import kernel_of
from ._documentation import documented
from ._site_conv import site_conv as convolve
from ._site_kernels import by_kernels, by_taps, convolve_by_xla
from ._sites import rows_at, valid_rows
from ._specs import spec_of
from .sites import kernel_map, number_of, sites_of, way_back


@documented(core.site_conv)
def site_conv(
    features, w, kernel_map, *, groups=1, bias=None, scale=None, residual=None, activation=None,
    precision=None,
):  # fmt: skip
    """Convolve rows of features over a KernelMap: :func:`sbnet_cupy.site_conv` for JAX.

    Sums are in float32 (float64 for float64), in the order of the taps, and rounded once, after
    the activation. Differentiable with respect to all arrays. On a GPU weights are packed at each
    call, those of a PackedWeights once by :func:`pack_weights`.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> sites, _ = coordinate_map(jnp.array([[0, 1], [0, 2], [0, 5]]), spatial_shape=8)
    >>> window = kernel_map(sites, 3, onto=sites)
    >>> jax.jit(site_conv)(jnp.ones((3, 1)), jnp.ones((3, 1, 1)), window).ravel().tolist()
    [2.0, 2.0, 1.0]
    """
    check_kernel_map(kernel_map)
    weights, (w, scale, bias, precision) = read_weights(w, scale, bias, precision)
    valid = valid_rows(kernel_map.target)
    given = {"features": features, "rows": kernel_map.rows, "valid": valid, "w": w,
             "scale": scale, "bias": bias, "residual": residual}  # fmt: skip
    specs = [spec_of(name, value) for name, value in given.items()]
    sites = kernel_map.source.capacity
    options = (kernel_map.kernel_size, sites, groups, activation, precision)
    SITE_CONV.infer((*specs, None), options)
    if by_kernels(features, kernel_map):
        own = (w, scale, bias, weights)
        return convolve(own, features, residual, kernel_map, groups, activation, precision)
    w = by_taps(kernel_map.taps, w)
    arrays = (features, kernel_map.rows, valid, w, scale, bias, residual)
    return convolve_by_xla(*arrays, groups, activation, precision)


def sparse_unfold(features, kernel_map, *, fill=0.0):
    """Gather the rows that windows read: :func:`sbnet_cupy.sparse_unfold` for JAX.

    Differentiable with respect to ``features``.

    Parameters
    ----------
    features : jax.Array, shape (N, C)
        Rows on ``kernel_map.source``.
    kernel_map : KernelMap
        Of :func:`kernel_map` of this module.
    fill : float
        What stands where there is no site.

    Returns
    -------
    y : jax.Array, shape (M, taps, C)

    Raises
    ------
    ShapeError, DTypeError, DeviceError
        As :func:`sbnet_cupy.sparse_unfold`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> sites, _ = coordinate_map(jnp.array([[0, 1], [0, 2], [0, 5]]), spatial_shape=8)
    >>> window = kernel_map(sites, 3, onto=sites)
    >>> sparse_unfold(jnp.array([[1.0], [2], [3]]), window)[:, :, 0].tolist()
    [[0.0, 1.0, 2.0], [1.0, 2.0, 0.0], [0.0, 3.0, 0.0]]
    """
    check_kernel_map(kernel_map)
    sites = kernel_map.source.capacity
    check_rows(spec_of("features", features), spec_of("rows", kernel_map.rows), sites=sites)
    fill = jnp.asarray(number_of("fill", fill), features.dtype)
    taken = [
        jnp.where(reads(rows, sites)[:, None], rows_at(features, rows), fill)
        for rows in kernel_map.rows
    ]
    return jnp.stack(taken, axis=1)


def submanifold_conv(
    x, w, *, dilation: Any = 1, groups=1, bias=None, scale=None, residual=None, activation=None,
    precision=None,
):  # fmt: skip
    """Convolve features at the same sites: :func:`sbnet_cupy.submanifold_conv` for JAX.

    Parameters
    ----------
    x : SparseTensor
    w : jax.Array, shape (*kernel_size, C / groups, K), or PackedWeights
    dilation : int or tuple of int
    groups, bias, scale, residual, activation, precision
        As for :func:`sbnet_cupy.submanifold_conv`.

    Returns
    -------
    SparseTensor

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ValueError
        As :func:`sbnet_cupy.submanifold_conv`, for what is known while JAX traces.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> rows = jnp.array([[0, 1], [0, 2], [0, 5]])
    >>> x = sparse_tensor(jnp.ones((3, 1)), rows, spatial_shape=8)
    >>> submanifold_conv(x, jnp.ones((3, 1, 1))).features.ravel().tolist()
    [2.0, 2.0, 1.0]
    """
    made = kernel_map(sites_of(x), _kernel_of(x, w), dilation=dilation, onto=x.coordinates)
    return _convolve(x, w, made, groups, bias, scale, residual, activation, precision)


def strided_conv(
    x, w, *, stride, padding: Any = 0, dilation: Any = 1, groups=1, onto=None, capacity=None,
    bias=None, scale=None, residual=None, activation=None, precision=None,
):  # fmt: skip
    """Convolve features with a stride: :func:`sbnet_cupy.strided_conv` for JAX.

    Parameters
    ----------
    x, w, dilation, groups, bias, scale, residual, activation, precision
        As for :func:`submanifold_conv`.
    stride, padding, onto
        As for :func:`sbnet_cupy.strided_conv`.
    capacity : int, optional
        Rows of the result; by default as many as there can be sites.

    Returns
    -------
    SparseTensor
        New sites keep how they were found, for :func:`inverse_conv`, also through ``jit``.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ValueError
        As :func:`sbnet_cupy.strided_conv`, for what is known while JAX traces.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> rows = jnp.array([[0, 1], [0, 2], [0, 5]])
    >>> x = sparse_tensor(jnp.ones((3, 1)), rows, spatial_shape=8)
    >>> strided_conv(x, jnp.ones((2, 1, 1)), stride=2).features.ravel().tolist()
    [1.0, 1.0, 1.0]
    """
    onto = sparse_tensor.sites_of(onto)
    padding = 0 if padding is None else padding  # which a map onto the same sites would centre
    window = {"stride": stride, "padding": padding, "dilation": dilation}
    made = kernel_map(sites_of(x), _kernel_of(x, w), **window, onto=onto, capacity=capacity)
    return _convolve(x, w, made, groups, bias, scale, residual, activation, precision)


def inverse_conv(
    x, w, *, onto, groups=1, bias=None, scale=None, residual=None, activation=None, precision=None
):
    """Undo the sites of a strided convolution: :func:`sbnet_cupy.inverse_conv` for JAX.

    Parameters
    ----------
    x : SparseTensor
        On new sites of a strided_conv or a pooling.
    w, groups, bias, scale, residual, activation, precision
        As for :func:`submanifold_conv`.
    onto : CoordinateMap or SparseTensor
        The sites that were read to make those of ``x``.

    Returns
    -------
    SparseTensor
        On the sites of ``onto``.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ValueError
        As :func:`sbnet_cupy.inverse_conv`. Whether ``onto`` is what was read is not checked.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> rows = jnp.array([[0, 1], [0, 2], [0, 5]])
    >>> x = sparse_tensor(jnp.ones((3, 1)), rows, spatial_shape=8)
    >>> y = strided_conv(x, jnp.ones((2, 1, 1)), stride=2)
    >>> inverse_conv(y, jnp.array([[[1.0]], [[10.0]]]), onto=x).features.ravel().tolist()
    [10.0, 1.0, 10.0]
    """
    made = way_back(sites_of(x), onto, _kernel_of(x, w))
    return _convolve(x, w, made, groups, bias, scale, residual, activation, precision)


def transposed_conv(
    x, w, *, stride, padding: Any = 0, output_padding: Any = 0, dilation: Any = 1, groups=1,
    capacity=None, bias=None, scale=None, residual=None, activation=None, precision=None,
):  # fmt: skip
    """Convolve features transposed, to all sites reached: :func:`sbnet_cupy.transposed_conv`.

    Parameters
    ----------
    x, w, stride, padding, dilation, capacity
        As for :func:`strided_conv`.
    output_padding : int or tuple of int
        Cells more at the end of the grid.
    groups, bias, scale, residual, activation, precision
        As for :func:`submanifold_conv`.

    Returns
    -------
    SparseTensor

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ValueError
        As :func:`sbnet_cupy.transposed_conv`, for what is known while JAX traces.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> x = sparse_tensor(jnp.ones((2, 1)), jnp.array([[0, 1], [0, 2]]), spatial_shape=4)
    >>> w = jnp.array([[[1.0]], [[2.0]]])
    >>> transposed_conv(x, w, stride=2).features.ravel().tolist()
    [1.0, 2.0, 1.0, 2.0]
    """
    made = kernel_map(
        sites_of(x), _kernel_of(x, w), stride=stride, padding=padding, dilation=dilation,
        transposed=True, output_padding=output_padding, capacity=capacity,
    )  # fmt: skip
    return _convolve(x, w, made, groups, bias, scale, residual, activation, precision)


def _kernel_of(x, w):
    sites_of(x)
    if not isinstance(w, PackedWeights):
        check_array("w", spec_of("w", w))
    return kernel_of(x, w)


def _convolve(x, w, made, groups, bias, scale, residual, activation, precision):
    """Compute a convolution over a map; return the SparseTensor."""
    if isinstance(residual, SparseTensor):  # on which sites it is cannot be told while JAX traces
        residual = residual.features
    y = site_conv(
        x.features, w, made, groups=groups, bias=bias, scale=scale, residual=residual,
        activation=activation, precision=precision,
    )  # fmt: skip
    return SparseTensor(y, made.target)
