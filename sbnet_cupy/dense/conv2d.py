"""Dense two-dimensional convolution of images and of block stacks."""

import functools
from typing import Any, NamedTuple

import numpy as np

from ..core.arrays import array_function, empty
from ..core.byte_order import check_byte_orders
from ..core.checks import (
    PYTORCH_ORDERS,
    check_array,
    check_contiguous,
    check_float,
    check_result,
    check_written,
    choice,
    hint_of_order,
)
from ..core.operator import Operator, Plan
from ..core.sizes import output_size, padding_pairs, pair
from ..errors import DTypeError, ShapeError
from . import cudnn, im2col
from .activation import check_activation


class Problem(NamedTuple):
    """A convolution without its arrays: sizes and options, resolved and checked."""

    kernel: tuple[int, int]
    strides: tuple[int, int]
    pads: tuple[tuple[int, int], tuple[int, int]]
    out_size: tuple[int, int]
    channels_out: int
    channels_last: bool
    w_format: str
    activation: str | None
    tf32: bool

    @property
    def out_shape(self):
        """Shape of one image of the result."""
        channels = (self.channels_out,)
        return self.out_size + channels if self.channels_last else channels + self.out_size

    @property
    def is_matrix_product(self):
        """Whether the image itself, as a matrix ``[N*H*W, C]``, is multiplied by the weights."""
        plain = self.kernel == self.strides == (1, 1) and not any(map(any, self.pads))
        return plain and self.channels_last

    def weight_axes(self, order):
        """Axes that bring the weights from ``w_format`` to ``order``, for example "OHWI"."""
        return tuple(map(self.w_format.index, order))


@array_function
def conv2d(
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
    out=None,
):
    """Convolve a batch of images, or a block stack, with a dense kernel.

    ``y[n, p, q, k] = activation(scale[k] * sum x[n, p * sh - top + r, q * sw - left + s, c] *
    w[r, s, c, k] + bias[k])``, the sum over r, s and c: the cross-correlation of deep learning,
    with zeros outside the image. The sum, scale, bias and activation are in float32 (float64 for
    float64), and the result is rounded once.

    On a GPU this is cuDNN where its Python front end is installed, else cuBLAS. Before capturing a
    CUDA graph, call it once with the same shapes.

    Parameters
    ----------
    x : array, shape (N, H, W, C), or (N, C, H, W) with ``data_format="NCHW"``
        Images; float16, bfloat16, float32 or float64. C-contiguous; a NumPy array that is not is
        copied.
    w : array, shape (R, S, C, K), or (K, C, R, S) with ``w_format="OIHW"``
        Kernel, of the dtype of ``x``. Copied when it has to be laid out anew.
    strides : int or (int, int)
        Steps between output pixels.
    padding : "SAME", "VALID", int, (int, int) or ((top, bottom), (left, right))
        SAME is TensorFlow's: ceil(n / stride) outputs, the odd pixel of padding at the end.
    scale, bias : float array, shape (K,), optional
        Factor and offset per output channel, for example a folded batch norm.
    activation : None, "relu", "silu" or "gelu"
        Applied last; gelu is the exact one.
    data_format : "NHWC" or "NCHW"
        Layout of ``x`` and of the result.
    w_format : "HWIO" or "OIHW"
        Layout of ``w``.
    precision : None, "ieee" or "tf32"
        How float32 is multiplied. "tf32" lets a GPU round the factors to 11 significant bits;
        "ieee" and None do not. No effect on other dtypes and on the CPU.
    out : array, optional
        Receives the result; it is returned, and must share no memory with the inputs.

    Returns
    -------
    y : array, shape (N, P, Q, K), or (N, K, P, Q)
        In the dtype, in the library and on the device of ``x``.

    Raises
    ------
    ShapeError
        If sizes do not fit together, or ``x`` or ``out`` is not contiguous.
    DTypeError
        If ``x`` is not of a floating dtype, or ``w`` is of another one.
    ValueError
        If ``activation``, ``data_format``, ``w_format`` or ``precision`` is none of those above.

    Source: K. Chellapilla, S. Puri, P. Simard, "High Performance Convolutional Neural Networks for
    Document Processing", 2006, for the convolution as a matrix product.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.ones((1, 4, 4, 1), np.float32)
    >>> conv2d(x, np.ones((3, 3, 1, 1), np.float32))[0, :, :, 0]
    array([[4., 6., 6., 4.],
           [6., 9., 9., 6.],
           [6., 9., 9., 6.],
           [4., 6., 6., 4.]], dtype=float32)
    """
    options = (strides, padding, activation, data_format, w_format, precision)
    plan = CONV2D.plan_for((x, w, scale, bias, out), options)
    if out is None:
        out = empty(plan.shape, x.dtype, x)
    else:
        check_written(out, ("x", "w", "scale", "bias"), (x, w, scale, bias))
    plan.run(x, w, scale, bias, out)
    return out


