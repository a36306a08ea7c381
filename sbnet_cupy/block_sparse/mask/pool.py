"""Pooling a mask over a grid of blocks, in NumPy: along the lines first, then along the columns.

``any_above`` and ``average_above`` make the functions that do it, for masks of one shape and dtype:
what follows from these is found once, because calls with small masks are mostly overhead.
"""

import math
from typing import NamedTuple

import numpy as np

from ...core.arrays import dtype_kind
from ...core.half_floats import greater_than

_SMALL = 1 << 15  # bytes that are cleared as one in less time than some of them


class Side(NamedTuple):
    """How blocks lie along an axis; any of their pixels may be outside."""

    count: int
    size: int
    start: int  # of the first block
    stride: int


class Part(NamedTuple):
    """What is pooled at a time: whole images, or some rows of blocks of one."""

    images: slice
    lines: slice  # of these images
    rows: Side  # of blocks, along these lines


def any_above(shape, dtype, part, columns, thresholds):
    """Return a function of the mask: whether blocks have a pixel above the threshold, in order.

    Pixels become bytes, which are 0 unless the pixel is above.
    """
    images, lines, width = _length(part.images), _length(part.lines), shape[2]
    rows, across = _meeting(part.rows, lines, shape[1]), _meeting(columns, width, width)
    blocks, meets = (images, part.rows.count, columns.count), None
    if thresholds[2] or not rows or not across:
        return lambda mask: np.zeros(blocks, bool)
    if (rows.count, across.count) != blocks[1:]:
        meets = slice(None), rows.blocks, across.blocks
    leading = (images,) if images > 1 else ()  # one axis less takes less time
    read, first, image = _bytes_above(shape, part, rows, _comparison(dtype, thresholds))
    combine_lines = _combine_lines(leading, rows, width, across, first, image)
    combine_columns = _combine_columns((*leading, rows.count), width, across)

    def pool(mask):
        active = combine_columns(combine_lines(read(mask)))
        if meets is None:
            return active
        every = np.zeros(blocks, bool)
        every[meets] = active
        return every

    return pool


def _length(part):
    return part.stop - part.start


class _Meeting(NamedTuple):
    """The blocks that have a pixel of an axis, and zeros, with which they have all of theirs."""

    blocks: slice  # which they are
    count: int
    size: int
    stride: int
    first: int  # where the first of them begins, behind the zeros before the axis
    before: int  # zeros
    after: int
    ends: np.ndarray | None  # see _meeting


