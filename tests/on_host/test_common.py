"""The numbers of cuda_src/core/common.cuh, run on the CPU: 16-bit floats, 64-bit division."""

import shutil

import numpy as np
import pytest

import host_cuda
from support.assertions import assert_same
from support.strategies import BFLOAT16

SOURCE = """
#include "core/common.cuh"

template <typename T>
__global__ void widen(const T* x, float* y, i64 n) {
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) y[i] = to_compute<float>(x[i]);
}
template <typename T>
__global__ void narrow(const float* x, T* y, i64 n) {
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) y[i] = from_compute<T>(x[i]);
}
template <int = 0>
__global__ void quotients(const i64* a, const i64* b, i64* y, i64 n) {
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) y[i] = divide(a[i], b[i]);
}
"""
FLOATS = {"Half": np.dtype("float16"), "BFloat16": BFLOAT16}


@pytest.fixture(scope="module")
def run(require, tmp_path_factory):
    """Run a kernel of SOURCE, compiled beside a copy of the headers."""
    require("g++")
    folder = tmp_path_factory.mktemp("common")
    (folder / "core").mkdir()
    shutil.copy(host_cuda.CUDA_SRC / "core" / "common.cuh", folder / "core")
    (folder / "numbers.cu").write_text(SOURCE)

    def run(kernel, template, *arrays):
        host_cuda.launch(
            "numbers", kernel, template, 1, 64, (*arrays, arrays[0].size), source_dir=folder
        )

    return run


def every(dtype):
    return np.arange(2**16, dtype=np.uint16).view(dtype)


@pytest.mark.parametrize("name", FLOATS)
def test_every_16_bit_float_widens_exactly(run, name):
    x = every(FLOATS[name])
    y = np.zeros(x.size, np.float32)
    run("widen", (name,), x, y)
    with np.errstate(invalid="ignore"):
        expected, number = x.astype(np.float32), ~np.isnan(x)
    assert np.isnan(y[~number]).all()
    assert_same(y[number], expected[number])


def _around(dtype):
    """All numbers of a 16-bit dtype, those halfway between neighbours, and those next to these."""
    with np.errstate(invalid="ignore"):
        x = np.sort(every(dtype).astype(np.float64))
    x = x[np.isfinite(x)]
    middles = (x[1:] + x[:-1]) / 2
    beyond = x[-1] + (x[-1] - x[-2]) / 2  # where infinity begins
    exact = np.r_[x, middles, beyond, -beyond].astype(np.float32)
    nearby = [np.nextafter(exact, np.float32(towards)) for towards in (-np.inf, np.inf)]
    special = np.float32([np.inf, -np.inf, -0.0, 3.4e38, -3.4e38, 1e-45, -1e-45])
    return np.concatenate([exact, *nearby, special])


@pytest.mark.parametrize("name", FLOATS)
def test_float32_narrows_to_nearest_even(run, name):
    dtype = FLOATS[name]
    random = np.random.default_rng(0).integers(0, 2**32, 20_000, np.uint32).view(np.float32)
    x = np.r_[_around(dtype), random[~np.isnan(random)]]
    y = np.zeros(x.size, dtype)
    run("narrow", (name,), x, y)
    with np.errstate(over="ignore"):
        assert_same(y, x.astype(dtype))


@pytest.mark.parametrize("name", FLOATS)
def test_nan_stays_nan_when_it_narrows(run, name):
    bits = np.uint32([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0x7F80FFFF])
    y = np.zeros(bits.size, FLOATS[name])
    run("narrow", (name,), bits.view(np.float32), y)
    with np.errstate(invalid="ignore"):
        assert np.isnan(y).all()


def test_division_beyond_32_bits(run):
    rng = np.random.default_rng(0)
    edges = [0, 1, 2, 3, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**62, 2**63 - 1]
    a = np.r_[edges, rng.integers(0, 2**63, 500) >> rng.integers(0, 63, 500)]
    b = np.r_[1, 2, 3, 7, 2**16, 2**31 - 1, rng.integers(1, 2**31, 200) >> rng.integers(0, 30, 200)]
    a, b = (np.ascontiguousarray(x).ravel() for x in np.broadcast_arrays(a[:, None], b.clip(1)))
    y = np.zeros(a.size, np.int64)
    run("quotients", (0,), a, b, y)
    assert_same(y, a // b)
