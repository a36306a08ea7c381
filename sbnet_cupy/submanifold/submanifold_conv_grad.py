"""Gradients of the convolutions at sites: submanifold, strided, inverse and transposed.

Each finds the KernelMap of its convolution and computes :func:`site_conv_grad` over it.
"""

from typing import Any

from ..core.arrays import array_function
from .kernel_map import find_map
from .site_conv_grad import GRADIENTS, site_conv_grad
from .submanifold_conv import checked_kernel, features_on, map_back_to, strided_map


@array_function
def submanifold_conv_grad(
    grad_y, x, w, *, dilation: Any = 1, groups=1, bias=None, scale=None, residual=None,
    activation=None, precision=None, wanted=GRADIENTS, y=None,
):  # fmt: skip
    """Compute the gradients of submanifold_conv from the gradient of its result.

    Parameters
    ----------
    grad_y : SparseTensor or array, shape (N, K)
        Gradient of the features of the result, in their dtype.
    x, w, dilation, groups, bias, scale, residual, activation, precision
        As they were given to :func:`submanifold_conv`; ``w`` is an array.
    wanted : tuple of "features", "w", "scale", "bias" and "residual"
        The gradients to compute; the others are None.
    y : SparseTensor or array, shape (N, K), optional
        The result, which spares computing it again with ``activation="relu"``.

    Returns
    -------
    gradients : SiteConvGradients(features, w, scale, bias, residual)
        Arrays; see :func:`site_conv_grad`.

    Raises
    ------
    ShapeError, DTypeError, ValueError
        As :func:`submanifold_conv` and :func:`site_conv_grad` do.

    Source: Graham et al. 2018, arXiv:1711.10275.

    Examples
    --------
    >>> import numpy as np
    >>> x = sparse_tensor(np.ones((3, 1)), np.array([[0, 1], [0, 2], [0, 5]]), spatial_shape=8)
    >>> w = np.array([1.0, 10, 100]).reshape(3, 1, 1)
    >>> gradients = submanifold_conv_grad(np.ones((3, 1)), x, w)
    >>> gradients.features.ravel(), gradients.w.ravel()
    (array([ 11., 110.,  10.]), array([1., 3., 1.]))
    """
    kernel = checked_kernel(x, w)
    made = find_map(x.coordinates, kernel, dilation=dilation, onto=x.coordinates)
    options = groups, bias, scale, residual, activation, precision
    return _gradients(grad_y, x, w, made, options, wanted, y)


@array_function
def strided_conv_grad(
    grad_y, x, w, *, stride, padding: Any = 0, dilation: Any = 1, groups=1, onto=None,
    capacity=None, bias=None, scale=None, residual=None, activation=None, precision=None,
    wanted=GRADIENTS, y=None,
):  # fmt: skip
    """Compute the gradients of strided_conv from the gradient of its result.

    Parameters
    ----------
    grad_y : SparseTensor or array, shape (M, K)
        Gradient of the features of the result, in their dtype.
    x, w, stride, padding, dilation, groups, onto, capacity, bias, scale, residual, activation, \
precision
        As they were given to :func:`strided_conv`; ``w`` is an array.
    wanted, y
        As for :func:`submanifold_conv_grad`.

    Returns
    -------
    gradients : SiteConvGradients(features, w, scale, bias, residual)
        Arrays; see :func:`site_conv_grad`.

    Raises
    ------
    ShapeError, DTypeError, ValueError
        As :func:`strided_conv` and :func:`site_conv_grad` do.

    Source: Graham et al. 2018, arXiv:1711.10275.

    Examples
    --------
    >>> import numpy as np
    >>> x = sparse_tensor(np.ones((3, 1)), np.array([[0, 1], [0, 2], [0, 5]]), spatial_shape=8)
    >>> w = np.array([1.0, 10]).reshape(2, 1, 1)
    >>> gradients = strided_conv_grad(np.array([[1.0], [2], [3]]), x, w, stride=2)
    >>> gradients.features.ravel(), gradients.w.ravel()
    (array([10.,  2., 30.]), array([2., 4.]))
    """
    made = strided_map(x, w, stride, padding, dilation, onto=onto, capacity=capacity)
    options = groups, bias, scale, residual, activation, precision
    return _gradients(grad_y, x, w, made, options, wanted, y)


