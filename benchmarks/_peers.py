"""What a user would write without this library: indexing in PyTorch, CuPy and NumPy.

They get every advantage that can be had beforehand: images padded so that no block crosses an
edge, tables of pixel numbers and of blocks, the mask of blocks. None of that is timed.
"""

from functools import partial

import numpy as np
from _inputs import pad_sets, pixel_numbers
from _timing import Contender


class IndexPeers:
    """Padded images and index tables, as arrays of the session's library and as tensors."""

    note = "padded beforehand"

    def __init__(self, session, images, blocks, grid):
        self.session, self.xp, self.torch = session, session.xp, session.torch
        self.indices, self.grid, self.channels = blocks.indices, grid, images.shape[4]
        self.padded, self.crop = pad_sets(session, images, grid, blocks.params.bcount)
        numbers = pixel_numbers(blocks.indices, grid, self.padded.shape[1:])
        self.pixels = self.xp.asarray(numbers)
        if self.torch:
            from_dlpack = self.torch.from_dlpack
            table = np.ascontiguousarray(blocks.indices.T.astype(np.int64))
            self.tensors = list(from_dlpack(self.padded))
            self.torch_pixels = from_dlpack(self.pixels)
            self.index = tuple(from_dlpack(self.xp.asarray(table)))
            self.block_mask = from_dlpack(blocks.active.to_dense())

    def native(self, name, function, *sets, **options):
        """Return a contender on arrays of the session's library."""
        calls = [partial(function, *each) for each in zip(self.padded, *sets, strict=True)]
        return Contender(name, calls, note=self.note, **options)

    def of_torch(self, name, function, *sets, capturable=True, **options):
        """Return a contender on tensors; ``sets`` are tensors of as many sets as there are."""
        calls = [partial(function, *each) for each in zip(self.tensors, *sets, strict=True)]
        note = self.note if capturable else f"{self.note}; waits for the device, so no graph"
        return Contender(name, calls, "torch", capturable, note=note, **options)
