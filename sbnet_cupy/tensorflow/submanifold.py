"""Convolutions at sites for TensorFlow, eager, with gradients."""

import functools
from typing import Any

import sbnet_cupy as core

from ..core.arrays import array_function
from ..core.documentation import NO_PACKED, documented_as
from ..submanifold.kernel_map import made_by
from ..submanifold.sparse_tensor import SparseTensor, check_tensor, sites_of
from ..submanifold.submanifold_conv import features_on, kernel_of
from ._eager import differentiable, eager

_documented = functools.partial(documented_as, array="tensor", without=NO_PACKED)


@_documented(core.site_conv)
def site_conv(
    features, w, kernel_map, *, groups=1, bias=None, scale=None, residual=None, activation=None,
    precision=None,
):  # fmt: skip
    """Convolve rows of features over a KernelMap; differentiable with respect to all tensors.

    Examples
    --------
    >>> import tensorflow as tf
    >>> sites, _ = coordinate_map(tf.constant([[0, 1], [0, 2], [0, 5]]), spatial_shape=8)
    >>> window = kernel_map(sites, 3, onto=sites)
    >>> site_conv(tf.ones((3, 1)), tf.ones((3, 1, 1)), window).numpy().ravel().tolist()
    [2.0, 2.0, 1.0]
    """
    options = {"groups": groups, "activation": activation, "precision": precision}

    def convolve(features, w, **more):
        return core.site_conv(features, w, kernel_map, **more, **options)

    def differentiate(grad, features, w, y, **more):
        found = core.site_conv_grad(
            grad, features, w, kernel_map, **more, **options, wanted=("features", "w", *more), y=y
        )
        return [getattr(found, name) for name in ("features", "w", *more)]

    given = {"features": features, "w": w, "bias": bias, "scale": scale, "residual": residual}
    return differentiable(convolve, differentiate, given, by_result=True)


@_documented(core.sparse_unfold)
def sparse_unfold(features, kernel_map, *, fill=0.0):
    """Gather the rows that windows read; differentiable.

    Examples
    --------
    >>> import tensorflow as tf
    >>> sites, _ = coordinate_map(tf.constant([[0, 1], [0, 2], [0, 5]]), spatial_shape=8)
    >>> window = kernel_map(sites, 3, onto=sites)
    >>> sparse_unfold(tf.constant([[1.0], [2], [3]]), window).numpy()[:, :, 0].tolist()
    [[0.0, 1.0, 2.0], [1.0, 2.0, 0.0], [0.0, 3.0, 0.0]]
    """
    def unfold(features):
        return core.sparse_unfold(features, kernel_map, fill=fill)

    def differentiate(grad, features):
        return core.sparse_unfold_grad(grad, features, kernel_map)

    return differentiable(unfold, differentiate, {"features": features})


@_documented(core.submanifold_conv)
def submanifold_conv(
    x, w, *, dilation: Any = 1, groups=1, bias=None, scale=None, residual=None, activation=None,
    precision=None,
):  # fmt: skip
    """Convolve features, and compute the result at the same sites; differentiable.

    Examples
    --------
    >>> import tensorflow as tf
    >>> rows = tf.constant([[0, 1], [0, 2], [0, 5]])
    >>> x = sparse_tensor(tf.ones((3, 1)), rows, spatial_shape=8)
    >>> submanifold_conv(x, tf.ones((3, 1, 1))).features.numpy().ravel().tolist()
    [2.0, 2.0, 1.0]
    """
    kernel, same = _kernel_of(x, w), x.coordinates
    made = core.kernel_map(same, kernel, dilation=dilation, onto=same)
    return _convolve(x, w, made, groups, bias, scale, residual, activation, precision)


@_documented(core.strided_conv)
def strided_conv(
    x, w, *, stride, padding: Any = 0, dilation: Any = 1, groups=1, onto=None, capacity=None,
    bias=None, scale=None, residual=None, activation=None, precision=None,
):  # fmt: skip
    """Convolve features with a stride; differentiable.

    Examples
    --------
    >>> import tensorflow as tf
    >>> rows = tf.constant([[0, 1], [0, 2], [0, 5]])
    >>> x = sparse_tensor(tf.ones((3, 1)), rows, spatial_shape=8)
    >>> strided_conv(x, tf.ones((2, 1, 1)), stride=2).indices.numpy().tolist()
    [[0, 0], [0, 1], [0, 2]]
    """
    made = core.kernel_map(
        x.coordinates, _kernel_of(x, w), stride=stride, padding=0 if padding is None else padding,
        dilation=dilation, onto=onto, capacity=capacity,
    )  # fmt: skip
    return _convolve(x, w, made, groups, bias, scale, residual, activation, precision)


@_documented(core.inverse_conv)
def inverse_conv(
    x, w, *, onto, groups=1, bias=None, scale=None, residual=None, activation=None, precision=None
):
    """Convolve features back onto the sites that a strided convolution read; differentiable.

    Examples
    --------
    >>> import tensorflow as tf
    >>> rows = tf.constant([[0, 1], [0, 2], [0, 5]])
    >>> x = sparse_tensor(tf.ones((3, 1)), rows, spatial_shape=8)
    >>> y = strided_conv(x, tf.ones((2, 1, 1)), stride=2)
    >>> w = tf.constant([[[1.0]], [[10.0]]])
    >>> inverse_conv(y, w, onto=x).features.numpy().ravel().tolist()
    [10.0, 1.0, 10.0]
    """
    made = _way_back(sites_of(onto), _kernel_of(x, w), x.coordinates)
    return _convolve(x, w, made, groups, bias, scale, residual, activation, precision)


@_documented(core.transposed_conv)
def transposed_conv(
    x, w, *, stride, padding: Any = 0, output_padding: Any = 0, dilation: Any = 1, groups=1,
    capacity=None, bias=None, scale=None, residual=None, activation=None, precision=None,
):  # fmt: skip
    """Convolve features transposed, onto every site that one reaches; differentiable.

    Examples
    --------
    >>> import tensorflow as tf
    >>> x = sparse_tensor(tf.ones((2, 1)), tf.constant([[0, 1], [0, 2]]), spatial_shape=4)
    >>> y = transposed_conv(x, tf.constant([[[1.0]], [[2.0]]]), stride=2)
    >>> y.features.numpy().ravel().tolist()
    [1.0, 2.0, 1.0, 2.0]
    """
    made = core.kernel_map(
        x.coordinates, _kernel_of(x, w), stride=stride, padding=0 if padding is None else padding,
        dilation=dilation, output_padding=output_padding, transposed=True, capacity=capacity,
    )  # fmt: skip
    return _convolve(x, w, made, groups, bias, scale, residual, activation, precision)


def _kernel_of(x, w):
    """Return the kernel size that the weights for a SparseTensor have."""
    check_tensor(x)
    return kernel_of(x, eager("w", w))


@array_function
def _way_back(onto, kernel_size, coarse):
    """Return the map from the sites that a convolution of ``onto`` made, back to ``onto``."""
    return made_by(onto, kernel_size, coarse).transposed()


def _convolve(x, w, made, groups, bias, scale, residual, activation, precision):
    """Return the SparseTensor of a convolution over a map."""
    y = site_conv(
        x.features, w, made, groups=groups, bias=bias, scale=scale, activation=activation,
        residual=features_on(made.target, residual), precision=precision,
    )  # fmt: skip
    return SparseTensor(y, made.target)
