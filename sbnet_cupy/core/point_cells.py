"""The cells of a grid that points lie in; half-open ranges, low <= value < high."""

import math
import operator
from numbers import Real

import numpy as np

from ..errors import ShapeError
from .arrays import namespace


def point_cells(columns, ranges, sizes, xp=None, divide=operator.truediv):
    """Return which points lie within all ranges, and their cells along the axes that have one.

    Parameters
    ----------
    columns : list of array, shape (P,) each
        Coordinates of the points on each axis.
    ranges : list of (float, float)
        What is kept of each axis, from :func:`check_range`.
    sizes : list of float or None
        Length of a cell on each axis; None for an axis without cells.
    xp : module, optional
        The functions of the arrays, where they are neither NumPy's nor CuPy's.
    divide : function, optional
        Of an array and a number: the quotients, rounded once.

    Returns
    -------
    kept : bool array, shape (P,)
        False for points outside, or with a NaN or an infinity.
    cells : list of int64 array, shape (P,)
        Of each axis with cells, for the points that are kept.
    shape : tuple of int
        Number of cells on these axes; the last cell may extend beyond the range. An excess of up to
        a millionth of a cell is ignored.
    """
    xp = xp or namespace(columns[0])
    columns = [column.astype(np.float64) for column in columns]
    kept = xp.ones(columns[0].shape, bool)
    for values, (low, high) in zip(columns, ranges, strict=True):
        kept &= xp.isfinite(values) & (values >= low) & (values < high)
    cells, shape = [], []
    for values, (low, high), size in zip(columns, ranges, sizes, strict=True):
        if size is None:
            continue
        shape.append(_number_of_cells(low, high, size))
        cell = xp.floor(divide(xp.where(kept, values - low, 0), size)).astype(np.int64)
        cells.append(xp.clip(cell, 0, shape[-1] - 1))
    return kept, cells, tuple(shape)


def _number_of_cells(low, high, size):
    """Return the number of cells of a range, at least one; an excess of 1e-6 is ignored."""
    cells = (high - low) / size - 1e-6
    if not cells < 2**31 - 1:  # before it is rounded: it may be infinite
        raise ShapeError(
            "there must be fewer than 2**31 cells along an axis, got a range of "
            f"{(low, high)} in cells of {size}"
        )
    return max(math.ceil(cells), 1)


def number(value, name):
    """Return a real number as a float, infinite if none holds it; raise ValueError for others."""
    if not isinstance(value, Real) or isinstance(value, bool) or value != value:
        raise ValueError(f"{name} must be a number, got {value!r}")
    try:
        return float(value)
    except OverflowError:  # of a long int or Fraction
        return math.inf if value > 0 else -math.inf


def check_range(value, name):
    """Return ``value`` if it is a pair of finite numbers, low < high; raise ValueError if not."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError(f"{name} must be a pair of numbers (low, high), got {value!r}")
    low, high = (number(v, name) for v in value)
    if not -math.inf < low < high < math.inf:
        raise ValueError(f"{name} must be finite with low < high, got {value!r}")
    return low, high
