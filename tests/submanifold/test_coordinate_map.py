"""coordinate_map and sparse_tensor: distinct sites, their order, and the features they get."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sbnet_cupy as sb
from sbnet_cupy.submanifold.keys import sort_keys
from support import site_cases
from support.assertions import assert_close, assert_same, to_numpy
from support.strategies import FLOATS

LEAVES = {1: (64,), 2: (8, 8), 3: (4, 4, 4), 4: (4, 4, 2, 2), 5: (2,) * 5, 7: (1,) + (2,) * 6}


def listed(rng, dimensions=3, rows=60, size=6, batch=2):
    """Return rows with repeats, and the shape of their grid."""
    rows = rng.integers(0, size, (rows, 1 + dimensions)).astype(np.int32)
    rows[:, 0] %= batch
    return rows, (size,) * dimensions


def leaf_order(row):
    """Return what rows are sorted by: the sample, the leaf, the place in the leaf."""
    both = list(zip(row[1:], LEAVES[len(row) - 1], strict=True))
    return row[0], [p // n for p, n in both], [p % n for p, n in both]


@pytest.mark.parametrize("order", ["leaf", "raster"])
@pytest.mark.parametrize("dimensions", LEAVES)
def test_sites_are_distinct_and_in_order(xp, dimensions, order):
    rows, shape = listed(np.random.default_rng(dimensions), dimensions, size=5)
    options = {"spatial_shape": shape, "mode": "first", "order": order}
    sites, inverse = sb.coordinate_map(xp.asarray(rows), **options)
    key = None if order == "raster" else leaf_order
    expected = sorted({tuple(map(int, row)) for row in rows}, key=key)
    found = to_numpy(sites.indices)
    assert [tuple(row) for row in found.tolist()] == expected
    assert_same(found[to_numpy(inverse)], rows)
    assert sites.number() == len(expected) and sites.batch_size == 2
    assert sites.check() is sites and not sites.overflowed


def test_the_order_does_not_depend_on_the_list(xp):
    rows, shape = listed(np.random.default_rng(0))
    first, _ = sb.coordinate_map(xp.asarray(rows), spatial_shape=shape, mode="first")
    again, _ = sb.coordinate_map(xp.asarray(rows[::-1].copy()), spatial_shape=shape, mode="last")
    assert_same(first.indices, again.indices)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("mode", ["first", "last", "sum", "mean"])
@pytest.mark.parametrize("spare", [None, 0, 9, -20])
def test_rows_of_one_site_are_reduced(xp, body, mode, dtype, spare):
    rng = np.random.default_rng(1)
    rows, shape = listed(rng, dimensions=2)
    features = rng.standard_normal((len(rows), 3)).astype(dtype)
    distinct = sorted({tuple(map(int, row)) for row in rows}, key=leaf_order)
    capacity = None if spare is None else len(distinct) + spare
    options = {"spatial_shape": shape, "batch_size": 2, "mode": mode, "capacity": capacity}
    x = sb.sparse_tensor(xp.asarray(features), xp.asarray(rows), **options)
    found = to_numpy(x.features)
    assert found.dtype == dtype and x.coordinates.number() == len(distinct)
    kept = distinct[:capacity]
    assert not found[len(kept) :].astype(np.float64).any()
    assert (to_numpy(x.indices)[len(kept) :] == -1).all()
    for row, site in enumerate(kept):
        mine = features[(rows == site).all(axis=1)].astype(np.float64)
        if mode in ("first", "last"):
            assert_same(found[row], mine[0 if mode == "first" else -1].astype(dtype))
            continue
        expected, size = mine.sum(0), abs(mine).sum(0)
        if mode == "mean":
            expected, size = expected / len(mine), size / len(mine)
        wide = np.float64 if np.dtype(dtype) == np.float64 else np.float32
        assert_close(found[row], expected, terms=len(mine), dtype=wide, magnitude=size)


@given(data=st.data())
def test_a_capacity_gives_what_the_exact_call_gives(xp, data):
    sites = data.draw(site_cases.sites())
    rng = data.draw(site_cases.generators())
    features = sites.features(rng, 2)
    options = {"spatial_shape": sites.shape, "batch_size": sites.batch}
    arrays = xp.asarray(features), xp.asarray(sites.indices)
    exact = sb.sparse_tensor(*arrays, **options)
    roomy = sb.sparse_tensor(*arrays, **options, capacity=len(features) + 4)
    count = len(features)
    assert roomy.coordinates.number() == exact.coordinates.number() == count
    assert_same(roomy.features[:count], exact.features)
    assert_same(roomy.indices[:count], exact.indices)
    assert (to_numpy(roomy.indices)[count:] == -1).all()
    assert roomy.coordinates.check() is roomy.coordinates


def test_what_a_capacity_cannot_raise_check_does(xp):
    rows = xp.asarray(np.array([[0, 1], [0, 5], [0, 1], [0, 9]], np.int32))
    sites, inverse = sb.coordinate_map(rows, spatial_shape=8, batch_size=1, capacity=4)
    assert to_numpy(inverse).tolist() == [0, 1, 0, -1]  # the last is outside
    with pytest.raises(sb.CapacityError, match="inside a grid"):
        sites.check()
    sites, _ = sb.coordinate_map(rows[:3], spatial_shape=8, batch_size=1, capacity=4)
    with pytest.raises(ValueError, match="distinct"):
        sites.check()
    sites, inverse = sb.coordinate_map(rows[:2], spatial_shape=8, batch_size=1, capacity=1)
    assert sites.overflowed and to_numpy(inverse).tolist() == [0, -1]
    with pytest.raises(sb.CapacityError, match="got 1 for 2 sites"):
        sites.check()


def test_rows_that_do_not_belong_are_named(xp):
    rows = xp.asarray(np.array([[0, 1], [0, 5], [0, 1]], np.int64))
    with pytest.raises(ValueError, match="equal rows 0 and 2"):
        sb.coordinate_map(rows, spatial_shape=8)
    with pytest.raises(sb.ShapeError, match=r"\[0, 5\] in row 1"):
        sb.coordinate_map(rows, spatial_shape=5, mode="first")
    with pytest.raises(sb.ShapeError, match=r"\[0, -1\] in row 0"):
        sb.coordinate_map(-rows, mode="first")


def test_large_grids_need_no_more_than_63_bits(xp):
    edge = 2**21 - 1
    rows = xp.asarray(np.array([[0, edge, edge, edge], [0, 0, 0, 0]], np.int64))
    sites, inverse = sb.coordinate_map(rows, spatial_shape=(2**21,) * 3, batch_size=1)
    assert to_numpy(inverse).tolist() == [1, 0]
    assert to_numpy(sites.indices).tolist() == [[0, 0, 0, 0], [0, edge, edge, edge]]
    with pytest.raises(sb.ShapeError, match="63 bits"):
        sb.coordinate_map(rows, spatial_shape=(2**21,) * 3, batch_size=2)
    assert sb.coordinate_map(rows, batch_size=1)[0].number() == 2  # 21 bits for each axis
    with pytest.raises(sb.ShapeError, match="inside a grid of 63 bits"):
        sb.coordinate_map(rows, batch_size=2)  # 20 bits


def test_no_rows(xp):
    x = sb.sparse_tensor(xp.asarray(np.ones((0, 3))), xp.asarray(np.ones((0, 4), np.int32)),
                         spatial_shape=(4, 4, 4), mode="sum")  # fmt: skip
    assert x.features.shape == (0, 3) and x.coordinates.number() == 0
    roomy = sb.sparse_tensor(xp.asarray(np.ones((0, 3))), xp.asarray(np.ones((0, 4), np.int32)),
                             spatial_shape=(4, 4, 4), mode="mean", capacity=2)  # fmt: skip
    assert_same(to_numpy(roomy.features), np.zeros((2, 3)))


@given(data=st.data())
def test_select(xp, data):
    sites = data.draw(site_cases.sites())
    rng = data.draw(site_cases.generators())
    x = sites.tensor(sites.features(rng, 2), xp.asarray)
    mask = rng.random(x.coordinates.capacity) < 0.5
    kept = np.flatnonzero(mask & to_numpy(x.coordinates.valid()))
    chosen, rows = x.coordinates.select(xp.asarray(mask))
    assert to_numpy(rows).tolist() == kept.tolist() and rows.dtype == np.int32
    assert_same(to_numpy(chosen.indices), to_numpy(x.indices)[kept])
    assert chosen.number() == len(kept) and chosen.check() is chosen
    assert (chosen.spatial_shape, chosen.batch_size) == (x.spatial_shape, x.batch_size)
    roomy, rows = x.coordinates.select(xp.asarray(mask.astype(np.float32)), capacity=len(kept) + 2)
    assert to_numpy(rows).tolist() == [*kept.tolist(), -1, -1]
    assert_same(to_numpy(roomy.indices)[: len(kept)], to_numpy(x.indices)[kept])
    assert (to_numpy(roomy.indices)[len(kept) :] == -1).all() and roomy.number() == len(kept)
    if len(kept):
        short, rows = x.coordinates.select(xp.asarray(mask), capacity=len(kept) - 1)
        assert to_numpy(rows).tolist() == kept[:-1].tolist()
        with pytest.raises(sb.CapacityError, match="larger capacity"):
            short.check()


def test_what_the_list_lacked_of_which_sites_were_selected(xp):
    """The check of the selected sites tells of it."""
    rows = xp.asarray(np.array([[0, 1], [0, 2], [0, 9]], np.int32))
    for size, capacity, match in ((4, 3, "must be inside"), (16, 2, "list that these were made")):
        grid = {"spatial_shape": size, "batch_size": 1, "capacity": capacity}
        sites, _ = sb.coordinate_map(rows, **grid)
        mask = xp.asarray(np.arange(capacity) < 1)
        for options in ({}, {"capacity": 2}):
            chosen, _ = sites.select(mask, **options)
            assert chosen.number() == 1
            with pytest.raises(sb.CapacityError, match=match):
                chosen.check()


def test_select_says_what_is_wrong(xp):
    sites, _ = sb.coordinate_map(xp.asarray(np.array([[0, 1], [0, 5]], np.int32)), spatial_shape=8)
    with pytest.raises(sb.ShapeError, match=r"mask must have shape \(2,\)"):
        sites.select(xp.asarray(np.ones(3, bool)))
    with pytest.raises(sb.DTypeError, match="mask must be an array"):
        sites.select([True, False])
    with pytest.raises(sb.ShapeError, match="capacity"):
        sites.select(xp.asarray(np.ones(2, bool)), capacity=-1)
    for rows in ([1, 0], [0]):  # which take the second row first, or the first row alone
        for dtype in (np.int64, np.int32, np.uint8):
            with pytest.raises(sb.DTypeError, match=r"indices of rows; .* zeros\(2, bool\)"):
                sites.select(xp.asarray(np.array(rows, dtype)))
    with pytest.raises(sb.DTypeError, match="mask must have a bool or float dtype"):
        sites.select(xp.asarray(np.ones(2, np.complex64)))


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_a_permuted_list_gives_the_same_bits(xp, mode):
    """Where each site has one row, a permuted list gives the same bits."""
    rng = np.random.default_rng(11)
    rows = np.argwhere(rng.random((2, 6, 6)) < 0.5).astype(np.int32)
    features = rng.standard_normal((len(rows), 5)).astype(np.float32)
    order = rng.permutation(len(rows))
    w = rng.standard_normal((3, 3, 5, 7)).astype(np.float32)
    results = []
    for chosen in (slice(None), order):
        arrays = xp.asarray(features[chosen].copy()), xp.asarray(rows[chosen].copy())
        x = sb.sparse_tensor(*arrays, spatial_shape=(6, 6), mode=mode)
        results.append(sb.submanifold_conv(x, xp.asarray(w), activation="silu"))
    assert_same(results[0].indices, results[1].indices)
    assert_same(results[0].features, results[1].features)


def test_lists_of_every_library_are_printed(lib):
    rows = np.array([[0, 1, 2], [0, 3, 3]], np.int32)
    x = sb.sparse_tensor(np.ones((2, 4), np.float32), rows, spatial_shape=(5, 5))
    for value in (x, x.coordinates, sb.kernel_map(x, 3, onto=x)):
        text = repr(value._map_arrays(lib.make))
        assert text.replace(str(lib.make(x.features).dtype), "float32") == repr(value)


def test_a_sample_beyond_those_that_keys_have_room_for_is_named():
    rows = np.array([[5000, 1, 2]])
    with pytest.raises(sb.CapacityError, match="or batch_size, without which samples are below"):
        sb.coordinate_map(rows, spatial_shape=(8, 8), capacity=2)[0].check()
    sb.coordinate_map(rows, spatial_shape=(8, 8), batch_size=5001, capacity=2)[0].check()


def test_the_shape_may_be_an_array(xp):
    rows = xp.asarray(np.array([[0, 3, 1], [0, 0, 2]], np.int32))
    for dtype in (np.int64, np.uint8):
        shape = np.array([4, 5], dtype)
        sites, _ = sb.coordinate_map(rows, spatial_shape=shape)
        assert sites.spatial_shape == (4, 5)
        assert set(map(type, sites.spatial_shape)) == {int}
        x = sb.sparse_tensor(xp.asarray(np.ones((2, 1))), rows, spatial_shape=shape)
        assert sb.sparse_to_dense(x, spatial_shape=shape + 1).shape == (1, 5, 6, 1)


def test_a_negative_count_is_no_number_of_sites():
    rows = np.array([[0, 3, 1], [0, 0, 2]], np.int32)
    sites = sb.CoordinateMap(rows, np.array([-3], np.int32), (4, 4), 1)
    for value in (sites, sb.SparseTensor(np.ones((2, 1)), sites)):
        assert "a count of -3, which is invalid" in repr(value)
    with pytest.raises(ValueError, match="count must be the number of sites, got -3"):
        sites.check()


def test_bits_of_an_axis_where_the_shape_is_unknown(xp):
    """As the documentation says: 21 in three dimensions, 17 for samples of an unknown number."""
    for bits, options in ((21, {}), (17, {"capacity": 1})):
        edge = xp.asarray(np.full((1, 4), [0, *[2**bits - 1] * 3]))
        assert sb.coordinate_map(edge, **options)[0].check().number() == 1
        with pytest.raises((sb.ShapeError, sb.CapacityError), match="inside a grid of 63 bits"):
            sb.coordinate_map(edge + xp.asarray(np.array([0, 1, 0, 0])), **options)[0].check()


def test_equal_keys_stay_in_their_order():
    """Also keys with as many bits as there are, which have none left for a number of the row."""
    for key in (5, 2**62):
        keys = np.repeat(np.array([key, key - 1]), 50)
        order, ordered = sort_keys(keys)
        assert order.tolist() == [*range(50, 100), *range(50)]
        assert ordered.tolist() == keys[order].tolist()
