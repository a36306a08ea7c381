"""The bodies of the stack operations: NumPy's, and what CuPy arrays take, run on NumPy arrays."""

import importlib

import pytest

MODULES = (
    "neighbours", "taps", "per_image", "pooling", "stack_max_pool", "stack_global_pool",
    "stack_conv2d",
)  # fmt: skip


@pytest.fixture(params=["own body", "body for CuPy"], scope="module")
def body(request):
    """Which body runs; that for CuPy is array code, to which NumPy arrays are as good."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "body for CuPy":
            for name in MODULES:
                module = importlib.import_module(f"sbnet_cupy.block_sparse.stack.{name}")
                patch.setattr(module, "is_cupy", lambda array: True)
        yield request.param
