"""The operator sparse_conv2d, and the convolution of a stack that its gradient is made of.

The forward pass is the library's own. The backward pass gathers the image again rather than keep
the stack, and convolves backwards with PyTorch (cuDNN's dgrad and wgrad on a GPU), at the precision
that was asked for whatever ``torch.backends`` says.
"""

import contextlib
import threading
from typing import NamedTuple

import torch

from ..block_sparse.block_params import BlockParams
from ..block_sparse.conv.fused_conv import launch_of_conv
from ..block_sparse.conv.sparse_conv2d import sparse_conv2d as core_sparse_conv2d
from ..dense.onednn import step_to_one_column
from ._activation import activation_backward, wide
from ._calls import LayerCalls
from ._copies import GATHER, SCATTER
from ._launches import Launches, apart, lay, run
from ._native import check_contiguous, compute
from ._packed import packed
from ._registry import register


def flatten_params(params):
    """Return the ten integers of a BlockParams, which an operator can take."""
    if not isinstance(params, BlockParams):
        raise TypeError(
            f"block_params must be a BlockParams, got {type(params).__name__}; build it with "
            "calc_block_params"
        )
    return (
        *params.bsize, *params.bsize_out, *params.boffset, *params.bcount, *params.bstride,
    )  # fmt: skip


def pairs(numbers):
    """Return a flat sequence as pairs: the padding's, or the fields of a BlockParams."""
    return tuple(tuple(numbers[i : i + 2]) for i in range(0, len(numbers), 2))


class Geometry(NamedTuple):
    """The fields of a BlockParams, which may be symbolic here."""

    bsize: tuple
    bsize_out: tuple
    boffset: tuple
    bcount: tuple
    bstride: tuple


# ------------------------------------------------------------------------- convolution of a stack


_FLAGS = threading.RLock()  # the flags are the process's: one thread at a time sets them


@contextlib.contextmanager
def _exactly(precision, x):
    """Let cuDNN multiply as ``precision`` says, reproducibly; nothing to say elsewhere.

    ``torch.backends.cudnn.flags`` will not do: it fails where the user has set ``fp32_precision``.
    """
    if not x.is_cuda:
        yield
        return
    cudnn = torch.backends.cudnn
    wanted = [(cudnn, "benchmark", False), (cudnn, "deterministic", True)]
    if hasattr(cudnn, "conv"):  # PyTorch 2.9 and newer
        wanted.append((cudnn.conv, "fp32_precision", precision or "ieee"))
    else:
        wanted.append((cudnn, "allow_tf32", precision == "tf32"))
    with _FLAGS:
        before = [(holder, name, getattr(holder, name)) for holder, name, _ in wanted]
        try:
            for holder, name, value in wanted:
                setattr(holder, name, value)
            yield
        finally:
            for holder, name, value in before:
                setattr(holder, name, value)


def _convolve(x, w, strides, precision):
    step = None if x.is_cuda else step_to_one_column(x.shape[3], x.shape[2], w.shape[3], strides)
    if step is not None:
        x, strides = x[:, :, : w.shape[3]], step
    with _exactly(precision, x):
        y = torch.ops.aten.convolution(
            x.permute(0, 3, 1, 2), w, None, strides, (0, 0), (1, 1), False, (0, 0), 1
        )
    return y.permute(0, 2, 3, 1).contiguous()


def _convolve_fake(x, w, strides, precision):
    size = output_size(x.shape[1:3], w.shape[2:], strides, (0, 0, 0, 0))
    return x.new_empty((x.shape[0], *size, w.shape[0]))


def _convolve_setup(ctx, inputs, output):
    x, w, ctx.strides, ctx.precision = inputs
    ctx.save_for_backward(x, w)


def _convolve_backward(ctx, grad):
    x, w = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[:2])
    for_x, for_w = CONVOLVE_BACKWARD(grad, x, w, ctx.strides, ctx.precision, *wanted)
    return for_x if wanted[0] else None, for_w if wanted[1] else None, None, None


def _backward(grad, x, w, strides, precision, for_x, for_w):
    if not x.is_cuda:
        w = w.contiguous()  # the CPU's own convolution refuses others where it has to find dw
    with _exactly(precision, x):
        dx, dw, _ = torch.ops.aten.convolution_backward(
            grad.permute(0, 3, 1, 2), x.permute(0, 3, 1, 2), w, None, strides, (0, 0), (1, 1),
            False, (0, 0), 1, (for_x, for_w, False),
        )  # fmt: skip
    return (
        dx.permute(0, 2, 3, 1).contiguous() if for_x else x.new_empty(0),
        dw.contiguous() if for_w else w.new_empty(0),
    )


