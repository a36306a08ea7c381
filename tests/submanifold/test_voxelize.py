"""voxelize against a loop over points, and against sparse_tensor."""

import numpy as np
import pytest

import sbnet_cupy as sb
from support.assertions import assert_same, to_numpy

RANGES, SIZES = [(-1.0, 1.5), (0.0, 2.0), (-0.5, 0.5)], (0.5, 0.25, 0.4)
SHAPE = (5, 8, 3)


def cloud(rng, count=80):
    """Return points in and around the grid, on its edges, and some that are no numbers."""
    points = rng.uniform(-2, 3, (count, 4)).astype(np.float32)
    points[:4, 0] = np.nan, np.inf, -1.0, 1.5  # the last two are the ends of a half-open range
    points[4:, 1:3] /= 2
    points[:4, 1:] = 0.1
    return points


def voxels(points, samples):
    """Return the row (sample, *voxel) of each point, None for those that are dropped."""
    for point, sample in zip(points.astype(np.float64), samples, strict=True):
        inside = all(low <= v < high for v, (low, high) in zip(point, RANGES, strict=False))
        if not inside or not 0 <= sample < 2:
            yield None
            continue
        cell = [int((v - low) // size) for v, (low, _), size in zip(point, RANGES, SIZES)]  # noqa: B905
        yield (int(sample), *cell)


@pytest.mark.parametrize("order", ["leaf", "raster"])
@pytest.mark.parametrize("mode", ["mean", "sum", "first", "last"])
def test_points_become_sites(xp, mode, order):
    rng = np.random.default_rng(1)
    points, samples = cloud(rng), rng.integers(-1, 3, 80).astype(np.int32)
    rows = list(voxels(points, samples))
    kept = np.array([row is not None for row in rows])
    options = {"mode": mode, "order": order, "batch_size": 2}
    given = {"ranges": RANGES, "voxel_size": SIZES, "sample": xp.asarray(samples)}
    x, inverse = sb.voxelize(xp.asarray(points), **given, **options)
    listed = np.array([row for row in rows if row is not None], np.int32)
    expected = sb.sparse_tensor(
        xp.asarray(points[kept]), xp.asarray(listed), spatial_shape=SHAPE, **options
    )
    assert_same(x.indices, expected.indices)
    assert_same(x.features, expected.features)
    assert x.spatial_shape == SHAPE and x.coordinates.check() is x.coordinates
    at = to_numpy(inverse)
    assert ((at >= 0) == kept).all()
    assert [tuple(row) for row in to_numpy(x.indices)[at[kept]].tolist()] == list(
        map(tuple, listed.tolist())
    )
    count = x.coordinates.number()
    roomy, same = sb.voxelize(xp.asarray(points), **given, **options, capacity=count + 5)
    assert_same(roomy.features[:count], x.features)
    assert not to_numpy(roomy.features)[count:].any()
    assert_same(same, inverse)
    assert roomy.coordinates.check() is roomy.coordinates  # points may be dropped, sites may not
    short, _ = sb.voxelize(xp.asarray(points), **given, **options, capacity=count - 1)
    with pytest.raises(sb.CapacityError, match="larger capacity"):
        short.coordinates.check()


def test_features_of_points(xp):
    points = xp.asarray(np.array([[1, 1], [1, 1], [3, 0]], np.int64))
    features = xp.asarray(np.array([[1.0], [3.0], [5.0]]))
    x, inverse = sb.voxelize(points, features, ranges=[(0, 4), (0, 2)], voxel_size=1)
    assert to_numpy(x.features).ravel().tolist() == [2, 5] and x.batch_size == 1
    assert to_numpy(inverse).tolist() == [0, 0, 1]
    with pytest.raises(sb.DTypeError, match="features"):
        sb.voxelize(points, ranges=[(0, 4), (0, 2)], voxel_size=1)


def test_no_points(xp):
    given = {"ranges": [(0, 4)], "voxel_size": 1.0}
    x, inverse = sb.voxelize(xp.asarray(np.ones((0, 2), np.float32)), **given)
    assert x.features.shape == (0, 2) and inverse.shape == (0,)
    far = xp.asarray(np.full((3, 2), 9, np.float32))
    x, inverse = sb.voxelize(far, **given, capacity=2)
    assert to_numpy(inverse).tolist() == [-1] * 3 and x.coordinates.number() == 0
    assert not to_numpy(x.features).any()


def test_ground_cells_are_those_of_birds_eye(xp):
    points = cloud(np.random.default_rng(2), 300)
    x, _ = sb.voxelize(xp.asarray(points), ranges=RANGES, voxel_size=0.3)
    mask = sb.masks.birds_eye(
        xp.asarray(points), x_range=RANGES[0], y_range=RANGES[1], z_range=RANGES[2], cell=0.3
    )
    expected = np.argwhere(to_numpy(mask))
    assert np.unique(to_numpy(x.indices)[:, :3], axis=0).tolist() == expected.tolist()


@pytest.mark.parametrize(("ranges", "size", "error", "message"), [
    ([(0, 1e9)], 1e-300, sb.ShapeError, r"fewer than 2\*\*31 cells along an axis"),
    ([(0, 2**31)], 1, sb.ShapeError, r"fewer than 2\*\*31 cells along an axis"),
    ([(-1.7e308, 1.7e308)], 1e308, sb.ShapeError, r"fewer than 2\*\*31 cells along an axis"),
    ([(0, 10**400)], 1, ValueError, r"ranges\[0\] must be finite"),
    ([(0, 1)], 10**400, ValueError, "voxel_size must be a positive number"),
])  # fmt: skip
def test_grids_that_no_number_holds(ranges, size, error, message):
    with pytest.raises(error, match=message):
        sb.voxelize(np.ones((3, 3)), ranges=ranges, voxel_size=size)


def test_the_number_of_samples_is_found(xp):
    """One more than the largest that is named, and one at least."""
    points = xp.asarray(np.arange(8.0).reshape(4, 2) / 8)
    grid = {"ranges": [(0, 1), (0, 1)], "voxel_size": 0.125}
    for named, number in (([0, 2, -1, 1], 3), ([-1, -1, -1, -1], 1)):
        for dtype in (np.int32, np.int64):
            sample = xp.asarray(np.array(named, dtype))
            x, inverse = sb.voxelize(points, sample=sample, **grid)
            assert x.batch_size == number
            assert [row >= 0 for row in inverse.tolist()] == [n >= 0 for n in named]
    none = {"sample": xp.asarray(np.zeros(0, np.int64)), **grid}
    assert sb.voxelize(points[:0], **none)[0].batch_size == 1
    with pytest.raises(sb.ShapeError, match="batch_size must be given with sample and capacity"):
        sb.voxelize(points, sample=sample, capacity=4, **grid)
