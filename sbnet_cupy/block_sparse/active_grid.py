"""A list of active blocks belongs to the grid that it was made for."""

from ..errors import ShapeError
from .active_blocks import ActiveBlocks


def grid_of(indices):
    """Return the grid that a list of blocks was made for, or None where a bare pair hides it."""
    return indices.grid if isinstance(indices, ActiveBlocks) else None


def check_active_grid(indices, images, bcount):
    """Raise ShapeError where ``indices`` was made for another grid than that of the call.

    In a TensorFlow graph the number of images may be None, and is then not compared.
    """
    if not isinstance(indices, ActiveBlocks):
        return
    grid, expected = indices.grid, (images, *bcount)
    if grid == expected:
        return
    if any(None not in (a, b) and a != b for a, b in zip(grid, expected, strict=True)):
        raise ShapeError(
            f"indices must list blocks of the grid {expected} (images, block rows, block columns) "
            f"of this x and these blocks, got an ActiveBlocks of the grid {tuple(grid)}; make one "
            "by ActiveBlocks.from_mask with the same bsize, strides and padding, or by reduce_mask "
            "with block_params.bcount"
        )
