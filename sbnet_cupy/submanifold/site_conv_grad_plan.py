"""Which kernel the gradient of a convolution's weights runs, and which instance: integers only."""

import functools
import math
from typing import NamedTuple

from ..core.arrays import vector_bytes
from .site_conv_plan import MOST_ROWS, has_products

_BLOCKS = 1200  # thread blocks of 128 threads, about, that shares of the rows make
# The same of pictures, where all taps have about as many rows, and of few rows: as many as an H200
# holds at once. Each writes a matrix of sums to memory.
_AT_ONCE, _TAPS_OF_PICTURES = 528, 9
# Shares of the tap in the middle, which has all rows, for one of another tap: of at least so many
# taps and at most so many rows, where thread blocks of that tap alone would end last.
_MIDDLE, _FEWEST_TAPS, _MOST_ROWS = 4, 27, 1 << 14
_EACH = 4  # rows of the table that a thread looks at
_LARGEST = {2: (16, 32, 64, 128), 4: (16, 32, 64)}  # channels of a tile, by bytes of a number
_STAGES = (4, 3, 2)


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
        return {"double": 8, "float": 4}.get(self.element, 2)

    @property
    def weights(self):
        """Numbers of the result."""
        return self.taps * self.channels // self.groups * self.channels_out

    def shares(self, tiles, blocks):
        """Return how many shares of the rows make about so many thread blocks.

        Those of each tap, and those of the tap in the middle.
        """
        few_rows = self.targets <= _MOST_ROWS
        middle = _MIDDLE if few_rows and self.taps % 2 and self.taps >= _FEWEST_TAPS else 1
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
        few = conv.taps <= _TAPS_OF_PICTURES or conv.targets <= _MOST_ROWS
        return conv.shares(self.tiles(conv), (_AT_ONCE if few else _BLOCKS) * 128 // self.threads)

    def template(self, conv):
        """Return the template arguments."""
        return (
            conv.element, *self.tile, *self.warps, self.rows, self.stages, conv.alignment_in == 16,
            conv.alignment_out == 16,
        )  # fmt: skip


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


@functools.lru_cache(maxsize=1024)
def plan_weight_grad(conv, device):
    """Return the plan of a gradient of weights; None where there is no kernel."""
    if max(conv.sources, conv.targets, conv.weights) >= MOST_ROWS:
        return None
    if has_products(conv, device):
        best = _mma_plan(conv, device)
        if best is not None:
            return best
    per_group, item = conv.channels_out // conv.groups, conv.element_bytes
    vector = min(vector_bytes(per_group * item, conv.alignment_out) // item, 4)
    return FmaPlan(1 if conv.channels // conv.groups % 4 else 4, vector)


def _mma_plan(conv, device):
    """Return the plan with the most stages of which a multiprocessor holds 512 threads."""
    sizes = _LARGEST[conv.element_bytes]
    tile = tuple(
        next((size for size in sizes if size >= count), sizes[-1])
        for count in (conv.channels, conv.channels_out)
    )
    of_warp = (64 if min(tile) == 128 else 32, 32)
    across = [-(-size // its) for size, its in zip(tile, of_warp, strict=True)]
    parts = (4 if max(tile) <= 64 else 8) // math.prod(across)
    depth = 8 if conv.element == "float" else 16
    plans = [MmaPlan(tile, (*across, parts), max(32, parts * depth), s) for s in _STAGES]
    fitting = [plan for plan in plans if plan.shared_bytes(conv) <= device.shared_bytes]
    roomy = (p for p in fitting if p.shared_bytes(conv) <= 448 * p.threads)
    return next(roomy, fitting[-1] if fitting else None)


def _list_bytes(threads):
    """Return the bytes of the list of pairs of rows of a thread block."""
    return 4 * (4 * _EACH * threads + threads // 32)
