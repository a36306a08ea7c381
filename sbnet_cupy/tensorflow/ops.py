"""reduce_mask, sparse_gather and sparse_scatter for TensorFlow, with their gradients."""

import functools

import tensorflow as tf

from ..block_sparse.active_blocks import ActiveBlocks
from ..block_sparse.gather_scatter.sparse_gather import resolve_gather
from ..block_sparse.gather_scatter.sparse_gather import sparse_gather as core_gather
from ..block_sparse.gather_scatter.sparse_scatter import resolve_scatter
from ..block_sparse.gather_scatter.sparse_scatter import sparse_scatter as core_scatter
from ..block_sparse.grid import resolve_grid
from ..block_sparse.mask.reduce_mask import reduce_mask as core_reduce_mask
from ..block_sparse.mask.reduce_mask import resolve_mask
from ..core.arrays import compute_dtype
from ..errors import ShapeError
from ._tensors import present, run, stand_ins, tensors


def reduce_mask(
    mask,
    block_count,
    *,
    bsize,
    boffset=(0, 0),
    bstride=None,
    tol=0.0,
    avgpool=False,
    capacity=None,
):
    """List the blocks of a grid where the mask is set: :func:`sbnet_cupy.reduce_mask`.

    Not differentiable: no gradient passes to a float mask.

    Parameters
    ----------
    mask : tf.Tensor, shape (N, H, W) or (N, H, W, 1), or (H, W) for one image
    block_count, bsize, boffset, bstride, tol, avgpool, capacity
        As for :func:`sbnet_cupy.reduce_mask`.

    Returns
    -------
    ActiveBlocks
        Of ``bin_counts`` and ``active_block_indices``, which TensorFlow finds inside, as in any
        nested structure. In a graph the number of images in ``grid`` may be None.

    Raises
    ------
    ShapeError, DTypeError, DeviceError
        As :func:`sbnet_cupy.reduce_mask`; DeviceError also for arrays that are not TensorFlow's.
        What a graph learns only when it runs, it reports as InvalidArgumentError.

    Examples
    --------
    >>> import tensorflow as tf
    >>> mask = tf.constant([[[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 1, 0, 0]]])
    >>> reduce_mask(mask, (2, 2), bsize=2).active_block_indices.numpy().tolist()
    [[0, 1, 0]]
    """
    (mask,) = tensors(mask=mask)
    if mask is not None and mask.shape.rank == 2:
        mask = mask[None]
    sizes = {"bsize": bsize, "boffset": boffset, "bstride": bstride}
    options = {**sizes, "tol": tol, "avgpool": avgpool, "capacity": capacity}
    (shown,) = stand_ins(mask)
    if shown is None and mask is not None:
        raise ShapeError(
            f"mask must have a known height and width inside tf.function, got {mask.shape}; "
            "call set_shape first"
        )
    blocks, *_ = resolve_mask(shown, block_count, *sizes.values(), tol, capacity)

    def listed(mask):
        return tuple(core_reduce_mask(mask, block_count, **options))

    shapes = [(1,), (capacity, 3)]
    pair = run(listed, [tf.stop_gradient(mask)], [tf.int32, tf.int32], shapes)
    return ActiveBlocks(*pair, (mask.shape[0], *blocks[1:]))


