"""stack_pixel_mask: which pixels of a stack are pixels of an image."""

from ...core.arrays import array_function, namespace
from ...core.graph_memory import memory_of_graphs
from .block_table import check_table
from .neighbours import Axis, Places


@array_function
def stack_pixel_mask(table):
    """Tell which pixels of a stack are in the image, and in rows that are blocks.

    ``mask[m, i, j]`` is True where row ``m`` is a block and pixel ``(hi * b_h + i, wi * b_w + j)``
    lies in the image. Statistics over the pixels of a stack, as of a batch norm in training, count
    these and no others.

    Parameters
    ----------
    table : BlockTable
        Of the stage.

    Returns
    -------
    mask : bool array, shape (M, b_h, b_w)
        In the library and on the device of the table.

    Raises
    ------
    DTypeError
        If ``table`` is no BlockTable.

    Examples
    --------
    >>> import numpy as np
    >>> table = block_table(np.ones((1, 2, 3)), 2)
    >>> stack_pixel_mask(table).astype(int).tolist()
    [[[1, 1], [1, 1]], [[1, 0], [1, 0]]]
    """
    check_table(table)
    xp = namespace(table.grid)
    mask = xp.zeros((table.capacity, *table.block_size), bool)
    with memory_of_graphs(mask):
        places = Places.of(table)
        mask[: len(places)] = inside(places)[..., 0]
    return mask


def inside(places):
    """Return bool [m, b_h, b_w, 1]: which pixels of these rows are in the image."""
    axes = [places.inside(axis, Axis(0, 1, b)) for axis, b in enumerate(places.table.block_size)]
    meets = axes[0][:, :, None] & axes[1][:, None, :] & places.valid[:, None, None]
    return meets[..., None]
