"""Pooling a mask over a grid of blocks, in NumPy: along the lines first, then along the columns.

``vertical`` and ``horizontal`` say how blocks lie along an axis: (number, size, start, stride). The
start is that of the first block, and may be outside, like any of its pixels.
"""

import functools
import itertools
from typing import NamedTuple

import numpy as np

from .._arrays import dtype_kind
from ._narrow import greater


def any_above(mask, vertical, horizontal, thresholds):
    """Whether a pixel of each block is above the threshold."""
    threshold, least, never = thresholds
    if dtype_kind(mask.dtype) == "f":
        above = greater(mask, threshold)
    elif never:
        above = np.zeros(mask.shape, bool)
    elif mask.dtype.kind == "b":
        above = mask if least else np.ones(mask.shape, bool)
    else:
        above = mask >= mask.dtype.type(least)
    return _any_columns(_any_lines(above, *vertical), *horizontal)


def _any_lines(above, count, size, start, stride):
    """Combine the lines of each row of blocks: ``[n, lines, W]`` to ``[n, count, W]``."""
    n, lines, width = above.shape
    pooled = np.zeros((n, count, width), bool)
    meets = range(max(-((start + size - 1) // stride), 0), min(-((start - lines) // stride), count))
    # Rows of blocks inside the image go together, those that its edge cuts one by one.
    inside = range(max(-(start // stride), 0), min((lines - size - start) // stride + 1, count))
    if inside:
        steps = above.strides
        windows = np.lib.stride_tricks.as_strided(
            above[:, start + stride * inside.start :],
            (n, len(inside), size, width),
            (steps[0], stride * steps[1], steps[1], steps[2]),
        )
        np.logical_or.reduce(windows, axis=2, out=pooled[:, inside.start : inside.stop])
    cut = itertools.chain(range(meets.start, inside.start), range(inside.stop, meets.stop))
    for row in cut if inside else meets:
        low, high = max(start + stride * row, 0), start + stride * row + size
        np.logical_or.reduce(above[:, low:high], axis=1, out=pooled[:, row])
    return pooled


def _any_columns(above, count, size, start, stride):
    """Combine the columns of each block: ``[n, rows, W]`` to ``[n, rows, count]``."""
    n, rows, width = above.shape
    columns = _columns(width, count, size, start, stride)
    if not len(columns.first):
        return np.zeros((n, rows, count), bool)
    if columns.before or columns.after:
        padded = np.zeros((n, rows, columns.before + width + columns.after), bool)
        padded[:, :, columns.before : columns.before + width] = above
        above = padded
    span = 1  # pixels that each element of ``above`` stands for
    while 2 * span <= columns.size:
        above = above[:, :, :-span] | above[:, :, span:]
        span *= 2
    pooled = above.take(columns.first, axis=2)
    if span < columns.size:
        pooled |= above.take(columns.first + (columns.size - span), axis=2)
    if len(columns.first) == count:
        return pooled
    active = np.zeros((n, rows, count), bool)
    active[:, :, columns.meets] = pooled
    return active


class _Columns(NamedTuple):
    """Where blocks lie along a line."""

    size: int  # of a block
    first: np.ndarray  # pixel of each block that meets the line, from the first of the padding on
    meets: np.ndarray  # which blocks those are
    before: int  # pixels of padding that they need
    after: int


@functools.lru_cache(64)
def _columns(width, count, size, start, stride):
    """Place blocks along a line of ``width`` pixels."""
    corners = start + stride * np.arange(count)
    meets = (corners > -size) & (corners < width) & (width > 0)
    # A block wider than the image is as good as one of its width, over the same pixels.
    short = min(size, width)
    first = np.where(corners < 0, np.minimum(corners + (size - short), 0), corners)[meets]
    before = max(-int(first.min(initial=0)), 0)
    after = max(int(first.max(initial=0)) + short - width, 0)
    return _Columns(short, first + before, meets, before, after)


def average_above(mask, vertical, horizontal, thresholds):
    """Whether the sum over each block, divided by its size, is above the threshold."""
    narrow = mask.dtype.kind in "biu" and mask.dtype.itemsize < 8
    values = mask
    for axis, side in ((1, vertical), (2, horizontal)):
        values = _sum_axis(values, axis, *side, np.int64 if narrow else np.float64)
    return values / (vertical[1] * horizontal[1]) > thresholds[0]


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
