"""Modules on active blocks: a convolution and a pre-activation residual unit.

They take PyTorch's NCHW images, contiguous or channels_last, and are called as ``module(x, mask)``,
or as ``module(x, active, params)`` with blocks that were listed before. channels_last images are
used where they lie, and the result is channels_last too.

In evaluation, where no gradient is recorded, a module lays its weights out for the kernels once,
and again after a change that autograd's version counters show. A call that records gradients,
``train()`` and ``eval()`` drop what was laid out, so that every kind of training is seen.
"""

from ._bottleneck_module import SparseBottleneck
from ._conv_module import SparseConv2d

__all__ = ["SparseBottleneck", "SparseConv2d"]
