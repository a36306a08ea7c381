"""Calls that together reach every branch of the CUDA kernels; on_host/test_kernels.py runs them.

A fixed table, not drawn: each row that differs in dtype, layout or block size is another kernel to
compile.
"""

import math
from dataclasses import replace

import numpy as np

from support.kernel_calls import (
    LAYOUTS,
    Affine,
    Copy,
    CopyImage,
    Gradient,
    Mask,
    Outside,
    Places,
)


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
    # Blocks that many lanes share, and blocks that a whole thread block shares.
    for grid, density in (("large", 0.001), ("huge", 0.0001)):
        yield Mask(dtype="bool", grid=grid, density=density)
        yield Mask(dtype="float32", grid=grid, density=density, tols=(0, 0.5))
        tols = tuple(np.arange(0.05, 0.45, 0.005))  # between the means of any two blocks
        yield Mask(dtype="uint8", grid=grid, avgpool=True, tols=tols, capacities=False)
        yield Mask(dtype="float16", grid=grid, avgpool=True, tols=(0, 0.01, 0.03))
        yield Mask(dtype="float64", grid=grid, avgpool=True, tols=(0, 0.02))
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
    for grid in ("above", "left", "no rows", "no columns"):
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
        ("uint32", "NHWC", 17, "over the edge"), ("uint32", "NHWC to NCHW", 3, "long rows"),
        ("float32", "NCHW to NHWC", 8, "long rows"),
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
    # The sizes of the paper's stages: halo blocks are gathered, what is left of them scattered.
    for stage, channels in (("stage 1", 24), ("stage 2", 48), ("stage 4", 96), ("wide blocks", 96)):
        for dtype in ("float32", "float16"):
            for layout in ("NHWC", "NHWC to NCHW"):
                options = {"dtype": dtype, "layout": layout, "channels": channels}
                yield Copy(grid=stage, **options)
                yield Copy(grid=f"{stage} out", op="scatter", **options)
                yield Copy(grid=f"{stage} out", op="add", **options)
    # Images and stacks that start anywhere: narrower accesses on either side.
    for offset, stack_offset in ((1, 0), (0, 1), (2, 3)):
        for layout in LAYOUTS:
            options = {"layout": layout, "offset": offset, "stack_offset": stack_offset}
            op = ("gather", "scatter", "add")[offset]
            yield Copy(op=op, dtype="float16", channels=32, grid="aligned", **options)
    # Colours: lines that begin and end within 16 bytes.
    for dtype, channels in (("uint8", 3), ("float16", 1), ("float16", 3)):
        for op in ("gather", "scatter", "add"):
            yield Copy(op=op, dtype=dtype, channels=channels, layout="NHWC", grid="stage 2 out")
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


# The layout changes: lines and tiles of a stack; tiles, and strips of them, that stick out of a
# block, its channels or the image.
_TRANSPOSED = [
    Copy(op=op, dtype=dtype, channels=channels, layout=layout, grid=grid, table="corrupt")
    for op in ("gather", "scatter", "add")
    for dtype, channels, layout, grid in (
        ("float16", 40, "NHWC to NCHW", "stage 1"),
        ("float16", 17, "NCHW to NHWC", "over the edge"),
        ("float32", 20, "NHWC to NCHW", "halo"),
        ("float32", 150, "NHWC to NCHW", "large"),
    )
    if op == "gather" or grid in ("large", "over the edge")  # blocks that share no pixels
]
COPIES = [*_copies(), *_TRANSPOSED]
# Called repeatedly: on the same list of blocks, with other images.
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
        ("float16", "float32", "float32", "relu", "NHWC", 48, "stage 2"),
        ("float16", "float32", "float32", "relu", "NHWC to NCHW", 24, "stage 1"),
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