def _resolve(specs, options):
    """Check all arguments; return the spec of the result and the Problem."""
    x, w, scale, bias, out = specs
    problem = resolve_problem(x, w, *options)
    check_per_channel(scale, bias, problem.channels_out, like=x)
    result = x.new((x.shape[0], *problem.out_shape))
    check_result(out, result)
    return result, problem


def _infer(specs, options):
    """Check all arguments; return the spec of the result."""
    return _resolve(specs, options)[:1]


def _plan(specs, options):
    """Check all arguments; return the plan of the call."""
    return plan_conv2d(*_resolve(specs, options))


def plan_conv2d(result, problem):
    """Return the plan of a checked convolution."""
    if not result.size:
        return Plan((result,), _nothing_convolved)
    body = _conv2d_cuda if result.on_gpu else _conv2d_numpy
    return Plan((result,), functools.partial(body, problem=problem))


def _nothing_convolved(x, w, scale, bias, out):
    """Write a result with no elements."""


def resolve_problem(x, w, strides, padding, activation, data_format, w_format, precision):
    """Check all arguments of conv2d but scale, bias and out; return them as a Problem.

    ``x`` and ``w`` are specs.
    """
    check_choice("data_format", data_format, ("NHWC", "NCHW"))
    check_choice("w_format", w_format, ("HWIO", "OIHW"))
    check_precision(precision)
    check_activation(activation)
    check_array("x", x, ndim=4)
    check_float("x", x.dtype)
    check_contiguous("x", x)
    check_array("w", w, ndim=4, like=x)
    if w.dtype != x.dtype:
        check_byte_orders({"x": x, "w": w})
        raise DTypeError(f"w must have the dtype of x, {x.dtype}, got {w.dtype}; convert it")
    r, s, c, k = (w.shape[w_format.index(letter)] for letter in "HWIO")
    h, width, channels = (x.shape[data_format.index(letter)] for letter in "HWC")
    if min(r, s, k) < 1 or c != channels:
        wanted = ", ".join({"I": str(channels), "O": "K", "H": "R", "W": "S"}[i] for i in w_format)
        raise ShapeError(
            f"w must have shape ({wanted}), for x of {channels} channels, with R, S and K at least "
            f"1, got {w.shape}; w_format is {w_format!r} here and data_format {data_format!r}"
            + hint_of_order(w.shape, channels, w_format, PYTORCH_ORDERS)
        )
    strides = pair(strides, "strides")
    pads = padding_pairs((h, width), (r, s), strides, padding)
    return Problem(
        kernel=(r, s),
        strides=strides,
        pads=pads,
        out_size=output_size((h, width), (r, s), strides, pads),
        channels_out=k,
        channels_last=data_format == "NHWC",
        w_format=w_format,
        activation=activation,
        tf32=precision == "tf32",
    )


def check_per_channel(scale, bias, channels_out, like):
    """Raise unless ``scale`` and ``bias`` are None or hold a float per output channel."""
    for name, value in (("scale", scale), ("bias", bias)):
        if value is not None:
            check_array(name, value, kinds="f", like=like)
            if value.shape != (channels_out,):
                raise ShapeError(
                    f"{name} must have shape ({channels_out},), one value per output channel of "
                    f"w, got {value.shape}"
                )


def check_precision(precision):
    """Raise ValueError unless ``precision`` is None, "ieee" or "tf32"."""
    check_choice("precision", precision, (None, "ieee", "tf32"))


def check_choice(name, value, allowed):
    """Raise ValueError unless ``value`` is None or a string, and one of ``allowed``."""
    if not (value is None or isinstance(value, str)) or value not in allowed:
        raise ValueError(f"{name} must be {choice(map(repr, allowed))}, got {value!r}")


def _conv2d_numpy(x, w, scale, bias, out, *, problem):
    """Matrix products; what overflows a float is infinite, with no warning, as on a GPU."""
    with np.errstate(all="ignore"):
        im2col.convolve(x, w, out, scale, bias, problem)


def _conv2d_cuda(x, w, scale, bias, out, *, problem):
    """Let cuDNN take what it can of the batch; the rest goes through matrix products."""
    if x.dtype == np.float32 and problem.is_matrix_product:  # for which cuDNN would go by NCHW
        left = [slice(None)]
    else:
        left = cudnn.convolve(x, w, out, scale, bias, problem)
    for part in left:
        im2col.convolve(x[part], w, out[part], scale, bias, problem)


CONV2D = Operator(
    "conv2d",
    arrays=("x", "w", "scale", "bias", "out"),
    options=("strides", "padding", "activation", "data_format", "w_format", "precision"),
    infer=_infer,
    plan=_plan,
)
