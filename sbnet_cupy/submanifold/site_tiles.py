"""SiteTiles: rows of a kernel map in tiles, each with the distinct rows that it reads.

Kernel: cuda_src/submanifold/site_tiles.cu.
"""

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from ..core import launch as kernels
from ..core.arrays import empty, place_name
from ..core.graph_memory import memory_of_graphs

_FILE = "submanifold/site_tiles"
_MOST_AXES = 4
_SLOTS = 2048  # of a tile's hash table
MOST_TAPS = 64


class TileShape(NamedTuple):
    """How the rows of a kernel map are cut into tiles."""

    rows: int  # of a tile: 64, 128 or 256
    most: int  # rows of the source that it reads at once: from ``rows`` to 1024


class SiteTiles(NamedTuple):
    """The tiles of a kernel map. In a tile rows with the same taps are neighbours."""

    order: Any  # int32 [tiles, rows]: the row of the result, or -1
    heads: Any  # int32 [tiles, head_numbers]: TileHead of tile_head.cuh
    sources: Any  # int32 [tiles, taps * rows]: the rows that the tile reads; not all are used
    locals: Any  # uint16 [tiles, taps, rows]: their numbers in the tile, from 1; 0 for none


def head_numbers(taps):
    """Return how many numbers a tile's head has."""
    return -(-(3 * taps + 4) // 4) * 4


def site_tiles(rows, sources, kernel_size, shape):
    """Return the SiteTiles of a kernel map: int32 ``[taps, M]``, of rows below ``sources``."""
    taps, m = rows.shape
    tiles = -(-m // shape.rows)
    launch = _launch(taps, m, sources, tuple(kernel_size), shape, place_name(rows))
    with memory_of_graphs(rows):
        made = SiteTiles(
            empty((tiles, shape.rows), np.int32, rows),
            empty((tiles, head_numbers(taps)), np.int32, rows),
            empty((tiles, taps * shape.rows), np.int32, rows),
            empty((tiles, taps, shape.rows), np.uint16, rows),
        )
        launch(rows, *made)
    return made


@functools.lru_cache(maxsize=1024)
def _launch(taps, m, sources, kernel_size, shape, place):
    """Prepare the launch on the current device."""
    if len(kernel_size) > _MOST_AXES or math.prod(kernel_size) != taps:
        kernel_size = (taps,)
    kernel_size = (1,) * (_MOST_AXES - len(kernel_size)) + kernel_size
    return kernels.prepare(
        _FILE, "tile_rows", ("int", shape.rows), -(-m // shape.rows), shape.rows, 5,
        (m, sources, taps, shape.most, *kernel_size),
        shared=16 * shape.rows + 8 * _SLOTS + 4 * taps * (shape.rows + shape.rows // 32 + 3) + 4,
    )  # fmt: skip
