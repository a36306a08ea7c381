"""Smaller images: each pixel of the result stands for a square of ``factor`` x ``factor`` pixels.

The squares at the right and bottom edges may be smaller: nothing is cut off.
"""

import numpy as np


def block_mean(values, factor):
    """Return the mean of each square of ``[H, W, ...]`` as float32; ``values`` for factor 1."""
    if factor == 1:
        return values
    sums = values
    for axis in (0, 1):
        sums = np.add.reduceat(sums, _starts(values, axis, factor), axis, dtype=np.float64)
    counts = np.outer(*(_counts(values.shape[axis], factor) for axis in (0, 1)))
    sums /= counts.reshape(counts.shape + (1,) * (values.ndim - 2))
    return sums.astype(np.float32)


def block_max(values, factor):
    """Return the maximum of each square of ``[H, W, ...]``; for bool, whether any is True."""
    if factor == 1:
        return values
    for axis in (0, 1):
        values = np.maximum.reduceat(values, _starts(values, axis, factor), axis)
    return values


def _starts(values, axis, factor):
    return np.arange(0, values.shape[axis], factor)


def _counts(size, factor):
    return np.diff([*range(0, size, factor), size])
