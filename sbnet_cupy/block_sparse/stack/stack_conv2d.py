"""stack_conv2d: convolution of a stack of blocks, across the borders of blocks."""

from typing import Any, NamedTuple

import numpy as np

from ...core.arrays import array_function, empty, namespace
from ...core.checks import (
    PYTORCH_ORDERS,
    check_array,
    check_flag,
    check_result,
    check_written,
    hint_of_order,
)
from ...core.operator import Operator, Plan
from ...core.sizes import is_integer, pair
from ...dense.activation import check_activation
from ...dense.conv2d import check_choice, check_per_channel, check_precision, conv2d
from ...dense.packed_weights import PackedWeights, arrays_of_weights
from ...errors import ShapeError
from . import taps
from .block_table import TABLE_ARRAYS, TABLE_SIZES, BlockTable, split_table
from .checks import check_like, check_stack, computing
from .fetch import fetch
from .neighbours import Places
from .stack_conv_launch import as_forward, forward_kernel, plan_kernel
from .stack_halo import halo_axes
from .stages import Window, resolve_transposed, resolve_window


class StackProblem(NamedTuple):
    """A convolution of a stack without its arrays: sizes and options, resolved and checked."""

    window: Window
    groups: int
    channels_out: int
    transposed: bool
    w_format: str
    activation: str | None
    tf32: bool

    @property
    def stage_out(self):
        """Sizes of the result's stage."""
        return self.window.fine if self.transposed else self.window.coarse

    def fine_to_coarse(self, w):
        """View the kernel as ``[R, S, C_fine / groups, C_coarse]``."""
        letters = "HWIO"
        if self.transposed and self.w_format == "IOHW":
            return w.transpose(2, 3, 1, 0)
        w = w.transpose([self.w_format.index(letter) for letter in letters])
        return taps.swap_channels(w, self.groups) if self.transposed else w

    def as_given(self, w):
        """Bring a kernel ``[R, S, C_fine / groups, C_coarse]`` back to ``w_format``."""
        if self.transposed and self.w_format == "IOHW":
            return w.transpose(3, 2, 0, 1)
        w = taps.swap_channels(w, self.groups) if self.transposed else w
        return w.transpose(["HWIO".index(letter) for letter in self.w_format])


@array_function
def stack_conv2d(
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
    out=None,
):
    """Convolve a stack of blocks as the images that they are part of.

    ``y[p, q, k] = activation(scale[k] * sum x[p * sh - top + r * dh, q * sw - left + s * dw, c] *
    w[r, s, c, k] + bias[k] + residual[p, q, k])`` for all pixels ``(p, q)`` of active blocks, the
    sum over r, s and the channels c of k's group. With ``transposed`` the sum is that of a
    transposed convolution: over all pixels ``i`` and ``r`` with ``p = i * sh - top + r * dh``.
    Pixels in no active block and outside the image count 0: the result is the dense layer's on
    images that are 0 outside of the active blocks.

    The result is the stack of the stage ``table.after_conv(kernel, strides, padding, dilation)``,
    or ``table.after_transposed(kernel, strides, padding, dilation, output_padding)``. Sums, scale,
    bias, residual and activation are in float32 (float64 for float64), and the result is rounded
    once (on a GPU, where a library computes it, before the residual too).

    Parameters
    ----------
    x : array, shape (M, b_h, b_w, C)
        Stack; float16, bfloat16, float32 or float64. C-contiguous.
    w : array or PackedWeights
        Kernel, of the dtype of ``x``, in ``w_format``. A depthwise convolution has ``groups=C``.
        On a GPU an array is laid out anew at each call, a :class:`PackedWeights` once.
    table : BlockTable
        Of the stage of ``x``.
    strides : int or (int, int)
        They must divide the block size; the blocks of the result are that much smaller, or larger
        if ``transposed``.
    padding : int, (int, int), ((top, bottom), (left, right)), "SAME" or "VALID"
        As for :func:`conv2d`. Pixel
        ``(p, q)`` of the result belongs to block ``(p // b_h, q // b_w)``, ``b`` its block size,
        and all must: of a result larger than the blocks there is nowhere to keep the rest. For a
        transposed convolution it is that of the convolution it transposes, and "SAME" gives
        ``n * stride`` pixels.
    dilation : int or (int, int)
        Distance between the taps of the kernel.
    groups : int
        Groups of channels that are convolved apart.
    transposed : bool
        Compute the transposed convolution.
    output_padding : int or (int, int)
        Rows and columns more that a transposed convolution gives at the end.
    scale, bias : float array, shape (K,), optional
        Factor and offset per output channel, for example a folded batch norm; None where ``w`` is
        a PackedWeights, which has its own.
    residual : array, shape of the result, optional
        Stack that is added before the activation, of the dtype of ``x``.
    activation : None, "relu", "silu" or "gelu"
        Applied last; gelu is the exact one.
    w_format : "HWIO", "OIHW" or "IOHW"
        ``(R, S, C / groups, K)``, ``(K, C / groups, R, S)``, or ``(C, K / groups, R, S)``, which
        is PyTorch's for a transposed convolution and only for those.
    precision : None, "ieee" or "tf32"
        As for :func:`conv2d`. That and the format of a PackedWeights hold without being given.
    out : array, optional
        Receives the result; it is returned, and must share no memory with the inputs.

    Returns
    -------
    y : array, shape (M, b_h', b_w', K)
        In the dtype and library of ``x``. Rows that are no block are 0.

    Raises
    ------
    ShapeError
        If sizes do not fit together: strides that do not divide the block, a padding that makes
        the result larger than the blocks, groups that do not divide the channels.
    DTypeError
        If ``x`` is not of a floating dtype, ``w`` or ``residual`` is of another one, or ``table``
        is no BlockTable.
    ValueError
        If ``activation``, ``w_format`` or ``precision`` is none of those above.

    Source: the dense layer on masked images; V. Dumoulin, F. Visin, "A guide to convolution
    arithmetic for deep learning", arXiv:1603.07285, for the transposed one. Kernels:
    cuda_src/block_sparse/stack/stack_conv2d.cu, stack_depthwise.cu

    Examples
    --------
    >>> import numpy as np
    >>> table = block_table(np.ones((1, 4, 4)), 2)
    >>> x = stack_from_image(np.ones((1, 4, 4, 1)), table)
    >>> y = stack_conv2d(x, np.ones((3, 3, 1, 1)), table, strides=2, padding=1)
    >>> stack_to_image(y, table.after_conv(3, 2, 1))[0, :, :, 0]
    array([[4., 6.],
           [6., 9.]])
    """
    tables, sizes = split_table(table)
    w_array, scale_array, bias_array, w_format, precision = arrays_of_weights(
        w, scale, bias, w_format, precision
    )
    read = (x, w_array, *tables, scale_array, bias_array, residual)
    options = (
        *sizes, strides, padding, dilation, groups, transposed, output_padding, activation,
        w_format, precision,
    )  # fmt: skip
    plan = STACK_CONV2D.plan_for((*read, out), options)
    if out is None:
        out = empty(plan.shape, x.dtype, x)
    else:
        check_written(out, _READ, read)
    plan.run(x, w, *tables, scale, bias, residual, out)
    return out


