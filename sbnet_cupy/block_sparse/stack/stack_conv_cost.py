"""About how long an instance of ``stack_conv`` takes: what plans are chosen by.

The numbers were fitted to runs on an H200, of layers alone and in networks, where what is best
alone is not always best (cuda_src/README.md).
"""

import math
from typing import NamedTuple

from .stack_patch_plan import ROW


class _Rates(NamedTuple):
    """Cycles of a launch, of a tile and of a chunk, fitted to runs on an H200."""

    launch: float
    chunk: float  # of a chunk, beside what follows
    pixel: float  # of a pixel of a chunk
    channel: float  # of an output channel of a chunk
    end: float  # of a tile, beside what follows
    result: float  # of a number of a tile
    added: float  # of a number of the residual
    sent: float  # of a number of a sum of several thread blocks
    brought: float  # bytes a cycle to each multiprocessor, where all take from the L2 cache


_BULK = _Rates(960, 122, 1.76, 1.26, 1690, 0.135, 0.074, 0.354, 48)  # pixels come in bulk
_GATHERED = _Rates(3850, 4.4, 4.88, 1.17, 200, 0.139, 0.034, 0.473, 36.8)  # threads copy them
_BROUGHT = 60  # bytes a cycle, in bulk, to the thread blocks of a multiprocessor together
# The last of the rates, for tiles of 64 pixels that threads copy, by output channels.
_NARROW = {64: 24.5, 128: 45}
# Of an H200's 132 multiprocessors: how many clusters of so many thread blocks can use at once.
_CLUSTERED = {2: 128, 3: 120, 4: 120, 8: 112}
# Cycles in which so many thread blocks add up their sums.
_EXCHANGES = {2: 1870, 3: 1690, 4: 300, 8: 240}
# How much longer chunks take with so few stages, and with two teams that copy.
_FEW_STAGES = {2: 1.5, 3: 1.13}
_TWO_TEAMS = 0.957
_MORE_TAPS = 0.21  # of the time of a pixel, for each tap more in a chunk, where it has four or more
_PRODUCT = 1.28  # how much longer products take than tensor cores need
# Of images and windows of one pixel: cycles in which a box of a block comes, and fewer cycles of a
# launch where threads look up the blocks of their own pixels.
_ASKED, _LOOKED_UP = 20, 1650
_BESIDE = 1.39  # how much longer results of a tile take for each thread block beside it


def launch_cost(plan, conv, device):
    """Estimate the cycles of a launch.

    The tiles of a multiprocessor's thread blocks come in rounds, of which the last may have fewer,
    or tiles that are cut; see ``Rounds``.
    """
    rates = _BULK if plan.bulk else _GATHERED
    pixels, columns = plan.tile
    staged, groups = plan.results > 0, math.prod(plan.warps)
    chunks = math.ceil(conv.chunks / plan.split)
    per_product = 32 if plan.engine == "TileWgmma" else 16  # numbers of a chunk's product a cycle
    few = _FEW_STAGES.get(plan.stages, 1.0) if plan.stages < chunks and not plan.direct else 1.0
    per_pixel = rates.pixel * (_TWO_TEAMS if plan.teams > 1 else 1.0)
    taps = ROW // (conv.channels * conv.element_bytes)  # of a chunk
    if taps >= 4 and plan.cached:
        per_pixel *= 1 + _MORE_TAPS * (taps - 1)
    asked = _ASKED * plan.boxes(conv) if plan.bulk and conv.of_images else 0
    slow = (0.024 + conv.slowness) / groups

    def tile(height, active):
        """Cycles of a tile of so many pixels, where so many thread blocks are side by side."""
        chunk = max(
            few * (rates.chunk + per_pixel * height + rates.channel * columns),
            _PRODUCT * active * height * columns / per_product,
            active * asked * height / pixels,
        )
        numbers = height * columns
        result = rates.result + rates.added * conv.residual + 0.08 * staged
        end = rates.end + 300 * staged + numbers * (result * (1 + _BESIDE * (active - 1)) + slow)
        if plan.split > 1:
            end += _EXCHANGES[plan.split] + rates.sent * numbers * active
        if plan.bulk:  # what the ring holds comes sooner
            beside = active * (height + columns) * ROW / _BROUGHT
            end += max(0, chunks - plan.stages) * max(0, beside - chunk)
        return chunks * chunk + end

    spots = device.multiprocessors
    if plan.clustered:
        spots = spots * _CLUSTERED[plan.split] // 132
    blocks = max(1, plan.tiles(conv, conv.expected)) * plan.split
    resident = _resident(plan, conv, device)
    whole, rest = divmod(blocks, spots * resident)
    parts = plan.parts
    while parts > 1 and rest * parts > spots:
        parts = 1 if parts % 2 else parts // 2
    path = whole * tile(pixels, resident)
    if rest:
        path += tile(pixels // parts, math.ceil(rest / spots))
    if plan.parts > 1:
        path *= 1.02
    search = 1080 + 0.154 * pixels * math.prod(conv.kernel) if plan.cached else 0
    path += (whole - (rest == 0)) * 0.3 * search
    # What the second-level cache, and memory, deliver to all.
    rate = rates.brought
    if pixels == 64 and not plan.bulk:
        rate = _NARROW.get(columns, rate)
    brought = blocks * chunks * (pixels + columns) * ROW / device.multiprocessors / rate
    memory = 0.85 * conv.memory_cycles(staged) + 0.1 * path
    launch = rates.launch - _LOOKED_UP * plan.direct
    return launch + search + max(path, brought + rates.end, memory)


def _resident(plan, conv, device):
    """Return about how many thread blocks of a plan a multiprocessor holds."""
    numbers = math.prod(plan.tile) // (plan.threads - 128 * plan.teams * plan.pipelined)
    registers = 65536 // (plan.threads * (numbers + 64))
    room = device.resident(plan.shared_bytes(conv))
    return max(1, min(room, max(plan.blocks, registers)))
