"""Launches of the CUDA kernels that pool a stack of blocks; the arrays as in stack_launch.py.

    run = prepare_stack_max_pool(pool)                keep it: it costs more than a call
    run(x, bin_counts, active_block_indices, grid, out)
    run = prepare_stack_avg_pool(pool, count_include_pad, divisor)            the same arrays
    run = prepare_stack_max_pool_choice(pool)
    run(x, bin_counts, active_block_indices, grid, out, choice)               choice: bytes like out
    run = prepare_stack_max_pool_grad(pool)
    run(grad, choice, bin_counts, active_block_indices, grid, dx)
    run = prepare_stack_global_pool(pool, "mean")     pool: rows, images, grid, block, image, x
    run(x, bin_counts, active_block_indices, grid, out)                       out: [N, C], or
                                                      [N, P, Q, C] of windows of adaptive pooling

x may be some channels of another stack, and so may out, but where choices are told or made use of,
or images pooled: ``part_of`` and ``out_part_of`` of StackPool. ``clear_rows`` clears the rows past
the count of an out that is no such part.

``settled`` promises that no kernel that may still run writes the table. Each returns
None where sizes are too large for the kernels.
"""

import math
from typing import NamedTuple

import numpy as np

from ...core import launch as kernels
from ...core.arrays import empty
from ...core.device import current_device
from ...core.graph_memory import keep_if_capturing
from . import channel_vectors

_MOST_PIXELS = 8192  # of blocks and windows, so that divisions are exact
_LARGEST = 2**24  # images, so that positions stay below 2**31
_MOST_TAPS = 256  # that a byte can tell apart
_UNROLLED = ((2, 2), (3, 3))  # windows with instances of their own
_UNROLLED_MAXIMA = (*_UNROLLED, (5, 5))  # as of spatial pyramids; sums would spill
MODES = ("sum", "max")  # as in stack_global_pool.cu
_PART = 2048  # pixels of a part of an image, at least
_MOST_PARTS = 64
_CLUSTER = 8  # parts that thread blocks of a cluster can put together
_ENOUGH = 1024  # thread blocks
_FEW = 256  # thread blocks, about two for each multiprocessor


