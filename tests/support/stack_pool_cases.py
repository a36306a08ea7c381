"""Poolings of stacks for tests: drawn sizes and options."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

import sbnet_cupy as sb
from support import stack_cases


@dataclass
class Case:
    """A pooling of drawn blocks."""

    blocks: Any
    table: Any
    after: Any
    images: np.ndarray
    kernel: tuple
    strides: tuple
    dilation: tuple
    pads: tuple
    ceil_mode: bool
    dtype: Any

    @property
    def options(self):
        """What the functions take."""
        return {"kernel": self.kernel, "strides": self.strides, "padding": self.pads,
                "ceil_mode": self.ceil_mode}  # fmt: skip

    @property
    def area(self):
        return self.kernel[0] * self.kernel[1]


@st.composite
def poolings(draw, asarray, *, dilated, dtype=None, largest=12):
    strides = (draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2])))
    blocks = draw(stack_cases.blocks(strides, largest))
    kernel = (draw(st.sampled_from([3, 1, 2, 5])), draw(st.sampled_from([3, 1, 2])))
    dilation = draw(st.sampled_from([(1, 1), (2, 1), (1, 3)])) if dilated else (1, 1)
    table, ceil_mode, pads = blocks.table(asarray), draw(st.booleans()), []
    for n, b, count, k, d in zip(
        blocks.size, blocks.block, blocks.active.shape[1:], kernel, dilation, strict=True
    ):
        # PyTorch's limit of half a window, which leaves every window a pixel, and ours: the blocks.
        most = min(k // 2, max(b * count - 1 - n + (k - 1) * d + 1, 0))
        before = draw(st.integers(0, most))
        pads.append((before, draw(st.integers(0, most - before))))
    dtype = draw(stack_cases.float_dtypes()) if dtype is None else np.dtype(dtype)
    images = blocks.images(table, 2, draw(stack_cases.generators()), dtype)
    try:
        after = table.after_conv(kernel, strides, tuple(pads), dilation, ceil_mode=ceil_mode)
    except sb.ShapeError:  # ceil_mode can give one more than the blocks hold
        ceil_mode = False
        after = table.after_conv(kernel, strides, tuple(pads), dilation)
    return Case(blocks, table, after, images, kernel, strides, dilation, tuple(pads), ceil_mode,
                dtype)  # fmt: skip


def own(body, data):
    """Dtypes that each body can be tried with: BLAS does not multiply halves."""
    return None if body == "own body" else data.draw(st.sampled_from(["f4", "f8"]))
