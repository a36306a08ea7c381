"""The stack operations for JAX: a network that stays on the blocks of its images.

Shapes and checks are those of the package's declarations. On a GPU XLA calls back kernels, where
there are some; elsewhere all is made of XLA's own operations. Both can be part of ``jit``,
differentiated any number of times, forwards too, and mapped. Images become stacks, and stacks
images, by the kernels of :func:`sparse_gather` and :func:`sparse_scatter`, backwards only.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sbnet_cupy as core

from ..block_sparse.active_blocks import ActiveBlocks
from ..block_sparse.from_mask import images_of_mask
from ..block_sparse.stack.block_table import BlockTable
from ..block_sparse.stack.checks import background_number, check_stack
from ..block_sparse.stack.interpolation import phases, resolve_resize
from ..block_sparse.stack.stack_conv2d import STACK_CONV2D, resolve_stack_conv
from ..block_sparse.stack.stack_from_image import check_images
from ..block_sparse.stack.stack_halo import STACK_HALO, halo_axes, resolve_pads
from ..core.arrays import compute_dtype
from ..core.checks import check_array
from ..core.sizes import pair
from ..dense.packed_weights import PackedWeights, arrays_of_weights
from ..errors import DTypeError, ShapeError
from . import _namespace as ops
from ._documentation import documented
from ._places import Places, specs_of_table
from ._specs import spec_of
from ._stack_conv import stack_conv
from ._stack_halo import fetch
from ._stack_kernels import (
    Form,
    as_hwio,
    convolve_by_xla,
    has_kernel,
    packed_weights,
    swap_channels,
)
from .ops import reduce_mask


def block_table(
    mask, block_size: Any = 32, *, image_size=None, tol=0.0, avgpool=False, capacity=None
):
    """Cut images into blocks, and find those where a mask is set: :func:`sbnet_cupy.block_table`.

    Parameters
    ----------
    mask : jax.Array, shape (N, H, W), (N, H, W, 1), (N, 1, H, W) or (H, W), or ActiveBlocks
    block_size, image_size, tol, avgpool
        As for :func:`sbnet_cupy.block_table`.
    capacity : int
        Number of rows of a stack; needed inside ``jit``, as for :func:`reduce_mask`.

    Returns
    -------
    BlockTable
        A pytree.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ValueError
        As :func:`sbnet_cupy.block_table` and :func:`reduce_mask`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> block_table(jnp.eye(5)[None], 2, capacity=4).active_block_indices.tolist()
    [[0, 0, 0], [0, 1, 1], [0, 2, 2], [-1, -1, -1]]
    """
    block = pair(block_size, "block_size")
    if isinstance(mask, ActiveBlocks):
        if (tol, avgpool, capacity) != (0.0, False, None):
            raise ValueError(
                "tol, avgpool and capacity must have their defaults for ActiveBlocks, got "
                f"{tol!r}, {avgpool!r} and {capacity!r}"
            )
        active = mask
        image = tuple(n * b for n, b in zip(active.grid[1:], block, strict=True))
        image = image if image_size is None else pair(image_size, "image_size", minimum=0)
    else:
        if image_size is not None:
            raise ValueError(f"image_size must be None for a mask, got {image_size!r}")
        mask = images_of_mask(mask)
        spec = spec_of("mask", mask)
        image = spec.shape[1:3] if spec is not None and spec.ndim in (3, 4) else (1, 1)
        blocks = tuple(-(-n // b) for n, b in zip(image, block, strict=True))
        pool = {"tol": tol, "avgpool": avgpool, "capacity": capacity}
        active = reduce_mask(mask, blocks, bsize=block, **pool)
    counts, indices = active
    rows = jnp.arange(indices.shape[0], dtype=jnp.int32)
    listed = (rows < counts[0]) & (indices >= 0).all(1) & (indices < jnp.array(active.grid)).all(1)
    places = jnp.where(listed[:, None], indices, jnp.array(active.grid)).T
    grid = jnp.full(active.grid, -1, jnp.int32).at[tuple(places)].set(rows, mode="drop")
    return BlockTable(counts, indices, grid, block, image)


@documented(core.stack_from_image)
def stack_from_image(x, table, *, data_format="NHWC"):
    """Copy the active blocks of images into a stack: :func:`sbnet_cupy.stack_from_image`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> table = block_table(jnp.eye(4)[None], 2)
    >>> stack_from_image(jnp.arange(16.0).reshape(1, 4, 4, 1), table)[1, :, :, 0].tolist()
    [[10.0, 11.0], [14.0, 15.0]]
    """
    arrays, sizes = specs_of_table(table)
    check_images("x", spec_of("x", x), BlockTable(*arrays, *sizes), data_format)
    active = (table.bin_counts, table.active_block_indices)
    layout = {"transpose": data_format == "NCHW", "data_format": data_format}
    return ops.gather(x, *active, table.block_size, **layout)


@documented(core.stack_to_image)
def stack_to_image(stack, table, *, background: Any = 0, data_format="NHWC"):
    """Write the blocks of a stack into images: :func:`sbnet_cupy.stack_to_image`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> table = block_table(jnp.eye(2)[None], 1)
    >>> stack_to_image(jnp.ones((2, 1, 1, 1)), table, background=-1)[0, :, :, 0].tolist()
    [[1.0, -1.0], [-1.0, 1.0]]
    """
    arrays, sizes = specs_of_table(table)
    checked = BlockTable(*arrays, *sizes)
    check_stack("stack", spec_of("stack", stack), checked, floats=False)
    last, channels = data_format == "NHWC", stack.shape[3]
    images, *size = table.grid.shape[0], *table.image_size
    shape = (images, *size, channels) if last else (images, channels, *size)
    check_images("stack", spec_of("stack", stack).new(shape), checked, data_format)
    if isinstance(background, int | float | np.number | np.bool_):
        below = jnp.full(shape, background_number(background, stack.dtype), stack.dtype)
    else:
        spec = spec_of("background", background)
        check_array("background", spec, ndim=(0, 1, 4))
        if spec.dtype != stack.dtype:
            raise DTypeError(
                f"background must have the dtype of stack, {stack.dtype}, got {spec.dtype}; "
                "use astype"
            )
        wanted = {0: (), 1: (channels,), 4: shape}[spec.ndim]
        if spec.shape != wanted:
            raise ShapeError(f"background must have shape {wanted}, got {spec.shape}")
        per_channel = background.reshape(-1, 1, 1) if spec.ndim == 1 and not last else background
        below = jnp.broadcast_to(per_channel, shape)
    active = (table.bin_counts, table.active_block_indices)
    layout = {"transpose": not last, "data_format": data_format}
    return ops.scatter(stack, *active, below, table.block_size, **layout)


@documented(core.stack_pixel_mask)
def stack_pixel_mask(table):
    """Tell which pixels of a stack are in the image: :func:`sbnet_cupy.stack_pixel_mask`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> stack_pixel_mask(block_table(jnp.ones((1, 1, 3)), 2))[:, 0].tolist()
    [[True, True], [True, False]]
    """
    specs_of_table(table)
    return Places(table).own()[..., 0]


@documented(core.stack_halo)
def stack_halo(x, table, pads, *, fill: Any = 0):
    """Give each block a rim of pixels from the blocks around it: :func:`sbnet_cupy.stack_halo`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> table = block_table(jnp.ones((1, 1, 4)), (1, 2))
    >>> x = stack_from_image(jnp.arange(1.0, 5.0).reshape(1, 1, 4, 1), table)
    >>> stack_halo(x, table, (0, 1))[:, 0, :, 0].tolist()
    [[0.0, 1.0, 2.0, 3.0], [2.0, 3.0, 4.0, 0.0]]
    """
    arrays, sizes = specs_of_table(table)
    STACK_HALO.infer((spec_of("x", x), *arrays, None), (*sizes, pads, fill))
    return fetch(x, table, *halo_axes(table.block_size, resolve_pads(pads)), fill)


@documented(core.stack_conv2d)
def stack_conv2d(
    x,
    w,
    table,
    *,
    strides=(1, 1),
    padding: Any = "SAME",
    dilation=(1, 1),
    groups=1,
    transposed=False,
    output_padding=(0, 0),
    scale=None,
    bias=None,
    residual=None,
    activation=None,
    w_format="HWIO",
    precision=None,
):
    """Convolve a stack of blocks as the images they are part of: :func:`sbnet_cupy.stack_conv2d`.

    Rounded once, after the activation. On a GPU there are kernels for half floats, for TF32 and for
    depthwise convolutions, not for transposed ones of other strides than 1: what XLA computes
    there rounds the sums of half floats first. Weights are packed at each call, those of a
    PackedWeights once by :func:`pack_weights`. Rows that are no block are 0, and so is what is
    outside the image.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> table = block_table(jnp.ones((1, 4, 4)), 2)
    >>> x, w = jnp.ones((4, 2, 2, 1)), jnp.ones((3, 3, 1, 1))
    >>> stack_conv2d(x, w, table)[0, :, :, 0].tolist()
    [[4.0, 6.0], [6.0, 9.0]]
    >>> jax.grad(lambda w: stack_conv2d(x, w, table).sum())(w)[1, 1, 0, 0].item()
    16.0
    """
    weights = w
    own = arrays_of_weights(w, scale, bias, w_format, precision)
    w, scale, bias, w_format, precision = own
    arrays, sizes = specs_of_table(table)
    names = ("scale", "bias", "residual")
    epilogue = map(spec_of, names, (scale, bias, residual))
    options = (
        strides, padding, dilation, groups, transposed, output_padding, activation, w_format,
        precision,
    )  # fmt: skip
    read = (spec_of("x", x), spec_of("w", w))
    STACK_CONV2D.infer((*read, *arrays, *epilogue, None), (*sizes, *options))
    problem = resolve_stack_conv(*read, BlockTable(*arrays, *sizes), *options)
    form, back = Form(problem.window, int(groups), precision), problem.transposed
    w, listed = as_hwio(w, w_format, form.groups), table._arrays()
    given = (scale, bias, residual)
    if has_kernel(form, spec_of("x", x), spec_of("w", w), arrays, back):
        packed = None
        if isinstance(weights, PackedWeights):
            packed = packed_weights(weights, form, back, activation, x, w, *given, listed)
        w = swap_channels(w, form.groups) if back else w
        return stack_conv(x, w, *given, listed, packed, form, back, activation)
    return convolve_by_xla(form, back, activation, x, w, *given, listed)


@documented(core.stack_per_block)
def stack_per_block(values, table):
    """Repeat the values of each image for its blocks: :func:`sbnet_cupy.stack_per_block`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> table = block_table(jnp.array([[[1]], [[0]], [[1]]]), 1)
    >>> stack_per_block(jnp.array([[1.0], [2.0], [3.0]]), table)[:, 0, 0, 0].tolist()
    [1.0, 3.0]
    """
    arrays, _ = specs_of_table(table)
    check_array("values", spec_of("values", values), ndim=2)
    check_array("values", spec_of("values", values), shape=(arrays[2].shape[0], None))
    return Places(table).of_images(values)[:, None, None]


@documented(core.stack_interpolate)
def stack_interpolate(
    x, table, *, scale_factor, size=None, mode="nearest", align_corners=False
):  # fmt: skip
    """Resize the images that a stack is part of: :func:`sbnet_cupy.stack_interpolate`.

    By whole factors only: another ``size``, or ``align_corners``, raises NotImplementedError.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> table = block_table(jnp.ones((1, 1, 2)), 1)
    >>> x = jnp.array([1.0, 3.0]).reshape(2, 1, 1, 1)
    >>> stack_interpolate(x, table, scale_factor=2, mode="bilinear")[:, 0, :, 0].tolist()
    [[1.0, 1.5], [2.5, 3.0]]
    """
    arrays, sizes = specs_of_table(table)
    given = (scale_factor, size, mode, align_corners)
    resize = resolve_resize(spec_of("x", x), BlockTable(*arrays, *sizes), *given)
    if resize.factors is None:
        raise NotImplementedError(
            "stack_interpolate resizes by whole factors in JAX, and without align_corners, got "
            f"scale_factor {scale_factor!r}, size {size!r} and align_corners {align_corners!r}; "
            "resize the images of stack_to_image by jax.image"
        )
    (bh, bw), (fh, fw) = table.block_size, resize.factors
    if mode == "nearest":
        spread = jnp.broadcast_to(x[:, :, None, :, None], (len(x), bh, fh, bw, fw, x.shape[3]))
        y = spread.reshape(len(x), bh * fh, bw * fw, x.shape[3])
    else:
        halo = fetch(x, table, *halo_axes((bh, bw), ((1, 1), (1, 1))), "edge")
        halo = halo.astype(compute_dtype(x.dtype))
        y = _interleaved(_interleaved(halo, 1, bh, fh), 2, bw, fw).astype(x.dtype)
    return jnp.where(Places(table.at(*resize.new)).own(), y, 0)


def _interleaved(halo, axis, block, factor):
    """Return lines mixed of two neighbours along an axis that has a rim of 1."""
    mixed = []
    for _, line, share in phases(factor):
        first = jax.lax.slice_in_dim(halo, line, line + block, axis=axis)
        second = jax.lax.slice_in_dim(halo, line + 1, line + 1 + block, axis=axis) if share else 0
        mixed.append((1 - share) * first + share * second if share else first)
    lines = jnp.stack(mixed, axis + 1)
    shape = (*lines.shape[:axis], block * factor, *lines.shape[axis + 2 :])
    return lines.reshape(shape)
