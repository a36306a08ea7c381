"""voxelize: from the points of a cloud to features at sites."""

import math

import numpy as np

from ..core.arrays import array_function, dtype_kind, is_float, namespace
from ..core.checks import check_array
from ..core.graph_memory import memory_of_graphs
from ..core.point_cells import check_range, number, point_cells
from ..dense.conv2d import check_choice
from ..errors import DTypeError, ShapeError
from .coordinate_map import reduce_columns
from .site_arguments import MODES, check_capacity, check_grid
from .sparse_tensor import SparseTensor, features_of_sites


@array_function
def voxelize(
    points, features=None, *, ranges, voxel_size, sample=None, batch_size=None, mode="mean",
    order="leaf", capacity=None,
):  # fmt: skip
    """Put the points of a cloud into the voxels of a grid.

    The voxel of a point is ``floor((points[:, axis] - low) / voxel_size)`` on each axis. Ranges are
    half-open, ``low <= value < high``. Points outside, and those with a NaN or an infinity among
    their coordinates, are dropped.

    Parameters
    ----------
    points : array, shape (P, d) or more columns
        Coordinates in the first d columns, in the unit of ``ranges`` (metres, say).
    features : array, shape (P, C), optional
        float16, bfloat16, float32 or float64. By default all columns of ``points``.
    ranges : sequence of d pairs (float, float)
        Extent of the grid along each axis.
    voxel_size : float or d floats
        Length of a voxel along each axis. The last voxel may extend beyond the range.
    sample : int32 or int64 array, shape (P,), optional
        Number of the sample that each point belongs to; by default 0.
    batch_size : int, optional
        Number of samples. By default 1, or that of ``sample``, which waits for a GPU; needed with a
        ``capacity``. Points of other samples are dropped.
    mode : "mean", "sum", "first" or "last"
        What the features of the points in a voxel become; as for :func:`sparse_tensor`.
    order, capacity
        As for :func:`coordinate_map`.

    Returns
    -------
    x : SparseTensor
        One row for each voxel that holds a point.
    inverse : int32 array, shape (P,)
        The row of the voxel of each point, -1 for points that were dropped. ``y[inverse]`` turns
        values ``y`` of voxels into values of points; mask those where ``inverse`` is -1.

    Raises
    ------
    ShapeError, DTypeError, ValueError
        If ``points`` is no list of points, there is not a row of ``features`` or a number in
        ``sample`` for each, a range or a size is empty, or there are 2**31 voxels or more along an
        axis.

    Source: Y. Zhou, O. Tuzel, "VoxelNet", CVPR 2018, arXiv:1711.06396 (the grid).

    Examples
    --------
    >>> import numpy as np
    >>> points = np.array([[0.2, 1.6], [0.4, 1.8], [3.5, 0.1], [9.0, 0.0]])
    >>> x, inverse = voxelize(points, ranges=[(0, 4), (0, 2)], voxel_size=0.5)
    >>> x.indices.tolist(), inverse.tolist(), x.spatial_shape
    ([[0, 0, 3], [0, 7, 0]], [0, 0, 1, -1], (8, 4))
    >>> x.features.round(3).tolist()
    [[0.3, 1.7], [3.5, 0.1]]
    """
    features = points if features is None else features
    check_points(points, features)
    given = ranges, voxel_size, sample, batch_size, mode, order, capacity
    coordinates, inverse, reduction = find_voxels(points, *given)
    rows = features_of_sites(features, reduction, coordinates.capacity, mode)
    return SparseTensor(rows, coordinates), inverse


def find_voxels(points, ranges, voxel_size, sample, batch_size, mode, order, capacity):
    """Return the voxels of points, the row of each point's, and how features are reduced."""
    ranges, sizes = read_voxels(points, ranges, voxel_size, mode, order, capacity)
    with memory_of_graphs(points):
        kept, cells, shape = point_cells(list(points.T[: len(ranges)]), ranges, sizes)
        number_of, batch_size = _samples(sample, points, batch_size, capacity)
        grid = check_grid(shape, batch_size, len(shape))
        return reduce_columns(kept, [number_of, *cells], *grid, mode, order, capacity)


def check_points(points, features):
    """Raise unless ``points`` are a list of points, and ``features`` a row of floats for each."""
    check_array("points", points, ndim=2, kinds="fiu")
    check_array("features", features, ndim=2, like=points)
    if not is_float(features.dtype):
        raise DTypeError(
            f"features must be float16, bfloat16, float32 or float64, got {features.dtype}; pass "
            "features, or points in floats"
        )
    if features.shape[0] != points.shape[0]:
        raise ShapeError(
            f"features must have a row for each of the {points.shape[0]} points, got "
            f"{features.shape[0]}"
        )


def read_voxels(points, ranges, voxel_size, mode, order, capacity):
    """Return the ranges, and the voxel size along each axis; check what else there is."""
    for name, value in (("ranges", ranges), ("voxel_size", voxel_size)):
        if getattr(value, "shape", ()) != ():
            raise ValueError(
                f"{name} must be given as numbers in a list, got an array of shape "
                f"{tuple(value.shape)}; use {name}.tolist()"
            )
    if not isinstance(ranges, list | tuple) or not ranges:
        raise ValueError(f"ranges must be pairs (low, high), one for each axis, got {ranges!r}")
    ranges = [check_range(pair, f"ranges[{axis}]") for axis, pair in enumerate(ranges)]
    given = voxel_size
    sizes = voxel_size if isinstance(voxel_size, list | tuple) else [voxel_size] * len(ranges)
    sizes = [number(size, "voxel_size") for size in sizes]
    if len(sizes) != len(ranges) or not all(0 < size < math.inf for size in sizes):
        raise ValueError(
            f"voxel_size must be a positive number, or {len(ranges)} of them, got {given!r}"
        )
    if points.shape[1] < len(ranges):
        raise ShapeError(
            f"points must have at least {len(ranges)} columns, one for each range, got "
            f"{points.shape}"
        )
    check_choice("mode", mode, MODES[1:])
    check_choice("order", order, ("leaf", "raster"))
    check_capacity(capacity)
    return ranges, sizes


def _samples(sample, points, batch_size, capacity):
    """Return the sample of each point, and the batch size."""
    if sample is None:
        zeros = namespace(points).zeros(len(points), np.int64)
        return zeros, 1 if batch_size is None else batch_size
    check_sample(sample, points)
    if batch_size is None:
        if capacity is not None:
            raise ShapeError("batch_size must be given with sample and capacity, got None")
        batch_size = max(int(sample.max()) + 1, 1) if len(sample) else 1
    return sample.astype(np.int64), batch_size


def check_sample(sample, points):
    """Raise unless ``sample`` is a list of whole numbers, one for each point."""
    check_array("sample", sample, shape=points.shape[:1], like=points)
    if dtype_kind(sample.dtype) != "i":
        raise DTypeError(f"sample must be int32 or int64, got {sample.dtype}; convert it")
