"""The bodies of the stack operations: NumPy's, and what CuPy arrays take, run on NumPy arrays."""

import importlib

import numpy as np
import pytest

from sbnet_cupy.core import plans
from support.host_memory import signature_of

MODULES = (
    "neighbours", "taps", "per_image", "pooling", "stack_max_pool", "stack_avg_pool",
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
                patch.setattr(module, "is_cupy", lambda array: True)
                for kernel in ("is_rim", "prepare_launch", "launch_pool"):
                    patch.setattr(module, kernel, lambda *arguments: None, raising=False)
            if xp.module is np:
                patch.setattr(plans, "device_of", lambda array: 0)
                patch.setattr(plans, "signature_of", signature_of)
            patch.setattr(module, "_PLANS", plans.Plans())
        yield request.param
