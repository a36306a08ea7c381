"""The bodies of the stack operations: NumPy's, and what CuPy arrays take, run on NumPy arrays."""

import importlib

import pytest

from sbnet_cupy.block_sparse.stack import stack_conv2d
from sbnet_cupy.core import operator
from support.host_memory import plan_some_as_on_a_gpu

MODULES = (
    "fetch", "neighbours", "taps", "per_image", "pooling", "stack_max_pool", "stack_avg_pool",
    "stack_global_pool", "stack_conv2d",
)  # fmt: skip


@pytest.fixture(params=["own body", "body for CuPy"], scope="module")
def body(request, xp):
    """Which body runs; that for CuPy is array code, to which NumPy arrays are as good.

    Without its kernels, that is: those are tested in on_host/test_stack.py.
    """
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "body for CuPy":
            for name in MODULES:
                module = importlib.import_module(f"sbnet_cupy.block_sparse.stack.{name}")
                patch.setattr(module, "is_cupy", lambda array: True, raising=False)
                for kernel in ("is_rim", "plan_kernel"):
                    patch.setattr(module, kernel, lambda *arguments: None, raising=False)
            plan_some_as_on_a_gpu(patch, stack_conv2d)
        patch.setattr(operator, "_PLANS", operator._Plans())
        yield request.param
