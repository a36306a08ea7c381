"""Tables that name rows that are not there: they read none, in every operation over a map."""

import numpy as np
import pytest

import sbnet_cupy as sb
from sbnet_cupy.submanifold.site_max import SITE_MAX, SITE_MAX_GRAD, SITE_MAX_TANGENT
from sbnet_cupy.submanifold.site_sum import SITE_SUM
from support.assertions import assert_same, to_numpy

TAPS, SITES, CHANNELS = 9, 40, 8
WRONG = (SITES, SITES + 3, 2**31 - 1, -2, -(2**31))


@pytest.fixture
def tables():
    """Return a table in which numbers are wrong, and the same table with -1 in their places."""
    rng = np.random.default_rng(5)
    rows = np.stack([rng.permutation(SITES) for _ in range(TAPS)]).astype(np.int32)
    wrong = rng.random(rows.shape) < 0.2
    wrong[:, 3] = True  # a row that reads none
    corrupt = np.where(wrong, rng.choice(np.array(WRONG, np.int32), rows.shape), rows)
    return corrupt, np.where(wrong, np.int32(-1), rows)


def results(xp, rows, dtype):
    """Return what every operation over a map gives, by name."""
    rng = np.random.default_rng(6)
    cells = np.argwhere(np.ones((1, 5, 8), bool)).astype(np.int32)
    sites, _ = sb.coordinate_map(xp.asarray(cells), spatial_shape=(5, 8))
    window = sb.KernelMap(xp.asarray(rows), sites, sites, (3, 3))
    shapes = (SITES, CHANNELS), (SITES, CHANNELS), (TAPS, CHANNELS, CHANNELS)
    x, dy, w = (xp.asarray(rng.standard_normal(s).astype(dtype)) for s in shapes)
    found = {"site_conv": sb.site_conv(x, w, window), "unfold": sb.sparse_unfold(x, window, fill=7)}
    gradients = sb.site_conv_grad(dy, x, w, window)
    found |= {"conv, grad x": gradients.features, "conv, grad w": gradients.w}
    unfolded = xp.asarray(rng.standard_normal((SITES, TAPS, CHANNELS)).astype(dtype))
    found["unfold, grad"] = sb.sparse_unfold_grad(unfolded, x, window)
    found["transposed"] = window.transposed().rows
    for count in ("one", "active"):
        found[f"sum, {count}"] = SITE_SUM((x, window.rows, sites.valid(), None), (count,))
    for ties in ("first", "all"):
        y = SITE_MAX((x, window.rows, sites.valid(), None), (None, ties))
        back = window.transposed().rows
        found[f"max, {ties}"] = y
        found[f"max, {ties}, grad"] = SITE_MAX_GRAD((dy, x, y, window.rows, back, None), (ties,))
        found[f"max, {ties}, tangent"] = SITE_MAX_TANGENT((dy, x, y, window.rows, None), (ties,))
    return {name: to_numpy(value) for name, value in found.items()}


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_numbers_that_are_no_rows_read_none(xp, body, tables, dtype):
    if body != "own body" and dtype == np.float16:
        pytest.skip("a body for CuPy leaves half floats to cuBLAS")
    corrupt, clean = tables
    expected = results(xp, clean, dtype)
    for name, value in results(xp, corrupt, dtype).items():
        assert_same(value, expected[name])
    assert np.isfinite(expected["site_conv"].astype(np.float64)).all()
