"""Which kernel a convolution over a kernel map runs, and which instance of it.

By runs on an H200, or an estimate fitted to such. It depends on sizes alone.
"""

import functools
import itertools
import math
from typing import NamedTuple

from ..core.arrays import vector_bytes
from ..core.device import RESERVED
from ..dense.activation import ACTIVATIONS
from .site_conv_instances import (
    PANEL,
    ROW,
    FmaPlan,
    MmaPlan,
    OncePlan,
    PipelinedPlan,
    TilesPlan,
)
from .site_tiles import MOST_TAPS, TileShape

MOST_ROWS = 2**31 - 2**8
MOST_BYTES = 2**35  # of features that warps which copy for others read: 32 bits count vectors
_FEWEST_TAPS = 10  # of which rows may be sorted
TAPS_OF_PICTURES = 9  # or fewer
ONCE_PLANS = (OncePlan((16, 32), (1, 1)), OncePlan((32, 32), (2, 1)), OncePlan((64, 32), (2, 1)))


class Sorted(NamedTuple):
    """Where rows sorted by their taps took less time on an H200 than tiles that read each row once.

    ``more`` and ``most`` are tiles for each multiprocessor; ``more_of_nine`` where there are nine
    taps. Rows have ``row_bytes`` or more.
    """

    plan: PipelinedPlan
    row_bytes: int
    more: float
    most: float = math.inf
    more_of_nine: float = math.inf


class Shared(NamedTuple):
    """Where tiles that thread blocks share took less time on an H200 than all other plans.

    For rows of ``row_bytes`` or more; of several the last that fits is taken. ``tiles`` are ranges
    of the number of tiles for each multiprocessor, ``of_nine`` those for up to nine taps.
    """

    row_bytes: int
    tiles: tuple[tuple[float, float], ...]
    of_nine: tuple[tuple[float, float], ...] = ()


