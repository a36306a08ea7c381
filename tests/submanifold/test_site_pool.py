"""Pooling at sites against loops, and its gradients against differences."""

import functools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sbnet_cupy as sb
from sbnet_cupy.submanifold.site_max import SITE_MAX, SITE_MAX_GRAD
from sbnet_cupy.submanifold.site_sum import SITE_SUM
from support import site_cases, site_on_host, site_oracles
from support.assertions import assert_close, assert_same, to_numpy
from support.offset_arrays import offset, on_gpu
from support.strategies import BFLOAT16


def drawn(data, xp, body, dtypes=None):
    sites = data.draw(site_cases.sites(dimensions=(1, 2, 3)))
    dtype = data.draw(site_cases.float_dtypes() if dtypes is None else dtypes)
    rng = data.draw(site_cases.generators())
    features = sites.features(rng, 3, dtype)
    kernel, stride, padding, dilation = data.draw(site_cases.windows(sites.dimensions))
    options = {"stride": stride, "padding": padding, "dilation": dilation}
    return sites, sites.tensor(features, xp.asarray), features, kernel, options


def windows_of(y, x, sites, features, kernel, options):
    """Return the features that each row of the result reads, in the order of the cells."""
    oracle = site_oracles.sites_of(sites.indices, features)
    for sample, *position in to_numpy(y.indices)[: y.coordinates.number()].tolist():
        read = [
            (sample, *site_oracles.reads(position, cell, **options))
            for cell in site_oracles.cells(kernel)
        ]
        yield np.array([oracle[site] for site in read if site in oracle])


@pytest.mark.parametrize("floor", [None, 0.0])
@given(data=st.data())
def test_max(xp, body, floor, data):
    sites, x, features, kernel, options = drawn(data, xp, body)
    y = sb.sparse_max_pool(x, kernel, floor=floor, **options)
    found = to_numpy(y.features)
    assert found.dtype == features.dtype
    count = y.coordinates.number()
    assert not found[count:].astype(np.float64).any()
    for row, mine in enumerate(windows_of(y, x, sites, features, kernel, options)):
        expected = mine.max(axis=0) if floor is None else np.maximum(mine.max(axis=0), floor)
        assert_same(found[row].astype(np.float64), expected, signed_zero=False)


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float32], ids=str)
def test_nan_is_the_largest_and_warns_of_nothing(xp, dtype):
    rows = xp.asarray(np.array([[0, 0], [0, 1], [0, 5]]))
    features = xp.asarray(np.array([[np.nan], [1], [-2]], dtype))
    pooled = sb.sparse_max_pool(sb.sparse_tensor(features, rows, spatial_shape=8), 2, floor=0)
    first, second = to_numpy(pooled.features).astype(np.float64).ravel()
    assert np.isnan(first) and second == 0


@pytest.mark.parametrize("count", ["volume", "active"])
@given(data=st.data())
def test_average(xp, body, count, data):
    sites, x, features, kernel, options = drawn(data, xp, body)
    y = sb.sparse_avg_pool(x, kernel, count=count, **options)
    found, volume = to_numpy(y.features), int(np.prod(kernel))
    for row, mine in enumerate(windows_of(y, x, sites, features, kernel, options)):
        number = volume if count == "volume" else len(mine)
        wide = np.float64 if found.dtype == np.float64 else np.float32
        assert_close(found[row], mine.sum(0) / number, terms=volume + 1, dtype=wide,
                     magnitude=abs(mine).sum(0) / number)  # fmt: skip


@given(data=st.data())
def test_unpool_gives_back_what_windows_hold(xp, body, data):
    doubles = st.just(np.float64)
    sites, x, _, kernel, options = drawn(data, xp, body, doubles)
    y = sb.sparse_max_pool(x, kernel, **options)
    count = y.coordinates.number()
    back = sb.sparse_unpool(site_cases.poisoned(y, count), onto=x)
    coarse = site_oracles.sites_of(to_numpy(y.indices)[:count], to_numpy(y.features)[:count])
    home = [tuple(row) for row in to_numpy(x.indices)[: len(sites.indices)].tolist()]
    ones = np.ones((*kernel, 1, 1)) * np.eye(3)
    window = (options["stride"], options["padding"], options["dilation"])
    expected, size = site_oracles.transpose(coarse, ones, home, *window)
    found = to_numpy(back.features)
    assert back.coordinates is x.coordinates and not found[len(home) :].any()
    assert_close(found[: len(home)], expected, terms=27, dtype=np.float64, magnitude=size)


def example(xp, ties=False):
    rng = np.random.default_rng(2)
    rows = np.argwhere(rng.random((2, 5, 5)) < 0.5).astype(np.int32)
    values = rng.standard_normal((len(rows), 2))
    values = np.round(values) if ties else values
    return rng, sb.sparse_tensor(xp.asarray(values), xp.asarray(rows), spatial_shape=(5, 5))


