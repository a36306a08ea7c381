"""reduce_mask: from a mask to the list of active blocks."""

import functools
import math
from dataclasses import dataclass

import numpy as np

from ...core import launch as kernels
from ...core.arrays import (
    array_function,
    dtype_kind,
    dtype_name,
    empty,
    namespace,
    vector_bytes,
)
from ...core.checks import check_array, check_contiguous, check_flag, check_tolerance
from ...core.compile import cpp_name
from ...core.device import has_clusters, sm_count
from ...core.operator import Operator, Plan
from ...core.sizes import hint_for, is_integer, pair
from ...core.workspace import workspace
from ...errors import ShapeError
from ..active_blocks import ActiveBlocks
from ..from_mask import images_of_mask
from ..grid import resolve_grid
from .config import configure_mask, shared_memory
from .listing import prepare_listing, write_rows

_MOST_BLOCKS = 2**31 - 1


@array_function
def reduce_mask(
    mask,
    block_count,
    *,
    bsize,
    boffset=(0, 0),
    bstride=None,
    tol=0.0,
    avgpool=False,
    capacity=None,
):
    """List the blocks of a grid where the mask is set.

    Block ``(n, hi, wi)`` covers ``mask[n, h0 : h0 + bsize[0], w0 : w0 + bsize[1]]`` with
    ``h0 = boffset[0] + bstride[0] * hi``, ``w0 = boffset[1] + bstride[1] * wi``. It is active when
    its pooled value is greater than ``tol``.

    Parameters
    ----------
    mask : array, shape (N, H, W), (N, H, W, 1) or (N, 1, H, W), or (H, W) for one
        bool, any integer, float16, bfloat16, float32 or float64. C-contiguous; a NumPy array that
        is not is copied.
    block_count : int or (int, int)
        Number of blocks along ``H`` and ``W``: ``BlockParams.bcount``.
    bsize : int or (int, int)
        Block size ``(h, w)`` in pixels.
    boffset : (int, int)
        Corner of block (0, 0) in the mask; negative for padding.
    bstride : (int, int), optional
        Distance between block corners; ``bsize`` by default.
    tol : float
        Threshold. For a float mask it is rounded to the mask's dtype before the comparison.
    avgpool : bool
        Pool by the sum over the block divided by ``bsize[0] * bsize[1]``, pixels outside the image
        counting 0. By default by the maximum over the pixels inside the image; NaN is never
        greater, and a block wholly outside is inactive.
    capacity : int, optional
        Number of rows to return. Rows past the count are -1, blocks past the capacity are left out
        (:attr:`ActiveBlocks.overflowed` tells), and nothing waits for the device, so that the call
        can be captured in a CUDA graph. Without it the count is read, and the rows are as many.

    Returns
    -------
    ActiveBlocks
        Unpacks as ``bin_counts`` (int32, shape (1,)) and ``active_block_indices`` (int32, shape
        (M, 3), rows ``(n, hi, wi)`` in raster order). In the library and on the device of ``mask``.

    Raises
    ------
    ShapeError
        If a size is wrong or the mask is not contiguous.
    DTypeError
        If the mask is complex or no array.

    Source: Ren et al. 2018, arXiv:1801.02108, section 3.1.
    Kernel: cuda_src/block_sparse/mask/reduce_mask.cu

    Examples
    --------
    >>> import numpy as np
    >>> mask = np.zeros((1, 4, 6), bool)
    >>> mask[0, 3, 1] = True
    >>> reduce_mask(mask, (2, 3), bsize=2).active_block_indices
    array([[0, 1, 0]], dtype=int32)
    """
    options = (block_count, bsize, boffset, bstride, tol, avgpool, capacity)
    mask = images_of_mask(mask)
    plan = REDUCE_MASK.plan_for((mask,), options)
    return ActiveBlocks(*plan.run(mask), plan.blocks)


def resolve_mask(mask, block_count, bsize, boffset, bstride, tol, avgpool, capacity):
    """Check the arguments of reduce_mask; return (block grid (N, h, w), the grid, tol)."""
    grid = resolve_grid(bsize, boffset, bstride)
    check_flag("avgpool", avgpool)
    blocks = _check(mask, pair(block_count, "block_count", minimum=0), capacity)
    return blocks, grid, check_tolerance(tol)


