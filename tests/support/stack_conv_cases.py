"""Convolutions of stacks for tests: drawn sizes and options, their oracle, and its bound."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from support import conv_oracles, stack_cases, stack_oracles
from support.assertions import to_numpy
from support.conv_oracles import Bounded


@dataclass
class Case:
    """A convolution of drawn blocks: the call, and what the oracle needs."""

    blocks: Any
    table: Any
    after: Any
    images: np.ndarray
    w: np.ndarray  # [R, S, C / groups, K]
    geometry: tuple  # strides, dilation, pads, groups
    options: dict
    dtype: Any
    transposed: bool

    def oracle(self, x=None, w=None):
        """The dense layer, of these images and this kernel."""
        x = self.images if x is None else x
        x, w = (np.asarray(a).astype(np.float64) for a in (x, self.w if w is None else w))
        if self.transposed:
            return stack_oracles.transposed_conv2d(x, w, *self.geometry, self.after.image_size)
        return stack_oracles.conv2d(x, w, *self.geometry)

    def bounded(self, *, tf32=False):
        """The same with a bound on the error of sums in float32 or float64, in any order."""
        epsilon = conv_oracles.epsilon_of_sums(self.dtype, tf32=tf32)
        size = self.oracle(abs(self.images), abs(self.w))
        terms = int(np.prod(self.w.shape[:3]))
        return Bounded(self.oracle(), terms * epsilon * size), epsilon


@st.composite
def cases(draw, asarray=np.asarray, transposed=False, dtype=None, largest=12):
    """Draw a convolution with paddings that keep the result within the blocks."""
    strides = (draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2])))
    blocks = draw(stack_cases.blocks((1, 1) if transposed else strides, largest))
    kernel = (draw(st.sampled_from([3, 1, 2, 5])), draw(st.sampled_from([3, 1, 2, 4])))
    dilation = draw(st.sampled_from([(1, 1), (1, 1), (2, 1), (3, 5)]))
    groups, c, k = draw(st.sampled_from([(1, 3, 5), (1, 8, 4), (4, 4, 4), (3, 3, 6), (2, 4, 6)]))
    extent = tuple((n - 1) * d + 1 for n, d in zip(kernel, dilation, strict=True))
    table = blocks.table(asarray)
    # The widest padding of a result that still fits, shared out between both ends.
    room = [
        b * n * s - ((i - 1) * s + e) if transposed else (b * n // s) * s - 1 + e - i
        for b, n, s, e, i in zip(blocks.block, blocks.active.shape[1:], strides, extent,
                                 blocks.size, strict=True)
    ]  # fmt: skip
    pads = []
    for axis in (0, 1):
        if transposed:  # at least what brings the result down to the blocks
            total = max(-room[axis], 0) + draw(st.integers(0, 2))
            before = draw(st.integers(0, total))
        else:
            total = draw(st.integers(0, min(max(room[axis], 0), 2 * extent[axis])))
            before = draw(st.integers(0, total))
        pads.append((before, total - before))
    padding = tuple(pads)
    same = draw(st.booleans()) if not transposed else False
    if same:
        padding = "SAME"
        pads = stack_oracles.pads_of("SAME", blocks.size, extent, strides)
    dtype = draw(stack_cases.float_dtypes()) if dtype is None else np.dtype(dtype)
    rng = draw(stack_cases.generators())
    images = blocks.images(table, c, rng, dtype)
    w = (rng.standard_normal((*kernel, c // groups, k)) / 2).astype(dtype)
    options = {"strides": strides, "padding": padding, "dilation": dilation, "groups": groups}
    if transposed:
        after = table.after_transposed(kernel, strides, padding, dilation)
        options["transposed"] = True
    else:
        after = table.after_conv(kernel, strides, padding, dilation)
    geometry = (strides, dilation, tuple(pads), groups)
    return Case(blocks, table, after, images, w, geometry, options, dtype, transposed)


def assert_result(case, y, expected):
    """Compare a stack with bounded images, at the active blocks."""
    mask = case.blocks.mask(case.after)
    expected = Bounded(*(np.where(mask, part, 0) for part in expected))
    assert to_numpy(y).dtype == case.dtype
    conv_oracles.assert_within(case.blocks.unstack(to_numpy(y), case.after), expected)
