"""Which instance of the fused convolution: tile, slice of channels, warps, engine, shared memory.

Template arguments depend on dtype, channels, kernel and on how many tiles are expected; never on
the count itself or on the size of the image.
"""

import functools
import math
from typing import NamedTuple

_VECTOR = 16  # bytes of channels in a plane of shared memory


class Device(NamedTuple):
    """What a plan needs to know of a GPU."""

    multiprocessors: int
    shared_bytes: int  # of dynamic shared memory that a thread block may have
    hopper: bool  # wgmma
    bulk_copy: bool = False


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


class ConvPlan(NamedTuple):
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
            self.blocks,
        )  # fmt: skip

    def pack_template(self, case):
        """Return the template arguments of ``pack_weights``."""
        rounded = case.element == "float" and not case.ieee
        return case.element, self.planes, self.slice, self.warps[1], *case.kernel, rounded


def halo_plane_bytes(tile, kernel, strides):
    """Return ``Halo::PLANE`` of halo_tile.cuh."""
    rows, columns = ((t - 1) * s + k for t, s, k in zip(tile, strides, kernel, strict=True))
    pitch = -(-columns // strides[1]) * strides[1]
    return ((rows * pitch + 6) // 8 * 8 + 1) * _VECTOR


@functools.cache
def _device(number):
    import cupy

    device = cupy.cuda.Device(number)
    capability = int(device.compute_capability)
    return Device(
        multiprocessors=device.attributes["MultiProcessorCount"],
        shared_bytes=device.attributes["MaxSharedMemoryPerBlockOptin"],
        hopper=capability == 90,
        bulk_copy=capability >= 90,
    )


def current_device():
    """Describe CuPy's current device."""
    import cupy

    return _device(cupy.cuda.runtime.getDevice())


def plan_for(case, pixels, device):
    """Return the plan for few or for many output pixels: counts change, and plans must not.

    Few is up to four rounds of all multiprocessors, of 128 pixels each.
    """
    rounds = pixels / (128 * device.multiprocessors)
    return plan_conv(case, (1 if rounds <= 4 else 16) * 128 * device.multiprocessors, device)


@functools.lru_cache(maxsize=1024)
def plan_conv(case, pixels, device):
    """Return the best plan for about ``pixels`` output pixels, or None where none fits."""
    plans = [plan for plan in _candidates(case, device) if _fits(plan, case, device)]
    return min(plans, key=lambda plan: _cost(plan, case, pixels, device), default=None)


def _fits(plan, case, device):
    return plan.shared_bytes(case) <= device.shared_bytes


def _candidates(case, device):
    """Yield plans whose warps share the work evenly."""
    lanes = _VECTOR // case.element_bytes
    planes = -(-case.channels // lanes)
    groups = -(-case.channels_out // 8)
    slices = {g for g in range(1, 13) if groups % g == 0 or g in (4, 8)} & set(range(1, groups + 4))
    chunked = _chunk_planes(planes)
    for group in sorted(slices):
        for own, resident in ((planes, True), *((p, False) for p in chunked)):
            chunks = -(-planes // own)
            for tile in ((8, 16), (8, 8), (4, 8)):
                for warps in _warps(case, tile, group, own):
                    for stages in (1, 2):
                        if not resident and stages == 1:
                            continue
                        for engine in _engines(case, device, tile, warps, group):
                            yield ConvPlan(
                                engine, own, group * 8, tile, warps, stages, resident, chunks, 1
                            )


def _chunk_planes(planes):
    return [p for p in (8, 4, 2) if p < planes]


def _engines(case, device, tile, warps, group):
    if case.ieee:
        return ("Fma",)
    wide = device.hopper and tile[0] == 8 and warps[0] * 16 == math.prod(tile)
    return ("MmaSync", "WarpGroup") if wide and group // warps[1] in _WGMMA_GROUPS else ("MmaSync",)


_WGMMA_GROUPS = (1, 2, 3, 4, 6, 8, 12, 16)  # the widths that wgmma.cuh knows, in groups of 8


def _warps(case, tile, group, planes):
    """Yield (pixels, channels, K) warps."""
    rows = math.prod(tile) // 16
    for wm in (2, 4, 8):
        if rows % wm:
            continue
        for wn in (1, 2, 3):
            if group % wn or (rows // wm) * (group // wn) > 16:  # accumulators: 4 registers each
                continue
            for wk in (1, 2, 3, 4, 6, 8):
                if wk > 1 and (planes % 2 or planes // 2 % wk):
                    continue
                if 4 <= wm * wn * wk <= 12:
                    yield wm, wn, wk


def _cost(plan, case, pixels, device):
    """Estimate a time, in cycles of a multiprocessor: latency where there is little to do."""
    tiles = max(1.0, pixels / math.prod(plan.tile)) * plan.slices(case)
    resident = min(
        device.shared_bytes // plan.shared_bytes(case), 2048 // plan.threads,
        65536 // (plan.threads * (128 if plan.engine == "WarpGroup" else 112)), 16,
    )  # fmt: skip
    resident = max(1, resident)
    spots = device.multiprocessors * resident
    rounds = math.ceil(tiles / spots)
    steps = plan.steps(case.kernel) * plan.chunks
    wm, wn, wk = plan.warps
    rows, groups = math.prod(plan.tile) // 16 // wm, plan.slice // 8 // wn
    # One warp's share of a tile: fragments, products, and their latencies.
    per_step = 24 + 8 * (rows + groups / 2) + 8 * rows * groups
    if plan.engine == "WarpGroup":
        per_step = 16 + plan.slice // wn / 2
    if plan.engine == "Fma":
        per_step = 32 * rows * groups + 16 * (rows + groups)
    latency = steps / wk * per_step + 400 * (wk > 1)
    # All warps of a multiprocessor share its pipes.
    traffic = steps * 2 * plan.slice * _VECTOR / 64 if not plan.resident else 0
    work = steps / wk * math.prod(plan.warps) * (per_step - 20) / 4
    copies = plan.planes * plan.chunks * halo_plane_bytes(plan.tile, case.kernel, case.strides) / 24
    active = min(resident, math.ceil(tiles / device.multiprocessors))
    staged = plan.steps(case.kernel) * 2 * plan.slice * _VECTOR / 40 * active
    hidden = max(latency / active, work) if plan.stages == 2 or resident > 1 else latency
    return staged + rounds * active * (hidden + copies + traffic + 300 / active)
