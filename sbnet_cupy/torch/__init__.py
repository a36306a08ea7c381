"""The operations and layers for PyTorch: differentiable, compilable, on torch's current stream.

The functions have the names and keywords of those of :mod:`sbnet_cupy`, and take tensors alone.
Each is registered with PyTorch's dispatcher, so that autograd, ``torch.compile``, ``torch.export``,
autocast and CUDA graphs see operators like PyTorch's own. CPU tensors run the NumPy bodies, CUDA
tensors the CuPy kernels, on the memory of the tensors.

``nn`` holds modules, and ``sparsify`` makes the convolutions of a whole network sparse. Features at
sites are in :mod:`sbnet_cupy.torch.submanifold`, SparseConvNet's layers in
:mod:`sbnet_cupy.torch.scn`.
"""

from ..block_sparse.block_params import calc_block_params, calc_block_params_res_block
from ._version import check_version as _check_version

_check_version()

from . import _flops, nn  # noqa: E402, F401  (nothing of ours can be imported before the check)
from .layers import mask_conv2d, sparse_conv2d, sparse_res_block_bottleneck  # noqa: E402
from .ops import reduce_mask, sparse_gather, sparse_scatter, sparse_scatter_var  # noqa: E402
from .sparsify import sparsify  # noqa: E402
from .submanifold import (  # noqa: E402
    compile_ahead,
    coordinate_map,
    dense_to_sparse,
    global_pool,
    graphed,
    inverse_conv,
    kernel_map,
    masked_batch_norm,
    site_conv,
    sparse_avg_pool,
    sparse_max_pool,
    sparse_tensor,
    sparse_to_dense,
    sparse_unfold,
    sparse_unpool,
    strided_conv,
    submanifold_conv,
    transposed_conv,
    voxelize,
)

__all__ = [
    "calc_block_params", "calc_block_params_res_block", "compile_ahead", "coordinate_map",
    "dense_to_sparse", "global_pool", "graphed", "inverse_conv", "kernel_map", "mask_conv2d",
    "masked_batch_norm", "nn", "reduce_mask", "site_conv", "sparse_avg_pool", "sparse_conv2d",
    "sparse_gather", "sparse_max_pool", "sparse_res_block_bottleneck", "sparse_scatter",
    "sparse_scatter_var", "sparse_tensor", "sparse_to_dense", "sparse_unfold", "sparse_unpool",
    "sparsify", "strided_conv", "submanifold_conv", "transposed_conv", "voxelize",
]  # fmt: skip
