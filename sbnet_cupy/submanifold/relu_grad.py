"""relu_grad: back through a relu, and the gradient of the bias before it, in one pass.

Kernels: cuda_src/submanifold/relu_grad.cu, and sum_shares of site_conv_grad.cu.
"""

import functools

from ..core import launch as kernels
from ..core.arrays import compute_dtype, empty, namespace, place_name, vector_bytes
from ..core.compile import cpp_name
from ..core.spec import spec_of
from .site_conv_grad_launch import prepare_sums

_THREADS, _AT_ONCE = 256, 4  # those of relu_grad.cu
_GROUPS = 512  # of rows, at most


def relu_grad(grad, y, bias_dtype):
    """Return the gradients of ``x`` and of a bias, for CuPy arrays ``y = relu(x + bias)``.

    ``dx = grad`` where ``y`` is not 0 or less, else 0; ``dbias`` the sum of its rows, in float32
    (float64 for float64) and in an order that depends on shapes alone, then rounded once. ``grad``
    may be some columns of a wider array.
    """
    dx, sums = relu_grad_and_sums(grad, y)
    return dx, bias_grad(sums, bias_dtype)


def relu_grad_and_sums(grad, y):
    """Return the gradient of ``x``, and sums over groups of its rows: ``[groups, channels]``."""
    (m, channels), item = grad.shape, grad.itemsize
    if grad.strides[1] != item or grad.strides[0] < channels * item:
        grad = namespace(grad).ascontiguousarray(grad)
    pitch = grad.strides[0] // item
    alignments = tuple(spec_of(array).alignment for array in (grad, y))
    groups, launch = _launch(m, channels, pitch, grad.dtype, alignments, place_name(grad))
    dx = empty(grad.shape, grad.dtype, grad)
    sums = empty((groups, channels), compute_dtype(grad.dtype), grad)
    launch(grad[:1], y, dx, sums)  # the kernel knows how far apart its rows are
    return dx, sums


def bias_grad(sums, dtype):
    """Return the gradient of the bias, of a dtype, from the sums over groups of rows."""
    dbias = empty((sums.shape[1],), dtype, sums)
    _sum_launch(*sums.shape, dtype, place_name(sums))(sums, dbias)
    return dbias


def has_kernel(dtype, bias_dtype, size):
    """Whether there are kernels for features and a bias of these dtypes."""
    return size > 0 and compute_dtype(dtype) == compute_dtype(bias_dtype)


@functools.lru_cache(maxsize=1024)
def _launch(m, channels, pitch, dtype, alignments, place):
    """Return how many groups of rows there are, and the launch on the current device."""
    item = dtype.itemsize
    vector = max(vector_bytes(channels * item, pitch * item, *alignments), item)
    width = channels * item // vector
    lanes = min(32, 1 << (width - 1).bit_length())
    rows = _THREADS // lanes * _AT_ONCE
    each = -(-m // (rows * _GROUPS)) * rows
    grid = (-(-m // each), -(-width // lanes))
    template = (cpp_name(dtype, "grad"), f"Bytes<{vector}>::type", lanes)
    return grid[0], kernels.prepare(
        "submanifold/relu_grad", "relu_grad", template, grid, _THREADS, 4,
        (m, width, pitch * item // vector, each), dependent=True,
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _sum_launch(groups, channels, dtype, place):
    """Prepare the launch that adds the groups up: shares of one tap, 32 threads for each sum."""
    return prepare_sums(dtype, channels, 1, 1, groups, parts=32)
