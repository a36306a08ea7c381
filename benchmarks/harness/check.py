"""Is a result right? Compared with the NumPy path, strip by strip: a strip is one row of blocks.

Small images are checked whole. Of large ones, the first strip, the last, and some between.
"""

import numpy as np

import sbnet_cupy as sb
from benchmarks.harness.inputs import to_host

CHECKED_BYTES = 64e6  # of images, per check
MOST_STRIPS = 64
PEER_STRIPS = 4  # of others than this library


class WrongResult(AssertionError):
    """A result that differs from the NumPy path's."""


def strips(images, rows, bytes_per_strip, most=MOST_STRIPS):
    """Choose pairs (image, block row) to check: all, or the first, the last and some between."""
    total = images * rows
    count = min(total, most, max(4, int(CHECKED_BYTES / max(bytes_per_strip, 1))))
    chosen = np.unique(np.linspace(0, total - 1, count).round().astype(int))
    return [divmod(int(number), rows) for number in chosen]


def rows_of(indices, n, hi):
    """Return the slice of a raster-ordered index table that lies in one row of blocks."""
    key = indices[:, 0].astype(np.int64) * 2**32 + indices[:, 1]
    return slice(*np.searchsorted(key, (n * 2**32 + hi, n * 2**32 + hi + 1)))


def strip_of(grid, height, hi):
    """Return (top, bottom) of a block row in the image, and the row's offset from the top."""
    first = grid["boffset"][0] + grid["bstride"][0] * hi
    top, bottom = max(first, 0), min(first + grid["bsize"][0], height)
    return top, max(bottom, top), first - top


def alone(indices):
    """Return (bin_counts, indices) of one row of blocks as if it were the only one."""
    moved = indices.copy()
    moved[:, :2] = 0
    return np.array([len(moved)], np.int32), moved


def compare(found, expected, tolerance=0.0):
    """Raise WrongResult unless every bit agrees, or every value within a tolerance."""
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        raise WrongResult(f"{found.dtype} {found.shape} is not {expected.dtype} {expected.shape}")
    if tolerance:
        wide = found.astype(np.float64) - expected.astype(np.float64)
        wrong = ~(np.abs(wide) <= tolerance)
    else:
        bits = f"u{expected.dtype.itemsize}"
        found, expected = np.ascontiguousarray(found), np.ascontiguousarray(expected)
        wrong = found.view(bits) != expected.view(bits)
    if wrong.any():
        first = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise WrongResult(
            f"{int(wrong.sum())} of {wrong.size} elements differ; the first is at {first}: "
            f"{found[first]} instead of {expected[first]}"
        )


def check_gather(x, stack, blocks, options, *, most=MOST_STRIPS, tolerance=0.0):
    """Check a stack that was gathered from the image ``x``; ``options`` as the op takes them."""
    grid, (images, height, *_) = blocks.gather_grid, x.shape
    options = {name: to_host(v) if hasattr(v, "dtype") else v for name, v in options.items()}
    if stack.shape[0] != blocks.count:
        raise WrongResult(f"{stack.shape[0]} blocks instead of {blocks.count}")
    for n, hi in strips(images, blocks.params.bcount[0], x[0, : grid["bsize"][0]].nbytes, most):
        rows = rows_of(blocks.indices, n, hi)
        top, bottom, offset = strip_of(grid, height, hi)
        if rows.start == rows.stop or top == bottom:
            continue
        moved = grid | {"boffset": (offset, grid["boffset"][1])}
        image = np.ascontiguousarray(to_host(x[n : n + 1, top:bottom]))
        expected = sb.sparse_gather(image, *alone(blocks.indices[rows]), **moved, **options)
        compare(to_host(stack[rows]), expected, tolerance)


def check_scatter(y, stack, blocks, options, call, *, most=MOST_STRIPS):
    """Check what ``call`` writes into the image ``y``: the blocks, and nothing else."""
    grid, (images, height, *_) = blocks.scatter_grid, y.shape
    count = -(-height // grid["bstride"][0])
    chosen = []
    for n, hi in strips(images, count, y[0, : grid["bsize"][0]].nbytes, most):
        top, bottom, _ = strip_of(grid, height, hi)
        before = np.array(to_host(y[n : n + 1, top:bottom]), order="C")
        chosen.append((n, hi, slice(top, bottom), before))
    call()
    for n, hi, lines, before in chosen:
        rows = rows_of(blocks.indices, n, hi)
        part = np.ascontiguousarray(to_host(stack[rows]))
        expected = sb.sparse_scatter(part, *alone(blocks.indices[rows]), before, **grid, **options)
        compare(to_host(y[n : n + 1, lines]), expected)


def check_indices(mask, found, bcount, grid, *, most=MOST_STRIPS):
    """Check a table of active blocks: raster order, and the rows of some strips of the mask."""
    found = to_host(found)
    flat = (found[:, 0].astype(np.int64) * bcount[0] + found[:, 1]) * bcount[1] + found[:, 2]
    inside = (found >= 0).all() and (found < (mask.shape[0], *bcount)).all()
    if not inside or (np.diff(flat) <= 0).any():
        raise WrongResult("the rows are not in raster order within the grid")
    one_row = (1, bcount[1])
    for n, hi in strips(mask.shape[0], bcount[0], mask[0, : grid["bsize"][0]].nbytes, most):
        top, bottom, offset = strip_of(grid, mask.shape[1], hi)
        part = np.ascontiguousarray(to_host(mask[n : n + 1, top:bottom]))
        moved = grid | {"boffset": (offset, grid["boffset"][1])}
        expected = sb.reduce_mask(part, one_row, **moved).active_block_indices[:, 2]
        compare(found[rows_of(found, n, hi), 2].astype(np.int32), expected)
