"""conv2d_grad: from the gradient of a convolution's result to those of images, kernel and bias."""

import functools
from typing import Any, NamedTuple

import numpy as np

from ..core.arrays import array_function, compute_dtype, empty, is_cupy, namespace
from ..core.byte_order import check_byte_orders
from ..core.checks import check_array, check_contiguous
from ..core.operator import Operator, Plan
from ..core.spec import spec_of
from ..errors import DTypeError
from . import cudnn_grad, im2col_grad
from .affine_grad import affine_grad
from .conv2d import check_per_channel, plan_conv2d, resolve_problem


class ConvGradients(NamedTuple):
    """Gradients of the arguments of :func:`conv2d`; None for what was None or not wanted."""

    x: Any = None
    w: Any = None
    bias: Any = None
    scale: Any = None


@array_function
def conv2d_grad(
    grad_y,
    x,
    w,
    *,
    strides=(1, 1),
    padding: Any = "SAME",
    scale=None,
    bias=None,
    activation=None,
    data_format="NHWC",
    w_format="HWIO",
    precision=None,
    wanted=("x", "w", "bias", "scale"),
):
    """Compute the gradients of conv2d from the gradient of its result.

    For ``y = activation(scale * conv(x, w) + bias)``, with ``dz`` the gradient of ``conv(x, w)``:
    ``dx[n, h, v, c] = sum dz[n, p, q, k] * w[r, s, c, k]`` over the windows that read the pixel,
    ``dw[r, s, c, k] = sum x[n, p * sh - top + r, q * sw - left + s, c] * dz[n, p, q, k]`` over all
    output pixels. Sums are in float32 (float64 for float64) and rounded once; on a GPU, partial
    sums of ``dw`` over parts of the batch may be rounded to the dtype of ``x``. Same input, same
    bits.

    With ``scale`` or ``activation``, ``conv(x, w)`` is computed again, in the dtype of ``x``. The
    derivative of relu at 0 is 0. Without them the gradients are linear in ``grad_y``: ``dx`` is
    the transpose of the convolution as a function of ``x``, and ``dw`` as a function of ``w``.

    Parameters
    ----------
    grad_y : array, shape (N, P, Q, K), or (N, K, P, Q) with ``data_format="NCHW"``
        Gradient of the result of :func:`conv2d` with these arguments, in its dtype. C-contiguous; a
        NumPy array that is not is copied.
    x, w : array
        As they were given to :func:`conv2d`.
    strides, padding, data_format, w_format, precision, activation
        As for :func:`conv2d`.
    scale, bias : float array, shape (K,), optional
        As they were given to :func:`conv2d`. The values of ``bias`` matter only under an
        ``activation``; its presence asks for its gradient.
    wanted : tuple of "x", "w", "bias" and "scale"
        The gradients to compute; the others are None.

    Returns
    -------
    gradients : ConvGradients(x, w, bias, scale)
        Fresh arrays of the shapes and dtypes of the arguments.

    Raises
    ------
    ShapeError
        If sizes do not fit together, or ``x`` or ``grad_y`` is not contiguous.
    DTypeError
        If ``x`` is not of a floating dtype, or ``w`` or ``grad_y`` is of another one.
    ValueError
        If ``activation``, ``data_format``, ``w_format``, ``precision`` or ``wanted`` is none of
        those above.

    Source: Y. LeCun et al., "Backpropagation Applied to Handwritten Zip Code Recognition", 1989.

    Examples
    --------
    >>> import numpy as np
    >>> x, w = np.ones((1, 3, 3, 1)), np.ones((2, 2, 1, 1))
    >>> gradients = conv2d_grad(np.ones((1, 2, 2, 1)), x, w, padding="VALID")
    >>> gradients.x[0, :, :, 0]
    array([[1., 2., 1.],
           [2., 4., 2.],
           [1., 2., 1.]])
    >>> gradients.w[:, :, 0, 0]
    array([[4., 4.],
           [4., 4.]])
    """
    arrays = (grad_y, x, w, scale, bias)
    options = (strides, padding, activation, data_format, w_format, precision, wanted)
    return CONV2D_GRAD.plan_for(arrays, options).run(*arrays)


def _resolve(specs, options):
    """Check all arguments; return the Problem and the names of the gradients to compute."""
    grad_y, x, w, scale, bias = specs
    *options, wanted = options
    problem = resolve_problem(x, w, *options)
    check_per_channel(scale, bias, problem.channels_out, like=x)
    check_wanted(wanted, ConvGradients._fields)
    check_grad("grad_y", grad_y, (x.shape[0], *problem.out_shape), x)
    given = {"x": x, "w": w, "bias": bias, "scale": scale}
    return problem, {name for name in wanted if given[name] is not None}


