"""stack_to_image: the blocks of a stack, back at their places in whole images."""

from typing import Any, NamedTuple

import numpy as np

from ...core import launch as kernels
from ...core.arrays import array_function, empty, is_cupy, library_of, vector_bytes
from ...core.checks import check_array, check_out
from ...core.operator import Operator, Plan
from ...dense.conv2d import check_choice
from ...errors import DTypeError, ShapeError
from ..gather_scatter.sparse_scatter import sparse_scatter
from .checks import background_number, check_stack
from .stack_from_image import check_images


@array_function
def stack_to_image(stack, table, *, background: Any = 0, data_format="NHWC", out=None):
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
        If ``background`` is neither a number that ``stack`` could hold nor an array of its dtype.

    Source: Ren et al. 2018, arXiv:1801.02108, section 3.2. Kernel:
    cuda_src/block_sparse/stack/stack_to_image.cu

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
    check_choice("data_format", data_format, ("NHWC", "NCHW"))
    last = data_format == "NHWC"
    shape = (*size, channels) if last else (size[0], channels, *size[1:])
    if library_of(background) is not None:
        check_array("background", background, ndim=(0, 1, 4), like=stack)
        if background.dtype != stack.dtype:
            raise DTypeError(
                f"background must have the dtype of stack, {stack.dtype}, got {background.dtype}; "
                "convert it"
            )
        if background.ndim == 1:
            check_array("background", background, shape=(channels,))
            background = background if last else background.reshape(-1, 1, 1)
        elif background.ndim == 4:
            check_images("background", background, table, data_format)
            if background.shape != shape:
                raise ShapeError(f"background must have shape {shape}, got {background.shape}")
    else:
        background = background_number(background, stack.dtype)
    if out is None:
        out = empty(shape, stack.dtype, stack)
        check_images("stack", out, table, data_format)
    else:
        check_out(out, shape, stack.dtype, stack, (("stack", stack),))
    if last and is_cupy(stack) and _by_kernel(stack, table, background, out):
        return out
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


def _by_kernel(stack, table, background, out):
    """Write the images by one kernel; return whether there is one for this call."""
    if out is background or not (stack.size and out.size and table.grid.size):
        return False
    array, constant = background, 0
    if library_of(background) is None:
        if stack.dtype.itemsize > 8:
            return False
        array, constant = None, constant_bits(np.asarray(background).astype(stack.dtype).tobytes())
    elif background.ndim not in (1, 4) or not background.flags.c_contiguous:
        return False
    arrays = (stack, table.bin_counts, table.grid, array, out)
    plan = FILL_IMAGE.plan_for(arrays, (table.block_size, constant))
    if plan.launch is not None:
        plan.run(*arrays)
    return plan.launch is not None


class ImageFill(NamedTuple):
    """Images that a stack and a background make, as their kernel sees them."""

    rows: int  # of the stack: its capacity
    grid: tuple[int, int, int]  # images, and their blocks
    block: tuple[int, int]
    image: tuple[int, int]
    channels: int
    itemsize: int
    alignment: int = 16  # bytes that divide all addresses, but that of values per channel
    background: str = "constant"  # or "channels", one value for each, or "image"
    blocks: bool = True  # or the background alone, everywhere


_LANES = (32, 64, 128, 256)
_AT_ONCE = 4
_VECTORS = {1: "u8", 2: "u16", 4: "u32", 8: "uint2", 16: "uint4"}


def constant_bits(content):
    """Return the bytes of a number, repeated up to 8, as an int64."""
    return int(np.frombuffer(content * (8 // len(content)), np.int64)[0])


def prepare_stack_to_image(fill, constant=0, most=None):
    """Return the launch that writes whole images; None where sizes are too large for it.

    It takes the stack, the count, the grid, the background (None for a constant) and the images;
    the first three are None where no blocks are written. ``constant`` are the bits of the
    background, see :func:`constant_bits`. There are at most ``most`` thread blocks.
    """
    pixel = fill.channels * fill.itemsize
    run, line = fill.block[1] * pixel, fill.image[1] * pixel
    width = vector_bytes(fill.alignment, run, line)
    run, line = run // width, line // width
    if line * run >= 2**32 or line >= 2**30 or fill.grid[0] * fill.image[0] >= 2**31:
        return None
    lanes = next((n for n in _LANES if n * _AT_ONCE >= line), _LANES[-1])
    lines = -(-fill.grid[0] * fill.image[0] // (256 // lanes))
    thread_blocks = lines * -(-line // (lanes * _AT_ONCE))
    background = ("constant", "channels", "image").index(fill.background)
    return kernels.prepare(
        "block_sparse/stack/stack_to_image",
        "stack_to_image",
        (_VECTORS[width], _VECTORS[fill.itemsize], background, lanes, fill.blocks),
        min(thread_blocks, most or thread_blocks),
        256,
        5,
        (
            fill.rows, *fill.grid, fill.channels, fill.block[0], run, fill.image[0], line, constant,
        ),
        persistent=True,
        dependent=True,
    )  # fmt: skip


def _infer(specs, options):
    """Return the spec of the images, which are there."""
    return (specs[4],)


def _plan(specs, options):
    """Return the plan of a call on a GPU, whose arguments are checked."""
    stack, _, grid, background, out = specs
    (block, constant), kind, aligned = options, "constant", [stack.alignment, out.alignment]
    if background is not None:
        kind = "image" if background.ndim == 4 else "channels"
        aligned += [background.alignment] * (kind == "image")
    itemsize = stack.dtype.itemsize
    fill = ImageFill(
        stack.shape[0], grid.shape, block, out.shape[1:3], stack.shape[3], itemsize,
        vector_bytes(*aligned), kind,
    )  # fmt: skip
    launch = prepare_stack_to_image(fill, constant)
    return Plan((out,), launch, launch, operands=(0, 1, 2, 3, 4))


FILL_IMAGE = Operator(
    "fill_image",
    arrays=("stack", "bin_counts", "grid", "background", "out"),
    options=("block_size", "constant"),
    infer=_infer,
    plan=_plan,
)
