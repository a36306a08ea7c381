"""Functions that look at windows of pixels: convolution, pooling, padding."""

import functools
import operator

import torch
from torch.nn import functional as F

from . import aliases, casts, cuda, cuda_ends, cuda_pool, gradients, ops, units
from . import tensor as T
from .ends import with_rest
from .entry import Entry
from .handlers import BORDERED, handles
from .image_values import image_values
from .neighbours import pixels_of
from .plans import Plan, TransposedPlan, wider
from .pointwise import copied


def two(value):
    """Return an int, also of NumPy or a tensor, or one or two of them as a pair of ints or None."""
    if isinstance(value, int):
        return (value, value)
    try:
        value = (operator.index(value),)
    except TypeError:  # a sequence
        value = tuple(value)
    value = tuple(v if v is None or isinstance(v, int) else operator.index(v) for v in value)
    return value * 2 if len(value) == 1 else value


class Window:
    """Where a window op reads and what it makes: the geometry of one call.

    ``fits`` is False where its result has no place on the grid: the block is no multiple of the
    stride, or the result is larger than the blocks cover.
    """

    def __init__(self, x, kernel, stride, padding, dilation, ceil=False):
        self.table, self.block, self.size, self.hw, reach = T.facts(x)
        border = T.border_of(x)
        self.mode, self.fill, self.pads = "zeros", None, padding
        if border:
            self.mode, self.fill = border[4:]
            self.pads = tuple(a + b for a, b in zip(border[:4], padding, strict=True))
        self.kernel, self.stride, self.dilation = kernel, stride, dilation
        stage = (self.table.block, self.table.grid, self.block, self.size)
        found = _geometry(*stage, kernel, stride, self.pads, dilation, ceil)
        self.out_block, self.out_size, self.fits, looks = found
        self.reach = reach + looks

    def wrap(self, value):
        """Return the StackTensor of a result."""
        self.note()
        return T.StackTensor(value, self.table, self.out_block, self.out_size, (2, 3), self.reach)

    def note(self):
        """Remember that a stage has this size."""
        self.table.block_of.setdefault(self.out_size, self.out_block)


