"""The namespace of :mod:`.compositions` for NumPy and CuPy arrays."""

import inspect

from ..core.arrays import compute_dtype, namespace
from ..dense.activation import apply_affine
from ..dense.conv2d import conv2d
from .conv.stack_conv import stack_conv2d
from .gather_scatter.sparse_gather import sparse_gather
from .gather_scatter.sparse_scatter import sparse_scatter
from .gather_scatter.zero_outside import zero_outside as _zero_outside

# Without their door: within a layer, arrays are native, and on the current device.
_gather, _scatter, _conv2d = map(inspect.unwrap, (sparse_gather, sparse_scatter, conv2d))


def gather(
    x, bin_counts, active_block_indices, bsize, boffset=(0, 0), bstride=None, **options
):  # fmt: skip
    """Return the active blocks of an image: :func:`sparse_gather`."""
    grid = {"bsize": bsize, "boffset": boffset, "bstride": bstride}
    return _gather(x, bin_counts, active_block_indices, **grid, **options)


def scatter(
    blocks, bin_counts, active_block_indices, x, bsize, boffset=(0, 0), bstride=None, **options
):
    """Return an image with the blocks in it: :func:`sparse_scatter`."""
    grid = {"bsize": bsize, "boffset": boffset, "bstride": bstride}
    return _scatter(blocks, bin_counts, active_block_indices, x, **grid, **options)


def convolve(x, w, *, bin_counts=None, padding="SAME", w_format="HWIO", out=None, **options):
    """Return the convolution of images, or of the stack of blocks below the count."""
    if bin_counts is None:
        return _conv2d(x, w, padding=padding, w_format=w_format, out=out, **options)
    return stack_conv2d(x, w, bin_counts, **options)


def zero_outside(blocks, bin_counts, active_block_indices, grid, image_hw):
    """Set to 0, in place, what of the stack is outside the image; return the stack."""
    _zero_outside(blocks, bin_counts, active_block_indices, grid, image_hw)
    return blocks


def affine(values, scale, shift, activation, channels_last=True):
    """Return ``activation(values * scale + shift)`` in the dtype to compute in."""
    values = values.astype(compute_dtype(values.dtype))
    return apply_affine(values, scale, shift, activation, -1 if channels_last else 1)


def where(condition, values, other):
    """Return the values where the condition holds, elsewhere a number of their dtype."""
    return namespace(values).where(condition, values, values.dtype.type(other))


def cast(values, dtype):
    """Return the values in a dtype."""
    return values.astype(dtype, copy=False)


def shape(array):
    """Return the sizes of an array."""
    return array.shape


def zeros(shape, dtype, like):
    """Return zeros."""
    return namespace(like).zeros(shape, dtype)


def ones(shape, dtype, like):
    """Return ones."""
    return namespace(like).ones(shape, dtype)


def arange(size, like):
    """Return 0, 1, 2... as int32."""
    return namespace(like).arange(size, dtype="int32")


def move_channels_first(stack):
    """Return an NHWC stack as NCHW."""
    return namespace(stack).ascontiguousarray(stack.transpose(0, 3, 1, 2))
