"""Sums, means and largest numbers of samples, by NumPy and by kernels, against plain loops."""

import functools

import numpy as np
import pytest

from sbnet_cupy.errors import ShapeError
from sbnet_cupy.submanifold import sample_pool
from sbnet_cupy.submanifold.sample_pool import SAMPLE_ARGMAX, SAMPLE_MAX, SAMPLE_SUM
from support import site_on_host
from support.assertions import assert_close, assert_same, to_numpy
from support.offset_arrays import offset, on_gpu
from support.strategies import BFLOAT16

DTYPES = [np.float16, BFLOAT16, np.float32, np.float64]
CASES = [  # rows, samples, channels, how samples follow each other, where features begin
    (900, 3, 16, "sorted", 0), (700, 5, 3, "shuffled", 0), (2000, 40, 8, "sorted", 0),
    (300, 2, 520, "shuffled", 0), (130, 1, 1, "sorted", 1), (64, 9, 24, "gaps", 0),
    (0, 4, 8, "sorted", 0), (5, 0, 8, "sorted", 0), (5, 2, 0, "sorted", 0),
    (600, 300, 2, "sorted", 0),
]  # fmt: skip


def arrays(case, dtype, numbers="floats"):
    """Return features, with memory that begins so many of them behind 16 bytes, and samples."""
    n, batch, channels, order, start = case
    rng = np.random.default_rng(n)
    sample = np.sort(rng.integers(-1, batch + 1, n)).astype(np.int32)  # -1 and `batch` are none
    if order == "gaps":
        sample = np.where(sample % 2, sample, -1).astype(np.int32)
    if order == "shuffled":
        sample = rng.permutation(sample)
    values = rng.standard_normal((n, channels))
    if numbers != "floats":
        values = np.round(values)
    if numbers == "with NaN":
        values[rng.random(values.shape) < 0.02] = np.nan
        values[rng.random(values.shape) < 0.3] = -np.inf
    return offset(values.astype(dtype), start), sample


def first_largest(features, sample, batch):
    """Return the first row of the largest number of each sample and channel, -1 without any."""
    rows = np.full((batch, features.shape[1]), -1, np.int32)
    for b in range(batch):
        (mine,) = np.nonzero(sample == b)
        if len(mine):
            rows[b] = mine[features[mine].astype(np.float64).argmax(axis=0)]
    return rows


def without_nan(numbers):
    """Return the numbers, with one of their own in place of NaN."""
    return np.where(np.isnan(numbers.astype(np.float64)), numbers.dtype.type(999), numbers)


def called(op, case, *arrays, dtype, options=(), asarray):
    """Return what an operator writes to memory that was full of NaN, or of a large number."""
    batch, channels = case[1:3]
    out = asarray(np.full((batch, channels), 99 if dtype == np.int32 else np.nan, dtype))
    op((*map(asarray, arrays), out), (batch, *options))
    return to_numpy(out)


def check_sums(case, dtype, asarray=np.asarray):
    """Check sums and means within their rounding, and sums of whole numbers exactly."""
    wide = np.float64 if dtype == np.float64 else np.float32
    for numbers, reduce in (("whole", "sum"), ("floats", "sum"), ("floats", "mean")):
        features, sample = arrays(case, dtype, numbers)
        how = {"dtype": dtype, "options": (reduce,), "asarray": asarray}
        found = called(SAMPLE_SUM, case, features, sample, **how)
        exact = features.astype(np.float64)
        for b in range(case[1]):
            mine = exact[sample == b]
            number = max(len(mine), 1) if reduce == "mean" else 1
            expected = mine.sum(axis=0) / number
            if numbers == "whole":
                assert_same(found[b], expected.astype(dtype), signed_zero=False)
            else:
                assert_close(found[b], expected, terms=len(mine) + 1, dtype=wide,
                             magnitude=abs(mine).sum(axis=0) / number)  # fmt: skip


def check_largest(case, dtype, asarray=np.asarray):
    """Check numbers and rows exactly, also of NaN, of equal numbers and where all are -inf."""
    for numbers in ("floats", "with NaN"):
        features, sample = arrays(case, dtype, numbers)
        rows = called(SAMPLE_ARGMAX, case, sample, features, dtype=np.int32, asarray=asarray)
        assert_same(rows, first_largest(features, sample, case[1]))
        found = called(SAMPLE_MAX, case, features, sample, dtype=dtype, asarray=asarray)
        if len(features):
            values = np.take_along_axis(features, np.maximum(rows, 0).astype(np.int64), axis=0)
            expected = np.where(rows >= 0, values, features.dtype.type(0))
            assert_same(without_nan(found), without_nan(expected))
        else:
            assert not found.astype(np.float64).any()


def same_parts(monkeypatch, most):
    """Have at most so many ranges of rows, of which each thread takes one at least."""
    monkeypatch.setattr(sample_pool, "_EACH", 1)
    monkeypatch.setattr(sample_pool, "_PARTS", most)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_loops(case, dtype):
    check_sums(case, dtype)
    check_largest(case, dtype)


@pytest.mark.parametrize("most", [1, 40])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels(require, monkeypatch, case, dtype, most):
    require("g++")
    same_parts(monkeypatch, most)
    case = (*case[:4], 0)  # the shim takes arrays for aligned
    with site_on_host.by_kernels():
        check_sums(case, dtype)
        check_largest(case, dtype)
        launched = {"pool_parts", "pool_samples"} if case[1] and case[2] else set()
        assert set(site_on_host.LAUNCHED) == launched


@pytest.mark.gpu
@pytest.mark.parametrize("most", [None, 1, 40])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_on_a_gpu(require, monkeypatch, case, dtype, most):
    cupy = require("gpu")
    if most:
        same_parts(monkeypatch, most)
    asarray = functools.partial(on_gpu, cupy)
    check_sums(case, dtype, asarray)
    check_largest(case, dtype, asarray)


@pytest.mark.parametrize("rows", [1 << 20, 500_000, 1, 0])
@pytest.mark.parametrize("batch", [1, 64, 100_000])
def test_what_parts_need_is_bounded(rows, batch):
    parts = sample_pool._parts(rows, batch, lanes=4)
    assert parts * batch <= max(8192, batch) and (parts > 0) == (rows > 0)


def test_sums_are_wide_and_rounded_once(xp):
    features, sample = np.ones((9, 2), np.float16), np.zeros(9, np.int32)
    features[0] = 2048
    total = SAMPLE_SUM((xp.asarray(features), xp.asarray(sample), None), (1, "sum"))
    assert_same(to_numpy(total), np.full((1, 2), 2056, np.float16))


def test_samples_of_other_rows_are_refused(xp):
    features, sample = xp.asarray(np.ones((9, 2))), xp.asarray(np.zeros(8, np.int32))
    with pytest.raises(ShapeError, match=r"sample must have shape \(9,\)"):
        SAMPLE_SUM((features, sample, None), (1, "sum"))