def sparse_gather(
    x,
    bin_counts,
    active_block_indices,
    *,
    bsize,
    boffset=(0, 0),
    bstride=None,
    transpose=False,
    data_format="NHWC",
    scale=None,
    shift=None,
    activation=None,
):
    """Copy the active blocks of an image into a stack: :func:`sbnet_cupy.sparse_gather`.

    Differentiable with respect to ``x``, ``scale`` and ``shift``. The gradient of ``x`` is the sum
    of the blocks' gradients, added in the order of the rows and in the dtype of ``x``.

    Parameters
    ----------
    x : tf.Tensor, shape (N, H, W, C), or (N, C, H, W) with ``data_format="NCHW"``
    bin_counts, active_block_indices
        What :func:`reduce_mask` returns.
    bsize, boffset, bstride, transpose, data_format, scale, shift, activation
        As for :func:`sbnet_cupy.sparse_gather`.

    Returns
    -------
    blocks : tf.Tensor, shape (M, bsize[0], bsize[1], C), or (M, C, bsize[0], bsize[1])

    Raises
    ------
    ShapeError, DTypeError, DeviceError
        As :func:`reduce_mask`.

    Examples
    --------
    >>> import tensorflow as tf
    >>> x = tf.reshape(tf.range(16.0), (1, 4, 4, 1))
    >>> counts, indices = tf.constant([1]), tf.constant([[0, 1, 0]])
    >>> sparse_gather(x, counts, indices, bsize=2)[0, :, :, 0].numpy().tolist()
    [[8.0, 9.0], [12.0, 13.0]]
    """
    arrays = (x, bin_counts, active_block_indices, scale, shift)
    names = ("x", "bin_counts", "active_block_indices", "scale", "shift")
    x, counts, rows, scale, shift = tensors(**dict(zip(names, arrays, strict=True)))
    options = (bsize, boffset, bstride, transpose, data_format, activation)
    shape = _blocks_shape(x, counts, rows, scale, shift, *options)
    layout = {"transpose": transpose, "data_format": data_format}
    plain = {"bsize": bsize, "boffset": boffset, "bstride": bstride, **layout}
    given = present(scale=scale, shift=shift)

    def core(x, counts, rows, *tables):
        fused = dict(zip(given, tables, strict=True))
        return core_gather(x, counts, rows, activation=activation, **fused, **plain)

    @tf.custom_gradient
    def gather(x, *tables):
        blocks = run(core, [x, counts, rows, *tables], x.dtype, shape)

        def backward(grad):
            if not tables and activation is None:
                add = {"add": True, "atomic": True}
                return sparse_scatter(grad, counts, rows, tf.zeros_like(x), **plain, **add)
            # The fused operation is the plain one followed by arithmetic: so is its gradient.
            with tf.GradientTape() as tape:
                tape.watch([x, *tables])
                fused = dict(zip(given, tables, strict=True))
                y = _unfused(x, counts, rows, plain, activation, **fused)
            return tape.gradient(y, [x, *tables], grad, tf.UnconnectedGradients.ZERO)

        return blocks, backward

    return gather(x, *given.values())


def _blocks_shape(x, counts, rows, scale, shift, *options):
    """Check the arguments as far as they are known; return the static shape of the blocks."""
    given = [tensor for tensor in (x, counts, rows, scale, shift) if tensor is not None]
    shown = stand_ins(x, counts, rows, scale, shift)
    if len([array for array in shown if array is not None]) == len(given):
        shape, *_ = resolve_gather(*shown, *options)
        return (rows.shape[0], *shape[1:])
    resolve_grid(*options[:3])  # the rest when the graph runs
    return (None,) * 4


def _unfused(x, counts, rows, plain, activation, scale=None, shift=None):
    """Gather plainly, then apply scale, shift and activation inside the image."""
    nchw = plain["data_format"] == "NCHW"
    channels_last = nchw == bool(plain["transpose"])
    blocks = sparse_gather(x, counts, rows, **plain)
    size = tf.shape(x)
    ones = tf.ones(tf.stack([size[0], size[2 if nchw else 1], size[3 if nchw else 2], 1]), tf.int8)
    grid = {name: plain[name] for name in ("bsize", "boffset", "bstride")}
    inside = sparse_gather(ones, counts, rows, **grid) > 0
    inside = inside if channels_last else tf.transpose(inside, (0, 3, 1, 2))
    values = affine(blocks, scale, shift, activation, channels_last)
    return tf.cast(tf.where(inside, values, tf.zeros((), values.dtype)), x.dtype)


def affine(values, scale, shift, activation, channels_last=True):
    """Return ``activation(values * scale + shift)`` in float32, or float64 for float64."""
    dtype = compute_dtype(values.dtype.as_numpy_dtype)
    per_channel = (-1,) if channels_last else (-1, 1, 1)
    values = tf.cast(values, dtype)
    if scale is not None:
        values *= tf.reshape(tf.cast(scale, dtype), per_channel)
    if shift is not None:
        values += tf.reshape(tf.cast(shift, dtype), per_channel)
    return _ACTIVATIONS[activation](values)


