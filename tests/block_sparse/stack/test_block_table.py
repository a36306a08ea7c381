"""block_table: the list of active blocks, and the row of the block at each place."""

import copy
import dataclasses
import pickle
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbnet_cupy import (
    ActiveBlocks,
    BlockTable,
    CapacityError,
    DTypeError,
    PackedWeights,
    ShapeError,
    block_table,
    reduce_mask,
    stack_conv2d,
    stack_from_image,
)
from support import stack_cases, strategies
from support.assertions import assert_same, to_numpy


def loop(count, rows, shape):
    """The row of each place, looking at one row after the other."""
    grid = np.full(shape, -1, np.int32)
    for number, row in enumerate(rows[: max(count, 0)].tolist()):
        if all(0 <= i < n for i, n in zip(row, shape, strict=True)):
            grid[tuple(row)] = number
    return grid


@stack_cases.FEW
@given(data=st.data())
def test_of_a_mask(xp, data):
    """The list is that of reduce_mask on blocks that cover the image; the grid is its inverse."""
    blocks = data.draw(stack_cases.blocks())
    table = blocks.table(xp.asarray)
    rows = np.array(blocks.rows, np.int32).reshape(-1, 3)
    assert table.count() == len(rows) and not table.overflowed and table.check() is table
    indices = np.concatenate([rows, np.full((blocks.spare, 3), -1, np.int32)])
    assert_same(to_numpy(table.active_block_indices), indices)
    assert_same(to_numpy(table.grid), loop(len(rows), rows, blocks.active.shape))
    assert (table.block_size, table.image_size) == (blocks.block, blocks.size)
    assert table.density() == pytest.approx(blocks.active.mean() if blocks.active.size else 0)


@stack_cases.FEW
@given(data=st.data())
def test_of_known_blocks(xp, data):
    """Corrupt rows and counts leave nothing in the grid; of equal rows the last stays."""
    grid = data.draw(strategies.grids())
    counts, rows = data.draw(strategies.actives(grid))
    shape = (grid.batch, *grid.bcount)
    active = ActiveBlocks(xp.asarray(counts), xp.asarray(rows), shape)
    table = block_table(active, grid.bsize)
    assert table.image_size == tuple(n * b for n, b in zip(shape[1:], grid.bsize, strict=True))
    assert_same(to_numpy(table.grid), loop(int(counts[0]), rows, shape))


def test_blocks_past_the_capacity_are_left_out(xp):
    table = block_table(xp.asarray(np.ones((1, 4, 4), bool)), 2, capacity=3)
    assert table.overflowed and table.count() == 4 and table.capacity == 3
    assert to_numpy(table.grid).tolist() == [[[0, 1], [2, -1]]]
    with pytest.raises(CapacityError, match="got 3 for 4 blocks"):
        table.check()
    assert block_table(xp.asarray(np.ones((1, 4, 4), bool)), 2, capacity=0).overflowed


def test_the_mask_of_one_image(xp):
    mask = np.zeros((5, 9), bool)
    mask[4, 8] = True
    table = block_table(xp.asarray(mask), 4)
    assert to_numpy(table.active_block_indices).tolist() == [[0, 1, 2]]
    assert (table.image_size, table.grid.shape) == ((5, 9), (1, 2, 3))


def test_the_mask_of_images_of_one_row():
    """With its channel last it is not one of images of one column."""
    mask = np.eye(5)[:, None, :, None]
    table = block_table(mask, 2)
    assert table.image_size == (1, 5) and table.grid.shape == (5, 1, 3)
    assert_same(table.grid, block_table(mask[..., 0], 2).grid)


def test_images_without_pixels(xp):
    for shape in ((0, 4, 4), (2, 0, 4), (2, 4, 0)):
        table = block_table(xp.asarray(np.ones(shape, bool)), 2)
        assert (table.count(), table.capacity, table.image_size) == (0, 0, shape[1:])
        assert table.density() == 0
        assert block_table(table.active, 2, image_size=shape[1:]).image_size == shape[1:]


