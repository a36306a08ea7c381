"""stack_to_image: the blocks of a stack, back at their places in whole images."""

import numpy as np

from ...core.arrays import array_function, empty, library_of
from ...core.checks import check_array, check_out
from ...errors import DTypeError, ShapeError
from ..gather_scatter.sparse_scatter import sparse_scatter
from .checks import check_stack
from .stack_from_image import check_images


@array_function
def stack_to_image(stack, table, *, background=0, data_format="NHWC", out=None):
    """Write the blocks of a stack into images.

    ``y[n, hi * b_h + i, wi * b_w + j, c] = stack[m, i, j, c]`` with ``(n, hi, wi)`` the place of
    row ``m``, for pixels in the image; elsewhere ``background``.

    Parameters
    ----------
    stack : array, shape (M, b_h, b_w, C)
        Any dtype of 1, 2, 4, 8 or 16 bytes. C-contiguous.
    table : BlockTable
        Of the stage of ``stack``.
    background : number, or array of shape (C,), (N, H, W, C) or (N, C, H, W)
        What the result holds where no block is active: one value, one for each channel, or images
        in the layout and dtype of the result.
    data_format : "NHWC" or "NCHW"
        Layout of the images.
    out : array, optional
        Receives the images; it is returned. It may be ``background`` itself.

    Returns
    -------
    y : array, shape (N, H, W, C), or (N, C, H, W)
        In the dtype and library of ``stack``.

    Raises
    ------
    ShapeError
        If the stack does not fit the table, or ``background`` the result.
    DTypeError
        If ``background`` is neither a number nor an array of the dtype of ``stack``.

    Source: Ren et al. 2018, arXiv:1801.02108, section 3.2.

    Examples
    --------
    >>> import numpy as np
    >>> table = block_table(np.array([[[0, 0, 0], [0, 0, 1]]]), 2)
    >>> stack_to_image(np.ones((1, 2, 2, 1)), table, background=-1)[0, :, :, 0]
    array([[-1., -1.,  1.],
           [-1., -1.,  1.]])
    """
    check_stack("stack", stack, table, floats=False)
    channels, size = stack.shape[3], (table.batch, *table.image_size)
    last = data_format == "NHWC"
    shape = (*size, channels) if last else (size[0], channels, *size[1:])
    if library_of(background) is not None:
        check_array("background", background, ndim=(0, 1, 4), like=stack)
        if background.dtype != stack.dtype:
            raise DTypeError(
                f"background must have the dtype of stack, {stack.dtype}, got {background.dtype}; "
                "use astype"
            )
        if background.ndim == 1:
            check_array("background", background, shape=(channels,))
            background = background if last else background.reshape(-1, 1, 1)
        elif background.ndim == 4:
            check_images("background", background, table, data_format)
            if background.shape != shape:
                raise ShapeError(f"background must have shape {shape}, got {background.shape}")
    elif not isinstance(background, int | float | np.number | np.bool_):
        raise DTypeError(
            f"background must be a number or an array, got {type(background).__name__}"
        )
    if out is None:
        out = empty(shape, stack.dtype, stack)
        check_images("stack", out, table, data_format)
    else:
        check_out(out, shape, stack.dtype, stack, (("stack", stack),))
    if out is not background:
        if library_of(background) is None:
            out.fill(background)
        else:
            out[...] = background
    if not stack.size:
        return out
    return sparse_scatter(
        stack, *table.active, out, bsize=table.block_size, transpose=not last,
        data_format=data_format, out=out,
    )  # fmt: skip
