"""Convolutions at sites against loops over a dictionary, and against dense convolution."""

import gc
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sbnet_cupy as sb
from sbnet_cupy.dense.activation import apply_activation
from support import site_cases, site_oracles
from support.assertions import assert_close, assert_same, to_numpy


def drawn(data, xp, body, **options):
    """Return sites, their SparseTensor and a kernel, with the dictionary of the oracle."""
    sites = data.draw(site_cases.sites(**options))
    dtype, rng = data.draw(site_cases.float_dtypes()), data.draw(site_cases.generators())
    if body != "own body" and np.dtype(dtype).itemsize < 4:
        dtype = np.float32  # a body for CuPy leaves half floats to cuBLAS
    groups = data.draw(st.sampled_from([1, 1, 2, 3]))
    c, k = groups * data.draw(st.integers(1, 3)), groups * data.draw(st.integers(1, 3))
    features = sites.features(rng, c, dtype)
    x = sites.tensor(features, xp.asarray)

    def weights(kernel):
        return rng.standard_normal((*kernel, c // groups, k)).astype(dtype)

    return sites, x, site_oracles.sites_of(sites.indices, features), weights, groups, rng


def sum_dtype(dtype):
    return np.float64 if np.dtype(dtype) == np.float64 else np.float32


def assert_result(y, expected, size, w, count):
    """Assert that features are sums of products, and that rows that hold no site are 0."""
    found = to_numpy(y.features)
    assert found.dtype == w.dtype and not found[count:].astype(np.float64).any()
    terms = int(np.prod(w.shape[:-1]))
    options = {"terms": terms, "dtype": sum_dtype(w.dtype), "magnitude": size}
    assert_close(found[:count], expected, **options)


def rows_of(y, count):
    return [tuple(row) for row in to_numpy(y.indices)[:count].tolist()]


@given(data=st.data())
def test_submanifold(xp, body, data):
    sites, x, oracle, weights, groups, _ = drawn(data, xp, body)
    kernel, _, _, dilation = data.draw(site_cases.windows(sites.dimensions))
    w = weights(kernel)
    y = sb.submanifold_conv(x, xp.asarray(w), dilation=dilation, groups=groups)
    assert y.coordinates is x.coordinates
    wanted = rows_of(y, len(oracle))
    padding = tuple(n // 2 * d for n, d in zip(kernel, dilation, strict=True))
    full = site_oracles.dense_groups(w.astype(np.float64), groups)
    window = ((1,) * len(kernel), padding, dilation)
    assert_result(y, *site_oracles.convolve(oracle, full, wanted, *window), w, len(oracle))


@given(data=st.data())
def test_strided_and_its_inverse(xp, body, data):
    sites, x, oracle, weights, groups, rng = drawn(data, xp, body, dimensions=(1, 2, 3))
    kernel, stride, padding, dilation = data.draw(site_cases.windows(sites.dimensions))
    w = weights(kernel)
    options = {"stride": stride, "padding": padding, "dilation": dilation}
    y = sb.strided_conv(x, xp.asarray(w), groups=groups, **options)
    shape = tuple(
        max((n + 2 * p - d * (k - 1) - 1) // s + 1, 0)
        for n, k, s, p, d in zip(sites.shape, kernel, stride, padding, dilation, strict=True)
    )
    assert y.spatial_shape == shape and y.batch_size == sites.batch
    count = y.coordinates.number()
    wanted = rows_of(y, count)
    found = site_oracles.coarse_sites(oracle, kernel, stride, padding, dilation, shape)
    assert len(wanted) == len(found) and set(wanted) == found
    full = site_oracles.dense_groups(w.astype(np.float64), groups)
    window = (stride, padding, dilation)
    assert_result(y, *site_oracles.convolve(oracle, full, wanted, *window), w, count)
    back = rng.standard_normal((*kernel, w.shape[-1], 2)).astype(w.dtype)
    y = site_cases.poisoned(y, count)
    z = sb.inverse_conv(y, xp.asarray(back), onto=x)
    assert z.coordinates is x.coordinates
    coarse = site_oracles.sites_of(wanted, to_numpy(y.features)[:count])
    home = rows_of(z, len(oracle))
    expected = site_oracles.transpose(coarse, back.astype(np.float64), home, *window)
    assert_result(z, *expected, back, len(oracle))


@given(data=st.data())
def test_transposed(xp, body, data):
    sites, x, oracle, weights, groups, _ = drawn(data, xp, body, dimensions=(1, 2, 3), largest=5)
    kernel, stride, padding, dilation = data.draw(site_cases.windows(sites.dimensions))
    more = tuple(data.draw(st.integers(0, 1)) for _ in kernel)
    w = weights(kernel)
    options = {"stride": stride, "padding": padding, "dilation": dilation, "output_padding": more}
    y = sb.transposed_conv(x, xp.asarray(w), groups=groups, **options)
    shape = tuple(
        max((n - 1) * s - 2 * p + d * (k - 1) + 1 + m, 0)
        for n, k, s, p, d, m in zip(
            sites.shape, kernel, stride, padding, dilation, more, strict=True
        )
    )
    assert y.spatial_shape == shape
    count = y.coordinates.number()
    wanted = rows_of(y, count)
    found = site_oracles.fine_sites(oracle, kernel, stride, padding, dilation, shape)
    assert len(wanted) == len(found) and set(wanted) == found
    full = site_oracles.dense_groups(w.astype(np.float64), groups)
    window = (stride, padding, dilation)
    assert_result(y, *site_oracles.transpose(oracle, full, wanted, *window), w, count)


@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu"])
def test_epilogue(xp, body, activation):
    rng = np.random.default_rng(3)
    rows = np.argwhere(rng.random((1, 6, 6)) < 0.5).astype(np.int32)
    x = sb.sparse_tensor(xp.asarray(rng.standard_normal((len(rows), 4))), xp.asarray(rows),
                         spatial_shape=(6, 6), capacity=len(rows) + 2, batch_size=1)  # fmt: skip
    w, scale, bias = (rng.standard_normal(shape) for shape in [(3, 3, 4, 5), 5, 5])
    sums = to_numpy(sb.submanifold_conv(x, xp.asarray(w)).features)
    residual = rng.standard_normal(sums.shape)
    before = sums * scale + bias + residual
    expected = apply_activation(before.copy(), activation)
    expected[len(rows) :] = 0
    tables = {"scale": xp.asarray(scale), "bias": xp.asarray(bias), "activation": activation}
    y = sb.submanifold_conv(x, xp.asarray(w), residual=xp.asarray(residual), **tables)
    assert_close(to_numpy(y.features), expected, terms=4, dtype=np.float64)
    same = sb.submanifold_conv(x, xp.asarray(w), residual=x.replace(xp.asarray(residual)), **tables)
    assert_same(same.features, y.features)
    out = xp.writable(np.full(sums.shape, np.nan))
    given = sb.submanifold_conv(x, xp.asarray(w), residual=xp.asarray(residual), out=out, **tables)
    assert given.features is out
    assert_same(out, y.features)


def test_equals_dense_convolution_on_a_full_grid(xp, body):
    rng = np.random.default_rng(4)
    image = rng.standard_normal((2, 7, 5, 3))
    x = sb.dense_to_sparse(xp.asarray(image), tol=-1.0)
    w = rng.standard_normal((3, 3, 3, 4))
    y = sb.sparse_to_dense(sb.submanifold_conv(x, xp.asarray(w)))
    dense = sb.conv2d(xp.asarray(image), xp.asarray(w), padding="SAME")
    size = sb.conv2d(np.abs(image), np.abs(w), padding="SAME")
    assert_close(to_numpy(y), to_numpy(dense), terms=2 * 27, dtype=np.float64, magnitude=size)
    y = sb.strided_conv(x, xp.asarray(w), stride=2, padding=1)
    dense = sb.conv2d(xp.asarray(image), xp.asarray(w), strides=2, padding=1)
    size = sb.conv2d(np.abs(image), np.abs(w), strides=2, padding=1)
    found = to_numpy(y.dense())
    assert_close(found, to_numpy(dense), terms=2 * 27, dtype=np.float64, magnitude=size)


def test_a_weight_that_is_not_finite_reaches_only_those_who_use_it(xp, body):
    rows = xp.asarray(np.array([[0, 1], [0, 2], [0, 5]], np.int32))
    x = sb.sparse_tensor(xp.asarray(np.ones((3, 1))), rows, spatial_shape=8)
    w = np.array([np.inf, 1.0, 1.0]).reshape(3, 1, 1)
    y = sb.submanifold_conv(x, xp.asarray(w))
    assert to_numpy(y.features).ravel().tolist() == [2.0, np.inf, 1.0]


def test_maps_are_shared_and_freed(xp):
    rng = np.random.default_rng(5)
    rows = np.argwhere(rng.random((2, 5, 5)) < 0.5).astype(np.int32)
    ones = xp.asarray(np.ones((len(rows), 1)))
    x = sb.sparse_tensor(ones, xp.asarray(rows), spatial_shape=(5, 5))
    sites = x.coordinates
    window = sb.kernel_map(sites, 3, onto=sites)
    assert sb.kernel_map(sites, (3, 3), onto=sites).rows is window.rows
    y = sb.strided_conv(x, xp.asarray(np.ones((2, 2, 1, 1))), stride=2)
    again = sb.strided_conv(x, xp.asarray(np.zeros((2, 2, 1, 1))), stride=2)
    assert again.coordinates is y.coordinates
    assert sb.sparse_max_pool(x, 2).coordinates is y.coordinates
    assert window.flops(4, 8) == 2 * window.pairs() * 32
    sites.clear()
    assert sb.kernel_map(sites, 3, onto=sites).rows is not window.rows
    with pytest.raises(ValueError, match="there was none"):
        sb.inverse_conv(y, xp.asarray(np.ones((2, 2, 1, 1))), onto=x)


def test_a_submanifold_convolution_makes_no_sites(xp):
    """Whether it was computed before or not, there is nothing that an inverse could undo."""
    rows = xp.asarray(np.array([[0, 1], [0, 2], [0, 5]], np.int32))
    x = sb.sparse_tensor(xp.asarray(np.ones((3, 1))), rows, spatial_shape=8)
    w = xp.asarray(np.ones((3, 1, 1)))
    y = sb.submanifold_conv(x, w)
    with pytest.raises(ValueError, match="there was none"):
        sb.inverse_conv(y, w, onto=x)
    with pytest.raises(ValueError, match="there was none"):
        sb.sparse_unpool(y, onto=x)


def test_an_inverse_with_another_kernel_size_says_which_it_must_have(xp):
    rows = xp.asarray(np.array([[0, 1], [0, 2], [0, 5]], np.int32))
    x = sb.sparse_tensor(xp.asarray(np.ones((3, 1))), rows, spatial_shape=8)
    y = sb.strided_conv(x, xp.asarray(np.ones((2, 1, 1))), stride=2)
    with pytest.raises(sb.ShapeError, match=r"w must have the kernel size .*\(2,\), got \(3,\)"):
        sb.inverse_conv(y, xp.asarray(np.ones((3, 1, 1))), onto=x)


def test_one_of_several_convolutions_between_the_same_sites_is_named_by_its_kernel_or_by_none(xp):
    """Windows of two kinds relate the two lists: which one is meant, the sites do not tell."""
    rows = xp.asarray(np.array([[0, 1], [0, 4]], np.int32))
    x = sb.sparse_tensor(xp.asarray(np.array([[1.0], [10]])), rows, spatial_shape=7)
    w = xp.asarray(np.array([1.0, 10, 100]).reshape(3, 1, 1))
    y = sb.strided_conv(x, w, stride=2)
    z = sb.sparse_max_pool(x, 3, stride=2, onto=y)  # of the same window
    sb.inverse_conv(z, w, onto=x)
    z = sb.sparse_max_pool(x, 2, stride=2, onto=y)
    there = sb.kernel_map(x, 3, stride=2, onto=y).transposed()
    expected = sb.site_conv(z.features, w, there)
    assert_same(sb.inverse_conv(z, w, onto=x).features, expected)
    with pytest.raises(ValueError, match=r"kernel \(3,\), stride \(2,\) and kernel \(2,\)"):
        sb.sparse_unpool(z, onto=x)
    z = sb.strided_conv(x, w, stride=1, onto=y)
    with pytest.raises(ValueError, match=r"stride \(2,\) and kernel \(3,\), stride \(1,\)"):
        sb.inverse_conv(z, w, onto=x)


@pytest.mark.parametrize("name", ["padding", "dilation"])
def test_convolutions_that_differ_in_one_size_are_told_apart_by_the_error(name):
    rows = np.array([[0, 1], [0, 4]], np.int32)
    x, w = sb.sparse_tensor(np.ones((2, 1)), rows, spatial_shape=7), np.ones((3, 1, 1))
    y = sb.strided_conv(x, w, stride=2)
    sb.strided_conv(x, w, stride=2, onto=y, **{name: 2})
    before = int(name == "dilation")
    told = rf"stride \(2,\), {name} \({before},\) and .* stride \(2,\), {name} \(2,\)\); pass"
    with pytest.raises(ValueError, match=told):
        sb.inverse_conv(y, w, onto=x)


def test_maps_are_freed_with_the_sites():
    rows = np.array([[0, 1], [0, 2], [0, 5]], np.int32)
    x = sb.sparse_tensor(np.ones((3, 1)), rows, spatial_shape=8)
    y = sb.strided_conv(x, np.ones((2, 1, 1)), stride=2)
    sb.inverse_conv(y, np.ones((2, 1, 1)), onto=x)
    window = sb.kernel_map(x.coordinates, 3, onto=x.coordinates)
    window.transposed()
    alive = [weakref.ref(v) for v in (x.coordinates, y.coordinates, window.rows)]
    gc.disable()
    try:
        del x, y, window
        assert [ref() for ref in alive] == [None] * 3
    finally:
        gc.enable()


def test_offsets_in_place_of_a_kernel(xp, body):
    rng = np.random.default_rng(6)
    rows = np.argwhere(rng.random((1, 6, 6)) < 0.6).astype(np.int32)
    features = rng.standard_normal((len(rows), 2))
    x = sb.sparse_tensor(xp.asarray(features), xp.asarray(rows), spatial_shape=(6, 6))
    cross = [(0, 0), (0, 1), (0, -1), (1, 0), (-1, 0)]
    window = sb.kernel_map(x.coordinates, offsets=cross)
    w = rng.standard_normal((5, 2, 3))
    square = np.zeros((3, 3, 2, 3))
    for (i, j), tap in zip(cross, w, strict=True):
        square[1 + i, 1 + j] = tap
    found = sb.site_conv(x.features, xp.asarray(w), window)
    expected = sb.submanifold_conv(x, xp.asarray(square)).features
    assert_close(to_numpy(found), to_numpy(expected), terms=20, dtype=np.float64)


def test_rows_in_another_order_give_the_same_numbers(xp):
    """A CoordinateMap of its own order is as good as one of coordinate_map."""
    rng = np.random.default_rng(7)
    rows = np.argwhere(rng.random((2, 5, 5)) < 0.5).astype(np.int32)
    features, w = rng.standard_normal((len(rows), 2)), rng.standard_normal((3, 3, 2, 3))
    order = rng.permutation(len(rows))
    results = []
    for chosen in (np.arange(len(rows)), order):
        count = xp.asarray(np.array([len(rows)], np.int32))
        sites = sb.CoordinateMap(xp.asarray(rows[chosen]), count, (5, 5), 2)
        x = sb.SparseTensor(xp.asarray(features[chosen]), sites)
        results.append(to_numpy(sb.submanifold_conv(x, xp.asarray(w)).features))
    expected = results[0][order]
    assert_close(results[1], expected, terms=36, dtype=np.float64)


def packed_call(xp, **options):
    """Return a convolution of weights, packed or not, and its arrays of weights."""
    rng = np.random.default_rng(5)
    rows = np.unique(rng.integers(0, 6, (40, 3)) % (1, 6, 6), axis=0)
    x = sb.sparse_tensor(
        xp.asarray(rng.standard_normal((len(rows), 4), np.float32)),
        xp.asarray(rows), spatial_shape=(6, 6), batch_size=1,
    )  # fmt: skip
    w, bias = (rng.standard_normal(s).astype(np.float32) for s in ((3, 3, 4, 6), (6,)))
    arrays = xp.asarray(w), xp.asarray(bias)
    return (lambda w, **more: sb.submanifold_conv(x, w, **options, **more).features), arrays


def test_packed_weights_give_the_same_bits(xp):
    call, (w, bias) = packed_call(xp, activation="relu")
    scale = bias + 2
    weights = sb.PackedWeights(w, scale=scale, bias=bias, precision="ieee")
    expected = call(w, scale=scale, bias=bias, precision="ieee")
    assert_same(call(weights), expected)
    assert_same(call(weights, precision="ieee"), expected)


def test_packed_weights_change_when_they_are_refreshed():
    """On writable arrays, which the caller changes."""
    call, (w, bias) = packed_call(np)
    weights = sb.PackedWeights(w, bias=bias)
    before = call(weights)
    w *= 2
    assert_same(call(weights), before)
    weights.refresh()
    assert_same(call(weights), call(w, bias=bias))


@pytest.mark.parametrize(("more", "error", "words"), [
    ({"bias": True}, ValueError, "bias must be None where w is a PackedWeights"),
    ({"precision": "tf32"}, ValueError, "precision must be None, that of the PackedWeights"),
])  # fmt: skip
def test_packed_weights_are_not_contradicted(more, error, words):
    call, (w, bias) = packed_call(np)
    more = {name: bias if value is True else value for name, value in more.items()}
    with pytest.raises(error, match=words):
        call(sb.PackedWeights(w), **more)


def test_packed_weights_of_images_are_refused():
    call, (w, _) = packed_call(np)
    images = sb.PackedWeights(w.transpose(3, 2, 0, 1).copy(), w_format="OIHW")
    with pytest.raises(ValueError, match="w_format 'HWIO'"):
        call(images)
    with pytest.raises(sb.ShapeError, match=r"w must have shape \(\*kernel_size, C, K\)"):
        sb.PackedWeights(w[0, 0])