@functools.lru_cache(maxsize=4096)
def _geometry(whole, grid, block, size, kernel, stride, pads, dilation, ceil):
    """Return the block and the size of a result, whether it fits the grid, and how far it looks."""
    ends = (pads[:2], pads[2:])
    each = zip(size, ends, kernel, stride, dilation, strict=True)
    out_size = tuple(_out(*one, ceil) for one in each)
    out_block = tuple(b // s for b, s in zip(block, stride, strict=True))
    fits = all(b % s == 0 for b, s in zip(block, stride, strict=True)) and min(out_size) > 0
    fits = fits and all(n <= g * b for n, g, b in zip(out_size, grid, out_block, strict=True))
    looks = [  # back from the last of the pixels that one of the result covers, on from the first
        i / b * max(before + s - 1, d * (k - 1) - before, 0)
        for i, b, (before, _), k, s, d in zip(
            whole, block, ends, kernel, stride, dilation, strict=True
        )
    ]
    return out_block, out_size, fits, max(looks)


def _out(length, pads, kernel, stride, dilation, ceil):
    """Return the length of a result as PyTorch computes it."""
    last = length + sum(pads) - dilation * (kernel - 1) - 1  # where a window may begin
    out = -(-last // stride) + 1 if ceil else last // stride + 1
    if ceil and (out - 1) * stride >= length + pads[0]:
        out -= 1
    return out


def is_image(x):
    """Whether x is a StackTensor in the order N, C, H, W."""
    return isinstance(x, T.StackTensor) and T.facts(x)[3] == (2, 3) and T.dims(x) == 4


@handles("conv2d")
def conv2d(func, input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    """Convolve the stack; in evaluation wait for what follows."""
    if not is_image(input) or isinstance(weight, T.StackTensor):
        return NotImplemented
    stride, dilation, kernel = two(stride), two(dilation), tuple(weight.shape[2:])
    pads = _conv_pads(padding, kernel, stride, dilation)
    border = T.border_of(input)
    if border and any(pads) and (border[4] != "zeros" or border[5] != 0):
        return NotImplemented
    window = Window(input, kernel, stride, pads, dilation)
    if not window.fits or T.shape(input)[1] != weight.shape[1] * groups:
        return NotImplemented
    options = {
        "stride": stride, "pads": window.pads, "dilation": dilation, "groups": groups,
        "fill": window.fill or 0.0, "mode": window.mode,
    }  # fmt: skip
    table = window.table
    aliases.note_order(weight, table)
    trained = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (weight, bias)
    )
    source = T.plan_of(input)
    to = None if trained else casts.for_waiting(table)
    if not trained and units.may_lead(input, kernel, options):
        source = units.Ahead(T.plan_of(input), input)
    elif not isinstance(source, Entry) or not _reads_image(source, weight, bias, options, trained):
        alone = kernel == (1, 1) and not any(window.pads)
        source = T.value_as(input, to) if alone else T.picture(input, to)
        trained = trained or (torch.is_grad_enabled() and source.requires_grad)
    if table.trace is not None:
        table.trace.convolution(func.__name__, weight, window, groups)
    if trained or table.weights is None:
        if isinstance(source, Entry):
            call = (source, window.block, window.size, weight, bias)
            out = window.wrap(gradients.conv_image(*call, **options))
        else:
            call = (source, table, window.block, window.size, weight, bias)
            out = window.wrap(gradients.conv(*call, **options))
        return with_rest(out, lambda: _bias_of(weight, weight.shape[0], bias))
    window.note()
    row = None if table.trace is None else table.trace.row
    plan = Plan(source, T.facts(input), weight, bias, options, to, row)
    return T.postpone(table, plan, window.out_block, window.out_size, window.reach)


def _bias_of(weight, channels, bias):
    """Return what a convolution makes of zeros, for each channel."""
    return weight.new_zeros(channels) if bias is None else bias


def _reads_image(entry, weight, bias, options, trained):
    """Whether a convolution of the image of a call is left to the kernel that reads it."""
    if trained:
        return gradients.reads_image(entry, weight, bias, options)
    return cuda_ends.reads_image(entry.image, weight, casts.dtype_for(entry), **options)


def _conv_pads(padding, kernel, stride, dilation):
    if isinstance(padding, str):
        totals = [
            d * (k - 1) if padding == "same" else 0 for k, d in zip(kernel, dilation, strict=True)
        ]
        (top, left) = (t // 2 for t in totals)
        return (top, totals[0] - top, left, totals[1] - left)
    p = two(padding)
    return (p[0], p[0], p[1], p[1])


@handles("conv_transpose2d")
def conv_transpose2d(
    func, input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1
):
    """Convolve the stack transposed: blocks grow by the stride."""
    if not is_image(input) or isinstance(weight, T.StackTensor):
        return NotImplemented
    table, block, size, _, reach = T.facts(input)
    stride, padding, extra, dilation = map(two, (stride, padding, output_padding, dilation))
    kernel = tuple(weight.shape[2:])
    each = list(zip(size, kernel, stride, padding, extra, dilation, strict=True))
    out = tuple((n - 1) * s - 2 * p + d * (k - 1) + e + 1 for n, k, s, p, e, d in each)
    out_block = tuple(b * s for b, s in zip(block, stride, strict=True))
    if min(out) < 1 or not table.fits(out_block, out):
        return NotImplemented
    if table.trace is not None:
        table.trace.transposed(func.__name__, weight, size, out, block, groups)
    aliases.note_order(weight, table)
    table.block_of.setdefault(out, out_block)
    reach += max(
        max(d * (k - 1) - p + 1 - s, p, 0) * i / b
        for i, b, (_, k, s, p, _, d) in zip(table.block, out_block, each, strict=True)
    )
    to = None if cuda.records(weight, bias) else casts.for_waiting(table)
    source = T.picture(input, to)
    options = {
        "stride": stride, "padding": padding, "dilation": dilation, "groups": groups,
        "out_size": out,
    }  # fmt: skip
    waits = cuda.serves(source) and not cuda.records(weight, bias) and groups == 1
    waits = waits and not table.whole and table.weights is not None
    if waits and casts.after(weight.dtype, to) == source.dtype:
        row = None if table.trace is None else table.trace.row
        plan = TransposedPlan(source, T.facts(input), weight, bias, options, to, row)
        return T.postpone(table, plan, out_block, out, reach)
    call = source, table, block, size, weight, bias
    if table.tape is not None:
        table.tape.note_weights((bias,))
    y = T.StackTensor(
        table.compute(ops.conv_transpose, *call, **options), table, out_block, out, (2, 3), reach
    )
    return with_rest(y, lambda: _bias_of(weight, weight.shape[1] * groups, bias))


@handles("max_pool2d")
def max_pool2d(
    func, input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False,
    return_indices=False,
):  # fmt: skip
    """Pool the stack: 0 in inactive blocks, nothing outside the image."""
    if not is_image(input) or return_indices:
        return NotImplemented
    kernel, stride, p = two(kernel_size), two(stride or kernel_size), two(padding)
    if any(2 * a > k for a, k in zip(p, kernel, strict=True)):
        return NotImplemented  # PyTorch says what is wrong
    dilation, ceil_mode = two(dilation), ceil_mode and stride != (1, 1)
    window = Window(input, kernel, stride, (p[0], p[0], p[1], p[1]), dilation, ceil_mode)
    border = T.border_of(input)
    if not input.is_floating_point():
        return NotImplemented
    if not window.fits and dilation == (1, 1) and _is_whole(input, kernel, p):
        return global_maximum(input)
    if not window.fits or (border and (any(p) or ceil_mode or border[4] != "zeros")):
        return NotImplemented
    table, to = window.table, T.narrow_dtype(input)
    if to is not None:  # the largest number is the same one when all are rounded
        window.note()
        make = functools.partial(_largest_as, input, window, ceil_mode)
        places = {"block": window.out_block, "size": window.out_size, "reach": window.reach}
        return wider(input, make, T.shape(input), to, (input,), **places)
    value = T.picture(input)
    if table.whole:
        value = table.compute(_bordered, value, border)
        call = value, kernel, stride, p, dilation, ceil_mode
        return window.wrap(table.compute(F.max_pool2d, *call))
    pooled = cuda_pool.max_pool(value, table, window)
    if pooled is not None:
        return window.wrap(pooled)
    if cuda.records(value) and cuda_pool.chooses(value, table, window):
        return window.wrap(gradients.MaxPool.apply(value, window, ceil_mode))
    return window.wrap(gradients.max_pool(value, window, ceil_mode))


def _largest_as(x, window, ceil_mode, dtype):
    """Pool a stack in a dtype: its own, or that of autocast."""
    value = T.value_as(x, None if dtype == x.dtype else dtype)
    pooled = cuda_pool.max_pool(value, window.table, window)
    return gradients.max_pool(value, window, ceil_mode) if pooled is None else pooled


def _bordered(value, border):
    """Pad a picture as F.pad put off."""
    if border is None:
        return value
    top, bottom, left, right, mode, fill = border
    if mode == "zeros":
        return F.pad(value, (left, right, top, bottom), value=fill)
    return F.pad(value, (left, right, top, bottom), mode=mode)


@handles("avg_pool2d")
def avg_pool2d(
    func, input, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True,
    divisor_override=None,
):  # fmt: skip
    """Pool the stack: sums over windows, divided as the dense layer does at its border."""
    if not is_image(input):
        return NotImplemented
    kernel, stride, p = two(kernel_size), two(stride or kernel_size), two(padding)
    if any(2 * a > k for a, k in zip(p, kernel, strict=True)):
        return NotImplemented  # PyTorch says what is wrong
    window = Window(input, kernel, stride, (p[0], p[0], p[1], p[1]), (1, 1), ceil_mode)
    if not window.fits:
        is_mean = divisor_override is None and _is_whole(input, kernel, p)
        return global_mean(input, (2, 3), True) if is_mean else NotImplemented
    table, value = window.table, T.picture(input)
    if table.whole:
        options = (kernel, stride, p, ceil_mode, count_include_pad, divisor_override)
        return window.wrap(table.compute(F.avg_pool2d, value, *options))
    pooled = cuda_pool.avg_pool(value, table, window, count_include_pad, divisor_override)
    if pooled is not None:
        return window.wrap(pooled)
    if any(p) or ceil_mode or kernel != stride:
        rims = ops.rim(kernel, stride, window.pads, (1, 1))
        value = table.compute(ops.halo, value, table, window.block, window.size, rims)
    if divisor_override is not None or not (ceil_mode or any(p)):
        call = value, kernel, stride, 0, False, True, divisor_override
        return window.wrap(table.compute(F.avg_pool2d, *call))
    sums = table.compute(F.avg_pool2d, value, kernel, stride, 0, False, True, 1)
    counted = window.out_block, kernel, stride, p, window.size, count_include_pad
    return window.wrap(table.compute(_divided, sums, table, *counted))


def _divided(sums, table, *counted):
    """Divide sums over windows by the number of pixels that each counts."""
    each = zip((table.down, table.across), *counted[:-1], strict=True)
    down, across = (_counts(*one, counted[-1]) for one in each)
    return sums / (down[:, None, :, None] * across[:, None, None, :]).to(sums.dtype)


def _counts(cell, length, kernel, stride, pad, size, include):
    """Return how many pixels each window of a row counts along an axis: ``[M, b]``."""
    start = pixels_of(cell, length) * stride - pad
    end = torch.clamp(start + kernel, max=size + pad)
    if not include:
        start, end = start.clamp(min=0), end.clamp(max=size)
    return (end - start).clamp(min=1)


@handles("adaptive_avg_pool2d", "_adaptive_avg_pool2d")
def adaptive_avg_pool2d(func, input, output_size):
    """Average whole images, or windows of them by a kernel; without one, on the image."""
    if not is_image(input):
        return NotImplemented
    if two(output_size) == (1, 1):
        return global_mean(input, (2, 3), True)
    return _adaptive_pool(input, output_size, "mean")


@handles("adaptive_max_pool2d")
def adaptive_max_pool2d(func, input, output_size, return_indices=False):
    """Take the maximum of whole images, or of windows by a kernel; find places on the image."""
    if func is not F.adaptive_max_pool2d or not is_image(input) or return_indices:
        return NotImplemented
    if two(output_size) == (1, 1):
        return global_maximum(input)
    return _adaptive_pool(input, output_size, "max")


def _adaptive_pool(x, output_size, mode):
    """Pool windows of the images, or return NotImplemented where no kernel does."""
    table, block, size, _, _ = T.facts(x)
    windows = tuple(
        n if out is None else out for out, n in zip(two(output_size), size, strict=True)
    )
    if table.whole or min(windows) < 1:
        return NotImplemented
    pooled = cuda_pool.adaptive_pool(T.value_of(x), table, block, size, windows, mode)
    if pooled is None:
        return NotImplemented
    table.reduced = table.reduced or "an adaptive pooling"
    return image_values(pooled, table)


def _is_whole(x, kernel, pads):
    """Whether a window is the image, with nothing around it."""
    return tuple(kernel) == tuple(T.facts(x)[2]) and not any(pads) and not T.border_of(x)


def global_maximum(x):
    """Take the maximum of whole images: a tensor ``[N, C, 1, 1]``."""
    table, block, size, _, _ = T.facts(x)
    table.reduced = table.reduced or "a maximum over the image"
    largest = table.compute(table.max_pixels, T.value_of(x), block, size)
    return table.compute(torch.unflatten, largest, 1, (-1, 1, 1))


def global_mean(x, over, keepdim, total=False):
    """Average (or sum) whole images: a tensor with one value for each image and channel."""
    table, block, size, hw, _ = T.facts(x)
    mode = "sum" if total else "mean"
    value = casts.widened(T.value_of(x), torch.sum if total else torch.mean)
    sums = table.compute(table.reduce_pixels, value, block, size, hw, mode)
    if table.reduced is None:
        table.reduced = "a mean over the image"
    if keepdim:
        for i in sorted(over):
            sums = table.compute(torch.unsqueeze, sums, i)
    return image_values(sums, table)


_MODES = {
    "constant": "zeros",
    "replicate": "replicate",
    "reflect": "reflect",
    "circular": "circular",
}


@handles("pad", "_pad")
def pad(func, input, pad, mode="constant", value=None):
    """Pad the image: kept for the convolution or pooling that follows."""
    pads = tuple(pad) + (0,) * (4 - len(pad))
    if not is_image(input) or T.border_of(input) or len(pads) != 4 or mode not in _MODES:
        return NotImplemented
    if not all(isinstance(p, int) for p in pads):
        return NotImplemented
    left, right, top, bottom = pads
    table, block, size, _, reach = T.facts(input)
    if mode == "circular":
        table.reduced = table.reduced or "circular padding"
    if not any(pads):
        return copied(input)
    if min(pads) < 0:
        return NotImplemented
    if mode != "constant" and any(
        p > s - (mode == "reflect")
        for p, s in zip((top, bottom, left, right), (size[0],) * 2 + (size[1],) * 2, strict=True)
    ):
        return NotImplemented
    value = 0.0 if value is None else float(value)
    padded = (size[0] + top + bottom, size[1] + left + right)
    if mode == "constant" and value == 0 and top == left == 0 and table.fits(block, padded):
        if table.whole:
            stack = table.compute(F.pad, T.picture(input), pads)
        else:
            stack = table.compute(_inside, T.value_of(input), table, block, size)
        table.block_of.setdefault(padded, block)
        return T.StackTensor(stack, table, block, padded, (2, 3), reach)
    return T.with_border(input, (top, bottom, left, right, _MODES[mode], value))


def _inside(value, table, block, size):
    return torch.where(table.inside(block, size)[:, None], value, 0)


BORDERED.update((conv2d, max_pool2d))