def _backward_fake(grad, x, w, strides, precision, for_x, for_w):
    return x.new_empty(x.shape if for_x else 0), w.new_empty(w.shape if for_w else 0)


def _backward_setup(ctx, inputs, output):
    grad, x, w, ctx.strides, ctx.precision, ctx.for_x, ctx.for_w = inputs
    ctx.save_for_backward(grad, x, w)


def _backward_backward(ctx, dx, dw):
    """Both results are bilinear: dx in (grad, w), dw in (grad, x)."""
    grad, x, w = ctx.saved_tensors
    options = (ctx.strides, ctx.precision)
    to_grad = to_x = to_w = None
    if ctx.for_x:
        to_grad = CONVOLVE(dx, w, *options)
        to_w = CONVOLVE_BACKWARD(grad, dx, w, *options, False, True)[1]
    if ctx.for_w:
        more = CONVOLVE(x, dw, *options)
        to_grad = more if to_grad is None else to_grad + more
        to_x = CONVOLVE_BACKWARD(grad, x, dw, *options, True, False)[0]
    return to_grad, to_x, to_w, None, None, None, None


CONVOLVE = register(
    "convolve(Tensor x, Tensor w, int[] strides, str? precision) -> Tensor",
    _convolve,
    _convolve_fake,
    backward=_convolve_backward,
    setup_context=_convolve_setup,
)
CONVOLVE_BACKWARD = register(
    "convolve_backward(Tensor grad, Tensor x, Tensor w, int[] strides, str? precision, bool for_x, "
    "bool for_w) -> (Tensor, Tensor)",
    _backward,
    _backward_fake,
    backward=_backward_backward,
    setup_context=_backward_setup,
)


