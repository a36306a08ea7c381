"""How gather and scatter are launched: which kernel, which tile, how many thread blocks.

Pure arithmetic on shapes and alignments, never on the mask: nothing here depends on data.
"""

import math
from typing import NamedTuple

from .._arrays import is_cupy
from .._kernels import vector_bytes

THREADS = 256
_RESIDENT = 8  # thread blocks of 256 threads that fill a multiprocessor
_TILE_VECTORS = 640  # 16-byte vectors per tile: two or three loads in flight per thread


class CopyPlan(NamedTuple):
    """Everything a launch needs besides the arrays."""

    style: str  # "rows" or "tiles"
    template: tuple
    grid: int
    block: int
    arguments: tuple

    def kernel(self, direction):
        """Name of the kernel: gather_rows, scatter_tiles..."""
        return f"{direction}_{self.style}"


def plan_copy(image, stack, layout, grid, sm_count, *, element=None, per_channel=False):
    """Plan the copy between an image and a stack, in either direction.

    ``element`` is the C++ type of the elements when they are computed with and not only moved.
    ``per_channel`` says that the computation needs to know each element's channel, so that a
    vector must not span pixels.
    """
    most = sm_count * _RESIDENT
    rows = stack.shape[0]
    geometry = (rows, layout.N, layout.C, layout.H, layout.W, *grid.boffset, *grid.bstride)
    if layout.channels_last == layout.blocks_channels_last:
        template, step, extra = _plan_rows(image, stack, layout, grid, per_channel)
        planes = extra[0]
        work = rows * planes * grid.bsize[0]
        return CopyPlan("rows", template, min(-(-work // step), most), THREADS, extra + geometry)
    template, tiles = _plan_tiles(image, stack, layout, grid, element)
    return CopyPlan("tiles", template, min(tiles, most), THREADS, geometry)


def _plan_rows(image, stack, layout, grid, per_channel):
    """Template of the rows kernels, rows per thread block, and their leading arguments."""
    item = image.dtype.itemsize
    planes = 1 if layout.channels_last else layout.C
    pixel_bytes = item * (layout.C if layout.channels_last else 1)
    unit = pixel_bytes
    if not (per_channel and layout.channels_last):  # wider than a pixel where runs start aligned
        starts = (*grid.boffset[1:], grid.bstride[1], grid.bsize[1], layout.W)
        unit = pixel_bytes * math.gcd(*starts)
    vector = vector_bytes(unit, address(image), address(stack))
    width = grid.bsize[1] * pixel_bytes // vector
    lanes = max((32, 16, 8, 4), key=lambda n: (width / (-(-width // n) * n), n))
    steps = -(-width // lanes)
    rows, columns = (4, 1) if steps == 1 else (2, 2) if steps == 2 else (1, 4)
    template = (f"Bytes<{vector}>::type", *grid.bsize, lanes, rows, columns)
    return template, THREADS // lanes * rows, (planes, pixel_bytes, item)


def _plan_tiles(image, stack, layout, grid, element):
    """Template of the tiles kernels and the number of tiles."""
    item = image.dtype.itemsize
    channels_last = image if layout.channels_last else stack
    vector = max(vector_bytes(layout.C * item, address(channels_last)), item)
    vectors = -(-layout.C * item // vector)
    per_tile = min(range(1, 9), key=lambda n: (-(-vectors // n) * n, -n)) if vectors else 1
    pixels = grid.bsize[0] * grid.bsize[1]
    target = min(max(_TILE_VECTORS // per_tile, 32), 256)
    tile_pixels = -(-pixels // (-(-pixels // target)))
    tile_pixels = -(-tile_pixels // 4) * 4
    group = {1: 4, 2: 2, 4: 2}.get(item, 1)
    if layout.channels_last and (pixels % group or address(stack) % (group * item)):
        group = 1
    tiles = stack.shape[0] * -(-pixels // tile_pixels) * -(-vectors // per_tile)
    template = (
        layout.channels_last,
        element or f"Bytes<{item}>::type",
        f"Bytes<{vector}>::type",
        *grid.bsize,
        tile_pixels,
        per_tile,
        group if layout.channels_last else 1,
    )
    return template, tiles


def address(array):
    """Address of the first element of a native array."""
    return array.data.ptr if is_cupy(array) else array.ctypes.data
