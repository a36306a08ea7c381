"""Pools, interpolation and affine maps of some channels of stacks, on the shim and on a GPU.

The results are those of contiguous copies, bit by bit. What else the stacks hold is NaN where it
is read, and stays where it is written. ``run_by`` makes of a launch what runs it with NumPy arrays.
"""

import math

import numpy as np

from sbnet_cupy.block_sparse.stack import stack_pool_launch
from sbnet_cupy.block_sparse.stack.stack_affine import PRELU, StackAffine, prepare_stack_affine
from sbnet_cupy.block_sparse.stack.stack_interpolate import prepare_stack_interpolate
from sbnet_cupy.core.compile import cpp_name
from support.exhaustive import thinned_pairs
from support.stack_cases import drawn
from support.strategies import BFLOAT16

FLOAT16, FLOAT32 = np.dtype("f2"), np.dtype("f4")
DTYPES = [FLOAT16, BFLOAT16, FLOAT32, np.dtype("f8")]
UNTOUCHED = 7
# Channels, and those ahead and behind in the stack of x and in that of the result; None is no part.
LAYOUTS = [
    (16, (8, 16), (24, 8)), (16, (8, 8), None), (16, None, (16, 0)),  # whole vectors of 16 bytes
    (8, (4, 12), (8, 8)), (16, (2, 4), (16, 0)), (16, (8, 0), (1, 3)), (8, (0, 1), None),
    (6, (6, 6), (2, 0)), (5, (3, 1), (5, 2)), (5, None, (0, 5)), (21, (1, 2), (21, 0)),
    (6, (2, 0), None), (2, (4, 2), (6, 2)),
]  # fmt: skip
WINDOWS = [((2, 2), 2, 0), ((3, 3), 1, 1), ((5, 5), 1, 2), ((2, 3), 2, 0)]
MODES = ["nearest", "bilinear", "bilinear corners"]
POOLS = thinned_pairs(5, ["max", "avg"], WINDOWS, DTYPES, LAYOUTS)
INTERPOLATIONS = [
    *thinned_pairs(5, MODES, [2, 3, 0.5], DTYPES[:3], LAYOUTS),
    ("bilinear", 2, FLOAT16, (5, (3, 1), (5, 2))),
    ("bilinear", 4, BFLOAT16, (6, (6, 6), None)),
    ("bilinear corners", 3, FLOAT32, (21, None, (21, 0))),
]
GLOBAL_POOLS = thinned_pairs(4, ["mean", "max"], DTYPES, [(8, 16), (16, 0), (1, 2)])
AFFINES = thinned_pairs(
    4, [(FLOAT16, FLOAT16), (BFLOAT16, BFLOAT16), (FLOAT32, FLOAT32), (FLOAT16, FLOAT32)],
    LAYOUTS, [False, True], [1, PRELU],
)  # fmt: skip


def widened(array, beside, fill):
    """Return a stack that has an array's channels among others; without ``beside`` a copy."""
    ahead, behind = beside or (0, 0)
    return np.pad(array, ((0, 0),) * 3 + ((ahead, behind),), constant_values=fill)


def part(stack, beside):
    """Return the memory of a stack from the first of its channels that are read on."""
    return stack if beside is None else stack.reshape(-1)[beside[0] :]


def pitch(channels, beside):
    return None if beside is None else channels + sum(beside)


def alignment(itemsize, *besides):
    return math.gcd(16, *(b[0] * itemsize for b in besides if b is not None))


def bits(array):
    return np.ascontiguousarray(array).view(np.uint8)


def compare(run_by, x, beside, shape, out_beside, table, prepare):
    """Assert that a launch on parts writes what one on copies does, and nothing else.

    ``prepare`` takes the fields of the sizes that tell how both lie.
    """
    channels, itemsize = x.shape[3], x.itemsize
    lists = table.bin_counts, table.active_block_indices, table.grid
    expected = np.full(shape, UNTOUCHED, x.dtype)
    run_by(prepare())(x, *lists, expected)
    wide = widened(np.full(shape, UNTOUCHED, x.dtype), out_beside, UNTOUCHED)
    lies = {
        "part_of": pitch(channels, beside), "out_part_of": pitch(channels, out_beside),
        "alignment": alignment(itemsize, beside, out_beside),
    }  # fmt: skip
    run = run_by(prepare(**lies))
    run(part(widened(x, beside, np.nan), beside), *lists, part(wide, out_beside))
    assert (expected[: table.count()] != UNTOUCHED).any()
    assert np.array_equal(bits(wide), bits(widened(expected, out_beside, UNTOUCHED)))


