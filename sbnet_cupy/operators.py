"""The table of all operators, by name: what an adapter can drive, and what tests walk through."""

from .block_sparse.bottleneck.fused_bottleneck import FUSED_BOTTLENECK
from .block_sparse.bottleneck.res_block import RES_BLOCK
from .block_sparse.bottleneck.res_block_grad import RES_BLOCK_GRAD
from .block_sparse.conv.fused_conv import FUSED_CONV
from .block_sparse.conv.sparse_conv2d import SPARSE_CONV2D
from .block_sparse.conv.sparse_conv2d_grad import SPARSE_CONV2D_GRAD
from .block_sparse.conv.stack_conv import STACK_CONV
from .block_sparse.gather_scatter.sparse_gather import GATHER
from .block_sparse.gather_scatter.sparse_gather_grad import GATHER_GRAD
from .block_sparse.gather_scatter.sparse_scatter import SCATTER
from .block_sparse.gather_scatter.sparse_scatter_grad import SCATTER_GRAD
from .block_sparse.gather_scatter.zero_outside import ZERO_OUTSIDE
from .block_sparse.mask.reduce_mask import REDUCE_MASK
from .block_sparse.stack.block_table import FILL_GRID, MASK_TABLE
from .block_sparse.stack.stack_avg_pool import STACK_AVG_POOL
from .block_sparse.stack.stack_conv2d import STACK_CONV2D
from .block_sparse.stack.stack_global_pool import STACK_GLOBAL_POOL
from .block_sparse.stack.stack_halo import STACK_HALO
from .block_sparse.stack.stack_max_pool import STACK_MAX_POOL
from .block_sparse.stack.stack_to_image import FILL_IMAGE
from .core.copy_image import COPY_IMAGE
from .dense.affine_grad import AFFINE_GRAD
from .dense.conv2d import CONV2D
from .dense.conv2d_grad import CONV2D_GRAD
from .submanifold.reduce_features import REDUCE_FEATURES
from .submanifold.sample_pool import SAMPLE_ARGMAX, SAMPLE_MAX, SAMPLE_SUM
from .submanifold.site_conv import SITE_CONV
from .submanifold.site_conv_grad import SITE_WEIGHT_GRAD
from .submanifold.site_features_grad import SITE_FEATURES_GRAD
from .submanifold.site_max import SITE_MAX, SITE_MAX_GRAD, SITE_MAX_TANGENT
from .submanifold.site_sum import SITE_SUM
from .submanifold.transposed_rows import TRANSPOSED_ROWS

OPERATORS = {
    operator.name: operator
    for operator in (
        COPY_IMAGE,
        CONV2D,
        CONV2D_GRAD,
        AFFINE_GRAD,
        REDUCE_MASK,
        GATHER,
        GATHER_GRAD,
        SCATTER,
        SCATTER_GRAD,
        ZERO_OUTSIDE,
        FUSED_CONV,
        STACK_CONV,
        SPARSE_CONV2D,
        SPARSE_CONV2D_GRAD,
        FUSED_BOTTLENECK,
        RES_BLOCK,
        RES_BLOCK_GRAD,
        FILL_GRID,
        MASK_TABLE,
        STACK_HALO,
        STACK_CONV2D,
        STACK_MAX_POOL,
        STACK_AVG_POOL,
        FILL_IMAGE,
        STACK_GLOBAL_POOL,
        TRANSPOSED_ROWS,
        REDUCE_FEATURES,
        SITE_CONV,
        SITE_WEIGHT_GRAD,
        SITE_FEATURES_GRAD,
        SITE_SUM,
        SITE_MAX,
        SITE_MAX_GRAD,
        SITE_MAX_TANGENT,
        SAMPLE_SUM,
        SAMPLE_MAX,
        SAMPLE_ARGMAX,
    )
}
