"""The seam to kernels: rims through the table, and convolution with all that follows it.

Everything that computes on the stack and looks at neighbours comes through :func:`halo` and
:func:`conv`. Here they are plain PyTorch operations: the reference, and what a CPU runs. A stack is
``[M, C, b, b]`` and lies in memory as ``[M, b, b, C]``.
"""

import math

import torch
from torch.nn import functional as F

from . import cuda, cuda_ends, cuda_resize, onednn
from .entry import Entry
from .epilogue import finish, scaled_last
from .halos import halo, take
from .layout import channels_last, is_channels_last
from .neighbours import patches

# A rim of a few pixels around a small block is most of what a convolution would read: below this
# many pixels a block, the CPU makes rows of all pixels under the kernel, one for each output. With
# many channels the product of such rows is faster than a convolution of somewhat larger blocks too;
# then for no more bytes than these, as rows are as many times the stack as the kernel has pixels.
_PATCHES_BELOW = 36
_WIDE, _WIDE_PATCHES_BELOW, _WIDE_PATCHES_BYTES = 512, 100, 1 << 28


def conv(
    x, table, block, size, weight, bias, *, stride=(1, 1), pads=(0, 0, 0, 0), dilation=(1, 1),
    groups=1, fill=0.0, mode="zeros", residual=None, activation=None, scaled=None,
):  # fmt: skip
    """Convolve a stack: ``activation(conv(x) + bias + residual)``, ``[M, Cout, b / s, b / s]``.

    Parameters
    ----------
    weight : tensor, shape (Cout, Cin / groups, kh, kw)
        channels_last in memory where speed matters.
    bias : tensor, shape (Cout,), or None
        Any scale is in the weight already.
    stride, dilation : (int, int)
        Strides divide the block.
    residual : tensor, shape (M, Cout, b / s, b / s), or None
        Added before the activation.
    activation : str or None
        A name in ``ACTIVATIONS``.
    scaled : tensor or None
        Of :meth:`~.weights.Weights.behind`: by what channels are scaled and shifted last.

    ``x`` may also be the :class:`Entry` of the call's image, where ``cuda_ends.reads_image``.
    """
    if isinstance(x, Entry):
        y = cuda_ends.conv(
            x, block, size, weight, bias, stride, pads, dilation, residual, activation, scaled
        )
        if y is not None:
            return y
        x = x.stack()
    if cuda.serves(x) and not table.whole and mode == "zeros" and fill == 0:
        x = cuda_resize.readable(x, weight, groups, table)
        y = cuda.conv(
            x, table, block, size, weight, bias, stride, pads, dilation, groups, residual,
            activation, scaled,
        )  # fmt: skip
        if y is not None:
            return y
    if table.whole:
        if table.static and not torch.is_grad_enabled():
            weight = weight.detach()  # no graph holds what oneDNN packed
        y = _conv_picture(
            x, weight, bias, stride, pads, dilation, groups, fill, mode, residual, activation
        )
    else:
        y = _conv_stack(
            x, table, block, size, weight, bias, stride, pads, dilation, groups, fill, mode,
            residual, activation,
        )  # fmt: skip
    return y if scaled is None else scaled_last(y, scaled)


def _convolve(x, weight, bias, stride, padding, dilation, groups, residual, activation):
    """Convolve a batch of pictures."""
    y = onednn.conv(x, weight, bias, stride, padding, dilation, groups, residual, activation)
    if y is not None:
        return y
    y = F.conv2d(x, weight, bias, stride, padding, dilation, groups)
    return finish(y, residual, activation)


def _multiply(x, weight, bias, residual, activation):
    """Multiply the pixels of a picture, which hold all that is under the kernel, by the weights."""
    y = onednn.product(x, weight, bias, residual, activation)
    if y is not None:
        return y
    weight = weight.permute(0, 2, 3, 1).reshape(weight.shape[0], -1, 1, 1)
    return finish(F.conv2d(x, weight, bias), residual, activation)


def _conv_picture(
    x, weight, bias, stride, pads, dilation, groups, fill, mode, residual, activation
):
    top, bottom, left, right = pads
    padding = (top, left)
    recorded = torch.is_grad_enabled() and x.device.type == "cpu"
    if recorded and weight.shape[2:] == (1, 1) and not any(pads):
        # oneDNN's gradient of few channels with a stride writes past the end of its memory
        x, stride = x[:, :, :: stride[0], :: stride[1]], (1, 1)
    if mode != "zeros" or fill != 0 or top != bottom or left != right:
        around, padding = (left, right, top, bottom), (0, 0)
        x = F.pad(x, around, value=fill) if mode == "zeros" else F.pad(x, around, mode=mode)
    return _convolve(x, weight, bias, stride, padding, dilation, groups, residual, activation)


