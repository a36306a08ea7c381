"""Instances of the kernels of a convolution over a kernel map: tiles, threads, shared memory.

Which one a convolution runs is for site_conv_plan.py to say.
"""

import math
from typing import NamedTuple

from .site_tiles import ZERO_ROWS, TileShape, head_numbers

PANEL = 64  # output channels that are packed together
ROW = 128  # bytes of K in a chunk
COPIERS = 128  # threads that copy for those that multiply
STEP = 32  # bytes of K that are multiplied together, of one tap
_FMA_ROWS = 4  # rows of the result of a thread of site_conv_fma
_TILES = ((128, 128), (128, 64), (128, 32), (64, 128), (64, 64), (64, 32))  # rows, channels
_WIDE_TILES = ((128, 64), (256, 64), (128, 128), (256, 128), (128, 256))  # of wgmma
ELEMENT_BYTES = {"double": 8, "float": 4, "Half": 2, "BFloat16": 2}  # by C++ type


class SiteConvSizes(NamedTuple):
    """A convolution over a kernel map, as its planner sees it."""

    element: str  # C++ type
    sources: int  # rows of the features
    targets: int  # rows of the result
    taps: int
    channels: int
    channels_out: int
    groups: int
    activation: int
    tf32: bool
    alignment_in: int  # address and rows of the features are multiples of so many bytes, up to 16
    alignment_out: int  # those of weights, result and residual

    @property
    def element_bytes(self):
        """Bytes of a number."""
        return ELEMENT_BYTES[self.element]

    def steps(self, whole=1):
        """Steps of K of a tap: a multiple of ``whole``."""
        return -(-self.channels * self.element_bytes // (STEP * whole)) * whole

    def chunks(self, whole=1):
        """Chunks of K of the product on tensor cores."""
        return -(-self.taps * self.steps(whole) // 4)

    def packed_bytes(self, whole=1):
        """Bytes of the packed weights."""
        return -(-self.channels_out // PANEL) * PANEL * (8 + self.chunks(whole) * ROW)


class MmaPlan(NamedTuple):
    """An instance of site_conv."""

    tile: tuple[int, int]  # rows and channels of the result of a thread block
    warps: tuple[int, int]  # that share them
    stages: int
    by_taps: bool = True  # whether rows are sorted; else those near each other share the L1 cache

    kernel = "site_conv"
    cycles = (6.8, 2.5, 0, 170)  # rows x channels of a chunk in one; of a row, a channel, a chunk
    narrowest = 32
    most_stages = (3, 2)  # few: several thread blocks overlap

    @staticmethod
    def tiles_for(conv):
        """Return the tiles that there are, and the warps that share them."""
        return [(tile, (tile[0] // 32, 1 if tile[1] == 32 else 2)) for tile in _TILES]

    @property
    def order(self):
        """The order of rows that it reads."""
        return self.by_taps

    @property
    def threads(self):
        """Number of threads of a thread block."""
        return 32 * math.prod(self.warps)

    def shared_bytes(self, conv):
        """Dynamic shared memory of a thread block; the sums of site_conv.cu."""
        rows, columns = self.tile
        lists = 2 * rows + conv.taps * (rows + 1) + conv.chunks()
        return self.stages * (rows + columns) * ROW + 4 * (2 * columns + lists)

    def tiles(self, conv):
        """Number of tiles of the result."""
        rows, columns = self.tile
        return -(-conv.targets // rows) * -(-conv.channels_out // columns)

    def template(self, conv):
        """Return the template arguments."""
        return (
            conv.element, *self.tile, *self.warps, self.stages, conv.alignment_in == 16,
            conv.alignment_out == 16, not self.by_taps, conv.element == "float", conv.activation,
        )  # fmt: skip


class PipelinedPlan(NamedTuple):
    """An instance of site_conv_pipelined; of site_conv_shared where thread blocks share tiles."""

    tile: tuple[int, int]
    warps: tuple[int, int]  # groups of four warps that share them
    stages: int
    by_taps: bool = True
    engine: str = "TileWgmma"
    shared: bool = False  # whether thread blocks share tiles of sorted rows, by numbers of taps

    cycles = (24, 4.3, 2, 320)
    narrowest = 64
    most_stages = (6, 5, 4, 3, 2)

    @staticmethod
    def tiles_for(conv):
        """Return the tiles that there are, and the groups that share them."""
        return [(tile, (1, 2) if tile[1] > 128 else (2, 1)) for tile in _WIDE_TILES]

    @property
    def kernel(self):
        """The kernel's name."""
        return "site_conv_shared" if self.shared else "site_conv_pipelined"

    def partial_bytes(self, conv, shares):
        """Bytes of the parts of tiles that so many thread blocks share, two for each of them."""
        rows, columns = self.tile
        return 8 * shares * -(-conv.channels_out // columns) * rows * columns

    @property
    def threads(self):
        """Number of threads of a thread block, of which COPIERS copy."""
        return (128 if self.engine == "TileWgmma" else 32) * math.prod(self.warps) + COPIERS

    def shared_bytes(self, conv):
        """Dynamic shared memory of a thread block; the sums of SiteMemory."""
        rows, columns = self.tile
        numbers = 2 * columns + self.stages + 4 * rows + conv.taps * (rows + 2) + 2
        return 1024 + self.stages * ((rows + columns) * ROW + 16) + 8 * 8 + 4 * numbers

    tiles = MmaPlan.tiles
    order = MmaPlan.order

    def template(self, conv):
        """Return the template arguments."""
        return (
            self.engine, conv.element, *self.tile, *self.warps, self.stages,
            not self.by_taps, conv.element == "float", conv.activation,
        )  # fmt: skip

    def sum_template(self, conv):
        """Return the template arguments of what adds up the parts of shared tiles."""
        return self.engine, conv.element, *self.tile, *self.warps, conv.activation


class OncePlan(NamedTuple):
    """An instance of site_conv_once."""

    tile: tuple[int, int]  # rows and channels of the result of a thread block
    warps: tuple[int, int]  # of a group, that share them

    kernel = "site_conv_once"
    order = False
    groups = 4  # of warps, which share K
    blocks = 1  # of a multiprocessor

    @property
    def threads(self):
        """Number of threads of a thread block."""
        return 32 * self.groups * math.prod(self.warps)

    def shared_bytes(self, conv):
        """Dynamic shared memory of a thread block; the sums of site_conv_once.cuh."""
        rows, columns = self.tile
        left = max(conv.chunks() * rows * ROW, (self.groups - 1) * rows * columns * 4)
        numbers = 2 * columns + 2 * rows + conv.taps * rows
        return left + conv.chunks() * columns * ROW + 4 * numbers

    def tiles(self, conv):
        """Tiles of the result, of rows and of channels."""
        return -(-conv.targets // self.tile[0]), -(-conv.channels_out // self.tile[1])

    def template(self, conv, overlap=False):
        """Return the template arguments."""
        floats = conv.element == "float"
        return conv.element, *self.tile, *self.warps, floats, conv.activation, overlap


class TilesPlan(NamedTuple):
    """An instance of site_conv_tiles."""

    order: TileShape
    columns: int  # output channels of a thread block
    warps: tuple[int, int]  # that share its rows and channels; of wgmma, groups of four warps
    stages: int = 0  # of the ring of weights; 0: they stay in shared memory
    buffers: int = 2  # of rows
    blocks: int = 1  # of a multiprocessor
    engine: str = "TileMma"  # by SplitWgmma, groups of four warps share taps and ring

    kernel = "site_conv_tiles"

    @property
    def threads(self):
        """Number of threads of a thread block; some stream weights."""
        group = 32 if self.engine in ("TileMma", "NarrowMma") else 128
        return group * (math.prod(self.warps) + (self.stages > 0))

    @property
    def side_by_side(self):
        """Whether tiles of other channels read the same rows: where weights are streamed."""
        return self.stages > 0 and (self.columns >= PANEL or self.engine == "SplitWgmma")

    @staticmethod
    def row_bytes(conv):
        """Bytes of a part of a row."""
        needed = -(-conv.channels * conv.element_bytes // STEP) * STEP
        return next((size for size in (32, 64) if needed <= size), ROW)

    def shared_bytes(self, conv):
        """Dynamic shared memory of a thread block; the sums of TileMemory."""
        rows, most, _ = self.order
        weights = (self.stages or conv.chunks(self.whole(conv))) * self.columns * ROW
        buffer = (most + ZERO_ROWS) * self.row_bytes(conv) + 2 * conv.taps * rows + 4 * rows
        sums = (self.warps[0] - 1) * rows * self.columns if self.engine == "SplitWgmma" else 0
        numbers = 3 * head_numbers(conv.taps) + 2 * self.columns + sums
        barriers = 2 * self.stages + 1 + 2 * self.buffers
        return 1024 + weights + self.buffers * buffer + 4 * numbers + 8 * barriers

    @staticmethod
    def copied(conv):
        """Bytes of a row that are copied together: 16, or fewer of a narrow row; or None."""
        narrow = conv.channels * conv.element_bytes <= STEP
        return conv.alignment_in if conv.alignment_in == 16 or narrow else None

    def whole(self, conv):
        """Steps of K of a tap are a multiple of this: those of a part of a row."""
        return self.row_bytes(conv) // STEP

    def tiles(self, conv):
        """Tiles of the result, of rows and of channels."""
        return -(-conv.targets // self.order.rows), -(-conv.channels_out // self.columns)

    def template(self, conv, overlap=False):
        """Return the template arguments."""
        return (
            self.engine, conv.element, self.order.rows, self.columns, *self.warps,
            self.row_bytes(conv), self.stages, self.buffers, self.blocks, self.copied(conv),
            conv.element == "float", conv.activation, overlap,
        )  # fmt: skip


class FmaPlan(NamedTuple):
    """An instance of site_conv_fma."""

    vector: int  # output channels of a thread

    kernel = "site_conv_fma"

    def blocks(self, conv):
        """Number of thread blocks for one turn each."""
        threads = -(-conv.targets // _FMA_ROWS) * (conv.channels_out // self.vector)
        return -(-threads // 256)

    def template(self, conv):
        """Return the template arguments."""
        return conv.element, self.vector, _FMA_ROWS, conv.activation
