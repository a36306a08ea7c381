"""Which instance of the fused convolution: tile, slice of channels, warps, engine, shared memory.

Template arguments depend on dtype, channels, kernel and on how many tiles are expected; never on
the count itself or on the size of the image.
"""

import functools
import math
from typing import NamedTuple

_VECTOR = 16  # bytes of channels in a plane of shared memory


class Case(NamedTuple):
    """A convolution as the planner sees it."""

    element: str  # C++ type
    element_bytes: int
    ieee: bool  # float products without tensor cores
    channels: int
    channels_out: int
    kernel: tuple[int, int]
    strides: tuple[int, int]
    vectors_in: bool  # NHWC, whole 16-byte vectors, aligned
    vectors_out: bool
    activation: int


class ConvConfig(NamedTuple):
    """Template arguments of ``fused_conv``, in words."""

    engine: str  # MmaSync, WarpGroup or Fma
    planes: int
    slice: int  # output channels of a thread block
    tile: tuple[int, int]
    warps: tuple[int, int, int]  # that share pixels, output channels, K
    stages: int
    resident: bool
    chunks: int  # of input channels
    blocks: int  # thread blocks for which a multiprocessor must have registers
    bulk_copy: bool  # whether one thread starts the copy of resident weights

    @property
    def threads(self):
        """Of a thread block."""
        return 32 * math.prod(self.warps)

    def steps(self, kernel):
        """Steps of K, 32 bytes each."""
        return -(-math.prod(kernel) * self.planes // 2)

    def slices(self, case):
        """Slices of the output channels."""
        return -(-case.channels_out // self.slice)

    def packed_bytes(self, case):
        """Bytes of the packed weights of all slices."""
        chunk = self.steps(case.kernel) * 2 * self.slice * _VECTOR
        return self.slices(case) * (8 * self.slice + self.chunks * chunk)

    def shared_bytes(self, case):
        """Dynamic shared memory of a thread block; the sums of ``fused_conv`` in fused_conv.cu."""
        weights = self.steps(case.kernel) * 2 * self.slice * _VECTOR
        plane = halo_plane_bytes(self.tile, case.kernel, case.strides)
        alone = math.prod(case.kernel) * self.planes % 2
        zeros = plane if self.engine == "WarpGroup" and alone else 0
        partials = (self.warps[2] - 1) * math.prod(self.tile) * self.slice * 4
        weights *= 1 if self.resident else self.stages
        return 8 * self.slice + weights + self.stages * self.planes * plane + zeros + partials + 16

    def template(self, case):
        """Return the template arguments."""
        return (
            self.engine, case.element, self.planes, self.slice, *self.tile, *case.kernel,
            *case.strides, *self.warps, self.stages, self.resident, case.vectors_in,
            case.vectors_out, case.element == "float" and not case.ieee, case.activation,
            self.blocks, self.bulk_copy,
        )  # fmt: skip

    def pack_template(self, case):
        """Return the template arguments of ``pack_weights``."""
        rounded = case.element == "float" and not case.ieee
        return case.element, self.planes, self.slice, self.warps[1], *case.kernel, rounded


def halo_plane_bytes(tile, kernel, strides, pieces=1):
    """Return ``Halo::PLANE`` of halo_tile.cuh."""
    piece = (tile[0] // pieces, tile[1])
    rows, columns = ((t - 1) * s + k for t, s, k in zip(piece, strides, kernel, strict=True))
    pitch = -(-columns // strides[1]) * strides[1]
    return ((pieces * rows * pitch + 6) // 8 * 8 + 1) * _VECTOR


def configure_conv(case, rows, bsize, all_pixels, device):
    """Return the configuration for few (a tenth) or many (all) of the images' output pixels.

    Counts change from frame to frame, and configurations must not: each is a kernel to compile.
    """
    return configure_blocks(case, expected_blocks(rows, bsize, all_pixels), bsize, device)


def expected_blocks(rows, bsize, all_pixels):
    """Round a number of active blocks to few or many: beyond a seventh, many was faster."""
    blocks = all_pixels / math.prod(bsize)
    return blocks * (0.1 if 7 * rows <= blocks else 1)


def tiles_of_block(bsize, tile):
    """Return how many tiles cover a block."""
    return math.prod(-(-b // t) for b, t in zip(bsize, tile, strict=True))


@functools.lru_cache(maxsize=1024)
def configure_blocks(case, blocks, bsize, device):
    """Return the best configuration for about so many active blocks, or None where none fits."""

    def cycles(config):
        return estimate_cycles(config, case, blocks, bsize, device)

    configs = [config for config in _candidates(case, device) if _fits(config, case, device)]
    return min(configs, key=cycles, default=None)


def _fits(config, case, device):
    return config.shared_bytes(case) <= device.shared_bytes


def _candidates(case, device):
    """Yield configurations whose warps share the work evenly.

    The weights stay in shared memory or, where they do not fit, come in chunks.
    """
    lanes = _VECTOR // case.element_bytes
    planes = -(-case.channels // lanes)
    groups = -(-case.channels_out // 8)
    slices = sorted({-(-groups // parts) for parts in range(-(-groups // 12), groups + 1)})
    for own in (planes, 16, 8, 4, 2):
        resident = own == planes
        if not resident and own >= planes:
            continue
        found = False
        for group in slices:
            for tile, engine, warps in _shapes(case, device, group, own):
                rows, width = math.prod(tile) // 16, group // warps[1]
                if engine == "MmaSync" or engine == "Fma":
                    rows = rows // warps[0]
                    if rows * width > 16:  # accumulators: 4 registers each
                        continue
                for stages in (1, 2) if resident else (2,):
                    config = ConvConfig(
                        engine, own, group * 8, tile, warps, stages, resident, -(-planes // own), 1,
                        device.bulk_copy,
                    )  # fmt: skip
                    if _fits(config, case, device):
                        found = True
                        yield config._replace(blocks=_resident(config, case, device))
        if found:
            return


def _shapes(case, device, group, planes):
    """Yield (tile, engine, warps): the warps share pixels, output channels and K."""
    depths = [k for k in _EXCHANGE if k == 1 or (planes % 2 == 0 and planes // 2 % k == 0)]
    ascending = planes % 2 == 0 or case.strides[1] == 1  # the units of a step, in memory
    if device.hopper and not case.ieee and ascending and group in _WGMMA_GROUPS:
        yield (8, 16), "WarpGroup", (8, 1, 1)
        for depth in (k for k in depths if k <= 3):
            yield (8, 8), "WarpGroup", (4, 1, depth)
    engine = "Fma" if case.ieee else "MmaSync"
    for tile, pixels in (((4, 8), 2), ((8, 8), 2), ((8, 8), 4), ((8, 16), 4), ((8, 16), 8)):
        for columns in (1, 2, 3):
            for depth in depths:
                if group % columns == 0 and 4 <= pixels * columns * depth <= 12:
                    yield tile, engine, (pixels, columns, depth)


_WGMMA_GROUPS = (1, 2, 3, 4, 6, 8, 12)  # the widths that wgmma.cuh knows, in groups of 8
_REGISTERS = 65536  # of a multiprocessor
_EXCHANGE = {1: 0, 2: 420, 3: 1000, 4: 420, 6: 1900}  # cycles, where so many warps share K


def _resident(config, case, device):
    """Return for how many thread blocks a multiprocessor has room, at 128 registers."""
    shared = device.resident(config.shared_bytes(case))
    return max(1, min(shared, _REGISTERS // (config.threads * 128), 2048 // config.threads))


def estimate_cycles(config, case, blocks, bsize, device):
    """Estimate the cycles of a kernel; the constants were fitted to runs on an H200."""
    tiles = max(1.0, blocks) * tiles_of_block(bsize, config.tile) * config.slices(case)
    spots = device.multiprocessors * config.blocks
    rounds = math.ceil(tiles / spots)
    active = min(config.blocks, math.ceil(tiles / device.multiprocessors))
    steps = config.steps(case.kernel) * config.chunks
    rows = math.prod(config.tile) // 16 // config.warps[0]
    groups = config.slice // 8 // config.warps[1]
    team = math.prod(config.tile) // 64
    if config.engine == "WarpGroup":
        step, pipe = 72 + config.slice / 3, team * (14 + config.slice / 3)
    elif config.engine == "MmaSync":
        step, pipe = 20 + 6 * rows + 4 * groups + 6 * rows * groups, 4.0 * rows + 2.0 * groups
        pipe = (pipe + 2 * rows * groups) * config.warps[0] * config.warps[1]
    else:
        step = 60 + 34 * rows * groups + 20 * (rows + groups)
        pipe = (9 * rows * groups + 8 * (rows + groups)) * config.warps[0] * config.warps[1]
    weights = config.steps(case.kernel) * 2 * config.slice * _VECTOR
    image = config.planes * config.chunks * halo_plane_bytes(config.tile, case.kernel, case.strides)
    results = math.prod(config.tile) * config.slice * case.element_bytes
    exchange = 420 if config.warps[2] > 1 else 0
    if config.engine == "MmaSync":
        exchange = _EXCHANGE[config.warps[2]] + 300 * (config.warps[1] - 1)
    latency = steps / config.warps[2] * step + exchange + image / 16 + 500
    # for the image of each further tile
    wait = 300 if config.stages == 2 else 500 if active > 1 else 900
    work = steps * pipe + (image + results) / 20 + exchange
    if config.engine == "Fma":  # so many warps hide the latency of shared memory
        work *= max(1.0, 10 / (active * math.prod(config.warps)))
    if not config.resident:
        work += weights * config.chunks / 30
    once = active * weights / 80 if config.resident else 0
    first = 100 * config.stages + 40 * config.blocks  # larger kernels start later
    return first + once + rounds * max(latency, active * work) + (rounds - 1) * wait
