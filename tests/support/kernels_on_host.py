"""The ops of a mask, of gather and of scatter on the host shim: their launches go elsewhere."""

import contextlib
import importlib

import numpy as np
import pytest

import host_cuda
from sbnet_cupy.block_sparse.mask import config as mask_config
from sbnet_cupy.core import launch as kernels
from support.host_memory import plan_as_on_a_gpu

OPS = [
    importlib.import_module(f"sbnet_cupy.{name}")
    for name in (
        "block_sparse.mask.reduce_mask",
        "block_sparse.gather_scatter.sparse_gather",
        "block_sparse.gather_scatter.sparse_scatter",
        "dense.affine_grad",
        "block_sparse.gather_scatter.zero_outside",
        "block_sparse.stack.block_table",
    )
]
MASKS = ("reduce_mask", "mask_table")
RESIDENT = 2  # thread blocks that a multiprocessor holds at once

# Where there is one multiprocessor, reduce_mask has little room too: masks are cut into many parts.
LITTLE = {"_GROUPS": (), "_MOST_BITS": 96, "_MOST_SUMS": 80, "_MOST_FLAGS": 40}


class Workspace:
    """Scratch that keeps what launches leave in it, as on a GPU: first of all their number."""

    FIRST = 2**32 - 3  # wraps round after two launches

    def __init__(self):
        self.slots = np.zeros(1 << 16, np.uint64)
        self.slots[0] = self.FIRST

    def __call__(self, namespace, slots):
        return self.slots[:slots]

    def check(self, launched):
        """Assert that every launch that looks back left another number: it tells old counts."""
        masks = [template for _, kernel, template in launched if kernel in MASKS]
        launches = sum(template[-1] == 0 for template in masks)
        assert int(self.slots[0]) % 2**32 == (self.FIRST + launches) % 2**32


@contextlib.contextmanager
def device(launch, multiprocessors, memory):
    """Send what the ops launch to ``launch``; yield the lists of what was prepared and launched."""
    prepared, launched, workspace = [], [], Workspace()
    shared = (64 if multiprocessors == 1 else 227) << 10

    def prepare(stem, kernel, template, grid, block, pointers, scalars, shared=0, persistent=False,
                dependent=False, cluster=1):  # fmt: skip
        # Masks have __shared__ variables, so that the shim cannot run the blocks of their clusters
        # together. It runs them in order; each finds the counts of those before it, because the
        # memory of counts_of_cluster is the same for all.
        assert cluster == 1 or kernel in MASKS
        prepared.append((stem, kernel, template))
        grid = min(grid, RESIDENT * multiprocessors) if persistent else grid

        def run(*arrays):
            assert len(arrays) == pointers
            launched.append((stem, kernel, template))
            launch(stem, kernel, template, grid, block, (*arrays, *scalars), shared)

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "prepare", prepare)
        plan_as_on_a_gpu(patch)
        patch.setattr(OPS[0], "workspace", workspace)
        if multiprocessors == 1:
            for name, little in LITTLE.items():
                patch.setattr(mask_config, name, little)
        for module in OPS:
            patch.setattr(module, "sm_count", lambda: multiprocessors, raising=False)
            patch.setattr(module, "shared_bytes", lambda: shared, raising=False)
            patch.setattr(module, "has_clusters", lambda: True, raising=False)
            patch.setattr(module, "empty", memory.poisoned, raising=False)
        yield prepared, launched
    if launch is host_cuda.launch:
        workspace.check(launched)
