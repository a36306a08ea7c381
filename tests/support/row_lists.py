"""Rows listed by site: what is given to the kernels, and what they must return."""

import numpy as np

from sbnet_cupy.submanifold import row_lists
from support.assertions import assert_same, to_numpy


def unsorted(inverse, sites, xp=np):
    """Return the UnsortedRows of the site of each row, as they are when sites are known."""
    numbers = np.bincount(inverse[inverse >= 0], minlength=sites).astype(np.int32) - 1
    sums = np.zeros(row_lists.thread_blocks(sites), np.uint64)
    return row_lists.UnsortedRows(*map(xp.asarray, (inverse.astype(np.int32), numbers, sums)))


def assert_sorted(found, inverse, sites):
    """Check the order of rows, their sites and where each begins; of rows of none only which."""
    key = np.where(inverse < 0, sites, inverse)
    found = found._replace(
        order=to_numpy(found.order), site=to_numpy(found.site), starts=to_numpy(found.starts)
    )
    order, there = np.argsort(key, kind="stable"), np.count_nonzero(inverse >= 0)
    assert_same(found.site, key[order].astype(np.int32))
    assert_same(found.order[:there], order[:there].astype(np.int32))
    assert_same(np.sort(found.order[there:]), order[there:].astype(np.int32))
    starts = np.searchsorted(key[order], np.arange(sites + 1))
    assert_same(found.starts, starts.astype(np.int32))