def sizes(x, table, block_out, **window):
    return stack_pool_launch.StackPool(
        cpp_name(x.dtype, "x"), x.itemsize, table.capacity, table.batch, table.grid.shape[1:],
        x.shape[3], table.block_size, table.image_size, block_out, **window,
    )  # fmt: skip


def check_pool(run_by, name, window, dtype, layout):
    (channels, beside, out_beside), (kernel, stride, pad) = layout, window
    _, table, x, _ = drawn(dtype, channels, (4, 2), (13, 9))
    block = tuple(b // stride for b in table.block_size)

    def prepare(**lies):
        pool = sizes(x, table, block, kernel=kernel, strides=(stride,) * 2, pads=((pad,) * 2,) * 2)
        pool = pool._replace(**lies)
        if name == "max":
            return stack_pool_launch.prepare_stack_max_pool(pool, clear_rows=False)
        return stack_pool_launch.prepare_stack_avg_pool(pool, False, None, clear_rows=False)

    compare(run_by, x, beside, (len(x), *block, channels), out_beside, table, prepare)


def check_interpolation(run_by, mode, factor, dtype, layout):
    """By whole lines, too, where vectors are narrow: those of copies may be wide."""
    channels, beside, out_beside = layout
    _, table, x, _ = drawn(dtype, channels, (4, 2), (13, 9))
    block = tuple(int(b * factor) for b in table.block_size)

    def prepare(**lies):
        pool = sizes(x, table, block)._replace(**lies)
        return prepare_stack_interpolate(pool, mode, (1 / factor,) * 2, clear_rows=False)

    compare(run_by, x, beside, (len(x), *block, channels), out_beside, table, prepare)
    pitches = [pitch(channels, its) or channels for its in (beside, out_beside)]
    whole = all(c * x.itemsize % 16 == 0 for c in (channels, *pitches))
    whole = whole and alignment(x.itemsize, beside, out_beside) == 16
    return mode != "nearest" and factor > 1 and not whole  # by lines


def check_global_pool(run_by, mode, dtype, beside):
    channels = 16 if beside[0] != 1 else 1  # vectors as wide as those of a copy
    _, table, x, _ = drawn(dtype, channels, (4, 2), (13, 9))
    lists = table.bin_counts, table.active_block_indices, table.grid
    pool = sizes(x, table, (1, 1))
    expected, y = np.full((2, table.batch, channels), UNTOUCHED, dtype)
    run_by(stack_pool_launch.prepare_stack_global_pool(pool, mode))(x, *lists, expected)
    pool = pool._replace(part_of=pitch(channels, beside), alignment=alignment(x.itemsize, beside))
    run = run_by(stack_pool_launch.prepare_stack_global_pool(pool, mode))
    run(part(widened(x, beside, np.nan), beside), *lists, y)
    assert np.array_equal(bits(y), bits(expected)) and (y != UNTOUCHED).any()


def check_affine(run_by, dtypes, layout, per_image, activation):
    """Of x, the residual and the result, of which the last two may have a wider dtype."""
    (dtype, wide), (channels, beside, added_beside) = dtypes, layout
    _, table, x, rng = drawn(dtype, channels, (4, 2), (13, 9))
    residual = drawn(dtype, channels, (4, 2), (13, 9), seed=1)[2].astype(wide)
    of_values = (table.batch, channels) if per_image else (channels,)
    scale, shift = (rng.standard_normal(of_values).astype(wide) for _ in range(2))
    slopes = rng.standard_normal(channels).astype(FLOAT32)
    element, other = (cpp_name(d, "x") for d in dtypes)
    affine = StackAffine(
        element, x.itemsize, other, other, other, other, len(x), table.batch, (4, 2), channels,
        per_image, activation,
    )  # fmt: skip
    given = scale, shift
    rest = slopes, table.bin_counts, table.active_block_indices
    expected, out_beside = np.full(x.shape, UNTOUCHED, wide), (added_beside or beside)[::-1]
    y = widened(expected, out_beside, UNTOUCHED)
    run_by(prepare_stack_affine(affine))(x, *given, residual, *rest, expected, None)
    affine = affine._replace(
        part_of=pitch(channels, beside), added_part_of=pitch(channels, added_beside),
        out_part_of=pitch(channels, out_beside),
        alignment=alignment(x.itemsize, beside, added_beside, out_beside),
    )  # fmt: skip
    x, residual = (
        part(widened(stack, its, np.nan), its)
        for stack, its in ((x, beside), (residual, added_beside))
    )
    run_by(prepare_stack_affine(affine))(x, *given, residual, *rest, part(y, out_beside), None)
    assert np.array_equal(bits(y), bits(widened(expected, out_beside, UNTOUCHED)))
    assert (expected != UNTOUCHED).any()
