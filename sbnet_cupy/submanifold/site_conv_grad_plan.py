"""Which kernel the gradient of a convolution's weights runs, and which instance: integers only."""

import functools
import math
from typing import NamedTuple

from ..core.arrays import vector_bytes
from .site_conv_instances import ELEMENT_BYTES
from .site_conv_plan import MOST_BYTES, MOST_ROWS, TAPS_OF_PICTURES, has_products

_MULTIPROCESSORS = 132  # of an H200
_BLOCKS = 1200  # thread blocks of 128 threads, about, that shares of the rows make
# The same of pictures, where all taps have about as many rows, and of few rows: as many as an H200
# holds at once. Each writes a matrix of sums to memory.
_AT_ONCE = 4 * _MULTIPROCESSORS
# Shares of the tap in the middle, which has all rows, for one of another tap: of at least so many
# taps and at most so many rows, where thread blocks of that tap alone would end last.
_MIDDLE, _FEWEST_TAPS, _FEW_ROWS = 4, 27, 1 << 14
_MIDDLE_OF_MORE, _MORE_ROWS = 2, 3 << 14  # the same of more rows, for numbers of 16 bits
_EACH = 4  # rows of the table that a thread looks at
_LARGEST = {2: (16, 32, 64, 128), 4: (16, 32, 64)}  # channels of a tile, by bytes of a number
_STAGES = (4, 3, 2)
# Of site_weight_grad_pipelined: threads that copy, pairs of a stage, the fewest channels.
COPIERS, PAIRS, _FEWEST_CHANNELS = 128, 64, 33
# Its thread blocks where taps have unlike numbers of rows; and of so many rows, where a
# multiprocessor holds two of them.
_UNLIKE, _UNLIKE_MANY, _MANY_ROWS = 4 * _MULTIPROCESSORS, 12 * _MULTIPROCESSORS, 1 << 18


