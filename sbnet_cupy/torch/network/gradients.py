"""Training on a GPU: convolutions and batch norms of a stack, with gradients of their own.

The gradient of a convolution on a stack is a convolution on the stack again, through the same
table, so it is as sparse, runs the same kernels, and has the same bits each time: PyTorch adds up
the gradient of ``index_select``, which would read the rims, in the order in which threads arrive.
A gradient is 0 wherever an activation is: outside the image, and in rows past the count.
"""

import functools

import torch
from torch.autograd import Function
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight

from .._graph_branch import branch
from . import cuda, cuda_ends, cuda_norm, cuda_pool, cuda_weights, ops
from .entry import Entry, gathered
from .epilogue import finish
from .halos import zero_outside

_MOST_FOLDED = 16  # channels, with the pixels of a stride


def serves(x, table):
    """Whether a stack has gradients of its own here."""
    return x.is_cuda and not table.whole and not table.static


def normalizes(x, table):
    """Whether batch norms have gradients of their own here: on stacks and on whole images."""
    return x.is_cuda and not table.static


def conv(x, table, block, size, weight, bias, **options):
    """Convolve a stack as ``ops.conv`` does, and record how it is differentiated."""
    if not (_is_usual(x, weight, bias, options) and serves(x, table)):
        return ops.conv(x, table, block, size, weight, bias, **options)
    dtype = _dtype_of(x)
    x = x.to(dtype)
    if torch.is_autocast_enabled(x.device.type):  # a weight in float32 is rounded as it is packed
        weight, bias = (
            t.to(dtype) if t is not None and t.dtype not in (dtype, torch.float32) else t
            for t in (weight, bias)
        )
    elif weight.dtype != dtype:
        return ops.conv(x, table, block, size, weight, bias, **options)  # which refuses it
    where = table, block, size
    return _Conv.apply(x, weight, bias, where, options)


def _is_usual(x, weight, bias, options):
    """Whether the border is one of zeros, and PyTorch does not refuse the weights."""
    if options["mode"] != "zeros" or options["fill"] != 0 or weight.device != x.device:
        return False
    return bias is None or (bias.device == x.device and bias.shape == weight.shape[:1])


def _dtype_of(x):
    """Return the dtype in which x is convolved: autocast's for float32."""
    if x.dtype == torch.float32 and torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def reads_image(entry, weight, bias, options):
    """Whether :func:`conv_image` convolves the image of a call, which has no gradient."""
    image = entry.image
    return (
        _is_usual(image, weight, bias, options)
        and options["groups"] == 1
        and serves(image, entry.table)
        and not image.requires_grad
        and cuda_ends.has_few_channels(image, weight)
        and cuda.convolves(_dtype_of(image))
        and (_dtype_of(image) == weight.dtype or torch.is_autocast_enabled(image.device.type))
    )


def conv_image(entry, block, size, weight, bias, **options):
    """Convolve the image of a call at its active blocks, and record how weights are differentiated.

    The kernel reads the image. Blocks are gathered for the gradient of the weights alone.
    """
    return _ImageConv.apply(entry.image, weight, bias, (entry.table, block, size), options)


def _convolve(x, where, weight, bias, options, turned=False):
    """Convolve with weights that may be float32, or turned round: (stack, whether by a kernel).

    A kernel writes zeros outside of the images and in rows that are no block.
    """
    if options["groups"] == 1 and cuda.serves(x):
        sizes = options["stride"], options["pads"], options["dilation"]
        y = cuda_weights.conv(x, *where, weight, bias, *sizes, turned)
        if y is not None:
            return y, True
    weight, bias = (t if t is None else t.to(x.dtype) for t in (weight, bias))
    if turned:
        weight = weight.flip(2, 3)
        weight = weight.transpose(0, 1) if options["groups"] == 1 else weight
    return _owned(ops.conv(x, *where, weight, bias, **options)), False


def _owned(y):
    """Return the same memory as no view of another tensor, so that it may be written in place."""
    return y.new_empty(0).set_(y.untyped_storage(), y.storage_offset(), y.shape, y.stride())


class _Conv(Function):
    @staticmethod
    def forward(ctx, x, weight, bias, where, options):
        ctx.save_for_backward(x, weight, bias)
        ctx.where, ctx.options = where, options
        return _convolve(x, where, weight, bias, options)[0]

    @staticmethod
    def backward(ctx, grad):
        x, weight, bias = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        if torch.is_grad_enabled():
            return _conv_again(ctx, x, weight, bias, grad)
        grad = grad.contiguous(memory_format=torch.channels_last)
        dx, both = None, all(wanted[:2])
        is_beside = both and _keeps_nothing(x, weight, ctx.where[1], ctx.options)
        with branch(grad if is_beside else None) as beside:
            with beside:
                found = _grad_weights(ctx, lambda: x, grad, weight, bias)
            if wanted[0]:
                dx = _grad_x(grad, weight, *ctx.where, ctx.options)
        return dx, *found, None, None


