"""Which pixels of a block stack lie in the image, and which block shows where several overlap.

Both are found by the copies themselves: they know counts, corrupt rows and edges.
"""

import numpy as np

from ...core.arrays import namespace
from .sparse_gather import sparse_gather
from .sparse_scatter import sparse_scatter


def pixels_read(bin_counts, active_block_indices, layout, grid):
    """Return which pixels of the stack a gather reads: bool, the stack's shape with one channel."""
    xp = namespace(active_block_indices)
    image = xp.ones((layout.N, layout.H, layout.W, 1), bool)
    stack = sparse_gather(image, bin_counts, active_block_indices, **grid._asdict())
    return _one_channel(stack, layout.blocks_channels_last)


def last_writers(bin_counts, active_block_indices, layout, grid):
    """Return where a scatter writes the image, and which pixels of the stack stay there.

    Each row scatters its own number and gathers what came to lie on top: two bool arrays, of the
    shapes of the image and of the stack with one channel.
    """
    xp = namespace(active_block_indices)
    rows = len(active_block_indices)
    numbers = xp.empty((rows, *grid.bsize, 1), np.int32)
    numbers[...] = xp.arange(1, rows + 1, dtype=np.int32).reshape(-1, 1, 1, 1)
    top = xp.zeros((layout.N, layout.H, layout.W, 1), np.int32)
    where = (bin_counts, active_block_indices)
    sparse_scatter(numbers, *where, top, **grid._asdict(), atomic=True, out=top)
    stays = sparse_gather(top, *where, **grid._asdict()) == numbers
    return (
        _one_channel(top != 0, layout.channels_last),
        _one_channel(stays, layout.blocks_channels_last),
    )


def _one_channel(array, channels_last):
    """View ``[N, H, W, 1]`` as ``[N, 1, H, W]`` where channels come first."""
    n, h, w, _ = array.shape
    return array if channels_last else array.reshape(n, 1, h, w)
