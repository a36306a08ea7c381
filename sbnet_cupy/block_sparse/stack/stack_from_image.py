"""stack_from_image: the active blocks of whole images, as a stack."""

from ...core.arrays import array_function
from ...dense.conv2d import check_choice
from ...errors import ShapeError
from ..checks import check_image
from ..gather_scatter.sparse_gather import sparse_gather
from .block_table import check_table


@array_function
def stack_from_image(x, table, *, data_format="NHWC", out=None):
    """Copy the active blocks of images into a stack.

    ``stack[m, i, j, c] = x[n, hi * b_h + i, wi * b_w + j, c]`` with ``(n, hi, wi)`` the place of
    row ``m``; 0 outside the image and in rows that are no block.

    Parameters
    ----------
    x : array, shape (N, H, W, C), or (N, C, H, W) with ``data_format="NCHW"``
        Images. Any dtype of 1, 2, 4, 8 or 16 bytes. C-contiguous.
    table : BlockTable
        Of the stage of ``x``.
    data_format : "NHWC" or "NCHW"
        Layout of ``x``; a stack always has its channels last.
    out : array, optional
        Receives the stack; it is returned.

    Returns
    -------
    stack : array, shape (M, b_h, b_w, C)
        In the dtype and library of ``x``.

    Raises
    ------
    ShapeError
        If ``x`` is not a batch of the table's images, or not contiguous.

    Source: Ren et al. 2018, arXiv:1801.02108, section 3.2.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.arange(25.0).reshape(1, 5, 5, 1)
    >>> table = block_table(x[..., 0] == 24, 2)
    >>> stack_from_image(x, table)[0, :, :, 0]
    array([[24.,  0.],
           [ 0.,  0.]])
    """
    check_table(table)
    check_images("x", x, table, data_format)
    return sparse_gather(
        x, *table.active, bsize=table.block_size, transpose=data_format == "NCHW",
        data_format=data_format, out=out,
    )  # fmt: skip


def check_images(name, x, table, data_format):
    """Raise unless ``x`` is a batch of images of the stage of ``table``."""
    check_choice("data_format", data_format, ("NHWC", "NCHW"))
    check_image(name, x, like=table.grid)
    size = x.shape[1:3] if data_format == "NHWC" else x.shape[2:]
    if (x.shape[0], *size) != (table.batch, *table.image_size):
        raise ShapeError(
            f"{name} must hold {table.batch} images of {table.image_size} pixels as {data_format}, "
            f"got shape {x.shape}; the table was made for those"
        )
