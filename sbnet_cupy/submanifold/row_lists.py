"""The rows of a list that belong to each site, listed by kernels.

Kernels: cuda_src/submanifold/reduce_features.cu.
"""

import functools
from typing import Any, NamedTuple

import numpy as np

from ..core import launch as kernels
from ..core.arrays import empties, namespace, place_name
from ..core.graph_memory import memory_of_graphs
from .distinct import Reduction

_FILE = "submanifold/reduce_features"
_SITES = 2048  # of a thread block of start_lists


class UnsortedRows(NamedTuple):
    """Rows of a list whose sites are known, before they are sorted by site.

    Sites alone need no sort, and their maps can be found beside it.
    """

    inverse: Any  # int32 [n]: the site of each, or -1
    numbers: Any  # int32 [sites]: how many rows each has, less one
    sums: Any  # uint64 [thread_blocks(sites)]: 0 before the first call

    def sorted(self):
        """Return the Reduction."""
        with memory_of_graphs(self.inverse):
            return _sort(*self)


def thread_blocks(sites):
    """Return how many thread blocks list the rows of so many sites."""
    return -(-sites // _SITES)


def _sort(inverse, numbers, sums):
    """Return the Reduction of rows by the site of each."""
    n, sites = len(inverse), len(numbers)
    order, site, starts = empties(
        inverse, *(((length,), np.int32) for length in (n, n, sites + 1))
    )
    if not (n and sites):
        starts.fill(0)
        order[...], site[...] = namespace(order).arange(n, dtype=np.int32), 0
        return Reduction(order, site, None, None, starts)
    cursors, listed = empties(inverse, ((sites + 1,), np.int32), ((n,), np.int32))
    start, list_rows, order_lists = _launches(n, sites, place_name(inverse))
    start(numbers, sums, starts, cursors)
    list_rows(inverse, cursors, listed, site)
    order_lists(listed, site, starts, order)
    return Reduction(order, site, None, None, starts)


@functools.lru_cache(maxsize=1024)
def _launches(n, sites, place):
    """Prepare launches on the current device."""

    def prepare(kernel, blocks, pointers, *scalars):
        return kernels.prepare(
            _FILE, kernel, ("int",), blocks, 256, pointers, scalars, dependent=True
        )

    blocks = -(-n // 256)
    return (
        prepare("start_lists", thread_blocks(sites), 4, sites),
        prepare("list_rows", blocks, 4, n, sites),
        prepare("order_lists", blocks, 4, n, sites),
    )
