"""Keys of sites: the coordinates of a site as one 64-bit number, which sorts and is found fast.

The order of the keys is *leaf order*: by sample, then by leaf, a group of up to 64 neighbouring
cells (8x8 in two dimensions, 4x4x4 in three), then by the place in the leaf.
"""

import functools
import operator
from typing import NamedTuple

import numpy as np

from ..core.arrays import empty, is_cupy
from ..errors import ShapeError

LEAVES = {1: (64,), 2: (8, 8), 3: (4, 4, 4), 4: (4, 4, 2, 2)}
MOST_BITS = 63
BATCH_BITS = 12  # where the batch size is not known


class Packing(NamedTuple):
    """How the coordinates ``(sample, *position)`` of a site become a key."""

    limits: tuple[int, ...]  # each coordinate is in 0 .. limit - 1
    bits: tuple[int, ...]  # of each coordinate
    low_bits: tuple[int, ...]  # of these the ones that tell the place in a leaf


def packing_of(spatial_shape, batch_size, dimensions):
    """Return the packing for a grid of this shape; None stands for what is not known.

    Raises
    ------
    ShapeError
        If the keys of such a grid need more than 63 bits.
    """
    bits, low = key_bits(spatial_shape, batch_size, dimensions)
    if sum(bits) > MOST_BITS:
        raise ShapeError(
            f"spatial_shape and batch_size must fit keys of {MOST_BITS} bits, got spatial_shape "
            f"{spatial_shape} and batch_size {batch_size}, which need {sum(bits)}; split the batch "
            "or the grid"
        )
    known = (batch_size, *(spatial_shape or (None,) * dimensions))
    limits = tuple(1 << b if n is None else n for n, b in zip(known, bits, strict=True))
    return Packing(limits, bits, low)


def key_bits(spatial_shape, batch_size, dimensions):
    """Return the bits of each coordinate in the keys of a grid, and how many of them are low."""
    leaf = LEAVES.get(dimensions) or (1,) * (dimensions - 6) + (2,) * min(dimensions, 6)
    low = (0, *(n.bit_length() - 1 for n in leaf))
    batch_bits = BATCH_BITS if batch_size is None else _bits(batch_size)
    if spatial_shape is None:
        share = min((MOST_BITS - batch_bits) // dimensions, 31)
        bits = (batch_bits, *(share,) * dimensions)
    else:
        bits = (batch_bits, *map(_bits, spatial_shape))
    return tuple(map(max, bits, low)), low


def _bits(size):
    """Return the bits of a number below ``size``."""
    return max(size - 1, 0).bit_length()


def leaf_keys(coordinates, packing):
    """Return the key of each row of coordinates, -1 for rows outside the limits.

    Parameters
    ----------
    coordinates : list of int64 array, shape (N,) each
        The sample, and the position on each axis.
    packing : Packing
        How they become one number.

    Returns
    -------
    keys : int64 array, shape (N,)
        In leaf order.
    """
    parts = [key_part(values, axis, packing) for axis, values in enumerate(coordinates)]
    return functools.reduce(operator.or_, parts)


def key_part(values, axis, packing):
    """Return the bits that one coordinate has in a key: int64, -1 outside the limits.

    The key is the bitwise or of the parts of all coordinates; with a part of -1 it is -1.
    """
    limits, bits, low_bits = packing
    low, after = low_bits[axis], sum(low_bits[axis + 1 :])
    part = (values >> low) << (sum(bits[axis + 1 :]) - after + sum(low_bits))
    if low:
        part |= (values & ((1 << low) - 1)) << after
    part[(values < 0) | (values >= limits[axis])] = -1
    return part


def raster_keys(coordinates, packing):
    """Return keys as :func:`leaf_keys` does, in raster order: the last axis is the fastest."""
    return leaf_keys(coordinates, raster_packing(packing))


def raster_packing(packing):
    """Return the packing of the same coordinates whose keys are in raster order."""
    return packing._replace(low_bits=(0,) * len(packing.bits))


def coordinates_of(keys, packing):
    """Return the int32 rows ``(sample, *position)`` of keys in leaf order, -1 for negative keys."""
    rows = empty((len(keys), len(packing.bits)), np.int32, keys)
    low_at, high_at = 0, sum(packing.low_bits)
    for axis in reversed(range(len(packing.bits))):
        below = packing.low_bits[axis]
        above = packing.bits[axis] - below
        high, low = keys >> high_at & (1 << above) - 1, keys >> low_at & (1 << below) - 1
        rows[:, axis] = high << below | low
        low_at, high_at = low_at + below, high_at + above
    rows[keys < 0] = -1
    return rows


def sort_keys(keys):
    """Return the order that sorts keys, and the sorted keys; equal ones stay in their order."""
    if is_cupy(keys) or not len(keys):
        order = keys.argsort()  # CuPy's is stable
        return order, keys[order]
    bits = (len(keys) - 1).bit_length()
    if int(keys.max()).bit_length() + bits > MOST_BITS:
        order = keys.argsort(kind="stable")
        return order, keys[order]
    both = keys << bits | np.arange(len(keys))  # NumPy sorts ten times as fast as it argsorts
    both.sort()
    return both & ((1 << bits) - 1), both >> bits
