"""Sparse convolutions to test with: sizes, options, data and active blocks."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from sbnet_cupy import calc_block_params, sparse_conv2d
from support.conv_cases import ORDER, pairs
from support.strategies import FLOATS


@dataclass(frozen=True)
class Case:
    """A sparse convolution: sizes, options and the seed of its data and active blocks."""

    image: tuple[int, int, int, int] = (2, 9, 11, 3)
    kernel: tuple[int, int] = (3, 3)
    channels: int = 5
    strides: tuple[int, int] = (1, 1)
    steps: tuple[int, int] = (3, 2)  # a block of these many outputs, less one, per axis
    padding: Any = "SAME"
    dtype: np.dtype = FLOATS[2]
    data_format: str = "NHWC"
    w_format: str = "HWIO"
    density: float = 0.4
    spare: int = 2  # rows of the index table past the count
    seed: int = 0

    @property
    def options(self):
        names = ("strides", "padding", "data_format", "w_format")
        return {name: getattr(self, name) for name in names}

    @property
    def params(self):
        bsize = tuple(
            k + s * n for k, s, n in zip(self.kernel, self.strides, self.steps, strict=True)
        )
        return calc_block_params(self.image, bsize, self.kernel, self.strides, self.padding)

    def indices(self):
        """Active blocks in any order, and rows of -1 past their count."""
        rng = np.random.default_rng(self.seed)
        grid = (self.image[0], *self.params.bcount)
        rows = rng.permutation(np.argwhere(rng.random(grid) < self.density)).astype(np.int32)
        table = np.concatenate([rows, np.full((self.spare, 3), -1, np.int32)])
        return np.array([len(rows)], np.int32), table, rows

    def data(self, *, whole=True):
        """Image and kernel; whole numbers, whose products and sums are exact in every dtype."""
        rng = np.random.default_rng(self.seed + 1)
        w_shape = (*self.kernel, self.image[3], self.channels)
        if whole:
            x, w = rng.integers(-3, 4, self.image), rng.integers(-1, 2, w_shape)
        else:
            x = rng.standard_normal(self.image)
            w = rng.standard_normal(w_shape) / math.sqrt(math.prod(w_shape[:3]))
        return x.astype(self.dtype), w.astype(self.dtype)

    def run(self, xp, x, w, **options):
        counts, table, _ = self.indices()
        arrays = x.transpose(ORDER[self.data_format]), w.transpose(ORDER[self.w_format])
        indices = (xp.asarray(counts), xp.asarray(table))
        return sparse_conv2d(
            *map(xp.asarray, arrays), indices, self.params, **self.options, **options
        )


@st.composite
def cases(draw):
    """Draw blocks larger than the image, any stride, even kernels, none and all active."""
    return Case(
        image=(
            draw(st.sampled_from([1, 2, 0])),
            *draw(pairs(0, 10)),
            draw(st.sampled_from([1, 3, 8])),
        ),
        kernel=draw(pairs(1, 4)),
        channels=draw(st.sampled_from([1, 3, 8])),
        strides=draw(pairs(1, 3)),
        steps=draw(pairs(0, 4)),
        padding=draw(st.sampled_from(["SAME", "VALID"]) | st.tuples(pairs(0, 2), pairs(0, 2))),
        dtype=draw(st.sampled_from(FLOATS)),
        data_format=draw(st.sampled_from(["NHWC", "NCHW"])),
        w_format=draw(st.sampled_from(["HWIO", "OIHW"])),
        density=draw(st.sampled_from([0.4, 0.0, 1.0])),
        spare=draw(st.integers(0, 3)),
        seed=draw(st.integers(0, 2**32 - 1)),
    )