def output_size(image_hw, kernel, strides, padding):
    """Size of a convolution's output; sizes may be symbolic. ``padding``: four numbers."""
    axes = zip(image_hw, kernel, strides, padding[::2], padding[1::2], strict=True)
    sizes = [(n + before + after - k) // s + 1 for n, k, s, before, after in axes]
    return [max(n, 0) if type(n) is int else torch.sym_max(n, 0) for n in sizes]


# ----------------------------------------------------------------------------------- sparse_conv2d


def _launch_of(x, bin_counts, active_block_indices, out, base, w, bias, options):
    params, strides, padding, *rest, method = options
    if method == "gather":
        return None
    options = (tuple(params[2:4]), strides, pairs(padding), *rest, None)
    return launch_of_conv(x, bin_counts, active_block_indices, out, w, bias, options)


_CONVOLUTIONS = Launches(_launch_of)
CALLS = LayerCalls()


def conv_again(key, known, x, w, bin_counts, active_block_indices, bias, base, out):
    """Do a call that is known; return its result, or None where it must go the whole way."""
    table, no_residual = (bin_counts, active_block_indices), 0
    y = CALLS.again(key, known, x, (w, None, bias), *table, base, out, no_residual)
    if y is None or not key[1]:
        return y
    params, strides, padding, activation, *rest = known[3]
    return SPARSE_CONV2D.recorded(
        x, w, *table, params, strides, padding, bias, activation, base, *rest, [y]
    )


def keep_conv(key, arguments, y):
    """Keep the launch of a call of the operator that had this result."""
    x, w, counts, indices, params, strides, padding, bias, activation, base, *rest = arguments
    options = (params, strides, padding, activation, *rest)
    launch = _CONVOLUTIONS.find((x, counts, indices, y, base), options, (w, bias))
    CALLS.keep(key, launch, x, y, (w, None, bias), options)


def _sparse_conv2d(*arguments):
    out = _sparse_conv2d_fake(*arguments)
    _sparse_conv2d_into(*arguments, out)
    return out


def _sparse_conv2d_into(x, w, bin_counts, active_block_indices, params, strides, padding, bias,
                        activation, base, data_format, w_format, precision, method,
                        out):  # fmt: skip
    check_contiguous("out", out)
    tensors, weights = (x, bin_counts, active_block_indices, out, base), (w, bias)
    options = (
        params, strides, padding, activation, data_format, w_format, precision, method
    )  # fmt: skip
    launch = _CONVOLUTIONS.find(tensors, options, weights)
    if launch and apart(out, (x, bin_counts, active_block_indices, w, bias)) and lay(out, base):
        run(launch.run, x, packed(launch, w, None, bias), None, *tensors[1:4])
        return
    compute(
        core_sparse_conv2d, x, x, w, (bin_counts, active_block_indices),
        BlockParams(*pairs(params)), strides=strides, padding=pairs(padding), bias=bias,
        activation=activation, base=base, data_format=data_format, w_format=w_format,
        precision=precision, method=method, out=out,
    )  # fmt: skip
    _CONVOLUTIONS.keep(tensors, options, weights)


def _sparse_conv2d_fake(x, w, bin_counts, active_block_indices, params, strides, padding, bias,
                        activation, base, data_format, w_format, precision, method):  # fmt: skip
    return x.new_empty(result_shape(x, w, strides, padding, data_format, w_format))


def result_shape(x, w, strides, padding, data_format, w_format):
    """Shape of what a convolution gives; sizes may be symbolic."""
    last = data_format == "NHWC"
    image_hw = x.shape[1:3] if last else x.shape[2:]
    kernel = [w.shape[w_format.index(letter)] for letter in "HW"]
    size = output_size(image_hw, kernel, strides, padding)
    channels = (w.shape[w_format.index("O")],)
    return (x.shape[0], *size, *channels) if last else (x.shape[0], *channels, *size)


def _sparse_conv2d_setup(ctx, inputs, output):
    (x, w, *table, ctx.params, ctx.strides, _, bias, ctx.activation, _, ctx.data_format,
     ctx.w_format, ctx.precision, _) = inputs  # fmt: skip
    ctx.bias_dtype = None if bias is None else bias.dtype
    relu = output if ctx.activation == "relu" else None  # shows where relu let through
    keep_bias = bias if ctx.activation in ("silu", "gelu") else None
    ctx.save_for_backward(x, w, *table, keep_bias, relu)


def _sparse_conv2d_backward(ctx, grad):
    x, w, counts, indices, bias, result = ctx.saved_tensors
    table, grads = (counts, indices), [None] * 14
    params = Geometry(*pairs(ctx.params))
    transpose = ctx.data_format == "NCHW"  # stacks are NHWC
    tiles = (params.bsize_out, (0, 0), params.bsize_out)
    layout = (transpose, ctx.data_format)
    if ctx.needs_input_grad[9]:
        zeros = grad.new_zeros((indices.shape[0], *params.bsize_out, _channels(grad, ctx)))
        grads[9] = SCATTER(zeros, *table, grad, *tiles, False, False, *layout)
    if not any(ctx.needs_input_grad[i] for i in (0, 1, 7)):
        return tuple(grads)

    kernel = w.permute([ctx.w_format.index(letter) for letter in "OIHW"])
    grad = GATHER(grad, *table, *tiles, *layout, None, None, None)
    grid = (params.bsize, params.boffset, params.bstride)
    blocks = GATHER(x, *table, *grid, *layout, None, None, None)
    if result is not None:
        shown = GATHER(result, *table, *tiles, *layout, None, None, None)
        grad = activation_backward(grad, shown, "relu")
    elif ctx.activation is not None:
        z = wide(CONVOLVE(blocks, kernel, ctx.strides, ctx.precision))
        z = z if bias is None else z + bias.to(z.dtype)
        grad = activation_backward(wide(grad), z, ctx.activation).to(x.dtype)
    if ctx.needs_input_grad[7]:
        grads[7] = wide(grad).sum((0, 1, 2)).to(ctx.bias_dtype)
    wanted = ctx.needs_input_grad[:2]
    if any(wanted):
        for_x, for_w = CONVOLVE_BACKWARD(grad, blocks, kernel, ctx.strides, ctx.precision, *wanted)
        if wanted[0]:
            zeros = x.new_zeros(x.shape)
            grads[0] = SCATTER(for_x, *table, zeros, *grid, True, True, *layout)
        if wanted[1]:
            grads[1] = for_w.permute(["OIHW".index(letter) for letter in ctx.w_format])
    return tuple(grads)


def _channels(image, ctx):
    return image.shape[3 if ctx.data_format == "NHWC" else 1]


_ARGUMENTS = (
    "Tensor x, Tensor w, Tensor bin_counts, Tensor active_block_indices, SymInt[] params, "
    "int[] strides, SymInt[] padding, Tensor? bias, str? activation, Tensor? base, "
    "str data_format, str w_format, str? precision, str method"
)
SPARSE_CONV2D = register(
    f"sparse_conv2d({_ARGUMENTS}) -> Tensor",
    _sparse_conv2d,
    _sparse_conv2d_fake,
    backward=_sparse_conv2d_backward,
    setup_context=_sparse_conv2d_setup,
)
SPARSE_CONV2D_INTO = register(
    f"sparse_conv2d_into({_ARGUMENTS}, Tensor(a!) out) -> ()",
    _sparse_conv2d_into,
    lambda *arguments: None,
)
