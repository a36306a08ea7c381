"""Calls of the ops for the tables of kernel_cases.py: what they are made on, and how they are made.

A call takes its arrays from a ``memory``, as on_host/test_kernels.py has it, so that what happens
around them is seen.
"""

import functools
import math
from dataclasses import dataclass, field

import numpy as np

from sbnet_cupy import (
    ActiveBlocks,
    block_table,
    reduce_mask,
    sparse_gather,
    sparse_gather_grad,
    sparse_scatter,
    sparse_scatter_grad,
)
from sbnet_cupy.block_sparse.gather_scatter.zero_outside import zero_outside
from sbnet_cupy.block_sparse.grid import Grid as Blocks
from sbnet_cupy.core.copy_image import copy_image
from sbnet_cupy.dense.affine_grad import affine_grad
from support import strategies
from support.strategies import INT32, Grid

DTYPES = {dtype.name: dtype for dtype in strategies.DTYPES}

# batch, size, bsize, boffset, bstride, bcount
GRIDS = {
    "plain": Grid(2, (19, 23), (6, 6), (0, 0), (6, 6), (4, 4)),
    "halo": Grid(2, (19, 23), (6, 6), (-1, -1), (4, 4), (5, 6)),
    "rectangle": Grid(1, (19, 23), (5, 3), (-1, 2), (5, 3), (4, 8)),
    "gaps": Grid(3, (19, 23), (3, 4), (1, -2), (5, 7), (5, 4)),
    "aligned": Grid(2, (16, 32), (8, 8), (0, 0), (8, 8), (2, 4)),
    "aligned halo": Grid(1, (16, 32), (8, 8), (-4, -4), (4, 4), (4, 8)),
    "pixels": Grid(2, (5, 7), (1, 1), (0, 0), (1, 1), (5, 7)),
    "rows": Grid(1, (9, 50), (1, 40), (-2, -3), (3, 20), (4, 3)),
    "long rows": Grid(1, (6, 310), (2, 301), (-1, -5), (2, 301), (3, 1)),
    "columns": Grid(1, (75, 5), (70, 2), (-3, 1), (35, 2), (3, 3)),
    "large": Grid(1, (50, 60), (40, 33), (-3, -4), (40, 33), (2, 2)),
    "huge": Grid(1, (220, 200), (101, 97), (-3, -4), (101, 97), (2, 3)),
    "over the edge": Grid(2, (4, 5), (16, 16), (-7, -6), (16, 16), (1, 1)),
    "no rows": Grid(2, (0, 16), (4, 4), (-2, -2), (4, 4), (3, 5)),
    "no columns": Grid(2, (16, 0), (4, 4), (-2, -2), (4, 4), (5, 3)),
    "above": Grid(1, (6, 6), (4, 4), (-40, 3), (4, 4), (12, 3)),
    "left": Grid(1, (6, 6), (4, 4), (3, -40), (4, 4), (3, 12)),
    "stage 1": Grid(1, (40, 70), (18, 18), (-1, -1), (16, 16), (3, 5)),
    "stage 1 out": Grid(1, (40, 70), (16, 16), (0, 0), (16, 16), (3, 5)),
    "stage 2": Grid(1, (20, 35), (10, 10), (-1, -1), (8, 8), (3, 5)),
    "stage 2 out": Grid(1, (20, 35), (8, 8), (0, 0), (8, 8), (3, 5)),
    "stage 4": Grid(1, (20, 30), (8, 8), (-1, -1), (6, 6), (4, 5)),
    "stage 4 out": Grid(1, (20, 30), (6, 6), (0, 0), (6, 6), (4, 5)),
    "wide blocks": Grid(1, (40, 70), (34, 34), (-1, -1), (32, 32), (2, 3)),
    "wide blocks out": Grid(1, (40, 70), (32, 32), (0, 0), (32, 32), (2, 3)),
    "many": Grid(1, (370, 371), (1, 1), (0, 0), (1, 1), (370, 371)),
    # Corners as far away as the arguments allow.
    "far": Grid(2, (19, 23), (6, 6), (0, 0), (2**31 - 1, 2**31 - 1), (3, 3)),
    "far back": Grid(2, (19, 23), (6, 6), (2 - 2**31, 1 - 2**31), (4, 2**31 - 1), (2, 4)),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """A call on inputs made from a seed, the same every time."""

    dtype: str
    grid: str
    name: str = ""
    offset: int = 0  # elements between an aligned address and the start of the image or mask
    seed: int = 0

    @property
    def geometry(self):
        return GRIDS[self.grid]

    @property
    def launches_nothing(self):
        """Whether there is nothing to do."""
        return False

    @property
    def rng(self):
        return np.random.default_rng([self.seed, *self.grid.encode()])


@dataclass(frozen=True, kw_only=True, eq=False)
class Mask(Case):
    """A mask with every threshold and every kind of capacity."""

    tols: tuple = (0.0,)
    avgpool: bool = False
    density: float = 0.1
    special: tuple = ()  # values put in here and there
    capacities: bool = True

    def __str__(self):
        pool = "mean" if self.avgpool else "max"
        return f"{self.name} {self.dtype} {pool} {self.grid}".strip()

    @property
    def launches_nothing(self):
        return not self.mask.size

    @functools.cached_property
    def mask(self):
        rng, shape, dtype = self.rng, (self.geometry.batch, *self.geometry.size), DTYPES[self.dtype]
        values = rng.integers(1, 9, shape)
        if dtype.kind not in "bu":
            values -= rng.integers(0, 9, shape) * (rng.random(shape) < 0.3)
        values *= rng.random(shape) < self.density
        mask = values.astype(dtype)
        if dtype.kind in "fV":
            mask = (mask / np.asarray(8, dtype)).astype(dtype)  # sums are exact in any order
        for value in self.special:
            mask[rng.random(shape) < 0.02] = np.asarray(value).astype(dtype)
        return mask

    def calls(self):
        """Every (tol, capacity): none, nothing, and on all sides of the count and of the grid."""
        grid = self.geometry
        candidates = grid.batch * math.prod(grid.bcount)
        for tol in self.tols:
            count = self._call(self.mask, tol, None).count()
            yield tol, None
            if self.capacities:
                around = {0, count - 1, count, count + 1, candidates, candidates + 700}
                yield from ((tol, capacity) for capacity in sorted(around - {-1}))

    def _call(self, mask, tol, capacity):
        return reduce_mask(
            mask, self.geometry.bcount, **self.geometry.blocks, tol=tol, avgpool=self.avgpool,
            capacity=capacity,
        )  # fmt: skip

    def run(self, memory, calls):
        mask = memory.read_only(self.mask, self.offset)
        for tol, capacity in calls:
            yield from self._call(mask, tol, capacity)


LAYOUTS = {
    "NHWC": ("NHWC", False),
    "NCHW": ("NCHW", False),
    "NHWC to NCHW": ("NHWC", True),
    "NCHW to NHWC": ("NCHW", True),
}
_FAR = (INT32.min, INT32.max, -1, 2**30)
_CORRUPT = [(-1, 0, 0), (INT32.max, 0, 1), (INT32.min, 1, 0), (9, 9, 9)] + [
    (0, *row) for far in _FAR for row in ((far, 0), (0, far), (far, far))
]


@dataclass(frozen=True, kw_only=True, eq=False)
class Copy(Case):
    """An image, a stack and an index table: gather, scatter, or scatter that adds."""

    op: str = "gather"  # "scatter", "add"
    layout: str = "NHWC"
    channels: int = 3
    table: str = "some"
    stack_offset: int = 0
    special: bool = False  # NaN, infinities, -0 and the largest and smallest numbers in the image
    options: dict = field(default_factory=dict)

    def __str__(self):
        words = [self.name, self.op, self.dtype, self.layout, self.grid, f"C={self.channels}"]
        if self.offset or self.stack_offset:
            words.append(f"offset {self.offset} {self.stack_offset}")
        return " ".join(words + [self.table] * (self.table != "some")).strip()

    @property
    def launches_nothing(self):
        return self.table == "empty"

    @functools.cached_property
    def active(self):
        """(bin_counts, active_block_indices)"""
        grid, rng = self.geometry, self.rng
        every = np.argwhere(np.ones((grid.batch, *grid.bcount))).astype(np.int32)
        rows = every[rng.random(len(every)) < 0.6]
        spare = np.full((3, 3), -1, np.int32)
        count, rows = {
            "some": (len(rows), [*rows, *spare]),
            "all": (len(every), every),
            "empty": (0, []),
            "count 0": (0, rows),
            "count negative": (INT32.min, rows),
            "count too large": (INT32.max, rows),
            "corrupt": (INT32.max, rng.permutation([*rows, *_CORRUPT, (grid.batch, 0, 0)])),
            "shuffled": (len(rows), rng.permutation(rows)),
            "repeated": (3 * len(rows), rng.permutation([*rows, *rows, *rows])),
        }[self.table]
        return np.array([count], np.int32), np.array(rows, np.int32).reshape(-1, 3)

    @functools.cached_property
    def arrays(self):
        """The image and the stack; numbers where they are computed with, else random bits."""
        grid, rng, c = self.geometry, self.rng, self.channels
        data_format, transpose = LAYOUTS[self.layout]
        last = data_format == "NHWC"
        image = (grid.batch, *grid.size, c) if last else (grid.batch, c, *grid.size)
        rows = len(self.active[1])
        stack = (rows, *grid.bsize, c) if last != transpose else (rows, c, *grid.bsize)
        computes = self.op in ("add", "gather grad") or self.options
        make = numbers if computes else random_bits
        image, stack = (make(rng, shape, DTYPES[self.dtype]) for shape in (image, stack))
        if self.special:
            most = 3.3e38 if self.dtype in ("bfloat16", "float32") else 65504
            for value in (math.nan, math.inf, -math.inf, -0.0, most, -most, 1e-7, -1e-40):
                image[rng.random(image.shape) < 0.05] = value
        return image, stack

    @functools.cached_property
    def keywords(self):
        data_format, transpose = LAYOUTS[self.layout]
        layout = {"data_format": data_format, "transpose": transpose}
        return self.geometry.blocks | layout | self._tables()

    def _tables(self):
        """``options``, with an array for the dtype of scale or of shift."""
        made = dict(self.options)
        for name in {"scale", "shift"} & made.keys():
            made[name] = numbers(self.rng, (self.channels,), DTYPES[made[name]])
        return made

    def run(self, memory):
        image, stack = self.arrays
        keywords = {
            k: memory.read_only(v) if isinstance(v, np.ndarray) else v
            for k, v in self.keywords.items()
        }
        active = map(memory.read_only, self.active)
        if self.op == "gather":
            out = memory.poisoned(stack.shape, stack.dtype, offset=self.stack_offset)
            x = memory.read_only(image, self.offset)
            yield sparse_gather(x, *active, **keywords, out=out)
        else:
            y = memory.poisoned(image.shape, image.dtype, offset=self.offset)
            y[...] = image
            blocks = memory.read_only(stack, self.stack_offset)
            atomic = self.geometry.overlaps or self.table == "repeated"
            yield sparse_scatter(
                blocks, *active, y, **keywords, out=y, add=self.op == "add", atomic=atomic
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class Gradient(Copy):
    """The gradients of gather and scatter, which are made of gathers and scatters."""

    op: str = "gather grad"  # "scatter grad"

    def run(self, memory):
        image, stack = (memory.read_only(array, self.offset) for array in self.arrays)
        active = list(map(memory.read_only, self.active))
        if self.op == "gather grad":
            yield sparse_gather_grad(stack, *active, image, **self.keywords).x
        else:
            yield from sparse_scatter_grad(image, *active, **self.keywords)


@dataclass(frozen=True, kw_only=True, eq=False)
class Outside(Copy):
    """What of a stack lies outside the image becomes 0."""

    op: str = "zero outside"

    def run(self, memory):
        _, stack = self.arrays
        blocks = memory.poisoned(stack.shape, stack.dtype, offset=self.stack_offset)
        blocks[...] = stack
        grid = Blocks(*self.geometry.blocks.values())
        zero_outside(blocks, *map(memory.read_only, self.active), grid, self.geometry.size)
        yield blocks


@dataclass(frozen=True, kw_only=True, eq=False)
class Places(Copy):
    """The row of each block at its place, of a list in any order that may hold anything."""

    op: str = "places"
    dtype: str = "float32"
    launches_nothing = False

    def run(self, memory):
        shape = (self.geometry.batch, *self.geometry.bcount)
        active = ActiveBlocks(*map(memory.read_only, self.active), shape)
        yield block_table(active, self.geometry.bsize).grid


@dataclass(frozen=True)
class CopyImage:
    """The copy of an image, of so many bytes."""

    size: int
    offset: int = 0
    launches_nothing = False

    def __str__(self):
        return f"{self.size} bytes"

    def run(self, memory):
        array = np.frombuffer(np.random.default_rng(5).bytes(self.size), np.uint8)
        yield copy_image(memory.read_only(array), memory.poisoned(array.shape, array.dtype))


@dataclass(frozen=True, kw_only=True, eq=False)
class Affine:
    """Gradients of scale, shift and activation."""

    dtype: str
    shape: tuple  # (N, H, W, C)
    layout: str = "NHWC"
    scale: str | None = "float32"
    shift: str | None = "float32"
    activation: str | None = "relu"
    inside: bool = False  # whether there is a mask of what was computed
    given: bool = True  # whether x is
    offset: int = 0
    seed: int = 0

    launches_nothing = False

    def __str__(self):
        words = [self.dtype, self.layout, *self.shape, self.scale, self.shift, self.activation]
        marks = ["inside"] * self.inside + ["without x"] * (not self.given)
        return " ".join(map(str, words + marks + [self.offset] * (self.offset > 0)))

    @functools.cached_property
    def arguments(self):
        """The NumPy arguments of affine_grad."""
        rng = np.random.default_rng(self.seed)
        last = self.layout == "NHWC"
        n, h, w, c = self.shape
        shape = self.shape if last else (n, c, h, w)
        grad, x = (numbers(rng, shape, DTYPES[self.dtype]) for _ in range(2))
        tables = [
            None if dtype is None else numbers(rng, (c,), DTYPES[dtype])
            for dtype in (self.scale, self.shift)
        ]
        inside = rng.random((n, h, w, 1) if last else (n, 1, h, w)) < 0.7 if self.inside else None
        return grad, x, *tables, self.activation, last, inside

    def run(self, memory):
        grad, x, *tables, activation, last, inside = self.arguments
        grad = memory.read_only(grad, self.offset)
        x = memory.read_only(x, self.offset) if self.given else None
        tables = [None if table is None else memory.read_only(table) for table in tables]
        inside = None if inside is None else memory.read_only(inside)
        yield from affine_grad(grad, x, *tables, activation, last, inside)


def random_bits(rng, shape, dtype):
    """NaN payloads, -0 and denormals."""
    if dtype.kind == "b":
        return rng.random(shape) < 0.5
    return np.frombuffer(rng.bytes(math.prod(shape) * dtype.itemsize), dtype).reshape(shape)


def numbers(rng, shape, dtype):
    """Finite numbers, of all magnitudes that make the order of additions matter."""
    if dtype.kind in "biu":
        return random_bits(rng, shape, dtype)
    values = rng.standard_normal(shape) * 2.0 ** rng.integers(-6, 6, shape)
    if dtype.kind == "c":
        values = values + 1j * rng.standard_normal(shape)
    return values.astype(dtype)
