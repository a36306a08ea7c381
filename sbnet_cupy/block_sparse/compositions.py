"""What the layers compute on a stack of blocks, written once for every array library.

Each function takes a namespace ``ops`` of operations on the arrays of one library. NumPy's and
CuPy's is :mod:`.native`; each adapter has its own, whose operations are differentiable:

- ``gather(x, bin_counts, active_block_indices, bsize, boffset, bstride, *, transpose, data_format,
  scale, shift, activation)`` and
- ``scatter(blocks, bin_counts, active_block_indices, x, bsize, boffset, bstride, *, add, atomic,
  transpose, data_format, out)``: as the public functions of these names;
- ``convolve(x, w, *, strides, padding, scale, bias, activation, w_format, precision, bin_counts,
  out)``: as ``conv2d`` on NHWC images or stacks, its result rounded to the dtype of ``x`` once.
  Blocks at or past ``bin_counts``, if that is given, need not be computed;
- ``zero_outside(blocks, bin_counts, active_block_indices, grid, image_hw)``: the NHWC stack with
  zeros where it is outside the image, in place or not (see :func:`inside`);
- ``affine(values, scale, shift, activation, channels_last)``: ``activation(values * scale +
  shift)`` in float32, or float64 for float64;
- ``where(condition, values, 0)``, ``cast(values, dtype)``, ``zeros(shape, dtype, like)``,
  ``ones(shape, dtype, like)``, ``arange(size, like)`` of int32, ``shape(array)``, and
  ``move_channels_first(stack)``. A size may be symbolic, or the number that a graph computes.

``out`` receives the result where the library writes in place; others ignore it. All options have
the defaults of the public functions.
"""

from ..core.sizes import pair


def gathered_convolution(
    ops, x, w, active, block_params, base, *, strides, scale=None, bias=None, activation=None,
    channels_last=True, w_format="HWIO", precision=None, out=None,
):  # fmt: skip
    """Return ``sparse_conv2d`` by way of the stack: gather, convolve, scatter over the base."""
    layout = layout_of_stack(channels_last)
    blocks = ops.gather(x, *active, *grid_of(block_params), **layout)
    sizes = slice(1, 3) if channels_last else slice(2, 4)
    image_hw, result_hw = x.shape[sizes], base.shape[sizes]
    blocks = zero_unread(ops, blocks, active, block_params, strides, image_hw, result_hw)
    blocks = ops.convolve(
        blocks, w, strides=strides, padding="VALID", scale=scale, bias=bias, activation=activation,
        w_format=w_format, precision=precision,
    )  # fmt: skip
    return ops.scatter(blocks, *active, base, block_params.bsize_out, **layout, out=out)


def zero_unread(ops, blocks, active, block_params, strides, image_hw, result_hw):
    """Return the NHWC stack with zeros where no window of the result reads the image.

    With strides, an image may have pixels past its last window. Blocks that extend beyond the
    result have them, and their NaN and infinity would be in gradients, times 0.
    """
    read_hw = tuple(
        min(size, offset + b + (p - b_out) * s)
        for size, offset, b, p, b_out, s in zip(
            image_hw, block_params.boffset, block_params.bsize, result_hw, block_params.bsize_out,
            pair(strides, "strides"), strict=True,
        )
    )  # fmt: skip
    if read_hw == tuple(image_hw):
        return blocks
    return ops.zero_outside(blocks, *active, block_params, read_hw)


def residual_unit(
    ops, x, weights, w_project, active, block_params, base, *, strides, precision=None, out=None
):
    """Return ``sparse_res_block_bottleneck`` by way of the stack; a base of None is the shortcut.

    The stack is computed before ``out`` is written, which may be ``x``.
    """
    options = {"strides": strides, "precision": precision}
    residual = residual_stack(ops, x, weights, active, block_params, **options)
    bsize = block_params.bsize_out
    if base is not None:
        blocks = shortcut_stack(ops, x, w_project, active, block_params, **options)
        shortcut = ops.scatter(blocks, *active, base, bsize, out=out)
    elif w_project is not None:
        shortcut = ops.convolve(x, w_project, padding="SAME", **options, out=out)
    else:
        shortcut = x
    return ops.scatter(residual, *active, shortcut, bsize, add=True, out=out)


