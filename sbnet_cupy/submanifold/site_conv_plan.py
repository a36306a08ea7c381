"""Which kernel a convolution over a kernel map runs, and which instance of it: integers only."""

import functools
import itertools
import math
from typing import NamedTuple

from ..core.arrays import vector_bytes

PANEL = 64  # output channels that are packed together
_ROW = 128  # bytes of K in a chunk
_STEP = 32  # bytes of K that are multiplied together, of one tap
MOST_ROWS = 2**31 - 2**8
_FMA_ROWS = 4  # rows of the result of a thread of site_conv_fma
_TILES = ((128, 128), (128, 64), (128, 32), (64, 128), (64, 64), (64, 32))  # rows, channels
_WIDE_TILES = ((128, 64), (256, 64), (128, 128), (256, 128), (128, 256))  # of wgmma
_FEWEST_TAPS = 10  # of which rows may be sorted


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
        return {"double": 8, "float": 4}.get(self.element, 2)

    @property
    def chunks(self):
        """Chunks of K of the product on tensor cores."""
        steps = -(-self.channels * self.element_bytes // _STEP)
        return -(-self.taps * steps // 4)

    @property
    def packed_bytes(self):
        """Bytes of the packed weights."""
        return -(-self.channels_out // PANEL) * PANEL * (8 + self.chunks * _ROW)


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
    def threads(self):
        """Number of threads of a thread block."""
        return 32 * math.prod(self.warps)

    def shared_bytes(self, conv):
        """Dynamic shared memory of a thread block; the sums of site_conv.cu."""
        rows, columns = self.tile
        lists = 2 * rows + conv.taps * (rows + 1) + conv.chunks
        return self.stages * (rows + columns) * _ROW + 4 * (2 * columns + lists)

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
    """An instance of site_conv_pipelined."""

    tile: tuple[int, int]
    warps: tuple[int, int]  # groups of four warps that share them
    stages: int
    by_taps: bool = True
    engine: str = "TileWgmma"

    kernel = "site_conv_pipelined"
    cycles = (24, 4.3, 2, 320)
    narrowest = 64
    most_stages = (5, 4, 3, 2)

    @staticmethod
    def tiles_for(conv):
        """Return the tiles that there are; floats leave no registers for the largest."""
        tiles = _WIDE_TILES if conv.element_bytes == 2 else _WIDE_TILES[:3]
        return [(tile, (1, 2) if tile[1] > 128 else (2, 1)) for tile in tiles]

    @property
    def threads(self):
        """Number of threads of a thread block, of which 128 copy."""
        return (128 if self.engine == "TileWgmma" else 32) * math.prod(self.warps) + 128

    def shared_bytes(self, conv):
        """Dynamic shared memory of a thread block; the sums of SiteMemory."""
        rows, columns = self.tile
        numbers = 2 * columns + self.stages + 4 * rows + 2 * conv.taps * (rows + 1) + 2
        return 1024 + self.stages * ((rows + columns) * _ROW + 16) + 8 * 6 + 4 * numbers

    tiles = MmaPlan.tiles

    def template(self, conv):
        """Return the template arguments."""
        return (
            self.engine, conv.element, *self.tile, *self.warps, self.stages,
            not self.by_taps, conv.element == "float", conv.activation,
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


@functools.lru_cache(maxsize=1024)
def plan_site_conv(conv, device):
    """Return the plan of a convolution; None where there is no kernel."""
    if max(conv.sources, conv.targets, conv.taps * conv.channels) >= MOST_ROWS:
        return None
    if has_products(conv, device):
        best = min(
            _candidates(conv, device), key=lambda plan: _cost(plan, conv, device), default=None
        )
        if best is not None:
            return best
    per_group = conv.channels_out // conv.groups
    vector = vector_bytes(per_group * conv.element_bytes, conv.alignment_out) // conv.element_bytes
    return FmaPlan(vector)


def has_products(conv, device):
    """Whether tensor cores take these numbers."""
    if conv.groups > 1 or conv.element == "double":
        return False
    if conv.element == "float" and not conv.tf32:
        return False
    return device.tensor_floats or conv.element == "Half"


def _candidates(conv, device):
    """Yield plans that fit the device, of each tile that with the most stages."""
    kinds = [MmaPlan]
    whole = conv.channels * conv.element_bytes % _ROW == 0
    if device.hopper and whole and conv.alignment_in == conv.alignment_out == 16:
        kinds.append(PipelinedPlan)
    sortings = (False, True) if conv.taps >= _FEWEST_TAPS else (False,)
    for kind, by_taps in itertools.product(kinds, sortings):
        for tile, warps in kind.tiles_for(conv):
            if tile[1] > kind.narrowest and tile[1] >= 2 * conv.channels_out:
                continue
            for stages in kind.most_stages:
                plan = kind(tile, warps, stages, by_taps)
                if plan.shared_bytes(conv) <= device.shared_bytes:
                    yield plan
                    break


def _cost(plan, conv, device):
    """Estimate how many cycles a launch takes: those of its chunks, fitted to runs on an H200.

    Sorted rows leave out more chunks of a tile, but for the fullest tiles. They are taken where
    that pays for the sort, which four convolutions share.
    """
    rows, columns = plan.tile
    products, of_row, of_column, of_chunk = plan.cycles
    wide = 2 if conv.element == "float" else 1
    chunk = wide * rows * columns / products + rows * of_row + columns * of_column + of_chunk
    share = 0.6 if plan.by_taps else 0.9
    each = math.ceil(plan.tiles(conv) / device.multiprocessors)
    sort = 6600 + 0.05 * conv.targets if plan.by_taps else 0
    return conv.chunks * max(each * share, 0.95) * chunk + sort
