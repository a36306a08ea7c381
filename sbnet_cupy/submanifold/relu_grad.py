"""relu_grad: back through a relu, and the gradient of the bias before it, in one pass.

Kernels: cuda_src/submanifold/relu_grad.cu, and sum_shares of site_conv_grad.cu.
"""

import functools

import numpy as np

from ..core import launch as kernels
from ..core.arrays import compute_dtype, empty, namespace, place_name, vector_bytes
from ..core.compile import cpp_name
from ..core.spec import spec_of
from .site_conv_grad_launch import prepare_sums
from .site_kernels import lanes_of

_THREADS, _AT_ONCE = 256, 4  # those of relu_grad.cu
_GROUPS = 512  # of rows, at most


def relu_grad(grad, y, bias_dtype):
    """Return the gradients of ``x`` and of a bias, for CuPy arrays ``y = relu(x + bias)``.

    ``dx = grad`` where ``y`` is not 0 or less, else 0; ``dbias`` the sum of its rows, in float32
    (float64 for float64) and in an order that depends on shapes alone, then rounded once. ``grad``
    may be some columns of a wider array.
    """
    (m, channels), item = grad.shape, grad.itemsize
    if grad.strides[1] != item or grad.strides[0] < channels * item:
        grad = namespace(grad).ascontiguousarray(grad)
    pitch, place = grad.strides[0] // item, place_name(grad)
    alignments = tuple(spec_of(array).alignment for array in (grad, y))
    groups, launch = prepare_relu_grad(m, channels, pitch, grad.dtype, alignments, place)
    dx = empty(grad.shape, grad.dtype, grad)
    sums = empty((groups, channels), compute_dtype(grad.dtype), grad)
    dbias = empty((channels,), bias_dtype, grad)
    launch(grad[:1], y, dx, sums)  # the kernel knows how far apart its rows are
    prepare_bias_grad(groups, channels, np.dtype(bias_dtype), place)(sums, dbias)
    return dx, dbias


def has_kernel(dtype, bias_dtype, size):
    """Whether there are kernels for features and a bias of these dtypes."""
    return size > 0 and compute_dtype(dtype) == compute_dtype(bias_dtype)


@functools.lru_cache(maxsize=1024)
def prepare_relu_grad(m, channels, pitch, dtype, alignments, place):
    """Return into how many groups rows are summed, and the launch on the current device.

    It takes ``grad``, whose rows are ``pitch`` elements apart, ``y``, ``dx``, and the sums of each
    group's rows of that, ``[groups, channels]`` of :func:`compute_dtype`. ``alignments`` are those
    of ``grad`` and ``y``.
    """
    item = dtype.itemsize
    vector = max(vector_bytes(channels * item, pitch * item, *alignments), item)
    width = channels * item // vector
    lanes = lanes_of(width)
    rows = _THREADS // lanes * _AT_ONCE
    each = -(-m // (rows * _GROUPS)) * rows
    grid = (-(-m // each), -(-width // lanes))
    template = (cpp_name(dtype, "grad"), f"Bytes<{vector}>::type", lanes)
    return grid[0], kernels.prepare(
        "submanifold/relu_grad", "relu_grad", template, grid, _THREADS, 4,
        (m, width, pitch * item // vector, each), dependent=True,
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def prepare_bias_grad(groups, channels, dtype, place):
    """Prepare the launch that adds up the groups' sums, and takes them and the bias's gradient."""
    # Shares of one tap, 32 threads for each sum.
    return prepare_sums(dtype, channels, 1, 1, groups, parts=32)
