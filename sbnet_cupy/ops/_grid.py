"""Where blocks lie in an image: the arguments that reduce_mask, gather and scatter share.

Block ``(n, hi, wi)`` has its corner at ``h0 = boffset_h + bstride_h * hi`` and ``w0`` likewise.
"""

import math
from typing import NamedTuple

import numpy as np

from .._arrays import check_array, check_contiguous
from ..blocks import pair
from ..errors import DTypeError, ShapeError

# Bytes of temporaries that a NumPy body may use at a time.
CHUNK_BYTES = 4 << 20

_LARGEST = 2**31 - 1  # so that boffset + bstride * index always fits in 64 bits


class Grid(NamedTuple):
    """Block size, offset and stride, each ``(h, w)``."""

    bsize: tuple[int, int]
    boffset: tuple[int, int]
    bstride: tuple[int, int]

    @property
    def overlaps(self):
        """Whether neighbouring blocks share pixels."""
        return self.bstride[0] < self.bsize[0] or self.bstride[1] < self.bsize[1]


def resolve_grid(bsize, boffset, bstride):
    """Check the three arguments; ``bstride=None`` means ``bsize``."""
    bsize = pair(bsize, "bsize")
    bstride = bsize if bstride is None else pair(bstride, "bstride")
    boffset = pair(boffset, "boffset", minimum=None)
    for name, value in (("bsize", bsize), ("bstride", bstride), ("boffset", boffset)):
        if max(map(abs, value)) > _LARGEST:
            raise ShapeError(f"{name} must be under 2**31 on each axis, got {value}")
    return Grid(bsize, boffset, bstride)


class Layout(NamedTuple):
    """Sizes of an image ``[N, H, W, C]`` or ``[N, C, H, W]`` and of its block stack."""

    N: int
    H: int
    W: int
    C: int
    channels_last: bool  # of the image
    blocks_channels_last: bool

    def blocks_shape(self, rows, bsize):
        """Shape of a stack of ``rows`` blocks."""
        if math.prod(bsize) * self.C > _LARGEST:
            raise ShapeError(
                f"bsize must give blocks of under 2**31 elements, got {bsize} of {self.C} channels"
            )
        if self.blocks_channels_last:
            return (rows, *bsize, self.C)
        return (rows, self.C, *bsize)


def resolve_layout(x, data_format, transpose):
    """Check ``data_format`` and read the sizes of the image ``x``."""
    if data_format not in ("NHWC", "NCHW"):
        raise ValueError(f"data_format must be 'NHWC' or 'NCHW', got {data_format!r}")
    last = data_format == "NHWC"
    n, h, w, c = x.shape if last else (x.shape[0], *x.shape[2:], x.shape[1])
    if w * c > _LARGEST or h > _LARGEST:
        raise ShapeError(f"x must have under 2**31 elements a row and 2**31 rows, got {x.shape}")
    return Layout(n, h, w, c, last, last != bool(transpose))


def check_image(name, x, like=None):
    """Check an image or stack whose elements are only moved: 4-D, contiguous, 1 to 16 bytes."""
    check_array(name, x, ndim=4, like=like)
    check_contiguous(name, x)
    if x.dtype.hasobject or x.dtype.itemsize not in (1, 2, 4, 8, 16):
        raise DTypeError(f"{name} must have elements of 1, 2, 4, 8 or 16 bytes, got {x.dtype}")


def check_indices(bin_counts, active_block_indices, like):
    """Check the pair that reduce_mask returns."""
    check_array("active_block_indices", active_block_indices, like=like)
    if active_block_indices.ndim != 2 or active_block_indices.shape[1] != 3:
        raise ShapeError(
            "active_block_indices must have shape (M, 3), got "
            f"{active_block_indices.shape}; build it with reduce_mask"
        )
    check_array("bin_counts", bin_counts, like=like)
    if bin_counts.shape != (1,):
        raise ShapeError(
            f"bin_counts must have shape (1,), got {bin_counts.shape}; build it with reduce_mask"
        )
    for name, value in (("active_block_indices", active_block_indices), ("bin_counts", bin_counts)):
        if value.dtype != np.int32:
            raise DTypeError(f"{name} must be int32, got {value.dtype}; build it with reduce_mask")
        check_contiguous(name, value)


