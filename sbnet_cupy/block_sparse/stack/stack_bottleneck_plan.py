"""Which instance of ``stack_bottleneck`` computes a unit, and whether it is worth it.

Template arguments depend on dtype, channels, blocks and on how many of those are expected; never on
the count itself.
"""

import functools
import itertools
import math
import operator
from typing import NamedTuple

from ..bottleneck.config import UnitCase, UnitConfig, configuration, fits, rim_pixels
from .stack_conv_plan import StackConv, plan_cost, plan_stack_conv
from .stack_unit_plan import StackUnit, missing_unit, plan_unit, unit_cost


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


# Pixels of a piece of a block, and how many pieces make a tile. Large ones have small rims; small
# ones, of 16 and 32 pixels, are more tiles where blocks are few.
_TILES = (((8, 8), (1,)), ((4, 8), (1,)), ((4, 4), (1, 2, 4)), ((2, 4), (2, 4)), ((2, 2), (4, 8)))


def bottleneck_plans(unit, device):
    """Yield plans that fit the device."""
    for piece, pieces in _tiles(unit.block):
        tile = (piece[0] * pieces, piece[1])
        clusters = (1, 2, 4) if device.hopper else (1,)
        engines = (True, False) if device.hopper and tile == (8, 8) else (False,)
        for wide, cluster, warps in itertools.product(engines, clusters, (4, 6, 8, 12)):
            for resident in (1, 2, 4):
                plan = _plan(unit, tile, warps, cluster, resident, wide, pieces, device)
                if plan is not None:
                    yield plan


def _tiles(block):
    """Yield pixels of a piece that divides the block, and how many pieces make a tile."""
    largest = None
    for piece, counts in _TILES:
        if any(b % p for b, p in zip(block, piece, strict=True)):
            continue
        largest = largest or piece
        if piece == largest or math.prod(piece) >= 16:
            for pieces in counts:
                yield piece, pieces


def _plan(unit, tile, warps, cluster, resident, wide, pieces, device):
    """Return the plan of a shape, or None if the work does not divide so, or it does not fit."""
    small, pixels = unit.case.element_bytes == 2, math.prod(tile)
    if warps * resident > 16:
        return None
    if warps == 12 and not wide and not (small and (pieces == 1 or pixels == 16)):
        return None  # it would spill
    config = configuration(unit.case, tile, warps, cluster, resident, wide, False, pieces)
    if config is None or _sums_of_first(config) > (_MOST_SUMS if small else _MOST_SUMS // 2):
        return None
    ahead = config.ahead
    if not wide:  # fewer registers for what is on its way
        few = warps * resident == 16 or (warps == 12 and pixels > 16)
        most = (3 if few else ahead) if small else 2
        chunks = config.chunks // config.split1
        ahead = max(a for a in range(1, min(most, ahead) + 1) if chunks % a == 0)
    plan = BottleneckPlan(
        config._replace(ahead=ahead, blocks=resident, bulk_copy=device.bulk_copy)
    )
    return plan if fits(plan.shared_bytes(unit), resident, device) else None


def _sums_of_first(config):
    """Registers for the sums of the first product, of all pixels where warps share the chunks."""
    rows = config.warps // config.split1
    groups = -(-rim_pixels(config.tile, config.pieces) // 16)
    turns = -(-groups // rows) if config.split1 > 1 else 1
    return turns * config.mid // config.cluster // 2


@functools.lru_cache(maxsize=1024)
def plan_bottleneck(unit, device):
    """Return the best plan, or None where none fits."""
    plans = bottleneck_plans(unit, device)
    return min(plans, key=lambda plan: bottleneck_cost(plan, unit, device), default=None)


# How many multiprocessors of 132 clusters of so many thread blocks can use at once.
_CLUSTERED = {1: 132, 2: 128, 4: 120}
_REGISTERS = 168  # that a thread takes where it may
_MOST_SUMS = 96  # of those, for sums of the first product: more, and others would spill
# Cycles of a launch; of a round, and of one with clusters; of a warp's products one after another
# and of all that a multiprocessor has to do, by mma.sync and by wgmma; of a wait for x; of 1000
# bytes of x; of a warp's results of 16 pixels; of its 16 pixels of the first product.
_CYCLES = (2570, 1990, 1200, 2.21, 7.12, 180, 2.91, 0.674, 50, 554, 585)
_NORM = 1000  # cycles of a norm's launch, beside those in which memory is read and written


def bottleneck_cost(plan, unit, device):
    """Estimate the cycles of a launch: fitted to runs of 29 to 286 blocks on an H200."""
    return sum(map(operator.mul, _CYCLES, _amounts(plan, unit, device)))


def _amounts(plan, unit, device):
    """Return how much a launch does of what ``_CYCLES`` has the cycles of."""
    config, threads = plan.config, plan.config.threads
    registers = min(_REGISTERS, 65536 // (config.blocks * threads) // 8 * 8)
    resident = device.resident(plan.shared_bytes(unit))
    resident = max(1, min(resident, 65536 // (registers * threads)))
    spots = device.multiprocessors * _CLUSTERED[config.cluster] // 132
    blocks = max(1, plan.tiles(unit, unit.expected)) * config.cluster
    rounds = math.ceil(blocks / (spots * resident))
    active = min(resident, math.ceil(blocks / spots))
    # Products of 16 pixels, 32 bytes of K and 8 channels of the result: of a warp, and of all.
    own, pixels = config.mid // config.cluster / 8, math.prod(config.tile) // 16
    rim = rim_pixels(config.tile, config.pieces)
    groups, steps = -(-rim // 16), config.mid * unit.case.element_bytes / 32
    turns, chunks = -(-groups // (config.warps // config.split1)), config.chunks / config.split1
    down, across, depth = config.second
    parts = unit.channels // config.cluster / config.slice
    turns3 = math.ceil(parts / (config.warps // config.rows3)) * (pixels / config.rows3)
    last = steps * config.slice / 8
    warp = turns * chunks * 2 * own + 9 * steps * pixels * own / (down * across * depth)
    warp += turns3 * last
    whole = groups * config.chunks * 2 * own + 9 * steps * pixels * own + parts * pixels * last
    wide = config.engine == "WarpGroup"
    each = (
        1, config.cluster > 1, (not wide) * warp, wide * warp, turns * chunks / config.ahead,
        (not wide) * active * whole, wide * active * whole,
        active * rim * unit.channels * unit.case.element_bytes / 1000, turns3, turns,
    )  # fmt: skip
    return 1, *(rounds * amount for amount in each)


def apart_cost(unit, device):
    """Estimate the cycles of a norm, and of the layers by a launch each or by one for all three."""
    layers = list(unit.layers())
    norm = _NORM + layers[0]._replace(channels_out=unit.channels).memory_cycles(False)
    costs = [sum(plan_cost(plan_stack_conv(c, device), c, device) for c in layers)]
    plain = StackUnit(
        element=unit.element, rows=unit.rows, images=unit.images, grid=unit.grid, block=unit.block,
        image=unit.image, channels=unit.channels, width=unit.width, channels_out=unit.channels,
        bottleneck=True, inner=1, activation=0, expected=unit.expected,
    )  # fmt: skip
    if missing_unit(plain, device) is None:
        costs.append(unit_cost(plan_unit(plain, device), plain, device))
    return norm + min(costs)


def worth_it(unit, device):
    """Whether one kernel is faster than a norm and what computes the layers without it."""
    plan = plan_bottleneck(unit, device)
    return bottleneck_cost(plan, unit, device) < apart_cost(unit, device)
