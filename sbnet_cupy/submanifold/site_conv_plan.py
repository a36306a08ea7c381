"""Which kernel a convolution over a kernel map runs, and which instance of it: integers only."""

import functools
import math
from typing import NamedTuple

from ..core.arrays import vector_bytes

PANEL = 64  # output channels that are packed together
_ROW = 128  # bytes of K in a chunk
_MOST_ROWS = 2**31 - 2**8
_FMA_ROWS = 4  # rows of the result of a thread of site_conv_fma
_TILES = ((128, 128), (128, 64), (128, 32), (64, 128), (64, 64), (64, 32))  # rows, channels
_STAGES = (4, 3, 2)


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
        units = -(-self.channels * self.element_bytes // 16)
        return -(-self.taps * units // 8)

    @property
    def packed_bytes(self):
        """Bytes of the packed weights."""
        return -(-self.channels_out // PANEL) * PANEL * (8 + self.chunks * _ROW)


class MmaPlan(NamedTuple):
    """An instance of site_conv."""

    tile: tuple[int, int]  # rows and channels of the result of a thread block
    warps: tuple[int, int]  # that share them
    stages: int

    kernel = "site_conv"

    @property
    def threads(self):
        """Number of threads of a thread block."""
        return 32 * math.prod(self.warps)

    def shared_bytes(self, conv):
        """Dynamic shared memory of a thread block; the sums of site_conv.cu."""
        rows, columns = self.tile
        lists = conv.taps * (rows + 1) + conv.chunks
        return self.stages * (rows + columns) * _ROW + 4 * (2 * columns + lists)

    def tiles(self, conv):
        """Number of tiles of the result."""
        rows, columns = self.tile
        return -(-conv.targets // rows) * -(-conv.channels_out // columns)

    def template(self, conv):
        """Return the template arguments."""
        return (
            conv.element, *self.tile, *self.warps, self.stages, conv.alignment_in == 16,
            conv.alignment_out == 16, conv.element == "float", conv.activation,
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
    if max(conv.sources, conv.targets, conv.taps * conv.channels) >= _MOST_ROWS:
        return None
    if _has_products(conv, device):
        best = min(
            _candidates(conv, device), key=lambda plan: _cost(plan, conv, device), default=None
        )
        if best is not None:
            return best
    per_group = conv.channels_out // conv.groups
    vector = vector_bytes(per_group * conv.element_bytes, conv.alignment_out) // conv.element_bytes
    return FmaPlan(vector)


def _has_products(conv, device):
    """Whether tensor cores take these numbers."""
    if conv.groups > 1 or conv.element == "double":
        return False
    if conv.element == "float" and not conv.tf32:
        return False
    return device.tensor_floats or conv.element == "Half"


def _candidates(conv, device):
    """Yield plans that fit the device, of each tile that with the most stages."""
    for tile in _TILES:
        warps = (tile[0] // 32, 1 if tile[1] == 32 else 2)
        if tile[1] > 32 and tile[1] >= 2 * conv.channels_out:
            continue
        for stages in _STAGES:
            plan = MmaPlan(tile, warps, stages)
            if plan.shared_bytes(conv) <= device.shared_bytes:
                yield plan
                break


def _cost(plan, conv, device):
    """Estimate how long a launch takes: rounds of tiles times what a tile copies and multiplies.

    Not fitted to runs yet.
    """
    rows, columns = plan.tile
    resident = max(1, (device.shared_bytes + 1024) // (plan.shared_bytes(conv) + 1024))
    rounds = math.ceil(plan.tiles(conv) / (device.multiprocessors * min(resident, 3)))
    return rounds * min(resident, 3) * (rows + columns + rows * columns / 32)
