"""Blocks with their rims, and the gradient: what each rim holds goes back to the block it is of."""

import torch
from torch.autograd import Function
from torch.nn import functional as F

from . import cuda
from .neighbours import frame, window

# Pixels of a block from which a copy of it and a look-up of its rim are faster than a look-up of
# all pixels. Below it the copies are small, and a call of PyTorch's counts.
_FRAMED_FROM = 2048


def halo(x, table, block, size, pads, fill=0.0, mode="zeros"):
    """Return each block with its rim: ``[M, C, b, b]`` to ``[M, C, top + b + bottom, ...]``.

    Parameters
    ----------
    x : tensor, shape (M, C, *block)
        The stack.
    table : BlockTable
        Where its blocks lie.
    block, size : (int, int)
        A block and the image, in pixels of this stage.
    pads : (int, int, int, int)
        Rim at the top, bottom, left and right; negative numbers cut pixels off.
    fill : float
        What lies outside the image; what lies in no active block is 0.
    mode : {"zeros", "replicate", "reflect", "circular"}
        What lies outside the image: ``fill``, or pixels of the image.
    """
    if cuda.serves(x):
        taken = cuda.halo(x, table, block, size, pads, fill, mode)
        if taken is not None:
            return taken
    if sums_in_order(x, table) and mode == "zeros":
        return _Halo.apply(x, (table, block, size), pads, fill)
    if mode == "zeros" and _is_framed(x, table, block, size, pads):
        return _framed(x, table, block, size, pads, fill)
    return _by_index(x, table, block, size, pads, fill, mode)


def sums_in_order(x, table):
    """Whether a gradient is to be put together here: on a GPU, where PyTorch's has no order."""
    return x.is_cuda and cuda.records(x) and not table.static


def _by_index(x, table, block, size, pads, fill, mode="zeros"):
    index, held, inside = window(table, block, size, pads, mode)
    taken = take(x, table, index, held, ("window", block, size, pads, mode))
    if fill != 0 and mode == "zeros":
        taken = torch.where(inside[..., None], taken, fill)
    return taken.permute(0, 3, 1, 2)


def _is_framed(x, table, block, size, pads):
    """Whether blocks are copied whole, and their rims alone read through the table."""
    plain = x.device.type == "cpu" and not table.static and not torch.is_grad_enabled()
    plain = plain and table.divides(block, size) and min(pads) >= 0 and any(pads)
    return plain and block[0] * block[1] >= _FRAMED_FROM


def _framed(x, table, block, size, pads, fill):
    (top, bottom, left, right), (h, w), c = pads, block, x.shape[1]
    index, held, inside = frame(table, block, pads)
    taken = take(x, table, index, held, ("frame", block, pads))
    if fill != 0:
        taken = torch.where(inside[..., None], taken, fill)
    wide = left + w + right
    out = x.new_empty(x.shape[0], top + h + bottom, wide, c)
    out[:, top : top + h, left : left + w] = x.permute(0, 2, 3, 1)
    sides = top * wide, bottom * wide, h * left, h * right
    above, below, before, after = taken.split(sides, 1)
    for part, place in (
        (above, out[:, :top]), (below, out[:, top + h :]),
        (before, out[:, top : top + h, :left]), (after, out[:, top : top + h, left + w :]),
    ):  # fmt: skip
        if part.numel():
            place.copy_(part.view(place.shape))
    return out.permute(0, 3, 1, 2)


def take(x, table, index, held, key):
    """Return pixels of the stack at ``index [M, ...]``, 0 where nothing is: ``[M, ..., C]``."""
    pixels = x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])
    flat = index.reshape(-1)
    # on a GPU, gradients of an index are added up in the order of a sort, of index_select in none
    taken = pixels[flat] if x.is_cuda else pixels.index_select(0, flat)
    taken = taken.view(*index.shape, x.shape[1])
    if x.is_cuda or table.static:
        return torch.where(held[..., None], taken, 0)
    missing = table.keep(("missing", *key), lambda: (~held).reshape(-1).nonzero()[:, 0])
    if missing.numel():
        taken.view(-1, x.shape[1]).index_fill_(0, missing, 0)
    return taken


class _Halo(Function):
    @staticmethod
    def forward(ctx, x, where, pads, fill):
        ctx.save_for_backward(x)
        ctx.call = where, pads, fill
        return halo(x, *where, pads, fill)

    @staticmethod
    def backward(ctx, grad):
        (table, block, size), pads, fill = ctx.call
        if torch.is_grad_enabled():  # to be differentiated again: by PyTorch's operations
            (x,) = ctx.saved_tensors
            y = _by_index(x, table, block, size, pads, fill)
            return torch.autograd.grad(y, x, grad, create_graph=True)[0], None, None, None
        dx = _add_back(grad, table, block, pads)
        return zero_outside(dx, table, block, size), None, None, None


def _add_back(grad, table, block, pads):
    """Add up the gradients of all places where each pixel of the stack is: in a fixed order."""
    rows = grad.permute(0, 2, 3, 1).contiguous()
    out = rows.new_zeros(rows.shape[0], *block, rows.shape[3])
    (top, bottom), (left, right) = pads[:2], pads[2:]
    away = [_blocks_away(b, *p) for b, p in zip(block, (pads[:2], pads[2:]), strict=True)]
    (up, low), (before, after) = away
    # whose rim holds a block's pixels lies on the other side
    around = F.pad(table.place, (after, before, low, up), value=table.rows)
    for dy in range(-up, low + 1):
        p, from_y = _overlap(block[0], top, bottom, dy)
        for dx in range(-before, after + 1):
            q, from_x = _overlap(block[1], left, right, dx)
            if p.start >= p.stop or q.start >= q.stop:
                continue
            read = rows[:, from_y, from_x]
            if dy or dx:
                reader = around[table.image, table.down - dy + low, table.across - dx + after]
                read = read.index_select(0, reader.clamp(max=table.rows - 1))
                read = torch.where((reader < table.rows)[:, None, None, None], read, 0)
            out[:, p, q] += read
    return out.permute(0, 3, 1, 2)


def _blocks_away(length, before, after):
    """Return how many blocks away a rim reaches at both ends."""
    return max(-(-before // length), 0), max(-(-after // length), 0)


def _overlap(length, before, after, step):
    """Return which pixels of a block are in the rim of the one ``step`` before it, and where."""
    start = max(0, -before - step * length)
    stop = min(length, length + after - step * length)
    return slice(start, stop), slice(*(i + step * length + before for i in (start, stop)))


def zero_outside(value, table, block, size):
    """Return a stack that is 0 in pixels that are none of an image, and in rows past the count."""
    if table.whole:
        return table.gather(value, block, (2, 3))
    if table.filled(block, size):
        return value
    return torch.where(table.inside(block, size)[:, None], value, 0)
