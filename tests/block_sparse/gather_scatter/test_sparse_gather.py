"""sparse_gather equals its loop oracle on every library, to the bit, whatever the index table."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sbnet_cupy import reduce_mask, sparse_gather
from support import oracles, strategies
from support.assertions import assert_close, assert_same
from support.strategies import INT32, Grid

LAYOUTS = [(fmt, transpose) for fmt in ("NHWC", "NCHW") for transpose in (False, True)]
layouts = st.sampled_from(LAYOUTS)
channels = strategies.channels()


def image_shape(grid, c, data_format):
    return (grid.batch, *grid.size, c) if data_format == "NHWC" else (grid.batch, c, *grid.size)


def check(xp, x, active, grid, **options):
    """Compare one call with the oracle, bit for bit, and see that nothing was modified."""
    inputs = [xp.asarray(a) for a in (x, *active)]
    blocks = sparse_gather(*inputs, **grid.blocks, **options)
    expected = oracles.sparse_gather(x, *active, **grid.blocks, **options)
    assert_same(blocks, xp.writable(expected), allow_nan=True)
    for given_array, original in zip(inputs, (x, *active), strict=True):
        assert_same(given_array, xp.writable(original), allow_nan=True)
    return blocks


@given(data=st.data(), grid=strategies.grids(), c=channels, layout=layouts)
def test_equals_the_loops(xp, data, grid, c, layout):
    x = data.draw(strategies.images(image_shape(grid, c, layout[0])))
    active = data.draw(strategies.actives(grid))
    check(xp, x, active, grid, data_format=layout[0], transpose=layout[1])


@pytest.mark.parametrize("dtype", strategies.DTYPES, ids=str)
@pytest.mark.parametrize(("data_format", "transpose"), LAYOUTS)
@pytest.mark.parametrize("c", [1, 3, 32])
def test_every_dtype_and_layout(xp, dtype, data_format, transpose, c):
    """Random bits: NaN payloads, -0 and denormals pass unchanged."""
    grid = Grid(2, (9, 7), (4, 3), (-1, -2), (3, 3), (4, 4))
    rng = np.random.default_rng(c)
    shape = image_shape(grid, c, data_format)
    x = np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape).copy()
    x = rng.random(shape) < 0.5 if dtype.kind == "b" else x
    rows = np.argwhere(np.ones((2, 4, 4))).astype(np.int32)
    active = (np.array([len(rows)], np.int32), rows)
    check(xp, x, active, grid, data_format=data_format, transpose=transpose)


@given(data=st.data(), grid=strategies.grids(), c=channels, layout=layouts)
def test_out_receives_everything_and_is_returned(xp, data, grid, c, layout):
    """Every element of out is written, whatever it held, and out itself comes back."""
    x = data.draw(strategies.images(image_shape(grid, c, layout[0])))
    active = data.draw(strategies.actives(grid))
    options = {"data_format": layout[0], "transpose": layout[1]} | grid.blocks
    expected = oracles.sparse_gather(x, *active, **options)
    out = xp.writable(np.ones_like(expected))
    inputs = [xp.asarray(a) for a in (x, *active)]
    assert sparse_gather(*inputs, **options, out=out) is out
    assert_same(out, xp.writable(expected), allow_nan=True)
    assert_same(inputs[0], xp.writable(x), allow_nan=True)


def test_out_may_be_part_of_a_larger_array_and_only_that_part_changes(xp):
    x = np.arange(2 * 4 * 4 * 3, dtype=np.float32).reshape(2, 4, 4, 3) + 1
    rows = np.array([[1, 1, 0], [0, 0, 1]], np.int32)
    count = np.array([2], np.int32)
    whole = xp.writable(np.full((6, 2, 2, 3), 7, np.float32))
    sparse_gather(*map(xp.asarray, (x, count, rows)), bsize=2, out=whole[2:4])
    expected = np.full((6, 2, 2, 3), 7, np.float32)
    expected[2:4] = oracles.sparse_gather(x, count, rows, bsize=(2, 2))
    assert_same(whole, xp.writable(expected))


@given(data=st.data(), grid=strategies.grids(), c=channels, layout=layouts)
def test_transpose_is_only_a_transpose(xp, data, grid, c, layout):
    x = data.draw(strategies.images(image_shape(grid, c, layout[0])))
    inputs = [xp.asarray(a) for a in (x, *data.draw(strategies.actives(grid)))]
    plain, swapped = (
        xp.to_numpy(sparse_gather(*inputs, **grid.blocks, data_format=layout[0], transpose=t))
        for t in (False, True)
    )
    axes = (0, 3, 1, 2) if layout[0] == "NHWC" else (0, 2, 3, 1)
    assert_same(np.ascontiguousarray(plain.transpose(axes)), swapped, allow_nan=True)


FAR = [INT32.max, INT32.min, -1, -(2**20), 2**20, 1000]


@pytest.mark.parametrize("n", [*FAR, 2, 3])
def test_an_image_number_out_of_range_gives_zeros(xp, n):
    x = np.ones((2, 4, 4, 3), np.int16)
    rows = np.array([[0, 0, 0], [n, 0, 0], [1, 1, 1]], np.int32)
    grid = Grid(2, (4, 4), (2, 2), (0, 0), None, (2, 2))
    blocks = check(xp, x, (np.array([3], np.int32), rows), grid)
    assert xp.to_numpy(blocks).any(axis=(1, 2, 3)).tolist() == [True, False, True]


@pytest.mark.parametrize("far", FAR)
@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("step", [1, 2, 3, 2**31 - 1, 2**20 + 1])
def test_a_block_far_outside_gives_zeros_and_never_wraps_round(xp, far, axis, step):
    x = np.ones((1, 4, 4, 3), np.float64)
    rows = np.zeros((2, 3), np.int32)
    rows[0, axis] = far
    for offset in (0, -far * step, INT32.max, -INT32.max):
        if abs(offset) > INT32.max:
            continue
        boffset = [0, 0]
        boffset[axis - 1] = offset
        grid = Grid(1, (4, 4), (2, 2), tuple(boffset), (step, step), (2, 2))
        check(xp, x, (np.array([2], np.int32), rows), grid)


@pytest.mark.parametrize("count", [INT32.min, -1, 0, 1, 2, 3, 4, INT32.max])
def test_rows_at_or_past_the_count_are_zeros(xp, count):
    x = np.ones((1, 4, 4, 3), np.uint8)
    rows = np.array([[0, 0, 0], [0, 1, 1], [0, 0, 1]], np.int32)
    grid = Grid(1, (4, 4), (2, 2), (0, 0), None, (2, 2))
    blocks = check(xp, x, (np.array([count], np.int32), rows), grid)
    kept = xp.to_numpy(blocks).any(axis=(1, 2, 3)).sum()
    assert kept == min(max(count, 0), 3)


@pytest.mark.parametrize(
    ("shape", "rows"),
    [((0, 4, 4, 3), 2), ((1, 0, 4, 3), 2), ((1, 4, 0, 3), 2), ((1, 4, 4, 0), 2), ((1, 4, 4, 3), 0)],
    ids=str,
)
@pytest.mark.parametrize(("data_format", "transpose"), LAYOUTS)
def test_empty_inputs(xp, shape, rows, data_format, transpose):
    table = np.zeros((rows, 3), np.int32)
    active = (np.array([rows], np.int32), table)
    for boffset in (0, 0), (-1, -1):  # a block may straddle an axis of no pixels
        grid = Grid(shape[0], shape[1:3], (2, 3), boffset, None, (2, 2))
        x = np.ones(image_shape(grid, shape[3], data_format), np.float32)
        check(xp, x, active, grid, data_format=data_format, transpose=transpose)


@pytest.mark.parametrize("dtype", [">f4", ">i2", ">u8", "M8[s]", "S4", "V16"])
def test_dtypes_that_only_numpy_has(dtype):
    """Other byte orders, dates, text and raw bytes are copied like any element of their size."""
    x = np.arange(2 * 6 * 6 * 3).reshape(2, 6, 6, 3).astype("S4" if dtype[0] == "S" else "i8")
    x = x.astype("S16").view("V16") if dtype == "V16" else x.astype(dtype)
    rows, count = np.array([[0, 1, 1], [1, 0, 2], [9, 0, 0]], np.int32), np.array([3], np.int32)
    blocks = sparse_gather(x, count, rows, bsize=3)
    assert_same(blocks, oracles.sparse_gather(x, count, rows, bsize=(3, 3)), allow_nan=True)


def test_takes_what_reduce_mask_returns(xp):
    x = np.random.default_rng(0).random((2, 8, 8, 4), np.float32)
    active = reduce_mask(xp.asarray(x[..., 0] > 0.9), (4, 4), bsize=2, capacity=20)
    blocks = sparse_gather(xp.asarray(x), *active, bsize=2)
    table = (xp.to_numpy(active.bin_counts), xp.to_numpy(active.active_block_indices))
    assert_same(blocks, xp.writable(oracles.sparse_gather(x, *table, bsize=(2, 2))))


@given(data=st.data(), grid=strategies.grids(), c=channels, layout=layouts)
def test_twice_gives_the_same_bits(xp, data, grid, c, layout):
    x = data.draw(strategies.images(image_shape(grid, c, layout[0])))
    inputs = [xp.asarray(a) for a in (x, *data.draw(strategies.actives(grid)))]
    first, second = (
        sparse_gather(*inputs, **grid.blocks, data_format=layout[0], transpose=layout[1])
        for _ in range(2)
    )
    assert_same(first, second, allow_nan=True)


@st.composite
def fused(draw):
    """An image of finite floats with any of scale, shift and an exact activation."""
    grid, dtype = draw(strategies.grids()), draw(st.sampled_from(strategies.FLOATS))
    c, layout = draw(channels), draw(layouts)
    x = draw(strategies.numbers(image_shape(grid, c, layout[0]), dtype))
    options = {"data_format": layout[0], "transpose": layout[1]}
    for name in ("scale", "shift"):
        if draw(st.booleans()):
            options[name] = draw(strategies.numbers((c,), dtype))
    return grid, x, draw(strategies.actives(grid)), options


def fuse(xp, grid, x, active, options, activation, rounded=True):
    """Return the fused blocks and what the oracle says of them."""
    arrays = {k: xp.asarray(v) for k, v in options.items() if isinstance(v, np.ndarray)}
    inputs = [xp.asarray(a) for a in (x, *active)]
    blocks = sparse_gather(*inputs, **grid.blocks, **(options | arrays), activation=activation)
    assert_same(inputs[0], xp.writable(x))
    return blocks, oracles.sparse_gather(
        x, *active, **grid.blocks, **options, activation=activation, rounded=rounded
    )


@given(case=fused(), activation=st.sampled_from([None, "relu"]))
def test_fused_scale_shift_and_relu_are_exact(xp, case, activation):
    """One multiply, one add, one rounding: no fused multiply-add, so every bit is defined."""
    blocks, expected = fuse(xp, *case, activation)
    assert_same(blocks, xp.writable(expected), signed_zero=False)


@given(case=fused(), activation=st.sampled_from(["silu", "gelu"]))
def test_fused_smooth_activations_are_close(xp, case, activation):
    """exp and erf differ by a few roundings between libraries; the rest is exact.

    gelu multiplies by 1 + erf, whose error of one roundoff of 1 stays where the sum cancels, so the
    error is absolute in the size of the argument.
    """
    wide = np.float64 if case[1].dtype == np.float64 else np.float32
    blocks, expected = fuse(xp, *case, activation, rounded=False)
    _, argument = fuse(xp, *case, None, rounded=False)
    assert_close(xp.to_numpy(blocks), expected, terms=8, dtype=wide, magnitude=abs(argument))


@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu"])
@pytest.mark.parametrize("dtype", strategies.FLOATS, ids=str)
@pytest.mark.parametrize(("data_format", "transpose"), LAYOUTS)
def test_outside_the_image_stays_zero_under_a_shift(xp, activation, dtype, data_format, transpose):
    """Not act(shift): the zeros pad the activated image, as in the dense network."""
    grid = Grid(1, (3, 3), (4, 4), (-1, -1), None, (1, 1))
    x = np.ones(image_shape(grid, 2, data_format), dtype)
    shift = np.array([3, 5], dtype)
    rows = np.array([[0, 0, 0], [9, 0, 0], [0, 0, 0]], np.int32)
    blocks = sparse_gather(
        *map(xp.asarray, (x, np.array([2], np.int32), rows)),
        **grid.blocks, data_format=data_format, transpose=transpose,
        shift=xp.asarray(shift), activation=activation,
    )  # fmt: skip
    stack = xp.to_numpy(blocks).astype(np.float32)
    if blocks.shape[1] == 2:
        stack = stack.transpose(0, 2, 3, 1)
    assert (stack[0, 1:, 1:] > 3.9).all()
    stack[0, 1:, 1:] = 0
    assert not stack.any()  # the border, the corrupt row, the row past the count


@example(1)
@given(seed=st.integers(0, 2**32 - 1))
def test_fused_arithmetic_is_not_contracted(xp, seed):
    """x * scale + shift where an fma would keep the bits that the product rounds away."""
    rng = np.random.default_rng(seed)
    x = (1 + rng.random((1, 4, 4, 8)) * 2.0**-10).astype(np.float32)
    scale = (1 + rng.random(8) * 2.0**-10).astype(np.float32)
    shift = -np.float32(1) * scale
    rows, count = np.zeros((1, 3), np.int32), np.array([1], np.int32)
    blocks = sparse_gather(
        *map(xp.asarray, (x, count, rows)),
        bsize=4, scale=xp.asarray(scale), shift=xp.asarray(shift),
    )  # fmt: skip
    assert_same(blocks, xp.writable(x * scale + shift), signed_zero=False)