@array_function
def inverse_conv_grad(
    grad_y, x, w, *, onto, groups=1, bias=None, scale=None, residual=None, activation=None,
    precision=None, wanted=GRADIENTS, y=None,
):  # fmt: skip
    """Compute the gradients of inverse_conv from the gradient of its result.

    Parameters
    ----------
    grad_y : SparseTensor or array, shape (N, K)
        Gradient of the features of the result, in their dtype.
    x, w, onto, groups, bias, scale, residual, activation, precision
        As they were given to :func:`inverse_conv`; ``w`` is an array.
    wanted, y
        As for :func:`submanifold_conv_grad`.

    Returns
    -------
    gradients : SiteConvGradients(features, w, scale, bias, residual)
        Arrays; see :func:`site_conv_grad`.

    Raises
    ------
    ShapeError, DTypeError, ValueError
        As :func:`inverse_conv` and :func:`site_conv_grad` do.

    Source: Graham et al. 2018, arXiv:1711.10275.

    Examples
    --------
    >>> import numpy as np
    >>> x = sparse_tensor(np.ones((3, 1)), np.array([[0, 1], [0, 2], [0, 5]]), spatial_shape=8)
    >>> low = strided_conv(x, np.ones((2, 1, 1)), stride=2)
    >>> w = np.array([1.0, 10]).reshape(2, 1, 1)
    >>> inverse_conv_grad(np.array([[1.0], [2], [3]]), low, w, onto=x).features.ravel()
    array([10.,  2., 30.])
    """
    options = groups, bias, scale, residual, activation, precision
    return _gradients(grad_y, x, w, map_back_to(onto, x, w), options, wanted, y)


@array_function
def transposed_conv_grad(
    grad_y, x, w, *, stride, padding: Any = 0, output_padding: Any = 0, dilation: Any = 1, groups=1,
    capacity=None, bias=None, scale=None, residual=None, activation=None, precision=None,
    wanted=GRADIENTS, y=None,
):  # fmt: skip
    """Compute the gradients of transposed_conv from the gradient of its result.

    Parameters
    ----------
    grad_y : SparseTensor or array, shape (M, K)
        Gradient of the features of the result, in their dtype.
    x, w, stride, padding, output_padding, dilation, groups, capacity, bias, scale, residual, \
activation, precision
        As they were given to :func:`transposed_conv`; ``w`` is an array.
    wanted, y
        As for :func:`submanifold_conv_grad`.

    Returns
    -------
    gradients : SiteConvGradients(features, w, scale, bias, residual)
        Arrays; see :func:`site_conv_grad`.

    Raises
    ------
    ShapeError, DTypeError, ValueError
        As :func:`transposed_conv` and :func:`site_conv_grad` do.

    Source: Graham et al. 2018, arXiv:1711.10275.

    Examples
    --------
    >>> import numpy as np
    >>> x = sparse_tensor(np.ones((2, 1)), np.array([[0, 1], [0, 2]]), spatial_shape=4)
    >>> w = np.array([1.0, 10]).reshape(2, 1, 1)
    >>> grad = np.array([[1.0], [2], [3], [4]])
    >>> transposed_conv_grad(grad, x, w, stride=2).features.ravel()
    array([21., 43.])
    """
    made = strided_map(
        x, w, stride, padding, dilation, capacity=capacity, output_padding=output_padding,
        transposed=True,
    )  # fmt: skip
    options = groups, bias, scale, residual, activation, precision
    return _gradients(grad_y, x, w, made, options, wanted, y)


def _gradients(grad_y, x, w, made, options, wanted, y):
    """Return the gradients of a convolution over its map."""
    groups, bias, scale, residual, activation, precision = options
    grad_y, residual, y = (
        features_on(made.target, value, name)
        for name, value in (("grad_y", grad_y), ("residual", residual), ("y", y))
    )
    return site_conv_grad(
        grad_y, x.features, w, made, groups=groups, bias=bias, scale=scale, residual=residual,
        activation=activation, precision=precision, wanted=wanted, y=y,
    )  # fmt: skip
