"""The NumPy bodies' view of a list of blocks: corners, chunks that fit a cache, pieces at edges."""

import math
from typing import NamedTuple

import numpy as np

# Bytes of temporaries that a NumPy body uses at a time, or those of one block where it has more:
# they stay in the second-level cache.
CHUNK_BYTES = 512 << 10


class Corners(NamedTuple):
    """Blocks of a stack, with where their corners lie in the batch (NumPy)."""

    rows: np.ndarray  # [m] row of the stack, ascending
    n: np.ndarray  # [m] image
    h0: np.ndarray  # [m] top row of the block in the image; may be outside
    w0: np.ndarray  # [m]

    def select(self, which):
        """Keep the rows where ``which`` is set, or a slice of them."""
        return Corners(*(field[which] for field in self))


def find_corners(bin_counts, active_block_indices, grid):
    """Corners of all rows below the count, corrupt ones too."""
    count = min(max(int(bin_counts[0]), 0), len(active_block_indices))
    n, hi, wi = active_block_indices[:count].T.astype(np.int64, order="C")
    h0 = grid.boffset[0] + grid.bstride[0] * hi
    w0 = grid.boffset[1] + grid.bstride[1] * wi
    return Corners(np.arange(count), n, h0, w0)


def meeting(corners, layout, bsize):
    """Keep the blocks that have a pixel in an image of the batch; corrupt rows drop out."""
    meets = (corners.n >= 0) & (corners.n < (layout.N if layout.H and layout.W else 0))
    meets &= (corners.h0 < layout.H) & (corners.h0 > -bsize[0])
    meets &= (corners.w0 < layout.W) & (corners.w0 > -bsize[1])
    return corners if meets.all() else corners.select(meets)


def chunks(corners, bytes_per_row):
    """Cut corners into runs whose temporaries of so many bytes a row fit in ``CHUNK_BYTES``."""
    step = max(1, CHUNK_BYTES // max(bytes_per_row, 1))
    if len(corners.rows) <= step:
        return [corners]
    starts = range(0, len(corners.rows), step)
    return [corners.select(slice(start, start + step)) for start in starts]


def row_index(rows):
    """Return ascending row numbers as a slice, which copies nothing, if they have no gaps."""
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first + 1 == len(rows) else rows


def clear_outside(stack, corners, layout, bsize):
    """Make 0 what lies outside the image, in a stack that has one block for each corner.

    Blocks that lose the same number of lines at one side lose them together.
    """
    zero, lines_axis = np.zeros((), stack.dtype), 1 if layout.blocks_channels_last else 2
    sides = (
        (0, corners.n, 1, layout.N),  # a block of no image loses its only one
        (lines_axis, corners.h0, bsize[0], layout.H),
        (lines_axis + 1, corners.w0, bsize[1], layout.W),
    )
    for axis, start, size, length in sides:
        for lost, at_end in ((-start, False), (start + (size - length), True)):
            if np.maximum.reduce(lost) <= 0:
                continue
            rows = np.flatnonzero(lost > 0)
            lines = np.minimum(lost[rows], size)
            for count in set(lines.tolist()):
                which = [rows[lines == count], slice(None), slice(None), slice(None)]
                if count < size:
                    which[axis] = slice(size - count, size) if at_end else slice(0, count)
                stack[tuple(which)] = zero


def inside_pieces(corners, layout, bsize):
    """Cut blocks at the image's edge; return [((i0, i1), (j0, j1), corners of those cut so)].

    Lines ``i0 : i1`` and columns ``j0 : j1`` of those blocks are in the image. Blocks that do not
    overlap are cut in nine ways at most.
    """
    inside = (corners.h0 >= 0) & (corners.h0 <= layout.H - bsize[0])
    inside &= (corners.w0 >= 0) & (corners.w0 <= layout.W - bsize[1])
    whole = (0, bsize[0]), (0, bsize[1])
    if inside.all():
        return [(*whole, corners)]
    pieces = [(*whole, corners.select(inside))] if inside.any() else []
    edge = corners.select(~inside)
    cuts = np.empty((len(edge.rows), 4), np.int64)
    for axis, (start, length) in enumerate(((edge.h0, layout.H), (edge.w0, layout.W))):
        cuts[:, 2 * axis] = np.maximum(-start, 0)
        cuts[:, 2 * axis + 1] = np.minimum(length - start, bsize[axis])
    for cut in sorted(set(map(tuple, cuts.tolist()))):
        pieces.append((cut[:2], cut[2:], edge.select((cuts == cut).all(axis=1))))
    return pieces


def windows(y, layout, size):
    """View every window of the image: ``[N, H-h+1, W-w+1, h, w, C]``, or ``C, h, w`` last."""
    n_step, *steps = y.strides
    positions = (layout.H - size[0] + 1, layout.W - size[1] + 1)
    if layout.channels_last:
        h_step, w_step, c_step = steps
        inner, inner_steps = (*size, layout.C), (h_step, w_step, c_step)
    else:
        c_step, h_step, w_step = steps
        inner, inner_steps = (layout.C, *size), (c_step, h_step, w_step)
    memory = y.reshape(-1).view(np.uint8)
    shape, steps = (layout.N, *positions, *inner), (n_step, h_step, w_step, *inner_steps)
    return np.ndarray(shape, y.dtype, memory, 0, steps)


def pixels(corners, layout, bsize):
    """Flat pixel numbers ``[m, bh, bw]`` in ``[N, H, W]``, and which of them are in the image."""
    h = corners.h0[:, None] + np.arange(bsize[0])
    w = corners.w0[:, None] + np.arange(bsize[1])
    valid = ((h >= 0) & (h < layout.H))[:, :, None] & ((w >= 0) & (w < layout.W))[:, None, :]
    flat = (corners.n[:, None] * layout.H + h)[:, :, None] * layout.W + w[:, None, :]
    return flat, valid


def swap_layout(target, source):
    """Copy ``source [m, A, B]`` to ``target [m, B, A]``.

    Reading down a column touches a cache line in each row. Where the rows lie so that a first-level
    cache cannot hold those lines, fewer rows are copied at a time. (A line of narrow elements
    serves more columns: it has to stay for longer.)
    """
    rows, ways = source.shape[1], 12 if source.itemsize > 2 else 8
    sets = _sets(source.strides[1])
    parts = -(-rows // (ways * sets)) if rows >= 16 * sets else 1
    step = -(-rows // parts)
    for start in range(0, rows, step):
        some = slice(start, start + step)
        np.copyto(target[:, :, some], source[:, some].transpose(0, 2, 1))


def _sets(step):
    """Of the 64 sets of lines in a cache, those that hold lines ``step`` bytes apart."""
    return 64 // math.gcd(64, step // 64) if step % 64 == 0 else 64
