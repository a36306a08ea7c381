"""reduce_mask: mask to list of active blocks, against pooling and nonzero in other libraries.

Bytes are those of the mask, once, even where blocks overlap; the rows written are not counted.
With ``capacity`` for every block of the grid, so that nothing waits for the device.
"""

import math
from functools import partial

import numpy as np

import sbnet_cupy as sb
from benchmarks.harness.cases import KERNEL, make_mask, mask_cases
from benchmarks.harness.check import MOST_STRIPS, PEER_STRIPS, WrongResult, check_indices
from benchmarks.harness.inputs import pad_sets, to_host
from benchmarks.harness.peers import WAITS
from benchmarks.harness.rows import OURS, SAME_INPUTS
from benchmarks.harness.session import Work
from benchmarks.harness.timing import Contender

OP = "reduce_mask"


def cases(session):
    """Return what is measured."""
    return mask_cases(session)


def works(case, session):
    """Yield (density, active blocks, workload) of a case."""
    grid, bcount = _grid(case)
    dtype = np.dtype(case.dtype)
    mask = make_mask(case, session)
    density = float(mask.mean())
    count = sb.reduce_mask(mask, bcount, **grid).count()
    byte_count = math.prod(case.shape) * dtype.itemsize
    sets = session.sets(byte_count, 2 * byte_count)
    masks = session.xp.empty((sets, *case.shape), dtype)
    masks[...] = mask
    capacity = case.shape[0] * math.prod(bcount)
    ours = partial(sb.reduce_mask, **grid, capacity=capacity)
    calls = [partial(ours, masks[k], bcount) for k in range(sets)]
    contenders = [Contender(OURS, calls)]
    if case.peers:
        contenders += Peers(session, masks, grid, bcount).contenders()
    check = partial(_check, session, masks[0], bcount, grid)
    (variant,) = case.variants
    work = Work(variant, byte_count, contenders, check, case.original_us(variant))
    yield density, count, work


def _grid(case):
    """Return the grid of the blocks, as the op takes it, and the number of blocks."""
    if case.halo:
        p = sb.calc_block_params(case.shape[1:], case.bsize, KERNEL)
        return {"bsize": p.bsize, "boffset": p.boffset, "bstride": p.bstride}, p.bcount
    bcount = tuple(-(-n // b) for n, b in zip(case.shape[1:], case.bsize, strict=True))
    return {"bsize": case.bsize, "boffset": (0, 0), "bstride": case.bsize}, bcount


def _check(session, mask, bcount, grid, contender):
    found = contender.calls[0]()
    most = PEER_STRIPS
    if isinstance(found, sb.ActiveBlocks):
        session.synchronize()
        most, indices, count = MOST_STRIPS, found.active_block_indices, found.count()
        if not 0 <= count <= len(indices) or bool((indices[count:] != -1).any()):
            raise WrongResult(f"rows past the count of {count} are not -1")
        found = indices[:count]
    check_indices(mask, to_host(session.native(found)), bcount, grid, most=most)


def _contender(name, function, masks, clock="", note="padded beforehand"):
    calls = [partial(function, mask) for mask in masks]
    return Contender(name, calls, clock, capturable=False, note=f"{note}; {WAITS}")


class Peers:
    """The same list by pooling and nonzero; all but one on masks that were padded beforehand."""

    def __init__(self, session, masks, grid, bcount):
        self.session, self.xp, self.torch = session, session.xp, session.torch
        self.grid, self.bcount, self.masks = grid, bcount, masks
        self.padded = pad_sets(session, masks[..., None], grid, bcount).images[..., 0]

    def contenders(self):
        """Return the contenders."""
        name = self.xp.__name__
        found = [_contender(f"{name} windows, max, argwhere", self._windows, self.padded)]
        if self.session.cpu:
            found.append(_contender("numpy loop", self._loop, self.padded))
        if self.torch:
            padded = self.torch.from_dlpack(self.padded)
            masks = self.torch.from_dlpack(self.masks)
            found += [
                _contender("torch unfold, amax, nonzero", self._unfold, padded, "torch"),
                _contender(
                    "torch max_pool2d, nonzero", self._max_pool, masks, "torch", SAME_INPUTS
                ),
            ]
        return found

    def _windows(self, mask):
        (sh, sw), (n_step, h_step, w_step) = self.grid["bstride"], mask.strides
        view = self.xp.lib.stride_tricks.as_strided(
            mask,
            (mask.shape[0], *self.bcount, *self.grid["bsize"]),
            (n_step, sh * h_step, sw * w_step, h_step, w_step),
        )
        return self.xp.argwhere(view.max(axis=(3, 4)) > 0)

    def _loop(self, mask):
        (bh, bw), (sh, sw) = self.grid["bsize"], self.grid["bstride"]
        rows = [
            (n, hi, wi)
            for n in range(mask.shape[0])
            for hi in range(self.bcount[0])
            for wi in range(self.bcount[1])
            if mask[n, sh * hi : sh * hi + bh, sw * wi : sw * wi + bw].any()
        ]
        return np.array(rows, np.int32).reshape(-1, 3)

    def _max_pool(self, mask):
        """Integers are converted first, and that is timed: pooling takes floats."""
        if not mask.is_floating_point():
            mask = mask.to(self.torch.float32 if self.session.cpu else self.torch.float16)
        padding = tuple(-offset for offset in self.grid["boffset"])
        pooled = self.torch.nn.functional.max_pool2d(
            mask[:, None], self.grid["bsize"], self.grid["bstride"], padding, ceil_mode=True
        )
        return (pooled[:, 0, : self.bcount[0], : self.bcount[1]] > 0).nonzero()

    def _unfold(self, mask):
        (bh, bw), (sh, sw) = self.grid["bsize"], self.grid["bstride"]
        return (mask.unfold(1, bh, sh).unfold(2, bw, sw).amax((3, 4)) > 0).nonzero()
