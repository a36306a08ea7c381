"""stack_to_image_grad: from the gradient of images to those of the stack and the background."""

from typing import Any, NamedTuple

from ...core.arrays import array_function, empty, zeros
from ..gather_scatter.sparse_scatter import sparse_scatter
from .block_table import check_table
from .stack_from_image import check_images, stack_from_image


class ToImageGradients(NamedTuple):
    """Gradients of the arguments of :func:`stack_to_image`."""

    stack: Any
    background: Any


@array_function
def stack_to_image_grad(grad_y, table, *, data_format="NHWC"):
    """Compute the gradients of stack_to_image from the gradient of its result.

    The gradient of the stack is ``grad_y`` at its blocks, that of a background of whole images is
    ``grad_y`` where no block is active, and 0 elsewhere. (Sum it over images and pixels for a
    background of one value for each channel.)

    Parameters
    ----------
    grad_y : array, shape (N, H, W, C), or (N, C, H, W)
        Gradient of the images.
    table, data_format
        As they were given to :func:`stack_to_image`.

    Returns
    -------
    gradients : ToImageGradients(stack, background)
        Fresh arrays in the dtype of ``grad_y``; the stack's is 0 outside the image.

    Raises
    ------
    ShapeError
        If ``grad_y`` is not a batch of the table's images.

    Source: a scatter's transpose is a gather.

    Examples
    --------
    >>> import numpy as np
    >>> table = block_table(np.array([[[0, 0, 1]]]), 2)
    >>> stack_to_image_grad(np.ones((1, 1, 3, 1)), table).background[0, 0, :, 0]
    array([1., 1., 0.])
    """
    check_table(table)
    check_images("grad_y", grad_y, table, data_format)
    stack = stack_from_image(grad_y, table, data_format=data_format)
    rest = empty(grad_y.shape, grad_y.dtype, grad_y)
    rest[...] = grad_y
    if stack.size:
        nothing = zeros(stack.shape, stack.dtype, stack)
        sparse_scatter(
            nothing, *table.active, rest, bsize=table.block_size, data_format=data_format,
            transpose=data_format == "NCHW", out=rest,
        )  # fmt: skip
    return ToImageGradients(stack, rest)
