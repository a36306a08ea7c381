"""Which instance of ``stack_bottleneck`` computes a unit, and whether it is worth it.

Template arguments depend on dtype, channels, blocks and on how many of those are expected; never on
the count itself.
"""

import functools
import math
from typing import NamedTuple

from ..bottleneck.config import UnitCase, UnitConfig, configuration, fits, rim_pixels
from .stack_conv_plan import StackConv, plan_cost, plan_stack_conv


class StackBottleneck(NamedTuple):
    """A pre-activation residual unit on a stack: 1x1, 3x3 and 1x1 layers of stride 1.

    Each follows a norm and a relu; what the unit reads is added to its result.
    """

    element: str  # C++ type: Half, BFloat16, or float, which is multiplied as tf32
    rows: int  # of the stacks: their capacity
    images: int
    grid: tuple[int, int]
    block: tuple[int, int]
    image: tuple[int, int]
    channels: int
    width: int  # channels between the layers
    expected: int  # about how many rows will be active

    @property
    def case(self):
        """The unit as the planner of fused_bottleneck sees it."""
        return UnitCase(
            self.element, 4 if self.element == "float" else 2, self.channels, self.width, False
        )

    def layers(self):
        """Return the layers as convolutions of their own."""
        channels = (self.channels, self.width, self.width, self.channels)
        lanes = 16 // self.case.element_bytes
        for number, size in enumerate((1, 3, 1)):
            yield StackConv(
                element=self.element, rows=self.rows, images=self.images, grid=self.grid,
                block=self.block, block_out=self.block, image=self.image, image_out=self.image,
                channels=channels[number], channels_out=channels[number + 1], kernel=(size, size),
                strides=(1, 1), dilation=(1, 1), pads=(size // 2, size // 2),
                activation=int(number < 2), vectors_in=channels[number] % lanes == 0,
                vectors_out=channels[number + 1] % lanes == 0, expected=self.expected,
                residual=number == 2,
            )  # fmt: skip


class BottleneckPlan(NamedTuple):
    """An instance: the template arguments are those of its configuration."""

    config: UnitConfig

    def template(self, unit):
        """Return the template arguments."""
        return self.config.template(unit.case, stack=True)

    def tiles(self, unit, rows):
        """Number of tiles of so many rows of the stack."""
        pixels = math.prod(self.config.tile)  # of as many pieces of a block
        return -(-rows * math.prod(unit.block) // pixels)

    def shared_bytes(self, unit):
        """Dynamic shared memory of a thread block: the unit's, and where two tiles' pixels lie."""
        rows = -(-rim_pixels(self.config.tile, self.config.pieces) // 64) * 64
        return self.config.shared_bytes(unit.case) + 2 * rows * 4


def missing_bottleneck(unit, device):
    """Return for what there is no CUDA kernel; None where there is one."""
    if unit.element != "Half" and not device.tensor_floats:
        return f"{unit.element} on this GPU"
    if unit.channels * unit.case.element_bytes % 16:
        return f"{unit.channels} channels that are not whole vectors of 16 bytes"
    pixels = unit.rows * math.prod(unit.block)
    if pixels >= 2**30 or max(unit.block) > 8192 or max(unit.image) >= 2**31 - 2**16:
        return f"stacks of {unit.rows} blocks of {unit.block} pixels"
    if plan_bottleneck(unit, device) is None:
        return f"blocks of {unit.block} pixels, or that many weights"
    return None


# Pixels of a piece of a block, and pieces of a tile: the largest piece that divides a block has the
# smallest rim.
_TILES = (((8, 8), (1,)), ((4, 8), (1,)), ((4, 4), (1, 2, 4)), ((2, 4), (2, 4)), ((2, 2), (4, 8)))


def bottleneck_plans(unit, device):
    """Yield plans that fit the device."""
    case, found = unit.case, 0
    for piece, counts in _TILES:
        if any(b % p for b, p in zip(unit.block, piece, strict=True)):
            continue
        for pieces in counts:
            tile = (piece[0] * pieces, piece[1])
            shapes = [
                (warps, cluster, resident, wide)
                for wide in ((True, False) if device.hopper and tile == (8, 8) else (False,))
                for cluster in ((1, 2, 4) if device.hopper else (1,))
                for warps in (4, 6, 8, 12)
                for resident in (1, 2, 4)
                if warps * resident <= 16
            ]
            for warps, cluster, resident, wide in shapes:
                config = configuration(case, tile, warps, cluster, resident, wide, False, pieces)
                if config is None:
                    continue
                plan = BottleneckPlan(
                    config._replace(blocks=resident, bulk_copy=device.bulk_copy)
                )
                if fits(plan.shared_bytes(unit), resident, device):
                    found += 1
                    yield plan
        if found and piece != (8, 8):
            return


@functools.lru_cache(maxsize=1024)
def plan_bottleneck(unit, device):
    """Return the best plan, or None where none fits."""
    plans = bottleneck_plans(unit, device)
    return min(plans, key=lambda plan: bottleneck_cost(plan, unit, device), default=None)


def bottleneck_cost(plan, unit, device):
    """Estimate the cycles of a launch."""
    return 0


def apart_cost(unit, device):
    """Estimate the cycles of a norm and of one launch for each layer."""
    return sum(plan_cost(plan_stack_conv(c, device), c, device) for c in unit.layers())


def worth_it(unit, device):
    """Whether one kernel is faster than one for each layer."""
    plan = plan_bottleneck(unit, device)
    return bottleneck_cost(plan, unit, device) < apart_cost(unit, device)
