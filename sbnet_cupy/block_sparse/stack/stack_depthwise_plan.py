"""Which instance of stack_depthwise.cu: vectors, tiles of pixels, and the slice of channels."""

import itertools
import math
from typing import NamedTuple

from ...core.arrays import vector_bytes

_WINDOWS = (3, 5, 7)  # columns of windows that the compiler is told
_SIDE = 8  # pixels of a tile, at most
_RUN = 4  # pixels of a thread, at most
_LANES = (8, 6, 10, 4, 2)  # threads side by side in the channels; the first of those as good
_THREADS = 256
_PLACE = 5  # numbers of where a tile lies
_MOST_NUMBERED = 2**31 - 2**16  # pixels of a stack, so that their numbers are ints
_SHARED = 100 << 10  # bytes of a thread block, where it may be so few: two are on a multiprocessor


class DepthwisePlan(NamedTuple):
    """An instance of the kernel, and the sizes that it is given."""

    vector: int  # channels of a thread
    lanes: int  # threads side by side in the channels: slices are of vector * lanes
    copy: int  # bytes that move at once
    run: int  # pixels of a thread, side by side
    tile_h: int  # rows of a tile
    runs: int  # of a row of a tile
    tiles: int  # of a thread block, at once

    @property
    def threads(self):
        """Threads of a thread block."""
        return max(-(-self.tiles * self.tile_h * self.runs * self.lanes // 32) * 32, 64)

    def grid(self, conv):
        """Return thread blocks along the tiles, and slices of channels."""
        height, width = conv.block_out
        tiles = -(-height // self.tile_h) * -(-width // (self.runs * self.run)) * conv.rows
        return -(-tiles // self.tiles), -(-conv.channels // (self.vector * self.lanes))

    def _staged(self, conv):
        """Return the pitch of taps and the pixels that are staged, along both axes."""
        sizes = zip(
            (self.tile_h, self.runs * self.run), conv.strides, conv.dilation, conv.kernel,
            strict=True,
        )  # fmt: skip
        for size, stride, dilation, kernel in sizes:
            span = (size - 1) * stride + 1
            pitch = min(dilation, span)
            yield pitch, (kernel - 1) * pitch + span

    def shared_bytes(self, conv):
        """Bytes of shared memory."""
        (_, down), (_, across) = self._staged(conv)
        region, channels = down * (across | 1) * self.tiles, self.vector * self.lanes
        staged = -(-region * channels * conv.element_bytes // 16) * 16
        floats = math.prod(conv.kernel) * (channels + 4) + conv.tables * channels
        return staged + 4 * (floats + region + _PLACE * self.tiles)

    def template(self, conv):
        """Arguments of the kernel's template."""
        (_, _), (pitch, _) = self._staged(conv)
        known = pitch == 1 and conv.kernel[1] in _WINDOWS and conv.strides[1] <= 2
        window = (conv.kernel[1], conv.strides[1]) if known else (0, 1)
        own = self.vector, self.lanes, self.copy, self.run
        return (conv.element, *own, *window, conv.activation)


def plan_stack_depthwise(conv, alignment, device):
    """Return the plan of a depthwise convolution, or None where window or stack are too large.

    The addresses of x, out and the residual are multiples of ``alignment`` bytes.
    """
    if conv.rows * max(math.prod(conv.block), math.prod(conv.block_out)) >= _MOST_NUMBERED:
        return None
    copy = vector_bytes(conv.channels * conv.element_bytes, alignment)
    vector = min(4, copy // conv.element_bytes)
    lanes = min(_LANES, key=lambda n: -(-conv.channels // (vector * n)) * n)
    height, width = conv.block_out
    most = max(min(_RUN, width // 2), 1)  # short runs, so that there are more threads
    run = min(range(most, most // 2, -1), key=lambda n: -(-width // n) * n)
    runs = _evenly(-(-width // run), _SIDE // run)
    tile_h = _evenly(height, min(_SIDE, _THREADS // (runs * lanes)))
    most = max(_THREADS // (tile_h * runs * lanes), 1)
    plan = DepthwisePlan(vector, lanes, copy, run, tile_h, runs, most)
    return next((p for p in _smaller(plan) if _fits(p, conv, device)), None)


def _evenly(size, most):
    """Return the size of parts of at most ``most`` that are about alike."""
    return -(-size // -(-size // most))


def _smaller(plan):
    """Return plans that need less and less shared memory."""
    tiles = itertools.takewhile(bool, (plan.tiles >> n for n in itertools.count()))
    yield from (plan._replace(tiles=n) for n in tiles)
    one = plan._replace(tiles=1)
    for lanes in (8, 4, 2):
        if lanes < one.lanes:
            yield one._replace(lanes=lanes)
    least = one._replace(lanes=2)
    while least.tile_h > 1 or least.runs > 1:
        least = least._replace(tile_h=-(-least.tile_h // 2), runs=-(-least.runs // 2))
        yield least
    yield least._replace(run=1)


def _fits(plan, conv, device):
    most = _SHARED if plan.tiles > 1 else device.shared_bytes
    return plan.shared_bytes(conv) <= min(most, device.shared_bytes)
