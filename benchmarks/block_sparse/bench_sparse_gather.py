"""sparse_gather: image to block stack, against indexing in PyTorch, CuPy and NumPy."""

from functools import partial

import numpy as np

import sbnet_cupy as sb
from benchmarks.harness.cases import copy_cases
from benchmarks.harness.check import MOST_STRIPS, PEER_STRIPS, check_gather
from benchmarks.harness.inputs import fill, filled_sets, find_blocks
from benchmarks.harness.peers import IndexPeers
from benchmarks.harness.rows import OURS, SAME_INPUTS, block_bytes, moved_bytes
from benchmarks.harness.session import Work
from benchmarks.harness.timing import Contender

OP = "sparse_gather"


def cases(session):
    """Return what is measured."""
    return copy_cases(OP, session)


def works(case, session):
    """Yield (density, active blocks, workload) for each variant of a case."""
    xp, blocks = session.xp, find_blocks(case, session)
    bsize, channels = blocks.params.bsize, case.shape[3]
    dtype = np.dtype(case.dtype)
    stack_bytes = block_bytes(blocks.count, bsize, channels, dtype.itemsize)
    image_bytes = int(np.prod(case.shape)) * dtype.itemsize
    sets = session.sets(2 * stack_bytes, (2 if case.peers else 1) * image_bytes + stack_bytes)
    images = filled_sets(session, sets, case.shape, dtype)
    stacks = xp.empty((sets, blocks.count * bsize[0] * bsize[1] * channels), dtype)
    peers = Peers(session, images, blocks, blocks.gather_grid) if case.peers else None
    for variant in case.variants:
        options = _options(variant, xp, channels)
        transposed = variant == "transposed"
        inner = (channels, *bsize) if transposed else (*bsize, channels)
        out = stacks.reshape(sets, blocks.count, *inner)
        ours = partial(sb.sparse_gather, **blocks.gather_grid, **options)
        calls = [partial(ours, images[k], *blocks.active, out=out[k]) for k in range(sets)]
        if session.cpu:  # a new result, as the others make
            calls = [partial(ours, image, *blocks.active) for image in images]
        contenders = [Contender(OURS, calls)]
        if peers and variant != "fused":
            contenders += peers.contenders(transposed)
        check = partial(_check, session, images[0], blocks, options, _tolerance(variant, dtype))
        us = case.original_us(variant)
        work = Work(variant, moved_bytes(variant, stack_bytes), contenders, check, us)
        yield blocks.density, blocks.count, work


def _options(variant, xp, channels):
    if variant != "fused":
        return {"transpose": variant == "transposed"}
    scale, shift = (fill(xp.empty(channels, np.float32), xp, seed) for seed in (7, 8))
    return {"scale": scale + np.float32(1.25), "shift": shift, "activation": "relu"}


def _tolerance(variant, dtype):
    """Allow a rounding of ``x * scale``, of the sum, and to the image's dtype: values up to 1.4."""
    return 2 * 1.4 * float(np.finfo(dtype).eps) if variant == "fused" else 0.0


def _check(session, image, blocks, options, tolerance, contender):
    stack = session.native(contender.calls[0]())
    most = MOST_STRIPS if contender.name == OURS else PEER_STRIPS
    check_gather(image, stack, blocks, options, most=most, tolerance=tolerance)


class Peers(IndexPeers):
    """The same stack by indexing."""

    def contenders(self, transposed):
        """Return the contenders for one layout of the stack."""

        def made(function):
            return partial(function, transposed=transposed)

        found = [self.native(f"{self.xp.__name__} take of pixels", made(self._take))]
        if self.session.cpu:
            found.append(self.native("numpy loop", made(self._loop)))
        if self.torch:
            found += [
                self.of_torch("torch index_select of pixels", made(self._index_select)),
                self.of_torch("torch unfold, index", made(self._unfold_index)),
                self.of_torch("torch unfold, mask", made(self._unfold_mask), capturable=False),
                self.of_torch("torch index", made(self._from_rows), note=SAME_INPUTS),
            ]
        return found

    def _take(self, image, transposed):
        taken = image.reshape(-1, self.channels).take(self.pixels, axis=0)
        taken = taken.reshape(-1, *self.grid["bsize"], self.channels)
        return self.xp.ascontiguousarray(taken.transpose(0, 3, 1, 2)) if transposed else taken

    def _loop(self, image, transposed):
        (bh, bw), (sh, sw) = self.grid["bsize"], self.grid["bstride"]
        inner = (self.channels, bh, bw) if transposed else (bh, bw, self.channels)
        stack = np.empty((len(self.indices), *inner), image.dtype)
        for row, (n, hi, wi) in enumerate(self.indices):
            block = image[n, sh * hi : sh * hi + bh, sw * wi : sw * wi + bw]
            stack[row] = block.transpose(2, 0, 1) if transposed else block
        return stack

    def _index_select(self, image, transposed):
        taken = image.view(-1, self.channels).index_select(0, self.torch_pixels)
        taken = taken.view(-1, *self.grid["bsize"], self.channels)
        return taken.permute(0, 3, 1, 2).contiguous() if transposed else taken

    def _unfold(self, image, transposed):
        """View all blocks: ``[N, h, w, C, bh, bw]``, or with the channels last."""
        (bh, bw), (sh, sw) = self.grid["bsize"], self.grid["bstride"]
        view = image.unfold(1, bh, sh).unfold(2, bw, sw)
        return view if transposed else view.permute(0, 1, 2, 4, 5, 3)

    def _unfold_index(self, image, transposed):
        return self._unfold(image, transposed)[self.index].contiguous()

    def _unfold_mask(self, image, transposed):
        return self._unfold(image, transposed)[self.block_mask].contiguous()

    def _from_rows(self, image, transposed):
        (n, h, w), inside = self.torch_pixels_of(image)
        nearest = h.clamp(0, image.shape[1] - 1), w.clamp(0, image.shape[2] - 1)
        taken = image[n, *nearest].masked_fill_(~inside[..., None], 0)
        return taken.permute(0, 3, 1, 2).contiguous() if transposed else taken
