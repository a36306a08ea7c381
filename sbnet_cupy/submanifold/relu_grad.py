"""relu_grad: back through a relu, and the gradient of the bias before it, in one pass.

Kernels: cuda_src/dense/affine_grad.cu, and sum_shares of cuda_src/submanifold/site_conv_grad.cu.
"""

import functools

from ..core import launch as kernels
from ..core.arrays import compute_dtype, empty, place_name
from ..core.compile import cpp_name
from ..core.spec import spec_of
from ..dense.affine_grad import prepare_sums


def relu_grad(grad, y, bias_dtype):
    """Return the gradients of ``x`` and of a bias, for CuPy arrays ``y = relu(x + bias)``.

    ``dx = grad`` where ``y`` is not 0 or less, else 0; ``dbias`` the sum of its rows, in float32
    (float64 for float64) and in an order that depends on shapes alone, then rounded once.
    """
    channels = grad.shape[1]
    wide = compute_dtype(grad.dtype)
    specs = tuple(spec_of(array[None, None]) for array in (grad, y))
    groups, multiply, add_up = _launches(specs, wide, bias_dtype, place_name(grad))
    dx, dbias = empty(grad.shape, grad.dtype, grad), empty((channels,), bias_dtype, grad)
    sums = empty((2, groups, channels), wide, grad)
    multiply(grad, y, None, None, None, dx, sums)
    add_up(sums[1], dbias)
    return dx, dbias


def has_kernel(dtype, bias_dtype, size):
    """Whether there are kernels for features and a bias of these dtypes."""
    return size > 0 and compute_dtype(dtype) == compute_dtype(bias_dtype)


@functools.lru_cache(maxsize=1024)
def _launches(specs, wide, bias_dtype, place):
    """Prepare the launches on the current device; return the number of sums of a channel, too."""
    channels = specs[0].shape[3]
    groups, multiply = prepare_sums(*specs, wide, "relu", channels, True)
    add_up = kernels.prepare(
        "submanifold/site_conv_grad", "sum_shares", (cpp_name(bias_dtype, "bias"),),
        -(-channels // 64), 256, 2, (channels, groups),
    )  # fmt: skip
    return groups, multiply, add_up
