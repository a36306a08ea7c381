"""Run one computation densely and block-sparsely, compare the values, and time both."""

import contextlib
import time
from dataclasses import dataclass

import numpy as np

from .. import reduce_mask, sparse_scatter
from ..core.arrays import is_cupy, namespace

STEPS = 4  # that ``compare`` tells the progress bar
CHUNK = 1 << 22  # elements of a result that are compared at a time


@dataclass(frozen=True)
class Peer:
    """The dense computation by another library: its best time, or why there is none."""

    name: str
    layout: str | None  # the faster one
    ms: float | None
    error: float  # largest absolute difference from our dense result


@dataclass(frozen=True)
class Comparison:
    """The results and how they relate; arrays on the device where they were computed."""

    dense: object  # [1, H, W, K]
    sparse: object  # [1, H, W, K]
    difference: object  # [H, W], the largest over K inside active blocks; 0 outside
    inside: object  # [1, H, W] bool: pixels that an active block computes
    tile: tuple[int, int]
    blocks: tuple[int, int]  # active, all
    dense_ms: float
    list_ms: float
    sparse_ms: float
    error: float  # largest absolute difference inside active blocks
    tolerance: float  # what rounding can explain
    peer: Peer | None = None

    @property
    def agrees(self):
        """Whether rounding explains the difference."""
        return self.error <= self.tolerance

    @property
    def whole_sparse_ms(self):
        """Block-sparse time, the listing of the blocks included."""
        return self.list_ms + self.sparse_ms


def compare(mask, params, dense, sparse, *, terms, progress, torch_dense=None):
    """Compare ``dense()`` with ``sparse(indices)`` over the blocks whose output tile meets a mask.

    ``terms`` is the number of products that a result is summed from: it sets the tolerance.
    ``torch_dense`` is the dense computation by PyTorch, as of module ``torch_dense``, or None.
    """
    tile = params.bsize_out

    def list_blocks():
        return reduce_mask(mask, params.bcount, bsize=tile, bstride=tile)

    indices = list_blocks()
    progress.step("computing block-sparsely")
    sparse_result = sparse(indices)
    progress.step("computing densely")
    dense_result = dense()
    inside = _pixels_of(indices, tile, dense_result)
    difference = _difference(dense_result, sparse_result) * inside[0]
    tolerance = terms * float(np.finfo(np.float32).eps) * _largest(dense_result)
    progress.step("computing densely with PyTorch")
    peer_error = torch_dense and _peer_error(torch_dense, dense_result)
    launches = torch_dense.launches if torch_dense and peer_error <= tolerance else {}
    progress.step("timing")
    with torch_dense.settings() if launches else contextlib.nullcontext():
        list_ms, sparse_ms, dense_ms, *peer_ms = best_times(
            (list_blocks, lambda: sparse(indices), dense, *launches.values()),
            _gpu_clock if is_cupy(mask) else _cpu_clock,
            progress,
        )
    ms, layout = min(zip(peer_ms, launches, strict=True), default=(None, None))
    return Comparison(
        dense=dense_result,
        sparse=sparse_result,
        difference=difference,
        inside=inside,
        tile=tile,
        blocks=(len(indices.active_block_indices), params.bcount[0] * params.bcount[1]),
        dense_ms=dense_ms,
        list_ms=list_ms,
        sparse_ms=sparse_ms,
        error=float(difference.max()),
        tolerance=tolerance,
        peer=torch_dense and Peer(torch_dense.name, layout, ms, peer_error),
    )


def _pixels_of(indices, tile, like):
    """Scatter blocks of ones: True at the output pixels of active blocks."""
    xp = namespace(like)
    ones = xp.ones((len(indices.active_block_indices), *tile, 1), dtype=bool)
    nothing = xp.zeros((*like.shape[:3], 1), dtype=bool)
    return sparse_scatter(ones, *indices, nothing, bsize=tile)[..., 0]


def _peer_error(torch_dense, dense_result):
    """Return how far PyTorch's results are from ours at most."""
    with torch_dense.settings():
        differences = [
            float(_difference(dense_result, torch_dense.to_native(launch())).max())
            for launch in torch_dense.launches.values()
        ]
    return float(np.max(differences))


def _difference(a, b):
    """Return the largest absolute difference over K of images [1, H, W, K], as [H, W]."""
    xp = namespace(a)
    return xp.concatenate([abs(a[0, i] - b[0, i]).max(axis=2) for i in _chunks(a)])


def _largest(a):
    """Return the largest absolute value of an image [1, H, W, K]."""
    return float(np.max([float(abs(a[0, i]).max()) for i in _chunks(a)]))


def _chunks(a):
    """Return slices of rows, so that what is computed of each takes bounded memory."""
    rows = max(CHUNK // (a.shape[2] * a.shape[3]), 1)
    return [slice(i, i + rows) for i in range(0, a.shape[1], rows)]


def best_times(functions, clock, progress, rounds=20, seconds=4.0):
    """Return the best time of each function in ms, from rounds that run each of them once.

    In turn, so that whatever else the machine does meets them all alike.
    """
    times = []
    start = time.perf_counter()
    while not times or (len(times) < rounds and time.perf_counter() - start < seconds):
        times.append([clock(function) for function in functions])
        progress.part(min((time.perf_counter() - start) / seconds, 1))
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
