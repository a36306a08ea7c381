"""Sums and means of the rows of a site: a plain loop, NumPy, and the kernels, here and on a GPU."""

import contextlib

import numpy as np
import pytest

import sbnet_cupy as sb
from support import site_on_host
from support.assertions import assert_same, to_numpy
from support.site_conv_cases import sb_dtype

LISTED = [  # rows, cells, channels, dtype
    (1, 1, 1, "float32"), (700, 1, 3, "float16"), (3000, 40, 5, "bfloat16"),
    (90, 60, 33, "float64"), (2500, 3000, 2, "float32"), (5000, 5000, 40, "float16"),
]  # fmt: skip


def listed(case):
    """Return rows, some of them outside of the grid, and features."""
    n, cells, channels, name = case
    rng = np.random.default_rng(n)
    rows = np.stack([np.zeros(n, np.int64), rng.integers(-1, cells, n)], 1).astype(np.int32)
    return rows, rng.standard_normal((n, channels)).astype(sb_dtype(name))


def added(case, mode, capacity, change=np.positive):
    """Return what a loop over the rows adds up in their order."""
    rows, features = listed(case)
    features = change(features)
    wide = np.float64 if features.dtype == np.float64 else np.float32
    expected = np.zeros((capacity, features.shape[1]), wide)
    for s, cell in enumerate(np.unique(rows[rows[:, 1] >= 0, 1])[:capacity]):
        first, *others = features[rows[:, 1] == cell].astype(wide)
        expected[s] = first
        for row in others:
            expected[s] += row
        if mode == "mean":
            expected[s] /= wide(1 + len(others))
    return expected


def reduced(asarray, case, mode, capacity):
    """Return the features of the sites by the library."""
    rows, features = map(asarray, listed(case))
    grid = {"spatial_shape": case[1], "batch_size": 1}
    return sb.sparse_tensor(features, rows, **grid, mode=mode, capacity=capacity).features


@pytest.mark.parametrize("case", LISTED, ids=str)
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_rows_of_a_site_are_added(case, mode, xp):
    """In their order, to the bit."""
    capacity = max(case[1] * 2 // 3, 1)
    found = to_numpy(reduced(xp.asarray, case, mode, capacity))
    assert_same(found, added(case, mode, capacity).astype(found.dtype))


@pytest.mark.parametrize("case", LISTED, ids=str)
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_kernels_add_them_in_their_order(case, mode, require):
    require("g++")
    capacity = max(case[1] * 2 // 3, 1)
    with site_on_host.by_kernels():
        found = reduced(np.asarray, case, mode, capacity)
        assert "sum_rows" in site_on_host.LAUNCHED
    assert_same(found, added(case, mode, capacity).astype(found.dtype))


@pytest.mark.parametrize("by_kernels", [False, True])
def test_rows_that_have_no_site_are_in_no_sum(by_kernels, require):
    require("g++")
    rows = np.array([[0, -1], [0, 9], [3, 0]], np.int32)
    grid = {"spatial_shape": 8, "batch_size": 1, "capacity": 2}
    with site_on_host.by_kernels() if by_kernels else contextlib.nullcontext():
        found = sb.sparse_tensor(np.full((3, 2), np.nan), rows, mode="mean", **grid)
        empty = sb.sparse_tensor(np.zeros((0, 2)), rows[:0], mode="sum", **grid)
    assert found.features.tolist() == empty.features.tolist() == [[0, 0], [0, 0]]
