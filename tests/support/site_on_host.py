"""The kernels of operations at sites on the host shim: whole calls, of NumPy arrays."""

import contextlib
import importlib

import pytest

import host_cuda
from sbnet_cupy.core import launch as kernels
from sbnet_cupy.core import operator
from sbnet_cupy.core.device import Device
from sbnet_cupy.core.spec import spec_of
from sbnet_cupy.submanifold import (
    counting_sort,
    map_kernels,
    relu_grad,
    row_lists,
    site_conv_launch,
    site_order,
    site_tiles,
)
from support.host_memory import memory_at

MODULES = (
    "coordinate_map", "new_sites", "transposed_rows", "site_conv", "site_conv_grad",
    "site_features_grad", "reduce_features", "site_pool_launch", "sample_pool",
)  # fmt: skip
AMPERE = Device(multiprocessors=3, shared_bytes=99 << 10, hopper=False, bulk_copy=False)
LAUNCHED = []  # names of the kernels that ran


def prepare(stem, kernel, template, grid, block, pointers, scalars, shared=0, persistent=False,
            dependent=False, cluster=1):  # fmt: skip
    """Prepare a launch on the shim; a persistent grid gets few thread blocks, which take turns."""
    grid = grid if isinstance(grid, tuple) else (grid,)
    if persistent:
        most = max(AMPERE.multiprocessors // cluster, 1) * cluster
        grid = (min(grid[0], most), *grid[1:])

    def run(*arrays):
        assert len(arrays) == pointers
        LAUNCHED.append(kernel)
        args = (*arrays, *scalars)
        host_cuda.launch(stem, kernel, template, grid, block, args, shared, cluster=cluster)

    def bound(arrays, given):
        def run_others(*others):
            filled = list(arrays)
            for place, array in zip(given, others, strict=True):
                filled[place] = array
            run(*filled)

        return with_addresses(run_others)

    def with_addresses(function):
        function.on = lambda stream, addresses: function(*map(memory_at, addresses))
        return function

    run.bound = bound
    return with_addresses(run)


def clear_launches():
    """Forget prepared launches."""
    for prepared in (
        map_kernels._launches, map_kernels._finder, map_kernels._transposer, site_order._launches,
        row_lists._launches, site_tiles._launch, relu_grad.prepare_relu_grad,
        relu_grad.prepare_bias_grad, site_conv_launch._pack,
    ):  # fmt: skip
        prepared.cache_clear()


def spec_with_address(array):
    """Return the spec of an array whose address counts, as on a GPU: the kernels load vectors."""
    return spec_of(array)._replace(alignment=array.ctypes.data % 16)


@contextlib.contextmanager
def by_kernels():
    """Have kernels compute within, on the shim."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "prepare", prepare)
        patch.setattr(operator, "_PLANS", operator._Plans())
        for name in MODULES:
            module = importlib.import_module(f"sbnet_cupy.submanifold.{name}")
            patch.setattr(module, "by_kernels", lambda array: True)
        for module in (counting_sort, map_kernels, site_order, site_tiles):
            patch.setattr(module, "current_device", lambda: AMPERE._replace(hopper=True))
        patch.setattr(relu_grad, "spec_of", spec_with_address)
        clear_launches()
        LAUNCHED.clear()
        yield
        clear_launches()
