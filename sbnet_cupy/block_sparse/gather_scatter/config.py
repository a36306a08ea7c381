"""How gather and scatter are launched: which kernel, which tile, how many thread blocks.

Pure arithmetic on shapes and alignments, never on the mask: nothing here depends on data.
"""

import math
from typing import NamedTuple

from ...core.arrays import vector_bytes
from ...core.launch import THREADS

_TILE_THREADS = 256  # at most, for a tile
_TILE_BYTES = 20 << 10  # at most, for a tile of a large stack
_WHOLE_BYTES = 52 << 10  # the same, where parts of a block would share sectors of global memory
_LEAST_TILE_BYTES = 4 << 10
_SECTOR_BYTES = 32
_SHARED_BYTES = 60 << 10  # at most, of shared memory: every GPU has 64 KiB
_LINE_BYTES = 96 << 10  # the same, of a tile and the line that it becomes: two fit into 227 KiB
_CHANNEL_BYTES = 512  # at most, of a pixel of a tile
_RESIDENT = 5  # thread blocks that a multiprocessor holds at once, about
_SHORT_LINE = 128  # bytes: shorter ones keep too few lanes of a warp busy
_GATHERED_BYTES = 16 << 10  # of blocks that a thread block stages at a time, about
_SCATTERED_BYTES = 8 << 10
_LEAST_STAGED = 128  # bytes of a block: smaller ones are not worth their corner
_BLOCK_BYTES = 32  # sizeof(Block)


class CopyConfig(NamedTuple):
    """Everything a launch needs besides the arrays."""

    style: str  # "runs", "tiles" or "staged"
    template: tuple
    grid: int  # thread blocks of work; a launch needs no more than the GPU holds at once
    block: int
    scalars: tuple
    shared: int = 0  # bytes of shared memory

    def kernel(self, direction):
        """Name of the kernel: gather_runs, scatter_tiles..."""
        return f"{direction}_{self.style}"


def configure_copy(image, stack, layout, grid, device, *, gathers, element=None, per_channel=False):
    """Plan the copy from an image to a stack (``gathers``), or back.

    ``image`` and ``stack`` are specs. ``device`` is its number of multiprocessors, and the bytes of
    shared memory of a thread block.
    ``element`` is the C++ type of the elements when they are computed with and not only moved.
    ``per_channel`` says that the computation needs to know each element's channel, so that a
    vector must not span pixels.
    """
    sm_count, shared_bytes = device
    most = sm_count * _RESIDENT  # thread blocks at once, about
    geometry = (stack.shape[0], layout.N, layout.C, layout.H, layout.W)
    geometry += (*grid.boffset, *grid.bstride)
    same = layout.channels_last == layout.blocks_channels_last or layout.C == 1
    if same:
        vector = _runs_vector(image, stack, layout, grid, per_channel)
        narrow = _needs_staging(vector, image, layout, grid, element, gathers)
    else:
        pixel = layout.C * image.dtype.itemsize
        narrow = vector_bytes(pixel, image.alignment, stack.alignment) < 8
    if narrow:
        config = _configure_staged(image, stack, layout, grid, element, gathers, most)
        if config is not None:
            template, work, threads, shared = config
            return CopyConfig("staged", template, work, threads, geometry, shared)
    if same:
        template, work, leading = _configure_runs(image, stack, layout, grid, vector, most)
        return CopyConfig("runs", template, work, THREADS, (*leading, *geometry))
    limit = min(shared_bytes, _LINE_BYTES) if gathers and layout.channels_last else 0
    template, work, threads, shared = _configure_tiles(
        image, stack, layout, grid, element, gathers, most, limit
    )
    return CopyConfig("tiles", template, work, threads, geometry, shared)


def _runs_vector(image, stack, layout, grid, per_channel):
    """Return the bytes of the vectors that the runs kernels can move."""
    unit = image.dtype.itemsize * (layout.C if layout.channels_last else 1)
    if not (per_channel and layout.channels_last):  # wider than a pixel where runs start aligned
        unit *= math.gcd(grid.boffset[1], grid.bstride[1], grid.bsize[1], layout.W)
    return vector_bytes(unit, image.alignment, stack.alignment)


