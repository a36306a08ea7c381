"""Hypothesis strategies: block grids, masks, images, index tables, channels and dtypes.

They draw what breaks things: axes of size 0 and 1, blocks larger than the image, stride unlike
size, offsets of both signs, none and all active, corrupt index rows, odd channel counts.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = (np.dtype("f2"), BFLOAT16, np.dtype("f4"), np.dtype("f8"))
MASK_DTYPES = tuple(map(np.dtype, ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"])) + FLOATS
DTYPES = (*MASK_DTYPES, np.dtype("c8"), np.dtype("c16"))  # 1, 2, 4, 8 and 16 bytes
INT32 = np.iinfo(np.int32)


@dataclass(frozen=True)
class Grid:
    """A batch of images and the blocks laid over it."""

    batch: int
    size: tuple[int, int]
    bsize: tuple[int, int]
    boffset: tuple[int, int]
    bstride: tuple[int, int] | None
    bcount: tuple[int, int]

    @property
    def blocks(self):
        """The keywords that the ops share."""
        return {"bsize": self.bsize, "boffset": self.boffset, "bstride": self.bstride}

    @property
    def step(self):
        """Distance between neighbouring blocks."""
        return self.bsize if self.bstride is None else self.bstride

    @property
    def overlaps(self):
        """Whether neighbouring blocks share pixels."""
        return any(s < b for s, b in zip(self.step, self.bsize, strict=True))


def _pairs(values):
    return st.tuples(values, values)


def _seldom(rare, usual):
    """Draw mostly ``usual``: eight axes that are each empty one time in ten leave little."""
    return st.integers(0, 24).flatmap(lambda k: rare if k == 13 else usual)


@st.composite
def grids(draw, *, overlap=None, max_size=12):
    """Draw a Grid; ``overlap`` True or False asks for blocks that do or do not share pixels."""
    sizes = st.integers(2, 9) if overlap else st.sampled_from([3, 2, 4, 1, 5, 8, 15])
    bsize = draw(_pairs(sizes))
    if overlap:
        bstride = tuple(draw(st.integers(1, b - 1)) for b in bsize)
    elif overlap is False:
        bstride = draw(st.none() | st.just(tuple(b + draw(st.integers(0, 3)) for b in bsize)))
    else:
        bstride = draw(st.none() | _pairs(st.integers(1, 9)))
    return Grid(
        batch=draw(_seldom(st.just(0), st.integers(1, 3))),
        size=draw(_pairs(_seldom(st.integers(0, 1), st.integers(2, max_size)))),
        bsize=bsize,
        boffset=draw(_pairs(_seldom(st.integers(-9, 9), st.integers(-2, 1)))),
        bstride=bstride,
        bcount=draw(_pairs(_seldom(st.just(0), st.integers(1, 5)))),
    )


def channels():
    """Draw a channel count: one, odd, a vector width, wider than one, and none at all."""
    return _seldom(st.just(0), st.sampled_from([1, 3, 17, 32, 100, 2, 8]))


def dtypes():
    """Draw a dtype of every width that the copies take."""
    return st.sampled_from(DTYPES)


def _generators():
    return st.integers(0, 2**32 - 1).map(np.random.default_rng)


@st.composite
def masks(draw, grid, dtype=None):
    """Draw a mask: none, all, few or most of its pixels positive, eighths, exact in any order."""
    dtype = draw(st.sampled_from(MASK_DTYPES)) if dtype is None else dtype
    rng = draw(_generators())
    shape = (grid.batch, *grid.size)
    density = draw(_seldom(st.just(0.0), st.sampled_from([0.03, 0.2, 0.5, 1.0])))
    values = np.where(rng.random(shape) < density, rng.integers(1, 9, shape), 0)
    if dtype.kind not in "bu" and draw(st.booleans()):
        values = values - rng.integers(0, 9, shape) * (rng.random(shape) < 0.3)
    mask = values.astype(dtype)
    if dtype in FLOATS:
        mask = (mask / np.asarray(8, dtype)).astype(dtype)
        special = draw(st.sampled_from([None, None, np.nan, np.inf, -np.inf]))
        if special is not None:
            mask[rng.random(shape) < 0.1] = special
    return mask[..., None] if draw(st.booleans()) else mask


def tols():
    """Draw a threshold: hit exactly, missed, negative, fractional, and beyond float16's range."""
    return st.sampled_from([0.0, 0.5, 1.0, 0.1, -1.0, 2, 1e6, float("inf"), -float("inf")])


@st.composite
def images(draw, shape, dtype=None):
    """Draw an array of random bits: copies must keep NaN, -0 and every payload."""
    dtype = draw(dtypes()) if dtype is None else dtype
    rng = draw(_generators())
    if dtype == np.bool_:
        return rng.random(shape) < 0.5
    count = int(np.prod(shape))
    return np.frombuffer(rng.bytes(count * dtype.itemsize), dtype).reshape(shape).copy()


@st.composite
def numbers(draw, shape, dtype=None):
    """Draw an array of small finite numbers, of all magnitudes that make addition order matter."""
    dtype = draw(dtypes()) if dtype is None else dtype
    rng = draw(_generators())
    if dtype.kind in "biu":
        return draw(images(shape, dtype))
    values = rng.standard_normal(shape) * 2.0 ** rng.integers(-6, 6, shape)
    if dtype.kind == "c":
        values = values + 1j * rng.standard_normal(shape)
    return values.astype(dtype)


@st.composite
def actives(draw, grid, *, corrupt=None):
    """Draw (bin_counts, active_block_indices): as reduce_mask makes them, or, corrupt, anything."""
    corrupt = draw(st.booleans()) if corrupt is None else corrupt
    rng = draw(_generators())
    size = (grid.batch, *grid.bcount)
    density = draw(_seldom(st.just(0.0), st.sampled_from([0.3, 0.7, 1.0])))
    rows = np.argwhere(rng.random(size) < density).astype(np.int32)
    if not corrupt:
        spare = draw(st.integers(0, 3))
        table = np.concatenate([rows, np.full((spare, 3), -1, np.int32)])
        return np.array([len(rows)], np.int32), table
    entry = st.integers(-2, 6) | st.sampled_from([INT32.min, INT32.max, -1, 2**30])
    extra = draw(st.lists(st.tuples(st.integers(0, 2) | entry, entry, entry), max_size=6))
    table = np.concatenate([rows, np.array(extra, np.int32).reshape(-1, 3)])
    table = rng.permutation(table)
    count = draw(
        st.sampled_from([len(table), len(table) - 1, len(table) + 1, 0, -1, INT32.max, INT32.min])
    )
    return np.array([count], np.int32), table
