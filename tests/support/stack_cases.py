"""Stacks for the tests of a network on blocks: drawn sizes, masks and values, poisoned memory."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

import sbnet_cupy
from support import stack_oracles
from support.assertions import to_numpy
from support.strategies import FLOATS

FEW = settings(max_examples=25)  # these tests run on two bodies and two libraries each


@dataclass(frozen=True)
class Blocks:
    """Which blocks of a batch of images are active."""

    active: Any  # bool [N, hb, wb]
    block: tuple[int, int]
    size: tuple[int, int]
    spare: int = 0  # rows past the count

    @property
    def batch(self):
        return len(self.active)

    @property
    def rows(self):
        """Rows (n, hi, wi) of the active blocks."""
        return [tuple(map(int, row)) for row in np.argwhere(self.active)]

    @property
    def capacity(self):
        return len(self.rows) + self.spare

    def table(self, asarray=np.asarray):
        """Make the table from the pixels of a mask, in the library under test."""
        pixels = stack_oracles.block_mask(self.rows, self.block, self.size, self.batch)
        options = {"capacity": self.capacity} if self.spare else {}
        return sbnet_cupy.block_table(asarray(pixels), self.block, **options)

    def mask(self, table):
        """Return [N, H, W, 1]: pixels of active blocks, at the stage of a table."""
        at = (table.block_size, table.image_size, self.batch)
        return stack_oracles.block_mask(self.rows, *at)[..., None]

    def images(self, table, channels, rng, dtype=np.float64):
        """Draw images that are 0 outside of the active blocks, at the stage of a table."""
        shape = (self.batch, *table.image_size, channels)
        values = rng.standard_normal(shape) * 2.0 ** rng.integers(-2, 3, shape)
        return np.where(self.mask(table), values, 0).astype(dtype)

    def stack(self, images, table):
        """Cut the blocks out, with NaN where nothing may be read."""
        at = (table.block_size, self.capacity)
        return stack_oracles.to_stack(images, self.rows, *at, outside=np.nan)

    def unstack(self, stack, table):
        """Bring a result back to images of float64, 0 outside; its spare rows must be 0."""
        assert stack.shape[:3] == (self.capacity, *table.block_size)
        assert not to_numpy(stack[len(self.rows) :]).astype(np.float64).any()
        stack = to_numpy(stack).astype(np.float64)
        at = (table.block_size, table.image_size, self.batch)
        return stack_oracles.to_image(stack, self.rows, *at)

    def assert_clear_outside(self, stack, table):
        """Assert that a gradient is 0 in the pixels that stick out of the image."""
        ones = np.ones((self.batch, *table.image_size, 1))
        inside = stack_oracles.to_stack(ones, self.rows, table.block_size, self.capacity) > 0
        assert not np.where(inside, 0, to_numpy(stack).astype(np.float64)).any()


def drawn(dtype, channels, block=(8, 8), size=(29, 20), seed=0, spare=2):
    """Blocks of two images whose sides are no multiples, and a poisoned stack."""
    rng = np.random.default_rng(seed)
    shape = (2, *(-(-n // b) for n, b in zip(size, block, strict=True)))
    blocks = Blocks(rng.random(shape) < 0.6, block, size, spare)
    table = blocks.table()
    images = blocks.images(table, channels, rng, dtype)
    return blocks, table, blocks.stack(images, table), rng


@st.composite
def blocks(draw, divisor=(1, 1), largest=12):
    """Draw blocks whose sizes ``divisor`` divides: of few pixels and many, odd images, batches."""
    block = tuple(d * draw(st.sampled_from([1, 2, 4, 3, 8])) for d in divisor)
    size = tuple(draw(st.integers(1, largest)) for _ in range(2))
    batch = draw(st.integers(1, 2))
    shape = (batch, *(-(-n // b) for n, b in zip(size, block, strict=True)))
    density = draw(st.sampled_from([1.0, 0.5, 0.7, 0.2, 0.0]))
    active = draw(generators()).random(shape) < density
    return Blocks(active, block, size, draw(st.sampled_from([0, 2])))


def generators():
    """Draw a random generator."""
    return st.integers(0, 2**32 - 1).map(np.random.default_rng)


def float_dtypes():
    """Draw a floating dtype, float32 and float64 more often."""
    return st.sampled_from([FLOATS[2], FLOATS[3], *FLOATS])


def sum_dtype(dtype):
    """Dtype that sums of a dtype are computed in."""
    return np.dtype(np.float64 if np.dtype(dtype) == np.float64 else np.float32)