class _ImageConv(Function):
    @staticmethod
    def forward(ctx, image, weight, bias, where, options):
        ctx.save_for_backward(image, weight, bias)
        ctx.where, ctx.options, ctx.dtype = where, options, _dtype_of(image)
        table, block, size = where
        image, kernel, addend = (t if t is None else t.to(ctx.dtype) for t in (image, weight, bias))
        sizes = options["stride"], options["pads"], options["dilation"], None, None
        y = cuda_ends.conv(Entry(image, table), block, size, kernel, addend, *sizes)
        return _convolve(_blocks(ctx, image), where, weight, bias, options)[0] if y is None else y

    @staticmethod
    def backward(ctx, grad):
        image, weight, bias = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _conv_again(ctx, _blocks(ctx, image), weight, bias, grad)
        grad = grad.contiguous(memory_format=torch.channels_last)
        blocks = functools.partial(_blocks, ctx, image)
        return None, *_grad_weights(ctx, blocks, grad, weight, bias), None, None


def _conv_again(ctx, x, weight, bias, grad):
    """Return gradients of a convolution, to be differentiated again: by PyTorch's operations."""
    same = (t if t is None else t.to(x.dtype) for t in (weight, bias))
    y = ops.conv(x, *ctx.where, *same, **ctx.options)
    return (*_again(y, (x, weight, bias), ctx.needs_input_grad, grad), None, None)


def _grad_weights(ctx, blocks, grad, weight, bias):
    """Return the gradients of weight and bias; ``blocks()`` is the stack, for the first alone."""
    dweight = dbias = None
    if ctx.needs_input_grad[1]:
        dweight = _grad_weight(blocks(), grad, weight, *ctx.where, ctx.options)
    if ctx.needs_input_grad[2]:
        dbias = grad.sum((0, 2, 3), dtype=bias.dtype)
    return dweight, dbias


def _blocks(ctx, image):
    """Return the active blocks of the image of a call, in the dtype of the convolution."""
    return gathered(image, ctx.where[0]).to(ctx.dtype)


def _again(y, inputs, wanted, grad):
    """Return gradients that can be differentiated."""
    chosen = [t for t, w in zip(inputs, wanted, strict=False) if w]
    found = iter(torch.autograd.grad(y, chosen, grad, create_graph=True))
    return [next(found) if w else None for _, w in zip(inputs, wanted, strict=False)]


def _grad_x(grad, weight, table, block, size, options):
    """Convolve the gradient with the kernel turned round, or transposed where there is a stride."""
    stride, dilation, groups = options["stride"], options["dilation"], options["groups"]
    pads, kernel = options["pads"], weight.shape[2:]
    out, size_out = cuda.sizes_after(block, size, tuple(kernel), stride, pads, dilation)
    spans = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    around = (spans[0] - pads[0], spans[0] - pads[1], spans[1] - pads[2], spans[1] - pads[3])
    one_each = groups == weight.shape[0] and weight.shape[1] == 1
    if stride == (1, 1) and min(around) >= 0 and (groups == 1 or one_each):
        sizes = {"stride": stride, "pads": around, "dilation": dilation, "groups": groups}
        dx, is_clear = _convolve(grad, (table, out, size_out), weight, None, sizes, turned=True)
    else:
        dx = ops.conv_transpose(
            grad, table, out, size_out, weight.to(grad.dtype), None, stride=stride,
            padding=(pads[0], pads[2]), dilation=dilation, groups=groups, out_size=size,
        )  # fmt: skip
        is_clear = table.divides(block, size)  # and rows of no block have no gradient
    return dx if is_clear else zero_outside(dx, table, block, size)


def _grad_weight(x, grad, weight, table, block, size, options):
    """Return the sum over all pixels of products of the gradient with what the kernel read."""
    if _is_folded(x, weight, block, options):
        return _grad_weight_folded(x, grad, weight, table, block, size, options)
    stride, dilation, rims = options["stride"], options["dilation"], _rims(weight, options)
    if rims is None:  # pixels between those that are read are left out
        x, stride = x if stride == (1, 1) else x[:, :, :: stride[0], :: stride[1]], (1, 1)
    elif any(rims):
        x = ops.halo(x, table, block, size, rims)
    x = x.contiguous(memory_format=torch.channels_last)
    found = conv2d_weight(x, weight.shape, grad, stride, 0, dilation, options["groups"])
    return found.to(weight.dtype)