@dataclass(eq=False, slots=True)
class MaskPlan(Plan):
    """The plan of a call; what it runs returns the count and the list.

    ``launch`` takes the mask, the count, the list and a workspace.

    Parameters
    ----------
    blocks : (int, int, int)
        Images, block rows and block columns.
    workspace : int
        Slots of 8 bytes that are 0 at first, and that each launch leaves ready for the next one.
        Where there are none, any memory will do.
    """

    blocks: tuple = ()
    workspace: int = 0


def _infer(specs, options):
    """Check all arguments; return the specs of the count and of the list with room for all."""
    (mask,), (*_, capacity) = specs, options
    blocks, _, _ = resolve_mask(mask, *options)
    rows = math.prod(blocks) if capacity is None else capacity
    return mask.new((1,), np.int32), mask.new((rows, 3), np.int32)


def _plan(specs, options):
    """Check all arguments; return the plan of the call."""
    (mask,), (*_, avgpool, capacity) = specs, options
    blocks, grid, tol = resolve_mask(mask, *options)
    mask = mask._replace(shape=mask.shape[:3])
    call = (mask, blocks, grid, _threshold(mask.dtype, tol), avgpool, capacity)
    if mask.on_gpu and mask.size:
        return _reduce_mask_cuda(*call)
    listing = prepare_listing(*call)
    rows = math.prod(blocks) if capacity is None else capacity
    results = (mask.new((1,), np.int32), mask.new((rows, 3), np.int32))
    body = _list_nothing if mask.on_gpu else _reduce_mask_numpy
    run = functools.partial(body, listing=listing)
    return MaskPlan(results, run, weight=_WEIGHT, blocks=blocks)


_WEIGHT = 64  # listings of huge masks have hundreds of parts


def _list_nothing(mask, *, listing):
    """List the blocks of a mask with no pixel: there is nothing for a GPU to do."""
    listed = _reduce_mask_numpy(np.zeros(mask.shape, mask.dtype), listing=listing)
    return tuple(map(namespace(mask).asarray, listed))


def _check(mask, block_count, capacity):
    """Check the mask and the sizes; return the grid of blocks (N, h, w)."""
    check_array("mask", mask, ndim=(3, 4), kinds="biuf")
    if mask.ndim == 4 and mask.shape[3] != 1:
        raise ShapeError(
            "mask must have shape (N, H, W), (N, H, W, 1) or (N, 1, H, W), or (H, W) for one "
            f"image, got {mask.shape}; make one channel of several, such as mask.any(-1)"
        )
    check_contiguous("mask", mask)
    if max(mask.shape) >= 2**30:
        raise ShapeError(f"mask must be under 2**30 along each axis, got {mask.shape}")
    if capacity is not None and (not is_integer(capacity) or not 0 <= capacity <= _MOST_BLOCKS):
        raise ShapeError(
            f"capacity must be a non-negative integer below 2**31, or None, got {capacity!r}"
            f"{hint_for(capacity)}"
        )
    blocks = (mask.shape[0], *block_count)
    if math.prod(blocks) > _MOST_BLOCKS:
        raise ShapeError(f"block_count must give under 2**31 blocks, got {blocks} (N, h, w)")
    return blocks


@functools.lru_cache(256)
def _threshold(dtype, tol):
    """Return (tol as a float mask sees it, least active integer, whether nothing can be active).

    A whole number is greater than tol when it is at least ``floor(tol) + 1``.
    """
    if dtype_kind(dtype) == "f":
        with np.errstate(over="ignore"):
            return float(np.asarray(tol).astype(dtype)), 0, False
    low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    if math.isinf(tol):
        return tol, low, tol > 0
    least = math.floor(tol) + 1
    return tol, int(min(max(least, low), high)), least > high


def _reduce_mask_numpy(mask, *, listing):
    """Pool some rows of blocks at a time, then list those that are active."""
    image = mask if mask.ndim == 3 else mask.reshape(mask.shape[:3])
    found, count = [], 0
    for first, pool in listing.parts:
        active = pool(image).reshape(-1)
        count += np.count_nonzero(active)
        found.append((first, active))
    size = count if listing.capacity is None else listing.capacity
    memory = empty((_ALIGNED + 3 * size,), np.int32, mask)  # once for both costs less
    counts, indices = memory[:1], memory[_ALIGNED:].reshape(size, 3)
    counts[0] = count
    done = 0
    for first, active in found:
        numbers = active.nonzero()[0][: size - done]
        if first:
            numbers += first
        write_rows(numbers, indices[done : done + len(numbers)], listing)
        done += len(numbers)
    if done < size:
        indices[done:] = -1
    return counts, indices


