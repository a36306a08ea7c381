"""What the tests of sbnet_cupy.torch share: devices, tensors, a list of blocks."""

import importlib

import numpy as np
import pytest

import sbnet_cupy as sb

COUNT, ROWS = [3], [[0, 0, 1], [1, 1, 1], [0, 0, 0], [-1, -1, -1]]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def on_device(require, torch, device):
    """Return the device, or skip: its tests need a GPU for both libraries."""
    if device == "cuda":
        require("gpu")
        if not torch.cuda.is_available():
            pytest.skip("needs a PyTorch that sees the GPU")
    return device


def internal(name):
    """Return a fixture: a module of sbnet_cupy.torch that is not public."""

    @pytest.fixture
    def module(st):
        return importlib.import_module(f"sbnet_cupy.torch.{name}")

    return module


def table(torch, device="cpu"):
    """Return a count and rows: one past the count, two whose blocks may overlap."""
    make = {"dtype": torch.int32, "device": device}
    return torch.tensor(COUNT, **make), torch.tensor(ROWS, **make)


def grid(params):
    """Return the arguments of reduce_mask and sparse_gather for a BlockParams."""
    return {"bsize": params.bsize, "boffset": params.boffset, "bstride": params.bstride}


def draw(torch, *shape, seed=0, dtype=None, device="cpu"):
    """Return normal numbers, the same on every device."""
    values = np.random.default_rng(seed).standard_normal(shape)
    return torch.from_numpy(values).to(device=device, dtype=dtype or torch.float32)


def bottleneck_weights(torch, cin, cmid, cout, dtype=None, device="cpu"):
    """Return the tensors of a BottleneckWeights."""
    arrays = sb.BottleneckWeights.random(cin, cmid, cout, dtype="float64")._arrays()
    return [torch.from_numpy(a).to(device=device, dtype=dtype or torch.float32) for a in arrays]
