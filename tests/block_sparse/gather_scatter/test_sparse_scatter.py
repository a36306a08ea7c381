"""sparse_scatter equals its loop oracle on every library, to the bit, row after row."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbnet_cupy import ShapeError, reduce_mask, sparse_gather, sparse_scatter, sparse_scatter_var
from support import oracles, strategies
from support.assertions import assert_same
from support.strategies import INT32, Grid

LAYOUTS = [(fmt, transpose) for fmt in ("NHWC", "NCHW") for transpose in (False, True)]
layouts = st.sampled_from(LAYOUTS)
channels = strategies.channels()


def shapes(grid, c, rows, data_format, transpose):
    """Shapes of the image and of a stack of ``rows`` blocks."""
    nhwc = data_format == "NHWC"
    image = (grid.batch, *grid.size, c) if nhwc else (grid.batch, c, *grid.size)
    stack = (rows, *grid.bsize, c) if nhwc != transpose else (rows, c, *grid.bsize)
    return image, stack


def repeats(active):
    """Whether the index table holds a row twice, which needs ``atomic`` even without overlap."""
    return len(np.unique(active[1], axis=0)) < len(active[1])


def check(xp, blocks, active, x, grid, atomic=False, **options):
    """Compare one call with the oracle, bit for bit, and see that nothing was modified."""
    atomic = atomic or repeats(active)
    originals = (blocks, *active, x)
    inputs = [xp.asarray(a) for a in originals]
    y = sparse_scatter(*inputs, **grid.blocks, **options, atomic=atomic)
    expected = oracles.sparse_scatter(*originals, **grid.blocks, **options)
    assert_same(y, xp.writable(expected), allow_nan=True)
    assert y is not inputs[3]
    for given_array, original in zip(inputs, originals, strict=True):
        assert_same(given_array, xp.writable(original), allow_nan=True)
    return y


@st.composite
def cases(draw, *, overlap=None, corrupt=None, add=False):
    """A grid, a stack, an index table, a base image and the layout options."""
    grid, c, layout = draw(strategies.grids(overlap=overlap)), draw(channels), draw(layouts)
    active = draw(strategies.actives(grid, corrupt=corrupt))
    image, stack = shapes(grid, c, len(active[1]), *layout)
    dtype = draw(strategies.dtypes())
    arrays = strategies.numbers if add else strategies.images
    blocks, x = draw(arrays(stack, dtype)), draw(arrays(image, dtype))
    return blocks, active, x, grid, {"data_format": layout[0], "transpose": layout[1]}


@given(case=cases())
def test_equals_the_loops(xp, case):
    *arguments, options = case
    check(xp, *arguments, **options)


@given(case=cases(overlap=True))
def test_the_later_row_wins_where_blocks_overlap(xp, case):
    *arguments, options = case
    check(xp, *arguments, **options)


@given(case=cases(overlap=False, corrupt=False, add=True), atomic=st.booleans())
def test_add_equals_the_loops(xp, case, atomic):
    *arguments, options = case
    check(xp, *arguments, **options, add=True, atomic=atomic)


@given(case=cases(add=True))
def test_atomic_add_is_the_sum_in_row_order_in_the_dtype_of_x(xp, case):
    """Overlap, repeated rows and corrupt rows: each sum is rounded as if added row after row."""
    *arguments, options = case
    check(xp, *arguments, **options, add=True, atomic=True)


@pytest.mark.parametrize("dtype", ["f4", "f2", "i4"])
@pytest.mark.parametrize("shuffled", [False, True])
def test_sixteen_blocks_on_every_pixel_add_up_in_row_order(xp, dtype, shuffled):
    """Large enough for an unstable sort, or a race, to show."""
    rng = np.random.default_rng(0)
    grid = Grid(2, (40, 48), (8, 8), (-3, -1), (2, 2), (21, 24))
    rows = np.argwhere(np.ones((2, 21, 24))).astype(np.int32)
    rows = rng.permutation(rows) if shuffled else rows
    image, stack = shapes(grid, 3, len(rows), "NHWC", False)
    blocks, x = (10 * rng.standard_normal(shape).astype(dtype) for shape in (stack, image))
    blocks, x = blocks.astype(dtype), x.astype(dtype)
    check(xp, blocks, (np.array([len(rows)], np.int32), rows), x, grid, atomic=True, add=True)
    check(xp, blocks, (np.array([len(rows)], np.int32), rows), x, grid)


@given(case=cases(overlap=True, add=True))
def test_overlapping_add_without_atomic_is_refused(xp, case):
    blocks, active, x, grid, options = case
    inputs = [xp.asarray(a) for a in (blocks, *active, x)]
    with pytest.raises(ShapeError, match="atomic"):
        sparse_scatter(*inputs, **grid.blocks, **options, add=True)
    with pytest.raises(ShapeError, match="atomic"):
        sparse_scatter_var(*inputs[:3], xp.writable(x), **grid.blocks, **options, add=True)


@pytest.mark.parametrize("dtype", strategies.DTYPES, ids=str)
@pytest.mark.parametrize(("data_format", "transpose"), LAYOUTS)
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("c", [1, 3, 32])
def test_every_dtype_and_layout(xp, dtype, data_format, transpose, add, c):
    grid = Grid(2, (9, 7), (4, 3), (-1, -2), (3, 3), (4, 4))
    rows = np.argwhere(np.ones((2, 4, 4))).astype(np.int32)
    image, stack = shapes(grid, c, len(rows), data_format, transpose)
    rng = np.random.default_rng(c)
    blocks, x = (rng.integers(0, 100, shape).astype(dtype) for shape in (stack, image))
    active = (np.array([len(rows)], np.int32), rows)
    options = {"data_format": data_format, "transpose": transpose, "add": add}
    check(xp, blocks, active, x, grid, atomic=add, **options)


@pytest.mark.parametrize("dtype", strategies.DTYPES[1:], ids=str)  # a bool has no spare bits
def test_overwriting_keeps_every_bit(xp, dtype):
    """Random bits: NaN payloads, -0 and denormals pass unchanged, in the blocks and the base."""
    rng = np.random.default_rng(0)
    grid = Grid(1, (8, 8), (3, 3), (0, 0), None, (3, 3))
    image, stack = shapes(grid, 5, 4, "NHWC", False)
    blocks, x = (
        np.frombuffer(rng.bytes(int(np.prod(s)) * dtype.itemsize), dtype).reshape(s)
        for s in (stack, image)
    )
    rows = np.array([[0, 0, 0], [0, 2, 2], [0, 1, 0], [0, 0, 2]], np.int32)
    check(xp, blocks, (np.array([4], np.int32), rows), x, grid)


def test_order_matters_in_the_sum_and_is_the_row_order(xp):
    """(1e8 + 1) - 1e8 is 0 in float32, 1 in any order that cancels first."""
    blocks = np.array([1, -1e8], np.float32).reshape(2, 1, 1, 1)
    x = np.full((1, 1, 1, 1), 1e8, np.float32)
    active = (np.array([2], np.int32), np.zeros((2, 3), np.int32))
    y = check(xp, blocks, active, x, Grid(1, (1, 1), (1, 1), (0, 0), None, (1, 1)), True, add=True)
    assert xp.to_numpy(y).item() == 0.0


@given(case=cases())
def test_out_receives_everything_and_is_returned(xp, case):
    blocks, active, x, grid, options = case
    inputs = [xp.asarray(a) for a in (blocks, *active, x)]
    expected = oracles.sparse_scatter(blocks, *active, x, **grid.blocks, **options)
    out = xp.writable(np.ones_like(x))
    keywords = grid.blocks | options | {"atomic": repeats(active)}
    assert sparse_scatter(*inputs, **keywords, out=out) is out
    assert_same(out, xp.writable(expected), allow_nan=True)
    assert_same(inputs[3], xp.writable(x), allow_nan=True)


@given(case=cases(add=True), add=st.booleans(), variable=st.booleans())
def test_in_place(xp, case, add, variable):
    """``out=x`` and ``sparse_scatter_var`` write x itself, and only where blocks lie."""
    blocks, active, x, grid, options = case
    target = xp.writable(x)
    inputs = [xp.asarray(a) for a in (blocks, *active)]
    expected = oracles.sparse_scatter(blocks, *active, x, **grid.blocks, **options, add=add)
    keywords = grid.blocks | options | {"add": add, "atomic": True}
    if variable:
        y = sparse_scatter_var(*inputs, target, **keywords)
    else:
        y = sparse_scatter(*inputs, target, **keywords, out=target)
    assert y is target
    assert_same(target, xp.writable(expected))
    assert_same(inputs[0], xp.writable(blocks))


def test_out_may_be_part_of_a_larger_array_and_only_that_part_changes(xp):
    whole = xp.writable(np.full((5, 4, 4, 3), 7, np.float32))
    blocks = np.ones((1, 3, 3, 3), np.float32)
    rows, count = np.array([[0, 1, 1]], np.int32), np.array([1], np.int32)
    inputs = [xp.asarray(a) for a in (blocks, count, rows)]
    sparse_scatter_var(*inputs, whole[2:3], bsize=3)
    expected = np.full((5, 4, 4, 3), 7, np.float32)
    expected[2, 3:, 3:] = 1
    assert_same(whole, xp.writable(expected))


FAR = [INT32.max, INT32.min, -1, -(2**20), 2**20, 1000]


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("far", FAR)
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("step", [2, 3, 2**31 - 1])
def test_a_corrupt_row_is_dropped(xp, add, far, axis, step):
    rows = np.array([[0, 0, 0], [0, 0, 0], [1, 0, 0]], np.int32)
    rows[1, axis] = far
    blocks = np.arange(1, 25, dtype=np.int16).reshape(3, 2, 2, 2)
    x = np.zeros((2, 4, 4, 2), np.int16)
    for offset in (0, -far * step, INT32.max, -INT32.max):
        if abs(offset) > INT32.max:
            continue
        boffset = (0, offset) if axis == 2 else (offset, 0)
        grid = Grid(2, (4, 4), (2, 2), boffset, (step, step), (2, 2))
        check(xp, blocks, (np.array([3], np.int32), rows), x, grid, add=add, atomic=True)


@pytest.mark.parametrize("count", [INT32.min, -1, 0, 1, 2, 3, 4, INT32.max])
@pytest.mark.parametrize("add", [False, True])
def test_rows_at_or_past_the_count_are_dropped(xp, count, add):
    rows = np.array([[0, 0, 0], [0, 1, 1], [0, 0, 1]], np.int32)
    blocks, x = np.ones((3, 2, 2, 1), np.float16), np.zeros((1, 4, 4, 1), np.float16)
    grid = Grid(1, (4, 4), (2, 2), (0, 0), None, (2, 2))
    y = check(xp, blocks, (np.array([count], np.int32), rows), x, grid, add=add)
    assert xp.to_numpy(y).sum() == 4 * min(max(count, 0), 3)


@pytest.mark.parametrize(
    ("shape", "rows"),
    [((0, 4, 4, 3), 2), ((1, 0, 4, 3), 2), ((1, 4, 0, 3), 2), ((1, 4, 4, 0), 2), ((1, 4, 4, 3), 0)],
    ids=str,
)
@pytest.mark.parametrize(("data_format", "transpose"), LAYOUTS)
@pytest.mark.parametrize("add", [False, True])
def test_empty_inputs(xp, shape, rows, data_format, transpose, add):
    active = (np.array([rows], np.int32), np.zeros((rows, 3), np.int32))
    options = {"data_format": data_format, "transpose": transpose, "add": add}
    for boffset in (0, 0), (-1, -1):  # a block may straddle an axis of no pixels
        grid = Grid(shape[0], shape[1:3], (2, 3), boffset, None, (2, 2))
        image, stack = shapes(grid, shape[3], rows, data_format, transpose)
        blocks, x = np.ones(stack, np.float32), np.full(image, 2, np.float32)
        check(xp, blocks, active, x, grid, atomic=True, **options)


@given(case=cases(overlap=False, corrupt=False))
def test_gather_undoes_scatter_and_scatter_undoes_gather(xp, case):
    blocks, active, x, grid, options = case
    blocks, *active, x = (xp.asarray(a) for a in (blocks, *active, x))
    options = options | grid.blocks
    same = sparse_scatter(sparse_gather(x, *active, **options), *active, x, **options)
    assert_same(same, xp.writable(xp.to_numpy(x)), allow_nan=True)
    y = sparse_scatter(blocks, *active, x, **options)
    back = sparse_gather(y, *active, **options)
    again = sparse_scatter(back, *active, x, **options)
    assert_same(again, y, allow_nan=True)


@pytest.mark.parametrize(("data_format", "transpose"), LAYOUTS)
def test_all_blocks_of_a_partition_round_trip(xp, data_format, transpose):
    grid = Grid(2, (12, 9), (4, 3), (0, 0), None, (3, 3))
    image, stack = shapes(grid, 6, 18, data_format, transpose)
    blocks = np.random.default_rng(0).random(stack, np.float32)
    active = reduce_mask(xp.asarray(np.ones((2, 12, 9), bool)), (3, 3), **grid.blocks)
    options = {"data_format": data_format, "transpose": transpose} | grid.blocks
    y = sparse_scatter(xp.asarray(blocks), *active, xp.writable(np.zeros(image, "f4")), **options)
    assert_same(sparse_gather(y, *active, **options), xp.writable(blocks))


@given(case=cases(add=True), add=st.booleans())
def test_twice_gives_the_same_bits(xp, case, add):
    blocks, active, x, grid, options = case
    inputs = [xp.asarray(a) for a in (blocks, *active, x)]
    keywords = grid.blocks | options | {"add": add, "atomic": True}
    first, second = (sparse_scatter(*inputs, **keywords) for _ in range(2))
    assert_same(first, second)


@pytest.mark.gpu
def test_an_image_of_more_than_two_to_the_31_elements(require):
    """Offsets are 64-bit: gather from and scatter to the far end of a 2.3 GB image of int8."""
    cupy = require("gpu")
    size, c = 24000, 4  # 2.3e9 elements
    if cupy.cuda.Device().mem_info[0] < 3 * size * size * c:
        pytest.skip("needs 7 GB of free GPU memory")
    x = cupy.zeros((1, size, size, c), cupy.int8)
    last = size // 16 - 1
    rows = np.array([[0, 0, 0], [0, last, last], [0, last, 0], [0, last // 2, 7]], np.int32)
    active = (cupy.array([4], cupy.int32), cupy.asarray(rows))
    blocks = cupy.asarray(
        np.random.default_rng(0).integers(-99, 99, (4, 16, 16, c)).astype(np.int8)
    )
    assert sparse_scatter_var(blocks, *active, x, bsize=16) is x
    for row, (_, hi, wi) in zip(blocks, rows.tolist(), strict=True):
        assert_same(x[0, 16 * hi : 16 * hi + 16, 16 * wi : 16 * wi + 16].copy(), row)
    assert int(cupy.count_nonzero(x)) == int(cupy.count_nonzero(blocks))
    assert_same(sparse_gather(x, *active, bsize=16), blocks)
    y = sparse_scatter(blocks, *active, x, bsize=16, add=True)
    assert_same(sparse_gather(y, *active, bsize=16), (blocks + blocks).astype(cupy.int8))
    del x, y
    cupy.get_default_memory_pool().free_all_blocks()


@pytest.mark.parametrize("data_format", ["NHWC", "NCHW"])
@pytest.mark.parametrize("add", [False, True], ids=["write", "add"])
@pytest.mark.parametrize("c", [3, 256])
def test_layouts_change_in_rows_with_gaps(data_format, add, c):
    """Blocks so large that a gap cuts a copy in two, and so many channels that it goes in steps."""
    rng = np.random.default_rng(6)
    x = rng.random((1, 30, 30, c), np.float32)
    indices = np.array([[0, 0, 1], [0, 0, 2], [7, 0, 0], [0, 1, 3], [0, 2, 0], [0, 3, 1]], np.int32)
    where = np.array([len(indices)], np.int32), indices
    blocks = rng.random((len(indices), 8, 8, c), np.float32)
    expected = sparse_scatter(blocks, *where, x, bsize=8, add=add)
    if data_format == "NHWC":
        blocks = np.ascontiguousarray(blocks.transpose(0, 3, 1, 2))
    else:
        x, expected = (np.ascontiguousarray(a.transpose(0, 3, 1, 2)) for a in (x, expected))
    options = {"bsize": 8, "add": add, "transpose": True, "data_format": data_format}
    assert_same(sparse_scatter(blocks, *where, x, **options), expected)