_ALIGNED = 16  # numbers of 4 bytes: 64


def plan_mask_table(specs, options):
    """Return a plan that also gives the row of each block, or -1: int32 ``[N, h, w]``.

    None where there is no kernel, on a CPU and for masks or grids with nothing in them.
    """
    (mask,), (*_, avgpool, capacity) = specs, options
    blocks, grid, tol = resolve_mask(mask, *options)
    mask = mask._replace(shape=mask.shape[:3])
    if not (mask.on_gpu and mask.size and math.prod(blocks)):
        return None
    thresholds = _threshold(mask.dtype, tol)
    return _reduce_mask_cuda(mask, blocks, grid, thresholds, avgpool, capacity, table=True)


def _reduce_mask_cuda(mask, blocks, grid, thresholds, avgpool, capacity, table=False):
    """Prepare one launch; see cuda_src/block_sparse/mask/reduce_mask.cu."""
    candidates = math.prod(blocks)
    rows = candidates if capacity is None else capacity
    results = (mask.new((1,), np.int32), mask.new((rows, 3), np.int32))
    if not candidates:
        run = functools.partial(_no_blocks, rows=rows)
        return MaskPlan(results, run, blocks=blocks)
    threshold, least, never = thresholds
    type_name = cpp_name(mask.dtype, "mask")
    if dtype_name(mask.dtype) == "bool":
        type_name = "unsigned char"
    item = mask.dtype.itemsize
    word = max(vector_bytes(mask.shape[2] * item, mask.alignment) // item, 1)
    machine = sm_count(), has_clusters()
    config = configure_mask(mask.shape, item, word, blocks, grid, avgpool, *machine)
    nonzero = not avgpool and type_name == "unsigned char" and least == 1
    slots, kept = shared_memory(config, avgpool)
    sizes = (*mask.shape[:3], *blocks[1:], *grid.boffset, *grid.bstride)
    options = (threshold, _as_signed(least), int(never), rows)
    shares = (config.lines, config.span, config.down, slots, kept)
    reads = (config.word, config.lanes, nonzero)
    launch = kernels.prepare(
        "block_sparse/mask/reduce_mask",
        "mask_table" if table else "reduce_mask",
        (type_name, *grid.bsize, bool(avgpool), *reads, config.threads, config.together),
        config.thread_blocks,
        config.threads,
        5 if table else 4,
        (*sizes, *options, *shares, int(capacity is not None)),
        shared=kept + 4 * -(-config.lines * config.span // 32),
        dependent=True,
        cluster=max(config.together, 1),
    )
    slots = 0 if config.together else 1 + config.thread_blocks

    def run(mask):
        counts, indices = empty((1,), np.int32, mask), empty((rows, 3), np.int32, mask)
        places = (empty(blocks, np.int32, mask),) if table else ()
        scratch = workspace(namespace(mask), slots) if slots else counts
        launch(mask, counts, indices, *places, scratch)
        return counts, indices[: int(counts[0])] if capacity is None else indices, *places

    operands = tuple(range(5 if table else 4))
    results += (mask.new(blocks, np.int32),) * table
    return MaskPlan(results, run, launch, operands=operands, blocks=blocks, workspace=slots)


def _no_blocks(mask, *, rows):
    """List the blocks of a grid that has none."""
    counts, indices = empty((1,), np.int32, mask), empty((rows, 3), np.int32, mask)
    counts[...] = 0
    indices[...] = -1
    return counts, indices


def _as_signed(value):
    """Return the signed 64-bit number with the bits of an unsigned one."""
    return value - 2**64 if value >= 2**63 else value


REDUCE_MASK = Operator(
    "reduce_mask",
    arrays=("mask",),
    options=("block_count", "bsize", "boffset", "bstride", "tol", "avgpool", "capacity"),
    infer=_infer,
    plan=_plan,
    results=(),
)
