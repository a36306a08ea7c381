"""stack_conv2d_grad: from the gradient of a stack's convolution to those of its arguments."""

from typing import Any, NamedTuple

from ...core.arrays import array_function, compute_dtype, empty, namespace
from ...dense.activation import activation_grad
from ...dense.affine_grad import affine_grad
from ...dense.conv2d_grad import check_wanted
from . import taps
from .checks import check_like, check_stack, computing
from .neighbours import Places
from .stack_conv2d import check_epilogue, convolve, resolve_stack_conv
from .stack_pixel_mask import inside


class StackConvGradients(NamedTuple):
    """Gradients of the arguments of :func:`stack_conv2d`; None for what was None or not wanted."""

    x: Any = None
    w: Any = None
    scale: Any = None
    bias: Any = None
    residual: Any = None


@array_function
def stack_conv2d_grad(
    grad_y,
    x,
    w,
    table,
    *,
    strides=(1, 1),
    padding: Any = "SAME",
    dilation=(1, 1),
    groups=1,
    transposed=False,
    output_padding=(0, 0),
    scale=None,
    bias=None,
    residual=None,
    activation=None,
    w_format="HWIO",
    precision=None,
    wanted=("x", "w", "scale", "bias", "residual"),
):
    """Compute the gradients of stack_conv2d from the gradient of its result.

    The gradient of ``x`` is the transposed convolution of that of the sums (for a transposed
    convolution, the convolution) through the table; that of ``w`` the sum of their products over
    all pixels of active blocks, in a fixed order. Sums are in float32 (float64 for float64) and
    rounded once. Same input, same bits.

    With ``scale`` or ``activation`` the sums are computed again, in the dtype of ``x``. The
    derivative of relu at 0 is 0.

    Parameters
    ----------
    grad_y : array, shape (M, b_h', b_w', K)
        Gradient of the result of :func:`stack_conv2d` with these arguments, in the dtype of ``x``.
        What it holds outside the image and in rows that are no block is not read.
    x, w, table
        As they were given to :func:`stack_conv2d`.
    strides, padding, dilation, groups, transposed, output_padding, w_format, precision, activation
        As for :func:`stack_conv2d`.
    scale, bias, residual : array, optional
        As they were given to :func:`stack_conv2d`. The values of ``bias`` and ``residual`` matter
        only under an ``activation``; their presence asks for their gradients.
    wanted : tuple of "x", "w", "scale", "bias" and "residual"
        The gradients to compute; the others are None.

    Returns
    -------
    gradients : StackConvGradients(x, w, scale, bias, residual)
        Fresh arrays of the shapes and dtypes of the arguments. Those of stacks are 0 outside the
        image and in rows that are no block.

    Raises
    ------
    ShapeError
        If sizes do not fit together.
    DTypeError
        If ``x`` is not of a floating dtype, or ``w``, ``residual`` or ``grad_y`` is of another one.
    ValueError
        If ``activation``, ``w_format``, ``precision`` or ``wanted`` is none of those above.

    Source: Y. LeCun et al., "Backpropagation Applied to Handwritten Zip Code Recognition", 1989.

    Examples
    --------
    >>> import numpy as np
    >>> table = block_table(np.ones((1, 2, 4)), 2)
    >>> x, w = np.ones((2, 2, 2, 1)), np.ones((3, 3, 1, 1))
    >>> gradients = stack_conv2d_grad(np.ones((2, 2, 2, 1)), x, w, table)
    >>> gradients.x[0, :, :, 0]
    array([[4., 6.],
           [4., 6.]])
    >>> gradients.w[:, :, 0, 0]
    array([[3., 4., 3.],
           [6., 8., 6.],
           [3., 4., 3.]])
    """
    problem = resolve_stack_conv(
        x, w, table, strides, padding, dilation, groups, transposed, output_padding, activation,
        w_format, precision,
    )  # fmt: skip
    check_epilogue(x, table, problem, scale, bias, residual)
    check_wanted(wanted, StackConvGradients._fields)
    after = table.at(*problem.stage_out)
    check_stack("grad_y", grad_y, after, channels=problem.channels_out)
    check_like("grad_y", grad_y, x)
    given = {"x": x, "w": w, "scale": scale, "bias": bias, "residual": residual}
    wanted = {name for name in wanted if given[name] is not None}
    with computing(x):
        places = Places.of(table)
        epilogue = taps.Epilogue(scale, bias, residual, activation)
        grad, tables = _through_epilogue(grad_y, x, w, table, problem, epilogue, places, wanted)
        found = {name: value for name, value in tables.items() if name in wanted}
        if "x" in wanted:
            found["x"] = _data_gradient(grad, x, w, problem, places)
        if "w" in wanted:
            found["w"] = _weight_gradient(grad, x, w, problem, places)
    return StackConvGradients(**found)


def _through_epilogue(grad_y, x, w, table, problem, epilogue, places, wanted):
    """Return the gradient of the sums, 0 outside the image, and those of the epilogue's arrays."""
    xp = namespace(x)
    after = places.at(table.at(*problem.stage_out))
    counted = xp.zeros((*grad_y.shape[:3], 1), bool)
    counted[: len(places)] = inside(after)
    grad = xp.where(counted, grad_y, xp.zeros((), grad_y.dtype))
    scale, bias, activation = epilogue.scale, epilogue.bias, epilogue.activation
    if activation is not None:
        before = _again(x, w, table, problem, epilogue._replace(activation=None))
        wide = compute_dtype(x.dtype)
        before, grad = before.astype(wide, copy=False), grad.astype(wide, copy=False)
        grad = activation_grad(grad, before, activation)
        grad = xp.where(counted, grad, wide.type(0)).astype(x.dtype, copy=False)
    tables = {"residual": grad}
    if scale is not None or bias is not None:
        sums = None
        if scale is not None and "scale" in wanted:
            sums = _again(x, w, table, problem, taps.Epilogue())
            sums = xp.where(counted, sums, xp.zeros((), sums.dtype))
        grad, tables["scale"], tables["bias"] = affine_grad(
            grad, grad if sums is None else sums, scale, bias, None, True
        )
    return grad, tables


def _again(x, w, table, problem, epilogue):
    """Compute the forward pass again, with this epilogue."""
    out = empty((len(x), *problem.stage_out.block_size, problem.channels_out), x.dtype, x)
    convolve(x, w, table, problem, epilogue, out)
    return out


def _data_gradient(grad, x, w, problem, places):
    """Return the gradient of x: the transposed convolution, 0 outside the image."""
    dx = empty(x.shape, x.dtype, x)
    after = places.at(places.table.at(*problem.stage_out))
    body = taps.to_coarse if problem.transposed else taps.to_fine
    options = (problem.window, problem.groups, problem.tf32, taps.Epilogue())
    body(grad, problem.fine_to_coarse(w), after, *options, dx)
    xp = namespace(dx)
    xp.copyto(dx[: len(places)], xp.zeros((), dx.dtype), where=~inside(places))
    return dx


def _weight_gradient(grad, x, w, problem, places):
    """Return the gradient of w, in its format."""
    fine, coarse = (grad, x) if problem.transposed else (x, grad)
    here = places.at(places.table.at(*problem.window.fine))
    total = taps.weight_gradient(fine, coarse, here, problem.window, problem.groups, problem.tf32)
    dw = empty(w.shape, w.dtype, w)
    dw[...] = problem.as_given(total)
    return dw
