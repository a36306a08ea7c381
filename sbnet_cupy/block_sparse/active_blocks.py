"""ActiveBlocks: what reduce_mask returns and the layers take."""

import math
from dataclasses import dataclass
from typing import Any

from ..core.arrays import ArrayContainer, array_function, namespace
from ..core.sizes import kernel_pair, pair
from ..errors import CapacityError
from .from_mask import grid_on_mask, images_of_mask, params_of_output
from .picture import describe


@dataclass(frozen=True, eq=False, repr=False)
class ActiveBlocks(ArrayContainer):
    """The active blocks of a mask, as ``reduce_mask`` finds them.

    Unpacks as the pair ``bin_counts, active_block_indices``. Methods that return Python numbers
    read the count and so wait for the device.

    Parameters
    ----------
    bin_counts : int32 array, shape (1,)
        Number of active blocks, also when ``active_block_indices`` has no room for all.
    active_block_indices : int32 array, shape (M, 3)
        Rows ``(n, hi, wi)`` in raster order; -1 past the count.
    grid : (int, int, int)
        Numbers of images, block rows and block columns.

    Examples
    --------
    >>> import numpy as np
    >>> from sbnet_cupy import reduce_mask
    >>> active = reduce_mask(np.eye(4)[None], (2, 2), bsize=2)
    >>> active.count(), active.density(), active.overflowed
    (2, 0.5, False)
    >>> counts, indices = active
    >>> indices.tolist()
    [[0, 0, 0], [0, 1, 1]]
    """

    copies_strided = True

    bin_counts: Any
    active_block_indices: Any
    grid: tuple[int, int, int]

    def __iter__(self):
        return iter((self.bin_counts, self.active_block_indices))

    def __len__(self):
        return 2

    def __getitem__(self, position):
        return (self.bin_counts, self.active_block_indices)[position]

    def _arrays(self):
        return (self.bin_counts, self.active_block_indices)

    def _map_arrays(self, function):
        return ActiveBlocks(
            function(self.bin_counts), function(self.active_block_indices), self.grid
        )

    @classmethod
    def from_mask(cls, mask, *, bsize, ksize, strides=(1, 1), padding: Any = "SAME", capacity=None):
        """List the blocks of a convolution's result that lie under a mask of its image.

        With stride ``s`` and SAME padding the block ``(n, hi, wi)`` covers the pixels
        ``mask[n, s * bsize * hi : s * bsize * (hi + 1), ...]``, on both axes; it is active where
        one of them is greater than 0. The halo that the convolution reads does not count. With
        VALID padding those pixels are moved by half a kernel, as the result is: a mask pixel at the
        very edge, which is the middle of no window, activates no block.

        Parameters
        ----------
        mask : array, shape (N, H, W), (N, H, W, 1) or (N, 1, H, W), or (H, W) for one
            bool, integer or float, of the size of the convolution's image; of any library. Where
            JAX or TensorFlow traces, give the layer the mask instead.
        bsize : int or (int, int)
            Size of a block in pixels of the result, as the layers take it.
        ksize : int or (int, int)
            Size of the kernel; 3 for the residual unit.
        strides, padding
            Those of the convolution.
        capacity : int, optional
            Number of rows to make room for, as for :func:`reduce_mask`. Without it the call waits
            for a GPU to tell the number of active blocks.

        Returns
        -------
        ActiveBlocks
            For any layer with this geometry, called with the same ``bsize``.

        Raises
        ------
        ShapeError, DTypeError
            If a size is wrong, or the mask is complex or no array.

        Examples
        --------
        >>> import numpy as np
        >>> mask = np.zeros((1, 32, 48), bool)
        >>> mask[0, 20, 16:40] = True
        >>> ActiveBlocks.from_mask(mask, bsize=8, ksize=3)
        ActiveBlocks: 3 of 24 blocks active (12.5%), grid (1, 4, 6), capacity 3
        ......
        ......
        ..###.
        ......
        """
        # Not at the top: reduce_mask returns an ActiveBlocks.
        from .mask.reduce_mask import reduce_mask

        if len(getattr(mask, "shape", ())) not in (2, 3, 4):
            return reduce_mask(mask, 1, bsize=1)  # which says what a mask must be
        mask = images_of_mask(mask)
        image_hw = tuple(mask.shape[1:3])
        params = params_of_output(image_hw, bsize, ksize, strides, padding)
        grid = grid_on_mask(params, kernel_pair(ksize), pair(strides, "strides"))
        return reduce_mask(mask, params.bcount, capacity=capacity, **grid)

    def __repr__(self):
        """Draw the grid: # is an active block; in a large grid a character stands for several.

        Reads the list, and so waits for a GPU. While a framework traces, or a CUDA graph is
        captured, it reads nothing.
        """
        return describe(self)

    @property
    def capacity(self):
        """Number of rows of ``active_block_indices``."""
        return int(self.active_block_indices.shape[0])

    @property
    def overflowed(self):
        """Whether more blocks are active than there are rows."""
        return self.count() > self.capacity

    def count(self):
        """Return the number of active blocks."""
        return int(self.bin_counts[0])

    def density(self):
        """Return the share of blocks that are active, 0 to 1; 0 for a grid with no blocks."""
        return self.count() / max(math.prod(self.grid), 1)

    def check(self):
        """Return self, or raise CapacityError when blocks were left out."""
        count = self.count()
        if count > self.capacity:
            raise CapacityError(
                f"capacity must be at least the number of active blocks, got {self.capacity} for "
                f"{count} blocks; pass a larger capacity to reduce_mask"
            )
        return self

    def sites(self, params, mask=None, *, image_size=None, capacity=None):
        """List the pixels of the active blocks: the sites of a sparse tensor in two dimensions.

        Parameters
        ----------
        params : BlockParams, int or (int, int)
            The layer's blocks, or the size of one in pixels of the result, without what its
            neighbours overlap.
        mask : array, shape (N, H, W), (N, H, W, 1) or (N, 1, H, W), optional
            Only pixels where it is not 0 are listed. Its size is that of the images.
        image_size : (int, int), optional
            Height and width of the images; by default what the whole grid covers.
        capacity : int, optional
            Number of rows. With it nothing waits for a GPU; pixels past it are left out.

        Returns
        -------
        CoordinateMap
            The pixels, in raster order; its ``check`` tells whether some were left out, here or
            with their blocks. :func:`blocks_of` leads back.

        Raises
        ------
        ShapeError, DTypeError
            If the blocks do not cover images of this size, or the mask is no mask of them.

        Examples
        --------
        >>> import numpy as np
        >>> mask = np.eye(4)[None]
        >>> active = ActiveBlocks.from_mask(mask, bsize=2, ksize=1)
        >>> active.sites(2, mask)
        CoordinateMap: 4 sites on a grid of (4, 4), batch of 1, capacity 4
        >>> active.sites(2, mask).indices.tolist()
        [[0, 0, 0], [0, 1, 1], [0, 2, 2], [0, 3, 3]]
        >>> active.sites(2).number()
        8
        """
        # Not at the top: it makes a CoordinateMap, of another system, and is above both.
        from ..blocks_and_sites import sites_of_blocks

        return sites_of_blocks(self, params, mask, image_size, capacity)

    def to_dense(self):
        """Return a bool array ``[N, bh, bw]``, True where a block is active and has a row.

        Rows that are no block of the grid are skipped.
        """
        return _to_dense(self)


def dense_blocks(active):
    """Return which blocks are active, without a look at the count: bool ``[N, bh, bw]``."""
    counts, indices = active
    xp = namespace(indices)
    valid = (xp.arange(len(indices)) < counts) & (indices >= 0).all(axis=1)
    place = xp.zeros(len(indices), "int64")
    for column, size in zip(indices.T, active.grid, strict=True):
        valid &= column < size
        place = place * size + column
    total = active.grid[0] * active.grid[1] * active.grid[2]
    dense = xp.zeros(total + 1, bool)
    dense[xp.where(valid, place, total)] = True
    return dense[:-1].reshape(active.grid)


_to_dense = array_function(dense_blocks)