class WeightGradSizes(NamedTuple):
    """A gradient of weights, as its planner sees it."""

    element: str  # C++ type
    sources: int  # rows of the features
    targets: int  # rows of the gradient
    taps: int
    channels: int
    channels_out: int
    groups: int
    tf32: bool
    alignment_in: int  # address and rows of the features are multiples of so many bytes, up to 16
    alignment_out: int  # those of the gradient

    @property
    def element_bytes(self):
        """Bytes of a number."""
        return ELEMENT_BYTES[self.element]

    @property
    def weights(self):
        """Numbers of the result."""
        return self.taps * self.channels // self.groups * self.channels_out

    @property
    def at_once(self):
        """Whether as many thread blocks as run at once take least time, by runs on an H200."""
        most = _MORE_ROWS if self.element_bytes == 2 else _FEW_ROWS
        return self.taps <= TAPS_OF_PICTURES or self.targets <= most

    def shares(self, tiles, blocks):
        """Return how many shares of the rows make about so many thread blocks.

        Those of each tap, and those of the tap in the middle.
        """
        middle = 1
        if self.at_once and self.taps % 2 and self.taps >= _FEWEST_TAPS:
            middle = _MIDDLE if self.targets <= _FEW_ROWS else _MIDDLE_OF_MORE
        most = -(-self.targets // min(max(32 * self.taps, 256), 2048))
        shares = max(min(most, blocks // ((self.taps - 1 + middle) * tiles)), 1)
        return shares, min(middle * shares, -(-self.targets // 256))


class MmaPlan(NamedTuple):
    """An instance of site_weight_grad."""

    tile: tuple[int, int]  # channels of the features and of the gradient
    warps: tuple[int, int, int]  # that share them, and the rows of a stage
    rows: int  # of a stage
    stages: int

    kernel = "site_weight_grad"

    @property
    def threads(self):
        """Number of threads of a thread block."""
        return 32 * math.prod(self.warps)

    def shared_bytes(self, conv):
        """Dynamic shared memory of a thread block."""
        gap = 32 if conv.element == "float" else 16
        pitches = sum(columns * conv.element_bytes + gap for columns in self.tile)
        sums = (self.warps[2] - 1) * math.prod(self.tile) * 4
        return max(self.stages * self.rows * pitches + _list_bytes(self.threads), sums)

    def tiles(self, conv):
        """Number of tiles of the weights of a tap."""
        return -(-conv.channels // self.tile[0]) * -(-conv.channels_out // self.tile[1])

    def shares(self, conv):
        """Numbers of shares of the rows: of a tap, and of the tap in the middle."""
        blocks = _AT_ONCE if conv.at_once else _BLOCKS
        return conv.shares(self.tiles(conv), blocks * 128 // self.threads)

    def template(self, conv):
        """Return the template arguments."""
        return (
            conv.element, *self.tile, *self.warps, self.rows, self.stages, conv.alignment_in == 16,
            conv.alignment_out == 16,
        )  # fmt: skip


class PipelinedPlan(NamedTuple):
    """An instance of site_weight_grad_pipelined."""

    tile: tuple[int, int]  # channels of the features and of the gradient
    groups: tuple[int, int, int]  # of four warps that share them, and the pairs of a stage
    stages: int
    blocks: int = 1  # of a multiprocessor

    kernel = "site_weight_grad_pipelined"

    @property
    def threads(self):
        """Number of threads of a thread block, of which 128 copy."""
        return 128 * math.prod(self.groups) + COPIERS

    def shared_bytes(self, conv):
        """Dynamic shared memory of a thread block."""
        stage = sum(self.tile) * PAIRS * conv.element_bytes
        barriers = 8 * (2 * self.stages + 2)
        return 1024 + self.stages * (stage + 4) + barriers + _list_bytes(COPIERS)

    tiles = MmaPlan.tiles

    def shares(self, conv):
        """Numbers of shares of the rows: of a tap, and of the tap in the middle."""
        if conv.at_once:
            blocks = self.blocks * _MULTIPROCESSORS
        else:
            blocks = _UNLIKE_MANY if self.blocks > 1 and conv.targets >= _MANY_ROWS else _UNLIKE
        return conv.shares(self.tiles(conv), blocks)

    def template(self, conv):
        """Return the template arguments."""
        return conv.element, *self.tile, *self.groups, self.stages, self.blocks


class FmaPlan(NamedTuple):
    """An instance of site_weight_grad_fma."""

    channels: int  # of the features, of a thread
    vector: int  # channels of the gradient of a thread

    kernel = "site_weight_grad_fma"
    threads = 256

    def units(self, conv):
        """Number of threads' shares of the weights of a tap."""
        return conv.channels // conv.groups // self.channels * (conv.channels_out // self.vector)

    def lanes(self, conv):
        """Number of threads that have different weights; the others have other rows."""
        return min(1 << (self.units(conv) - 1).bit_length(), self.threads)

    def shared_bytes(self, conv):
        """Dynamic shared memory of a thread block."""
        parts, wide = self.threads // self.lanes(conv), 8 if conv.element == "double" else 4
        sums = self.channels * self.vector * self.threads * wide if parts > 1 else 0
        return max(_list_bytes(self.threads), sums)

    def tiles(self, conv):
        """Number of tiles of the weights of a tap."""
        return -(-self.units(conv) // self.lanes(conv))

    def shares(self, conv):
        """Numbers of shares of the rows: of a tap, and of the tap in the middle."""
        return conv.shares(self.tiles(conv), _BLOCKS)

    def template(self, conv):
        """Return the template arguments."""
        return conv.element, self.channels, self.vector


_WIDE = {  # by how many channels of the features and of the gradient there are, up to 256
    (64, 64): PipelinedPlan((64, 64), (1, 1, 2), 4, 2),
    (64, 128): PipelinedPlan((64, 128), (1, 1, 2), 4),
    (128, 64): PipelinedPlan((128, 64), (2, 1, 1), 4, 2),
    (128, 128): PipelinedPlan((128, 128), (2, 1, 1), 6),
    (128, 256): PipelinedPlan((128, 256), (1, 2, 1), 4),
    (256, 128): PipelinedPlan((256, 128), (2, 1, 1), 4),
}
# Tiles of 256 x 256 have no registers; those of 64 x 256 and 256 x 64 were not tried.
PIPELINED = _WIDE | {
    (64, 256): _WIDE[64, 128], (256, 64): _WIDE[128, 64], (256, 256): _WIDE[256, 128],
}  # fmt: skip


@functools.lru_cache(maxsize=1024)
def plan_weight_grad(conv, device):
    """Return the plan of a gradient of weights; None where there is no kernel."""
    if max(conv.sources, conv.targets, conv.weights) >= MOST_ROWS:
        return None
    if has_products(conv, device):
        best = _pipelined_plan(conv, device) or _mma_plan(conv, device)
        if best is not None:
            return best
    per_group, item = conv.channels_out // conv.groups, conv.element_bytes
    vector = min(vector_bytes(per_group * item, conv.alignment_out) // item, 4)
    return FmaPlan(1 if conv.channels // conv.groups % 4 else 4, vector)


def _pipelined_plan(conv, device):
    """Return the plan of warps that copy for others; None where there is no such kernel."""
    fewest = min(conv.channels, conv.channels_out)
    if not device.hopper or conv.element_bytes != 2 or fewest < _FEWEST_CHANNELS:
        return None
    if not conv.alignment_in == conv.alignment_out == 16:
        return None
    largest = max(conv.sources * conv.channels, conv.targets * conv.channels_out)
    if largest * conv.element_bytes >= MOST_BYTES:
        return None
    return PIPELINED[_tile_of(conv, (64, 128, 256))]


def _mma_plan(conv, device):
    """Return the plan with the most stages of which a multiprocessor holds 512 threads."""
    tile = _tile_of(conv, _LARGEST[conv.element_bytes])
    of_warp = (64 if min(tile) == 128 else 32, 32)
    across = [-(-size // its) for size, its in zip(tile, of_warp, strict=True)]
    parts = (4 if max(tile) <= 64 else 8) // math.prod(across)
    depth = 8 if conv.element == "float" else 16
    plans = [MmaPlan(tile, (*across, parts), max(32, parts * depth), s) for s in _STAGES]
    fitting = [plan for plan in plans if plan.shared_bytes(conv) <= device.shared_bytes]
    roomy = (p for p in fitting if p.shared_bytes(conv) <= 448 * p.threads)
    return next(roomy, fitting[-1] if fitting else None)


def _tile_of(conv, sizes):
    """Return the smallest of these sizes that has all channels, or the last: in and out."""
    return tuple(
        next((size for size in sizes if size >= count), sizes[-1])
        for count in (conv.channels, conv.channels_out)
    )


def _list_bytes(threads):
    """Return the bytes of the list of pairs of rows of a thread block."""
    return 4 * (4 * _EACH * threads + threads // 32)
