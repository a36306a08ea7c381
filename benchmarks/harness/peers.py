"""What a user would write without this library: indexing in PyTorch, CuPy and NumPy.

Most of them get every advantage that can be had beforehand: images padded so that no block crosses
an edge, tables of pixel numbers and of blocks, the mask of blocks. None of that is timed. Those
noted as ``SAME_INPUTS`` start from what this library is given, an image and a list of blocks.
"""

from functools import partial

import numpy as np

from benchmarks.harness.inputs import pad_sets, pixel_numbers
from benchmarks.harness.rows import SAME_INPUTS
from benchmarks.harness.timing import Contender

PREPARED = "padded and indexed beforehand"
WAITS = "waits for the device, so no graph"


class IndexPeers:
    """Padded images and index tables, as arrays of the session's library and as tensors."""

    def __init__(self, session, images, blocks, grid):
        self.session, self.xp, self.torch = session, session.xp, session.torch
        self.indices, self.grid, self.channels = blocks.indices, grid, images.shape[4]
        self.image = images[0]
        self.padded, self.crop = pad_sets(session, images, grid, blocks.params.bcount)
        numbers = pixel_numbers(blocks.indices, grid, self.padded.shape[1:])
        self.pixels = self.xp.asarray(numbers)
        if self.torch:
            from_dlpack = self.torch.from_dlpack
            self.plain = list(from_dlpack(images))
            self.rows = from_dlpack(blocks.active.active_block_indices)
            table = np.ascontiguousarray(blocks.indices.T.astype(np.int64))
            self.tensors = list(from_dlpack(self.padded))
            self.torch_pixels = from_dlpack(self.pixels)
            self.index = tuple(from_dlpack(self.xp.asarray(table)))
            self.block_mask = from_dlpack(blocks.active.to_dense())

    def native(self, name, function, *sets, target=None):
        """Return a contender on arrays of the session's library."""
        calls = [partial(function, *each) for each in zip(self.padded, *sets, strict=True)]
        return Contender(name, calls, target=target, note=PREPARED)

    def of_torch(self, name, function, *sets, capturable=True, target=None, note=PREPARED):
        """Return a contender on tensors; ``sets`` are tensors of as many sets as there are."""
        images = self.plain if note == SAME_INPUTS else self.tensors
        calls = [partial(function, *each) for each in zip(images, *sets, strict=True)]
        note = note if capturable else f"{note}; {WAITS}"
        return Contender(name, calls, "torch", capturable, target, note)

    def torch_pixels_of(self, image):
        """Compute (n, h, w) of every element of every block, and which lie inside the image."""
        (bh, bw), (h0, w0), (sh, sw) = (self.grid[k] for k in ("bsize", "boffset", "bstride"))
        n, hi, wi = self.rows.long()[:, :, None, None].unbind(1)
        h = h0 + sh * hi + self.torch.arange(bh, device=image.device)[:, None]
        w = w0 + sw * wi + self.torch.arange(bw, device=image.device)
        inside = (h >= 0) & (h < image.shape[1]) & (w >= 0) & (w < image.shape[2])
        return (n, h, w), inside
