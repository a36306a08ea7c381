"""What a result shows outside active blocks, written by the kernel that packs weights.

On a GPU that is not there: see support/torch_on_host.py.
"""

from functools import partial

import pytest

import sbnet_cupy as sb
from sbnet_cupy.block_sparse.bottleneck.res_block import RES_BLOCK
from sbnet_cupy.block_sparse.checks import plain_params
from sbnet_cupy.block_sparse.conv.sparse_conv2d import SPARSE_CONV2D
from sbnet_cupy.core.spec import spec_of
from support.assertions import assert_same
from support.torch_cases import bottleneck_weights, draw, table
from support.torch_on_host import Gpu


@pytest.fixture
def gpu(st, torch, monkeypatch, require):
    require("g++")
    return Gpu(torch, monkeypatch)


def whole(torch, *shape, seed=0):
    """Return whole numbers in halves, of which sums of a few are exact in any order."""
    return (2 * draw(torch, *shape, seed=seed)).round().half()


def plain(tensor):
    """Return a tensor of the GPU as one of the CPU."""
    import torch

    return tensor.detach().as_subclass(torch.Tensor)


@pytest.mark.parametrize("skip", [0, 1], ids=["aligned", "off a vector"])
@pytest.mark.parametrize("native", [True, False], ids=["arrays", "tensors"])
def test_backgrounds_are_written(st, torch, gpu, native, skip):
    """By the kernel that packs, up to the last byte, or ahead of it; the base is left alone."""
    x, w = whole(torch, 1, 7, 7, 16), whole(torch, 3, 3, 16, 3, seed=2)  # 294 bytes of a result
    params, active = sb.calc_block_params((7, 7), 5, 3), table(torch)
    arrays = [(2 * t).round().clamp(-1, 1).half() for t in bottleneck_weights(torch, 16, 8, 16)]
    weights = sb.BottleneckWeights(*arrays)
    unit = sb.calc_block_params_res_block((7, 7), 5, [1, 3, 1])
    options = ((1, 1), "SAME", None, "NHWC", "HWIO", None, "fused")
    for channels in (3, 16):
        for base in (None, whole(torch, 1, 7, 7, channels, seed=3)):
            out = torch.full((1, 7, 7, channels), torch.nan).half()
            out = gpu.tensor(out, skip if channels == 3 else 0)  # units need vectors
            below = base if base is None else gpu.tensor(base, skip)
            if channels == 3:
                expected = sb.sparse_conv2d(x, w, active, params, base=base)
                given = [x, w, *active, None, None, below]
                operator, chosen = SPARSE_CONV2D, (plain_params(params, None), *options)
                call = partial(st.sparse_conv2d, gpu.tensor(x), gpu.tensor(w))
                call = partial(call, tuple(map(gpu.tensor, active)), params)
            else:
                expected = sb.sparse_res_block_bottleneck(x, weights, active, unit, base=base)
                given = [x, *arrays, None, *active, below]
                chosen = (plain_params(unit, None), (1, 1), None, "fused", False)
                operator, call = RES_BLOCK, partial(st.sparse_res_block_bottleneck, gpu.tensor(x))
                call = partial(call, weights._map_arrays(gpu.tensor))
                call = partial(call, tuple(map(gpu.tensor, active)), unit)
            if native:
                tensors = [None if t is None else plain(t).numpy() for t in (*given, out)]
                specs = [t if t is None else on_gpu(t) for t in tensors]
                operator.plan_of(specs, chosen).run(*tensors)
            else:
                assert call(base=below, out=out) is out
            assert gpu.kernels()[0].startswith("pack_")
            assert_same(plain(out), expected)
            if base is not None:
                assert_same(plain(below), base)


def on_gpu(array):
    """Return the spec of an array as of one on the GPU."""
    return spec_of(array)._replace(device=0, alignment=array.ctypes.data % 16)
