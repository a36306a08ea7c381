"""Calls that between them reach every branch of the CUDA kernels; test_cuda_on_host.py makes them.

A fixed table, not drawn: each row that differs in dtype, layout or block size is another kernel to
compile.
"""

import functools
import math
from dataclasses import dataclass, field, replace

import numpy as np
import strategies
from strategies import INT32, Grid

from sbnet_cupy import reduce_mask, sparse_gather, sparse_scatter

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
    "columns": Grid(1, (75, 5), (70, 2), (-3, 1), (35, 2), (3, 3)),
    "large": Grid(1, (50, 60), (40, 33), (-3, -4), (40, 33), (2, 2)),
    "over the edge": Grid(2, (4, 5), (16, 16), (-7, -6), (16, 16), (1, 1)),
    "above": Grid(1, (6, 6), (4, 4), (-40, 3), (4, 4), (12, 3)),
    "left": Grid(1, (6, 6), (4, 4), (3, -40), (4, 4), (3, 12)),
    "stage 1": Grid(1, (40, 70), (18, 18), (-1, -1), (16, 16), (3, 5)),
    "stage 1 out": Grid(1, (40, 70), (16, 16), (0, 0), (16, 16), (3, 5)),
    "stage 2": Grid(1, (20, 35), (10, 10), (-1, -1), (8, 8), (3, 5)),
    "stage 4": Grid(1, (20, 30), (8, 8), (-1, -1), (6, 6), (4, 5)),
    "wide blocks": Grid(1, (40, 70), (34, 34), (-1, -1), (32, 32), (2, 3)),
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


# ---------------------------------------------------------------------------- reduce_mask


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


def _masks():
    signed, unsigned = ("int8", "int16", "int32", "int64"), ("uint8", "uint16", "uint32", "uint64")
    grids = ("plain", "halo", "gaps", "rectangle", "aligned", "aligned halo", "columns")
    whole = (0, 0.5, 1, 2.999, 7, 8, -0.5, -1, 1e30, -1e30, math.inf, -math.inf)
    for i, dtype in enumerate(("bool", *signed, *unsigned)):
        edges = () if dtype == "bool" else (np.iinfo(dtype).max, np.iinfo(dtype).min)
        tols = whole + tuple(float(edge) for edge in edges)
        yield Mask(dtype=dtype, grid=grids[i % 7], tols=tols, special=edges, seed=i)
        tols = (0, 0.25, -0.1, 1 / 36, 0.5, math.inf)
        yield Mask(dtype=dtype, grid=grids[(i + 3) % 7], tols=tols, avgpool=True, seed=i)
    for i, dtype in enumerate(("float16", "bfloat16", "float32", "float64")):
        special = (math.inf, math.nan, -math.inf, -0.0)
        tols = (0, 0.125, 0.1, -0.3, 6e4, 1e6, 1e300, -1e300, math.inf, -math.inf)
        options = {"dtype": dtype, "special": special, "tols": tols, "seed": i}
        yield Mask(grid=grids[i], **options)
        yield Mask(grid=grids[(i + 2) % 7], avgpool=True, **options)
        yield Mask(grid=grids[(i + 4) % 7], avgpool=i % 2 == 0, offset=1, **options)
    # Blocks over 1024 pixels are shared by the whole thread block.
    yield Mask(dtype="bool", grid="large", density=0.001)
    yield Mask(dtype="uint8", grid="large", density=0.001, avgpool=True, tols=(0, 0.002, 0.01))
    yield Mask(dtype="float32", grid="wide blocks", density=0.001, tols=(0, 0.5))
    yield Mask(dtype="float16", grid="large", density=0.1, avgpool=True, tols=(0, 0.05))
    yield Mask(dtype="float64", grid="wide blocks", density=0.1, avgpool=True, tols=(0, 0.02))
    # Rows that begin and end anywhere within a word.
    for offset in (1, 2, 3):
        yield Mask(dtype="uint8", grid="plain", offset=offset, seed=offset)
        yield Mask(dtype="bool", grid="halo", offset=offset, seed=offset)
    yield Mask(dtype="int16", grid="rectangle", offset=1)
    yield Mask(dtype="uint8", grid="rows", density=0.01)
    yield Mask(dtype="uint8", grid="pixels", density=0.5)
    yield Mask(dtype="float32", grid="pixels", density=0.5)
    for grid in ("stage 1", "stage 2", "stage 4", "wide blocks"):
        yield Mask(dtype="float32", grid=grid, density=0.003)
    # Blocks outside the image; nothing and everything active.
    for grid in ("above", "left"):
        yield Mask(dtype="uint8", grid=grid, density=1.0, tols=(0, -1))
        yield Mask(dtype="float32", grid=grid, density=1.0, tols=(0.5, -1), avgpool=True)
    yield Mask(dtype="float32", grid="over the edge")
    for grid in ("far", "far back"):
        yield Mask(dtype="float32", grid=grid, density=1.0)
        yield Mask(dtype="uint8", grid=grid, density=1.0, avgpool=True)
    yield Mask(dtype="uint8", grid="plain", name="none", density=0.0, tols=(0, -1))
    yield Mask(dtype="uint8", grid="plain", name="all", density=1.0)
    # More candidates than a thread block's flags hold, and than all thread blocks take at once.
    yield Mask(dtype="bool", grid="many", density=0.05, capacities=False)