# By output channels, up to so many; 512: any number above 256, by thread blocks side by side.
_SHARED_TILES = {
    64: PipelinedPlan((128, 64), (2, 1), 8, shared=True),
    128: PipelinedPlan((128, 128), (2, 1), 6, shared=True),
    256: PipelinedPlan((128, 256), (1, 2), 4, shared=True),
    512: PipelinedPlan((128, 256), (1, 2), 4, shared=True),
}
# By bytes of a number, of which four are rounded to TF32. Up to nine taps other plans are faster,
# except for some floats: more rows have each tap, so that fewer are left out.
_SHARED = {
    2: {
        64: (Shared(256, ((0.06, 0.5),)), Shared(512, ((0, 1.3),))),
        128: (Shared(256, ((0.06, 0.85), (1, 2))), Shared(384, ((0, 2),))),
        256: (Shared(256, ((0.5, 1),)), Shared(384, ((0.06, 2),)), Shared(640, ((0, math.inf),))),
        512: (Shared(256, ((0.5, 1),)), Shared(512, ((0.5, math.inf),)),
              Shared(640, ((0, math.inf),))),
    },
    4: {
        64: (Shared(256, ((0, 0.85),)), Shared(384, ((0, 3),), ((0, 0.7),))),
        128: (Shared(256, ((0, 0.85),)), Shared(384, ((0, 2),), ((0, 0.55),)),
              Shared(1024, ((0, 2),), ((0, 0.7),))),
        256: (Shared(256, ((0.75, math.inf),)), Shared(384, ((0, 2.6),), ((0, 0.5),)),
              Shared(1024, ((0, 2.6),), ((0, 0.7),)), Shared(1152, ((0, math.inf),), ((0, 0.5),))),
        512: (Shared(1024, ((0, math.inf),), ((0, 0.5),)),),
    },
}  # fmt: skip
_SORTED = {  # by bytes of a number, of which four are rounded to TF32
    2: (
        Sorted(PipelinedPlan((256, 128), (2, 1), 4), 256, 1),
        Sorted(PipelinedPlan((128, 256), (1, 2), 4), 128, 1, more_of_nine=1.6),
        Sorted(PipelinedPlan((256, 64), (2, 1), 4), 512, 1),
    ),
    4: (
        Sorted(PipelinedPlan((256, 128), (2, 1), 4), 384, 1, more_of_nine=0.75),
        Sorted(PipelinedPlan((128, 128), (2, 1), 6), 384, 0.5, more_of_nine=0.5),
        Sorted(PipelinedPlan((128, 256), (1, 2), 4), 512, 1, more_of_nine=1),
    ),
}
_WIDEST_SORTED = {2: 512, 4: 1024}  # bytes of a row
_LAUNCH, _FIRST_ROWS = 5000, 900  # cycles apart from products; more where rows are copied ahead
_COPIED_AHEAD = TilesPlan(TileShape(128, 384, True), 64, (2, 1), 4, 2, 1, "TileWgmma")
# The second is for the taps of pictures: a tile reads fewer rows with these than with more taps.
_WIDE = TilesPlan(TileShape(128, 384, True), 128, (2, 1), 4, 1, 1, "TileWgmma")
_WIDE_OF_PICTURES = TilesPlan(TileShape(128, 320, True), 128, (2, 1), 5, 2, 1, "TileWgmma")
_THREE_AT_ONCE = TilesPlan(TileShape(256, 640), 32, (8, 1), 0, 1, 3)
_TWO_AT_ONCE = TilesPlan(TileShape(192, 512), 32, (3, 1), 4, 1, 2, "TileWgmma")
_WIDE_OF_NARROW = TilesPlan(TileShape(256, 640), 64, (4, 1), 0, 1, 1, "TileWgmma")
_LARGEST = TilesPlan(TileShape(256, 640, True), 64, (4, 1), 4, 2, 1, "TileWgmma")
_WITHOUT_REGISTERS = {  # for an activation, by bytes of a number
    "silu": {
        2: (_THREE_AT_ONCE, _WIDE_OF_NARROW),
        4: (_THREE_AT_ONCE, _TWO_AT_ONCE, _LARGEST),
    },
    "gelu": {2: (_WIDE_OF_NARROW,)},
}
# Tilings with the bytes of a part, and the cycles of a tap and part of as many tiles as a
# multiprocessor has at once: one, two, ...
_TILINGS = [
    (TilesPlan(TileShape(256, 640), 16, (8, 1), 0, 1, 3, "NarrowMma"), 32, (336, 521, 726)),
    (TilesPlan(TileShape(128, 384), 16, (8, 1), 0, 1, 3, "NarrowMma"), 32, (242, 354, 514)),
    (TilesPlan(TileShape(128, 384), 16, (4, 1), 0, 1, 5, "NarrowMma"), 32,
     (264, 347, 434, 596, 596)),
    (_THREE_AT_ONCE, 32, (400, 654, 981)),
    (TilesPlan(TileShape(128, 384), 32, (8, 1), 0, 2, 3), 32, (260, 426, 639)),
    (TilesPlan(TileShape(256, 640), 32, (4, 1), 0, 1, 1, "TileWgmma"), 64, (562,)),
    (TilesPlan(TileShape(256, 640), 32, (4, 1), 0, 1, 2, "TileWgmma"), 64, (577, 1165)),
    (TilesPlan(TileShape(192, 512), 32, (3, 1), 0, 1, 2, "TileWgmma"), 64, (483, 790)),
    (TilesPlan(TileShape(128, 384), 32, (2, 1), 0, 1, 2, "TileWgmma"), 64, (376, 539)),
    (TilesPlan(TileShape(128, 384), 32, (8, 1), 0, 1, 2), 64, (433, 631)),
    (TilesPlan(TileShape(128, 384), 64, (2, 1), 0, 1, 1, "TileWgmma"), 64, (452,)),
    (TilesPlan(TileShape(192, 512), 64, (3, 1), 0, 1, 1, "TileWgmma"), 64, (628,)),
    (_WIDE_OF_NARROW, 64, (735,)),
    (TilesPlan(TileShape(64, 192), 32, (1, 1), 3, 1, 4, "TileWgmma"), ROW, (434, 686, 990, 992)),
    (TilesPlan(TileShape(128, 384), 32, (2, 1), 4, 1, 2, "TileWgmma"), ROW, (604, 966)),
    (_TWO_AT_ONCE, ROW, (842, 1377)),
    (TilesPlan(TileShape(256, 640), 32, (4, 1), 6, 2, 1, "TileWgmma"), ROW, (875,)),
    (TilesPlan(TileShape(64, 192), 64, (1, 1), 3, 1, 4, "TileWgmma"), ROW, (687, 850, 1130, 1138)),
    (TilesPlan(TileShape(128, 384, True), 64, (2, 1), 4, 1, 2, "TileWgmma"), ROW, (733, 1050)),
    (_COPIED_AHEAD, ROW, (645,)),
    (TilesPlan(TileShape(192, 512, True), 64, (3, 1), 4, 2, 1, "TileWgmma"), ROW, (760,)),
    (TilesPlan(TileShape(256, 640, True), 64, (4, 1), 4, 1, 1, "TileWgmma"), ROW, (1020,)),
    (_LARGEST, ROW, (985,)),
    (_WIDE, ROW, (808,)),
    (_WIDE_OF_PICTURES, ROW, (820,)),
    (TilesPlan(TileShape(192, 448, True), 128, (3, 1), 4, 2, 1, "TileWgmma"), ROW, (1170,)),
    (TilesPlan(TileShape(64, 192), 64, (3, 1), 9, 2, 1, "SplitWgmma"), ROW, (460,)),
    (TilesPlan(TileShape(64, 192), 32, (3, 1), 15, 2, 1, "SplitWgmma"), ROW, (400,)),
]  # fmt: skip
# Columns of the widest tiles whose weights stay in shared memory, by the bytes of a part: those of
# other channels read the same rows.
_WIDEST_STAYING = {32: 32, 64: 64}
# With more parts sums over all rows sorted leave out more.
_MOST_PARTS = {2: 4, 4: 2}  # by bytes of a number
_FEWEST_TILED, _FEWEST_TILED_TAPS = 64, 8  # rows, taps


