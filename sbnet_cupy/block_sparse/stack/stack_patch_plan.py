"""Which instance of ``stack_conv_patch``: parts of blocks, channels, stages."""

import math
from typing import NamedTuple

ROW = 128  # bytes of a tile's row in shared memory: a chunk of K
PANEL = 64  # output channels that are packed together
_CELL = 8  # pixels along a side of what tensor cores take at once
_COPIERS = 128  # threads that copy weights and patches
_SMALL = 128  # pixels of a tile, of which more thread blocks fit
_MOST_NEAR = 96  # blocks that patches may reach into, which a thread each finds
_STEP = 32  # bytes of what tensor cores take at once


class PatchPlan(NamedTuple):
    """Template arguments of ``stack_conv_patch``, in words."""

    engine: str  # TileMma or TileWgmma
    part: tuple[int, int]  # output pixels of a block that are a patch's, down and across
    patches: int  # of a tile
    columns: int  # output channels of a tile
    warps: tuple[int, int]  # that share them; groups of four warps for TileWgmma
    stages: int  # of weights
    patch_stages: int
    blocks: int  # thread blocks for which a multiprocessor must have registers

    kernel = "stack_conv_patch"
    split = 1
    partials = False

    @property
    def tile(self):
        """Output pixels and output channels of a thread block."""
        return (math.prod(self.part) * self.patches, self.columns)

    @property
    def threads(self):
        """Number of threads of a thread block."""
        return math.prod(self.warps) * (128 if self.engine == "TileWgmma" else 32) + _COPIERS

    def patch_pixels(self, conv):
        """Pixels of x that a tile reads."""
        sides = zip(self.part, conv.kernel, conv.dilation, strict=True)
        return self.patches * math.prod(p + (k - 1) * d for p, k, d in sides)

    def is_unfit(self, conv):
        """Whether registers would spill, or other tiles are better whatever the estimate."""
        pixels, columns = self.tile
        crowded, several = self.blocks > 1, self.patch_stages > 1
        if columns < PANEL:
            spills = crowded and conv.slowness and (self.patches > 1 or pixels == _SMALL)
            large = pixels > _SMALL
            return spills or conv.channels_out > columns or (large and crowded == several)
        large = columns > PANEL or (conv.scales_last and pixels >= _SMALL)
        if crowded and conv.slowness and (conv.activation < 0 or large):  # a sum follows
            return True
        return _has_rest(conv) and crowded and (several or columns > PANEL)

    def near_blocks(self, conv):
        """Blocks of x that the patches of a tile may reach into."""
        sides = zip(self.part, conv.kernel, conv.dilation, conv.block, strict=True)
        return self.patches * math.prod((p + (k - 1) * d + b - 2) // b + 1 for p, k, d, b in sides)

    def shared_bytes(self, conv):
        """Dynamic shared memory of a thread block; the sums of stack_conv_patch.cuh."""
        pixels = self.patch_pixels(conv)
        patch = -(-pixels * ROW // 1024) * 1024
        barriers = 8 * (2 * self.stages + 2 * self.patch_stages + 6)
        ring = self.stages * self.columns * ROW + self.patch_stages * patch
        found = -(-pixels // 4) + self.near_blocks(conv)
        return 1024 + ring + barriers + 8 * conv.tables * self.columns + 16 * found

    def launched_bytes(self, conv, device):
        """Dynamic shared memory of a launch."""
        return self.shared_bytes(conv)

    def tiles(self, conv, rows):
        """Number of tiles of so many rows of the stack."""
        parts = rows * math.prod(b // p for b, p in zip(conv.block_out, self.part, strict=True))
        return -(-parts // self.patches) * -(-conv.channels_out // self.columns)

    def thread_blocks(self, conv):
        """Number of thread blocks that can have something to do."""
        return self.tiles(conv, conv.rows)

    def template(self, conv):
        """Return the template arguments."""
        return (
            self.engine, conv.element, *self.part, self.patches, self.columns, *self.warps,
            self.stages, self.patch_stages, conv.vectors_out, conv.activation, self.blocks,
            _has_rest(conv), conv.lies,
        )  # fmt: skip

    def cost(self, conv, device):
        """Estimate the cycles of a launch, as ``launch_cost`` does."""
        pixels, columns = self.tile
        tiles = max(1, self.tiles(conv, conv.expected))
        rounds = math.ceil(tiles / (device.multiprocessors * self.blocks))
        active = min(self.blocks, math.ceil(tiles / device.multiprocessors))
        product = pixels * columns / (32 if self.engine == "TileWgmma" else 16)
        wide = self.engine == "TileWgmma" and columns > PANEL  # reads fewer pixels for a product
        chunk = active * ((1.08 if wide else 1.2) * product + 64.3)
        if _has_rest(conv) and self.blocks > 1:
            chunk += _ONE_BY_ONE
        read = self.patch_pixels(conv)
        results = 2770 + 0.0585 * pixels * columns * conv.element_bytes * active
        # While results are stored, other warps multiply for the next tile.
        path = rounds * conv.chunks * chunk + results * (1 + (rounds - 1) * 0.713)
        resident = columns >= conv.channels_out and conv.chunks <= self.stages
        loads = min(tiles, device.multiprocessors) + (0 if resident else tiles)
        moved = tiles * read * _pixel_bytes(conv) + loads * conv.chunks * columns * ROW
        brought = moved / (63.9 * device.multiprocessors)
        search = 343 + 5.89 * read
        return 1880 + search + max(path, brought, conv.memory_cycles(False))


def _pixel_bytes(conv):
    return conv.channels * conv.element_bytes


def _has_rest(conv):
    """Whether there are channels beyond whole chunks."""
    return _pixel_bytes(conv) % ROW > 0


_ONE_BY_ONE = 240  # more cycles of a chunk whose steps of K are begun one by one

# part of a block, patches, output channels, warps or groups of four warps, thread blocks
_WGMMA_TILES = (
    ((16, 16), 1, 64, (2, 1), 1),
    ((16, 16), 1, 128, (2, 1), 1),
    ((8, 8), 4, 64, (2, 1), 1),
    ((8, 8), 4, 128, (2, 1), 1),
    ((8, 16), 1, 64, (2, 1), 2),
    ((8, 16), 1, 128, (2, 1), 1),
    ((8, 8), 2, 64, (2, 1), 2),
    ((8, 8), 2, 128, (2, 1), 1),
    ((8, 8), 1, 64, (1, 1), 2),
    ((8, 8), 1, 64, (1, 1), 3),
    ((8, 8), 1, 128, (1, 1), 2),
    ((16, 16), 1, 32, (2, 1), 1),
    ((16, 16), 1, 32, (2, 1), 2),
    ((8, 8), 4, 32, (2, 1), 1),
    ((8, 8), 4, 32, (2, 1), 2),
    ((8, 16), 1, 32, (1, 1), 3),
    ((8, 8), 1, 32, (1, 1), 3),
)
_MMA_TILES = (
    ((8, 16), 1, 64, (4, 2), 1),
    ((8, 16), 1, 128, (4, 2), 1),
    ((8, 8), 1, 64, (2, 2), 2),
    ((8, 8), 2, 64, (4, 2), 1),
    ((8, 16), 1, 32, (4, 1), 2),
    ((8, 8), 1, 32, (4, 1), 2),
)


def patch_candidates(conv, device):
    """Yield plans that fit the device; none for windows of one pixel, strides, or odd vectors."""
    whole = conv.element != "float" and conv.vectors_in and _pixel_bytes(conv) % _STEP == 0
    whole = whole and conv.group is None
    if not (device.bulk_copy and whole and math.prod(conv.kernel) > 1 and conv.strides == (1, 1)):
        return
    engine, tiles = ("TileWgmma", _WGMMA_TILES) if device.hopper else ("TileMma", _MMA_TILES)
    for part, patches, columns, warps, blocks in tiles:
        if any(b % p for b, p in zip(conv.block_out, part, strict=True)):
            continue
        room = device.shared_of(blocks)
        # With one patch for all channels, the next tile's comes during the results.
        patch_stages = 1 if _pixel_bytes(conv) <= ROW else 2
        plan = PatchPlan(engine, part, patches, columns, warps, 2, patch_stages, blocks)
        if plan.is_unfit(conv) or plan.near_blocks(conv) > _MOST_NEAR:
            continue
        stages = 2 + (room - plan.shared_bytes(conv)) // (columns * ROW + 16)
        if stages >= 2:
            yield plan._replace(stages=min(stages, conv.chunks, _MOST_STAGES))


_MOST_STAGES = 9
