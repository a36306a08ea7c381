"""Drawn sites and convolutions at them, with NaN in rows that hold no site."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

import sbnet_cupy
from support.strategies import FLOATS


@dataclass(frozen=True)
class Sites:
    """Distinct sites of a small grid, in the order in which they are given."""

    indices: Any  # int32 [n, 1 + d]
    shape: tuple[int, ...]
    batch: int
    spare: int  # rows past the count

    @property
    def dimensions(self):
        return len(self.shape)

    def tensor(self, features, asarray=np.asarray, **options):
        """Return the SparseTensor, NaN in rows that hold no site."""
        capacity = {"capacity": len(self.indices) + self.spare} if self.spare else {}
        x = sbnet_cupy.sparse_tensor(
            asarray(features), asarray(self.indices), spatial_shape=self.shape,
            batch_size=self.batch, **capacity, **options,
        )  # fmt: skip
        return poisoned(x, len(self.indices))

    def features(self, rng, channels, dtype=np.float64):
        """Draw a row of features for each site."""
        return rng.standard_normal((len(self.indices), channels)).astype(dtype)


def poisoned(x, count):
    """Return a SparseTensor with NaN in its rows from ``count`` on."""
    features = x.features.copy()
    features[count:] = np.nan
    return x.replace(features)


@st.composite
def sites(draw, dimensions=(1, 2, 3, 4, 5), largest=7, spare=True):
    """Draw sites: none, one, a few, or a full grid; of several samples, some of them empty."""
    d = draw(st.sampled_from(dimensions))
    shape = tuple(draw(st.integers(1, max(largest - d, 2))) for _ in range(d))
    batch = draw(st.integers(1, 3))
    cells = batch * int(np.prod(shape))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count = min(cells, draw(st.sampled_from([0, 1, 2, 5, 13, 40, 100])))
    chosen = rng.choice(cells, count, replace=False)
    indices = np.stack(np.unravel_index(chosen, (batch, *shape)), axis=1).astype(np.int32)
    return Sites(indices, shape, batch, draw(st.sampled_from([0, 0, 3])) if spare else 0)


@st.composite
def windows(draw, dimensions):
    """Draw kernel, stride, padding and dilation of each axis."""
    kernel = tuple(draw(st.integers(1, 3)) for _ in range(dimensions))
    if np.prod(kernel) > 27:
        kernel = (2,) * dimensions
    stride = tuple(draw(st.integers(1, 3)) for _ in range(dimensions))
    padding = tuple(draw(st.integers(0, 2)) for _ in range(dimensions))
    dilation = tuple(draw(st.integers(1, 2)) for _ in range(dimensions))
    return kernel, stride, padding, dilation


def float_dtypes():
    """Draw a dtype of features."""
    return st.sampled_from(FLOATS)


def generators():
    """Draw a source of random numbers."""
    return st.integers(0, 2**32 - 1).map(np.random.default_rng)