def rounded(conv):
    """Return sizes with numbers of sites rounded up, by a sixty-fourth at most.

    Plans are made of these: inputs of similar numbers of sites have the same, which is kept.
    """
    sources, targets = map(_rounded, (conv.sources, conv.targets))
    return conv._replace(sources=sources, targets=targets)


def _rounded(sites):
    step = max(sites.bit_length() - 7, 0)  # 64 to 128 numbers for each power of two
    return min(-(-sites >> step) << step, max(sites, MOST_ROWS - 1))


@functools.lru_cache(maxsize=1024)
def plan_site_conv(conv, device):
    """Return the plan of a convolution; None where there is no kernel."""
    if max(conv.sources, conv.targets, conv.taps * conv.channels) >= MOST_ROWS:
        return None
    if has_products(conv, device):
        found = (
            _plan_once(conv, device)
            or _plan_shared(conv, device)
            or _plan_sorted(conv, device)
            or _plan_tiles(conv, device)
        )
        if found is not None:
            return found
        best = min(
            _candidates(conv, device), key=lambda plan: _cost(plan, conv, device), default=None
        )
        if best is not None:
            return best
    per_group = conv.channels_out // conv.groups
    vector = vector_bytes(per_group * conv.element_bytes, conv.alignment_out) // conv.element_bytes
    return FmaPlan(vector)


def all_resident(plan, conv, device):
    """Whether the GPU holds all thread blocks of an OncePlan or a TilesPlan at once."""
    return math.prod(plan.tiles(conv)) <= device.multiprocessors * plan.blocks


def overlaps(plan, conv, device):
    """Whether launches of an OncePlan or a TilesPlan begin while the one ahead of them ends.

    Some tiles of 192 rows have no registers for that.
    """
    if isinstance(plan, TilesPlan) and plan.order.rows == 192 and plan.columns != 64:
        return False
    return all_resident(plan, conv, device)


def _plan_once(conv, device):
    """Return the smallest of the tiles of which a multiprocessor has one at most, or None.

    By runs on an H200, where they then took less time than most others, and no lists of tiles are
    made for them. The largest do not pay for floats and more taps than those of pictures.
    """
    if not (device.hopper and conv.alignment_in == conv.alignment_out == 16):
        return None
    plans = ONCE_PLANS
    if conv.element == "float" and conv.taps > TAPS_OF_PICTURES:
        plans = plans[:-1]
    for plan in plans:
        if not all_resident(plan, conv, device):
            continue
        if plan.shared_bytes(conv) + RESERVED <= device.shared_bytes:
            return plan
    return None


def _plan_shared(conv, device):
    """Return the plan of _SHARED for a convolution; or None."""
    columns = next((c for c in _SHARED_TILES if conv.channels_out <= c), max(_SHARED_TILES))
    if conv.channels_out <= PANEL // 2 or not _has_pipelined(conv, device):
        return None
    plan, row = _SHARED_TILES[columns], conv.channels * conv.element_bytes
    known = [its for its in _SHARED[conv.element_bytes][columns] if its.row_bytes <= row]
    if not known or plan.shared_bytes(conv) > device.shared_bytes:
        return None
    each, (_, tiles, of_nine) = plan.tiles(conv) / device.multiprocessors, known[-1]
    taken = tiles if conv.taps > TAPS_OF_PICTURES else of_nine
    return plan if any(more < each <= most for more, most in taken) else None


