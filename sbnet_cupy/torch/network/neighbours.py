"""Where the pixels around a block lie in the stack: what windows and interpolation read."""

import functools

import torch
from torch.nn import functional as F


def window(table, block, size, pads, mode="zeros"):
    """Return where each pixel of a block with its rim lies in the flattened stack.

    ``pads`` is (top, bottom, left, right), where negative numbers cut off. Returns int64 indices
    ``[M, h, w]``, 0 where there is nothing; which of them hold something; and which lie inside the
    image.
    """

    def make():
        if mode == "zeros" and table.divides(block, size):
            near, places, offsets = _known(table, _pattern, block, pads, table.device)
            index, held, inside = _near(table, block, near, places.view(-1), offsets.view(-1))
            shape = (-1, *places.shape)
            return index.view(shape), held.view(shape), inside.view(shape)
        top, bottom, left, right = pads
        y, inside_y = _into(pixels_of(table.down, block[0], top, bottom), size[0], mode)
        x, inside_x = _into(pixels_of(table.across, block[1], left, right), size[1], mode)
        return pixels_at(table, block, y, x, inside_y, inside_x)

    return table.keep(("window", block, size, pads, mode), make)


def frame(table, block, pads):
    """Return what :func:`window` does of rims alone, ``[M, pixels]``, where blocks fill the image.

    The rows above the block come first, then those below it, what is left of it, and right of it.
    """

    def make():
        near, places, offsets = _known(table, _pattern_of_frame, block, pads, table.device)
        return _near(table, block, near, places, offsets)

    return table.keep(("frame", block, pads), make)


def patches(table, block, size, pads, mode, kernel, stride, dilation):
    """Return where the pixels under the kernel lie: indices ``[M, h', w', kh, kw]``, and which of
    them hold something; before them the key under which the table keeps them.
    """
    key = ("patches", block, size, pads, mode, kernel, stride, dilation)

    def make():
        if mode == "zeros" and table.divides(block, size):
            what = (block, pads, kernel, stride, dilation, table.device)
            near, places, offsets = _known(table, _pattern_of_patches, *what)
            index, held, _ = _near(table, block, near, places.view(-1), offsets.view(-1))
            shape = (-1, *places.shape)
            return index.view(shape), held.view(shape)
        index, held, _ = window(table, block, size, pads, mode)
        return tuple(_under(t, kernel, stride, dilation) for t in (index, held))

    return key, table.keep(key, make)


def pixels_at(table, block, y, x, inside_y, inside_x):
    """Return what :func:`window` does, of pixels ``y [M, h]`` by ``x [M, w]`` of each row's image.

    ``inside_y`` and ``inside_x`` say which of them are pixels of the image.
    """
    place = table.place[
        table.image[:, None, None], (y // block[0])[:, :, None], (x // block[1])[:, None, :]
    ]
    inside = inside_y[:, :, None] & inside_x[:, None, :] & table.live[:, None, None]
    held = inside & (place < table.rows)
    offset = (y % block[0] * block[1])[:, :, None] + (x % block[1])[:, None, :]
    return torch.where(held, place * (block[0] * block[1]) + offset, 0), held, inside


def pixels_of(cell, length, before=0, after=0):
    """Return the pixels of blocks along an axis, with a rim: ``[M, before + length + after]``.

    ``cell [M]`` says which block of the axis each row is.
    """
    offsets = torch.arange(-before, length + after, device=cell.device)
    return cell[:, None] * length + offsets


def _known(table, make, *what):
    """Return what does not depend on the mask: on a CPU kept from call to call."""
    kept = table.device.type == "cpu" and not table.static
    return (make if kept else make.__wrapped__)(*what)


def _near(table, block, near, places, offsets):
    """Return indices of pixels, each ``offsets`` into the block at ``places`` of those near."""

    def make():
        top, bottom, left, right = near
        around = F.pad(table.place, (left, right, top, bottom), value=table.rows + 1)
        down = torch.arange(top + bottom + 1, device=table.device)
        across = torch.arange(left + right + 1, device=table.device)
        y, x = table.down[:, None] + down, table.across[:, None] + across
        found = around[table.image[:, None, None], y[:, :, None], x[:, None, :]].flatten(1)
        return found if table.known_live else found.masked_fill(~table.live[:, None], outside)

    outside = table.rows + 1
    rows = table.keep(("near", near), make).index_select(1, places)
    held = rows < table.rows
    return torch.where(held, rows * (block[0] * block[1]) + offsets, 0), held, rows < outside


def _into(at, length, mode):
    """Map positions into ``0 .. length - 1``; say which of them are pixels of the image."""
    inside = (at >= 0) & (at < length)
    if mode == "zeros":
        return at.clamp(0, length - 1), inside
    if mode == "reflect":
        at = (length - 1 - (length - 1 - at.abs()).abs()).clamp(0, length - 1)
    elif mode == "circular":
        at = at % length
    return at.clamp(0, length - 1), torch.ones_like(inside)


@functools.lru_cache(maxsize=1024)
def _pattern(block, pads, device):
    """Return for a block with its rim how many blocks near it has (top, bottom, left, right), which
    of them each pixel lies in, and where in it: ``[h, w]``.
    """
    (top, bottom), (left, right) = (
        (max(-(-a // b), 0), max(-(-z // b), 0))
        for a, z, b in ((pads[0], pads[1], block[0]), (pads[2], pads[3], block[1]))
    )
    y = torch.arange(-pads[0], block[0] + pads[1], device=device) + top * block[0]
    x = torch.arange(-pads[2], block[1] + pads[3], device=device) + left * block[1]
    places = (y // block[0])[:, None] * (left + right + 1) + x // block[1]
    offsets = (y % block[0] * block[1])[:, None] + x % block[1]
    return (top, bottom, left, right), places, offsets


@functools.lru_cache(maxsize=1024)
def _pattern_of_frame(block, pads, device):
    """Return what :func:`_pattern` does, for the pixels around a block."""
    near, *both = _pattern.__wrapped__(block, pads, device)
    (top, _, left, _), (h, w) = pads, block
    down, across = slice(top, top + h), slice(left, left + w)
    parts = [(t[:top], t[top + h :], t[down, :left], t[down, across.stop :]) for t in both]
    return near, *(torch.cat([p.reshape(-1) for p in part]) for part in parts)


@functools.lru_cache(maxsize=1024)
def _pattern_of_patches(block, pads, kernel, stride, dilation, device):
    """Return what :func:`_pattern` does, for the pixels under a kernel: ``[h', w', kh, kw]``."""
    near, places, offsets = _pattern.__wrapped__(block, pads, device)
    both = (_under(t[None], kernel, stride, dilation)[0] for t in (places, offsets))
    return near, *both


def _under(index, kernel, stride, dilation):
    """Return what lies under the kernel at each place: ``[M, h', w', kh, kw]``."""
    span = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    windows = index.unfold(1, span[0], stride[0]).unfold(2, span[1], stride[1])
    return windows[..., :: dilation[0], :: dilation[1]].contiguous()
