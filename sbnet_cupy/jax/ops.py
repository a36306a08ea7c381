"""reduce_mask, sparse_gather and sparse_scatter for JAX: what they take, checked while tracing."""

import math

import jax

from ..block_sparse.active_blocks import ActiveBlocks
from ..block_sparse.from_mask import images_of_mask
from ..block_sparse.mask.reduce_mask import REDUCE_MASK
from ..block_sparse.mask.reduce_mask import reduce_mask as core_reduce_mask
from ..core.sizes import pair
from ..errors import ShapeError
from ._masks import list_blocks, spelled
from ._namespace import GATHER, SCATTER
from ._specs import spec_of


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
    """List the blocks of a grid where the mask is set: :func:`sbnet_cupy.reduce_mask` for JAX.

    Not differentiable: the gradient with respect to a float mask is zero.

    Parameters
    ----------
    mask : jax.Array, shape (N, H, W), (N, H, W, 1) or (N, 1, H, W), or (H, W) for one
    block_count, bsize, boffset, bstride, tol, avgpool
        As for :func:`sbnet_cupy.reduce_mask`.
    capacity : int
        Number of rows to return. Needed inside ``jit``, ``grad``, ``vmap`` and ``shard_map``, where
        shapes are static; outside, None counts the active blocks.

    Returns
    -------
    ActiveBlocks
        A pytree of ``bin_counts`` (int32, shape (1,)) and ``active_block_indices`` (int32, shape
        (capacity, 3), rows past the count -1).

    Raises
    ------
    ShapeError
        If a size is wrong, or ``capacity`` is missing where it is needed.
    DTypeError, DeviceError
        If the mask is complex, or is not a JAX array.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> mask = jnp.zeros((1, 4, 6), bool).at[0, 3, 1].set(True)
    >>> reduce_mask(mask, (2, 3), bsize=2, capacity=2).active_block_indices.tolist()
    [[0, 1, 0], [-1, -1, -1]]
    """
    mask = images_of_mask(mask)
    options = (block_count, bsize, boffset, bstride, tol, avgpool, capacity)
    REDUCE_MASK.infer((spec_of("mask", mask),), options)
    blocks = (mask.shape[0], *pair(block_count, "block_count", minimum=0))
    if capacity is None:
        if isinstance(mask, jax.core.Tracer):
            raise ShapeError(
                "capacity must be given inside jit, grad, vmap and shard_map, where shapes are "
                f"static, got None; {math.prod(blocks)} has room for every block of this mask"
            )
        grid = {"bsize": bsize, "boffset": boffset, "bstride": bstride}
        return core_reduce_mask(mask, block_count, tol=tol, avgpool=avgpool, **grid)
    listed = list_blocks(spelled(options))(jax.lax.stop_gradient(mask))
    return ActiveBlocks(*listed, blocks)


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
    """Copy the active blocks of an image into a stack: :func:`sbnet_cupy.sparse_gather` for JAX.

    Differentiable with respect to ``x``, ``scale`` and ``shift``. The gradient of ``x`` is the sum
    of the blocks' gradients, added in the order of the rows and in the dtype of ``x``.

    Parameters
    ----------
    x : jax.Array, shape (N, H, W, C), or (N, C, H, W) with ``data_format="NCHW"``
    bin_counts, active_block_indices
        What :func:`reduce_mask` returns.
    bsize, boffset, bstride, transpose, data_format, scale, shift, activation
        As for :func:`sbnet_cupy.sparse_gather`.

    Returns
    -------
    blocks : jax.Array, shape (M, bsize[0], bsize[1], C), or (M, C, bsize[0], bsize[1])

    Raises
    ------
    ShapeError, DTypeError, DeviceError
        As :func:`sbnet_cupy.sparse_gather`; DeviceError also for arrays that are not JAX's.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> x = jnp.arange(16.0).reshape(1, 4, 4, 1)
    >>> counts, indices = jnp.array([1]), jnp.array([[0, 1, 0]])
    >>> sparse_gather(x, counts, indices, bsize=2)[0, :, :, 0].tolist()
    [[8.0, 9.0], [12.0, 13.0]]
    """
    arrays = (x, bin_counts, active_block_indices, None, scale, shift)
    return GATHER(arrays, (bsize, boffset, bstride, transpose, data_format, activation))


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
    blocks : jax.Array, shape (M, bsize[0], bsize[1], C), or (M, C, bsize[0], bsize[1])
    bin_counts, active_block_indices
        What :func:`reduce_mask` returns.
    x : jax.Array, shape (N, H, W, C), or (N, C, H, W) with ``data_format="NCHW"``
        Image under the blocks. Its memory becomes the result's where XLA has no other use for it,
        for example when it is donated; otherwise it is copied.
    bsize, boffset, bstride, add, atomic, transpose, data_format
        As for :func:`sbnet_cupy.sparse_scatter`.

    Returns
    -------
    y : jax.Array of the shape and dtype of ``x``

    Raises
    ------
    ShapeError, DTypeError, DeviceError
        As :func:`sbnet_cupy.sparse_scatter`; DeviceError also for arrays that are not JAX's.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> counts, indices = jnp.array([1]), jnp.array([[0, 0, 1]])
    >>> x = jnp.zeros((1, 2, 4, 1))
    >>> sparse_scatter(jnp.ones((1, 2, 2, 1)), counts, indices, x, bsize=2)[0, :, :, 0].tolist()
    [[0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 1.0]]
    """
    arrays = (blocks, bin_counts, active_block_indices, x, None)
    return SCATTER(arrays, (bsize, boffset, bstride, add, atomic, transpose, data_format))
