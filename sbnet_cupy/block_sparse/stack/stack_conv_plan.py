"""Which instance of ``stack_conv``: engine, tile, stages, and how many thread blocks share K.

Template arguments depend on dtype, channels, kernel and on how many blocks are expected; never on
the count itself.
"""

import functools
import math
from typing import NamedTuple

from ...dense.activation import SCALED_LAST, scales_last
from .stack_conv_cost import launch_cost
from .stack_patch_plan import PANEL, ROW, patch_candidates

BOX_ROWS = 64  # pixels that the copy engine brings at once, at most
_FOUND = 4  # tiles whose pixels of the result may be found ahead, where blocks are looked up
_UNITS = 8  # of 16 bytes, in a chunk
_MOST_PIXELS = 8192  # of blocks and windows, so that divisions are exact
_MOST_OFFSETS = 64 << 10  # bytes of shared memory for where a tile's pixels lie
# Slow activations, which take registers: cycles for a number and group of warps, which share them.
_SLOW = {2: 0.4, 3: 0.88, 7: 0.4}
_LAST = 256  # channels that the last scales are a multiple of: those of the largest tile


WHOLE, IN_PARTS, UNFOLDED = range(3)  # how y lies: as in tile_result.cuh


class Shortcut(NamedTuple):
    """A 1x1 convolution of another stack, added to a convolution's sums: kernels of 9.0 and newer.

    Its blocks are ``strides`` times those of y, and its channels whole chunks of K.
    """

    channels: int
    strides: tuple[int, int]
    part_of: int | None = None  # channels of the stack of which that is a part, if it is one

    @property
    def pitch(self):
        """Channels from a pixel to the next."""
        return self.part_of or self.channels


