"""The operations for TensorFlow: eager and inside ``tf.function``, differentiable, without a copy.

The names, arguments and results are those of the package itself, for TensorFlow's tensors (and
variables, also those of a Keras layer, which are read). Tensors are on the CPU: the NumPy code runs
on their memory. The layers gather and scatter this way; their convolutions are TensorFlow's own,
but with ``method="fused"``.

- ``tf.function``: a graph holds a ``tf.numpy_function``. Sizes may be unknown while it is traced,
  also the number of active blocks: ``reduce_mask`` needs no ``capacity``. What the arguments tell
  about the shape of a result is kept.
- ``tf.GradientTape``: gradients of any order; the operations are linear in images and blocks, and
  their gradients are the operations again. Except those of second order of a ``tf.function`` that
  lists blocks, by tapes outside of it: TensorFlow's nested custom gradients raise a TypeError. With
  both tapes inside the function they work.
- Results are TensorFlow tensors on memory of NumPy, through DLPack; their alignment is looked at
  first, and a result that is not aligned is copied. Inputs are never copied.

Features at sites (:func:`sparse_tensor` and what takes one) are eager alone, and differentiable
once: how many sites there are is data. :func:`masked_batch_norm` is made of TensorFlow's own
operations, and assigns to running statistics, which are variables.

What it cannot do: compile with XLA (``jit_compile=True``), for which the calls back into Python
have no kernel; run a ``SavedModel`` in another process, or in one without this package; compute on
a GPU, where eager tensors are refused, and inside ``tf.function`` TensorFlow brings them to the
CPU. There is no ``out``: tensors are never written.

Examples
--------
>>> import tensorflow as tf
>>> from sbnet_cupy.tensorflow import reduce_mask, sparse_gather, sparse_scatter
>>> @tf.function
... def double_where_set(x, mask):
...     active = reduce_mask(mask, (2, 2), bsize=4)
...     blocks = 2 * sparse_gather(x, *active, bsize=4)
...     return sparse_scatter(blocks, *active, x, bsize=4)
>>> y = double_where_set(tf.ones((1, 8, 8, 1)), tf.eye(8)[None] > 0)
>>> int(tf.reduce_sum(y)), y.shape
(96, TensorShape([1, 8, 8, 1]))
"""

from ..block_sparse.block_params import calc_block_params, calc_block_params_res_block
from . import _tensors  # first: it says what is missing
from .layers import mask_conv2d, sparse_conv2d, sparse_res_block_bottleneck
from .norms import masked_batch_norm
from .ops import reduce_mask, sparse_gather, sparse_scatter
from .sites import (
    coordinate_map,
    dense_to_sparse,
    global_pool,
    kernel_map,
    sparse_avg_pool,
    sparse_max_pool,
    sparse_tensor,
    sparse_to_dense,
    sparse_unpool,
    voxelize,
)
from .submanifold import (
    inverse_conv,
    site_conv,
    sparse_unfold,
    strided_conv,
    submanifold_conv,
    transposed_conv,
)

__all__ = [
    "calc_block_params",
    "calc_block_params_res_block",
    "coordinate_map",
    "dense_to_sparse",
    "global_pool",
    "inverse_conv",
    "kernel_map",
    "mask_conv2d",
    "masked_batch_norm",
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
    "strided_conv",
    "submanifold_conv",
    "transposed_conv",
    "voxelize",
]

for _name in __all__:
    if globals()[_name].__module__.startswith(__name__):
        globals()[_name] = _tensors.as_it_is(globals()[_name])