_ACTIVATIONS = {
    None: lambda values: values,
    "relu": tf.nn.relu,
    "silu": tf.nn.silu,
    "gelu": functools.partial(tf.nn.gelu, approximate=False),
}


def sparse_scatter(
    blocks,
    bin_counts,
    active_block_indices,
    x,
    *,
    bsize,
    boffset=(0, 0),
    bstride=None,
    add=False,
    atomic=False,
    transpose=False,
    data_format="NHWC",
):
    """Write the blocks over a copy of an image, or add them: :func:`sbnet_cupy.sparse_scatter`.

    Differentiable with respect to ``blocks`` and ``x``. Where a later row overwrote an earlier one,
    the gradient goes to the later.

    Parameters
    ----------
    blocks : tf.Tensor, shape (M, bsize[0], bsize[1], C), or (M, C, bsize[0], bsize[1])
    bin_counts, active_block_indices
        What :func:`reduce_mask` returns.
    x : tf.Tensor, shape (N, H, W, C), or (N, C, H, W) with ``data_format="NCHW"``
    bsize, boffset, bstride, add, atomic, transpose, data_format
        As for :func:`sbnet_cupy.sparse_scatter`.

    Returns
    -------
    y : tf.Tensor of the shape and dtype of ``x``

    Raises
    ------
    ShapeError, DTypeError, DeviceError
        As :func:`reduce_mask`.

    Examples
    --------
    >>> import tensorflow as tf
    >>> counts, indices = tf.constant([1]), tf.constant([[0, 0, 1]])
    >>> x = tf.zeros((1, 2, 4, 1))
    >>> y = sparse_scatter(tf.ones((1, 2, 2, 1)), counts, indices, x, bsize=2)
    >>> y[0, :, :, 0].numpy().tolist()
    [[0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 1.0]]
    """
    arrays = (blocks, bin_counts, active_block_indices, x)
    names = ("blocks", "bin_counts", "active_block_indices", "x")
    blocks, counts, rows, x = tensors(**dict(zip(names, arrays, strict=True)))
    grid = resolve_grid(bsize, boffset, bstride)
    shown = stand_ins(blocks, counts, rows, x)
    sizes = {tensor.shape.rank and tensor.shape[0] for tensor in (blocks, rows)}
    if all(array is not None for array in shown) and (None not in sizes or sizes == {None}):
        resolve_scatter(shown, *grid, add, atomic, transpose, data_format)
    layout = {"transpose": transpose, "data_format": data_format}
    options = {**grid._asdict(), **layout, "add": add, "atomic": atomic}

    def core(*arrays):
        return core_scatter(*arrays, **options)

    @tf.custom_gradient
    def scatter(blocks, x):
        y = run(core, [blocks, counts, rows, x], x.dtype, x.shape)

        def backward(grad):
            dblocks = sparse_gather(grad, counts, rows, **grid._asdict(), **layout)
            if add:
                return dblocks, grad
            dx = sparse_scatter(tf.zeros_like(dblocks), counts, rows, grad, **options)
            if grid.overlaps or atomic:
                last = _last(counts, rows, grad, grid, **layout)
                dblocks = tf.where(last, dblocks, tf.zeros((), dblocks.dtype))
            return dblocks, dx

        return y, backward

    return scatter(blocks, x)


def _last(counts, rows, x, grid, transpose, data_format):
    """Return which pixels of the stack no later row overwrites, one channel of the layout."""
    size, places = tf.shape(x), grid._asdict()
    nchw = data_format == "NCHW"
    image = tf.stack([size[0], size[2 if nchw else 1], size[3 if nchw else 2], 1])
    numbers = tf.reshape(tf.range(tf.shape(rows)[0]), (-1, 1, 1, 1))
    stack = tf.tile(numbers, (1, *grid.bsize, 1))
    owner = sparse_scatter(stack, counts, rows, tf.fill(image, -1), atomic=True, **places)
    last = sparse_gather(owner, counts, rows, **places) == stack
    return last if nchw == bool(transpose) else tf.transpose(last, (0, 3, 1, 2))
