"""Which instance of the fused residual unit: tile, cluster, warps, engine, shared memory.

Rules rather than a table: which shapes of work suit few tiles, one for each multiprocessor, or many
was measured on an H200; sizes, alignment and shared memory decide the rest.
"""

import functools
import math
from typing import NamedTuple

from ..conv.config import halo_plane_bytes, tiles_of_block

_CHUNK = 64  # bytes of channels of x that a lane group reads together
_VECTOR = 16
_MOST_REGISTERS = 65536


class UnitCase(NamedTuple):
    """A residual unit as the planner sees it."""

    element: str  # C++ type
    element_bytes: int
    channels: int
    channels_mid: int
    tight: bool  # the first scale and shift are of the element type


class UnitConfig(NamedTuple):
    """Template arguments of ``fused_bottleneck``, in words."""

    engine: str  # MmaSync or WarpGroup
    chunks: int  # of input channels
    mid: int  # bottleneck channels, rounded up
    tile: tuple[int, int]
    cluster: int
    warps: int
    split1: int  # warps that share the input channels of the first product
    second: tuple[int, int, int]  # warps that share pixels, channels, K
    rows3: int  # warps that share the pixels of the third product
    slice: int  # output channels made at a time
    ahead: int  # chunks of x in flight
    blocks: int  # thread blocks on a multiprocessor
    bulk_copy: bool  # whether one thread starts the copy of the weights
    pieces: int = 1  # of a tile, one below the other, each with a rim of its own: stacks alone

    @property
    def threads(self):
        """Of a thread block."""
        return 32 * self.warps

    def packed_bytes(self, case):
        """Bytes of the packed weights of one thread block of a cluster: ``Unit3::PACKED``."""
        lanes = _VECTOR // case.element_bytes
        cin, own = self.chunks * 4 * lanes, self.mid // self.cluster
        planes = self.mid // lanes
        first = self.chunks * 4 * own
        second = -(-9 * planes // 2) * 2 * own
        third = cin // self.cluster * -(-planes // 2) * 2
        return 4 * (2 * cin + 4 * own) + _VECTOR * (first + second + third)

    def shared_bytes(self, case):
        """Dynamic shared memory of a thread block; the sums of ``fused_bottleneck``."""
        lanes = _VECTOR // case.element_bytes
        planes, own = self.mid // lanes, self.mid // self.cluster
        rim = halo_plane_bytes(self.tile, (3, 3), (1, 1), self.pieces)
        middle = halo_plane_bytes(self.tile, (1, 1), (1, 1))
        zeros = rim if planes % 2 else 0
        rows = self.warps // self.split1
        turns = -(-_rim_tiles(self.tile, self.pieces) // rows)
        partials = max(
            (self.split1 - 1) * rows * turns * (own // 8) * 32,
            (self.second[2] - 1) * math.prod(self.tile) * own // 4,
        )
        activations = planes * (rim + middle) + zeros
        return self.packed_bytes(case) + activations + partials * _VECTOR + 24

    def template(self, case, stack=False):
        """Return the template arguments, of ``stack_bottleneck`` for a stack."""
        pieces = (self.pieces,) if stack else ()
        return (
            self.engine, case.element, self.chunks, self.mid, *self.tile, *pieces, self.cluster,
            self.warps, self.split1, *self.second, self.rows3, self.slice, self.ahead, case.tight,
            case.element == "float", self.blocks, self.bulk_copy,
        )  # fmt: skip

    def pack_template(self, case):
        """Return the template arguments of ``pack_bottleneck``."""
        rounded = case.element == "float"
        return case.element, self.chunks, self.mid, self.cluster, self.slice, case.tight, rounded


def rim_pixels(tile, pieces=1):
    """Pixels of a tile with the rims of its pieces."""
    return (tile[0] + 2 * pieces) * (tile[1] + 2)


def _rim_tiles(tile, pieces):
    """Groups of 16 pixels in a tile with its rim."""
    return -(-rim_pixels(tile, pieces) // 16)


@functools.lru_cache(maxsize=1024)
def configure_bottleneck(case, blocks, bsize, device):
    """Return a configuration for about so many active blocks, or None where none fits."""
    for odd in (False, True):  # then with channels that the usual shapes do not divide
        for tile, warps, cluster, resident, wide in _shapes(case, blocks, bsize, device):
            config = configuration(case, tile, warps, cluster, resident, wide and not odd, odd)
            if config is not None and fits(config.shared_bytes(case), resident, device):
                if not device.hopper and case.element_bytes == 2 and warps * resident > 8:
                    config = config._replace(ahead=_fewer_ahead(config))
                return config._replace(blocks=resident, bulk_copy=device.bulk_copy)
    return None


def _fewer_ahead(config):
    """Return the next smaller number of chunks in flight: other GPUs' code needs more registers."""
    chunks = config.chunks // config.split1
    return max((a for a in range(1, config.ahead) if chunks % a == 0), default=1)


def fits(shared, resident, device):
    """Whether a multiprocessor holds so many thread blocks with so much shared memory each."""
    return shared <= device.shared_bytes and device.resident(shared) >= resident


def _shapes(case, blocks, bsize, device):
    """Yield (tile, warps, cluster, thread blocks on a multiprocessor, wgmma), best first."""
    clusters = (1, 2, 4) if device.hopper else (1,)
    small = case.element_bytes == 2
    tiles = blocks * tiles_of_block(bsize, (8, 8))
    broad = 8 * tiles_of_block(bsize, (8, 16)) < 6 * tiles_of_block(bsize, (8, 8))  # little waste
    if tiles < device.multiprocessors / 2:  # latency: small tiles, many warps, shared by clusters
        spread = [c for c in reversed(clusters) if 2 * tiles * c <= device.multiprocessors] or [1]
        for cluster in (*spread, *clusters):
            for warps in (12, 8, 4) if case.channels_mid % 3 == 0 else (8, 4):
                yield (4, 8), warps, cluster, 1, False
    if tiles > device.multiprocessors:  # throughput: several thread blocks hide each other's waits
        shapes = [((8, 8), 4, 4)] if small else []
        if broad and not (small and device.hopper):
            shapes.append(((8, 16), 8, 2))
        shapes.append(((8, 8), 8, 2))
        for tile, warps, resident in shapes:
            yield tile, warps, 1, resident, device.hopper
    for cluster in clusters:
        for warps in (12, 8, 4):  # 16 would spill
            yield (8, 8), warps, cluster, 1, device.hopper
    for cluster in clusters:
        for warps in (8, 4):
            yield (4, 8), warps, cluster, 1, False


def configuration(case, tile, warps, cluster, resident, wide, odd, pieces=1):
    """Return the configuration of a shape, or None if the work does not divide so."""
    lanes = _VECTOR // case.element_bytes
    chunks = -(-case.channels * case.element_bytes // _CHUNK)
    if odd:
        chunks = -(-chunks // cluster) * cluster
    # Whole groups of 8 channels for each block of the cluster, and whole planes.
    mid = -(-case.channels_mid // (8 * cluster)) * 8 * cluster
    if math.prod(tile) <= 32 and warps > 4:  # the workers of K take whole pairs of planes
        mid = -(-mid // (2 * lanes)) * 2 * lanes
    own, rows = mid // cluster, math.prod(tile) // 16
    out = chunks * 4 * lanes // cluster
    if mid % lanes or own % 8 or chunks * 4 * lanes % cluster:
        return None
    second = _second(warps, rows, own // 8, mid // lanes, wide)
    rows3 = rows if wide else math.gcd(rows, warps)
    width = _slice(out, warps // rows3, case, wide, warps, rows // rows3)
    if second is None or width is None or warps % rows3 or (wide and own // 8 > 16):
        return None
    split1 = _split1(warps, chunks, _rim_tiles(tile, pieces), wide)
    most = _ahead(case, warps, cluster, resident, wide)
    ahead = max(a for a in range(1, most + 1) if chunks // split1 % a == 0)
    return UnitConfig(
        "WarpGroup" if wide else "MmaSync", chunks, mid, tile, cluster, warps, split1, second,
        rows3, width, ahead, 1, False, pieces,
    )  # fmt: skip


_WGMMA_GROUPS = (1, 2, 3, 4, 6, 8, 12, 16)  # the widths that wgmma.cuh knows, in groups of 8


def _second(warps, rows, groups, planes, wide):
    """Return how the warps share the second product: pixels, channels, K."""
    choices = []
    for pixels in (rows,) if wide else (1, 2, 4, 8):
        if rows % pixels or warps % pixels:
            continue
        for columns in (1, 2, 3, 4):
            depth, uneven = divmod(warps // pixels, columns)
            if uneven or groups % columns or (depth > 1 and (planes % 2 or planes // 2 % depth)):
                continue
            if wide and groups // columns not in _WGMMA_GROUPS:
                continue
            registers = rows // pixels * (groups // columns) * 4
            if registers <= 64:
                choices.append((pixels != rows, warps > 8 and depth == 1, columns, depth, pixels))
    if not choices:
        return None
    _, _, columns, depth, pixels = min(choices)
    return pixels, columns, depth


def _slice(out, teams, case, wide, warps, rows):
    """Return how many output channels a team of warps makes at a time."""
    if not wide:
        sizes = (32,) if case.element_bytes == 2 else (16,)
    else:
        sizes = (32,) if case.element_bytes == 4 else (96, 64, 32) if warps == 4 else (64, 32)
    for size in sizes:
        enough = out // size >= teams or size == sizes[-1]
        if enough and out % size == 0 and rows * size // 2 <= 64:  # accumulators of a lane
            return size
    return None


def _ahead(case, warps, cluster, resident, wide):
    """Return how many chunks of x a lane may have in flight: as registers allow."""
    if not wide:
        small = case.element_bytes == 2 and (warps <= 8 or cluster > 1)
        return 6 if small else 4
    if resident == 1:
        return 2 if warps > 8 else 4
    if resident == 2:
        return 3 if case.tight or case.element_bytes == 4 else 2
    return 1


def _split1(warps, chunks, tiles, wide):
    """Return how many warps share the chunks of a pixel: more where pixels do not keep all busy."""
    costs = {}
    for split in (1, 2, 3):
        rows = warps // split
        if warps % split == 0 and chunks % split == 0 and not (wide and rows % 4):
            turns = -(-tiles // rows)
            costs[split] = turns / split + 0.2 * (split - 1)  # each further worker's sums are added
    return min(costs, key=costs.get)