def _meeting(side, length, whole):
    """Find the blocks that meet ``length`` pixels of an axis of ``whole``; None if none does.

    Blocks longer than the axis would take many zeros. Instead ``ends`` tells which pixels they
    have: the first of each block and the one past its last, of an axis with one zero more.
    """
    count, size, start, stride = side
    low = max(-((start + size - 1) // stride), 0)
    high = min(-((start - length) // stride), count)
    if low >= high or not length:
        return None
    blocks, number, corner = slice(low, high), high - low, start + stride * low
    if size <= whole:
        before = max(-corner, 0)
        after = max(corner + stride * (number - 1) + size - length, 0)
        return _Meeting(blocks, number, size, stride, corner + before, before, after, None)
    corners = corner + stride * np.arange(number)
    ends = np.stack([np.maximum(corners, 0), np.minimum(corners + size, length)], axis=1)
    return _Meeting(blocks, number, size, stride, 0, 0, 1, ends.reshape(-1))


def _comparison(dtype, thresholds):
    """Return a function ``(pixels, out)`` that tells which are above; None where bytes do."""
    threshold, least, _ = thresholds
    if dtype_kind(dtype) == "f":
        return greater_than(dtype, threshold)
    if dtype.kind == "b" and not least:
        return lambda pixels, out: out.fill(True)
    if dtype.kind == "b" or (dtype == np.uint8 and least == 1):
        return None
    least = np.array(least, dtype)
    return lambda pixels, out: np.greater_equal(pixels, least, out)


def _bytes_above(shape, part, rows, compare):
    """Return (function of the mask, number of a first byte, bytes of an image).

    The function returns bytes that tell of the pixels of the part, from the first one on: the mask
    itself where it can, else a copy of the lines with zeros before and after them.
    """
    _, height, width = shape
    lines, images = _length(part.lines), _length(part.images)
    end = rows.before + lines
    padded = images, end + rows.after, width
    if compare is None and padded[1] == lines:
        first = (part.images.start * height + part.lines.start) * width
        return lambda mask: mask, first, height * width

    kind = bool if compare else np.uint8
    write = compare or (lambda pixels, out: np.copyto(out, pixels.view(np.uint8)))
    where, inside = (part.images, part.lines), (slice(None), slice(rows.before, end))
    small = math.prod(padded) < _SMALL

    def read(mask):
        if small:
            above = np.zeros(padded, kind)
        else:
            above = np.empty(padded, kind)
            above[:, : rows.before] = above[:, end:] = 0
        write(mask[where], above[inside])
        return above

    return read, 0, padded[1] * width


def _combine_lines(leading, rows, width, across, first, image):
    """Return a function of bytes: those of the lines of each row of blocks, combined.

    Zeros come before and after them, as the columns of blocks want it.
    """
    combined = (*leading, rows.count, across.before + width + across.after)
    allocate = np.zeros if across.before or across.after else np.empty
    inside = (..., slice(across.before, across.before + width))
    windows = (*leading, rows.count, rows.size, width)
    first, steps = first + rows.first * width, (rows.stride * width, width, 1)
    if leading:
        steps = (image, *steps)

    def combine(above):
        lines = allocate(combined, np.uint8)
        if rows.ends is None:
            view = np.ndarray(windows, np.uint8, above, first, steps)
            np.bitwise_or.reduce(view, -2, None, lines[inside])
        else:
            lines[inside] = np.bitwise_or.reduceat(above, rows.ends, 1)[:, ::2]
        return lines

    return combine


def _combine_columns(leading, width, across):
    """Return a function of the combined lines: whether a byte of each block is not 0.

    Words of 8 bytes or less, at any address, take the bytes of a block together. Where blocks are
    longer, each byte is combined with those after it first, in the line or past it.
    """
    size, padded = across.size, across.before + width + across.after
    word = span = min(1 << (size.bit_length() - 1), 8)
    shifts = []
    while 2 * span <= size:
        shifts.append(span)
        span *= 2
    words, word = (*leading, across.count), np.dtype(f"u{word}")
    steps = (leading[-1] * padded, padded, across.stride)[-len(words) :]

    def combine(lines):
        if across.ends is not None:
            return np.bitwise_or.reduceat(lines, across.ends, -1)[..., ::2] != 0
        flat = lines.reshape(-1)
        for shift in shifts:
            flat = flat[:-shift] | flat[shift:]
        active = np.ndarray(words, word, flat, across.first, steps)
        if span < size:
            active = active | np.ndarray(words, word, flat, across.first + size - span, steps)
        return active.astype(bool)

    return combine


def average_above(part, columns, thresholds):
    """Return a function of the mask: whether sums over blocks, divided by their size, are above."""

    def pool(mask):
        values = mask[part.images, part.lines]
        narrow = mask.dtype.kind in "biu" and mask.dtype.itemsize < 8
        with np.errstate(invalid="ignore"):  # inf - inf, which is not above any threshold
            for axis, side in ((1, part.rows), (2, columns)):
                values = _sum_axis(values, axis, *side, np.int64 if narrow else np.float64)
            return values / (part.rows.size * columns.size) > thresholds[0]

    return pool


def _sum_axis(values, axis, count, size, start, stride, dtype):
    """Add up, along one axis, the lines of each of ``count`` blocks, from the first to the last."""
    length = values.shape[axis]
    shape = list(values.shape)
    shape[axis] = count
    pooled = np.zeros(shape, dtype)
    corners = start + stride * np.arange(count)
    for i in range(max(-int(corners[-1]), 0), min(size, length - start)):
        lines = corners + i
        low, high = np.searchsorted(lines, (0, length))
        if low == high:
            continue
        cut = [slice(None)] * values.ndim
        taken = list(cut)
        cut[axis] = slice(low, high)
        taken[axis] = slice(lines[low], lines[high - 1] + 1, stride)
        pooled[tuple(cut)] += values[tuple(taken)]
    return pooled
