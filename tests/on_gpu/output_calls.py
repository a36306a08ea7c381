"""The table of calls of output_hashes: operations and layers, on arrays of every library."""

import numpy as np

import sbnet_cupy as sb

TABLE = []
FLOATS = ("float16", "bfloat16", "float32", "float64")
TILES = {"bsize": (5, 4)}
OVERLAP = {"bsize": (6, 5), "boffset": (-1, -2), "bstride": (4, 3)}
SHAPE = (2, 21, 26)


def calls(*rows, core=True, adapters=False, modules=False, table=TABLE):
    """Add a function to the table, once with each of these options."""

    def add(function):
        function.core, function.adapters, function.modules = core, adapters, modules
        table.extend((function, row) for row in rows)
        return function

    return add


def options_of(names, values, **others):
    return [{names: value, **others} for value in values]


def image_of(draw, channels, dtype, data_format="NHWC", shape=SHAPE):
    n, h, w = shape
    sizes = (n, h, w, channels) if data_format == "NHWC" else (n, channels, h, w)
    return draw(*sizes, dtype=dtype)


def listed(lib, draw, grid, spare=3, shape=SHAPE, count=None):
    """Return a list of active blocks, with rows past the count, in the arrays of a library."""
    stride, offset = grid.get("bstride", grid["bsize"]), grid.get("boffset", (0, 0))
    count = count or [-(-(n - o) // s) for n, o, s in zip(shape[1:], offset, stride, strict=True)]
    blocks = np.argwhere(draw(shape[0], *count, low=0.0, high=1.0) < 0.4).astype(np.int32)
    rows = np.concatenate([blocks, np.full((spare, 3), -1, np.int32)])
    return lib.array(np.array([len(blocks)], np.int32)), lib.array(rows)


def layer_of(lib, draw, params, shape=SHAPE):
    grid = {"bsize": params.bsize, "boffset": params.boffset, "bstride": params.bstride}
    return listed(lib, draw, grid, shape=shape, count=params.bcount)


def blocks_shape(grid, rows, channels, channels_last):
    """Return the shape of a stack."""
    return (rows, *grid["bsize"], channels) if channels_last else (rows, channels, *grid["bsize"])


def channels_last(data_format, transpose):
    return (data_format == "NHWC") != transpose


@calls(
    *options_of("dtype", ("bool", "uint8", "int64", *FLOATS), capacity=80),
    {"dtype": "bool"},
    {"dtype": "float32", "tol": 1.7, "capacity": 30},
    {"dtype": "float16", "avgpool": True, "tol": 0.1, "capacity": 80},
    {"dtype": "float32", "avgpool": True, "tol": 0.1, "capacity": 80, "bsize": (16, 18)},
    {"dtype": "bool", "shape": (3, 300, 500), "bsize": (2, 3), "capacity": 80000},
    {"dtype": "bool", "shape": (1, 400, 700), "bsize": (18, 18), "capacity": 1000},
    adapters=True,
)
def reduce_mask(lib, draw, dtype, capacity=None, shape=SHAPE, bsize=(6, 5), **pool):
    if capacity is None and lib.needs_capacity:
        capacity = 80
    stride = (max(1, bsize[0] - 2), max(1, bsize[1] - 2))
    count = tuple(-(-size // step) for size, step in zip(shape[1:], stride, strict=True))
    grid = {"bsize": bsize, "boffset": (-1, -1), "bstride": stride}

    def call(mask):
        active = lib.ops.reduce_mask(mask, count, capacity=capacity, **grid, **pool)
        return active.bin_counts, active.active_block_indices

    return lib.run(call, lib.array(draw(*shape, dtype=dtype)))


LAYOUTS = [
    {"data_format": data_format, "transpose": transpose}
    for data_format in ("NHWC", "NCHW")
    for transpose in (False, True)
]
AFFINE = [{"affine": True, "activation": name} for name in (None, "relu", "silu", "gelu")]


@calls(
    *options_of("dtype", ("uint8", "int32", "complex128", *FLOATS)),
    *options_of("channels", (1, 3, 24, 64), dtype="float16"),
    *({"grid": "overlap", **layout} for layout in LAYOUTS),
    *({"dtype": "float16", "channels": 8, **layout} for layout in LAYOUTS),
    *({"dtype": "float16", "channels": 8, **row} for row in AFFINE),
    {"dtype": "bfloat16", "grid": "overlap", **AFFINE[2], **LAYOUTS[1]},
    {"dtype": "float64", **AFFINE[3], **LAYOUTS[2]},
    {"activation": "relu", "into": True},
    adapters=True,
)
def sparse_gather(
    lib, draw, dtype="float32", channels=12, grid="tiles", data_format="NHWC", transpose=False,
    affine=False, activation=None, into=False,
):  # fmt: skip
    grid = TILES if grid == "tiles" else OVERLAP
    counts, rows = listed(lib, draw, grid)
    options = {**grid, "data_format": data_format, "transpose": transpose, "activation": activation}
    if into and lib.writes:
        shape = blocks_shape(grid, len(rows), channels, channels_last(data_format, transpose))
        options["out"] = lib.array(np.ones(shape, dtype))
    arrays = [image_of(draw, channels, dtype, data_format), *(2 * [None])]
    if affine:
        wide = "float64" if dtype == "float64" else "float32"
        arrays[1:] = draw(channels, dtype=wide), draw(channels, dtype=wide)
    arrays = [lib.array(array) for array in arrays if array is not None]

    def call(counts, rows, x, scale=None, shift=None):
        return lib.ops.sparse_gather(x, counts, rows, scale=scale, shift=shift, **options)

    return lib.run(call, counts, rows, *arrays)


@calls(
    *options_of("dtype", FLOATS),
    *({"grid": "overlap", **layout} for layout in LAYOUTS),
    *({"dtype": "float16", "channels": 8, "grid": "overlap", **row} for row in AFFINE[1:]),
    {"affine": True, "activation": "relu", **LAYOUTS[1]},
    adapters=True,
)
def sparse_gather_grad(
    lib, draw, dtype="float32", channels=12, grid="tiles", data_format="NHWC", transpose=False,
    affine=False, activation=None,
):  # fmt: skip
    grid = TILES if grid == "tiles" else OVERLAP
    counts, rows = listed(lib, draw, grid)
    shape = blocks_shape(grid, len(rows), channels, channels_last(data_format, transpose))
    options = {**grid, "data_format": data_format, "transpose": transpose, "activation": activation}
    grad = lib.array(draw(*shape, dtype=dtype))
    arrays = [lib.array(image_of(draw, channels, dtype, data_format))]
    if affine:
        wide = "float64" if dtype == "float64" else "float32"
        arrays += [lib.array(draw(channels, dtype=wide)) for _ in range(2)]
    if lib.ops is sb:
        scale, shift = arrays[1:] or (None, None)
        return sb.sparse_gather_grad(
            grad, counts, rows, arrays[0], scale=scale, shift=shift, **options
        )

    def call(x, scale=None, shift=None):
        return lib.ops.sparse_gather(x, counts, rows, scale=scale, shift=shift, **options)

    return lib.gradient(call, grad, *arrays)


@calls(
    *options_of("dtype", ("uint8", "int32", "complex64", *FLOATS)),
    *({"dtype": dtype, "grid": "overlap", "add": True, "atomic": True} for dtype in FLOATS),
    *({"grid": "overlap", **layout} for layout in LAYOUTS),
    *({"dtype": "float16", "channels": 8, "add": True, **layout} for layout in LAYOUTS),
    *({"dtype": "float16", "channels": 24, "into": into} for into in ("x", "new")),
    {"dtype": "int32", "grid": "overlap", "add": True, "atomic": True, "twice": True},
    adapters=True,
)
def sparse_scatter(
    lib, draw, dtype="float32", channels=12, grid="tiles", data_format="NHWC", transpose=False,
    add=False, atomic=False, into=None, twice=False,
):  # fmt: skip
    grid = TILES if grid == "tiles" else OVERLAP
    counts, rows = listed(lib, draw, grid)
    if twice:
        values = np.array(lib.to_numpy(rows))
        values[1] = values[0]
        rows = lib.array(values)
    shape = blocks_shape(grid, len(rows), channels, channels_last(data_format, transpose))
    blocks = lib.array(draw(*shape, dtype=dtype))
    x = lib.array(image_of(draw, channels, dtype, data_format))
    options = {**grid, "data_format": data_format, "transpose": transpose}
    options |= {"add": add, "atomic": atomic}
    if into and lib.writes:
        options["out"] = x if into == "x" else lib.array(lib.to_numpy(x))

    def call(blocks, counts, rows, x):
        return lib.ops.sparse_scatter(blocks, counts, rows, x, **options)

    return lib.run(call, blocks, counts, rows, x)


@calls(
    *options_of("dtype", FLOATS, grid="overlap"),
    *({"dtype": "float16", "channels": 8, **layout} for layout in LAYOUTS),
    {"grid": "overlap", "add": True},
    {"grid": "overlap", "transpose": True},
    adapters=True,
)
def sparse_scatter_grad(
    lib, draw, dtype="float32", channels=12, grid="tiles", data_format="NHWC", transpose=False,
    add=False,
):  # fmt: skip
    grid = TILES if grid == "tiles" else OVERLAP
    counts, rows = listed(lib, draw, grid)
    options = {**grid, "data_format": data_format, "transpose": transpose, "add": add}
    grad = lib.array(image_of(draw, channels, dtype, data_format))
    if lib.ops is sb:
        return sb.sparse_scatter_grad(grad, counts, rows, **options)
    shape = blocks_shape(grid, len(rows), channels, channels_last(data_format, transpose))
    blocks = lib.array(draw(*shape, dtype=dtype))
    x = lib.array(image_of(draw, channels, dtype, data_format))

    def call(blocks, x):
        return lib.ops.sparse_scatter(blocks, counts, rows, x, atomic=add, **options)

    return lib.gradient(call, grad, blocks, x)
