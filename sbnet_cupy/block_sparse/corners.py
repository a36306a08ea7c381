"""The NumPy bodies' view of a list of blocks: corners, chunks that fit a cache, pieces at edges."""

from typing import NamedTuple

import numpy as np

# Bytes of temporaries that a NumPy body uses at a time, or those of one block where it has more:
# they stay in the second-level cache.
CHUNK_BYTES = 512 << 10
_SWAPPED_ROWS = 96  # twice as fast as all at once where rows are powers of two apart


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


def sub_images(y, layout, size):
    """View every part of so many pixels: ``[N, H-h+1, W-w+1, h, w, C]``, or ``C, h, w`` last."""
    axis = (1, 2) if layout.channels_last else (2, 3)
    every = np.lib.stride_tricks.sliding_window_view(y, size, axis=axis, writeable=True)
    order = (0, 1, 2, 4, 5, 3) if layout.channels_last else (0, 2, 3, 1, 4, 5)
    return every.transpose(order)


def pixels(corners, layout, bsize):
    """Flat pixel numbers ``[m, bh, bw]`` in ``[N, H, W]``, and which of them are in the image."""
    h = corners.h0[:, None] + np.arange(bsize[0])
    w = corners.w0[:, None] + np.arange(bsize[1])
    valid = ((h >= 0) & (h < layout.H))[:, :, None] & ((w >= 0) & (w < layout.W))[:, None, :]
    flat = (corners.n[:, None] * layout.H + h)[:, :, None] * layout.W + w[:, None, :]
    return flat, valid


def swap_layout(target, source):
    """Copy ``source [m, A, B]`` to ``target [m, B, A]``, some rows at a time.

    Reading down a column touches a cache line in each row; a first-level cache holds those of so
    many rows.
    """
    for start in range(0, source.shape[1], _SWAPPED_ROWS):
        some = slice(start, start + _SWAPPED_ROWS)
        np.copyto(target[:, :, some], source[:, some].transpose(0, 2, 1))
