"""zero_outside: the pixels of a block stack that lie outside the image become 0.

A building block of layers whose next convolution pads with zeros: their checks are done, and so
none are made here.
"""

import functools

from ...core import launch as kernels
from ...core.arrays import vector_bytes
from ...core.launch import THREADS
from ...core.operator import Operator, Plan
from ..grid import Grid, inside_image


def zero_outside(blocks, bin_counts, active_block_indices, grid, image_hw):
    """Set to 0, in place, what of ``blocks`` lies outside an image of ``image_hw`` pixels.

    ``blocks`` is [M, bh, bw, C], a contiguous stack of the blocks of ``grid``: a Grid, or the
    BlockParams of the blocks. Rows at or past ``bin_counts`` are left as they are.

    Examples
    --------
    >>> import numpy as np
    >>> from sbnet_cupy.block_sparse.grid import Grid
    >>> blocks, rows = np.ones((1, 2, 2, 1)), np.zeros((1, 3), np.int32)
    >>> zero_outside(blocks, np.ones(1, np.int32), rows, Grid((2, 2), (-1, 0), (2, 2)), (4, 4))
    >>> blocks[0, :, :, 0]
    array([[0., 0.],
           [1., 1.]])
    """
    arrays = (blocks, bin_counts, active_block_indices)
    ZERO_OUTSIDE.plan_for(arrays, (*grid.boffset, *grid.bstride, *image_hw)).run(*arrays)


def _infer(specs, options):
    """Return the specs of new results: there are none."""
    return ()


def _plan(specs, options):
    """Return the plan of the call."""
    blocks, *_ = specs
    if not blocks.size:
        return Plan((), lambda *arrays: None)
    if not blocks.on_gpu:
        numbers = [tuple(options[i : i + 2]) for i in (0, 2, 4)]
        boffset, bstride, image_hw = numbers
        grid = Grid(blocks.shape[1:3], boffset, bstride)
        return Plan((), functools.partial(_zero_outside_numpy, grid=grid, image_hw=image_hw))
    launch = _zero_outside_cuda(blocks, options)
    return Plan((), launch, launch, operands=(0, 1, 2))


def _zero_outside_numpy(blocks, bin_counts, active_block_indices, *, grid, image_hw):
    count = min(max(int(bin_counts[0]), 0), len(blocks))
    inside = inside_image(active_block_indices[:count], grid, image_hw)
    blocks[:count][~inside] = 0


def _zero_outside_cuda(blocks, numbers):
    """Prepare the launch; see cuda_src/block_sparse/gather_scatter/zero_outside.cu."""
    rows, bh, bw, channels = blocks.shape
    item = blocks.dtype.itemsize
    vector = vector_bytes(channels * item, blocks.alignment)
    sizes = (rows, bh, bw, channels * item // vector, *numbers)
    return kernels.prepare(
        "block_sparse/gather_scatter/zero_outside", "zero_outside", (f"Bytes<{vector}>::type",),
        rows, THREADS, 3, sizes,
        persistent=True, dependent=True,
    )  # fmt: skip


ZERO_OUTSIDE = Operator(
    "zero_outside",
    arrays=("blocks", "bin_counts", "active_block_indices"),
    options=("top", "left", "step_h", "step_w", "height", "width"),
    infer=_infer,
    plan=_plan,
    results=(),
)
