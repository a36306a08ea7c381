"""Pooled windows, and images interpolated at blocks, by their CUDA kernels on the shim."""

import pytest

from support.stack_as_on_gpu import by_numpy
from support.stack_pyramid_cases import IMAGES, POOLS, check_images, check_windows


@pytest.mark.parametrize("mode, dtype, sizes, windows", POOLS, ids=str)
def test_windows(on_shim, mode, dtype, sizes, windows):
    by_numpy(check_windows, mode, dtype, sizes, windows)
    several = any(name == "stack_global_pool_parts" for _, name in on_shim)
    assert len(on_shim) == 1 + several


@pytest.mark.parametrize("mode, dtype, sizes, small", IMAGES, ids=str)
def test_images(on_shim, mode, dtype, sizes, small):
    by_numpy(check_images, mode, dtype, sizes, small)
    assert [name for _, name in on_shim] == ["stack_interpolate"]
