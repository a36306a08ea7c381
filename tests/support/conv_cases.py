"""Dense convolutions to test with: sizes, options, data, and what comes out."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from support import conv_oracles as oracles
from support.strategies import FLOATS

ORDER = {"NHWC": (0, 1, 2, 3), "NCHW": (0, 3, 1, 2), "HWIO": (0, 1, 2, 3), "OIHW": (3, 2, 0, 1)}


@dataclass(frozen=True)
class Case:
    """A convolution: sizes, options and the seed of its data."""

    image: tuple[int, int, int, int] = (2, 6, 7, 3)
    kernel: tuple[int, int] = (3, 3)
    channels: int = 5
    strides: tuple[int, int] = (1, 1)
    padding: Any = "SAME"
    dtype: np.dtype = FLOATS[2]
    data_format: str = "NHWC"
    w_format: str = "HWIO"
    precision: str | None = None
    seed: int = 0

    @property
    def options(self):
        names = ("strides", "padding", "data_format", "w_format", "precision")
        return {name: getattr(self, name) for name in names}

    def integers(self):
        """Small whole numbers: products and sums are exact in every dtype, and with TF32."""
        rng = np.random.default_rng(self.seed)
        w_shape = (*self.kernel, self.image[3], self.channels)
        x, w = rng.integers(-3, 4, self.image), rng.integers(-1, 2, w_shape)
        return x.astype(self.dtype), w.astype(self.dtype)

    def numbers(self):
        """Normally distributed images and kernels that keep their size."""
        rng = np.random.default_rng(self.seed)
        w_shape = (*self.kernel, self.image[3], self.channels)
        w = rng.standard_normal(w_shape) / math.sqrt(max(math.prod(w_shape[:3]), 1))
        return rng.standard_normal(self.image).astype(self.dtype), w.astype(self.dtype)

    def tables(self):
        """Scale and bias per channel, some in another dtype than the image."""
        rng = np.random.default_rng(self.seed + 1)
        scale = rng.uniform(0.5, 1.5, self.channels).astype(np.float32)
        return scale, rng.standard_normal(self.channels).astype(self.dtype)

    def arrange(self, x, w, xp):
        """Lay image and kernel out as the options say."""
        return (
            xp.asarray(x.transpose(ORDER[self.data_format])),
            xp.asarray(w.transpose(ORDER[self.w_format])),
        )

    def oracle(self, x, w, scale=None, bias=None, activation=None):
        """Values and bounds, in the layout of the result."""
        options = {"epsilon": oracles.epsilon_of_sums(self.dtype, tf32=self.precision == "tf32")}
        y = oracles.bounded_conv2d(oracles.exact(x), w, self.strides, self.padding, **options)
        y = oracles.bounded_affine(y, scale, bias, activation, **options)
        y = oracles.bounded_round(y, self.dtype)
        return oracles.Bounded(*(a.transpose(ORDER[self.data_format]) for a in y))


def pairs(low, high):
    """Draw two integers."""
    return st.tuples(st.integers(low, high), st.integers(low, high))


@st.composite
def cases(draw):
    """Draw kernels of any shape, larger than the image too; empty batches, images, channels."""
    return Case(
        image=(
            draw(st.sampled_from([1, 2, 3, 0])),
            *draw(pairs(0, 8)),
            draw(st.sampled_from([1, 3, 8, 17, 0])),
        ),
        kernel=draw(pairs(1, 4)),
        channels=draw(st.sampled_from([1, 3, 8])),
        strides=draw(pairs(1, 3)),
        padding=draw(st.sampled_from(["SAME", "VALID"]) | st.tuples(pairs(0, 4), pairs(0, 4))),
        dtype=draw(st.sampled_from(FLOATS)),
        data_format=draw(st.sampled_from(["NHWC", "NCHW"])),
        w_format=draw(st.sampled_from(["HWIO", "OIHW"])),
        precision=draw(st.sampled_from([None, "ieee", "tf32"])),
        seed=draw(st.integers(0, 2**32 - 1)),
    )
