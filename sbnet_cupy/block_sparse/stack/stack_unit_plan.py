"""Which instance of ``stack_unit`` computes a residual unit, and whether it is worth it.

Template arguments depend on dtype, channels, blocks and on how many of those are expected; never on
the count itself.
"""

import functools
import math
from typing import NamedTuple

from .stack_conv_plan import StackConv, plan_cost, plan_stack_conv
from .stack_patch_plan import PANEL, ROW

WIDTH = 64  # channels between the layers
ROWS = 64  # output pixels of a tile, at most
THREADS = 384
_CHUNK = PANEL * ROW  # bytes of weights: 64 columns of 64 channels
_PIECES = ((8, 8, 1), (4, 4, 3), (2, 2, 8))  # pixels of a piece of a block, and pieces of a tile


class StackUnit(NamedTuple):
    """A residual unit on a stack: two 3x3 layers, or a 3x3 layer between two 1x1 layers.

    All are of stride 1; those of 3x3 pixels have a border of one pixel.
    """

    element: str  # C++ type: Half or BFloat16
    rows: int  # of the stacks: their capacity
    images: int
    grid: tuple[int, int]
    block: tuple[int, int]
    image: tuple[int, int]
    channels: int  # of x
    width: int  # channels between the layers
    channels_out: int
    bottleneck: bool
    inner: int  # activation between the layers
    activation: int
    expected: int  # about how many rows will be active

    def layers(self):
        """Return the layers as convolutions of their own."""
        kernels = ((1, 1), (3, 3), (1, 1)) if self.bottleneck else ((3, 3), (3, 3))
        channels = (self.channels, *[self.width] * (len(kernels) - 1), self.channels_out)
        for number, kernel in enumerate(kernels):
            last = number + 1 == len(kernels)
            yield StackConv(
                element=self.element, rows=self.rows, images=self.images, grid=self.grid,
                block=self.block, block_out=self.block, image=self.image, image_out=self.image,
                channels=channels[number], channels_out=channels[number + 1], kernel=kernel,
                strides=(1, 1), dilation=(1, 1), pads=(kernel[0] // 2, kernel[1] // 2),
                activation=self.activation if last else self.inner, vectors_in=True,
                vectors_out=True, expected=self.expected,
            )  # fmt: skip


class UnitPlan(NamedTuple):
    """Template arguments of ``stack_unit``, in words."""

    wgmma: bool
    piece: tuple[int, int]  # pixels of a part of a block
    pieces: int  # of a tile
    x_stages: int  # of 64 channels of a tile's pixels

    def template(self, unit):
        """Return the template arguments."""
        taps = 1 if unit.bottleneck else 9
        return (
            self.wgmma, unit.element, taps, *self.piece, self.pieces, self.x_stages, unit.inner,
            unit.activation,
        )  # fmt: skip

    def tiles(self, unit, rows):
        """Number of tiles of so many rows of the stack."""
        return -(-rows * math.prod(unit.block) // math.prod(self.piece) // self.pieces)

    def memory_bytes(self, unit):
        """Bytes of shared memory for pixels, sums and barriers; UnitMemory of stack_unit.cuh."""
        rim = 2 if unit.bottleneck else 4
        rows = self.pieces * (self.piece[0] + rim) * (self.piece[1] + rim)
        middle = self.pieces * (self.piece[0] + 2) * (self.piece[1] + 2) * ROW
        second = ROWS * ROW if unit.bottleneck else 0
        barriers = 8 * (2 * self.x_stages + 12)
        return self.x_stages * rows * ROW + middle + second + (16 << 10) + barriers + 8 * rows

    def shared_bytes(self, unit):
        """Dynamic shared memory of a thread block."""
        last = unit.channels_out if unit.bottleneck else 0
        tables = 8 * (2 * WIDTH + last)
        return 1024 + weight_chunks(unit) * _CHUNK + self.memory_bytes(unit) + tables


def weight_chunks(unit):
    """Return how many pieces of 64 columns of 64 channels the weights are."""
    first = unit.channels // PANEL * (1 if unit.bottleneck else 9)
    return first + 9 + (unit.channels_out // PANEL if unit.bottleneck else 0)


def missing_unit(unit, device):
    """Return for what there is no CUDA kernel; None where there is one."""
    if unit.element not in ("Half", "BFloat16") or not device.bulk_copy:
        return f"{unit.element} on this GPU"
    if unit.channels % PANEL or unit.channels_out % PANEL:
        return f"channels that are no multiples of {PANEL}"
    if unit.width != WIDTH or (not unit.bottleneck and unit.channels_out != WIDTH):
        return f"layers of {unit.width} and {unit.channels_out} channels"
    pixels = unit.rows * math.prod(unit.block)
    if pixels * max(unit.channels, unit.channels_out) >= 2**34 or max(unit.block) > 8192:
        return f"stacks of {unit.rows} blocks of {unit.block} pixels"
    if max(unit.image) >= 2**31 - 2**16:
        return f"images as large as {unit.image}"
    if plan_unit(unit, device) is None:
        return f"blocks of {unit.block} pixels, or that many weights"
    return None


@functools.lru_cache(maxsize=1024)
def plan_unit(unit, device):
    """Return the plan, or None where none fits."""
    return next(unit_plans(unit, device), None)


def unit_plans(unit, device):
    """Yield plans that fit the device."""
    for height, width, pieces in _PIECES:
        if unit.block[0] % height or unit.block[1] % width:
            continue
        for x_stages in (4, 3, 2, 1):
            plan = UnitPlan(device.hopper, (height, width), pieces, x_stages)
            if plan.shared_bytes(unit) <= device.shared_bytes:
                yield plan
                return  # the largest piece has the smallest rim
        return


def unit_cost(plan, unit, device):
    """Estimate the cycles of a launch: fitted to runs of 55 to 1100 blocks on an H200."""
    rounds = math.ceil(max(1, plan.tiles(unit, unit.expected)) / device.multiprocessors)
    chunks = unit.channels // PANEL * (1 if unit.bottleneck else 9) + 9 / 2
    chunks += unit.channels_out // PANEL / 2 if unit.bottleneck else 0
    product = chunks * (300 if plan.wgmma else 800)
    results = 3000 + (1000 * unit.channels_out // PANEL if unit.bottleneck else 0)
    return 4700 + rounds * (product + results)


def apart_cost(unit, device):
    """Estimate the cycles of one launch for each layer."""
    return sum(plan_cost(plan_stack_conv(c, device), c, device) for c in unit.layers())


def worth_it(unit, device):
    """Whether one kernel is faster than one for each layer: if each thread block has one tile."""
    plan = plan_unit(unit, device)
    if plan.tiles(unit, unit.expected) > device.multiprocessors:
        return False
    return unit_cost(plan, unit, device) < apart_cost(unit, device)
