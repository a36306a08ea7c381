"""ActiveBlocks: what reduce_mask returns and the layers take."""

import math
from dataclasses import dataclass
from typing import Any

from ..core.arrays import ArrayContainer, array_function, namespace
from ..errors import CapacityError


@dataclass(frozen=True, eq=False)
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

    def to_dense(self):
        """Return a bool array ``[N, bh, bw]``, True where a block is active and has a row."""
        return _to_dense(self)


@array_function
def _to_dense(active):
    indices = active.active_block_indices
    xp = namespace(indices)
    dense = xp.zeros(active.grid, bool)
    n, hi, wi = indices[: min(active.count(), active.capacity)].T
    dense[n, hi, wi] = True
    return dense