class StackConv(NamedTuple):
    """A convolution from a stack of blocks to a stack of blocks.

    Blocks of x are ``block`` pixels of images of ``image`` pixels; those of y are ``block_out``
    pixels, ``block / strides``, of images of ``image_out`` pixels.
    """

    element: str  # C++ type: Half, BFloat16, or float, which is multiplied as tf32
    rows: int  # of the stacks: their capacity
    images: int
    grid: tuple[int, int]  # blocks of an image
    block: tuple[int, int]
    block_out: tuple[int, int]
    image: tuple[int, int]
    image_out: tuple[int, int]
    channels: int
    channels_out: int
    kernel: tuple[int, int]
    strides: tuple[int, int]
    dilation: tuple[int, int]
    pads: tuple[int, int]  # pixels above and to the left
    activation: int
    vectors_in: bool  # pixels of x are whole vectors of 16 bytes, aligned
    vectors_out: bool  # those of y and the residual
    expected: int  # about how many rows will be active
    residual: bool = False  # whether one is added: what a plan is made for; all plans take one
    shortcut: "Shortcut | None" = None  # a second product that is added
    group: tuple[int, int] | None = None  # channels of x and of y of a group, if there are several
    of_images: bool = False  # x, y and residual are images: windows read all of x; `block` is of x
    part_of: int | None = None  # channels of the stack of which x is a part, if it is one
    added_part_of: int | None = None  # those of which the residual is a part
    out_part_of: int | None = None  # those of which y is a part; all in vectors
    unfolded: tuple[int, int] | None = None  # pixels down and across that channels of y become

    @property
    def element_bytes(self):
        """Bytes of a number."""
        return 4 if self.element == "float" else 2

    @property
    def slowness(self):
        """Cycles that the activation takes for a number and group of warps; 0 of a fast one."""
        return _SLOW.get(self.activation & (SCALED_LAST - 1), 0)  # before a sum or behind it

    @property
    def scales_last(self):
        """Whether channels are scaled and shifted behind the sum and the activation."""
        return scales_last(self.activation)

    @property
    def tables(self):
        """Numbers that each column of a tile has in its tables."""
        return tables_of(self.activation)

    @property
    def one_pixel(self):
        """Whether each pixel of y reads the pixel of x in its place, and no other."""
        plain = self.kernel == self.strides == (1, 1) and self.pads == (0, 0)
        inside = all(p <= h for p, h in zip(self.image_out, self.image, strict=True))  # no padding
        return plain and inside

    @property
    def pointwise(self):
        """Whether pixel p of the stack y reads pixel p of the stack x, and no other."""
        return self.one_pixel and not self.of_images

    @property
    def box(self):
        """Pixels across and lines that the copy engine brings at once: of a stack, or a block."""
        return box_of_block(self.block_out) if self.of_images else (BOX_ROWS, 1)

    @property
    def span(self):
        """Channels of x that a panel reads: all, or the whole vectors that hold its groups."""
        if self.group is None:
            return self.channels
        lanes, (group_in, group_out) = 16 // self.element_bytes, self.group
        spans = []
        for first in range(0, self.channels_out, PANEL):
            last = min(first + PANEL, self.channels_out)
            begin, end = first // group_out * group_in, -(-last // group_out) * group_in
            spans.append(-(-end // lanes) * lanes - begin // lanes * lanes)
        return max(spans)

    @property
    def group_sizes(self):
        """Channels of x and of y of a group."""
        return self.group or (self.channels, self.channels_out)

    @property
    def pitches(self):
        """Channels from a pixel to the next of x, of the residual, and of y."""
        out = self.channels_out
        own = out // math.prod(self.unfolded or (1, 1))
        return self.part_of or self.channels, self.added_part_of or out, self.out_part_of or own

    @property
    def lies(self):
        """How y lies, as in tile_result.cuh: IN_PARTS also where the residual alone is one."""
        if self.unfolded is not None:
            return UNFOLDED
        parts = self.added_part_of, self.out_part_of
        return WHOLE if parts == (None, None) else IN_PARTS

    @property
    def chunks(self):
        """Chunks of K, those of the shortcut included."""
        if self.shortcut is None:
            return self.own_chunks
        return self.own_chunks + self.shortcut.channels * self.element_bytes // ROW

    @property
    def own_chunks(self):
        """Chunks of the convolution: of 8 units of channels one for each tap; the rest by taps."""
        units = -(-self.span * self.element_bytes // 16)
        taps = math.prod(self.kernel)
        return units // _UNITS * taps + -(-(units % _UNITS * taps) // _UNITS)

    @property
    def panels(self):
        """Panels of the packed weights."""
        return -(-self.channels_out // PANEL)

    @property
    def packed_bytes(self):
        """Bytes of the packed weights; the same for every plan."""
        return self.panels * PANEL * (2 * 4 + self.own_chunks * ROW)

    def memory_cycles(self, staged):
        """Cycles in which an H200's memory moves the stacks; a staged residual streams."""
        pixels = self.expected * self.element_bytes
        read = pixels * math.prod(self.block) * self.channels + self.packed_bytes
        if self.shortcut is not None:
            channels, strides, _ = self.shortcut
            read += pixels * math.prod(self.block_out) * math.prod(strides) * channels
        written = pixels * math.prod(self.block_out) * self.channels_out
        added = written * self.residual / (2970 if staged else 2280)
        return read / 2970 + written / 998 + added


class StackPlan(NamedTuple):
    """Template arguments of ``stack_conv_pipelined`` or ``stack_conv``, in words."""

    engine: str  # TileMma or TileWgmma
    tile: tuple[int, int]  # output pixels and output channels of a thread block
    warps: tuple[int, int]  # that share them; groups of four warps for TileWgmma
    stages: int
    split: int  # thread blocks that share the chunks of a tile
    partials: bool  # which then add up in memory, not in a cluster
    pipelined: bool  # some warps copy, the others multiply
    cached: bool  # whether pixels come by a table of where they lie, through the L1 cache
    results: int  # tiles of the result that are staged in shared memory, with the residual
    blocks: int  # thread blocks for which a multiprocessor must have registers
    parts: int = 1  # the most into which each tile of the last round may be cut
    bulk: bool = False  # whether the copy engine brings pixels, by tensor maps
    teams: int = 1  # of four warps that copy, and take turns in chunks
    direct: bool = False  # whether threads that copy images look up the blocks of their own pixels

    @property
    def threads(self):
        """Number of threads of a thread block."""
        multipliers = math.prod(self.warps) * (128 if self.engine == "TileWgmma" else 32)
        return multipliers + (128 * self.teams if self.pipelined else 0)

    @property
    def clustered(self):
        """Whether thread blocks that share K are a cluster."""
        return self.split > 1 and not self.partials

    @property
    def kernel(self):
        """Name of the kernel."""
        return "stack_conv_pipelined" if self.pipelined else "stack_conv"

    def boxes(self, conv):
        """Boxes of a tile and chunk, where the copy engine brings pixels."""
        return self.tile[0] // math.prod(conv.box)

    def shared_bytes(self, conv):
        """Dynamic shared memory of a thread block; the sums of stack_conv2d.cu."""
        pixels, columns = self.tile
        found = _FOUND if conv.of_images and (self.bulk or self.direct) else 0
        lists = found or 1 + (0 if conv.pointwise else math.prod(conv.kernel))
        ring = self.stages * (pixels + columns) * ROW
        pairs = 1 if self.clustered else self.results
        barriers = 1024 + 8 * (2 * self.stages + 2 * pairs + 2 * found + 2) if self.pipelined else 0
        results = self.results * pixels * (columns * conv.element_bytes + 64)
        if self.clustered:  # the sums that a thread block gets
            results = self.split * -(-pixels // self.split) * (columns + 16) * 4
        return ring + results + 4 * conv.tables * columns + barriers + pixels * 4 * lists

    def launched_bytes(self, conv, device):
        """Dynamic shared memory of a launch, at least ``shared_bytes``.

        Where two kernels' thread blocks have a multiprocessor each, none shares one with another of
        its kernel: it asks for more than half of the shared memory.
        """
        needed = self.shared_bytes(conv)
        if not device.hopper or 2 * self.thread_blocks(conv) > device.multiprocessors:
            return needed
        return device.spread(needed, 1)

    def tiles(self, conv, rows):
        """Number of tiles of so many rows of the stack."""
        pixels = -(-rows * math.prod(conv.block_out) // self.tile[0])
        return pixels * -(-conv.channels_out // self.tile[1])

    def template(self, conv):
        """Return the template arguments."""
        rounded, near = conv.element == "float", conv.pointwise or self.direct
        return (
            self.engine, conv.element, *self.tile, *self.warps, self.stages, self.split,
            self.partials, near, conv.vectors_in, conv.vectors_out, rounded,
            conv.activation, self.cached, *([self.results] if self.pipelined else []), self.blocks,
            *(self._of_pipelined(conv) if self.pipelined else []),
            conv.group is not None, conv.lies,
        )  # fmt: skip

    def _of_pipelined(self, conv):
        box = math.prod(conv.box) if self.bulk else 0
        return conv.shortcut is not None, self.parts, conv.of_images, box, self.teams

    def thread_blocks(self, conv):
        """Number of thread blocks that can have something to do."""
        return self.tiles(conv, conv.rows) * self.parts * self.split

    def partial_floats(self, conv):
        """Floats of memory for the sums of thread blocks that share K and are no cluster."""
        if not self.partials:
            return 0
        width = -(-conv.channels_out // self.tile[1]) * self.tile[1]
        return conv.rows * math.prod(conv.block_out) * self.split * width


def tables_of(activation):
    """Return how many numbers a channel has: scale and bias, and those of what is scaled last."""
    return 4 if scales_last(activation) else 2


def last_channels(channels):
    """Return how many channels the last scales and shifts have, of so many of the result."""
    return -(-channels // _LAST) * _LAST


def box_of_lines(width):
    """Return the pixels across and lines of a box of 64 pixels; None where no box is as many."""
    if BOX_ROWS % width and width % BOX_ROWS:
        return None
    across = min(width, BOX_ROWS)
    return across, BOX_ROWS // across


def box_of_block(block):
    """Return the pixels across and lines of the largest box of which blocks are whole ones.

    It has whole lines of a block, or a part of one, and 64 pixels are whole boxes.
    """
    down, across = block
    if BOX_ROWS % across:
        return math.gcd(BOX_ROWS, across), 1
    return across, math.gcd(BOX_ROWS // across, down)


def has_boxes(conv, device):
    """Whether the copy engine can bring the pixels of a convolution: neighbours, whole vectors."""
    if not (device.bulk_copy and conv.one_pixel and conv.vectors_in and conv.group is None):
        return False
    return conv.shortcut is None or box_of_lines(conv.block_out[1]) is not None


def missing_kernel(conv, device):
    """Return for what there is no CUDA kernel; None where there is one."""
    reach = [(k - 1) * d for k, d in zip(conv.kernel, conv.dilation, strict=True)]
    if max(*conv.block, *conv.block_out, *reach, *conv.pads) > _MOST_PIXELS:
        return f"blocks, windows or padding of more than {_MOST_PIXELS} pixels"
    if max(*conv.image, *conv.image_out) >= 2**31 - 2**16 or max(conv.channels_out, 1) > 2**24:
        return f"images as large as {conv.image}, or {conv.channels_out} channels"
    pixels = conv.rows * max(math.prod(conv.block), math.prod(conv.block_out))
    if conv.of_images:
        if not (device.bulk_copy and conv.vectors_in):
            return "images, where pixels are no whole vectors, or on this GPU"
        pixels = max(pixels, conv.images * max(math.prod(conv.image), math.prod(conv.image_out)))
    vectors = -(-conv.pitches[0] * conv.element_bytes // 16)
    if pixels * vectors >= 2**31 - 2**16:  # offsets count vectors
        return f"stacks of {conv.rows} blocks of {conv.block} pixels with {conv.channels} channels"
    if conv.shortcut is not None:
        strided = math.prod(conv.shortcut.strides) * math.prod(conv.block_out)
        whole = conv.shortcut.channels * conv.element_bytes % ROW == 0 and conv.vectors_in
        if not (device.bulk_copy and whole and conv.element != "float"):
            return "such a shortcut, or on this GPU"
        if conv.rows * strided * conv.shortcut.pitch * conv.element_bytes // 16 >= 2**31 - 2**16:
            return f"shortcuts of {conv.rows} blocks with {conv.shortcut.channels} channels"
    own = conv.pitches[2] * conv.element_bytes
    if conv.unfolded is not None and (own % 16 or conv.residual or conv.shortcut or conv.of_images):
        return "channels that become pixels, and are no whole vectors, or with a sum"
    if conv.element != "Half" and not device.tensor_floats:
        return f"{conv.element} on this GPU"
    if plan_stack_conv(conv, device) is None:
        return f"a window of {conv.kernel} pixels: it does not fit this GPU's shared memory"
    return None


@functools.lru_cache(maxsize=1024)
def plan_stack_conv(conv, device):
    """Return the best plan, or None where none fits."""
    plans = (*candidates(conv, device), *patch_candidates(conv, device))
    if conv.shortcut is not None or conv.of_images:
        plans = [plan for plan in plans if plan.kernel == "stack_conv_pipelined"]
    if conv.unfolded is not None:
        plans = [plan for plan in plans if not plan.partials]
    padded = _padded(conv)
    like = None if padded is None else plan_stack_conv(padded, device)
    if like is not None:
        plans = [plan for plan in plans if _adds_up_alike(plan, like)] or plans
    return min(plans, key=lambda plan: plan_cost(plan, conv, device), default=None)


def _padded(conv):
    """Return a convolution as it is where it writes channels that pad pixels to whole vectors.

    None where it never does: of whole vectors, in groups, with a shortcut, on images, or where
    channels become pixels or are scaled last.
    """
    lanes = 16 // conv.element_bytes
    others = conv.group, conv.shortcut, conv.unfolded, conv.of_images or None
    if conv.channels_out % lanes == 0 or conv.scales_last or any(o is not None for o in others):
        return None
    channels_out = -(-conv.channels_out // lanes) * lanes
    return conv._replace(channels_out=channels_out, vectors_out=True)


def _adds_up_alike(plan, other):
    """Whether sums have the same bits: the same engine, and thread blocks that share K."""
    if type(plan) is not type(other) or plan.kernel != other.kernel:
        return False
    return getattr(plan, "split", 1) == getattr(other, "split", 1)


def plan_cost(plan, conv, device):
    """Estimate the cycles of a launch."""
    own = isinstance(plan, StackPlan)
    return launch_cost(plan, conv, device) if own else plan.cost(conv, device)


# (pixels, output channels), warps or groups of four warps, most thread blocks of a multiprocessor
_WGMMA_TILES = (
    ((64, 64), (1, 1), 3),
    ((64, 64), (1, 2), 2),
    ((64, 128), (1, 1), 2),
    ((64, 256), (1, 2), 1),
    ((128, 64), (2, 1), 2),
    ((128, 128), (2, 1), 1),
    ((192, 64), (3, 1), 1),
    ((192, 128), (3, 1), 1),
    ((256, 64), (2, 1), 1),
    ((256, 128), (2, 1), 1),
)
_IN_BULK = ((192, 64),)  # only where pixels come in bulk
_OTHERWISE = ((64, 256), (256, 128))  # only where threads copy them
_MMA_TILES = (((64, 64), (2, 2), 2), ((128, 64), (4, 2), 1), ((128, 128), (4, 2), 1))
_SPLITS = (1, 2, 3, 4, 8)
_MOST_STAGES = 6  # more were no faster, and keep the next kernel's thread blocks waiting
_FEW_CHUNKS, _THEIR_STAGES = 8, 3  # of large tiles, which more stages do not help
# Of more boxes than these a tile has rows as here, and is not cut: others were far slower.
_FEW_BOXES, _OF_MANY_BOXES = 8, (64, 192)


def candidates(conv, device):
    """Yield plans that fit the device. Images and windows of one pixel have them of all kinds."""
    boxes = has_boxes(conv, device)
    if not boxes or conv.of_images:
        yield from _candidates(conv, device)
    if boxes and conv.of_images:
        yield from _candidates(conv, device, direct=True)
    if boxes:
        yield from _candidates(conv, device, bulk=True)


def _candidates(conv, device, bulk=False, direct=False):
    """Yield plans whose pixels come in bulk, or by threads, which look them up if ``direct``."""
    engine, tiles = ("TileWgmma", _WGMMA_TILES) if device.hopper else ("TileMma", _MMA_TILES)
    near = conv.pointwise or bulk or direct  # no table of pixels
    offsets = 0 if near else math.prod(conv.kernel) * 4
    simple = conv.vectors_in and conv.element != "float"
    for tile, warps, most in tiles:
        if tile[0] * offsets > _MOST_OFFSETS or (conv.group and tile[1] != PANEL):
            continue
        if tile == (64, 64) and warps == (1, 2) and not conv.slowness:
            continue
        if tile in (_OTHERWISE if bulk else _IN_BULK):
            continue
        if not simple:  # such copies, and rounding to tf32, take more registers
            most = 2 if sum(tile) == 128 else 1
            if max(tile) > 128 and tile != (256, 64):
                continue
        if tile == (128, 64) and not near:
            most = 1  # two have few stages
        for split in _SPLITS:
            if split > device.multiprocessors:
                break  # all that share K must be there at once
            if split > 1 and conv.chunks < (2 if tile == (64, 64) else 8) * split:
                break  # larger tiles wait longer for their first chunk
            if (split == 3 and tile == (64, 64)) or (split > 1 and tile == (64, 256)):
                continue  # never the fastest
            staged = conv.residual and device.bulk_copy and split == 1 and conv.vectors_out
            staged = staged and not conv.of_images
            for blocks in range(1, most + 1 if split == 1 else 2):
                for results in (0, 2) if staged and tile != (256, 128) else (0,):
                    plan = StackPlan(
                        engine, tile, warps, 0, split, split > 1 and not device.bulk_copy,
                        device.bulk_copy, not near, results, blocks, bulk=bulk,
                        direct=direct,
                    )  # fmt: skip
                    plan = _with_stages(plan, conv, device)
                    if plan is None:
                        continue
                    many = bulk and plan.boxes(conv) > _FEW_BOXES
                    if many and tile[0] not in _OF_MANY_BOXES:
                        continue
                    if simple and not near and _gains_by_two_teams(plan, conv, device):
                        plan = plan._replace(teams=2)
                    yield plan
                    several = plan.tiles(conv, conv.expected) > device.multiprocessors
                    whole = split == blocks == 1 and not many
                    if device.hopper and simple and whole and several:
                        yield plan._replace(parts=tile[0] // 64)


def _gains_by_two_teams(plan, conv, device):
    """Whether two teams of warps that copy are faster than one, as was measured on an H200."""
    if not device.hopper or plan.split > 1:
        return False
    if plan.tile == (64, 64):
        return plan.blocks < 3
    if plan.tile == (64, 256):
        return False
    one_round = plan.tiles(conv, conv.expected) <= device.multiprocessors
    return plan.blocks == 1 and (plan.tile[0] < 192 or (plan.tile[0] == 192 and one_round))


def _with_stages(plan, conv, device):
    """Return the plan with the most stages with which its thread blocks fit, or None."""
    available = device.shared_of(plan.blocks)
    most = _MOST_STAGES - plan.clustered
    if not plan.cached and sum(plan.tile) >= 256 and conv.chunks <= _FEW_CHUNKS:
        most = _THEIR_STAGES
    for stages in range(min(most, max(2, -(-conv.chunks // plan.split) + 1)), 1, -1):
        plan = plan._replace(stages=stages)
        if plan.shared_bytes(conv) <= available:
            return plan
    return None
