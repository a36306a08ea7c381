"""SiteTiles: rows of a kernel map in tiles, each with the distinct rows that it reads.

Kernel: cuda_src/submanifold/site_tiles.cu.
"""

import functools
from typing import Any, NamedTuple

import numpy as np

from ..core import launch as kernels
from ..core.arrays import empties, namespace, place_name
from ..core.device import current_device
from ..core.graph_memory import memory_of_graphs

_FILE = "submanifold/site_tiles"
_COLOURS = 8  # of site_colours.cuh
ZERO_ROWS = 8  # that of tile_head.cuh
_FACTORS = 1, 3, 2, 5  # of the axes in a colour: of those tried, 64 rows of surfaces had the most
MOST_TAPS = 64
_FEW_TILES = 256  # of which a GPU has all under way at once
_MOST_SLOTS = 1 << 14  # as many as rows that 64 taps of 256 rows read


class TileShape(NamedTuple):
    """How the rows of a kernel map are cut into tiles."""

    rows: int  # of a tile: 64, 128, 192 or 256
    most: int  # rows of the source that it reads at once: from ``rows`` to 1024
    by_colour: bool = False  # whether rows are numbered so that few of a bank are loaded together


class SiteTiles(NamedTuple):
    """The tiles of a kernel map. In a tile rows with the same taps are neighbours."""

    order: Any  # int32 [tiles, rows]: the row of the result, or -1
    heads: Any  # int32 [tiles, head_numbers]: TileHead of tile_head.cuh
    sources: Any  # int32 [tiles, taps * rows]: the rows that the tile reads; not all are used
    locals: Any  # uint16 [tiles, taps, rows]: their numbers, from ZERO_ROWS on; below for none


def head_numbers(taps):
    """Return how many numbers a tile's head has."""
    return -(-(3 * taps + 4) // 4) * 4


def site_tiles(rows, sources, shape, indices=None, offsets=None):
    """Return the SiteTiles of a kernel map: int32 ``[taps, M]``, of rows below ``sources``.

    For a shape ``by_colour`` that goes by the ``indices`` of the map's target, and the ``offsets``
    at which taps read; where these are not known, the tiles are the same as without.
    """
    taps, m = rows.shape
    tiles = -(-m // shape.rows)
    if not shape.by_colour or offsets is None or len(offsets[0]) > len(_FACTORS):
        indices = offsets = None
    launch = _launch(taps, m, sources, offsets, shape, place_name(rows))
    with memory_of_graphs(rows):
        order = (tiles, shape.rows), np.int32
        heads = (tiles, head_numbers(taps)), np.int32
        listed = (tiles, taps * shape.rows), np.int32
        numbers = (tiles, taps, shape.rows), np.uint16
        made = SiteTiles(*empties(rows, order, heads, listed, numbers))
        if indices is not None:
            indices = namespace(indices).ascontiguousarray(indices)
        launch(rows, indices, *made)
    return made


def _slices(rows, tiles):
    """Threads of a thread block for each row of a tile: more where few small ones are made."""
    return 8 if rows == 64 and tiles <= _FEW_TILES else 4


def shared_bytes(taps, rows, slices):
    """Bytes of shared memory of a thread block that makes a tile, with ``slices`` threads a row."""
    numbers = 3 * rows + _COLOURS * slices * rows // 32 + taps * (rows + rows // 32 + 2) + 2
    return 4 * numbers + 8 * _slots(taps, rows)


def _slots(taps, rows):
    """Slots of the hash table of a tile: more than the rows that it may read, if there is room."""
    return min(1 << (taps * rows).bit_length(), _MOST_SLOTS)


@functools.lru_cache(maxsize=1024)
def _launch(taps, m, sources, offsets, shape, place):
    """Prepare the launch on the current device."""
    tiles = -(-m // shape.rows)
    slices = _slices(shape.rows, tiles)
    each = (32 if taps <= 32 else MOST_TAPS) // slices
    template = "int", shape.rows, _slots(taps, shape.rows), slices, each, offsets is not None
    needed = shared_bytes(taps, shape.rows, slices)
    return kernels.prepare(
        _FILE, "tile_rows", template, tiles, slices * shape.rows, 6,
        (m, sources, taps, shape.most, *_added(offsets), _factors(offsets)),
        shared=current_device().spread_evenly(needed, tiles), dependent=True,
    )  # fmt: skip


@functools.cache
def _added(offsets):
    """Return what each tap adds to the colour: four bits for each tap, 16 taps to a number."""
    numbers = [0] * (MOST_TAPS // 16)
    for tap, offset in enumerate(offsets or ()):
        steps = zip(_FACTORS, offset, strict=False)
        colours = sum(factor * step for factor, step in steps) % _COLOURS
        numbers[tap // 16] |= colours << tap % 16 * 4
    return np.array(numbers, np.uint64).view(np.int64).tolist()


def _factors(offsets):
    """Return the factors of the axes in a colour, four bits each."""
    axes = 0 if offsets is None else len(offsets[0])
    return sum(factor << 4 * axis for axis, factor in enumerate(_FACTORS[:axes]))
