"""How reduce_mask lists blocks in NumPy: the parts that it pools a mask in, and the index rows.

A listing depends on shapes and options only, so calls with the same ones share it.
"""

import math
from typing import NamedTuple

import numpy as np

from ..corners import CHUNK_BYTES
from .pool import Part, Side, any_above, average_above


class Listing(NamedTuple):
    """A checked call on NumPy arrays."""

    blocks: tuple  # images, block rows, block columns
    capacity: int | None
    parts: list  # (number of the first block, function that says which of its blocks are active)
    rows: np.ndarray | None  # index rows of all blocks, if there are few


_FEW = 4096  # up to so many blocks, the index rows of all of them are kept


def prepare_listing(mask, blocks, grid, thresholds, avgpool, capacity):
    """Compute everything that does not depend on the contents of the mask."""
    columns = Side(blocks[2], grid.bsize[1], grid.boffset[1], grid.bstride[1])
    parts = []
    for first, part in _parts(mask, blocks, grid, avgpool):
        if avgpool:
            pool = average_above(part, columns, thresholds)
        else:
            pool = any_above(mask.shape, mask.dtype, part, columns, thresholds)
        parts.append((first, pool))
    every = np.empty((math.prod(blocks), 3), np.int32) if math.prod(blocks) <= _FEW else None
    listing = Listing(blocks, capacity, parts, None)
    if every is not None:
        write_rows(np.arange(len(every)), every, listing)
    return listing._replace(rows=every)


def write_rows(numbers, rows, listing):
    """Write the index rows ``(n, hi, wi)`` of the blocks with these numbers."""
    if listing.rows is not None:
        listing.rows.take(numbers, 0, rows, "clip")
        return
    _, height, width = listing.blocks
    quotient, rows[:, 2] = np.divmod(numbers, width)
    rows[:, 0], rows[:, 1] = np.divmod(quotient, height)


def _parts(mask, blocks, grid, avgpool):
    """Yield (number of the first block, Part).

    The temporaries of a part fit in ``CHUNK_BYTES``, unless a single row of blocks needs more.
    """
    images, rows, columns = blocks
    if not math.prod(blocks):
        return
    (_, height, width), size, stride = mask.shape, grid.bsize[0], grid.bstride[0]
    row_bytes = width * (32 if avgpool else 2 + stride) + 16 * columns
    step = max(CHUNK_BYTES // row_bytes, 1)
    together = min(max(step // rows, 1), images)  # images
    step = min(step, rows)
    for n in range(0, images, together):
        for row in range(0, rows, step):
            count = min(step, rows - row)
            start = grid.boffset[0] + stride * row
            low, high = min(max(start, 0), height), start + stride * (count - 1) + size
            lines = slice(low, min(max(high, low), height))
            side = Side(count, size, start - low, stride)
            yield (n * rows + row) * columns, Part(slice(n, min(n + together, images)), lines, side)
