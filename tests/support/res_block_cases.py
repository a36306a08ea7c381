"""Residual units to test with: sizes, options, data and active blocks."""

import math
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from sbnet_cupy import (
    BottleneckWeights,
    calc_block_params_res_block,
    sparse_res_block_bottleneck,
)
from support import conv_oracles as oracles
from support.conv_cases import pairs
from support.strategies import FLOATS

NAMES = ("w1", "w2", "w3", "scale1", "shift1", "scale2", "shift2", "scale3", "shift3")


@dataclass(frozen=True)
class Case:
    """A residual unit: sizes, options and the seed of its data and active blocks."""

    image: tuple[int, int, int, int] = (2, 7, 9, 4)
    middle: int = 3
    channels: int = 4
    strides: tuple[int, int] = (1, 1)
    steps: tuple[int, int] = (3, 2)  # a block of these many outputs, less one, per axis
    project: bool = False
    dtype: np.dtype = FLOATS[2]
    density: float = 0.4
    spare: int = 2
    seed: int = 0

    @property
    def projects(self):
        return self.project or self.strides != (1, 1) or self.channels != self.image[3]

    @property
    def params(self):
        bsize = tuple(3 + s * n for s, n in zip(self.strides, self.steps, strict=True))
        return calc_block_params_res_block(self.image, bsize, [1, 3, 1], self.strides)

    def indices(self):
        """Active blocks in any order, and rows of -1 past their count."""
        rng = np.random.default_rng(self.seed)
        grid = (self.image[0], *self.params.bcount)
        rows = rng.permutation(np.argwhere(rng.random(grid) < self.density)).astype(np.int32)
        table = np.concatenate([rows, np.full((self.spare, 3), -1, np.int32)])
        return np.array([len(rows)], np.int32), table, rows

    def data(self):
        """The image and the arrays of the weights; all shifts positive, so that padding matters."""
        rng = np.random.default_rng(self.seed + 1)
        cin, cmid, cout = self.image[3], self.middle, self.channels

        def kernel(*shape):
            return rng.standard_normal(shape) / math.sqrt(math.prod(shape[:3]))

        kernels = kernel(1, 1, cin, cmid), kernel(3, 3, cmid, cmid), kernel(1, 1, cmid, cout)
        project = kernel(1, 1, cin, cout).astype(self.dtype) if self.projects else None
        tables = [rng.uniform(0.5, 1.5, c) for c in (cin, cin, cmid, cmid, cmid, cmid)]
        wide = np.float64 if self.dtype == np.float64 else np.float32
        x = rng.standard_normal(self.image).astype(self.dtype)
        weights = [w.astype(self.dtype) for w in kernels] + [t.astype(wide) for t in tables]
        return x, weights, project

    def oracle(self, x, weights, project):
        """The dense unit, the shortcut, and which output pixels are active."""
        epsilon = oracles.epsilon_of_sums(self.dtype)
        unit, shortcut = oracles.residual_unit(
            x, weights, self.strides, project, dtype=self.dtype, epsilon=epsilon
        )
        shape = unit.value.shape[:3]
        return unit, shortcut, oracles.active_outputs(
            shape, self.indices()[2], self.params.bsize_out
        )  # fmt: skip

    def run(self, xp, x, weights, project, **options):
        counts, table, _ = self.indices()
        return sparse_res_block_bottleneck(
            x if options.pop("given", False) else xp.asarray(x),
            BottleneckWeights(*map(xp.asarray, weights)),
            (xp.asarray(counts), xp.asarray(table)),
            self.params,
            strides=self.strides,
            w_project=None if project is None else xp.asarray(project),
            **options,
        )


ALL = Case(density=1.0, spare=0)


@st.composite
def cases(draw):
    """Draw images smaller than a block, none and all active, changes of size and channels."""
    cin = draw(st.sampled_from([1, 4, 8]))
    return Case(
        image=(draw(st.sampled_from([1, 2, 0])), *draw(pairs(1, 9)), cin),
        middle=draw(st.sampled_from([1, 3, 8])),
        channels=draw(st.sampled_from([cin, 5])),
        strides=draw(st.sampled_from([(1, 1), (1, 1), (2, 2), (1, 2), (3, 1)])),
        steps=draw(pairs(0, 4)),
        project=draw(st.booleans()),
        dtype=draw(st.sampled_from(FLOATS)),
        density=draw(st.sampled_from([0.4, 0.0, 1.0])),
        spare=draw(st.integers(0, 3)),
        seed=draw(st.integers(0, 2**32 - 1)),
    )