def _configure_runs(image, stack, layout, grid, vector, most):
    """Template of the runs kernels, thread blocks of work, and their leading arguments."""
    item = image.dtype.itemsize
    planes = 1 if layout.channels_last else layout.C
    pixel_bytes = item * (layout.C if layout.channels_last else 1)
    width = grid.bsize[1] * pixel_bytes // vector
    lanes, vectors = _lanes_and_vectors(width, 4 if vector > 4 else 8)
    runs = max(1, (4 if vector > 4 else 8) // vectors)
    at_once = 32 // lanes * runs  # runs that a warp moves at a time; at most a warp full
    runs, at_once = (runs, at_once) if at_once <= 32 else (lanes, 32)
    segments = -(-width // (lanes * vectors))
    total = stack.shape[0] * planes * grid.bsize[0] * segments
    batch = at_once  # runs that a warp finds at a time: more where there is work for all warps
    while batch < 32 and total >= 2 * batch * most * (THREADS // 32):
        batch *= 2
    template = (f"Bytes<{vector}>::type", *grid.bsize, lanes, runs, vectors)
    work = -(-total // (batch * (THREADS // 32)))
    return template, work, (batch, planes, pixel_bytes, item)


def _lanes_and_vectors(width, most_vectors):
    """Lanes that share a run of ``width`` vectors, and vectors each: few idle, then wide."""

    def efficiency(choice):
        lanes, vectors = choice
        span = lanes * vectors
        return width / (-(-width // span) * span), span

    narrow = (4, 8, 16, 32) if width < 64 else (32,)
    return max(
        ((n, k) for n in narrow for k in range(1, most_vectors + 1) if n * k < width + n),
        key=efficiency,
    )


def _configure_tiles(image, stack, layout, grid, element, gathers, most, limit):
    """Return the configuration of a tiles kernel but for its geometry.

    See cuda_src/core/shared_transpose.cuh.
    ``limit`` is of the shared memory for a tile of whole planes and the line that it becomes.
    """
    item, area = image.dtype.itemsize, math.prod(grid.bsize)
    by_pixel = gathers == layout.channels_last  # a row of the matrix is a pixel, else a channel
    share = stack.shape[0] * area * layout.C * item // most  # bytes that a thread block moves
    line = _line_bytes(area, min(layout.C, _SECTOR_BYTES // item), item) <= limit
    if line:
        pixels, channels = area, _line_channels(area, layout.C, item, share, limit)
    else:
        pixels, channels = _tile_size(area, layout.C, item, share, by_pixel)
    last, planes = (image, stack) if layout.channels_last else (stack, image)
    of_pixel = max(vector_bytes(layout.C * item, channels * item, last.alignment), item)
    run = math.gcd(area, pixels)  # pixels that begin at its multiples lie together in a plane
    if not layout.channels_last:
        run = math.gcd(grid.boffset[1], grid.bstride[1], grid.bsize[1], layout.W)
    of_plane = max(vector_bytes(run * item, planes.alignment), item)
    fill, store = (of_pixel, of_plane) if by_pixel else (of_plane, of_pixel)
    fill = fill if fill >= 4 else item
    size = pixels * channels * item
    threads = _line_threads(size) if line else _tile_threads(size)
    template = (
        layout.channels_last,
        element or f"Bytes<{item}>::type",
        fill,
        store,
        *grid.bsize,
        pixels,
        channels,
        threads,
    )
    shared = _tile_bytes(pixels, channels, item, by_pixel)
    if gathers:
        vector = vector_bytes(channels * area * item, layout.C * area * item, stack.alignment)
        template += (max(vector, item) if line else 0,)
        shared += line * size
    tiles = -(-area // pixels) * -(-layout.C // channels)
    return template, stack.shape[0] * tiles, threads, shared


def _needs_staging(vector, image, layout, grid, element, gathers):
    """Whether lines are moved faster through shared memory than by vectors of so many bytes."""
    if gathers:
        return vector <= (2 if element is None else 4)
    line = grid.bsize[1] * image.dtype.itemsize * (layout.C if layout.channels_last else 1)
    return vector <= 2 or (element is not None and line < _SHORT_LINE)


def _configure_staged(image, stack, layout, grid, element, gathers, most):
    """Return the configuration of a staged kernel but for its geometry, or None for no kernel.

    See cuda_src/block_sparse/gather_scatter/block_staging.cuh.
    """
    item, area = image.dtype.itemsize, math.prod(grid.bsize)
    size = area * layout.C * item
    staged = _staged_bytes(layout, grid.bsize, item)
    each = 2 * _BLOCK_BYTES  # of shared memory, for one block of the stack
    each += staged if gathers else -(-size // 16) * 16 + (staged if element else 0)
    row = layout.W * layout.C * item
    if item > 4 or size < _LEAST_STAGED or each > _SHARED_BYTES or row >= 1 << 31:
        return None
    vector = max(vector_bytes(size, stack.alignment), item)
    rows, group = stack.shape[0], 1
    at_once = _GATHERED_BYTES if gathers else _SCATTERED_BYTES
    while (
        2 * group * size <= at_once
        and 2 * group * each <= _SHARED_BYTES
        and 2 * group * most <= rows  # work for all thread blocks first
        and group < 32
    ):
        group *= 2
    threads = 128 if group * size <= _GATHERED_BYTES else 256
    template = (
        layout.channels_last,
        layout.blocks_channels_last,
        element or f"Bytes<{item}>::type",
        *grid.bsize,
        layout.C,
        group,
        min(vector, 8) if gathers else vector if vector >= 4 else item,
        threads,
    )
    tables = 8 * layout.C if gathers and element else 0  # float32: float64 is not staged
    return template, -(-rows // group), threads, group * each + tables


def _staged_bytes(layout, bsize, item):
    """Return ``StagedBlock::BYTES`` of cuda_src/block_sparse/gather_scatter/block_staging.cuh."""
    last = layout.channels_last
    length = bsize[1] * item * (layout.C if last else 1)
    plane = -(-bsize[0] * (-(-length // 16) * 16 + 16 + 15) // 16) * 16
    return 16 + (plane if last else layout.C * (plane + 16))


def _tile_size(area, channels, item, share, by_pixel):
    """Return pixels and channels of a tile.

    A tile has whole pixels up to some bytes, and as much of the block as leaves work for all thread
    blocks. Its pixels are a multiple of 32 or all, its channels of 16 bytes or all.
    """
    place = 16 // item
    count = -(-channels * item // _CHANNEL_BYTES)
    width = -(-channels // (count * place)) * place if count > 1 else channels
    largest = _WHOLE_BYTES if area * item % _SECTOR_BYTES else _TILE_BYTES
    budget = max(min(largest, share), _LEAST_TILE_BYTES)

    def too_large(pixels):
        shared = _tile_bytes(pixels, width, item, by_pixel)
        return pixels * width * item > budget or shared > _SHARED_BYTES

    pixels = area
    while pixels > 32 and too_large(pixels):
        pixels = -(-pixels // 64) * 32  # half of them
    return pixels, width


def _line_channels(area, channels, item, share, limit):
    """Return the channels of a tile of whole planes, which is a line of the stack.

    They are a multiple of 16 bytes or all: the fewest equal parts that fit, and that leave work for
    all thread blocks as long as they have a sector of each pixel.
    """
    place = 16 // item
    budget = max(share, _LEAST_TILE_BYTES, area * _SECTOR_BYTES)
    places = -(-channels // place)
    for count in range(1, places + 1):
        width = -(-places // count) * place if count > 1 else channels
        if _line_bytes(area, width, item) <= limit and area * width * item <= budget:
            break
    return width


def _line_bytes(area, channels, item):
    """Return the shared memory of a tile of whole planes and of the line that it becomes."""
    return _tile_bytes(area, channels, item, True) + area * channels * item


def _tile_threads(size):
    """Return the threads for a tile of so many bytes: four vectors of 16 bytes each, about."""
    return min(max(-(-size // (4 * 16 * 32)) * 32, 64), _TILE_THREADS)


def _line_threads(size):
    """Return the threads for a line of so many bytes: 16 vectors of 16 bytes each, about."""
    return 32 if size < 8 << 10 else 128 if size < 36 << 10 else 256


def _tile_bytes(pixels, channels, item, by_pixel):
    """Return the shared memory of a tile, as SharedTranspose::BYTES has it."""
    rows, columns = (pixels, channels) if by_pixel else (channels, pixels)
    place = 16 // item
    pitch = -(-columns // place)
    pitch, pad = (pitch | 1, 2) if item == 2 else (pitch, 1)
    return 16 * (rows * pitch + -(-rows // place) * pad)
