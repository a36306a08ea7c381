"""The functions of a stack with their launches sent to the shim, as on a GPU."""

import importlib

import numpy as np
import pytest

import host_cuda
import sbnet_cupy as sb
from sbnet_cupy.core import launch as kernels
from sbnet_cupy.core import packed
from support.fused_on_host import AMPERE, RESIDENT
from support.host_memory import Memory, OnAGpu, plan_some_as_on_a_gpu

MODULES = [
    importlib.import_module(f"sbnet_cupy.block_sparse.stack.{name}")
    for name in (
        "fetch",
        "neighbours",
        "stack_conv2d",
        "stack_conv_launch",
        "stack_launch",
        "stack_halo",
        "pooling",
        "stack_max_pool",
        "stack_avg_pool",
        "stack_global_pool",
        "stack_pool_launch",
    )
]


def send_to_shim(monkeypatch, multiprocessors):
    """Send launches to the shim; return the guarded memory and a list of what is launched."""
    memory, launched = Memory(0xFF), []

    def prepare(stem, kernel, template, grid, block, pointers, scalars, shared=0,
                persistent=False, dependent=False, cluster=1, maps=()):  # fmt: skip
        grid = grid if isinstance(grid, tuple) else (grid,)
        if persistent:
            most = RESIDENT * multiprocessors // int(np.prod(grid[1:])) // cluster
            grid = (min(grid[0], max(most, 1) * cluster), *grid[1:])

        def run(*arrays):
            assert len(arrays) == pointers
            launched.append((stem, kernel))
            args = (*arrays, *scalars, *host_cuda.describe(maps, arrays))
            host_cuda.launch(stem, kernel, template, grid, block, args, shared, cluster=cluster)

        return run

    monkeypatch.setattr(kernels, "prepare", prepare)
    plan_some_as_on_a_gpu(monkeypatch, *MODULES)
    monkeypatch.setattr(packed, "empty", memory.poisoned)
    device = AMPERE._replace(multiprocessors=multiprocessors)
    for module in MODULES:
        monkeypatch.setattr(module, "is_cupy", lambda array: True, raising=False)
        monkeypatch.setattr(module, "current_device", lambda: device, raising=False)
        monkeypatch.setattr(module, "empty", memory.poisoned, raising=False)
    return memory, launched


def by_numpy(function, *arguments, **options):
    """Call with the NumPy bodies."""
    with pytest.MonkeyPatch.context() as back:
        back.setattr(OnAGpu, "active", False)
        for module in MODULES:
            back.setattr(module, "is_cupy", lambda array: False, raising=False)
        return function(*arguments, **options)


def in_the_image(y, table):
    """The pixels that are the image's; 0 in place of the others."""
    return np.where(sb.stack_pixel_mask(table)[..., None], y, np.zeros((), y.dtype))
