"""zero_outside: the pixels of a block stack that lie outside the image become 0.

A building block of layers whose next convolution pads with zeros: their checks are done, and so
none are made here.
"""

from ...core import launch as kernels
from ...core.arrays import address, is_cupy, vector_bytes
from ...core.launch import THREADS
from ...core.plans import Plans
from ..grid import inside_image

_PLANS = Plans()


def zero_outside(blocks, bin_counts, active_block_indices, grid, image_hw):
    """Set to 0, in place, what of ``blocks`` lies outside an image of ``image_hw`` pixels.

    ``blocks`` is [M, bh, bw, C], a contiguous stack of the blocks of ``grid``: a Grid, or the
    BlockParams of the blocks. Rows at or past ``bin_counts`` are left as they are.

    Examples
    --------
    >>> import numpy as np
    >>> from ..grid import Grid
    >>> blocks, rows = np.ones((1, 2, 2, 1)), np.zeros((1, 3), np.int32)
    >>> zero_outside(blocks, np.ones(1, np.int32), rows, Grid((2, 2), (-1, 0), (2, 2)), (4, 4))
    >>> blocks[0, :, :, 0]
    array([[0., 0.],
           [1., 1.]])
    """
    if not blocks.size:
        return
    if not is_cupy(blocks):
        count = min(max(int(bin_counts[0]), 0), len(blocks))
        inside = inside_image(active_block_indices[:count], grid, image_hw)
        blocks[:count][~inside] = 0
        return
    numbers = (*grid.boffset, *grid.bstride, *image_hw)
    key = _PLANS.key((blocks,), numbers)
    launch = _PLANS.get(key) or _PLANS.keep(key, _prepare(blocks, numbers))
    launch(blocks, bin_counts, active_block_indices)


def _prepare(blocks, numbers):
    """Prepare the launch; see cuda_src/block_sparse/gather_scatter/zero_outside.cu."""
    rows, bh, bw, channels = blocks.shape
    item = blocks.dtype.itemsize
    vector = vector_bytes(channels * item, address(blocks))
    sizes = (rows, bh, bw, channels * item // vector, *numbers)
    return kernels.prepare(
        "block_sparse/gather_scatter/zero_outside", "zero_outside", (f"Bytes<{vector}>::type",),
        rows, THREADS, 3, sizes,
        persistent=True, dependent=True,
    )  # fmt: skip
