"""Pool a mask over a grid of blocks in NumPy: along the lines first, then along the columns.

``any_above`` and ``average_above`` return functions that pool masks of one shape and dtype.
Everything that follows from the shape and the dtype is computed once, because for small masks a
call is mostly overhead.
"""

import math
from typing import NamedTuple

import numpy as np

from ...core.arrays import dtype_kind
from ...core.half_floats import greater_than

_SMALL = 1 << 15  # bytes; clearing all of so few is faster than clearing only the padding


class Side(NamedTuple):
    """The positions of blocks along an axis; any of their pixels may lie outside the image."""

    count: int
    size: int
    start: int  # position of the first block
    stride: int


class Part(NamedTuple):
    """What is pooled at a time: whole images, or some rows of blocks of one image."""

    images: slice
    lines: slice  # lines of these images
    rows: Side  # rows of blocks along these lines


def any_above(shape, dtype, part, columns, thresholds):
    """Return a function of a mask that says which of its blocks have a pixel above the threshold.

    Pixels become bytes that are 0 unless the pixel is above the threshold.
    """
    images, lines, width = _length(part.images), _length(part.lines), shape[2]
    rows, across = _meeting(part.rows, lines, shape[1]), _meeting(columns, width, width)
    blocks, meets = (images, part.rows.count, columns.count), None
    if thresholds[2] or not rows or not across:
        return lambda mask: np.zeros(blocks, bool)
    if (rows.count, across.count) != blocks[1:]:
        meets = slice(None), rows.blocks, across.blocks
    leading = (images,) if images > 1 else ()  # NumPy is faster with one axis less
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
    """The blocks that overlap an axis, and the zeros that pad it so that all their pixels exist."""

    blocks: slice  # which blocks
    count: int
    size: int
    stride: int
    first: int  # where the first one begins, counted from the first padding zero
    before: int  # number of zeros before the axis
    after: int  # and after it
    ends: np.ndarray | None  # see _meeting


def _meeting(side, length, whole):
    """Find the blocks that overlap ``length`` pixels of an axis of ``whole``; None if none does.

    Blocks longer than the axis would need much padding. For them ``ends`` holds the first pixel of
    each block and the one past its last, and the axis is padded with a single zero.
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
    """Return a function ``(pixels, out)`` that marks pixels above; None if the bytes already do."""
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
    """Return (function of the mask, number of the first byte, bytes of an image).

    The function returns bytes that mark the pixels of the part, beginning with the first one: the
    mask itself if possible, otherwise a copy of the lines padded with zeros.
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
    """Return a function that combines the bytes of the lines of each row of blocks by "or".

    Its result is padded with zeros as the columns of blocks need it.
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
    """Return a function that says for each block of the combined lines whether any byte is not 0.

    The bytes of a block are read as one word of up to 8 bytes, at any address. For longer blocks,
    each byte is first combined with those that follow it.
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
    """Return a function of a mask that says which of its blocks average above the threshold."""

    def pool(mask):
        values = mask[part.images, part.lines]
        narrow = mask.dtype.kind in "biu" and mask.dtype.itemsize < 8
        with np.errstate(invalid="ignore"):  # inf - inf, which is not above any threshold
            for axis, side in ((1, part.rows), (2, columns)):
                values = _sum_axis(values, axis, *side, np.int64 if narrow else np.float64)
            return values / (part.rows.size * columns.size) > thresholds[0]

    return pool


def _sum_axis(values, axis, count, size, start, stride, dtype):
    """Add up the lines of each of ``count`` blocks along one axis, from first to last."""
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