def _affine():
    """Vectors of every width, channels that fill a tile or do not, one group of pixels and many."""
    images = ((2, 5, 7, 3), (1, 6, 8, 32), (3, 9, 4, 24), (1, 40, 50, 17), (2, 3, 4, 100))
    rows = [
        ("float32", "float32", "float32", "relu"),
        ("float32", "float16", "float32", "silu"),
        ("float32", None, "float32", None),
        ("float32", None, None, "gelu"),
        ("float16", "float32", "float32", "relu"),
        ("float16", "float16", None, "silu"),
        ("bfloat16", "float32", "float32", "relu"),
        ("bfloat16", None, "bfloat16", "gelu"),
        ("float64", "float64", "float64", "relu"),
        ("float64", "float32", None, "gelu"),
    ]
    for i, (dtype, scale, shift, activation) in enumerate(rows):
        options = {"dtype": dtype, "scale": scale, "shift": shift, "activation": activation}
        for j, layout in enumerate(("NHWC", "NCHW")):
            shape = images[(i + 2 * j) % 5]
            yield Affine(shape=shape, layout=layout, inside=(i + j) % 2 == 0, seed=i, **options)
    yield Affine(dtype="float16", shape=(1, 64, 64, 8), inside=True)  # 16 bytes, a lane alone
    yield Affine(dtype="float16", shape=(4, 16, 16, 256))  # 16 bytes, a full tile
    yield Affine(dtype="float16", shape=(2, 8, 8, 5), layout="NCHW", inside=True)
    yield Affine(dtype="float16", shape=(2, 8, 8, 5), layout="NCHW", offset=2)
    yield Affine(dtype="float32", shape=(1, 7, 7, 40), offset=1)
    yield Affine(dtype="float32", shape=(1, 200, 210, 1))
    for layout in ("NHWC", "NCHW"):  # the sums of a gradient alone, as for a bias
        yield Affine(
            dtype="float16", shape=(2, 20, 20, 24), layout=layout, scale=None, activation=None,
            given=False,
        )  # fmt: skip
    yield Affine(dtype="float32", shape=(1, 9, 9, 8), shift=None, activation=None, given=False)


AFFINE = list(_affine())


def _gradients():
    """Overlap, layouts that change, rows listed twice, and index tables that hold anything."""
    rows = [
        ("float32", "NHWC", "halo", "some"),
        ("float16", "NHWC to NCHW", "halo", "shuffled"),
        ("bfloat16", "NCHW", "gaps", "corrupt"),
        ("float64", "NCHW to NHWC", "aligned halo", "count too large"),
        ("float32", "NHWC", "plain", "repeated"),
    ]
    for dtype, layout, grid, table in rows:
        options = {"dtype": dtype, "layout": layout, "grid": grid, "table": table}
        yield Gradient(**options)
        yield Gradient(op="scatter grad", **options)
        fused = {"scale": "float32", "shift": "float32", "activation": "relu"}
        yield Gradient(name="fused", options=fused, **options)
    yield Gradient(
        name="add", op="scatter grad", dtype="float32", grid="halo", options={"add": True}
    )


GRADIENTS = list(_gradients())


def _outside():
    """Vectors of every width, blocks within the image and over each of its edges."""
    for i, grid in enumerate(("plain", "halo", "rectangle", "gaps", "aligned", "pixels", "rows")):
        dtype, channels = (("float32", 24), ("float16", 5), ("uint8", 3), ("float64", 1))[i % 4]
        yield Outside(grid=grid, dtype=dtype, channels=channels, seed=i)
    for grid in ("over the edge", "above", "left", "far", "far back", "huge", "stage 1"):
        yield Outside(grid=grid, dtype="float16", channels=8, table="all")
    tables = ("count 0", "count negative", "count too large", "corrupt", "shuffled", "repeated")
    for table in tables:
        yield Outside(grid="halo", dtype="bfloat16", channels=2, table=table)
    yield Outside(grid="halo", dtype="float32", channels=16, stack_offset=1)
    yield Outside(grid="no rows", dtype="float32", channels=4, table="all")


OUTSIDE = list(_outside())

PLACES = [Places(grid=grid, table="all") for grid in ("plain", "gaps", "many", "pixels")]
PLACES += [
    Places(grid="plain", table=table)
    for table in ("some", "empty", "count 0", "count negative", "count too large", "corrupt",
                  "shuffled", "repeated")
]  # fmt: skip

IMAGES = [CopyImage(size) for size in (16, 16 * 255, 16 * 256, 16 * 1000)]
