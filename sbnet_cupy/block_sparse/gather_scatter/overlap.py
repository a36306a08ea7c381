"""sparse_scatter where blocks share pixels: each pixel takes its values in the order of the rows.

On NumPy arrays by pixel number. On a GPU each stride-sized cell of the image belongs to one thread
block, which applies the rows of the stack that cover it in ascending order.
"""

import numpy as np

from ...core import launch as kernels
from ...core.arrays import channels_last_view, namespace
from ...core.compile import cpp_name
from ...core.launch import THREADS
from ..corners import chunks, pixels, row_index


def put(image, place, values, add):
    """``image[place] = values``, or ``+=`` with a function that adds; no pixel comes twice."""
    if add:
        total = np.ascontiguousarray(image[place])
        add(total, values)
        values = total
    image[place] = values


def scatter_pixels(blocks, corners, y, layout, bsize, add):
    """Write or add pixel by pixel number, in the order of the stack's rows."""
    image = channels_last_view(y, layout.channels_last)
    stack = channels_last_view(blocks, layout.blocks_channels_last)
    # beside the values, numbers and their order: some ten words for each pixel
    for part in chunks(corners, blocks[:1].nbytes + 80 * bsize[0] * bsize[1]):
        flat, valid = pixels(part, layout, bsize)
        flat, values = flat[valid], stack[row_index(part.rows)][valid]
        if add:
            _add_in_order(image, flat, values, layout, add)
        else:
            image[_position(flat, layout)] = values


def _position(flat, layout):
    """Return the index ``(n, h, w)`` of pixel numbers."""
    n, hw = np.divmod(flat, layout.H * layout.W)
    return n, *np.divmod(hw, layout.W)


def _add_in_order(image, flat, values, layout, add):
    """``image[flat] += values`` one after another where a pixel comes more than once.

    The k-th value of every pixel is added in the k-th round, so that each round meets a pixel once.
    """
    order = np.argsort(flat, kind="stable")
    ordered = flat[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]]) if len(order) else order
    group_sizes = np.diff(np.r_[starts, len(order)])
    turn = np.arange(len(order)) - np.repeat(starts, group_sizes)
    for k in range(int(group_sizes.max(initial=0))):
        now = order[turn == k]
        put(image, _position(flat[now], layout), values[now], add)


def combination(y, add):
    """Return the C++ type of elements that are computed with, and the functor that combines."""
    element = cpp_name(y.dtype, "x") if add else None
    return element, f"Add<{element}>" if add else "Overwrite"


def scatter_overlap_cuda(blocks, bin_counts, active_block_indices, y, *, layout, grid, add):
    """Chain the stack's rows by the cell of their corner, then let each cell apply its own."""
    rows = len(active_block_indices)
    first, count, reach = _cells(layout, grid)
    cells = (*first, *count)
    if 0 in count:
        return
    xp = namespace(y)
    heads = xp.empty(layout.N * count[0] * count[1], np.int32)
    kernels.enqueue(heads.fill, -1)
    links = xp.empty(rows, np.int32)
    kernels.launch(
        "block_sparse/gather_scatter/sparse_scatter",
        "scatter_link",
        (0,),
        -(-rows // THREADS),
        THREADS,
        (bin_counts, active_block_indices, heads, links, rows, layout.N, *cells),
        persistent=True,
    )
    planes, pixel = (1, layout.C) if layout.channels_last else (layout.C, 1)
    area = grid.bsize[0] * grid.bsize[1]
    channel_step, pixel_step = (1, layout.C) if layout.blocks_channels_last else (area, 1)
    sizes = (planes, pixel, channel_step, pixel_step, channel_step, layout.N, layout.H, layout.W)
    element, functor = combination(y, add)
    kernels.launch(
        "block_sparse/gather_scatter/sparse_scatter",
        "scatter_overlap",
        (element or f"Bytes<{y.dtype.itemsize}>::type", *grid.bsize, functor),
        layout.N * (count[0] + reach[0]) * (count[1] + reach[1]),
        THREADS,
        (y, active_block_indices, blocks, heads, links, *sizes, *grid.boffset, *grid.bstride,
         *cells, *reach),
        persistent=True,
    )  # fmt: skip


def _cells(layout, grid):
    """Return, per axis, the first cell whose block meets the image, how many do, and their reach.

    Those with ``-bsize < boffset + bstride * index < size``.
    """
    axes = list(zip(grid.bsize, grid.boffset, grid.bstride, (layout.H, layout.W), strict=True))
    first = [-((b + offset - 1) // s) for b, offset, s, _ in axes]
    last = [(n - 1 - offset) // s for _, offset, s, n in axes]
    count = [max(end - begin + 1, 0) for begin, end in zip(first, last, strict=True)]
    return first, count, [-(-b // s) - 1 for b, _, s, _ in axes]


def scratch_sizes(rows, layout, grid):
    """Return the bytes of each array that a GPU allocates to apply overlapping blocks in order."""
    _, count, _ = _cells(layout, grid)
    return 4 * layout.N * count[0] * count[1], 4 * rows
