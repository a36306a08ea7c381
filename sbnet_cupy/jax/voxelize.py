"""voxelize for JAX, in ``jit``, ``grad`` and ``vmap``."""

import jax
import jax.numpy as jnp

from ..core.point_cells import point_cells
from ..errors import ShapeError
from ..submanifold.site_arguments import check_grid
from ..submanifold.voxelize import check_points, check_sample, read_voxels
from ._specs import sized_spec_of, spec_of
from .sites import put_rows, reduce_columns


def voxelize(
    points, features=None, *, ranges, voxel_size, sample=None, batch_size=None, mode="mean",
    order="leaf", capacity=None,
):  # fmt: skip
    """Put the points of a cloud into voxels: :func:`sbnet_cupy.voxelize` for JAX.

    Differentiable with respect to ``features``; which voxel a point is in has no gradient. Voxels
    are found in double precision, whether 64-bit numbers are enabled or not, and are those of
    :func:`sbnet_cupy.voxelize`. Sums are added in a fixed order, pair by pair.

    Parameters
    ----------
    points : jax.Array, shape (P, d) or more columns
        Coordinates in the first d columns, in the unit of ``ranges``.
    features : jax.Array, shape (P, C), optional
        Of a float dtype. By default all columns of ``points``.
    sample : int32 or int64 array, shape (P,), optional
        Number of the sample that each point belongs to; needs ``batch_size``.
    ranges, voxel_size, batch_size, mode, order
        As for :func:`sbnet_cupy.voxelize`.
    capacity : int, optional
        Number of rows; by default that of the points. Voxels past it are left out:
        :meth:`CoordinateMap.check` tells, outside of ``jit``.

    Returns
    -------
    x : SparseTensor
        A pytree: one row for each voxel that holds a point.
    inverse : int32 array, shape (P,)
        The row of the voxel of each point, -1 for points that were dropped.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ValueError
        As :func:`sbnet_cupy.voxelize`, for what is known while JAX traces; ShapeError also for a
        ``sample`` without ``batch_size``.

    Source: Y. Zhou, O. Tuzel, "VoxelNet", CVPR 2018, arXiv:1711.06396 (the grid).

    Examples
    --------
    >>> import functools, jax, jax.numpy as jnp
    >>> points = jnp.array([[0.2, 1.6], [0.4, 1.8], [3.5, 0.1], [9.0, 0.0]])
    >>> grid = {"ranges": [(0, 4), (0, 2)], "voxel_size": 0.5, "capacity": 3}
    >>> x, inverse = jax.jit(functools.partial(voxelize, **grid))(points)
    >>> x.indices.tolist(), inverse.tolist()
    ([[0, 0, 3], [0, 7, 0], [-1, -1, -1]], [0, 0, 1, -1])
    >>> x.features[:, 0].round(1).tolist()
    [0.30000001192092896, 3.5, 0.0]
    """
    features = points if features is None else features
    spec = sized_spec_of("points", points)
    check_points(spec, spec_of("features", features))
    ranges, sizes = read_voxels(spec, ranges, voxel_size, mode, order, capacity)
    if sample is not None:
        check_sample(spec_of("sample", sample), spec)
        if batch_size is None:
            raise ShapeError("batch_size must be given with sample, got None")
    batch_size = 1 if batch_size is None else batch_size
    with jax.enable_x64(True):
        columns = list(jax.lax.stop_gradient(points).T[: len(ranges)])
        kept, cells, shape = point_cells(columns, ranges, sizes, xp=jnp, divide=_divide)
        grid = check_grid(shape, batch_size, len(shape))
        wide = [jnp.zeros(len(points), jnp.int32) if sample is None else sample, *cells]
        columns = [column.astype(jnp.int32) for column in wide]
        for narrow, column in zip(columns, wide, strict=True):
            kept &= narrow == column
    made, inverse, runs = reduce_columns(columns, kept, grid, mode, order, capacity, drops=True)
    return put_rows(features, made, runs, mode), inverse


def _divide(values, size):
    """Divide by a number that XLA cannot take for one: else it multiplies by its reciprocal."""
    return values / jnp.where(jnp.isnan(values), values, size)
