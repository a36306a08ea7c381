"""voxelize in JAX: the package's voxels, inside jit, with gradients and mapped."""

import functools

import numpy as np
import pytest

import sbnet_cupy as sb
from support.adapter_cases import normal
from support.assertions import assert_close, assert_same, to_numpy
from support.jax_site_cases import same_sites

RANGES = [(-1.2, 3.0), (0.1, 2.5), (-2, 1)]
GRID = {"ranges": RANGES, "voxel_size": [0.3, 0.1, 0.5], "batch_size": 2}
ROWS = 90


def cloud(seed=0):
    """Return points, some of them on borders of voxels, outside, or nowhere; and their samples."""
    rng = np.random.default_rng(seed)
    points = rng.uniform(-2.2, 3.4, (ROWS, 4)).astype(np.float32)
    points[:30, 1] = np.float32(0.1) * rng.integers(0, 26, 30).astype(np.float32)
    points[30:60] = points[rng.integers(0, 30, 30)]
    points[80:83, 0] = np.nan, np.inf, -np.inf
    return points, rng.integers(-1, 3, ROWS).astype(np.int32)


@pytest.mark.parametrize(
    ("mode", "order"),
    [("first", "leaf"), ("last", "raster"), ("sum", "raster"), ("mean", "leaf")],
)
def test_points_become_sites(sbj, place, jax, mode, order):
    """Their voxels are found in double precision, as those of NumPy's arrays are."""
    points, samples = cloud()
    options = GRID | {"mode": mode, "order": order}
    expected, into = sb.voxelize(points, sample=samples, **options)
    count = expected.coordinates.number()
    make = jax.jit(functools.partial(sbj.voxelize, **options, capacity=count + 3))
    x, inverse = make(place.make(points), sample=place.make(samples))
    same_sites(x.coordinates, expected.coordinates)
    assert x.coordinates.check() is x.coordinates  # points may be dropped, sites may not
    assert_same(to_numpy(inverse), into)
    found = to_numpy(x.features)
    assert found.dtype == np.float32 and not found[count:].any()
    if mode in ("first", "last"):
        assert_same(found[:count], expected.features)
    else:
        some = into >= 0
        finite = np.where(some[:, None], points, 0)
        most = np.bincount(into[some]).max()
        size, _ = sb.voxelize(points, abs(finite), sample=samples, **options)
        wide = expected.features.astype(np.float64)
        assert_close(
            found[:count], wide, terms=2 * int(most), dtype="f4", magnitude=size.features
        )  # both sides are such sums
    short, _ = sbj.voxelize(
        place.make(points), sample=place.make(samples), **options, capacity=count - 1
    )
    with pytest.raises(sb.CapacityError, match="larger capacity"):
        short.coordinates.check()


@pytest.mark.parametrize("mode", ["sum", "mean", "first"])
def test_features_have_gradients(sbj, place, jax, mode):
    points, _ = cloud(1)
    features, grid = normal(ROWS, 3), {"ranges": RANGES[:2], "voxel_size": 0.4, "mode": mode}
    _, into = sb.voxelize(points, features, **grid)
    grad = normal(ROWS, 3, seed=2)

    def loss(features):
        x, _ = sbj.voxelize(place.make(points), features, **grid)
        return (x.features * grad).sum()

    found = to_numpy(jax.jit(jax.grad(loss))(place.make(features)))
    shared = np.bincount(into[into >= 0], minlength=ROWS).astype(np.float32)
    expected = np.where((into >= 0)[:, None], grad[into], 0)
    if mode == "mean":
        expected = expected / np.maximum(shared[into], 1)[:, None]
    if mode == "first":
        first = np.unique(into, return_index=True)[1]
        expected[np.setdiff1d(np.arange(ROWS), first)] = 0
    assert_close(found, expected.astype(np.float64), terms=2, dtype="f4", magnitude=abs(expected))


def test_clouds_are_mapped(sbj, place, jax):
    clouds = np.stack([cloud(seed)[0] for seed in range(3)])
    make = functools.partial(sbj.voxelize, ranges=RANGES, voxel_size=0.5, mode="last")
    x, inverse = jax.jit(jax.vmap(make))(place.make(clouds))
    for number, points in enumerate(clouds):
        one, into = make(place.make(points))
        assert_same(to_numpy(x.features[number]), to_numpy(one.features))
        assert_same(to_numpy(x.indices[number]), to_numpy(one.indices))
        assert_same(to_numpy(inverse[number]), to_numpy(into))


def test_no_points(sbj, place, jax):
    make = jax.jit(functools.partial(sbj.voxelize, ranges=[(0, 4)], voxel_size=1.0))
    x, inverse = make(place.make(np.ones((0, 2), np.float32)))
    assert x.features.shape == (0, 2) and inverse.shape == (0,)
    x, inverse = make(place.make(np.full((3, 2), 9, np.float32)))
    assert to_numpy(inverse).tolist() == [-1] * 3 and x.coordinates.number() == 0
    assert not to_numpy(x.features).any()


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        ("points", np.ones(4, np.float32), sb.ShapeError),
        ("points", np.ones((4, 2), np.float32), sb.ShapeError),
        ("points", np.ones((4, 3), np.int32), sb.DTypeError),  # they are features, too
        ("features", np.ones((3, 1), np.float32), sb.ShapeError),
        ("features", np.ones((4, 1), np.int32), sb.DTypeError),
        ("sample", np.ones(3, np.int32), sb.ShapeError),
        ("sample", np.ones(4, np.float32), sb.DTypeError),
        ("sample", np.ones(4, np.int32), sb.ShapeError),  # without a batch_size
        ("ranges", [], ValueError),
        ("ranges", [(0, 8), (8, 0), (0, 8)], ValueError),
        ("voxel_size", 0, ValueError),
        ("voxel_size", (1.0, 2.0), ValueError),
        ("mode", "unique", ValueError),
        ("order", "z", ValueError),
        ("capacity", -1, sb.ShapeError),
        ("batch_size", 2.5, sb.ShapeError),
    ],
)
def test_bad_calls(sbj, place, argument, value, error):
    given = {"points": np.ones((4, 3), np.float32), "ranges": [(0, 8)] * 3, "voxel_size": 2.0}
    given[argument] = value
    given = {k: place.make(v) if isinstance(v, np.ndarray) else v for k, v in given.items()}
    with pytest.raises(error, match=argument if argument != "points" else "points|features"):
        sbj.voxelize(given.pop("points"), **given)


def test_other_arrays_are_refused(sbj):
    with pytest.raises(sb.DeviceError, match="points must be a JAX array"):
        sbj.voxelize(np.ones((4, 3), np.float32), ranges=[(0, 8)] * 3, voxel_size=2.0)