MASKS = list(_masks())


# ---------------------------------------------------------------------------- gather and scatter

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
        text = f"{self.name} {self.op} {self.dtype} {self.layout} {self.grid} C={self.channels}"
        offsets = f"offset {self.offset} {self.stack_offset}" * bool(self.offset + self.stack_offset)
        return " ".join(f"{text} {offsets} {'' if self.table == 'some' else self.table}".split())

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
            "corrupt": (INT32.max, rng.permutation([*rows, *_CORRUPT])),
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
        computes = self.op == "add" or self.options
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


def random_bits(rng, shape, dtype):
    """NaN payloads, -0 and denormals."""
    if dtype == bool:
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


def _copies():
    rows = [
        ("bool", "NHWC", 1, "pixels"), ("bool", "NHWC to NCHW", 17, "plain"),
        ("bool", "NCHW to NHWC", 3, "halo"),
        ("int8", "NHWC to NCHW", 3, "large"), ("int8", "NHWC", 17, "rows"),
        ("uint8", "NCHW", 3, "halo"), ("uint8", "NHWC", 100, "plain"),
        ("uint8", "NCHW to NHWC", 32, "aligned"), ("uint8", "NHWC", 3, "columns"),
        ("int16", "NHWC", 3, "halo"), ("uint16", "NCHW", 17, "gaps"),
        ("float16", "NHWC to NCHW", 17, "rectangle"), ("float16", "NHWC to NCHW", 32, "plain"),
        ("float16", "NCHW", 3, "gaps"), ("float16", "NCHW to NHWC", 100, "halo"),
        ("bfloat16", "NHWC", 32, "halo"), ("bfloat16", "NCHW to NHWC", 17, "plain"),
        ("bfloat16", "NHWC to NCHW", 8, "aligned"),
        ("int32", "NHWC", 1, "large"), ("int32", "NHWC to NCHW", 3, "halo"),
        ("uint32", "NHWC", 17, "over the edge"),
        ("float32", "NHWC", 24, "plain"), ("float32", "NCHW", 3, "aligned"),
        ("float32", "NCHW to NHWC", 100, "rectangle"), ("float32", "NHWC", 32, "aligned halo"),
        ("float32", "NCHW", 1, "over the edge"), ("float32", "NHWC to NCHW", 100, "large"),
        ("int64", "NCHW to NHWC", 5, "halo"), ("int64", "NHWC", 32, "gaps"),
        ("uint64", "NCHW", 1, "plain"), ("uint64", "NHWC to NCHW", 17, "left"),
        ("float64", "NHWC to NCHW", 17, "aligned"), ("float64", "NHWC", 3, "halo"),
        ("complex64", "NCHW to NHWC", 3, "plain"), ("complex64", "NHWC", 32, "gaps"),
        ("complex128", "NHWC to NCHW", 3, "rectangle"), ("complex128", "NHWC", 1, "plain"),
        ("complex128", "NCHW", 17, "halo"), ("complex128", "NCHW to NHWC", 32, "rows"),
    ]  # fmt: skip
    for i, (dtype, layout, channels, grid) in enumerate(rows):
        options = {"dtype": dtype, "layout": layout, "channels": channels, "grid": grid, "seed": i}
        ops = ("gather", "scatter", "add") if i % 3 == 0 else ("gather", "add")
        for op in ops:
            yield Copy(op=op, **options)
    # The sizes of the paper's stages.
    stages = [("stage 1", 24, "stage 1 out"), ("stage 2", 48, None), ("stage 4", 96, None),
              ("wide blocks", 96, None)]  # fmt: skip
    for grid, channels, out in stages:
        for layout in ("NHWC", "NHWC to NCHW"):
            options = {"dtype": "float32", "layout": layout, "channels": channels}
            yield Copy(grid=grid, **options)
            if out:
                yield Copy(grid=out, op="scatter", **options)
                yield Copy(grid=out, op="add", **options)
    yield Copy(dtype="float16", grid="stage 1", channels=24, layout="NHWC to NCHW")
    # Images and stacks that start anywhere: narrower accesses on either side.
    for offset, stack_offset in ((1, 0), (0, 1), (2, 3)):
        for layout in LAYOUTS:
            options = {"layout": layout, "offset": offset, "stack_offset": stack_offset}
            op = ("gather", "scatter", "add")[offset]
            yield Copy(op=op, dtype="float16", channels=32, grid="aligned", **options)
    # Index tables of every kind, on kernels that are there already.
    tables = ("all", "empty", "count 0", "count negative", "count too large", "corrupt")
    for i, layout in enumerate(LAYOUTS):
        for op in ("gather", "scatter", "add"):
            for grid in ("plain", "halo") if i == 0 else ("plain",):
                base = Copy(op=op, dtype="float32", channels=24, layout=layout, grid=grid)
                yield from (replace(base, table=table, seed=i) for table in tables)
    for op in ("gather", "scatter", "add"):
        for grid in ("far", "far back"):
            for layout in LAYOUTS:
                options = {"op": op, "dtype": "float32", "layout": layout, "channels": 24}
                yield Copy(grid=grid, table="corrupt", **options)
    for op in ("scatter", "add"):
        for layout in LAYOUTS:
            base = Copy(op=op, dtype="float32", channels=3, layout=layout, grid="halo")
            yield replace(base, table="shuffled")
            yield replace(base, table="repeated")
        base = Copy(op=op, dtype="float32", channels=24, grid="plain")
        yield replace(base, table="repeated")


