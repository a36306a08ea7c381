"""SiteOrder: rows of a kernel map as tiles of a convolution read them, like ones together.

Kernel: cuda_src/submanifold/site_order.cu.
"""

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from ..core import launch as kernels
from ..core.arrays import empty, place_name
from ..core.device import current_device
from ..core.graph_memory import memory_of_graphs
from .counting_sort import CountingSort

GROUP = 32  # neighbouring rows that have a mask
_FILE = "submanifold/site_order"
_MOST_COLUMNS = 9  # of site_order.cu
_FEWEST_TWICE = 1 << 15  # rows that are sorted by two digits
_TILE, _SLICES, _MOST_TAPS = 256, 4, 64  # of sort_tiles
_DEALT_ROWS = (128, _TILE)  # of a tile
_MOST_TILES, _MOST_SHARES = 8192, 512


class SiteOrder(NamedTuple):
    """The rows of a kernel map in the order of a convolution's tiles."""

    rows: Any  # int32 [taps, M]
    order: Any  # int32 [M]: the row of the result; None where rows are as they were
    masks: Any  # uint32 [groups, words]: the taps of each GROUP rows, as bits
    turns: Any = None  # uint16: tiles of 128 and of 256 rows or halves of them, dealt out; or None
    cuts: Any = None  # int32 [shares + 1, 2]: where taps of tiles of 128 rows are cut; or None


def site_order(rows, sources, kernel_size, by_taps):
    """Return the SiteOrder of a kernel map: int32 ``[taps, M]``, of rows below ``sources``.

    Its rows are sorted by the taps that they have, or as they are.
    """
    launches = _launches(*rows.shape, sources, _sides(kernel_size), place_name(rows))
    return launches.sort(rows) if by_taps else SiteOrder(rows, None, launches.find_masks(rows))


def _sides(kernel_size):
    """Return how many columns of taps a kernel has, and taps in a side, as bins tell them apart."""
    columns = 1
    for size in reversed(kernel_size):
        if columns * size > _MOST_COLUMNS:
            break
        columns *= size
    taps = math.prod(kernel_size)
    if columns == 1:
        return min(taps, _MOST_COLUMNS), 0
    return columns, taps // kernel_size[0] if taps > columns else 0


class _Launches:
    """The launches for maps of one size."""

    def __init__(self, taps, m, sources, sides):
        self._shape, self._counting = (taps, m), CountingSort(m)
        self._masks = (-(-m // GROUP), -(-taps // 32))
        size = (m, sources, taps)
        counted = self._counting.parts, 4, (*size, *sides)
        self._bin = _prepare("bin_rows", *counted, shared=self._counting.shared)
        several_digits = m >= _FEWEST_TWICE and taps > sides[0]
        self._by_bin = self._counting.by_bin() if several_digits else None
        grid = (-(-m // (4 * GROUP)), self._masks[1])
        sort_rows = functools.partial(_prepare, "sort_rows", grid, 4, (*size, self._masks[1]))
        self._find_masks = self._sort = kernels.Later(sort_rows)
        if taps <= _MOST_TAPS:
            shape = -(-m // _TILE), 4, size, _TILE * _SLICES, ("int", self._masks[1])
            self._sort = kernels.Later(functools.partial(_prepare, "sort_tiles", *shape))
        device = current_device()
        self._shares = shares = device.multiprocessors
        tiles = [-(-m // rows) for rows in _DEALT_ROWS]
        several = shares < tiles[0] <= _MOST_TILES and shares <= _MOST_SHARES
        self._turns = sum(-(-n // shares) for n in tiles) * shares if several else 0
        self._deal = None
        if device.hopper:  # only site_conv_pipelined takes turns, and site_conv_shared cuts
            size = (m, taps, self._masks[1], shares)
            self._deal = _prepare("deal_tiles", 3 if several else 1, 3, size, 1024)

    def find_masks(self, rows):
        """Return the masks of rows as they are."""
        with memory_of_graphs(rows):
            masks = empty(self._masks, np.uint32, rows)
            self._find_masks(rows, None, None, masks)
        return masks

    def sort(self, rows):
        """Return the SiteOrder of rows, sorted."""
        with memory_of_graphs(rows):
            table, masks = empty(self._shape, np.int32, rows), empty(self._masks, np.uint32, rows)
            order = self._find_order(rows)
            self._sort(rows, order, table, masks)
            turns = cuts = None
            if self._deal:
                if self._turns:
                    turns = empty((self._turns,), np.uint16, rows)
                cuts = empty((self._shares + 1, 2), np.int32, rows)
                self._deal(masks, turns, cuts)
        return SiteOrder(table, order, masks, turns, cuts)

    def _find_order(self, rows):
        if not self._by_bin:
            return self._counting.order(functools.partial(self._bin, rows, None), rows)
        bins = empty(self._shape[1:], np.int32, rows)
        order = self._counting.order(functools.partial(self._bin, rows, bins), rows)
        return self._counting.order(functools.partial(self._by_bin, bins, order), rows, order)


def _prepare(kernel, grid, pointers, scalars, block=256, template=("int",), shared=0):
    return kernels.prepare(
        _FILE, kernel, template, grid, block, pointers, scalars, shared, dependent=True
    )


@functools.lru_cache(maxsize=1024)
def _launches(taps, m, sources, sides, place):
    """Prepare launches on the current device."""
    return _Launches(taps, m, sources, sides)