class Corners(NamedTuple):
    """Rows of a stack that belong to an image, with their blocks' corners (NumPy)."""

    rows: np.ndarray  # [m] row of the stack, ascending
    n: np.ndarray  # [m] image
    h0: np.ndarray  # [m] top row of the block in the image; may be outside
    w0: np.ndarray  # [m]

    def select(self, which):
        """Keep the rows where ``which`` is set, or a slice of them."""
        return Corners(*(field[which] for field in self))


def find_corners(bin_counts, active_block_indices, layout, grid):
    """Corners of the rows below the count whose block meets the image; corrupt rows drop out."""
    count = min(max(int(bin_counts[0]), 0), len(active_block_indices))
    index = active_block_indices[:count].astype(np.int64)
    h0 = grid.boffset[0] + grid.bstride[0] * index[:, 1]
    w0 = grid.boffset[1] + grid.bstride[1] * index[:, 2]
    meets = (index[:, 0] >= 0) & (index[:, 0] < layout.N if layout.H and layout.W else False)
    meets &= (h0 < layout.H) & (h0 > -grid.bsize[0]) & (w0 < layout.W) & (w0 > -grid.bsize[1])
    return Corners(np.arange(count), index[:, 0], h0, w0).select(meets)


def split_inside(corners, layout, bsize):
    """Split corners into those of blocks wholly inside the image and those that cross its edge."""
    inside = (corners.h0 >= 0) & (corners.h0 <= layout.H - bsize[0])
    inside &= (corners.w0 >= 0) & (corners.w0 <= layout.W - bsize[1])
    return corners.select(inside), corners.select(~inside)


def chunks(corners, bytes_per_row):
    """Cut corners into runs whose blocks fit in ``CHUNK_BYTES``."""
    step = max(1, CHUNK_BYTES // max(bytes_per_row, 1))
    for start in range(0, len(corners.rows), step):
        yield corners.select(slice(start, start + step))


def windows(x, layout, bsize):
    """View every window of the image: ``[N, H-bh+1, W-bw+1, bh, bw, C]``, or ``C, bh, bw`` last."""
    n_step, *steps = x.strides
    positions = (layout.H - bsize[0] + 1, layout.W - bsize[1] + 1)
    if layout.channels_last:
        h_step, w_step, c_step = steps
        inner, inner_steps = (*bsize, layout.C), (h_step, w_step, c_step)
    else:
        c_step, h_step, w_step = steps
        inner, inner_steps = (layout.C, *bsize), (c_step, h_step, w_step)
    return np.lib.stride_tricks.as_strided(
        x, (layout.N, *positions, *inner), (n_step, h_step, w_step, *inner_steps)
    )


def pixels(corners, layout, bsize):
    """Flat pixel numbers ``[m, bh, bw]`` in ``[N, H, W]``, and which of them are in the image."""
    h = corners.h0[:, None] + np.arange(bsize[0])
    w = corners.w0[:, None] + np.arange(bsize[1])
    valid = ((h >= 0) & (h < layout.H))[:, :, None] & ((w >= 0) & (w < layout.W))[:, None, :]
    h, w = h.clip(0, layout.H - 1), w.clip(0, layout.W - 1)
    flat = (corners.n[:, None] * layout.H + h)[:, :, None] * layout.W + w[:, None, :]
    return flat, valid


def channels_last_view(x, channels_last):
    """View an image or stack as ``[..., C]`` whatever its layout."""
    return x if channels_last else x.transpose(0, 2, 3, 1)
