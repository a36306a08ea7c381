"""Pools of features at sites in JAX: the package's results and gradients, inside jit."""

import functools

import numpy as np
import pytest

import sbnet_cupy as sb
from support.adapter_cases import normal
from support.assertions import assert_close, assert_same, to_numpy
from support.exhaustive import thinned
from support.jax_site_cases import SPARE, same_sites, tensors

POOLS = {
    "max": ("sparse_max_pool", {}),
    "max, floor": ("sparse_max_pool", {"stride": 1, "floor": 0.25, "padding": 1}),
    "max, as in SparseConvNet": ("sparse_max_pool", {"stride": 1, "floor": 0.0, "ties": "all"}),
    "max, all of equal values": ("sparse_max_pool", {"ties": "all"}),
    "average": ("sparse_avg_pool", {}),
    "average of active": ("sparse_avg_pool", {"stride": (2, 1, 2), "count": "active"}),
    "largest of samples": ("global_pool", {"reduce": "max"}),
    "mean of samples": ("global_pool", {"reduce": "mean"}),
    "sum of samples": ("global_pool", {"reduce": "sum"}),
}


@pytest.mark.parametrize("name", thinned(list(POOLS), 2))
def test_pools_and_their_gradients(sbj, place, jax, name):
    """Whole numbers, of which many are equal: sums are exact."""
    exact, x = tensors(sbj, place)
    whole = np.round(2 * exact.features)
    exact = exact.replace(whole)
    features = place.make(np.pad(whole, ((0, SPARE), (0, 0)), constant_values=np.nan))
    function, options = POOLS[name]
    given = options if function == "global_pool" else options | {"kernel_size": (2, 3, 2)}
    expected = getattr(sb, function)(exact, **given)
    run = functools.partial(getattr(sbj, function), **given)
    grad = np.round(4 * normal(*np.shape(getattr(expected, "features", expected)), seed=7))

    @jax.jit
    def both(features):
        def loss(features):
            y = run(x.replace(features))
            values = y if function == "global_pool" else y.features[: len(grad)]
            return (values * grad).sum(), y

        dx, y = jax.grad(loss, has_aux=True)(features)
        return y, dx

    found, dx = both(features)
    if function != "global_pool":
        same_sites(found.coordinates, expected.coordinates)
        count = len(expected.features)
        assert not to_numpy(found.features)[count:].any()
        found, expected = found.features[:count], expected.features
    one_division = 0 if "max" in name or "sum" in name or "largest" in name else 1
    size = abs(expected).astype(np.float64)
    assert_close(to_numpy(found), expected.astype(np.float64), terms=one_division, dtype="f4",
                 magnitude=size)  # fmt: skip

    dx = to_numpy(dx)
    wanted = getattr(sb, f"{function}_grad")(grad, exact, **given)
    largest = getattr(sb, f"{function}_grad")(abs(grad), exact, **given)
    rows = len(wanted)
    assert not dx[rows:].any()
    assert_close(dx[:rows], wanted.astype(np.float64), terms=2 * 12, dtype="f4",
                 magnitude=abs(largest).astype(np.float64))  # fmt: skip


def test_largest_values_that_are_no_numbers(sbj, place, jax):
    """NaN is larger than any number, as in the core."""
    rows = np.array([[0, 0], [0, 1], [0, 4], [1, 2]], np.int32)
    features = np.array([[1.0, np.nan], [np.nan, 2], [3, -np.inf], [-np.inf, 0]], np.float32)
    grid = {"spatial_shape": 6, "batch_size": 2}
    expected = sb.sparse_tensor(features, rows, **grid)
    make = jax.jit(functools.partial(sbj.sparse_tensor, **grid))
    x = make(place.make(features), place.make(rows))
    for pool in ("sparse_max_pool", "global_pool"):
        options = {"kernel_size": 2, "capacity": 3} if pool == "sparse_max_pool" else {}
        run = jax.jit(functools.partial(getattr(sbj, pool), **options))
        y, wanted = run(x), getattr(sb, pool)(expected, **options)
        if options:
            y, wanted = y.features, wanted.features
        np.testing.assert_array_equal(to_numpy(y), to_numpy(wanted), strict=True)


def test_the_way_back_from_a_pool(sbj, place, jax):
    """Each site gets the values of the windows that read it; whole numbers are exact."""
    exact, x = tensors(sbj, place)
    exact = exact.replace(np.round(4 * exact.features))
    x = x.replace(jax.numpy.round(4 * x.features))
    window = {"kernel_size": (3, 1, 2), "stride": (2, 1, 1), "padding": (1, 0, 0)}
    expected = sb.sparse_unpool(sb.sparse_max_pool(exact, **window), onto=exact)
    pool = jax.jit(functools.partial(sbj.sparse_max_pool, **window))
    back = jax.jit(lambda pooled, fine: sbj.sparse_unpool(pooled, onto=fine))
    pooled = pool(x)
    found = to_numpy(back(pooled, x).features)
    assert_same(found[: len(exact.features)], expected.features)
    assert not found[len(exact.features) :].any()
    with pytest.raises(ValueError, match="onto must be the sites that a pooling"):
        sbj.sparse_unpool(x, onto=x)
    flat = sbj.coordinate_map(place.make(np.zeros((1, 3), np.int32)), spatial_shape=(4, 4))[0]
    with pytest.raises(sb.ShapeError, match="onto must have 3 dimensions"):
        sbj.sparse_unpool(pooled, onto=flat)


@pytest.mark.parametrize("reduce", ["max", "mean", "sum"])
def test_samples_of_no_rows(sbj, place, jax, reduce):
    """Their pools are 0, and a gradient of nothing is empty."""
    rows, features = (place.make(np.zeros((0, n), t)) for n, t in ((3, np.int32), (4, np.float32)))
    x = sbj.sparse_tensor(features, rows, spatial_shape=(6, 6), batch_size=2)

    @jax.jit
    def loss(features):
        y = sbj.global_pool(x.replace(features), reduce)
        return y.sum(), y

    dx, y = jax.grad(loss, has_aux=True)(features)
    assert_same(to_numpy(y), np.zeros((2, 4), np.float32))
    assert dx.shape == (0, 4)