def _conv_stack(
    x, table, block, size, weight, bias, stride, pads, dilation, groups, fill, mode, residual,
    activation,
):  # fmt: skip
    kernel = tuple(weight.shape[2:])
    out = (block[0] // stride[0], block[1] // stride[1])
    if kernel == (1, 1) and not any(pads) and groups == 1:
        if stride != (1, 1):
            x = x[:, :, :: stride[0], :: stride[1]]
        rows, residual = as_picture(x), residual if residual is None else as_picture(residual)
        return as_stack(_multiply(rows, weight, bias, residual, activation), out)
    rims = rim(kernel, stride, pads, dilation)
    few = kernel != (1, 1) and _are_few(out[0] * out[1], x, kernel)
    if few and groups == 1 and fill == 0 and not x.is_cuda:
        taken = _patches(x, table, block, size, rims, mode, kernel, stride, dilation)
        residual = residual if residual is None else as_picture(residual)
        return as_stack(_multiply(taken, weight, bias, residual, activation), out)
    x = halo(x, table, block, size, rims, fill, mode)
    return _convolve(x, weight, bias, stride, (0, 0), dilation, groups, residual, activation)


def _are_few(pixels, x, kernel):
    """Whether rows of all pixels under the kernel are faster than blocks with their rims."""
    if pixels < _PATCHES_BELOW:
        return True
    size = x.shape[0] * x.shape[1] * pixels * kernel[0] * kernel[1] * x.element_size()
    return pixels < _WIDE_PATCHES_BELOW and x.shape[1] >= _WIDE and size <= _WIDE_PATCHES_BYTES


def as_picture(x):
    """Return all blocks of a stack as one picture, one below the other: a view where it can be."""
    m, c, h, w = x.shape
    if not torch.is_grad_enabled() and is_channels_last(x):
        return x.as_strided((1, c, m * h, w), (m * h * w * c, 1, w * c, c))  # one call, not three
    return x.permute(0, 2, 3, 1).reshape(1, m * h, w, c).permute(0, 3, 1, 2)


def as_stack(x, block):
    """Return the stack of a picture of blocks one below the other."""
    (h, w), (n, c, *pixels) = block, x.shape
    if not torch.is_grad_enabled() and is_channels_last(x):
        m = n * math.prod(pixels) // (h * w)
        return x.as_strided((m, c, h, w), (h * w * c, 1, w * c, c))
    return x.permute(0, 2, 3, 1).reshape(-1, *block, c).permute(0, 3, 1, 2)


def rim(kernel, stride, pads, dilation):
    """Return the rim (top, bottom, left, right) that a window needs around a block."""
    reach = [d * (k - 1) + 1 - s for k, d, s in zip(kernel, dilation, stride, strict=True)]
    return pads[0], reach[0] - pads[0], pads[2], reach[1] - pads[2]


def _patches(x, table, block, size, rims, mode, kernel, stride, dilation):
    """Return the pixels under the kernel for each output: ``[1, kh * kw * C, M * h', w']``."""
    key, (index, held) = patches(table, block, size, rims, mode, kernel, stride, dilation)
    taken = take(x, table, index, held, key)  # [M, h', w', kh, kw, C]
    m, h, w = index.shape[:3]
    return taken.reshape(1, m * h, w, -1).permute(0, 3, 1, 2)


def conv_transpose(
    x, table, block, size, weight, bias, *, stride, padding, dilation, groups, out_size
):
    """Convolve a stack transposed: ``[M, Cout, b * s, b * s]``."""
    if table.whole:
        spans = [
            (n - 1) * s - 2 * p + d * (k - 1) + 1
            for n, s, p, d, k in zip(size, stride, padding, dilation, weight.shape[2:], strict=True)
        ]
        extra = [o - s for o, s in zip(out_size, spans, strict=True)]
        return F.conv_transpose2d(x, weight, bias, stride, padding, extra, groups, dilation)
    each = zip(out_size, size, stride, padding, strict=True)
    past = any((o - 1 + p) // s >= n for o, n, s, p in each)  # an output padding reads past x
    alike = tuple(weight.shape[2:]) == tuple(stride) and groups == 1
    if alike and not past and _is_grown(x, padding, dilation):
        return _grown(x, weight, bias)
    before, after = [], []
    for b, k, s, p, d in zip(block, weight.shape[2:], stride, padding, dilation, strict=True):
        before.append(max(-(-(d * (k - 1) - p) // s), 0))
        after.append(max((b * s - 1 + p) // s - (b - 1), 0))
    rims = (before[0], after[0], before[1], after[1])
    x = halo(x, table, block, size, rims) if past or any(rims) else x
    y = F.conv_transpose2d(x, weight, None, stride, 0, 0, groups, dilation)
    starts = [p + r * s for p, r, s in zip(padding, before, stride, strict=True)]
    wanted = [b * s for b, s in zip(block, stride, strict=True)]
    short = [max(a + w - n, 0) for a, w, n in zip(starts, wanted, y.shape[2:], strict=True)]
    if any(short):
        y = F.pad(y, (0, short[1], 0, short[0]))
    y = y[:, :, starts[0] : starts[0] + wanted[0], starts[1] : starts[1] + wanted[1]]
    y = y if bias is None else y + bias.to(y.dtype)[:, None, None]
    return channels_last(y)


def _is_grown(x, padding, dilation):
    """Whether a transposed convolution makes pixels of their own of each pixel: one product."""
    plain = x.device.type == "cpu" and not torch.is_grad_enabled()
    plain = plain and not torch.is_autocast_enabled("cpu")
    return plain and not any(padding) and tuple(dilation) == (1, 1) and x.numel() > 0


def _grown(x, weight, bias):
    """Convolve transposed with a kernel as large as its stride: ``[M, Cout, b * s, b * s]``."""
    (m, cin, h, w), (_, cout, kh, kw) = x.shape, weight.shape
    rows = x.permute(0, 2, 3, 1).reshape(-1, cin)
    matrix = weight.permute(0, 2, 3, 1).reshape(cin, -1)
    y = rows @ matrix if bias is None else torch.addmm(bias.repeat(kh * kw), rows, matrix)
    y = y.view(m, h, w, kh, kw, cout).permute(0, 1, 3, 2, 4, 5)
    return y.reshape(m, h * kh, w * kw, cout).permute(0, 3, 1, 2)
