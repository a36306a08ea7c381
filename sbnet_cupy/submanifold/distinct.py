"""The distinct ones of a list of keys, and which rows of the list belong to which."""

from typing import Any, NamedTuple

import numpy as np

from ..core.arrays import empty, namespace
from .keys import sort_keys

# Bits of a status. LEFT_OUT is that of a list of blocks, and of JAX's sites, that these sites were
# made of; those of other arrays refer to the list of sites that they were made of (sources.py).
OUTSIDE, DUPLICATE, LEFT_OUT = 1, 2, 4


class Reduction(NamedTuple):
    """Which rows of a list belong to which site.

    That of kernels has int32 arrays, and no ``first`` and ``last``.
    """

    order: Any  # int64 [n]: rows, those of one site next to each other, in the order of the list
    site: Any  # int64 [n]: the site of each of these, or the capacity if it has none
    first: Any  # bool [n]: whether it is the first row of its site
    last: Any  # bool [n]
    starts: Any  # int64 [capacity + 1]: where each site's rows begin, and where the last ones end

    def sorted(self):
        """Return itself, as UnsortedRows do what they become."""
        return self


class ChosenRows(NamedTuple):
    """Which row of a list each site has its features of."""

    rows: Any  # int32 [capacity], -1 where there is no site


def distinct(keys, mode, capacity):
    """Return the keys of the sites, their count, each row's site, the Reduction and the status."""
    xp, n = namespace(keys), len(keys)
    order, by_key = sort_keys(keys)
    real = by_key >= 0
    first, last = real.copy(), real.copy()
    changes = by_key[1:] != by_key[:-1]
    first[1:] &= changes
    last[:-1] &= changes
    site = xp.cumsum(first) - 1  # rows with no key come first, where this is -1
    inverse = empty((n,), np.int32, keys)
    if capacity is None:
        begins = xp.flatnonzero(first)  # waits for a GPU
        rows = len(begins)
        inverse[order] = site
        site = xp.where(real, site, rows)
        sites, starts = by_key[begins], xp.append(begins, n)
        total = xp.full(1, rows, np.int32)
    else:
        rows, total = capacity, first.sum(dtype=np.int32).reshape(1)
        site = xp.where(real & (site < rows), site, rows)
        sites = xp.full(rows + 1, -1, np.int64)
        sites[site] = by_key  # rows of a site have one key; those with no site go to the last place
        sites = sites[:rows]
        inverse[order] = xp.where(site < rows, site, -1)
        starts = xp.full(rows + 1, n, np.int64)  # rows of a site that is not there begin at the end
        starts[xp.where(first, site, rows)] = xp.arange(n)
        starts[rows] = (site < rows).sum() + (~real).sum()
    status = (~real).any().astype(np.int32) * OUTSIDE
    if mode == "unique":
        status = status + (real & ~first).any().astype(np.int32) * DUPLICATE
    status = status.reshape(1).astype(np.int32)
    return sites, total, inverse, Reduction(order, site, first, last, starts), status


def row_of_site(reduction, capacity, mode):
    """Return the row of the list that a site has its features of: int64, -1 where there is none."""
    if isinstance(reduction, ChosenRows):
        return reduction.rows.astype(np.int64)
    xp = namespace(reduction.order)
    chosen = reduction.last if mode == "last" else reduction.first
    rows = xp.full(capacity + 1, -1, np.int64)
    rows[xp.where(chosen, reduction.site, capacity)] = reduction.order
    return xp.ascontiguousarray(rows[:capacity])


def duplicates_message(reduction=None):
    """Return what an error says of rows that are listed twice."""
    rows = ""
    if reduction is not None:
        at = int((~reduction.first).argmax())
        rows = f", got equal rows {int(reduction.order[at - 1])} and {int(reduction.order[at])}"
    return (
        f'indices must be distinct with mode="unique"{rows}; pass mode="first", "last", "sum" or '
        '"mean"'
    )
