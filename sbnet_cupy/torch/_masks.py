"""From a module's mask to the active blocks of its grid; memory layouts of images."""

import math

import torch

from ..block_sparse.active_blocks import ActiveBlocks
from ..block_sparse.active_grid import check_active_grid
from ..core.sizes import pair
from ..errors import DTypeError, ShapeError
from .ops import reduce_mask


def fit_block_size(block_size, kernel, strides):
    """Return the smallest block not under ``block_size`` that fits a kernel and its strides."""
    return tuple(
        k + -(-max(b - k, 0) // s) * s for b, k, s in zip(block_size, kernel, strides, strict=True)
    )


def check_block_size(block_size):
    """Return ``block_size`` as a pair, or raise ShapeError."""
    return pair(block_size, "block_size")


def check_capacity(capacity):
    """Return ``capacity``: None, a number of blocks, or a share of the grid's blocks."""
    valid = capacity is None or (type(capacity) is int and capacity >= 0)
    if not valid and not (isinstance(capacity, float) and 0 < capacity <= 1):
        raise ValueError(
            "capacity must be None, a number of blocks (int) or a share of them (float over 0, up "
            f"to 1), got {capacity!r}"
        )
    return capacity


def find_active(mask, image, params, capacity):
    """List the blocks that touch a mask of the image's size.

    A block touches with its input window, halo included; where strides skip pixels between the
    windows, with the pixels up to the next one too, so that none is lost.
    """
    if not isinstance(mask, torch.Tensor):
        raise DTypeError(f"mask must be a torch.Tensor, got {type(mask).__name__}")
    n, _, h, w = image.shape
    if mask.dim() == 4 and mask.shape[1] == 1:
        mask = mask[:, 0]
    elif mask.dim() == 2 and n == 1:
        mask = mask[None]
    if tuple(mask.shape) != (n, h, w):
        raise ShapeError(
            f"mask must have shape ({n}, {h}, {w}) or ({n}, 1, {h}, {w}), the size of x, got "
            f"{tuple(mask.shape)}"
        )
    if isinstance(capacity, float):
        capacity = math.ceil(capacity * n * params.bcount[0] * params.bcount[1])
    window = tuple(map(max, params.bsize, params.bstride))
    return reduce_mask(
        mask, params.bcount, bsize=window, boffset=params.boffset, bstride=params.bstride,
        capacity=capacity,
    )  # fmt: skip


def resolve_blocks(mask, params, image, calculate, capacity):
    """Return (active blocks, BlockParams) of a module's call.

    ``mask`` may be the list of blocks already. ``calculate(height, width)`` gives the module's own
    BlockParams for the image.
    """
    listed = isinstance(mask, ActiveBlocks | tuple)
    if listed and params is not None:
        check_active_grid(mask, image.shape[0], params.bcount)
        return mask, params
    if listed:
        raise TypeError(
            "params must be given with a list of active blocks, got None; call module(x, active, "
            "params) with the BlockParams that reduce_mask was given, or module(x, mask)"
        )
    params = calculate(*image.shape[2:]) if params is None else params
    return find_active(mask, image, params, capacity), params


def check_nchw(x, channels):
    """Raise unless x is an image of the module's channels; None is any number."""
    if not isinstance(x, torch.Tensor):
        raise DTypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
    if x.dim() != 4 or channels not in (None, x.shape[1]):
        wanted = "C" if channels is None else channels
        raise ShapeError(f"x must have shape (N, {wanted}, H, W), got {tuple(x.shape)}")


def is_channels_last(x):
    """Whether an NCHW image lies in memory as NHWC; one that lies as both does not."""
    return not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
