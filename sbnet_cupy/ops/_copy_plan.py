"""How gather and scatter are launched: which kernel, which tile, how many thread blocks.

Pure arithmetic on shapes and alignments, never on the mask: nothing here depends on data.
"""

import math
from typing import NamedTuple

from .._arrays import is_cupy
from .._kernels import vector_bytes

THREADS = 256
_TILE_THREADS = 288  # at most, for a tile
_RESIDENT = 5  # thread blocks that a multiprocessor holds at once, about


class CopyPlan(NamedTuple):
    """Everything a launch needs besides the arrays."""

    style: str  # "runs" or "tiles"
    template: tuple
    grid: int  # thread blocks of work; a launch needs no more than the GPU holds at once
    block: int
    scalars: tuple

    def kernel(self, direction):
        """Name of the kernel: gather_runs, scatter_tiles..."""
        return f"{direction}_{self.style}"


def plan_copy(image, stack, layout, grid, sm_count, *, element=None, per_channel=False):
    """Plan the copy between an image and a stack, in either direction.

    ``element`` is the C++ type of the elements when they are computed with and not only moved.
    ``per_channel`` says that the computation needs to know each element's channel, so that a
    vector must not span pixels.
    """
    most = sm_count * _RESIDENT  # thread blocks at once, about
    geometry = (stack.shape[0], layout.N, layout.C, layout.H, layout.W)
    geometry += (*grid.boffset, *grid.bstride)
    if layout.channels_last == layout.blocks_channels_last or layout.C == 1:
        template, work, leading = _plan_runs(image, stack, layout, grid, per_channel, most)
        return CopyPlan("runs", template, work, THREADS, (*leading, *geometry))
    template, work, threads = _plan_tiles(image, stack, layout, grid, element)
    return CopyPlan("tiles", template, work, threads, geometry)


def _plan_runs(image, stack, layout, grid, per_channel, most):
    """Template of the runs kernels, thread blocks of work, and their leading arguments."""
    item = image.dtype.itemsize
    planes = 1 if layout.channels_last else layout.C
    pixel_bytes = item * (layout.C if layout.channels_last else 1)
    unit = pixel_bytes
    if not (per_channel and layout.channels_last):  # wider than a pixel where runs start aligned
        unit *= math.gcd(grid.boffset[1], grid.bstride[1], grid.bsize[1], layout.W)
    vector = vector_bytes(unit, address(image), address(stack))
    width = grid.bsize[1] * pixel_bytes // vector
    lanes, columns = _lanes_and_columns(width, 4 if vector > 4 else 8)
    runs = max(1, (4 if vector > 4 else 8) // columns)
    at_once = 32 // lanes * runs  # runs that a warp moves at a time; at most a warp full
    runs, at_once = (runs, at_once) if at_once <= 32 else (lanes, 32)
    segments = -(-width // (lanes * columns))
    total = stack.shape[0] * planes * grid.bsize[0] * segments
    batch = at_once  # runs that a warp finds at a time: more where there is work for all warps
    while batch < 32 and total >= 2 * batch * most * (THREADS // 32):
        batch *= 2
    template = (f"Bytes<{vector}>::type", *grid.bsize, lanes, runs, columns)
    work = -(-total // (batch * (THREADS // 32)))
    return template, work, (batch, planes, pixel_bytes, item)


def _lanes_and_columns(width, most_columns):
    """Lanes that share a run of ``width`` vectors, and vectors each: few idle, then wide."""

    def efficiency(choice):
        lanes, columns = choice
        span = lanes * columns
        return width / (-(-width // span) * span), span

    narrow = (4, 8, 16, 32) if width < 64 else (32,)
    return max(
        ((n, k) for n in narrow for k in range(1, most_columns + 1) if n * k < width + n),
        key=efficiency,
    )


def _plan_tiles(image, stack, layout, grid, element):
    """Template of the tiles kernels, the number of tiles, and the threads for one."""
    item = image.dtype.itemsize
    channels_last = image if layout.channels_last else stack
    vector = max(vector_bytes(layout.C * item, address(channels_last)), item)
    vectors = -(-layout.C * item // vector)
    # 128 bytes of channels at a time; fewer from an NCHW image, where they lie apart and are read
    # one element at a time.
    most = 128 // vector if layout.channels_last else max(32 // (vector // item), 1)
    per_tile = min(range(1, most + 1), key=lambda n: (-(-vectors // n) * n, -n))
    height, width = grid.bsize
    tile_i, tile_j, threads = _tile_size(height, width, per_tile)
    group = min(4, 16 // item)
    whole = width if tile_i == 1 else height * width
    if (
        not layout.channels_last
        or (tile_i * tile_j) % group
        or whole % group
        or address(stack) % (group * item)
    ):
        group = 1
    template = (
        layout.channels_last,
        element or f"Bytes<{item}>::type",
        f"Bytes<{vector}>::type",
        height,
        width,
        tile_i,
        tile_j,
        per_tile,
        group,
        threads,
    )
    tiles = -(-height // tile_i) * -(-width // tile_j) * -(-vectors // per_tile)
    return template, stack.shape[0] * tiles, threads


def _tile_size(height, width, per_tile):
    """Return rows and columns of a tile, and the threads that move it, up to 3 vectors each.

    A tile is whole rows of the block, or part of a row where rows are long. Wanted is the fewest
    loads in all, those of idle threads included; then large tiles.
    """
    most = max(3 * _TILE_THREADS // per_tile, 4)
    if width > most:
        tiles = -(-width // most)
        sizes = [(1, -(-width // (4 * tiles)) * 4)]
    else:
        rows = [n for n in range(1, height + 1) if n * width <= most]
        sizes = [(n, width) for n in rows if n * width % 4 == 0] or [(n, width) for n in rows]

    def threads(size):
        vectors = size[0] * size[1] * per_tile
        return max(-(-vectors // (32 * -(-vectors // _TILE_THREADS))) * 32, 64)

    def loads(size):
        slots = -(-size[0] * size[1] * per_tile // threads(size))
        return threads(size) * slots * -(-height // size[0]) * -(-width // size[1])

    best = min(sizes, key=lambda size: (loads(size), -size[0]))
    return *best, threads(best)


def address(array):
    """Address of the first element of a native array."""
    return array.data.ptr if is_cupy(array) else array.ctypes.data


def same_memory(a, b):
    """Whether two arrays of one library are the same elements in the same order."""
    return (
        type(a) is type(b)
        and (a.shape, a.dtype) == (b.shape, b.dtype)
        and address(a) == address(b)
    )
