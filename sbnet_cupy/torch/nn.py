"""Modules on active blocks: a convolution and a pre-activation residual unit.

They take PyTorch's NCHW images, contiguous or channels_last, and are called as ``module(x, mask)``,
or as ``module(x, active, params)`` with blocks that were listed before. channels_last images are
used where they lie, and the result is channels_last too.
"""

from ._bottleneck_module import SparseBottleneck
from ._conv_module import SparseConv2d

__all__ = ["SparseBottleneck", "SparseConv2d"]
