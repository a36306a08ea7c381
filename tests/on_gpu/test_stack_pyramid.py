"""Pooled windows, in clusters too, and images interpolated at blocks, on a GPU."""

import pytest

from support.stack_pyramid_cases import IMAGES, POOLS, check_images, check_windows

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("mode, dtype, sizes, windows", POOLS, ids=str)
def test_windows(mode, dtype, sizes, windows, require):
    check_windows(mode, dtype, sizes, windows, xp=require("gpu"))


@pytest.mark.parametrize("mode, dtype, sizes, small", IMAGES, ids=str)
def test_images(mode, dtype, sizes, small, require):
    check_images(mode, dtype, sizes, small, xp=require("gpu"))
