"""The rows of a list that belong to each site, sorted by kernels.

Kernels: cuda_src/submanifold/reduce_features.cu, and those of site_order.cu that sort.
"""

import functools

import numpy as np

from ..core import launch as kernels
from ..core.arrays import empty, place_name
from ..core.graph_memory import memory_of_graphs
from .distinct import Reduction

_FILE, _SORT_FILE = "submanifold/reduce_features", "submanifold/site_order"
_BITS, _PART, _BINS = 11, 1024, 2048  # of counting_sort.cuh
MOST_SITES = 1 << 2 * _BITS


def rows_of_sites(inverse, count, sites):
    """Return the Reduction of rows by the site of each, int32 ``[n]``.

    There are ``count`` sites, int32 ``[1]``, of which ``sites`` are kept: fewer than MOST_SITES.
    """
    n = len(inverse)
    with memory_of_graphs(inverse):
        order, site = empty((n,), np.int32, inverse), empty((n,), np.int32, inverse)
        starts = empty((sites + 1,), np.int32, inverse)
        if not n:
            starts.fill(0)
            return Reduction(order, site, None, None, starts)
        launches = _launches(n, sites, place_name(inverse))
        parts = -(-n // _PART)
        places, counts = empty((n,), np.uint32, inverse), empty((parts, _BINS), np.uint16, inverse)
        before = empty((parts, _BINS), np.int32, inverse)
        totals = empty((_BINS,), np.int32, inverse)
        sorted_by = []
        for bin_sites in launches.digits:
            bin_sites(inverse, sorted_by[-1] if sorted_by else None, places, counts)
            launches.scan(counts, before, totals)
            sorted_by.append(empty((n,), np.int32, inverse))
            launches.order(places, before, totals, sorted_by[-1])
        low, high = (*sorted_by, None)[:2]
        launches.rows(inverse, low, high, count, order, site, starts)
    return Reduction(order, site, None, None, starts)


class _Launches:
    """The launches for lists of one length and one number of sites."""

    def __init__(self, n, sites):
        parts = -(-n // _PART)
        digits = range(0, max(sites.bit_length(), 1), _BITS)
        self.digits = [_prepare("bin_sites", parts, 4, (n, sites, shift)) for shift in digits]
        self.scan = kernels.prepare(
            _SORT_FILE, "scan_bins", ("int",), _BINS // 32, 1024, 3, (parts,)
        )
        self.order = kernels.prepare(_SORT_FILE, "order_rows", ("int",), parts, 256, 4, (n,))
        self.rows = _prepare("list_rows", -(-max(n, sites + 1) // 256), 7, (n, sites))


def _prepare(kernel, grid, pointers, scalars):
    return kernels.prepare(_FILE, kernel, ("int",), grid, 256, pointers, scalars)


@functools.lru_cache(maxsize=1024)
def _launches(n, sites, place):
    """Prepare launches on the current device."""
    return _Launches(n, sites)