def _plan_sorted(conv, device):
    """Return the plan of _SORTED for a convolution; or None."""
    row = conv.channels * conv.element_bytes
    if row > _WIDEST_SORTED[conv.element_bytes] or conv.taps < 9:
        return None
    if not _has_pipelined(conv, device):
        return None
    for plan, row_bytes, more, most, more_of_nine in _SORTED[conv.element_bytes]:
        columns, each = plan.tile[1], plan.tiles(conv) / device.multiprocessors
        if row < row_bytes or not columns // 2 < conv.channels_out <= columns:
            continue
        fits = plan.shared_bytes(conv) <= device.shared_bytes
        if fits and (more if conv.taps > 9 else more_of_nine) < each <= most:
            return plan
    return None


def _has_pipelined(conv, device):
    """Whether a convolution may run by a PipelinedPlan."""
    whole = conv.channels * conv.element_bytes % ROW == 0
    small = conv.sources * conv.channels * conv.element_bytes < MOST_BYTES
    return device.hopper and whole and small and conv.alignment_in == conv.alignment_out == 16


def _plan_tiles(conv, device):
    """Return the fastest plan of tiles that read each row once, by runs on an H200; or None."""
    row = conv.channels * conv.element_bytes
    parts = -(-row // ROW)
    if not (device.hopper and TilesPlan.copied(conv) and conv.alignment_out == 16):
        return None
    if not _FEWEST_TILED_TAPS <= conv.taps <= MOST_TAPS or conv.targets < _FEWEST_TILED:
        return None
    if parts > _MOST_PARTS[conv.element_bytes]:
        return None

    def cost(tiling):
        plan, _, cycles = tiling
        tiles = -(-math.prod(plan.tiles(conv)) // device.multiprocessors)
        full, rest = divmod(tiles, plan.blocks)  # waves of the thread blocks of a multiprocessor
        start = _LAUNCH + _FIRST_ROWS * (plan.stages > 0 and plan.buffers == 2)
        return start + conv.taps * parts * (full * cycles[-1] + (cycles[rest - 1] if rest else 0))

    fitting = _fitting_tilings(conv._replace(sources=0, targets=0), device)
    if not fitting:
        return None
    plan = min(fitting, key=cost)[0]
    return alone(plan) if math.prod(plan.tiles(conv)) <= device.multiprocessors else plan


def alone(plan):
    """Return the instance of a TilesPlan with the registers of a multiprocessor for itself.

    Where each has one tile at most, it took up to 8% less time on an H200; not by NarrowMma.
    """
    return plan if plan.engine == "NarrowMma" else plan._replace(blocks=1)


@functools.lru_cache(maxsize=1024)
def _fitting_tilings(conv, device):
    """Return those of _TILINGS that a convolution may have, whatever its numbers of rows."""
    left_out = [_WIDE if conv.taps <= TAPS_OF_PICTURES else _WIDE_OF_PICTURES]
    if conv.element == "float":  # whose rows those that multiply copy and round
        left_out.append(_COPIED_AHEAD)
    left_out += _WITHOUT_REGISTERS.get(ACTIVATIONS[conv.activation], {}).get(conv.element_bytes, ())

    def takes(columns, several):
        fewest = columns // 2 if columns > 16 else 0
        return fewest < conv.channels_out and (several or conv.channels_out <= columns)

    def fits(plan, size):
        several = plan.side_by_side or plan.columns == _WIDEST_STAYING.get(size)
        return (
            plan.row_bytes(conv) == size
            and plan not in left_out
            and takes(plan.columns, several)
            and device.resident(plan.shared_bytes(conv)) >= plan.blocks
        )

    return [tiling for tiling in _TILINGS if fits(*tiling[:2])]


def has_products(conv, device):
    """Whether tensor cores take these numbers."""
    if conv.groups > 1 or conv.element == "double":
        return False
    if conv.element == "float" and not conv.tf32:
        return False
    return device.tensor_floats or conv.element == "Half"


def _candidates(conv, device):
    """Yield plans that fit the device, of each tile that with the most stages."""
    kinds = [MmaPlan, PipelinedPlan] if _has_pipelined(conv, device) else [MmaPlan]
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
    return conv.chunks() * max(each * share, 0.95) * chunk + sort
