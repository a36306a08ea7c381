"""sparse_gather_grad: the transpose of the gather, and the gradients of what is fused into it."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sbnet_cupy import sparse_gather, sparse_gather_grad
from support import oracles, strategies
from support.assertions import assert_close, assert_same, epsilon, smallest_subnormal, to_numpy
from support.strategies import FLOATS, Grid

LAYOUTS = [(fmt, transpose) for fmt in ("NHWC", "NCHW") for transpose in (False, True)]
channels = strategies.channels()


def shapes(grid, c, rows, data_format, transpose):
    """Shapes of the image and of a stack of ``rows`` blocks."""
    nhwc = data_format == "NHWC"
    image = (grid.batch, *grid.size, c) if nhwc else (grid.batch, c, *grid.size)
    stack = (rows, *grid.bsize, c) if nhwc != transpose else (rows, c, *grid.bsize)
    return image, stack


@st.composite
def cases(draw, *, make=strategies.numbers, dtype=None, overlap=None):
    """The gradient of a stack, an index table, an image, a grid and the layout options."""
    grid, c = draw(strategies.grids(overlap=overlap)), draw(channels)
    data_format, transpose = draw(st.sampled_from(LAYOUTS))
    active = draw(strategies.actives(grid))
    image, stack = shapes(grid, c, len(active[1]), data_format, transpose)
    dtype = draw(st.sampled_from(FLOATS)) if dtype is None else dtype
    options = {"data_format": data_format, "transpose": transpose} | grid.blocks
    return draw(make(stack, dtype)), active, draw(make(image, dtype)), options


def whole_numbers(shape, dtype):
    """Numbers whose products and sums are exact in every dtype."""
    return st.integers(0, 2**32 - 1).map(
        lambda seed: np.random.default_rng(seed).integers(-3, 4, shape).astype(dtype)
    )


def run(xp, grad_blocks, active, x, **options):
    """Call with arrays of the library, and see that nothing was modified."""
    originals = (grad_blocks, *active, x)
    inputs = [xp.asarray(a) for a in originals]
    tables = {k: xp.asarray(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}
    gradients = sparse_gather_grad(*inputs, **tables)
    for given_array, original in zip(inputs, originals, strict=True):
        assert_same(given_array, xp.writable(original), allow_nan=True)
    return gradients


@given(case=cases())
def test_blocks_add_up_in_row_order_in_the_dtype_of_x(xp, case):
    """To the bit, with overlap and with rows listed twice, corrupt, and past the count."""
    grad_blocks, active, x, options = case
    gradients = run(xp, grad_blocks, active, x, **options)
    assert gradients[1:] == (None, None)
    expected = oracles.sparse_scatter(grad_blocks, *active, np.zeros_like(x), **options, add=True)
    assert_same(gradients.x, xp.writable(expected))


@given(case=cases(make=whole_numbers, dtype=np.dtype("f8")))
def test_it_is_the_transpose_of_the_gather(xp, case):
    """<gather(x), b> == <x, gather_grad(b)>, exactly: all numbers are whole."""
    grad_blocks, active, x, options = case
    blocks = to_numpy(sparse_gather(*map(xp.asarray, (x, *active)), **options))
    dx = to_numpy(run(xp, grad_blocks, active, x, **options).x)
    assert (blocks * grad_blocks).sum() == (x * dx).sum()


@given(case=cases(), seed=st.integers(0, 2**32 - 1), given_tables=st.integers(0, 3),
       activation=st.sampled_from([None, "relu", "silu", "gelu"]))  # fmt: skip
@example(
    case=(np.ones((2, 2, 2, 1), "f4"), (np.array([1], "i4"), np.zeros((2, 3), "i4")),
          np.ones((1, 3, 3, 1), "f4"), {"bsize": (2, 2), "boffset": (-1, -1)}),
    seed=0, given_tables=3, activation="silu",
)  # fmt: skip
def test_fused_gradients_equal_the_loops(xp, case, seed, given_tables, activation):
    """Products with up to six factors, each rounded; the activation's slope is off by 8 u at most.

    dx is rounded to the dtype of x before it is added up there.
    """
    grad_blocks, active, x, options = case
    c = x.shape[3 if options.get("data_format", "NHWC") == "NHWC" else 1]
    rng = np.random.default_rng(seed)
    wide = np.float64 if x.dtype == np.float64 else np.float32
    tables = {"scale": rng.uniform(-2, 2, c).astype(x.dtype), "shift": rng.uniform(-1, 1, c)}
    tables["shift"] = tables["shift"].astype(wide)  # of another dtype than the scale
    tables = {name: tables[name] for k, name in enumerate(tables) if given_tables >> k & 1}
    options = options | tables | {"activation": activation}
    gradients = run(xp, grad_blocks, active, x, **options)
    expected = oracles.sparse_gather_grad(grad_blocks, *active, x, **options)
    pixels = grad_blocks.size // max(c, 1)
    for name, dtype, terms in (("x", x.dtype, len(active[1])), ("scale", wide, pixels),
                               ("shift", wide, pixels)):  # fmt: skip
        actual = getattr(gradients, name)
        if name != "x" and name not in tables:
            assert actual is None
            continue
        like = x if name == "x" else tables[name]
        assert (actual.dtype, actual.shape) == (like.dtype, like.shape)
        value, magnitude = expected[name]
        # what becomes subnormal is off by the smallest one, not by a roundoff
        magnitude = magnitude + 2 * smallest_subnormal(dtype) / epsilon(dtype)
        assert_close(to_numpy(actual), value, terms=terms + 14, dtype=dtype, magnitude=magnitude)


def linear_case():
    """Overlapping blocks of every kind over two images, and data that is nowhere near a kink."""
    rng = np.random.default_rng(0)
    grid = Grid(2, (7, 6), (4, 3), (-1, -1), (2, 2), (4, 4))
    rows = rng.permutation(np.argwhere(rng.random((2, 4, 4)) < 0.7)).astype(np.int32)
    rows = np.concatenate([rows, rows[:2], [[5, 0, 0], [-1, -1, -1]]]).astype(np.int32)
    active = (np.array([len(rows) - 1], np.int32), rows)
    image, stack = shapes(grid, 3, len(rows), "NHWC", True)
    x, scale, shift = rng.standard_normal(image), rng.uniform(0.5, 2, 3), rng.standard_normal(3)
    assert abs(x * scale + shift).min() > 1e-4
    return grid, active, rng.standard_normal(stack), [x, scale, shift], rng


@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu"])
def test_central_differences(xp, activation):
    """Of <gather(x, scale, shift), b> along a random direction.

    With steps of 1e-5 the cubic term is below 1e-9 of the sum of the terms' sizes, and so is the
    roundoff of the differences, 2**-52 / 1e-5 of them for each rounding of a term.
    """
    grid, active, grad_blocks, point, rng = linear_case()
    direction = [rng.uniform(-1, 1, a.shape) for a in point]
    options = grid.blocks | {"transpose": True, "activation": activation}

    def value(step):
        x, scale, shift = (a + step * d for a, d in zip(point, direction, strict=True))
        arrays = map(xp.asarray, (x, *active))
        tables = {"scale": xp.asarray(scale), "shift": xp.asarray(shift)}
        terms = to_numpy(sparse_gather(*arrays, **options, **tables)) * grad_blocks
        return terms.sum(), abs(terms).sum()

    (above, size), (below, _) = value(1e-5), value(-1e-5)
    tables = dict(zip(("scale", "shift"), point[1:], strict=True))
    gradients = run(xp, grad_blocks, active, point[0], **options, **tables)
    slope = sum((to_numpy(g) * d).sum() for g, d in zip(gradients, direction, strict=True))
    assert abs(slope - (above - below) / 2e-5) < 1e-8 * size


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_relu_has_no_slope_at_zero(xp, dtype):
    x = np.array([-1, 0, 1], dtype).reshape(1, 1, 3, 1)
    active = (np.array([1], np.int32), np.zeros((1, 3), np.int32))
    dx = run(xp, np.ones_like(x), active, x, bsize=(1, 3), activation="relu").x
    assert to_numpy(dx).ravel().tolist() == [0, 0, 1]


@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu"])
@pytest.mark.parametrize(("data_format", "transpose"), LAYOUTS)
def test_what_was_not_read_contributes_nothing(xp, activation, data_format, transpose):
    """NaN in the gradients of padding, corrupt rows and rows past the count goes nowhere."""
    grid = Grid(1, (3, 3), (4, 4), (-1, -1), None, (1, 1))
    rows = np.array([[0, 0, 0], [9, 0, 0], [0, 0, 0]], np.int32)
    image, stack = shapes(grid, 2, 3, data_format, transpose)
    grad_blocks = np.full(stack, np.nan, np.float32)
    (grad_blocks[0, :, 1:, 1:] if stack[1] == 2 else grad_blocks[0, 1:, 1:])[...] = 1
    options = grid.blocks | {"data_format": data_format, "transpose": transpose}
    active = (np.array([2], np.int32), rows)
    x = np.full(image, 40, np.float32)  # where every activation is its argument
    ones = np.ones(2, np.float32)
    for tables in ({}, {"scale": ones, "shift": ones}):
        gradients = run(xp, grad_blocks, active, x, **options, activation=activation, **tables)
        assert_same(gradients.x, xp.writable(np.ones_like(x)))
    assert to_numpy(gradients.scale).tolist() == [360, 360]
    assert to_numpy(gradients.shift).tolist() == [9, 9]


def test_the_image_is_read_only_where_its_values_matter(xp):
    """Without scale and activation only its shape does."""
    grid, active, grad_blocks, (x, _, shift), _ = linear_case()
    options = grid.blocks | {"transpose": True}
    for tables in ({}, {"shift": shift}):
        first, second = (
            run(xp, grad_blocks, active, image, **options, **tables)
            for image in (x, np.full_like(x, np.nan))
        )
        assert_same(first.x, second.x)


@pytest.mark.parametrize(
    ("shape", "rows"),
    [((0, 4, 4, 3), 2), ((1, 0, 4, 3), 2), ((1, 4, 0, 3), 2), ((1, 4, 4, 0), 2), ((1, 4, 4, 3), 0)],
    ids=str,
)
def test_empty_inputs(xp, shape, rows):
    active = (np.array([rows], np.int32), np.zeros((rows, 3), np.int32))
    tables = {"scale": np.ones(shape[3], "f4"), "shift": np.ones(shape[3], "f4")}
    grad_blocks, x = np.ones((rows, 2, 3, shape[3]), "f4"), np.ones(shape, "f4")
    gradients = run(xp, grad_blocks, active, x, bsize=(2, 3), **tables, activation="silu")
    assert gradients.x.shape == shape
    if not rows or not x.size:
        assert all(not to_numpy(g).any() for g in gradients)


@given(case=cases(overlap=True), activation=st.sampled_from([None, "gelu"]))
def test_twice_gives_the_same_bits(xp, case, activation):
    first, second = (
        run(xp, *case[:3], **case[3], scale=np.ones(channels_of(case), "f4"), activation=activation)
        for _ in range(2)
    )
    assert_same(first.x, second.x)
    assert_same(first.scale, second.scale)


def channels_of(case):
    return case[2].shape[3 if case[3]["data_format"] == "NHWC" else 1]


def test_what_overflows_is_infinite(xp):
    """Without a warning, which would be an error here."""
    x, active = np.ones((1, 1, 1, 1), np.float16), (np.array([2], "i4"), np.zeros((2, 3), "i4"))
    grad_blocks = np.full((2, 1, 1, 1), 60000, np.float16)
    assert np.isinf(to_numpy(run(xp, grad_blocks, active, x, bsize=1).x)).all()
    scale = np.full(1, 1e5, np.float32)
    gradients = run(xp, grad_blocks, active, x, bsize=1, scale=scale)
    assert np.isinf(to_numpy(gradients.x)).all() and to_numpy(gradients.scale) == 120000


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_other_libraries(require, library):
    module = require(library)
    asarray = module.asarray if library == "torch" else module.numpy.asarray
    grid, active, grad_blocks, (x, scale, _), _ = linear_case()
    arrays = [a.astype(np.float32) for a in (grad_blocks, x, scale)]
    options = grid.blocks | {"transpose": True, "activation": "silu"}
    expected = sparse_gather_grad(arrays[0], *active, arrays[1], scale=arrays[2], **options)
    grad_blocks, x, scale = map(asarray, arrays)
    gradients = sparse_gather_grad(grad_blocks, *map(asarray, active), x, scale=scale, **options)
    assert type(gradients) is type(expected) and gradients.shift is None
    for actual, wanted in zip(gradients[:2], expected[:2], strict=True):
        assert type(actual).__module__.startswith(library)
        assert_same(np.asarray(actual), wanted)
