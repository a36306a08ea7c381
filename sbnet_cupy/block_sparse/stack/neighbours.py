"""Pixels of a stack with those of neighbouring blocks: how all stack operations read.

``fetch`` (fetch.py) reads, for each block, a regular lattice of pixels around its corner: the block
with a rim, one tap of a convolution, every second pixel; its bodies are here. ``add_back`` is its
transpose. All know of inactive neighbours, of the image's edge and of corrupt rows; nothing else
has to.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ...core.arrays import is_cupy, namespace


class Axis(NamedTuple):
    """The pixels ``first + step * p`` with ``0 <= p < count``, counted from a block's corner."""

    first: int
    step: int
    count: int

    def pieces(self, size):
        """Cut them where blocks of ``size`` pixels meet.

        Yield (distance to the block that has them, slice of p, slice of that block's pixels).
        """
        start = 0
        while start < self.count:
            pixel = self.first + self.step * start
            block = pixel // size
            stop = min(self.count, ((block + 1) * size - 1 - self.first) // self.step + 1)
            inner = pixel - block * size
            last = inner + (stop - start - 1) * self.step
            yield block, slice(start, stop), slice(inner, last + 1, self.step)
            start = stop


@dataclass(frozen=True, eq=False)
class Places:
    """Where some rows of a stack lie, checked."""

    table: Any
    rows: slice  # of the stack
    limit: Any  # rows of the stack that hold blocks
    n: Any  # [m] int64; 0 where the row is no block
    hi: Any
    wi: Any
    valid: Any  # [m] bool: below the count, and a place of the grid

    @classmethod
    def of(cls, table):
        """Return the places of all rows; NumPy knows the count, and leaves out those past it."""
        xp, indices = namespace(table.grid), table.active_block_indices
        rows = len(indices)
        if is_cupy(indices):
            limit = xp.minimum(table.bin_counts, rows)
            below = xp.arange(rows) < limit
        else:
            rows = limit = min(max(int(table.bin_counts[0]), 0), rows)
            below = True
        n, hi, wi = indices[:rows].T.astype(np.int64)
        valid = below
        for index, size in zip((n, hi, wi), table.grid.shape, strict=True):
            valid = valid & (index >= 0) & (index < size)
        n, hi, wi = (xp.where(valid, index, 0) for index in (n, hi, wi))
        return cls(table, slice(0, rows), limit, n, hi, wi, valid)

    def part(self, rows):
        """Keep a slice of these rows."""
        start = self.rows.start
        kept = slice(start + rows.start, start + rows.stop)
        fields = (self.n, self.hi, self.wi, self.valid)
        return Places(self.table, kept, self.limit, *(field[rows] for field in fields))

    def __len__(self):
        return self.rows.stop - self.rows.start

    def at(self, table):
        """Return the same places at another stage."""
        return replace(self, table=table)

    def neighbour(self, down, right):
        """Return (row of the block so many places away, whether it is there) for each of ours."""
        xp, grid = namespace(self.n), self.table.grid
        hi, wi = self.hi + down, self.wi + right
        found = self.valid & (hi >= 0) & (hi < grid.shape[1]) & (wi >= 0) & (wi < grid.shape[2])
        row = grid[self.n, xp.where(found, hi, 0), xp.where(found, wi, 0)]
        found &= (row >= 0) & (row < self.limit)
        return xp.where(found, row, 0), found

    def first_pixels(self, axis):
        """Return the first row or column of each block in the image."""
        return (self.hi, self.wi)[axis] * self.table.block_size[axis]

    def inside(self, axis, lattice):
        """Return bool [m, count]: which pixels along an axis lie in the image."""
        xp = namespace(self.n)
        start = self.first_pixels(axis) + lattice.first
        pixel = start[:, None] + lattice.step * xp.arange(lattice.count)
        return (pixel >= 0) & (pixel < self.table.image_size[axis])


def fetch_by_slices(x, places, axes, out, fill):
    """NumPy: copy strips from the blocks around, then correct those at the image's edge."""
    bh, bw = places.table.block_size
    for dh, into_h, from_h in axes[0].pieces(bh):
        for dw, into_w, from_w in axes[1].pieces(bw):
            strip, source = out[:, into_h, into_w], x[:, from_h, from_w]
            if dh == dw == 0:
                strip[...] = source[places.rows]
                continue
            row, found = places.neighbour(dh, dw)
            if found.all():
                strip[...] = source[row]
                continue
            strip[...] = np.zeros((), out.dtype)
            if found.any():
                strip[found] = source[row[found]]
    for axis in (0, 1):
        _fill_outside(out, places, axis, axes[axis], fill)
    if not places.valid.all():
        out[~places.valid] = np.zeros((), out.dtype)


def outside_lines(places, axis, lattice):
    """Yield (rows of some blocks, slice of lines that are in the image) for those that have others.

    Blocks in the same row or column of the grid come together, and few of those reach the edge.
    """
    start = places.first_pixels(axis) + lattice.first
    end = start + lattice.step * (lattice.count - 1)
    size = places.table.image_size[axis]
    at_edge = np.flatnonzero((start < 0) | (end >= size))
    starts = start[at_edge]
    for first in np.unique(starts).tolist():
        low = min(max(-(first // lattice.step), 0), lattice.count)
        high = min(max(-((first - size) // lattice.step), low), lattice.count)
        yield at_edge[starts == first], slice(low, high)


def _fill_outside(out, places, axis, lattice, fill):
    lines = out if axis == 0 else out.swapaxes(1, 2)
    for rows, inside in outside_lines(places, axis, lattice):
        low, high = inside.start, inside.stop
        if fill != "edge":
            value = np.asarray(fill).astype(out.dtype)
            lines[rows, :low], lines[rows, high:] = value, value
        elif high > low:
            lines[rows, :low] = lines[rows, low : low + 1]
            lines[rows, high:] = lines[rows, high - 1 : high]


def fetch_by_number(x, places, axes, out, fill):
    """CuPy: number every pixel of the result, and take them at once; nothing waits."""
    xp, table = namespace(x), places.table
    block, offset, inside = [], [], []
    for axis, lattice in enumerate(axes):
        size, length = table.block_size[axis], table.image_size[axis]
        start = places.first_pixels(axis) + lattice.first
        pixel = start[:, None] + lattice.step * xp.arange(lattice.count)
        inside.append((pixel >= 0) & (pixel < length))
        pixel = xp.clip(pixel, 0, max(length - 1, 0))
        block.append(pixel // size)
        offset.append(pixel % size)
    row = table.grid[places.n[:, None, None], block[0][:, :, None], block[1][:, None, :]]
    active = places.valid[:, None, None] & (row >= 0) & (row < places.limit)
    bh, bw = table.block_size
    number = xp.where(active, row, 0).astype(np.int64) * (bh * bw)
    number += offset[0][:, :, None] * bw + offset[1][:, None, :]
    taken = x.reshape(-1, x.shape[3])[number]
    value = xp.where(active[..., None], taken, xp.zeros((), x.dtype))
    if fill != "edge":
        meets = inside[0][:, :, None] & inside[1][:, None, :]
        outside = places.valid[:, None, None] & ~meets
        value = xp.where(outside[..., None], xp.full((), fill, x.dtype), value)
    out[...] = value


def add_back(grad, places, down, across, out, fill=0):
    """Add to each pixel of ``out`` what its reads by ``fetch`` hold in ``grad``.

    ``out`` [m, b_h, b_w, C] has one block for each of ``places``, which must be all rows, and
    begins at 0. A pixel that several blocks read gets their sum in a fixed order. Pixels outside
    the image get nothing; with ``fill="edge"`` what was read there is added to the edge.
    """
    if not out.size or not places.table.grid.size:
        return
    xp, axes = namespace(grad), (down, across)
    grad = xp.where(places.valid[:, None, None, None], grad, xp.zeros((), grad.dtype))
    for axis, lattice in enumerate(axes):
        grad = _without_outside(grad, places, axis, lattice, fill)
    bh, bw = places.table.block_size
    for dh, read_h, from_h in down.pieces(bh):
        for dw, read_w, from_w in across.pieces(bw):
            strip = grad[:, read_h, read_w]
            if dh == dw == 0:
                out[:, from_h, from_w] += strip
                continue
            row, found = places.neighbour(-dh, -dw)  # the block that read ours
            if is_cupy(grad):
                read = xp.where(found[:, None, None, None], strip[row], xp.zeros((), grad.dtype))
                out[:, from_h, from_w] += read
            elif found.any():
                out[found, from_h, from_w] += strip[row[found]]


def _without_outside(grad, places, axis, lattice, fill):
    """Drop the gradients of what was read outside the image, or move them to its edge."""
    xp = namespace(grad)
    shape = [len(grad), 1, 1, 1]
    shape[1 + axis] = lattice.count
    inside = places.inside(axis, lattice)
    kept = xp.where(inside.reshape(shape), grad, xp.zeros((), grad.dtype))
    if fill != "edge":
        return kept
    start = places.first_pixels(axis) + lattice.first
    last = places.table.image_size[axis] - 1 - start
    lines, moved = (array.swapaxes(1, 1 + axis) for array in (kept, grad))
    for at in range(lattice.count):  # lines of a block, not pixels
        for edge, beyond in ((-start, start + at < 0), (last, last < at)):
            goes = beyond & (edge >= 0) & (edge < lattice.count)
            target = xp.where(goes, edge, 0)
            value = xp.where(goes[:, None, None], moved[:, at], xp.zeros((), grad.dtype))
            lines[xp.arange(len(grad)), target] += value
    return kept
