"""sparse_scatter: block stack into an image, in place, against indexing in other libraries.

Blocks are output tiles: ``bsize_out`` of the convolution's grid, at offset 0, side by side.
"""

from functools import partial

import numpy as np

import sbnet_cupy as sb
from benchmarks.harness.cases import copy_cases
from benchmarks.harness.check import MOST_STRIPS, PEER_STRIPS, check_scatter
from benchmarks.harness.inputs import filled_sets, find_blocks
from benchmarks.harness.peers import IndexPeers
from benchmarks.harness.rows import OURS, SAME_INPUTS, block_bytes, moved_bytes
from benchmarks.harness.session import Work
from benchmarks.harness.timing import Contender

OP = "sparse_scatter"


def cases(session):
    """Return what is measured."""
    return copy_cases(OP, session)


def works(case, session):
    """Yield (density, active blocks, workload) for each variant of a case."""
    blocks = find_blocks(case, session)
    tile, channels = blocks.params.bsize_out, case.shape[3]
    dtype = np.dtype(case.dtype)
    stack_bytes = block_bytes(blocks.count, tile, channels, dtype.itemsize)
    image_bytes = int(np.prod(case.shape)) * dtype.itemsize
    sets = session.sets(2 * stack_bytes, (2 if case.peers else 1) * image_bytes + stack_bytes)
    images = filled_sets(session, sets, case.shape, dtype)
    stacks = filled_sets(session, sets, (blocks.count, *tile, channels), dtype, seed=1000)
    peers = Peers(session, images, blocks, blocks.scatter_grid) if case.peers else None
    for variant in case.variants:
        options = {"add": variant == "add", "transpose": variant == "transposed"}
        inner = (channels, *tile) if variant == "transposed" else (*tile, channels)
        given = stacks.reshape(sets, blocks.count, *inner)
        calls = [
            partial(
                sb.sparse_scatter, given[k], *blocks.active, images[k],
                bsize=tile, out=images[k], **options,
            )
            for k in range(sets)
        ]  # fmt: skip
        contenders = [Contender(OURS, calls, target=images[0], note="in place")]
        if peers:
            contenders += peers.contenders(given, variant)
        check = partial(_check, session, given[0], blocks, options)
        us = case.original_us(variant)
        work = Work(variant, moved_bytes(variant, stack_bytes), contenders, check, us)
        yield blocks.density, blocks.count, work


def _check(session, stack, blocks, options, contender):
    def call():
        contender.calls[0]()
        session.synchronize()

    most = MOST_STRIPS if contender.name == OURS else PEER_STRIPS
    check_scatter(contender.target, stack, blocks, options, call, most=most)


class Peers(IndexPeers):
    """The same image by indexing."""

    def contenders(self, stacks, variant):
        """Return the contenders of one variant."""
        add, transposed = variant == "add", variant == "transposed"
        target = self.padded[0][self.crop]

        def made(function):
            return partial(function, add=add, transposed=transposed)

        arrays = [(f"{self.xp.__name__} index of pixels", self._index)]
        if self.session.cpu:
            arrays.append(("numpy loop", self._loop))
        found = [self.native(name, made(f), stacks, target=target) for name, f in arrays]
        if self.torch:
            name = "torch index_add_ of pixels" if add else "torch index_copy_ of pixels"
            tensors = [
                (name, self._index_copy, True),
                ("torch blocked view, index_put_", self._index_put, True),
                ("torch blocked view, mask", self._masked, False),
            ]
            given = self.torch.from_dlpack(stacks)
            found += [
                self.of_torch(name, made(f), given, capturable=capturable, target=target)
                for name, f, capturable in tensors
            ]
            found.append(
                self.of_torch(
                    "torch index_put_", made(self._from_rows), given,
                    capturable=False, target=self.image, note=SAME_INPUTS,
                )
            )  # fmt: skip
        return found

    def _index(self, image, stack, add, transposed):
        values = stack.transpose(0, 2, 3, 1) if transposed else stack
        values, flat = values.reshape(-1, self.channels), image.reshape(-1, self.channels)
        flat[self.pixels] = flat[self.pixels] + values if add else values

    def _loop(self, image, stack, add, transposed):
        bh, bw = self.grid["bsize"]
        for row, (n, hi, wi) in enumerate(self.indices):
            block = stack[row].transpose(1, 2, 0) if transposed else stack[row]
            window = image[n, bh * hi : bh * (hi + 1), bw * wi : bw * (wi + 1)]
            window[...] = window + block if add else block

    def _index_copy(self, image, stack, add, transposed):
        values = stack.permute(0, 2, 3, 1) if transposed else stack
        values, flat = values.reshape(-1, self.channels), image.view(-1, self.channels)
        if add:
            flat.index_add_(0, self.torch_pixels, values)
        else:
            flat.index_copy_(0, self.torch_pixels, values)

    def _blocked(self, image, transposed):
        """View the image as its blocks: ``[N, h, w, bh, bw, C]``, or with the channels before."""
        (bh, bw), (n, h, w, c) = self.grid["bsize"], image.shape
        view = image.view(n, h // bh, bh, w // bw, bw, c)
        return view.permute((0, 1, 3, 5, 2, 4) if transposed else (0, 1, 3, 2, 4, 5))

    def _index_put(self, image, stack, add, transposed):
        view = self._blocked(image, transposed)
        view.index_put_(self.index, view[self.index] + stack if add else stack)

    def _masked(self, image, stack, add, transposed):
        view = self._blocked(image, transposed)
        view[self.block_mask] = view[self.block_mask] + stack if add else stack

    def _from_rows(self, image, stack, add, transposed):
        values = stack.permute(0, 2, 3, 1) if transposed else stack
        (n, h, w), inside = self.torch_pixels_of(image)
        index = tuple(part.expand(inside.shape)[inside] for part in (n, h, w))
        values = values[inside]
        image.index_put_(index, image[index] + values if add else values)
