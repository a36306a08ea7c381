"""The rows of a list that belong to each site, sorted by kernels.

Kernels: cuda_src/submanifold/reduce_features.cu, and those of site_order.cu that sort.
"""

import functools
from typing import Any, NamedTuple

import numpy as np

from ..core import launch as kernels
from ..core.arrays import empty, place_name
from ..core.graph_memory import memory_of_graphs
from .counting_sort import BITS, CountingSort
from .distinct import Reduction, distinct

_FILE = "submanifold/reduce_features"
_MOST_SITES = 1 << 2 * BITS


class UnsortedRows(NamedTuple):
    """Rows of a list whose sites are known, before they are sorted by site.

    That takes as long as to find the sites, of which maps are made meanwhile.
    """

    inverse: Any  # int32 [n]: the site of each
    count: Any  # int32 [1]: how many sites there are
    sites: int  # that are kept

    def sorted(self):
        """Return the Reduction."""
        with memory_of_graphs(self.inverse):
            if self.sites < _MOST_SITES:
                return _sort(*self)
            return distinct(self.inverse.astype(np.int64), "sum", self.sites)[3]


def _sort(inverse, count, sites):
    """Return the Reduction of rows by the site of each, by kernels."""
    n = len(inverse)
    site, starts = empty((n,), np.int32, inverse), empty((sites + 1,), np.int32, inverse)
    if not n:
        starts.fill(0)
        return Reduction(site, site, None, None, starts)
    launches, order = _launches(n, sites, place_name(inverse)), None
    for by_digit in launches.digits:
        count_digits = functools.partial(by_digit, inverse, order)
        order = launches.counting.order(count_digits, inverse, order)
    launches.rows(inverse, order, count, site, starts)
    return Reduction(order, site, None, None, starts)


class _Launches:
    """The launches for lists of one length and one number of sites."""

    def __init__(self, n, sites):
        self.counting = CountingSort(n)
        digits = range(0, max(sites.bit_length(), 1), BITS)
        self.digits = [self.counting.by_digit(sites, shift) for shift in digits]
        self.rows = _prepare("list_rows", -(-max(n, sites + 1) // 256), 5, (n, sites))


def _prepare(kernel, grid, pointers, scalars):
    return kernels.prepare(_FILE, kernel, ("int",), grid, 256, pointers, scalars, dependent=True)


@functools.lru_cache(maxsize=1024)
def _launches(n, sites, place):
    """Prepare launches on the current device."""
    return _Launches(n, sites)