_READ = ("x", "w", *TABLE_ARRAYS, "scale", "bias", "residual")


def resolve_stack_conv(
    x, w, table, strides, padding, dilation, groups, transposed, output_padding, activation,
    w_format, precision,
):  # fmt: skip
    """Check the arguments that decide sizes; return them as a StackProblem."""
    check_flag("transposed", transposed)
    check_activation(activation)
    check_choice("w_format", w_format, ("HWIO", "OIHW", *(["IOHW"] if transposed else [])))
    check_precision(precision)
    check_stack("x", x, table)
    check_array("w", w, ndim=4, like=x)
    check_like("w", w, x)
    channels = x.shape[3]
    if not is_integer(groups) or groups < 1 or channels % groups:
        raise ShapeError(
            f"groups must be a positive integer that divides the {channels} channels of x, got "
            f"{groups!r}"
        )
    r, s, i, o = (w.shape[w_format.index(letter)] for letter in "HWIO")
    if w_format == "IOHW":
        i, o, fits = i // groups, o * groups, i == channels
    else:
        fits = i * groups == channels
    if min(r, s, o) < 1 or o % groups or not fits:
        wanted = {
            "HWIO": f"(R, S, {channels // groups}, K)",
            "OIHW": f"(K, {channels // groups}, R, S)",
            "IOHW": f"({channels}, K / {groups}, R, S)",
        }[w_format]
        raise ShapeError(
            f"w must have shape {wanted} in {w_format} order, K a multiple of groups, for x of "
            f"{channels} channels in {groups} groups, got {w.shape}"
            + hint_of_order(w.shape, channels // groups, w_format, PYTORCH_ORDERS)
        )
    if transposed:
        window = resolve_transposed(table, (r, s), strides, padding, dilation, output_padding)
    elif pair(output_padding, "output_padding", minimum=0) != (0, 0):
        raise ShapeError(
            f"output_padding must be 0 unless transposed is True, got {output_padding!r}"
        )
    else:
        window = resolve_window(table, (r, s), strides, padding, dilation)
    tf32 = precision == "tf32"
    return StackProblem(window, groups, o, bool(transposed), w_format, activation, tf32)


def check_epilogue(x, table, problem, scale, bias, residual):
    """Check what follows the sums."""
    check_per_channel(scale, bias, problem.channels_out, like=x)
    if residual is not None:
        after = table.at(*problem.stage_out)
        check_stack("residual", residual, after, channels=problem.channels_out)
        check_like("residual", residual, x)


def convolve(x, w, table, problem, epilogue, out):
    """Write the convolution to ``out`` by matrix products over the taps, on NumPy or CuPy."""
    places = Places.of(table)
    body = taps.to_fine if problem.transposed else taps.to_coarse
    kernel = problem.fine_to_coarse(w)
    body(x, kernel, places, problem.window, problem.groups, problem.tf32, epilogue, out)


def _resolve(specs, options):
    """Check all arguments; return the spec of the result, the table's and the StackProblem."""
    x, w, *arrays, scale, bias, residual, out = specs
    *sizes, w_format, precision = options
    table = BlockTable(*arrays, *sizes[:2])
    problem = resolve_stack_conv(x, w, table, *sizes[2:], w_format, precision)
    check_epilogue(x, table, problem, scale, bias, residual)
    result = x.new((x.shape[0], *problem.stage_out.block_size, problem.channels_out))
    check_result(out, result)
    return result, table, problem


def _infer(specs, options):
    """Check all arguments; return the spec of the result."""
    return _resolve(specs, options)[:1]


def _plan(specs, options):
    """Check all arguments; return the plan of the call."""
    result, table, problem = _resolve(specs, options)
    if not result.size:
        return Plan((result,), lambda *arrays: None)
    if specs[0].on_gpu:
        return _plan_cuda(specs, result, table, problem)
    return Plan((result,), _body(convolve, table, problem))


def _body(function, table, problem):
    """Return what a plan runs: ``function`` of x, w, table, problem, epilogue and out."""
    sizes = table.block_size, table.image_size

    def run(x, w, bin_counts, active_block_indices, grid, scale, bias, residual, out):
        if isinstance(w, PackedWeights):
            w, scale, bias = w._given()
        epilogue = taps.Epilogue(scale, bias, residual, problem.activation)
        with computing(x):
            table = BlockTable(bin_counts, active_block_indices, grid, *sizes)
            function(x, w, table, problem, epilogue, out)

    return run


def _plan_cuda(specs, result, table, problem):
    """One kernel, where there is one; see cuda_src/block_sparse/stack/stack_conv2d.cu."""
    x, w, *_, residual, out = specs
    plan = plan_kernel(x, w, table, problem, residual, out or result, result)
    if plan is not None:
        return plan
    forward = as_forward(problem)
    if forward is None:
        return Plan((result,), _body(_by_library, table, problem))
    shape = (*problem.window.kernel, x.shape[3], problem.channels_out)
    turned = _plan_cuda((x, w.new(shape), *specs[2:]), result, table, forward)

    def run(x, w, bin_counts, active_block_indices, grid, scale, bias, residual, out):
        if isinstance(w, PackedWeights):
            w, scale, bias = w._given()
        with computing(x):
            w = namespace(x).ascontiguousarray(forward_kernel(problem, w))
            turned.run(
                x, w, bin_counts, active_block_indices, grid, scale, bias, residual, out
            )  # fmt: skip

    return Plan((result,), run)


def _by_library(x, w, table, problem, epilogue, out):
    """Blocks with their rims, convolved by the dense ``conv2d``, where it has such convolutions."""
    window = problem.window
    plain = not problem.transposed and problem.groups == 1 and window.dilation == (1, 1)
    plain &= all(before < k for before, k in zip(window.before, window.kernel, strict=True))
    if not plain or epilogue.residual is not None or x.dtype == np.float64:
        convolve(x, w, table, problem, epilogue, out)
        return
    places, rim, halo = Places.of(table), _reach(window), x
    if window.kernel != (1, 1) or any(map(any, window.pads)):  # else it reads the pixel itself
        axes = halo_axes(table.block_size, rim)
        halo = empty((len(x), axes[0].count, axes[1].count, x.shape[3]), x.dtype, x)
        fetch(x, places, *axes, halo)
    conv2d(
        halo, w, strides=window.strides, padding="VALID", scale=epilogue.scale, bias=epilogue.bias,
        activation=epilogue.activation, w_format=problem.w_format,
        precision="tf32" if problem.tf32 else None, out=out,
    )  # fmt: skip
    taps.clear_unlisted(out, places)


def _reach(window):
    """Return the rim that all outputs of a block read: ((top, bottom), (left, right))."""
    return tuple(
        (before, max((k - 1) * d + 1 - s - before, 0))
        for before, k, d, s in zip(
            window.before, window.kernel, window.dilation, window.strides, strict=True
        )
    )


STACK_CONV2D = Operator(
    "stack_conv2d",
    arrays=(*_READ, "out"),
    options=(
        *TABLE_SIZES, "strides", "padding", "dilation", "groups", "transposed", "output_padding",
        "activation", "w_format", "precision",
    ),
    infer=_infer,
    plan=_plan,
)  # fmt: skip
