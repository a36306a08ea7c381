"""reduce_mask equals its loop oracle on every library; ActiveBlocks is what it says it is."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sbnet_cupy import ActiveBlocks, CapacityError, ShapeError, block_table, reduce_mask
from sbnet_cupy.block_sparse.mask import listing
from sbnet_cupy.core.operator import clear_plans
from support import oracles, strategies
from support.assertions import assert_same


def check(xp, mask, grid, **options):
    """Compare one call with the oracle, bit for bit, and see that nothing was modified."""
    given_mask = xp.asarray(mask)
    active = reduce_mask(given_mask, grid.bcount, **grid.blocks, **options)
    count, rows = oracles.reduce_mask(mask, grid.bcount, **grid.blocks, **options)
    assert_same(active.bin_counts, xp.writable(np.array([count], np.int32)))
    assert_same(active.active_block_indices, xp.writable(rows))
    assert_same(given_mask, xp.writable(mask), allow_nan=True)
    return active


grids = strategies.grids()
capacities = st.none() | st.integers(0, 40)
Grid = strategies.Grid


@given(data=st.data(), grid=grids, tol=strategies.tols(), avgpool=st.booleans(), k=capacities)
def test_equals_the_loops(xp, data, grid, tol, avgpool, k):
    mask = data.draw(strategies.masks(grid))
    check(xp, mask, grid, tol=tol, avgpool=avgpool, capacity=k)


@given(data=st.data(), grid=strategies.grids(overlap=True), avgpool=st.booleans())
def test_equals_the_loops_with_overlap(xp, data, grid, avgpool):
    check(xp, data.draw(strategies.masks(grid)), grid, avgpool=avgpool)


@pytest.mark.parametrize("dtype", strategies.MASK_DTYPES, ids=str)
@pytest.mark.parametrize("avgpool", [False, True])
def test_every_mask_dtype(xp, dtype, avgpool):
    rng = np.random.default_rng(0)
    mask = (rng.random((2, 13, 11)) < 0.15).astype(dtype)
    check(xp, mask, Grid(2, (13, 11), (4, 3), (-1, 0), (3, 3), (4, 4)), avgpool=avgpool, tol=0.2)


@pytest.mark.parametrize("dtype", strategies.FLOATS, ids=str)
@pytest.mark.parametrize("avgpool", [False, True])
def test_strictly_greater_than_a_tol_of_the_mask_s_own_precision(xp, dtype, avgpool):
    """0.1 as float16 is not 0.1: a mask that holds the rounded value is not above it."""
    tol = 0.1
    same = np.full((1, 2, 2), tol).astype(dtype)
    step = np.asarray(2.0**-4, dtype) * np.asarray(ml_dtypes.finfo(dtype).eps, dtype)
    above = (same + step).astype(dtype)
    one = Grid(1, (2, 2), (2, 2), (0, 0), None, (1, 1))
    assert check(xp, same, one, tol=tol, avgpool=avgpool).count() == 0
    assert check(xp, above, one, tol=tol, avgpool=avgpool).count() == 1


@pytest.mark.parametrize("dtype", strategies.FLOATS, ids=str)
@pytest.mark.parametrize("avgpool", [False, True])
def test_nan_is_not_above_any_tol(xp, dtype, avgpool):
    mask = np.full((1, 4, 4), np.nan, dtype)
    grid = Grid(1, (4, 4), (2, 2), (0, 0), None, (2, 2))
    assert check(xp, mask, grid, tol=-1.0, avgpool=avgpool).count() == 0
    mask[0, 0, 0] = 5
    mask[0, 3, 3] = np.inf
    mask[0, 3, 2] = mask[0, 2, 2:] = 0
    active = check(xp, mask, grid, avgpool=avgpool)
    assert active.count() == (1 if avgpool else 2)  # NaN spoils an average, not a maximum


@pytest.mark.parametrize("special", [[np.inf], [-np.inf], [np.nan], [np.inf, -np.inf]], ids=str)
def test_an_infinite_pixel_touches_only_the_blocks_that_hold_it(xp, special):
    """A running sum over the image would carry it to every later block."""
    mask = np.ones((2, 12, 12), np.float32)
    mask[0, 5, 5 : 5 + len(special)] = special
    check(xp, mask, Grid(2, (12, 12), (3, 3), (0, 0), (2, 2), (6, 6)), avgpool=True, tol=0.9)


def test_avgpool_divides_by_the_whole_block_at_the_border(xp):
    mask = np.ones((1, 3, 3), np.uint8)
    grid = Grid(1, (3, 3), (2, 2), (0, 0), None, (2, 2))
    active = check(xp, mask, grid, avgpool=True, tol=0.49)  # 1, 1/2, 1/2, 1/4
    assert xp.to_numpy(active.active_block_indices).tolist() == [[0, 0, 0], [0, 0, 1], [0, 1, 0]]


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint64, np.float16], ids=str)
def test_avgpool_does_not_overflow_the_mask_s_dtype(xp, dtype):
    """40 x 40 pixels of the largest value: the sum needs more room than the mask has."""
    top = np.finfo(dtype).max if np.dtype(dtype).kind == "f" else np.iinfo(dtype).max
    mask = np.full((1, 40, 40), top, dtype)
    grid = Grid(1, (40, 40), (40, 40), (0, 0), None, (1, 1))
    assert check(xp, mask, grid, avgpool=True, tol=float(top) / 2).count() == 1
    assert check(xp, mask, grid, avgpool=True, tol=float(top)).count() == 0


@pytest.mark.parametrize("avgpool", [False, True])
@pytest.mark.parametrize("tol", [-1.0, 0.0])
def test_a_block_wholly_outside(xp, avgpool, tol):
    """Its maximum does not exist, so it is inactive; its average is 0."""
    mask = np.ones((1, 2, 2), np.float32)
    grid = Grid(1, (2, 2), (2, 2), (-4, 0), (4, 4), (3, 2))
    active = check(xp, mask, grid, avgpool=avgpool, tol=tol)
    assert active.count() == (6 if avgpool and tol < 0 else 1)


@pytest.mark.parametrize("tol", [1e6, 1e300, np.inf])
def test_a_tol_beyond_the_mask_s_range_makes_no_block_active_and_no_warning(xp, tol):
    mask = np.full((1, 4, 4), np.inf, np.float16)
    mask[0, :2] = 60000
    check(xp, mask, Grid(1, (4, 4), (2, 2), (0, 0), None, (2, 2)), tol=tol)


@pytest.mark.parametrize(
    ("dtype", "value", "tol", "count"),
    [
        ("u8", 2**63, 2.0**63 - 2**10, 1), ("u8", 2**63, 2.0**63, 0), ("u8", 2**64 - 1, 2.0**64, 0),
        ("u8", 2**53 + 1, 2.0**53, 1), ("i8", 2**63 - 1, 2.0**63, 0), ("i8", -(2**63), -1e300, 1),
        ("i8", -(2**63), -(2.0**63), 0), ("u1", 255, 255, 0), ("u1", 255, 254.5, 1),
        ("u1", 0, -0.5, 1), ("i1", -128, -128.5, 1), ("?", 1, 0.99, 1), ("?", 1, 1, 0),
    ],
)  # fmt: skip
def test_integers_compare_exactly(xp, dtype, value, tol, count):
    mask = np.full((1, 2, 2), value, dtype)
    assert check(xp, mask, Grid(1, (2, 2), (2, 2), (0, 0), None, (1, 1)), tol=tol).count() == count


def test_one_block_larger_than_the_image(xp):
    mask = np.zeros((2, 3, 5), bool)
    mask[1, 2, 4] = True
    active = check(xp, mask, Grid(2, (3, 5), (64, 300), (-20, -30), None, (1, 1)))
    assert xp.to_numpy(active.active_block_indices).tolist() == [[1, 0, 0]]


@pytest.mark.parametrize(
    ("batch", "size", "bcount"),
    [(0, (4, 4), (2, 2)), (1, (0, 4), (2, 2)), (1, (4, 0), (2, 2)), (2, (4, 4), (0, 3))],
    ids=str,
)
@pytest.mark.parametrize("avgpool", [False, True])
@pytest.mark.parametrize("capacity", [None, 0, 3])
def test_nothing_to_reduce(xp, batch, size, bcount, avgpool, capacity):
    grid = Grid(batch, size, (2, 2), (0, 0), None, bcount)
    active = check(xp, np.ones((batch, *size)), grid, avgpool=avgpool, capacity=capacity)
    assert active.count() == 0
    assert active.active_block_indices.shape == (capacity or 0, 3)


@given(data=st.data(), grid=grids)
def test_rows_are_in_raster_order_and_all_different(xp, data, grid):
    mask = data.draw(strategies.masks(grid))
    active = reduce_mask(xp.asarray(mask), grid.bcount, **grid.blocks)
    rows = [tuple(row) for row in xp.to_numpy(active.active_block_indices).tolist()]
    assert rows == sorted(set(rows))


@given(data=st.data(), grid=grids, avgpool=st.booleans())
def test_twice_gives_the_same_bits(xp, data, grid, avgpool):
    mask = xp.asarray(data.draw(strategies.masks(grid)))
    first, second = (
        reduce_mask(mask, grid.bcount, **grid.blocks, avgpool=avgpool) for _ in range(2)
    )
    assert_same(first.active_block_indices, second.active_block_indices)
    assert_same(first.bin_counts, second.bin_counts)


@given(data=st.data(), grid=grids, capacity=st.integers(0, 60))
def test_capacity_only_cuts_or_fills(xp, data, grid, capacity):
    mask = xp.asarray(data.draw(strategies.masks(grid)))
    exact = reduce_mask(mask, grid.bcount, **grid.blocks)
    sized = reduce_mask(mask, grid.bcount, **grid.blocks, capacity=capacity)
    rows, count = xp.to_numpy(exact.active_block_indices), exact.count()
    kept = xp.to_numpy(sized.active_block_indices)
    assert kept.shape == (capacity, 3)
    assert (kept[:count] == rows[:capacity]).all() and (kept[count:] == -1).all()
    assert_same(sized.bin_counts, exact.bin_counts)  # the true count, overflow or not
    assert bool(sized.overflowed) == (count > capacity)


def test_a_channel_may_come_first_as_it_may_come_last(xp):
    mask = xp.asarray(np.random.default_rng(1).random((2, 10, 12)) < 0.03)
    first = mask[:, None]
    options = {"block_count": (4, 4), "bsize": 3}
    active = reduce_mask(mask, **options)
    assert 0 < active.count() < 32
    for other in (first, mask[..., None]):
        assert_same(reduce_mask(other, **options).active_block_indices, active.active_block_indices)
        listed = ActiveBlocks.from_mask(other, bsize=3, ksize=3)
        assert listed.grid == active.grid
        assert_same(listed.active_block_indices, active.active_block_indices)
        table = block_table(other, 3)
        assert table.image_size == (10, 12)
        assert_same(table.active_block_indices, active.active_block_indices)
        assert_same(active.sites(3, other).indices, active.sites(3, mask).indices)
    low, high = xp.asarray(np.ones((2, 1, 7), bool)), xp.asarray(np.ones((2, 7, 1), bool))
    for one_row in (low[:, None], low[..., None]):
        assert reduce_mask(one_row, (1, 4), bsize=2).count() == 8
    assert reduce_mask(high[:, None], (1, 4), bsize=2).count() == 8  # images of one row, not column
    with pytest.raises(ShapeError, match=r"mask must .* or \(N, 1, H, W\), .*make one channel"):
        reduce_mask(xp.asarray(np.ones((2, 3, 4, 5), bool)), 2, bsize=2)


@pytest.mark.parametrize("bsize", [3, (3, 3), [3, 3], [1, 3, 3, 1]], ids=str)
@pytest.mark.parametrize("block_count", [(4, 4), [4, 4], 4], ids=str)
def test_spellings(xp, bsize, block_count):
    mask = np.random.default_rng(1).random((1, 12, 12)) < 0.1
    _, rows = oracles.reduce_mask(mask, (4, 4), bsize=(3, 3))
    active = reduce_mask(xp.asarray(mask), block_count, bsize=bsize)
    assert_same(active.active_block_indices, xp.writable(rows))
    named = reduce_mask(mask=xp.asarray(mask), block_count=block_count, bsize=bsize, bstride=bsize)
    assert_same(named.active_block_indices, xp.writable(rows))


@pytest.fixture
def some(xp):
    """Three of eight blocks of two images."""
    mask = np.zeros((2, 4, 4), np.float32)
    mask[0, 0, 0] = mask[0, 3, 3] = mask[1, 2, 0] = 1
    return lambda **options: reduce_mask(xp.asarray(mask), (2, 2), bsize=(2, 2), **options)


ROWS = [[0, 0, 0], [0, 1, 1], [1, 1, 0]]


def test_active_blocks_unpack_as_a_pair(xp, some):
    active = some()
    assert isinstance(active, ActiveBlocks)
    bin_counts, active_block_indices = active
    assert bin_counts is active.bin_counts
    assert active_block_indices is active.active_block_indices
    assert xp.to_numpy(active_block_indices).tolist() == ROWS
    assert len(active) == 2


def test_active_blocks_count_and_density(some):
    active = some()
    assert active.count() == 3 and type(active.count()) is int
    assert active.density() == 3 / 8 and type(active.density()) is float
    assert not active.overflowed


@pytest.mark.parametrize("capacity", [None, 3, 5])
def test_active_blocks_to_dense(xp, some, capacity):
    dense = some(capacity=capacity).to_dense()
    expected = np.zeros((2, 2, 2), bool)
    expected[tuple(np.transpose(ROWS))] = True
    assert_same(dense, xp.writable(expected))


def test_a_capacity_that_is_too_large(xp):
    with pytest.raises(ShapeError, match=r"capacity must be .* below 2\*\*31, or None, got 2147"):
        reduce_mask(xp.asarray(np.ones((1, 2, 2), bool)), 1, bsize=2, capacity=2**31)


@pytest.mark.parametrize("capacity", [0, 1, 2, 3, 4])
def test_overflow_is_seen_and_checked(some, capacity):
    active = some(capacity=capacity)
    assert active.count() == 3 and bool(active.overflowed) == (capacity < 3)
    if capacity < 3:
        with pytest.raises(CapacityError, match=r"3.*capacity|capacity.*3") as error:
            active.check()
        assert str(capacity) in str(error.value)
    else:
        assert active.check() is None or active.check() is active


@example(Grid(1, (1, 1), (1, 1), (0, 0), None, (1, 1)))
@given(grid=grids)
def test_density_of_none_and_all(xp, grid):
    mask = np.ones((grid.batch, *grid.size), bool)
    active = reduce_mask(xp.asarray(mask), grid.bcount, **grid.blocks)
    blocks = grid.batch * grid.bcount[0] * grid.bcount[1]
    assert active.density() == (active.count() / blocks if blocks else 0.0)
    assert int(xp.to_numpy(active.to_dense()).sum()) == active.count()


@pytest.mark.parametrize("avgpool", [False, True], ids=["max", "mean"])
@pytest.mark.parametrize("offset", range(-4, 5))
def test_every_small_grid_along_one_axis(offset, avgpool):
    """Blocks inside the image, across its edges and outside, along lines and along columns."""
    sizes = itertools.product(range(1, 6), range(1, 7), (1, 2, 3), (1, 4))
    for size, block, stride, count in sizes:
        line = np.zeros(size, bool)
        line[[0, -1]] = True
        corners = [offset + stride * i for i in range(count)]
        sums = [line[max(c, 0) : max(c + block, 0)].sum() for c in corners]
        expected = np.flatnonzero(np.array(sums) / block > 0.25 if avgpool else sums)
        for axis in (0, 1):
            grid = {"bsize": [1, 1], "boffset": [0, 0], "bstride": [1, 1]}
            grid["bsize"][axis], grid["boffset"][axis] = block, offset
            grid["bstride"][axis] = stride
            mask = np.expand_dims(line, (0, 2 - axis))
            bcount = (count, 1) if axis == 0 else (1, count)
            found = reduce_mask(mask, bcount, **grid, tol=avgpool / 4, avgpool=avgpool)
            assert found.active_block_indices[:, 1 + axis].tolist() == expected.tolist()


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("stride", [1, 7, 32])
def test_blocks_of_any_length(axis, stride):
    """One pixel is set, at each place: it is found by the blocks that hold it, and by no other."""
    size, offset = 75, -9
    mask = np.zeros((size, 2, size), bool)  # images, each with a pixel of its own
    mask[range(size), 0, range(size)] = True
    if axis == 0:
        mask = np.ascontiguousarray(mask.transpose(0, 2, 1))
    for block in (*range(1, 36), 63, 64, 65, 74, 75, 76, 90):
        count = -(-(size - offset) // stride)
        corners = offset + stride * np.arange(count)
        pixels = np.arange(size)[:, None]
        expected = (corners <= pixels) & (pixels < corners + block)
        grid = {"bsize": (block, 2), "boffset": (offset, 0), "bstride": (stride, 2)}
        grid = {name: pair if axis == 0 else pair[::-1] for name, pair in grid.items()}
        active = reduce_mask(mask, (count, 1) if axis == 0 else (1, count), **grid)
        assert_same(active.to_dense().reshape(size, count), expected)


@pytest.mark.parametrize("dtype", [np.bool_, np.uint8, np.float32], ids=str)
@pytest.mark.parametrize("avgpool", [False, True], ids=["max", "mean"])
@pytest.mark.parametrize("offset", [0, -1])
def test_a_mask_is_pooled_in_parts(monkeypatch, dtype, avgpool, offset):
    """Parts of several images, and of some rows of blocks of one, give what the whole does."""
    mask = (np.random.default_rng(3).random((5, 23, 31)) < 0.05).astype(dtype)
    grid = {"bsize": (4, 6), "boffset": (offset, offset), "bstride": (3, 5), "avgpool": avgpool}
    whole = reduce_mask(mask, (8, 7), **grid, tol=0.03)
    for chunk in (1, 600, 1500, 4000, 8000, 30000):
        clear_plans()
        monkeypatch.setattr(listing, "CHUNK_BYTES", chunk)
        for capacity in (None, 9, 400):
            active = reduce_mask(mask, (8, 7), **grid, tol=0.03, capacity=capacity)
            rows = min(whole.count(), active.capacity)
            assert_same(active.bin_counts, whole.bin_counts)
            assert_same(
                active.active_block_indices[:rows], whole.active_block_indices[:rows].copy()
            )
            assert (active.active_block_indices[rows:] == -1).all()
    clear_plans()


def test_more_blocks_than_a_table_holds():
    mask = np.random.default_rng(4).random((2, 150, 90)) < 0.3
    active = reduce_mask(mask, (150, 90), bsize=1)
    assert_same(active.active_block_indices, np.argwhere(mask).astype(np.int32))


@pytest.mark.parametrize("dtype", [">f2", ">f4", ">i2"])
def test_numbers_of_swapped_bytes(dtype):
    mask = np.array([[[0, 1, 2, 300]]], dtype)
    for tol, expected in ((-1, [0, 1, 2, 3]), (0, [1, 2, 3]), (1, [2, 3]), (255, [3])):
        active = reduce_mask(mask, (1, 4), bsize=1, tol=tol)
        assert active.active_block_indices[:, 2].tolist() == expected


def test_a_wrong_option_is_refused_after_a_right_one_that_is_equal():
    mask = np.ones((1, 4, 4), bool)
    for _ in range(2):
        assert reduce_mask(mask, (2, 2), bsize=(2, 2), capacity=1).count() == 4
        with pytest.raises(ShapeError, match="bsize"):
            reduce_mask(mask, (2, 2), bsize=(2.0, 2), capacity=1)
        with pytest.raises(ShapeError, match="capacity"):
            reduce_mask(mask, (2, 2), bsize=(2, 2), capacity=True)
        # Strided, it is copied: also where the like of it was known.
        assert reduce_mask(mask.transpose(0, 2, 1), (2, 2), bsize=(2, 2), capacity=1).count() == 4
