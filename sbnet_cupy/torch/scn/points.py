"""Coordinates of points: whole numbers of them, and what errors say of those outside of a grid.

The errors replace those of the core, which does not know the names of these arguments.
"""

import numpy as np
import torch

from ...errors import ShapeError
from ...submanifold.keys import MOST_BITS, key_bits
from .tensors import size_key

_FAR = 2.0**62  # in no grid


def whole_numbers(coords):
    """Return coordinates as int64; what is too large for it, or NaN, becomes one in no grid."""
    if coords.is_floating_point():
        coords = coords.double().nan_to_num(nan=_FAR).clamp(-_FAR, _FAR)
    return coords.long()


def check_inside(name, coords, rows, numbers, size):
    """Raise if one of the rows ``(sample, *position)`` is outside of a grid.

    They are rows of these ``numbers`` in an argument of this name, and on the CPU.
    """
    outside = ((rows[:, 1:] < 0) | (rows[:, 1:] >= size)).any(1)
    wrong = outside | (rows[:, 0] < 0) | (rows[:, 0] >= 2**31)
    if not wrong.any():
        return
    row = int(wrong.int().argmax())
    place = _place(coords, int(numbers[row]))
    rule, cure = "the sample, from 0 on, in the last column", ", or number the samples from 0 on"
    if outside[row]:
        rule = f"positions inside {size_key(size)}"
        cure = ", or pass a larger spatial_size"
        if (rows[row, 1:] < 0).any():
            cure = ", or shift positions so that none is negative"
    if not coords[place].isfinite().all():
        cure = ""
    raise ShapeError(
        f"{name} must have {rule}, got {coords[place].tolist()} in row {_spelled(place)}; drop "
        f"such rows{cure}"
    ) from None


def check_keys(size, samples):
    """Raise if the sites of a grid need keys of too many bits."""
    bits = sum(key_bits(size, samples, len(size))[0])
    if bits > MOST_BITS:
        raise ShapeError(
            f"spatial_size and the number of samples must fit keys of {MOST_BITS} bits, got {size} "
            f"and {samples}, which need {bits}; split the batch or the grid"
        ) from None


def check_distinct(name, coords, rows, numbers):
    """Raise if two rows are equal; they are as :func:`check_inside` takes them."""
    site = torch.unique(rows, dim=0, return_inverse=True)[1]
    order = site.argsort(stable=True)
    again = (site[order][1:] == site[order][:-1]).nonzero()[:, 0]
    if len(again):
        two = [_place(coords, int(numbers[order[at]])) for at in (again[0], again[0] + 1)]
        raise ValueError(
            f"{name} must be distinct in mode 0, got {coords[two[0]].tolist()} in rows "
            f"{_spelled(two[0])} and {_spelled(two[1])}; use another mode"
        ) from None


def _place(coords, number):
    """Return where a row is in coords, which may have two axes of rows."""
    return tuple(map(int, np.unravel_index(number, coords.shape[:-1])))


def _spelled(place):
    """Return the place of a row as errors name it."""
    return place if len(place) > 1 else place[0]
