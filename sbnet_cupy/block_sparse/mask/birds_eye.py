"""The bird's-eye mask: the ground cells that a point cloud occupies. Public in ``masks``."""

import math
from functools import partial

import numpy as np

from ...core.arrays import array_function, namespace
from ...core.checks import check_array
from ...core.point_cells import check_range, number, point_cells
from ...core.sizes import is_integer
from ...core.spec import spec_of
from ...errors import ShapeError


@partial(array_function, takes_strided=True)
def birds_eye(points, *, x_range, y_range, cell, z_range=None, min_points=1):
    """Activate the cells of a ground grid that hold points of a point cloud, seen from above.

    Rows run along x and columns along y: cell ``(i, j)`` holds the points with
    ``floor((x - x_range[0]) / cell) == i`` and ``floor((y - y_range[0]) / cell) == j``, so row 0 is
    the smallest x and column 0 the smallest y. Ranges are half-open, ``low <= value < high``.

    Parameters
    ----------
    points : array, shape (P, 3) or more columns
        x, y, z in metres, float or integer, with any strides. Other columns, such as intensity and
        ring, are ignored. Points outside the ranges, and those with a NaN or an infinity among
        x, y and z, are dropped.
    x_range, y_range : (float, float)
        Extent of the grid, in metres.
    cell : float
        Side of a square cell, in metres. The last row and column may extend beyond the range.
    z_range : (float, float), optional
        Heights to keep; None keeps every finite height.
    min_points : int, default 1
        Number of points that make a cell active.

    Returns
    -------
    mask : array of bool, shape (1, H, W)
        ``H = ceil((x_range[1] - x_range[0]) / cell)``, likewise W from y. An excess of up
        to a millionth of a cell is ignored.

    Raises
    ------
    ShapeError, DTypeError, ValueError
        If ``points`` is not a list of points, a range or a size is empty, or there are 2**31 cells
        or more along an axis.

    Source: Yang et al. 2018, PIXOR, arXiv:1902.06326, section 3.1 (the grid SBNet's LiDAR runs on).

    Examples
    --------
    >>> points = np.array([[0.2, -0.9, 0.1], [1.5, 0.5, 0.0], [2.0, 0.0, 0.0]], np.float32)
    >>> birds_eye(points, x_range=(0, 2), y_range=(-1, 1), cell=1.0)
    array([[[ True, False],
            [False,  True]]])
    """
    check_array("points", spec_of(points), ndim=2, kinds="fiu")
    if not is_integer(min_points) or min_points < 1:
        raise ValueError(f"min_points must be a positive integer, got {min_points!r}")
    index, (h, w) = cell_index(points, x_range, y_range, cell, z_range)
    xp = namespace(points)
    counts = xp.zeros(h * w + 1, dtype=np.int32)
    xp.add.at(counts, index, 1)
    return (counts[: h * w] >= min_points).reshape(1, h, w)


def cell_index(points, x_range, y_range, cell, z_range=None):
    """Return the flat cell number of each point, and the grid's (H, W).

    Dropped points get the number H * W, one past the last cell, so no size depends on the data.
    """
    if points.shape[1] < 3:
        raise ShapeError(f"points must have shape (P, 3 or more), got {points.shape}; pass x, y, z")
    size = number(cell, "cell")
    if not 0 < size < math.inf:
        raise ValueError(f"cell must be a positive number of metres, got {cell!r}")
    ranges = [check_range(x_range, "x_range"), check_range(y_range, "y_range")]
    ranges.append((-math.inf, math.inf))
    if z_range is not None:
        ranges[2] = check_range(z_range, "z_range")
    xyz = [points[:, axis] for axis in range(3)]
    kept, (row, column), (h, w) = point_cells(xyz, ranges, (size, size, None))
    return namespace(points).where(kept, row * w + column, h * w), (h, w)