COPIES = list(_copies())
# Called again and again: on the same list of blocks, with other images.
REPEATED = [
    Copy(op=op, dtype="float32", channels=24, grid="plain", table="all", layout=layout)
    for op in ("gather", "scatter", "add")
    for layout in ("NHWC", "NHWC to NCHW")
]


def _fused():
    """Scale, shift and activation; relu and None are exact, silu and gelu are not."""
    rows = [
        ("float32", "float32", "float32", "relu", "NHWC", 24, "plain"),
        ("float32", "float32", None, None, "NHWC", 3, "halo"),
        ("float32", None, "float16", None, "NCHW", 17, "gaps"),
        ("float32", None, None, "relu", "NHWC to NCHW", 32, "plain"),
        ("float32", "float16", "float32", "relu", "NCHW to NHWC", 17, "rectangle"),
        ("float32", "float32", "float32", "relu", "NHWC", 24, "stage 1"),
        ("float16", "float32", "float32", "relu", "NHWC", 32, "plain"),
        ("float16", "float16", None, None, "NHWC to NCHW", 17, "rectangle"),
        ("float16", None, "float32", "relu", "NCHW", 3, "gaps"),
        ("float16", "float16", "float16", "relu", "NCHW to NHWC", 100, "halo"),
        ("float16", "float32", "float16", None, "NHWC", 1, "large"),
        ("bfloat16", "float32", "float32", "relu", "NHWC", 32, "halo"),
        ("bfloat16", "bfloat16", None, None, "NCHW to NHWC", 17, "plain"),
        ("bfloat16", None, "float32", "relu", "NHWC to NCHW", 8, "aligned"),
        ("float32", "float32", "float32", "relu", "NCHW", 1, "aligned"),
        ("float16", "float16", None, None, "NHWC", 1, "aligned"),
        ("float64", "float64", "float64", "relu", "NHWC", 3, "halo"),
        ("float64", "float32", None, None, "NHWC to NCHW", 17, "aligned"),
        ("float64", "float16", "float32", "relu", "NCHW", 3, "plain"),
        ("float32", "float32", "float32", "silu", "NHWC", 24, "plain"),
        ("float16", "float32", None, "silu", "NHWC to NCHW", 17, "rectangle"),
        ("bfloat16", None, "float32", "gelu", "NCHW", 3, "gaps"),
        ("float32", None, None, "gelu", "NCHW to NHWC", 3, "plain"),
        ("float64", "float64", "float64", "gelu", "NHWC", 3, "halo"),
        ("float64", None, None, "silu", "NHWC to NCHW", 3, "rectangle"),
    ]
    for i, (dtype, scale, shift, activation, layout, channels, grid) in enumerate(rows):
        options = {"scale": scale, "shift": shift, "activation": activation}
        options = {name: value for name, value in options.items() if value is not None}
        yield Copy(
            name=" ".join(f"{k}={v}" for k, v in options.items()),
            dtype=dtype, layout=layout, channels=channels, grid=grid, options=options, seed=i,
            table="corrupt" if i % 3 == 0 else "some",
        )  # fmt: skip


_FUSED = list(_fused())
SMOOTH = [case for case in _FUSED if case.options.get("activation") in ("silu", "gelu")]
FUSED = [case for case in _FUSED if case not in SMOOTH]
FUSED += [
    replace(case, special=True, name=f"special {case.name}")
    for case in FUSED
    if case.grid in ("plain", "rectangle")
]
