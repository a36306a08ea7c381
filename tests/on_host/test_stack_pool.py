"""Pooling of a stack by its CUDA kernels, on the shim: the NumPy bodies' results."""

import math

import numpy as np
import pytest

import sbnet_cupy as sb
from sbnet_cupy.block_sparse.stack import stack_pool_launch
from sbnet_cupy.block_sparse.stack.pooling import resolve_pool
from sbnet_cupy.core.arrays import compute_dtype
from sbnet_cupy.core.compile import cpp_name
from support import stack_cases
from support.assertions import assert_close, assert_same
from support.exhaustive import thinned_pairs
from support.stack_as_on_gpu import by_numpy, in_the_image
from support.stack_cases import drawn
from support.strategies import BFLOAT16

FLOAT16, FLOAT32 = np.dtype("f2"), np.dtype("f4")
DTYPES = [FLOAT16, BFLOAT16, FLOAT32, np.dtype("f8")]
POOLS = [
    # kernel, strides, padding, ceil_mode
    (3, 2, 1, False), (2, 2, 0, False), (3, 1, 1, False), ((5, 1), (4, 1), ((2, 1), (0, 0)), True),
]  # fmt: skip
SIZES = [(8, (8, 8)), (3, (4, 2)), (17, (4, 4))]


@pytest.mark.parametrize(
    "pool, dilation, dtype, sizes", thinned_pairs(6, POOLS, [1, 2], DTYPES, SIZES), ids=str
)
def test_max_pool(on_shim, pool, dilation, dtype, sizes):
    (kernel, strides, padding, ceil_mode), (channels, block) = pool, sizes
    _, table, x, _ = drawn(dtype, channels, block, (13, 9))
    window = {"strides": strides, "padding": padding, "dilation": dilation, "ceil_mode": ceil_mode}
    after = table.after_conv(kernel, **window)
    expected = by_numpy(sb.stack_max_pool, x, table, kernel=kernel, **window)
    y = sb.stack_max_pool(x, table, kernel=kernel, **window)
    assert [name for _, name in on_shim] == ["stack_max_pool"]
    assert not y[table.count() :].any()
    assert_same(in_the_image(y, after), in_the_image(expected, after), signed_zero=False)


