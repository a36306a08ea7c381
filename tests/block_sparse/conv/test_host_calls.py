"""A call that is like an earlier one resolves nothing again: counted in calls of our functions."""

import sys

import numpy as np
import pytest

from sbnet_cupy import calc_block_params, reduce_mask, sparse_conv2d
from support.count_calls import count_calls


def call(method, **options):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 40, 48, 16)).astype(np.float32)
    w = rng.standard_normal((3, 3, 16, 16)).astype(np.float32)
    params = calc_block_params(x.shape, 10, 3)
    grid = {"bsize": params.bsize, "boffset": params.boffset, "bstride": params.bstride}
    active = reduce_mask(rng.random((2, 40, 48)) < 0.02, params.bcount, **grid)
    bias = np.ones(16, np.float32)
    return lambda: sparse_conv2d(x, w, active, params, bias=bias, method=method, **options)


@pytest.mark.parametrize("method", ["gather", "fused"])
def test_a_warm_call_on_numpy_makes_few_calls(method):
    convolve = call(method)
    cold = count_calls(convolve)
    warm = count_calls(convolve)
    assert warm < 60 < cold


@pytest.mark.parametrize("method", ["gather", "fused"])
def test_a_problem_is_resolved_once(method, monkeypatch):
    """Also when the call is new: the plan of the layer holds those of its operations."""
    resolved = []
    module = sys.modules["sbnet_cupy.block_sparse.conv.sparse_conv2d"]
    resolve = module.resolve_problem
    for name in ("block_sparse.conv.sparse_conv2d", "block_sparse.conv.fused_conv", "dense.conv2d"):
        other = sys.modules[f"sbnet_cupy.{name}"]
        monkeypatch.setattr(other, "resolve_problem", lambda *a: resolved.append(a) or resolve(*a))
    convolve = call(method, activation="silu")
    convolve()
    convolve()
    assert len(resolved) == 1
