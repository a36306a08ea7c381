"""Block-sparse convolution on CuPy and NumPy arrays: compute only where a mask says it matters."""

from .block_sparse.active_blocks import ActiveBlocks
from .block_sparse.bottleneck.fused_bottleneck import fused_bottleneck
from .block_sparse.bottleneck.res_block import sparse_res_block_bottleneck
from .block_sparse.bottleneck.res_block_grad import sparse_res_block_bottleneck_grad
from .block_sparse.bottleneck.weights import BottleneckWeights, PackedBottleneck
from .block_sparse.conv.fused_conv import fused_conv
from .block_sparse.conv.mask_conv2d import mask_conv2d
from .block_sparse.conv.sparse_conv2d import sparse_conv2d
from .block_sparse.conv.sparse_conv2d_grad import sparse_conv2d_grad
from .block_sparse.gather_scatter.sparse_gather import sparse_gather
from .block_sparse.gather_scatter.sparse_gather_grad import sparse_gather_grad
from .block_sparse.gather_scatter.sparse_scatter import sparse_scatter, sparse_scatter_var
from .block_sparse.gather_scatter.sparse_scatter_grad import sparse_scatter_grad
from .block_sparse.mask import masks
from .block_sparse.mask.reduce_mask import reduce_mask
from .block_sparse.stack.block_table import BlockTable, block_table
from .block_sparse.stack.stack_avg_pool import stack_avg_pool
from .block_sparse.stack.stack_avg_pool_grad import stack_avg_pool_grad
from .block_sparse.stack.stack_conv2d import stack_conv2d
from .block_sparse.stack.stack_conv2d_grad import stack_conv2d_grad
from .block_sparse.stack.stack_from_image import stack_from_image
from .block_sparse.stack.stack_from_image_grad import stack_from_image_grad
from .block_sparse.stack.stack_global_pool import stack_global_pool
from .block_sparse.stack.stack_global_pool_grad import stack_global_pool_grad
from .block_sparse.stack.stack_halo import stack_halo
from .block_sparse.stack.stack_halo_grad import stack_halo_grad
from .block_sparse.stack.stack_interpolate import stack_interpolate
from .block_sparse.stack.stack_interpolate_grad import stack_interpolate_grad
from .block_sparse.stack.stack_max_pool import stack_max_pool
from .block_sparse.stack.stack_max_pool_grad import stack_max_pool_grad
from .block_sparse.stack.stack_per_block import stack_per_block, stack_per_block_grad
from .block_sparse.stack.stack_pixel_mask import stack_pixel_mask
from .block_sparse.stack.stack_to_image import stack_to_image
from .block_sparse.stack.stack_to_image_grad import stack_to_image_grad
from .blocks import BlockParams, calc_block_params, calc_block_params_res_block
from .blocks_and_sites import blocks_of
from .dense.conv2d import conv2d
from .dense.conv2d_grad import conv2d_grad
from .dense.packed_weights import PackedWeights
from .errors import CapacityError, DeviceError, DTypeError, ShapeError
from .submanifold.coordinate_map import CoordinateMap, coordinate_map
from .submanifold.dense_conversion import (
    dense_to_sparse,
    dense_to_sparse_grad,
    sparse_to_dense,
    sparse_to_dense_grad,
)
from .submanifold.global_pool import global_pool, global_pool_grad
from .submanifold.kernel_map import KernelMap, kernel_map
from .submanifold.site_conv import site_conv
from .submanifold.site_conv_grad import site_conv_grad
from .submanifold.site_pool import (
    sparse_avg_pool,
    sparse_avg_pool_grad,
    sparse_max_pool,
    sparse_max_pool_grad,
    sparse_unpool,
    sparse_unpool_grad,
)
from .submanifold.sparse_tensor import SparseTensor, sparse_tensor
from .submanifold.sparse_tensor_grad import sparse_tensor_grad
from .submanifold.sparse_unfold import sparse_unfold, sparse_unfold_grad
from .submanifold.submanifold_conv import (
    inverse_conv,
    strided_conv,
    submanifold_conv,
    transposed_conv,
)
from .submanifold.submanifold_conv_grad import (
    inverse_conv_grad,
    strided_conv_grad,
    submanifold_conv_grad,
    transposed_conv_grad,
)
from .submanifold.voxelize import voxelize

__version__ = "0.1.0"

__all__ = [
    "ActiveBlocks",
    "BlockParams",
    "BlockTable",
    "BottleneckWeights",
    "CapacityError",
    "CoordinateMap",
    "DTypeError",
    "DeviceError",
    "KernelMap",
    "PackedBottleneck",
    "PackedWeights",
    "ShapeError",
    "SparseTensor",
    "block_table",
    "blocks_of",
    "calc_block_params",
    "calc_block_params_res_block",
    "conv2d",
    "conv2d_grad",
    "coordinate_map",
    "dense_to_sparse",
    "dense_to_sparse_grad",
    "fused_bottleneck",
    "fused_conv",
    "global_pool",
    "global_pool_grad",
    "inverse_conv",
    "inverse_conv_grad",
    "kernel_map",
    "mask_conv2d",
    "masks",
    "reduce_mask",
    "site_conv",
    "site_conv_grad",
    "sparse_avg_pool",
    "sparse_avg_pool_grad",
    "sparse_conv2d",
    "sparse_conv2d_grad",
    "sparse_gather",
    "sparse_gather_grad",
    "sparse_max_pool",
    "sparse_max_pool_grad",
    "sparse_res_block_bottleneck",
    "sparse_res_block_bottleneck_grad",
    "sparse_scatter",
    "sparse_scatter_grad",
    "sparse_scatter_var",
    "sparse_tensor",
    "sparse_tensor_grad",
    "sparse_to_dense",
    "sparse_to_dense_grad",
    "sparse_unfold",
    "sparse_unfold_grad",
    "sparse_unpool",
    "sparse_unpool_grad",
    "stack_avg_pool",
    "stack_avg_pool_grad",
    "stack_conv2d",
    "stack_conv2d_grad",
    "stack_from_image",
    "stack_from_image_grad",
    "stack_global_pool",
    "stack_global_pool_grad",
    "stack_halo",
    "stack_halo_grad",
    "stack_interpolate",
    "stack_interpolate_grad",
    "stack_max_pool",
    "stack_max_pool_grad",
    "stack_per_block",
    "stack_per_block_grad",
    "stack_pixel_mask",
    "stack_to_image",
    "stack_to_image_grad",
    "strided_conv",
    "strided_conv_grad",
    "submanifold_conv",
    "submanifold_conv_grad",
    "transposed_conv",
    "transposed_conv_grad",
    "voxelize",
]
