"""Features at sites on tensors: lists of sites, convolutions and pooling at them.

The functions are those of :mod:`sbnet_cupy`, with its keywords. A ``SparseTensor`` here holds
tensors; its CoordinateMap keeps the kernel maps that are made for it, and frees them with it.
Features, weights, biases, scales and residuals are differentiable, twice and more. Maps are made
outside of graphs: ``torch.compile`` breaks its graph there, but not at :func:`site_conv`.
"""

from .ahead import compile_ahead
from .convs import (
    inverse_conv,
    site_conv,
    sparse_unfold,
    strided_conv,
    submanifold_conv,
    transposed_conv,
)
from .graphs import graphed
from .norms import masked_batch_norm
from .pools import global_pool, sparse_avg_pool, sparse_max_pool, sparse_unpool
from .sites import (
    coordinate_map,
    dense_to_sparse,
    kernel_map,
    sparse_tensor,
    sparse_to_dense,
    voxelize,
)

__all__ = [
    "compile_ahead",
    "coordinate_map",
    "dense_to_sparse",
    "global_pool",
    "graphed",
    "inverse_conv",
    "kernel_map",
    "masked_batch_norm",
    "site_conv",
    "sparse_avg_pool",
    "sparse_max_pool",
    "sparse_tensor",
    "sparse_to_dense",
    "sparse_unfold",
    "sparse_unpool",
    "strided_conv",
    "submanifold_conv",
    "transposed_conv",
    "voxelize",
]
