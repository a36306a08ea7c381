"""The kernels of operations at sites on a GPU give what the array operations give."""

import contextlib
import importlib

import pytest

from sbnet_cupy.core import operator
from support.site_map_cases import LISTS, MAPS, assert_same_map, assert_same_sites, make_maps
from support.site_on_host import MODULES

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cupy(require):
    return require("gpu")


@contextlib.contextmanager
def by_kernels(chosen):
    """Have kernels compute within, or array operations, whatever the environment says."""
    with pytest.MonkeyPatch.context() as patch:
        for name in MODULES:
            module = importlib.import_module(f"sbnet_cupy.submanifold.{name}")
            patch.setattr(module, "by_kernels", lambda array: chosen)
        patch.setattr(operator, "_PLANS", {})
        yield


@pytest.mark.parametrize("case", MAPS, ids=str)
def test_kernel_maps(case, cupy):
    results = []
    for chosen in (False, True, True):
        with by_kernels(chosen):
            results.append(make_maps(case, cupy.asarray))
    for found in results[1:]:
        for one, other in zip(found, results[0], strict=True):
            assert_same_map(one, other)


@pytest.mark.parametrize("capacity", [None, 1000, 20], ids=str)
@pytest.mark.parametrize("name", LISTS)
def test_distinct_sites(name, capacity, cupy):
    import sbnet_cupy as sb

    rows, shape, batch = LISTS[name]
    options = {"spatial_shape": shape, "batch_size": batch, "capacity": capacity}
    results = []
    for chosen in (False, True):
        with by_kernels(chosen):
            results.append(sb.coordinate_map(cupy.asarray(rows), **options))
    (expected, numbers), (found, own) = results
    assert_same_sites(found, expected)
    assert (numbers == own).all()