@pytest.mark.parametrize("kernel", [(2, 2), (3, 3), (3, 6)])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_max_pool_of_images_with_zeros_around(on_shim, dtype, kernel):
    """Numbers below 0 at the border of the image are less than what is around it."""
    _, table, x, _ = drawn(dtype, 8, (4, 2), (13, 9))
    x = -abs(x)
    padding = tuple((k // 2, (k - 1) // 2) for k in kernel)
    image = by_numpy(sb.stack_to_image, x, table)
    wide = np.pad(image.astype(np.float64), ((0, 0), *padding, (0, 0)))
    shape = wide.shape[1] - kernel[0] + 1, wide.shape[2] - kernel[1] + 1
    taps = [wide[:, r : r + shape[0], s : s + shape[1]] for r, s in np.ndindex(kernel)]
    expected = by_numpy(sb.stack_from_image, np.max(taps, axis=0), table)
    found = resolve_pool(x, table, kernel, 1, padding, 1, False)
    pool = stack_pool_launch.StackPool(
        cpp_name(dtype, "x"), dtype.itemsize, table.capacity, table.batch, table.grid.shape[1:], 8,
        (4, 2), table.image_size, (4, 2), found.kernel, found.strides, found.dilation, found.pads,
    )  # fmt: skip
    y = np.full(x.shape, 7, dtype)
    run = stack_pool_launch.prepare_stack_max_pool(pool, zeros_around=True)
    run(x, table.bin_counts, table.active_block_indices, table.grid, y)
    actual, expected = (in_the_image(a, table) for a in (y.astype(np.float64), expected))
    assert_same(actual, expected, signed_zero=False)


@pytest.mark.parametrize("kernel", [(3, 3), (5, 5), (9, 1), (1, 10), (9, 13)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_windows_over_many_blocks(on_shim, kernel, dtype):
    """Each pixel is a block: the pixels of a window are loaded some at a time."""
    _, table, x, _ = drawn(dtype, 8, (1, 1), (13, 9))
    window = {"kernel": kernel, "strides": 1, "padding": tuple(k // 2 for k in kernel)}
    if kernel == (1, 10):
        window["padding"] = ((0, 0), (5, 4))
    expected = by_numpy(sb.stack_max_pool, x, table, **window)
    y = sb.stack_max_pool(x, table, **window)
    assert_same(in_the_image(y, table), in_the_image(expected, table), signed_zero=False)
    ones = abs(np.sign(x))
    counts = by_numpy(sb.stack_avg_pool, ones, table, divisor=1, **window)
    y = sb.stack_avg_pool(ones, table, divisor=1, **window)
    assert_same(in_the_image(y, table), in_the_image(counts, table), signed_zero=False)
    assert [name for _, name in on_shim] == ["stack_max_pool", "stack_avg_pool"]


COUNTINGS = [{}, {"count_include_pad": False}, {"divisor": 3}]


@pytest.mark.parametrize(
    "pool, counting, dtype, sizes", thinned_pairs(6, POOLS, COUNTINGS, DTYPES, SIZES), ids=str
)
def test_avg_pool(on_shim, pool, counting, dtype, sizes):
    (kernel, strides, padding, ceil_mode), (channels, block) = pool, sizes
    _, table, x, _ = drawn(dtype, channels, block, (13, 9))
    window = {"strides": strides, "padding": padding, "ceil_mode": ceil_mode}
    after = table.after_conv(kernel, **window)
    options = {"kernel": kernel, **window, **counting}
    wide = x.astype(np.float64)
    expected, size = (
        in_the_image(by_numpy(sb.stack_avg_pool, a, table, **options), after)
        for a in (wide, abs(wide))
    )
    y = sb.stack_avg_pool(x, table, **options)
    assert [name for _, name in on_shim] == ["stack_avg_pool"]
    assert not y[table.count() :].any()
    assert_close(in_the_image(y, after), expected, terms=10, magnitude=size,
                 dtype=stack_cases.sum_dtype(dtype))  # fmt: skip


IMAGES = [
    # channels, block, image
    (8, (8, 8), (13, 9)), (3, (4, 2), (13, 9)), (72, (1, 1), (7, 5)), (16, (4, 4), (90, 70)),
    (520, (2, 2), (5, 4)),
]  # fmt: skip


@pytest.mark.parametrize(
    "mode, dtype, sizes, shuffled",
    thinned_pairs(8, ["mean", "sum", "max"], DTYPES, IMAGES, [False, True]),
    ids=str,
)
def test_global_pool(on_shim, mode, dtype, sizes, shuffled):
    """One part of an image and several; rows in the order of the list, or in any."""
    channels, block, size = sizes
    _, table, x, rng = drawn(dtype, channels, block, size)
    if shuffled:
        order = rng.permutation(table.count())
        x[: len(order)] = x[order]
        table.active_block_indices[: len(order)] = table.active_block_indices[order]
        places = tuple(table.active_block_indices[: len(order)].T)
        table.grid[places] = np.arange(len(order), dtype=np.int32)
    wide = x.astype(np.float64)
    expected, magnitude = (
        by_numpy(sb.stack_global_pool, a, table, mode=mode) for a in (wide, abs(wide))
    )
    y = sb.stack_global_pool(x, table, mode=mode)
    several = block == (4, 4)
    assert [name for _, name in on_shim] == (
        ["stack_global_pool"] + ["stack_global_pool_parts"] * several
    )
    if mode == "max":
        assert_same(y.astype(np.float64), expected, signed_zero=False)
    else:
        assert_close(y, expected, terms=size[0] * size[1] + 1, magnitude=magnitude,
                     dtype=stack_cases.sum_dtype(dtype))  # fmt: skip


def test_global_maximum_of_full_images_may_be_negative(on_shim):
    x = np.full((4, 2, 2, 8), -2, FLOAT32)
    x[0, 1, 1, 3] = np.nan
    table = sb.block_table(np.ones((1, 4, 4), bool), 2)
    y = sb.stack_global_pool(x, table, mode="max")
    assert_same(y, np.where(np.arange(8) == 3, np.nan, -2)[None].astype(FLOAT32), allow_nan=True)


def test_nan_wins_in_max_pooling(on_shim):
    x = np.zeros((4, 2, 2, 8), FLOAT32)
    x[0, 1, 1, 3] = np.nan
    table = sb.block_table(np.ones((1, 4, 4), bool), 2)
    y = sb.stack_max_pool(x, table, kernel=2)
    assert np.argwhere(np.isnan(y)).tolist() == [[0, 0, 0, 3]]


@pytest.mark.parametrize(
    "pool, dilation, dtype, sizes", thinned_pairs(6, POOLS, [1, 2], DTYPES, SIZES), ids=str
)
def test_gradient_of_max_pool(on_shim, pool, dilation, dtype, sizes):
    """Maxima and their choice by one kernel, the gradient from the choice by another."""
    (kernel, strides, padding, ceil_mode), (channels, block) = pool, sizes
    blocks, table, x, rng = drawn(dtype, channels, block, (13, 9))
    x = np.round(x * 2) if dtype != BFLOAT16 else x  # the first of several
    window = {"strides": strides, "padding": padding, "dilation": dilation, "ceil_mode": ceil_mode}
    after = table.after_conv(kernel, **window)
    grad = blocks.stack(blocks.images(after, channels, rng, dtype), after)
    expected = by_numpy(sb.stack_max_pool, x, table, kernel=kernel, **window)
    wide = (t.astype(compute_dtype(dtype)) for t in (grad, x))
    gradient = by_numpy(sb.stack_max_pool_grad, *wide, table, kernel=kernel, **window)
    found = resolve_pool(x, table, kernel, strides, padding, dilation, ceil_mode)
    pool = stack_pool_launch.StackPool(
        cpp_name(dtype, "x"), dtype.itemsize, table.capacity, table.batch, table.grid.shape[1:],
        channels, block, table.image_size, after.block_size, found.kernel, found.strides,
        found.dilation, found.pads, image_out=after.image_size,
    )  # fmt: skip
    lists = table.bin_counts, table.active_block_indices, table.grid
    y = np.full((len(x), *after.block_size, channels), 7, dtype)
    choice, dx = np.full(y.shape, 99, np.uint8), np.full(x.shape, 7, dtype)
    stack_pool_launch.prepare_stack_max_pool_choice(pool)(x, *lists, y, choice)
    assert not y[table.count() :].any()
    assert_same(in_the_image(y, after), in_the_image(expected, after), signed_zero=False)
    stack_pool_launch.prepare_stack_max_pool_grad(pool)(grad, choice, *lists, dx)
    size = by_numpy(sb.stack_max_pool_grad, abs(np.nan_to_num(grad)).astype(compute_dtype(dtype)),
                    x.astype(compute_dtype(dtype)), table, kernel=kernel, **window)  # fmt: skip
    assert_close(dx, gradient.astype(np.float64), terms=math.prod(found.kernel), magnitude=size,
                 dtype=stack_cases.sum_dtype(dtype))  # fmt: skip
