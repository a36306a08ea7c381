"""Modules on active blocks: a convolution and a pre-activation residual unit.

They take PyTorch's NCHW images, contiguous or channels_last, and are called as ``module(x, mask)``,
or as ``module(x, active, params)`` with blocks that were listed before. channels_last images are
used where they lie, and the result is channels_last too.
"""

from .modules.sparse_bottleneck import SparseBottleneck
from .modules.sparse_conv2d import SparseConv2d

__all__ = ["SparseBottleneck", "SparseConv2d"]
