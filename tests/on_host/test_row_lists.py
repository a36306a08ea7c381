"""The rows of each site by the kernels on the host shim: in the order of the list, however listed.

On a GPU threads put rows into the list of their site in any order. On the shim they do so in that
of the rows, so that these tests mix each list before it is put in order.
"""

import numpy as np
import pytest

import sbnet_cupy as sb
from sbnet_cupy.core import launch as kernels
from sbnet_cupy.submanifold import row_lists
from support import site_on_host
from support.assertions import assert_same
from support.row_lists import assert_sorted, unsorted

EMPTY = np.zeros(0, np.int64)


def mix_lists(monkeypatch, rng):
    """Have lists mixed, each in itself, once rows are listed."""
    prepare = kernels.prepare

    def prepare_mixed(stem, kernel, *args, **options):
        launch = prepare(stem, kernel, *args, **options)
        if kernel != "list_rows":
            return launch

        def list_and_mix(inverse, cursors, listed, site):
            launch(inverse, cursors, listed, site)
            mixed = rng.permutation(listed)
            by_site = np.where(inverse < 0, len(cursors) - 1, inverse)[mixed]
            listed[:] = mixed[np.argsort(by_site, kind="stable")]

        return list_and_mix

    monkeypatch.setattr(kernels, "prepare", prepare_mixed)


@pytest.mark.parametrize(("rows", "sites", "of_one", "without"), [
    (9000, 5000, 0, 0), (9000, 5000, 0, 700), (300, 7, 0, 20), (3000, 2500, 1500, 100),
    (257, 1, 0, 0), (100, 60, 0, 100), (5, 4096, 0, 0), (31, 2048, 0, 1),
])  # fmt: skip
def test_rows_of_each_site_in_their_order(rows, sites, of_one, without, monkeypatch):
    rng = np.random.default_rng(rows + sites)
    inverse = rng.integers(0, sites, rows)
    chosen = rng.permutation(rows)
    inverse[chosen[:of_one]] = sites // 2
    inverse[chosen[rows - without :]] = -1
    with site_on_host.by_kernels():
        mix_lists(monkeypatch, rng)
        given = unsorted(inverse, sites)
        found = given.sorted()
        assert site_on_host.LAUNCHED == ["start_lists", "list_rows", "order_lists"]
        assert_sorted(found, inverse, sites)
        assert_sorted(given.sorted(), inverse, sites)  # again, of the same memory


@pytest.mark.parametrize(("inverse", "sites"), [(EMPTY, 3), (EMPTY, 0), (np.full(4, -1), 0)])
def test_no_rows_or_no_sites(inverse, sites):
    with site_on_host.by_kernels():
        found = unsorted(inverse, sites).sorted()
        assert not site_on_host.LAUNCHED
    assert_sorted(found, inverse, sites)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_sums_do_not_depend_on_how_rows_are_listed(mode, monkeypatch):
    """Numbers of unlike sizes, whose sum depends on the order."""
    rng = np.random.default_rng(3)
    rows = rng.integers(0, 4, (400, 3)).astype(np.int32) % (1, 4, 4)
    features = (rng.standard_normal((400, 5)) * 10.0 ** rng.integers(-6, 7, (400, 1))).astype("f4")
    options = {"spatial_shape": (4, 4), "mode": mode, "capacity": 20}
    with site_on_host.by_kernels():
        expected = sb.sparse_tensor(features, rows.astype(np.int32), **options)
        mix_lists(monkeypatch, rng)
        row_lists._launches.cache_clear()
        found = sb.sparse_tensor(features, rows.astype(np.int32), **options)
        assert_same(found.features, expected.features)


def test_sites_alone_list_no_rows():
    with site_on_host.by_kernels():
        sb.coordinate_map(np.zeros((5, 3), np.int32), spatial_shape=4, mode="mean")
        assert "place_sites" in site_on_host.LAUNCHED
        assert "list_rows" not in site_on_host.LAUNCHED
