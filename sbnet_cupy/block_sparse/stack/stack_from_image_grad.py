"""stack_from_image_grad: from the gradient of a stack to that of the images it was taken from."""

from ...core.arrays import array_function
from .checks import check_stack
from .stack_to_image import stack_to_image


@array_function
def stack_from_image_grad(grad_stack, table, *, data_format="NHWC"):
    """Compute the gradient of stack_from_image from the gradient of its result.

    ``dx[n, h, v, c]`` is the gradient of the pixel in its block, and 0 in no active block: exactly,
    with no sum.

    Parameters
    ----------
    grad_stack : array, shape (M, b_h, b_w, C)
        Gradient of the stack. What it holds outside the image is not read.
    table, data_format
        As they were given to :func:`stack_from_image`.

    Returns
    -------
    grad_x : array, shape (N, H, W, C), or (N, C, H, W)
        In the dtype of ``grad_stack``.

    Raises
    ------
    ShapeError
        If the stack does not fit the table.

    Source: a gather's transpose is a scatter.

    Examples
    --------
    >>> import numpy as np
    >>> table = block_table(np.array([[[0, 0, 1]]]), 2)
    >>> stack_from_image_grad(np.ones((1, 2, 2, 1)), table)[0, 0, :, 0]
    array([0., 0., 1.])
    """
    check_stack("grad_stack", grad_stack, table, floats=False)
    return stack_to_image(grad_stack, table, data_format=data_format)