def _keeps_nothing(x, weight, block, options):
    """Whether the gradient of the weights takes nothing that a table keeps for other streams."""
    by_kernel = cuda.convolves(x.dtype) and min(_rims(weight, options) or (0,)) >= 0
    return by_kernel and not _is_folded(x, weight, block, options)


def _rims(weight, options):
    """Return the rim of a block that the gradient of the weights reads; None of single pixels."""
    kernel, pads = tuple(weight.shape[2:]), options["pads"]
    if kernel == (1, 1) and not any(pads):
        return None
    return ops.rim(kernel, options["stride"], pads, options["dilation"])


def _is_folded(x, weight, block, options):
    """Whether few channels are strided over: then pixels that lie in a stride become channels."""
    (down, across), kernel = options["stride"], weight.shape[2:]
    return (
        (down, across) != (1, 1)
        and down * across * x.shape[1] <= _MOST_FOLDED
        and options["groups"] == 1
        and options["dilation"] == (1, 1)
        and block[0] % down == block[1] % across == 0
        and all(k > p for k, p in zip(kernel, options["pads"][::2], strict=True))
    )


def _grad_weight_folded(x, grad, weight, table, block, size, options):
    """Return the same as a convolution without a stride, of more channels.

    Tap ``r`` reads row ``s * o + r - p`` for row ``o``: of the ``s`` rows that are one now, that is
    one of row ``o + t``, with ``t = (r - p) // s``. So the taps lie ``lead`` behind a multiple of
    the stride.
    """
    strides, taps, rims, leads = options["stride"], [], [], []
    for s, k, p in zip(strides, weight.shape[2:], options["pads"][::2], strict=True):
        before, after = p + (-p % s), k - 1 - p
        taps.append(before // s + after // s + 1)
        rims += [before // s, after // s]
        leads.append(before - p)
    x = x if table.divides(block, size) else zero_outside(x, table, block, size)
    block, size = (
        tuple(-(-n // s) for n, s in zip(pixels, strides, strict=True)) for pixels in (block, size)
    )
    down, across = strides
    x = x.unflatten(3, (-1, across)).unflatten(2, (-1, down))  # [M, C, h, down, w, across]
    x = x.permute(0, 2, 4, 3, 5, 1).flatten(3).permute(0, 3, 1, 2)  # channels: down, across, C
    x = ops.halo(x, table, block, size, tuple(rims)) if any(rims) else x
    x = x.contiguous(memory_format=torch.channels_last)
    found = conv2d_weight(x, (len(weight), x.shape[1], *taps), grad)
    found = found.unflatten(1, (down, across, -1)).permute(0, 3, 4, 1, 5, 2)
    found = found.flatten(4).flatten(2, 3)  # [K, C, taps * down, taps * across]
    rows, columns = (slice(i, i + k) for i, k in zip(leads, weight.shape[2:], strict=True))
    return found[:, :, rows, columns].to(weight.dtype)


def batch_norm(x, table, block, size, weight, bias, eps):
    """Normalize by active pixels inside the image: (result, mean, variance, their number)."""
    where = table, block, size
    if not normalizes(x, table):
        return _batch_norm(x, *where, weight, bias, eps)
    key = "number", block, size
    number = table.keep(key, lambda: table.active_pixels(block, size).sum().int().view(1))
    y, mean, variance = _BatchNorm.apply(x, weight, bias, where, number, eps)
    return y, mean, variance, number.to(mean.dtype)


def _batch_norm(x, table, block, size, weight, bias, eps):
    x = zero_outside(x, table, block, size)  # 0 times infinity is in no gradient
    mean, variance, number = table.mean_inside(x, block, size)
    scale = torch.rsqrt(variance + eps)
    scale = scale if weight is None else scale * weight
    shift = -mean * scale if bias is None else bias - mean * scale
    out = x.to(scale.dtype) * scale[:, None, None] + shift[:, None, None]
    return out.to(x.dtype), mean, variance, number


class _BatchNorm(Function):
    """Statistics of all pixels, where those that do not count are 0, and what follows for others.

    By the operators of SyncBatchNorm, which take statistics that were put together elsewhere.
    """

    @staticmethod
    def forward(ctx, given, weight, bias, where, number, eps):
        x = zero_outside(given, *where).contiguous(memory_format=torch.channels_last)
        mean, deviation = torch.batch_norm_stats(x, 0.0)  # one over the standard deviation
        share = (x.numel() // x.shape[1]) / number.clamp(min=1).to(mean.dtype)
        variance = (deviation.square().reciprocal() + mean.square()) * share
        mean = mean * share
        variance = (variance - mean.square()).clamp(min=0)
        deviation = torch.rsqrt(variance + eps)
        ctx.save_for_backward(given, weight, bias, x, mean, deviation, number)
        ctx.where, ctx.eps = where, eps
        y = torch.batch_norm_elemt(x, weight, bias, mean, deviation, eps)
        ctx.mark_non_differentiable(mean, variance)
        return y, mean, variance

    @staticmethod
    def backward(ctx, grad, *_):
        given, weight, bias, x, mean, deviation, number = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        if torch.is_grad_enabled():
            y = _batch_norm(given, *ctx.where, weight, bias, ctx.eps)[0]
            return (*_again(y, (given, weight, bias), wanted, grad), None, None, None)
        grad = grad.contiguous(memory_format=torch.channels_last)
        sums = torch.batch_norm_backward_reduce(
            grad, x, mean, deviation, weight, wanted[0], wanted[1], wanted[2]
        )
        dx = None
        if wanted[0]:
            dx = torch.batch_norm_backward_elemt(
                grad, x, mean, deviation, weight, sums[0], sums[1], number.clamp(min=1)
            )
            dx = zero_outside(dx, *ctx.where)
        return dx, sums[2] if wanted[1] else None, sums[3] if wanted[2] else None, None, None, None


class Norm(Function):
    """What follows the statistics of a stack: ``activation(norm(x) + residual)``, by kernels."""

    @staticmethod
    def forward(ctx, x, weight, bias, residual, statistics, where, activation, eps):
        """Normalize, add, and activate, in one pass."""
        y = cuda_norm.normalize(x, *where, statistics, residual, activation)
        ctx.where, ctx.activation, ctx.eps = where, activation, eps
        ctx.is_sum = residual is not None
        result = y if ctx.is_sum and activation is not None else None
        ctx.save_for_backward(x, weight, bias, statistics, result)
        return y

    @staticmethod
    def backward(ctx, grad):
        """Return the gradients of x, weight, bias and residual."""
        x, weight, bias, statistics, y = ctx.saved_tensors
        wanted, nothing = ctx.needs_input_grad[:4], (None,) * 4
        if torch.is_grad_enabled():
            return (*_norm_again(ctx, grad, x, weight, bias, y, wanted), *nothing)
        dtype = next((t.dtype for t in (weight, bias) if t is not None), statistics.dtype)
        call = grad, x, y, *ctx.where, statistics, ctx.activation, dtype, wanted
        return (*cuda_norm.differentiate(*call), *nothing)


def _norm_again(ctx, grad, x, weight, bias, y, wanted):
    """Return gradients of x, weight, bias and residual that can be differentiated."""
    grad = zero_outside(grad if y is None else torch.where(y <= 0, 0, grad), *ctx.where)
    out = _batch_norm(x, *ctx.where, weight, bias, ctx.eps)[0]
    if not ctx.is_sum:
        out = finish(out, None, ctx.activation)
    found = [None] * 3
    if any(wanted[:3]):
        found = _again(out, (x, weight, bias), wanted, grad)[:3]
    return *found, grad if wanted[3] else None


def max_pool(x, window, ceil_mode=False):
    """Pool a stack by PyTorch's operations."""
    table, kernel, stride, dilation = window.table, window.kernel, window.stride, window.dilation
    inside = not any(window.pads) and not ceil_mode and kernel == stride and dilation == (1, 1)
    if not inside:
        rims = ops.rim(kernel, stride, window.pads, dilation)
        fill = float("-inf") if window.fill is None or ceil_mode else window.fill
        x = table.compute(ops.halo, x, table, window.block, window.size, rims, fill)
    x = table.compute(F.max_pool2d, x, kernel, stride, 0, dilation)
    if torch.is_grad_enabled() and not table.filled(window.out_block, window.out_size):
        # of nothing there is no largest number: keep infinity out of the gradients of weights
        x = torch.where(table.inside(window.out_block, window.out_size)[:, None], x, 0)
    return x


class MaxPool(Function):
    """The maximum of windows by a kernel that tells which pixels it chose."""

    @staticmethod
    def forward(ctx, x, window, ceil_mode):
        """Pool."""
        y, choice = cuda_pool.max_pool_choice(x, window)
        ctx.save_for_backward(x, choice)
        ctx.call = window, ceil_mode
        return y

    @staticmethod
    def backward(ctx, grad):
        """Give the gradient of each window to the pixel that it chose."""
        x, choice = ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated again: by PyTorch's operations
            y = max_pool(x, *ctx.call)
            return torch.autograd.grad(y, x, grad, create_graph=True)[0], None, None
        return cuda_pool.max_pool_grad(grad, choice, ctx.call[0]), None, None
