"""reduce_mask, sparse_gather and sparse_scatter for TensorFlow, with their gradients."""

import tensorflow as tf

from ..block_sparse.active_blocks import ActiveBlocks
from ..block_sparse.from_mask import images_of_mask
from ..block_sparse.mask.reduce_mask import REDUCE_MASK
from ..block_sparse.mask.reduce_mask import reduce_mask as core_reduce_mask
from ..core.sizes import pair
from ._namespace import GATHER, SCATTER
from ._tensors import known_spec, run, tensor_of

MASK_SIZES = "a known height and width"


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
    mask : tf.Tensor, shape (N, H, W), (N, H, W, 1) or (N, 1, H, W), or (H, W) for one
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
    mask = images_of_mask(tensor_of("mask", mask))
    spec = known_spec("mask", mask, what=MASK_SIZES)
    REDUCE_MASK.infer((spec,), (block_count, bsize, boffset, bstride, tol, avgpool, capacity))
    options = {"bsize": bsize, "boffset": boffset, "bstride": bstride, "tol": tol}
    options |= {"avgpool": avgpool, "capacity": capacity}

    def listed(mask):
        return tuple(core_reduce_mask(mask, block_count, **options))

    shapes = [(1,), (capacity, 3)]
    found = run(listed, [tf.stop_gradient(mask)], [tf.int32, tf.int32], shapes)
    blocks = (mask.shape[0], *pair(block_count, "block_count", minimum=0))
    return ActiveBlocks(*found, blocks)


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
    tensors = (x, bin_counts, active_block_indices, None, scale, shift)
    return GATHER(tensors, (bsize, boffset, bstride, transpose, data_format, activation))


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
    tensors = (blocks, bin_counts, active_block_indices, x, None)
    return SCATTER(tensors, (bsize, boffset, bstride, add, atomic, transpose, data_format))