def _infer(specs, options):
    """Check all arguments; return the specs of the gradients, None for those not computed."""
    _, wanted = _resolve(specs, options)
    given = dict(zip(("x", "w", "scale", "bias"), specs[1:], strict=True))
    return tuple(
        given[name].new(given[name].shape) if name in wanted else None
        for name in ConvGradients._fields
    )


def _plan(specs, options):
    """Check all arguments; return the plan of the call."""
    problem, wanted = _resolve(specs, options)
    run = functools.partial(convolution_gradients, problem=problem, wanted=wanted)
    return Plan(_infer(specs, options), run)


def convolution_gradients(grad_y, x, w, scale, bias, *, problem, wanted):
    """Return the wanted gradients of a checked convolution."""
    with np.errstate(all="ignore"):  # what overflows is infinite, with no warning, as on a GPU
        grad, tables = grad_y, {}
        if scale is not None or problem.activation is not None or "bias" in wanted:
            z = None
            if "scale" in wanted or problem.activation is not None:
                z = _convolved(x, w, problem)
            grad, *sums = affine_grad(
                grad_y, z, scale, bias, problem.activation, problem.channels_last
            )
            tables = {n: s for n, s in zip(("scale", "bias"), sums, strict=True) if n in wanted}
        return ConvGradients(
            x=_data_gradient(grad, x, w, problem) if "x" in wanted else None,
            w=_weight_gradient(grad, x, w, problem) if "w" in wanted else None,
            **tables,
        )


def _convolved(x, w, problem):
    """Return the convolution with no scale, bias or activation."""
    z = empty((x.shape[0], *problem.out_shape), x.dtype, x)
    plan_conv2d(spec_of(z), problem._replace(activation=None)).run(x, w, None, None, z)
    return z


def check_wanted(wanted, names):
    """Raise ValueError unless ``wanted`` is a collection of some of the names."""
    if not isinstance(wanted, tuple | list | set | frozenset) or not all(
        name in names for name in wanted
    ):
        raise ValueError(f"wanted must be a tuple of some of {', '.join(names)}, got {wanted!r}")


def check_grad(name, grad, shape, x):
    """Raise unless ``grad`` is the gradient of a result of this shape, in the dtype of ``x``."""
    check_array(name, grad, shape=shape, like=x)
    if grad.dtype != x.dtype:
        check_byte_orders({"x": x, name: grad})
        raise DTypeError(
            f"{name} must have the dtype of x, {x.dtype}, got {grad.dtype}; convert it"
        )
    check_contiguous(name, grad)


def _data_gradient(grad_y, x, w, problem):
    """Return the gradient of x: by cuDNN what it takes of the batch, else by matrix products."""
    dx = empty(x.shape, x.dtype, x)
    if not grad_y.size or not x.size:
        dx[...] = 0
        return dx
    left = [slice(0, len(x))]
    if is_cupy(x) and not _by_cublas(x, problem):
        left = cudnn_grad.data_gradient(grad_y, w, dx, problem)
    for part in left:
        im2col_grad.data_gradient(grad_y[part], w, dx[part], problem)
    return dx


def _weight_gradient(grad_y, x, w, problem):
    """Return the gradient of w, likewise."""
    hwio = tuple(w.shape[axis] for axis in problem.weight_axes("HWIO"))
    total = namespace(x).zeros(hwio, compute_dtype(x.dtype))
    if grad_y.size and x.size:
        left = [slice(0, len(x))]
        if is_cupy(x) and not _by_cublas(x, problem):
            left = cudnn_grad.weight_gradient(x, grad_y, total, problem)
        for part in left:
            im2col_grad.weight_gradient(x[part], grad_y[part], total, problem)
    dw = empty(w.shape, w.dtype, w)
    dw[...] = total.transpose(tuple(map("HWIO".index, problem.w_format)))
    return dw


def _by_cublas(x, problem):
    """Whether cuBLAS is the better choice: where cuDNN would go by NCHW."""
    return x.dtype == np.float32 and problem.is_matrix_product


CONV2D_GRAD = Operator(
    "conv2d_grad",
    arrays=("grad_y", "x", "w", "scale", "bias"),
    options=("strides", "padding", "activation", "data_format", "w_format", "precision", "wanted"),
    infer=_infer,
    plan=_plan,
    results=(),
)
