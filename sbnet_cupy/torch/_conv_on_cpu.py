"""sparse_conv2d on a CPU: the stack of blocks by PyTorch's own convolution, which is oneDNN's."""

import numpy as np
import torch

from ..block_sparse import compositions, native
from ..block_sparse.background import fill_background
from ..block_sparse.block_params import BlockParams
from ..block_sparse.corners import clear_outside, find_corners, inside_pieces, meeting, row_index
from ..block_sparse.grid import Grid, Layout
from ..core.sizes import pair
from ..dense.activation import apply_affine
from ._convolve import convolve_plainly


def conv_on_cpu(dtype, options):
    """Return what computes a call on NumPy views of its tensors, or None to leave it to NumPy.

    Sums of half precision are NumPy's, which rounds them once.
    """
    params, strides, _, activation, data_format, w_format, _, method = options
    if method == "fused" or dtype is not torch.float32 or not _is_exact():
        return None
    params, last = BlockParams(*params), data_format == "NHWC"
    layout = compositions.layout_of_stack(last)

    def run(x, w, bin_counts, active_block_indices, scale, bias, base, out):
        active = bin_counts, active_block_indices
        grid = Grid(*compositions.grid_of(params))
        by_lines = last and x.size >= max(grid.bsize[1] * x.shape[3], 1)
        if by_lines:
            blocks = _gather(x, active, grid)
        else:
            blocks = native.gather(x, *active, *grid, **layout)
        kernel = w.transpose([w_format.index(letter) for letter in "OIHW"])
        y = convolve_plainly(blocks, kernel, pair(strides, "strides"))
        apply_affine(y, scale, bias, activation)
        if base is None:
            torch.from_numpy(out).zero_()  # by all threads, just before the blocks are written
        else:
            fill_background(base, out)
        if by_lines:
            _scatter(y, active, out, Grid(params.bsize_out, (0, 0), params.bsize_out))
        else:
            native.scatter(y, *active, out, params.bsize_out, **layout, out=out)

    return run


def _gather(x, active, grid):
    """Return the blocks of an NHWC image; all threads copy, a line of a block at a time."""
    layout, width = Layout(*x.shape, True, True), grid.bsize[1]
    corners = find_corners(*active, grid)
    count = len(corners.rows)
    blocks = np.empty(layout.blocks_shape(len(active[1]), grid.bsize), x.dtype)
    blocks[count:] = 0
    if not count:
        return blocks
    lines, first = _lines(x, corners, layout, grid.bsize)
    known = first.clip(0, len(lines) - 1)
    into = torch.from_numpy(blocks[:count]).view(len(first), width * layout.C)
    torch.index_select(lines, 0, torch.from_numpy(known), out=into)
    (cut,) = (first != known).nonzero()  # at the ends of the image's memory
    if len(cut):
        pixels = x.reshape(-1, layout.C)
        pixels = pixels.take(first[cut, None] + np.arange(width), axis=0, mode="clip")
        blocks.reshape(-1, width, layout.C)[cut] = pixels
    clear_outside(blocks[:count], corners, layout, grid.bsize)
    return blocks


def _scatter(blocks, active, out, grid):
    """Write blocks, of which no two share a pixel, to an NHWC image."""
    layout = Layout(*out.shape, True, True)
    corners = meeting(find_corners(*active, grid), layout, grid.bsize)
    if not len(corners.rows):
        return
    for (i0, i1), (j0, j1), some in inside_pieces(corners, layout, grid.bsize):
        at = some._replace(h0=some.h0 + i0, w0=some.w0 + j0)
        lines, first = _lines(out, at, layout, (i1 - i0, j1 - j0))
        values = torch.from_numpy(blocks[row_index(some.rows), i0:i1, j0:j1])
        lines.index_copy_(0, torch.from_numpy(first), values.reshape(len(first), -1))


def _lines(image, corners, layout, size):
    """Return each run of so many pixels in memory, and the number of that of each block's lines."""
    height, width = size
    first = (corners.n * layout.H + corners.h0)[:, None] + np.arange(height)
    first = (first * layout.W + corners.w0[:, None]).reshape(-1)
    runs = layout.N * layout.H * layout.W - width + 1
    return torch.from_numpy(image).as_strided((runs, width * layout.C), (layout.C, 1)), first


def _is_exact():
    """Whether oneDNN is there, and multiplies float32 as such."""
    mkldnn = torch.backends.mkldnn
    if not (mkldnn.is_available() and mkldnn.enabled):
        return False
    conv = getattr(mkldnn, "conv", mkldnn)  # PyTorch 2.9 and newer
    return getattr(conv, "fp32_precision", "ieee") in ("none", "ieee")
