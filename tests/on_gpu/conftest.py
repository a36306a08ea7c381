"""Fixtures of tests that need a GPU."""

import pytest

from sbnet_cupy.core.device import current_device


@pytest.fixture(scope="module")
def cupy(require):
    """CuPy, where there is a GPU."""
    return require("gpu")


@pytest.fixture
def hopper(cupy):
    """Skip a test of kernels or plans that are those of compute capability 9.0 elsewhere."""
    if not current_device().hopper:
        pytest.skip("needs compute capability 9.0")
