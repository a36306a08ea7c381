"""Cells of a grid as a list, in raster order."""

import numpy as np

from .arrays import namespace


def list_cells(listed, capacity=None):
    """List the cells of a grid where a bool array is True.

    Parameters
    ----------
    listed : bool array, shape (N, *spatial)
        Which cells to list.
    capacity : int, optional
        Number of rows. With it nothing waits for a GPU; cells past it are left out.

    Returns
    -------
    indices : int32 array, shape (rows, 1 + d)
        ``(sample, *position)`` in raster order, -1 past the count.
    count : int32 array, shape (1,)
        Number of cells that are listed, also when there are not so many rows.
    cells : int64 array, shape (rows,)
        The same as flat numbers, -1 past the count.
    """
    xp, shape, listed = namespace(listed), listed.shape, listed.reshape(-1)
    count = listed.sum(dtype=np.int32).reshape(1)
    if capacity is None:
        cells = xp.flatnonzero(listed)
    else:
        place = xp.where(listed, xp.cumsum(listed) - 1, capacity)
        cells = xp.full(capacity + 1, -1, np.int64)
        cells[xp.minimum(place, capacity)] = xp.arange(listed.size)
        cells = xp.where(xp.arange(capacity) < count, cells[:capacity], -1)
    indices = xp.empty((len(cells), len(shape)), np.int32)
    rest = xp.maximum(cells, 0)
    for axis, size in reversed(list(enumerate(shape))):
        indices[:, axis] = xp.where(cells >= 0, rest % max(size, 1), -1)
        rest = rest // max(size, 1)
    return indices, count, cells