def residual_stack(ops, x, weights, active, block_params, *, strides, precision=None):
    """Return the stack ``conv3(a3(conv2(a2(conv1(a1(x))))))``, one value per output pixel."""
    valid = {"padding": "VALID", "precision": precision, "bin_counts": active[0]}
    first = {"scale": weights.scale1, "shift": weights.shift1, "activation": "relu"}
    second = {"scale": weights.scale2, "bias": weights.shift2, "activation": "relu"}
    third = {"scale": weights.scale3, "bias": weights.shift3, "activation": "relu"}
    blocks = ops.gather(x, *active, *grid_of(block_params), **first)
    blocks = ops.convolve(blocks, weights.w1, **second, **valid)
    blocks = ops.zero_outside(blocks, *active, block_params, x.shape[1:3])  # the padding of conv2
    blocks = ops.convolve(blocks, weights.w2, strides=strides, **third, **valid)
    return ops.convolve(blocks, weights.w3, **valid)


def shortcut_stack(ops, x, w_project, active, block_params, *, strides, precision=None):
    """Return the stack of the shortcut's values, one per output pixel of the active blocks."""
    if w_project is None:
        return ops.gather(x, *active, block_params.bsize_out)
    blocks = ops.gather(x, *active, *shortcut_grid(block_params, strides))
    options = {"strides": strides, "precision": precision, "bin_counts": active[0]}
    return ops.convolve(blocks, w_project, padding="VALID", **options)


def shortcut_grid(block_params, strides):
    """Return the bsize, boffset and bstride of the blocks of x that the projection reads.

    SAME pads a 1x1 kernel with nothing: output p reads input p * stride.
    """
    axes = list(zip(block_params.bsize_out, strides, strict=True))
    return tuple((n - 1) * s + 1 for n, s in axes), (0, 0), tuple(n * s for n, s in axes)


def transformed_gather(
    ops, x, bin_counts, active_block_indices, *grid, transpose=False, data_format="NHWC",
    scale=None, shift=None, activation=None,
):  # fmt: skip
    """Return ``sparse_gather`` with a transformation as a plain gather followed by arithmetic."""
    active = (bin_counts, active_block_indices)
    blocks = ops.gather(x, *active, *grid, transpose=transpose, data_format=data_format)
    channels_last = (data_format == "NHWC") != bool(transpose)
    values = ops.affine(blocks, scale, shift, activation, channels_last)
    read = pixels_read(ops, x, *active, *grid, data_format=data_format)
    read = read if channels_last else ops.move_channels_first(read)
    return ops.cast(ops.where(read, values, 0), x.dtype)


def pixels_read(ops, x, bin_counts, active_block_indices, *grid, data_format="NHWC"):
    """Return bool ``[M, bh, bw, 1]``: which pixels of a stack are read from the image x."""
    ones = ops.ones(_one_channel(ops, x, data_format), bool, like=x)
    return ops.gather(ones, bin_counts, active_block_indices, *grid)


def last_writer(
    ops, x, bin_counts, active_block_indices, *grid, transpose=False, data_format="NHWC"
):
    """Return which pixels of a stack the image shows: those that no later row overwrites.

    Each row scatters its own number, from 1 on, and gathers what came to lie on top. The result is
    bool, of the shape of the stack with one channel.
    """
    active, rows = (bin_counts, active_block_indices), ops.shape(active_block_indices)[0]
    numbers = ops.arange(rows, like=x)[:, None, None, None] + 1
    numbers = numbers + ops.zeros((rows, *grid[0], 1), numbers.dtype, like=x)
    nobody = ops.zeros(_one_channel(ops, x, data_format), numbers.dtype, like=x)
    top = ops.scatter(numbers, *active, nobody, *grid, atomic=True)
    shows = ops.gather(top, *active, *grid) == numbers
    channels_last = (data_format == "NHWC") != bool(transpose)
    return shows if channels_last else ops.move_channels_first(shows)


def inside(ops, active_block_indices, grid, image_hw):
    """Return bool ``[M, bh, bw]``: which pixels of the blocks lie in the image.

    ``grid`` has the bsize, boffset and bstride of the blocks.
    """
    axes = []
    for axis, size in enumerate(image_hw):
        corner = active_block_indices[:, 1 + axis] * grid.bstride[axis]
        pixel = ops.arange(grid.bsize[axis], like=active_block_indices) + grid.boffset[axis]
        pixel = corner[:, None] + pixel
        axes.append((pixel >= 0) & (pixel < size))
    return axes[0][:, :, None] & axes[1][:, None, :]


def grid_of(block_params):
    """Return the bsize, boffset and bstride of the blocks that are read."""
    return block_params.bsize, block_params.boffset, block_params.bstride


def layout_of_stack(channels_last):
    """Return the options of a gather or scatter whose stack is NHWC whatever the image is."""
    return {"data_format": "NHWC" if channels_last else "NCHW", "transpose": not channels_last}


def _one_channel(ops, x, data_format):
    """Return the shape of NHWC images of one channel, of the number and size of x."""
    images, *sizes = ops.shape(x)
    return (images, *(sizes[:2] if data_format == "NHWC" else sizes[1:]), 1)