class StackPool(NamedTuple):
    """A pooling: sizes in pixels; of a global one the first six alone count."""

    element: str  # C++ type: Half, BFloat16, float or double
    element_bytes: int
    rows: int  # of the stacks: their capacity
    images: int
    grid: tuple[int, int]  # blocks of an image
    channels: int
    block: tuple[int, int]
    image: tuple[int, int]
    block_out: tuple[int, int] = (1, 1)
    kernel: tuple[int, int] = (1, 1)
    strides: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)
    pads: tuple[tuple[int, int], tuple[int, int]] = ((0, 0), (0, 0))
    alignment: int = 16  # bytes of which the addresses of x and out are multiples
    part_of: int | None = None  # channels of the stack of which x is a part, if it is one
    out_part_of: int | None = None  # those of which out is a part
    image_out: tuple[int, int] = (0, 0)  # of a gradient alone
    windows: tuple[int, int] = (1, 1)  # of an image, of a global one; more are an adaptive pooling

    vector, vectors = channel_vectors.vector, channel_vectors.vectors
    slices = channel_vectors.slices  # thread blocks of a global pooling that take a pixel

    @property
    def pitches(self):
        """Channels from a pixel to the next, of x and of out."""
        return self.part_of or self.channels, self.out_part_of or self.channels

    @property
    def is_pitched(self):
        """Whether x or out is a part of another stack."""
        return self.part_of is not None or self.out_part_of is not None

    @property
    def steps(self):
        """Vectors from a pixel to the next, of x and of out."""
        return tuple(c * self.element_bytes // self.vector for c in self.pitches)

    @property
    def lanes(self):
        """Threads of a global pooling that take a pixel together, a vector each: 32 bytes.

        More where windows have few pixels, as long as there are thread blocks enough.
        """
        most = 1 << max(self.vectors - 1, 0).bit_length()
        lanes = min(max(32 // self.vector, 1), 8, most)
        if self.windows == (1, 1):
            return lanes
        while lanes < min(most, 32) and self.results * self.vectors >= _FEW * 2 * lanes:
            lanes *= 2
        return lanes

    @property
    def parts(self):
        """Parts of an image, or of a window, that a global pooling reduces apart.

        They depend on sizes alone, so that sums have the same bits on every GPU.
        """
        sides = zip(self.grid, self.block, self.windows, strict=True)
        parts = -(-math.prod(-(-g * b // w) for g, b, w in sides) // _PART)
        most = _MOST_PARTS if parts > 2 * _CLUSTER else _CLUSTER
        return max(min(parts, most, _ENOUGH // max(self.results * self.slices, 1)), 1)

    @property
    def results(self):
        """Windows of all images."""
        return self.images * math.prod(self.windows)

    @property
    def fits(self):
        """Whether the kernels can count its pixels."""
        reach = [(k - 1) * d for k, d in zip(self.kernel, self.dilation, strict=True)]
        sizes = (*self.block, *self.block_out, *reach, *map(max, self.pads))
        pixels = self.rows * max(math.prod(self.block), math.prod(self.block_out))
        return max(sizes) <= _MOST_PIXELS and max(self.image) <= _LARGEST and pixels < 2**31


def prepare_stack_max_pool(pool, settled=False, clear_rows=True, zeros_around=False):
    """Return the launch of a max pooling, or None; zeros around the image may count, too."""
    (top, _), (left, _) = pool.pads
    numbers = (*pool.strides, *pool.dilation, top, left, int(zeros_around))
    return _prepare_windows("stack_max_pool", pool, numbers, settled, clear_rows)


def prepare_stack_avg_pool(pool, count_include_pad, divisor, settled=False, clear_rows=True):
    """Return the launch of an average pooling, or None; ``divisor`` may be None."""
    (top, bottom), (left, right) = pool.pads
    counting = int(count_include_pad), float(divisor or 0)
    numbers = (*pool.strides, top, left, bottom, right, *counting)
    return _prepare_windows("stack_avg_pool", pool, numbers, settled, clear_rows)


def prepare_stack_max_pool_choice(pool, settled=False):
    """Return the launch of a max pooling that tells which pixels it chose, or None."""
    if math.prod(pool.kernel) > _MOST_TAPS:
        return None
    (top, _), (left, _) = pool.pads
    numbers = (*pool.strides, *pool.dilation, top, left)
    stem = "stack_max_pool_grad"
    return _prepare_windows("stack_max_pool_choice", pool, numbers, settled, True, stem, 6)


def prepare_stack_max_pool_grad(pool):
    """Return the launch of the gradient of a max pooling, from what was chosen, or None."""
    if not pool.fits or math.prod(pool.kernel) > _MOST_TAPS:
        return None
    (top, _), (left, _) = pool.pads
    numbers = (*pool.strides, *pool.dilation, top, left, *pool.image_out)
    return _prepare("stack_max_pool_grad", "stack_max_pool_grad", pool, pool.block, 6, numbers)


def _prepare_windows(name, pool, numbers, settled, clear_rows, stem=None, pointers=5):
    if not pool.fits:
        return None
    numbers = (*numbers, int(settled), int(clear_rows))
    pitched = ()
    if stem is None:
        assert not (clear_rows and pool.out_part_of), "rows of a part are not cleared"
        pitched, numbers = (pool.is_pitched,), (*numbers, *pool.steps)
    return _prepare(stem or name, name, pool, pool.block_out, pointers, numbers, pitched)


def _prepare(stem, name, pool, written, pointers, numbers, pitched=()):
    """Return the launch of a kernel that writes ``written`` pixels of each row."""
    vectors = pool.rows * math.prod(written) * pool.vectors
    known = _UNROLLED if stem == "stack_avg_pool" else _UNROLLED_MAXIMA
    unrolled = pool.kernel if pool.kernel in known else (0, 0)
    return kernels.prepare(
        f"block_sparse/stack/{stem}",
        name,
        (pool.element, f"Bytes<{pool.vector}>::type", *unrolled, *pitched),
        -(-vectors // kernels.THREADS),
        kernels.THREADS,
        pointers,
        (
            pool.rows, pool.images, *pool.grid, pool.vectors, *pool.block, *pool.image,
            *pool.block_out, *pool.kernel, *numbers,
        ),
        persistent=True,
        dependent=True,
    )  # fmt: skip


def _in_cluster(pool):
    """Return how many thread blocks put the parts of an image together, 1 where they do not."""
    return pool.parts if pool.parts <= _CLUSTER and current_device().bulk_copy else 1


def pools_at_once(pool):
    """Whether a global pooling is one kernel, which takes no memory of its own."""
    return pool.parts == _in_cluster(pool)


def prepare_stack_global_pool(pool, mode, settled=False):
    """Return the launch of a pooling of whole images, or None; ``mode`` is mean, max or sum.

    Of several ``windows`` of each image the mean or the maximum: the result is ``[N, P, Q, C]``.
    """
    if not pool.fits:
        return None
    parts, divisor = pool.parts, 1.0
    if mode == "mean":
        divisor = float(max(math.prod(pool.image), 1))
    how, windowed = MODES.index("max" if mode == "max" else "sum"), pool.windows != (1, 1)
    together = _in_cluster(pool)
    run = kernels.prepare(
        "block_sparse/stack/stack_global_pool",
        "stack_global_pool",
        (pool.element, f"Bytes<{pool.vector}>::type", pool.lanes, how, together, windowed),
        pool.results * parts * pool.slices,
        kernels.THREADS,
        5,
        (
            pool.rows, pool.images, *pool.grid, pool.vectors, *pool.block, *pool.image,
            *pool.windows, parts, divisor, int(settled), pool.steps[0],
        ),
        persistent=True,
        dependent=True,
        cluster=together,
    )  # fmt: skip
    if parts == together:
        return kernels.Series((run, (0, 1, 3, None, 4)))
    add_up = kernels.prepare(
        "block_sparse/stack/stack_global_pool",
        "stack_global_pool_parts",
        (pool.element, how, windowed),
        -(-pool.results * pool.channels // kernels.THREADS),
        kernels.THREADS,
        2,
        (pool.images, pool.channels, *pool.image, *pool.windows, parts, divisor),
        persistent=True,
        dependent=True,
    )
    wide = np.float64 if pool.element == "double" else np.float32

    def launch_both(x, bin_counts, indices, grid, out):
        partials = empty((pool.results * parts * pool.channels,), wide, x)
        keep_if_capturing(partials)
        run(x, bin_counts, grid, partials, out)
        add_up(partials, out)

    return launch_both
