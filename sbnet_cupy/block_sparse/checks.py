"""What operations and layers on blocks check alike: images, lists of blocks, geometry, limits."""

import math

import numpy as np

from ..core.byte_order import check_byte_order, check_byte_orders
from ..core.checks import check_array, check_contiguous
from ..core.sizes import is_integer
from ..errors import DTypeError, ShapeError
from .active_blocks import ActiveBlocks
from .block_params import BlockParams

LARGEST = 2**30  # size that a kernel counts in 32 bits
MOST_BLOCKS = 2**16 - 1  # thread blocks along an axis of a grid


def cut_blocks(bsize, size):
    """Return blocks no larger than the image, ``size``, where there is one."""
    return tuple(max(min(b, n), 1) for b, n in zip(bsize, size, strict=True))


def resolve_expected(expected, active_block_indices):
    """Return about how many blocks will be active: by default all that are listed."""
    if expected is None:
        return active_block_indices.shape[0]
    if not is_integer(expected) or expected < 0:
        raise ShapeError(f"expected must be None or a non-negative integer, got {expected!r}")
    return expected


def check_image(name, x, like=None):
    """Check an image or stack whose elements are only moved: 4-D, contiguous, 1 to 16 bytes."""
    check_array(name, x, ndim=4, like=like)
    check_contiguous(name, x)
    if x.dtype.hasobject or x.dtype.itemsize not in (1, 2, 4, 8, 16):
        raise DTypeError(f"{name} must have elements of 1, 2, 4, 8 or 16 bytes, got {x.dtype}")


def check_indices(bin_counts, active_block_indices, like):
    """Check the pair that reduce_mask returns."""
    check_array("active_block_indices", active_block_indices, like=like)
    if active_block_indices.ndim != 2 or active_block_indices.shape[1] != 3:
        raise ShapeError(
            "active_block_indices must have shape (M, 3), got "
            f"{active_block_indices.shape}; build it with reduce_mask"
        )
    check_array("bin_counts", bin_counts, like=like)
    if bin_counts.shape != (1,):
        raise ShapeError(
            f"bin_counts must have shape (1,), got {bin_counts.shape}; build it with reduce_mask"
        )
    for name, value in (("active_block_indices", active_block_indices), ("bin_counts", bin_counts)):
        if value.dtype != np.int32:
            check_byte_order({name: value})
            raise DTypeError(f"{name} must be int32, got {value.dtype}; build it with reduce_mask")
        check_contiguous(name, value)


def check_capacity(capacity, more=""):
    """Return a number of blocks to make room for, or a share of all; None is none."""
    if capacity is None:
        return None
    if is_integer(capacity) and capacity >= 0:
        return int(capacity)
    if isinstance(capacity, float | np.floating) and 0 < capacity <= 1:
        return float(capacity)
    raise ValueError(
        "capacity must be None, a number of blocks (int) or a share of them (float over 0, up "
        f"to 1){more}, got {capacity!r}"
    )


def blocks_of_capacity(capacity, total):
    """Return the number of blocks that a capacity has room for; None without one."""
    return math.ceil(capacity * total) if isinstance(capacity, float) else capacity


def check_method(method):
    """Raise ValueError unless ``method`` is "auto", "gather" or "fused"."""
    if not isinstance(method, str) or method not in ("auto", "gather", "fused"):
        raise ValueError(f"method must be 'auto', 'gather' or 'fused', got {method!r}")


def plain_params(block_params, calculate):
    """Return the fields of a BlockParams, which are an option of a layer; raise for anything else.

    ``calculate`` is the function that makes BlockParams for the layer.
    """
    if not isinstance(block_params, BlockParams):
        raise TypeError(
            f"block_params must be a BlockParams, got {type(block_params).__name__}; give bsize "
            "instead, the one that the list of blocks was made with, or build it with "
            f"{calculate.__name__}"
        )
    return (
        block_params.bsize, block_params.bsize_out, block_params.boffset, block_params.bcount,
        block_params.bstride,
    )  # fmt: skip


def check_block_params(block_params, calculate, image_hw, kernel, strides, padding):
    """Raise unless ``block_params`` is what ``calculate`` gives for this convolution."""
    plain_params(block_params, calculate)
    try:
        expected = calculate(image_hw, block_params.bsize, kernel, strides, padding)
    except ShapeError as error:
        raise ShapeError(f"block_params does not fit this convolution: {error}") from None
    if block_params != expected:
        raise ShapeError(
            f"block_params must be {expected} for this size of x, kernel, strides and padding, got "
            f"{block_params}; build it with {calculate.__name__}"
        )


def check_base(base, shape, x):
    """Raise unless ``base`` is None or can lie under a result of this shape."""
    if base is None:
        return
    check_array("base", base, shape=shape, like=x)
    if base.dtype != x.dtype:
        check_byte_orders({"x": x, "base": base})
        raise DTypeError(f"base must have the dtype of x, {x.dtype}, got {base.dtype}; convert it")
    check_contiguous("base", base)


def split_indices(indices):
    """Return the ActiveBlocks or the pair, or raise where it is neither."""
    if not isinstance(indices, ActiveBlocks | tuple | list) or len(indices) != 2:
        masked = isinstance(indices, np.ma.MaskedArray)  # of which asarray would drop the mask
        raise TypeError(
            "indices must be a mask (an array), an ActiveBlocks or a pair (bin_counts, "
            f"active_block_indices), got {type(indices).__name__}; give the mask as an array, "
            f"{'mask.filled(0)' if masked else 'numpy.asarray(mask)'} for one, or list its blocks "
            "with ActiveBlocks.from_mask"
        )
    return indices


def arrays_of_list(indices):
    """Return ``bin_counts`` and ``active_block_indices`` of a list of blocks."""
    if type(indices) is ActiveBlocks:
        return indices.bin_counts, indices.active_block_indices
    bin_counts, active_block_indices = split_indices(indices)
    return bin_counts, active_block_indices
