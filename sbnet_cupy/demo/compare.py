"""Run one computation densely and block-sparsely, compare the values, and time both."""

import time
from dataclasses import dataclass

import numpy as np

from .. import reduce_mask, sparse_scatter
from ..core.arrays import is_cupy, namespace


@dataclass(frozen=True)
class Comparison:
    """The two results and how they relate; arrays on the device where they were computed."""

    dense: object  # [1, H, W, K]
    sparse: object  # [1, H, W, K]
    inside: object  # [1, H, W] bool: pixels that an active block computes
    tile: tuple[int, int]
    blocks: tuple[int, int]  # active, all
    dense_ms: float
    list_ms: float
    sparse_ms: float
    error: float  # largest absolute difference inside active blocks
    tolerance: float  # what rounding can explain

    @property
    def agrees(self):
        """Whether rounding explains the difference."""
        return self.error <= self.tolerance

    @property
    def speedup(self):
        """Dense time over block-sparse time, the listing of the blocks included."""
        return self.dense_ms / (self.list_ms + self.sparse_ms)


def compare(mask, params, dense, sparse, *, terms):
    """Compare ``dense()`` with ``sparse(indices)`` over the blocks whose output tile meets a mask.

    ``terms`` is the number of products that a result is summed from: it sets the tolerance.
    """
    tile = params.bsize_out

    def list_blocks():
        return reduce_mask(mask, params.bcount, bsize=tile, bstride=tile)

    indices = list_blocks()
    sparse_result, dense_result = sparse(indices), dense()
    list_ms, sparse_ms, dense_ms = best_times(
        (list_blocks, lambda: sparse(indices), dense), _gpu_clock if is_cupy(mask) else _cpu_clock
    )
    inside = _pixels_of(indices, tile, dense_result)
    difference = abs(dense_result - sparse_result) * inside[..., None]
    scale = float(abs(dense_result).max())
    return Comparison(
        dense=dense_result,
        sparse=sparse_result,
        inside=inside,
        tile=tile,
        blocks=(len(indices.active_block_indices), params.bcount[0] * params.bcount[1]),
        dense_ms=dense_ms,
        list_ms=list_ms,
        sparse_ms=sparse_ms,
        error=float(difference.max()),
        tolerance=terms * float(np.finfo(np.float32).eps) * scale,
    )


def _pixels_of(indices, tile, like):
    """Scatter blocks of ones: True at the output pixels of active blocks."""
    xp = namespace(like)
    ones = xp.ones((len(indices.active_block_indices), *tile, 1), dtype=bool)
    nothing = xp.zeros((*like.shape[:3], 1), dtype=bool)
    return sparse_scatter(ones, *indices, nothing, bsize=tile)[..., 0]


def best_times(functions, clock, rounds=20, seconds=4.0):
    """Return the best time of each function in ms, from rounds that run each of them once.

    In turn, so that whatever else the machine does meets them all alike.
    """
    times = []
    start = time.perf_counter()
    while not times or (len(times) < rounds and time.perf_counter() - start < seconds):
        times.append([clock(function) for function in functions])
    return [min(column) for column in zip(*times, strict=True)]


def _cpu_clock(function):
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e3


def _gpu_clock(function):
    import cupy

    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    start.record()
    function()
    end.record()
    end.synchronize()
    return cupy.cuda.get_elapsed_time(start, end)
