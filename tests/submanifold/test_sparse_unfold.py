"""sparse_unfold is the matrix of a convolution; its gradient the transpose."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import sbnet_cupy as sb
from support import site_cases
from support.assertions import assert_close, assert_same, to_numpy


@given(data=st.data())
def test_rows_that_windows_read(xp, data):
    sites = data.draw(site_cases.sites(dimensions=(1, 2, 3)))
    dtype, rng = data.draw(site_cases.float_dtypes()), data.draw(site_cases.generators())
    kernel, stride, padding, dilation = data.draw(site_cases.windows(sites.dimensions))
    x = sites.tensor(sites.features(rng, 2, dtype), xp.asarray)
    options = {"stride": stride, "padding": padding, "dilation": dilation}
    window = sb.kernel_map(x.coordinates, kernel, **options)
    fill = data.draw(st.sampled_from([0.0, -2.0]))
    y = to_numpy(sb.sparse_unfold(x.features, window, fill=fill))
    rows = to_numpy(window.rows)
    features = to_numpy(x.features)
    expected = np.full((rows.shape[1], len(rows), 2), fill, dtype)
    for tap, row in np.argwhere(rows >= 0):
        expected[row, tap] = features[rows[tap, row]]
    assert_same(y, expected)

    grad = rng.standard_normal(y.shape).astype(dtype)
    found = sb.sparse_unfold_grad(xp.asarray(grad), x.features, window)
    total, size = np.zeros((2, *features.shape))
    for tap, row in np.argwhere(rows >= 0):
        total[rows[tap, row]] += grad[row, tap].astype(np.float64)
        size[rows[tap, row]] += abs(grad[row, tap].astype(np.float64))
    wide = np.float64 if np.dtype(dtype) == np.float64 else np.float32
    assert to_numpy(found).dtype == dtype
    assert_close(to_numpy(found), total, terms=len(rows), dtype=wide, magnitude=size)


def test_a_convolution_is_a_product(xp):
    rng = np.random.default_rng(0)
    rows = np.argwhere(rng.random((1, 6, 6)) < 0.5).astype(np.int32)
    features, w = rng.standard_normal((len(rows), 3)), rng.standard_normal((3, 3, 3, 4))
    x = sb.sparse_tensor(xp.asarray(features), xp.asarray(rows), spatial_shape=(6, 6))
    window = sb.kernel_map(x.coordinates, 3, onto=x.coordinates)
    unfolded = to_numpy(sb.sparse_unfold(x.features, window)).reshape(len(rows), 27)
    y = to_numpy(sb.submanifold_conv(x, xp.asarray(w)).features)
    size = abs(unfolded) @ abs(w.reshape(27, 4))
    expected = unfolded @ w.reshape(27, 4)
    assert_close(y, expected, terms=54, dtype=np.float64, magnitude=size)