POOLS = {
    "max": (sb.sparse_max_pool, sb.sparse_max_pool_grad, {}),
    "max with a floor": (sb.sparse_max_pool, sb.sparse_max_pool_grad, {"floor": 0.1}),
    "volume": (sb.sparse_avg_pool, sb.sparse_avg_pool_grad, {}),
    "active": (sb.sparse_avg_pool, sb.sparse_avg_pool_grad, {"count": "active"}),
}


@pytest.mark.parametrize("name", POOLS)
def test_gradients_by_differences(xp, body, name):
    rng, x = example(xp)
    pool, pool_grad, options = POOLS[name]
    options = options | {"kernel_size": 3, "stride": 2, "padding": 1}
    y = pool(x, **options)
    grad, way = rng.standard_normal(y.features.shape), rng.standard_normal(x.features.shape)
    found = to_numpy(pool_grad(xp.asarray(grad), x, **options))
    step = 1e-7
    ends = [
        (to_numpy(pool(x.replace(x.features + sign * step * xp.asarray(way)), **options).features)
         * grad).sum()
        for sign in (1, -1)
    ]  # fmt: skip
    assert abs((ends[0] - ends[1]) / (2 * step) - (found * way).sum()) < 1e-6


def test_the_first_of_equal_values_takes_the_gradient(xp, body):
    rows = xp.asarray(np.array([[0, 0], [0, 1], [0, 2], [0, 3]], np.int32))
    x = sb.sparse_tensor(xp.asarray(np.array([[1.0], [1], [np.nan], [7]])), rows, spatial_shape=4)
    grad = xp.asarray(np.array([[10.0], [20.0]]))
    assert to_numpy(sb.sparse_max_pool_grad(grad, x, 2)).ravel().tolist() == [10, 0, 20, 0]


def test_unpool_gradient(xp, body):
    rng, x = example(xp)
    y = sb.sparse_avg_pool(x, 3, stride=2, padding=1)
    up = sb.sparse_unpool(y, onto=x)
    grad = rng.standard_normal(up.features.shape)
    found = to_numpy(sb.sparse_unpool_grad(xp.asarray(grad), y, onto=x.coordinates))
    left, right = (found * to_numpy(y.features)).sum(), (grad * to_numpy(up.features)).sum()
    assert abs(left - right) < 1e-12 * max(1, abs(right))


TABLES = [  # rows of x and of the result, taps, channels, where arrays begin behind 16 bytes
    (50, 40, 27, 3, 0), (300, 90, 8, 40, 0), (9, 700, 1, 1, 0), (60, 20, 5, 264, 0),
    (30, 30, 9, 16, 1), (1, 3, 64, 8, 0), (0, 4, 8, 8, 0),
]  # fmt: skip


def tables(case, dtype):
    """Return features of few values with NaN, rows of a map and back, and which rows hold sites."""
    n, m, taps, channels, start = case
    rng = np.random.default_rng(m)

    def features(rows):
        values = rng.integers(-3, 3, (rows, channels)) / 2
        values[rng.random(values.shape) < 0.05] = np.nan
        values[rng.random(values.shape) < 0.02] = -np.inf
        return offset(values.astype(dtype), start)

    rows = np.full((taps, m), -1, np.int32)
    back = np.full((taps, n), -1, np.int32)
    for tap in range(taps):
        pairs = min(n, m) * 2 // 3
        read, reader = rng.permutation(n)[:pairs], rng.permutation(m)
        rows[tap, reader[:pairs]], back[tap, read] = read, reader[:pairs]
        rows[tap, reader[m - m // 5 :]] = n + 7  # is no row
    return features(n), features(m), rows, back, rng.random(m) < 0.8


def pooled(x, grad_y, rows, back, valid, asarray=np.asarray):
    """Return what the operators give, by name, in arrays that were full of NaN."""
    x, grad_y, rows, back, valid = map(asarray, (x, grad_y, rows, back, valid))
    found = {}
    for count in ("one", "volume", "active"):
        for mask in (None, valid):
            out = asarray(np.full(grad_y.shape, np.nan, x.dtype))
            SITE_SUM((x, rows, mask, out), (count,))
            found[f"sum, {count}, {mask is not None}"] = out
    for floor in (None, 0.3, -9.0):
        largest = SITE_MAX((x, rows, valid, None), (floor, "first"))
        found[f"max, {floor}"] = largest
        for ties in ("first", "all"):
            given = grad_y, x, largest, rows, back, None
            found[f"gradient, {floor}, {ties}"] = SITE_MAX_GRAD(given, (ties,))
    return found


def assert_same_or_nan(found, expected):
    """Assert that results have the same bits, whatever those of NaN are."""
    for name, value in found.items():
        pair = to_numpy(value), expected[name]
        assert_same(*(np.where(np.isnan(x.astype(float)), x.dtype.type(999), x) for x in pair))


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float32, np.float64], ids=str)
@pytest.mark.parametrize("case", TABLES, ids=str)
def test_kernels_give_the_bits_of_loops_over_taps(require, case, dtype):
    require("g++")
    given = tables((*case[:4], 0), dtype)  # the shim takes arrays for aligned
    expected = pooled(*given)
    with site_on_host.by_kernels():
        found = pooled(*given)
        launched = set(site_on_host.LAUNCHED)
    assert launched == {"pool_rows"} | ({"pool_max_grad"} if case[0] else set())
    assert_same_or_nan(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float32, np.float64], ids=str)
