"""Inputs of a case, made on the device: images in several sets, active blocks, padded images."""

from typing import Any, NamedTuple

import numpy as np

import sbnet_cupy as sb
from benchmarks.harness.cases import KERNEL, make_mask


class Blocks(NamedTuple):
    """The active blocks of a case."""

    params: sb.BlockParams
    mask: Any  # bool [N, H, W], on the device
    active: sb.ActiveBlocks
    indices: np.ndarray  # int32 [M, 3], on the host
    density: float  # share of the mask's pixels that are set

    @property
    def count(self):
        """Number of active blocks."""
        return len(self.indices)

    @property
    def gather_grid(self):
        """Grid of the blocks with their halo, as the ops take it."""
        p = self.params
        return {"bsize": p.bsize, "boffset": p.boffset, "bstride": p.bstride}

    @property
    def scatter_grid(self):
        """Grid of the output tiles, as the ops take it."""
        tile = self.params.bsize_out
        return {"bsize": tile, "boffset": (0, 0), "bstride": tile}


def find_blocks(case, session, halo=True):
    """Make the mask of a case and list the blocks whose input holds a pixel of it.

    Without ``halo``, those whose output does.
    """
    params = sb.calc_block_params(case.shape, case.bsize, KERNEL)
    mask = make_mask(case, session)
    grid = {"bsize": params.bsize, "boffset": params.boffset, "bstride": params.bstride}
    if not halo:
        grid = {"bsize": params.bsize_out}
    active = sb.reduce_mask(mask, params.bcount, **grid)
    indices = to_host(active.active_block_indices)
    return Blocks(params, mask, active, indices, float(mask.mean()))


def to_host(array):
    """Bring an array to the host."""
    return array if isinstance(array, np.ndarray) else array.get()


def fill(array, xp, seed):
    """Fill an array with multiples of 1/1024 from -1/2 to 1/2: hashed positions, exact in half."""
    bits = xp.arange(array.size, dtype=np.uint32)
    bits += np.uint32(seed * 0x9E3779B9 % 2**32)
    bits *= np.uint32(2654435769)
    bits ^= bits >> np.uint32(15)
    bits *= np.uint32(0x85EBCA6B)
    bits >>= np.uint32(22)
    array[...] = ((bits.astype(np.float32) - 512) / 1024).reshape(array.shape)
    return array


def filled_sets(session, count, shape, dtype, seed=0):
    """Return ``count`` arrays of noise, each different, in one allocation ``[count, *shape]``."""
    sets = session.xp.empty((count, *shape), dtype)
    for k in range(count):
        fill(sets[k], session.xp, seed + k)
    return sets


class Padded(NamedTuple):
    """Images with room for all blocks of a grid, for those who cannot cross the image's edge."""

    images: Any  # [sets, N, Hp, Wp, C]
    crop: tuple  # of an image without its padding


def pad_sets(session, images, grid, bcount):
    """Copy images into larger ones of zeros, so that every block of the grid lies inside."""
    (_, n, *hw, c), before, padded = images.shape, [-o for o in grid["boffset"]], []
    for axis in (0, 1):
        reach = grid["bstride"][axis] * (bcount[axis] - 1) + grid["bsize"][axis]
        padded.append(max(reach, before[axis] + hw[axis]))
    crop = tuple(slice(b, b + size) for b, size in zip(before, hw, strict=True))
    larger = session.xp.zeros((images.shape[0], n, *padded, c), images.dtype)
    larger[:, :, crop[0], crop[1]] = images
    return Padded(larger, (slice(None), *crop))


def pixel_numbers(indices, grid, shape):
    """Return the flat pixel of every element of every block in padded images: int64, flat."""
    _, h, w, _ = shape
    (bh, bw), (sh, sw) = grid["bsize"], grid["bstride"]
    n, hi, wi = indices.astype(np.int64).T
    rows = n[:, None] * h + sh * hi[:, None] + np.arange(bh)
    columns = sw * wi[:, None] + np.arange(bw)
    return (rows[:, :, None] * w + columns[:, None, :]).reshape(-1)
