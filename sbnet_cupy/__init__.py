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
from .block_sparse.conv.weights import PackedWeights
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
from .dense.conv2d import conv2d
from .dense.conv2d_grad import conv2d_grad
from .errors import CapacityError, DeviceError, DTypeError, ShapeError

__version__ = "0.1.0"

__all__ = [
    "ActiveBlocks",
    "BlockParams",
    "BlockTable",
    "BottleneckWeights",
    "CapacityError",
    "DTypeError",
    "DeviceError",
    "PackedBottleneck",
    "PackedWeights",
    "ShapeError",
    "block_table",
    "calc_block_params",
    "calc_block_params_res_block",
    "conv2d",
    "conv2d_grad",
    "fused_bottleneck",
    "fused_conv",
    "mask_conv2d",
    "masks",
    "reduce_mask",
    "sparse_conv2d",
    "sparse_conv2d_grad",
    "sparse_gather",
    "sparse_gather_grad",
    "sparse_res_block_bottleneck",
    "sparse_res_block_bottleneck_grad",
    "sparse_scatter",
    "sparse_scatter_grad",
    "sparse_scatter_var",
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
]