@pytest.mark.parametrize("case", TABLES, ids=str)
def test_a_gpu_gives_the_bits_of_loops_over_taps(require, case, dtype):
    cupy = require("gpu")
    given = tables(case, dtype)
    asarray = functools.partial(on_gpu, cupy)
    assert_same_or_nan(pooled(*given, asarray=asarray), pooled(*given))


@pytest.mark.parametrize("reduce", ["max", "mean", "sum"])
@given(data=st.data())
def test_global(xp, reduce, data):
    sites, x, features, _, _ = drawn(data, xp, None)
    y = to_numpy(sb.global_pool(x, reduce))
    assert y.dtype == features.dtype and y.shape == (sites.batch, 3)
    grad = np.arange(1.0, y.size + 1).reshape(y.shape).astype(y.dtype)
    dx = to_numpy(sb.global_pool_grad(xp.asarray(grad), x, reduce)).astype(np.float64)
    assert not dx[len(sites.indices) :].any()
    at = to_numpy(x.indices)[:, 0]
    for b in range(sites.batch):
        mine = to_numpy(x.features)[at == b].astype(np.float64)
        back, here = dx[at == b], grad[b].astype(np.float64)
        if not len(mine):
            assert not y[b].astype(np.float64).any()
        elif reduce == "max":
            assert_same(y[b].astype(np.float64), mine.max(axis=0))
            expected = np.zeros(mine.shape)
            expected[mine.argmax(axis=0), range(3)] = here
            assert_same(back, expected)
        else:
            number = len(mine) if reduce == "mean" else 1
            wide = np.float64 if y.dtype == np.float64 else np.float32
            assert_close(y[b], mine.sum(0) / number, terms=len(mine) + 1, dtype=wide,
                         magnitude=abs(mine).sum(0) / number)  # fmt: skip
            assert_close(back.astype(y.dtype), np.broadcast_to(here / number, back.shape), terms=1,
                         dtype=wide)  # fmt: skip


def test_sites_of_one_s_own_whose_windows_are_empty(xp, body):
    rows = xp.asarray(np.array([[0, 0], [0, 1]], np.int32))
    x = sb.sparse_tensor(xp.asarray(np.array([[-3.0], [-1]])), rows, spatial_shape=8)
    onto, _ = sb.coordinate_map(xp.asarray(np.array([[0, 0], [0, 3]], np.int32)), spatial_shape=4)
    assert to_numpy(sb.sparse_max_pool(x, 2, onto=onto).features).ravel().tolist() == [-1, 0]
    low = sb.sparse_max_pool(x, 2, onto=onto, floor=-2.0).features
    assert to_numpy(low).ravel().tolist() == [-1, -2]
    mean = sb.sparse_avg_pool(x, 2, onto=onto, count="active").features
    assert to_numpy(mean).ravel().tolist() == [-2, 0]


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_rows_of_no_sample_take_no_gradient(xp, reduce):
    """As in a list of sites that was made by hand: they are in no result."""
    rows, count = np.array([[0, 1], [7, 1], [-3, 2]], np.int32), np.array([3], np.int32)
    sites = sb.CoordinateMap(xp.asarray(rows), xp.asarray(count), (4,), 1)
    x = sb.SparseTensor(xp.asarray(np.ones((3, 1))), sites)
    assert sb.global_pool(x, reduce).tolist() == [[1]]
    grad_y = xp.asarray(np.ones((1, 1)))
    assert sb.global_pool_grad(grad_y, x, reduce).tolist() == [[1], [0], [0]]


@pytest.mark.parametrize("order", ["sorted", "shuffled"])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_many_samples_read_each_row_once(reduce, order):
    """As the proposals of a scan are: each took a pass over the rows of all."""
    rng, (n, batch) = np.random.default_rng(0), (8192, 512)
    rows = np.column_stack([np.arange(n) * batch // n, np.arange(n)]).astype(np.int32)
    rows = rng.permutation(rows) if order == "shuffled" else rows
    features = rng.integers(-9, 9, (n, 64)).astype(np.float32)
    sites = sb.CoordinateMap(rows, np.array([n], np.int32), (n,), batch)
    x = sb.SparseTensor(features, sites)
    sb.global_pool(x, reduce)  # makes its plan
    tracemalloc.start()
    try:
        y = sb.global_pool(x, reduce)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    by_sample = features[rows[:, 0].argsort(kind="stable")].reshape(batch, -1, 64)
    assert_same(y, getattr(by_sample, reduce)(axis=1))
    assert peak < features.nbytes / 2