def table_of(size, block=(4, 4)):
    blocks = [-(-n // b) for n, b in zip(size, block, strict=True)]
    arrays = (np.zeros(1, np.int32), np.zeros((0, 3), np.int32), np.zeros((1, *blocks), np.int32))
    return BlockTable(*arrays, block, size)


@pytest.mark.parametrize("size", [(8, 8), (7, 5), (1, 9), (4, 13)])
@pytest.mark.parametrize(
    "kernel, strides, padding, dilation",
    [(3, 2, 1, 1), (7, 2, 3, 1), (2, 2, 0, 1), (4, 4, 0, 1), (3, 1, 2, 2), (5, 2, "SAME", 1),
     (3, 1, "VALID", 1), ((1, 3), (1, 2), (0, 1), 1), (3, 4, ((1, 1), (0, 2)), 1)],
)  # fmt: skip
def test_stages_have_the_sizes_of_dense_layers(torch, size, kernel, strides, padding, dilation):
    table = table_of(size)
    after = table.after_conv(kernel, strides, padding, dilation)
    x = torch.zeros(1, 1, *size)
    if isinstance(padding, str):
        pairs = [[0, 0], [0, 0]]
        if padding == "SAME":
            for axis, n in enumerate(size):
                total = max((-(-n // strides) - 1) * strides + kernel - n, 0)
                pairs[axis] = [total // 2, total - total // 2]
    else:
        pairs = [(p, p) if isinstance(p, int) else p for p in
                 (padding if isinstance(padding, tuple) else (padding, padding))]  # fmt: skip
    x = torch.nn.functional.pad(x, (*pairs[1], *pairs[0]))
    kernel = (kernel, kernel) if isinstance(kernel, int) else kernel
    try:
        y = torch.nn.functional.conv2d(
            x, torch.zeros(1, 1, *kernel), stride=strides, dilation=dilation
        )
    except RuntimeError:  # the kernel does not fit
        assert 0 in after.image_size
        return
    assert after.image_size == tuple(y.shape[2:])
    assert after.grid is table.grid and after.active_block_indices is table.active_block_indices


def test_a_stage_has_its_own_sizes():
    table = table_of((9, 13), (8, 4))
    assert table.at_stride(2).image_size == (5, 7)
    assert table.at_stride((4, 1)).block_size == (2, 4)
    assert table.at_stride(2, (4, 6)).image_size == (4, 6)
    assert table.at_stride(2, 0).image_size == (0, 0)
    assert table.after_interpolate(2).block_size == (16, 8)
    assert table.at_stride(2).after_interpolate(2, (9, 13)).image_size == (9, 13)
    for factor in (np.float32(0.25), np.float16(0.25), np.float64(0.25), Fraction(1, 4)):
        assert table.after_interpolate(factor).block_size == (2, 1)
    assert table.after_transposed(2, 2, 0).image_size == (18, 26)
    assert table.after_transposed(3, 2, 1, output_padding=1).image_size == (18, 26)
    assert table.after_transposed(3, 2).image_size == (18, 26)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda t: t.after_conv(3, 3), "strides must divide the block size"),
        (lambda t: t.after_conv(3, 1, 3), "padding must give a result whose pixels all lie"),
        (lambda t: t.at_stride(8), "strides must divide the block size"),
        (lambda t: t.after_interpolate(1.1), "scale_factor must make whole blocks"),
        (lambda t: t.after_interpolate(2, (17, 16)), "size must give a result whose pixels"),
        (lambda t: t.after_interpolate(0), "scale_factor must be a positive number"),
        (lambda t: t.at((4, 4), (9, 8)), "image_size must give a result"),
        (lambda t: t.at((4, 0), (8, 8)), "block_size must be a positive integer or a pair of them"),
    ],
)
def test_stages_that_blocks_cannot_hold(call, message):
    with pytest.raises(ShapeError, match=message):
        call(table_of((8, 8)))


def test_a_mask_of_other_dimensions_is_refused():
    for shape in ((4,), (1, 1, 1, 4, 4)):
        with pytest.raises(ShapeError, match="mask"):
            block_table(np.ones(shape), 2)


def test_a_flag_is_true_or_false():
    with pytest.raises(ValueError, match="ceil_mode must be True or False, got 'x'"):
        table_of((8, 8)).after_conv(3, 1, 1, ceil_mode="x")


def test_a_table_is_made_of_arrays():
    good = table_of((8, 8))
    with pytest.raises(DTypeError, match="grid must be an array, got list"):
        BlockTable(good.bin_counts, good.active_block_indices, [[[0]]], (4, 4), (4, 4))
    with pytest.raises(ShapeError, match="bin_counts must have 1 dimensions"):
        BlockTable(good.grid, good.active_block_indices, good.grid, (4, 4), (8, 8))


def test_options_that_known_blocks_cannot_have():
    active = reduce_mask(np.ones((1, 4, 4)), (2, 2), bsize=2)
    for option in ({"tol": 0.5}, {"avgpool": True}, {"capacity": 3}):
        with pytest.raises(ValueError, match=next(iter(option))):
            block_table(active, 2, **option)
    with pytest.raises(ShapeError, match="image_size"):
        block_table(active, 2, image_size=(5, 4))
    assert block_table(active, 2, image_size=(3, 4)).image_size == (3, 4)
    assert block_table(active, 2, tol=0, avgpool=np.False_).count() == 4  # the defaults
    with pytest.raises(ValueError, match="image_size must be None for a mask"):
        block_table(np.ones((1, 4, 4)), 2, image_size=(4, 4))


def test_tables_pass_through_the_door(lib):
    """Other libraries' arrays: the table holds arrays of theirs, and works with their tensors."""
    from sbnet_cupy import stack_from_image, stack_halo

    mask = lib.make(np.ones((1, 4, 4), np.float32))
    table = block_table(mask, 2)
    assert type(table.grid) is type(mask)
    stack = stack_from_image(lib.make(np.ones((1, 4, 4, 2), np.float32)), table)
    assert type(stack) is type(mask) and stack.shape == (4, 2, 2, 2)
    assert stack_halo(stack, table, 1).shape == (4, 4, 4, 2)


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))]
)
def test_copies_of_what_was_used(duplicate):
    """What is known of arrays, such as their device and alignment, does not hold for copies."""
    table, weights = block_table(np.ones((1, 4, 4)), 2), PackedWeights(np.ones((3, 3, 1, 1)))
    x = stack_from_image(np.ones((1, 4, 4, 1)), table)
    expected = stack_conv2d(x, weights, table)
    same, same_weights = duplicate(table), duplicate(weights)
    assert vars(same).keys() == {field.name for field in dataclasses.fields(table)}
    assert not vars(same_weights).keys() & {"_device", "specs"}
    assert_same(stack_conv2d(x, same_weights, same), expected)
