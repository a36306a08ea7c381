"""Run one computation densely and block-sparsely, compare the values, and time both."""

import time
from dataclasses import dataclass

import numpy as np

from .. import reduce_mask, sparse_scatter
from .._arrays import is_cupy, namespace


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

    indices, list_ms = best_time(list_blocks, like=mask)
    sparse_result, sparse_ms = best_time(lambda: sparse(indices), like=mask)
    dense_result, dense_ms = best_time(dense, like=mask)
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


def best_time(function, *, like, runs=20, seconds=1.5):
    """Return ``function()`` and its best time in ms: warmed up, up to ``runs`` in ``seconds``."""
    clock = _gpu_clock if is_cupy(like) else _cpu_clock
    result, _ = clock(function)
    times = []
    start = time.perf_counter()
    while len(times) < runs and (not times or time.perf_counter() - start < seconds):
        times.append(clock(function)[1])
    return result, min(times)


def _cpu_clock(function):
    start = time.perf_counter()
    result = function()
    return result, (time.perf_counter() - start) * 1e3


def _gpu_clock(function):
    import cupy

    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    start.record()
    result = function()
    end.record()
    end.synchronize()
    return result, cupy.cuda.get_elapsed_time(start, end)
