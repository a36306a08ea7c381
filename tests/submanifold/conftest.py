"""The bodies of the operations at sites: NumPy's, and what CuPy arrays take, on NumPy arrays."""

import importlib

import numpy as np
import pytest

from sbnet_cupy.core import operator

# Not keys.py, where CuPy's sort is stable and NumPy's is not.
MODULES = ("kernel_map", "reduce_features", "site_conv", "site_conv_grad", "site_max")


@pytest.fixture(params=["own body", "body for CuPy"], scope="module")
def body(request, xp):
    """Which body runs; that for CuPy is array code, to which NumPy arrays are as good."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "body for CuPy" and xp.module is np:
            for name in MODULES:
                module = importlib.import_module(f"sbnet_cupy.submanifold.{name}")
                patch.setattr(module, "is_cupy", lambda array: True)
        patch.setattr(operator, "_PLANS", operator._Plans())
        yield request.param
