"""Where blocks lie in an image: the arguments that reduce_mask, gather and scatter share.

Block ``(n, hi, wi)`` has its corner at ``h0 = boffset_h + bstride_h * hi`` and ``w0`` likewise.
"""

import math
from typing import NamedTuple

import numpy as np

from ..core.arrays import namespace
from ..core.checks import check_flag
from ..core.sizes import pair
from ..dense.conv2d import check_choice
from ..errors import ShapeError

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
        if max(abs(v) for v in value) > _LARGEST:
            raise ShapeError(f"{name} must be under 2**31 on each axis, got {value}")
    return Grid(bsize, boffset, bstride)


def inside_image(active_block_indices, grid, image_hw):
    """Return bool ``[M, bh, bw]``: which pixels of blocks lie in the image.

    ``grid`` is a Grid, or the BlockParams of the blocks.
    """
    xp = namespace(active_block_indices)
    axes = []
    for axis, size in enumerate(image_hw):
        first = active_block_indices[:, 1 + axis].astype(np.int64) * grid.bstride[axis]
        pixel = first[:, None] + (xp.arange(grid.bsize[axis]) + grid.boffset[axis])
        axes.append((pixel >= 0) & (pixel < size))
    return axes[0][:, :, None] & axes[1][:, None, :]


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
    """Check ``data_format`` and ``transpose``; read the sizes of the image ``x``."""
    check_choice("data_format", data_format, ("NHWC", "NCHW"))
    check_flag("transpose", transpose)
    last = data_format == "NHWC"
    n, h, w, c = x.shape if last else (x.shape[0], *x.shape[2:], x.shape[1])
    if w * c > _LARGEST or h > _LARGEST:
        raise ShapeError(f"x must have under 2**31 elements a row and 2**31 rows, got {x.shape}")
    return Layout(n, h, w, c, last, last != bool(transpose))
