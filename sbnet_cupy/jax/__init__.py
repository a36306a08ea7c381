"""The operations for JAX: inside ``jit``, differentiable, mapped, sharded, without a copy.

The names, arguments and results are those of the package itself, for JAX arrays. XLA calls back
into Python, which launches the CUDA kernels (on XLA's stream, on XLA's memory) or, on a CPU, runs
the NumPy code. On a GPU the layers are one fused kernel where there is one; otherwise they gather
and scatter this way, and their convolutions are XLA's own, as in all gradients.

- ``jit``: shapes are static, so ``reduce_mask`` needs ``capacity``. Every operation can be part of
  a command buffer (a CUDA graph): Python then runs when it is recorded, not when it is replayed.
  XLA leaves small programs alone: ``XLA_FLAGS=--xla_gpu_graph_min_graph_size=1`` has it record
  those too.
- ``grad``: reverse mode, of any order; the operations are linear in images and blocks, and their
  gradients are the operations again. JAX refuses forward mode (``jvp``, ``jacfwd``, ``hessian``)
  through them; it works at sites and on a stack.
- ``vmap``: the mapped axis joins N, one launch for all; ``reduce_mask``, and a ``scale``, a
  ``shift`` or weights of a fused layer that are mapped themselves, run once for each member.
- ``shard_map``: over the batch, each device its own images. Plain ``jit`` on sharded arrays brings
  them together first, since XLA does not know that the operations work image by image.
- ``sparse_scatter`` reuses the memory of ``x``, and a fused layer that of ``base``, where XLA may,
  for example when it is donated.
- The ``stack_`` operations, with which a network stays on a stack of blocks, are XLA's own but for
  the way from images and back: any mapped axis is batched, and any order of gradient computed.
- So are the functions of features at sites, but for convolutions and kernel maps, which are kernels
  on a GPU, with derivatives of any order too. Members of a mapped axis are convolved one by one.
  Lists of sites have a ``capacity``, by default the most that there can be. XLA finds each map once
  in a compiled function; lists keep none.

:class:`~sbnet_cupy.ActiveBlocks` and :class:`~sbnet_cupy.BottleneckWeights` become pytrees when
this module is imported, so do :class:`~sbnet_cupy.BlockTable`, :class:`~sbnet_cupy.SparseTensor`,
:class:`~sbnet_cupy.CoordinateMap`, :class:`~sbnet_cupy.KernelMap` and
:class:`~sbnet_cupy.PackedWeights`, and :class:`~sbnet_cupy.BlockParams` a static one, so that all
of them can be arguments of a jitted function. There is no ``out``: JAX arrays are never written.

Experimental: all of it stands on ``jax.experimental.buffer_callback``, which JAX may change. It
does not run on TPUs, and compiled functions cannot be exported or kept in JAX's on-disk cache.

Examples
--------
>>> import jax, jax.numpy as jnp
>>> from sbnet_cupy.jax import reduce_mask, sparse_gather, sparse_scatter
>>> @jax.jit
... def double_where_set(x, mask):
...     active = reduce_mask(mask, (2, 2), bsize=4, capacity=4)
...     blocks = 2 * sparse_gather(x, *active, bsize=4)
...     return sparse_scatter(blocks, *active, x, bsize=4)
>>> mask = jnp.zeros((1, 8, 8), bool).at[0, 0, 7].set(True)
>>> y = double_where_set(jnp.ones((1, 8, 8, 1)), mask)
>>> int(y.sum())
80
"""

from ..block_sparse.block_params import calc_block_params, calc_block_params_res_block
from . import _callbacks  # noqa: F401 - first: it says what is missing
from .layers import mask_conv2d, sparse_conv2d, sparse_res_block_bottleneck
from .norms import masked_batch_norm
from .ops import reduce_mask, sparse_gather, sparse_scatter
from .packed_weights import pack_weights
from .site_pool import global_pool, sparse_avg_pool, sparse_max_pool, sparse_unpool
from .sites import coordinate_map, dense_to_sparse, kernel_map, sparse_tensor, sparse_to_dense
from .stack import (
    block_table,
    stack_conv2d,
    stack_from_image,
    stack_halo,
    stack_interpolate,
    stack_per_block,
    stack_pixel_mask,
    stack_to_image,
)
from .stack_pool import stack_avg_pool, stack_global_pool, stack_max_pool
from .submanifold import (
    inverse_conv,
    site_conv,
    sparse_unfold,
    strided_conv,
    submanifold_conv,
    transposed_conv,
)
from .voxelize import voxelize

__all__ = [
    "block_table",
    "calc_block_params",
    "calc_block_params_res_block",
    "coordinate_map",
    "dense_to_sparse",
    "global_pool",
    "inverse_conv",
    "kernel_map",
    "mask_conv2d",
    "masked_batch_norm",
    "pack_weights",
    "reduce_mask",
    "site_conv",
    "sparse_avg_pool",
    "sparse_conv2d",
    "sparse_gather",
    "sparse_max_pool",
    "sparse_res_block_bottleneck",
    "sparse_scatter",
    "sparse_tensor",
    "sparse_to_dense",
    "sparse_unfold",
    "sparse_unpool",
    "stack_avg_pool",
    "stack_conv2d",
    "stack_from_image",
    "stack_global_pool",
    "stack_halo",
    "stack_interpolate",
    "stack_max_pool",
    "stack_per_block",
    "stack_pixel_mask",
    "stack_to_image",
    "strided_conv",
    "submanifold_conv",
    "transposed_conv",
    "voxelize",
]
