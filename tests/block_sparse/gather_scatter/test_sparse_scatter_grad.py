"""sparse_scatter_grad: every bit of the gradient goes to what the scatter left at its pixel."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbnet_cupy import sparse_gather, sparse_scatter, sparse_scatter_grad
from support import oracles, strategies
from support.assertions import assert_same, to_numpy
from support.strategies import FLOATS, INT32, Grid

LAYOUTS = [(fmt, transpose) for fmt in ("NHWC", "NCHW") for transpose in (False, True)]
channels = strategies.channels()


@st.composite
def cases(draw, *, overlap=None, dtype=None):
    """The gradient of an image (random bits), an index table and the options."""
    grid, c = draw(strategies.grids(overlap=overlap)), draw(channels)
    data_format, transpose = draw(st.sampled_from(LAYOUTS))
    shape = (grid.batch, *grid.size, c)
    if data_format == "NCHW":
        shape = (grid.batch, c, *grid.size)
    dtype = draw(st.sampled_from(FLOATS)) if dtype is None else dtype
    options = {"data_format": data_format, "transpose": transpose, "add": draw(st.booleans())}
    grad_y = draw(strategies.images(shape, dtype))
    return grad_y, draw(strategies.actives(grid)), grid.blocks | options


def run(xp, grad_y, active, **options):
    """Call with arrays of the library; the gradient of x is grad_y itself exactly with add."""
    inputs = [xp.asarray(a) for a in (grad_y, *active)]
    gradients = sparse_scatter_grad(*inputs, **options)
    assert (gradients.x is inputs[0]) == options.get("add", False)
    for given_array, original in zip(inputs, (grad_y, *active), strict=True):
        assert_same(given_array, xp.writable(original), allow_nan=True)
    return gradients


def check(xp, grad_y, active, options):
    gradients = run(xp, grad_y, active, **options)
    expected = oracles.sparse_scatter_grad(grad_y, *active, **options)
    for actual, wanted in zip(gradients, expected, strict=True):
        assert_same(actual, xp.writable(wanted), allow_nan=True)


@given(case=cases())
def test_equals_the_loops(xp, case):
    check(xp, *case)


@given(case=cases(overlap=True))
def test_where_blocks_overlap_the_later_row_gets_it(xp, case):
    check(xp, *case)


@pytest.mark.parametrize("shuffled", [False, True])
def test_sixteen_blocks_on_every_pixel(xp, shuffled):
    rng = np.random.default_rng(0)
    rows = np.argwhere(np.ones((2, 21, 24))).astype(np.int32)
    rows = rng.permutation(rows) if shuffled else rows
    grad_y = rng.standard_normal((2, 40, 48, 3)).astype(np.float32)
    grid = Grid(2, (40, 48), (8, 8), (-3, -1), (2, 2), (21, 24))
    check(xp, grad_y, (np.array([len(rows)], np.int32), rows), grid.blocks)


@given(case=cases(dtype=np.dtype("f8")), seed=st.integers(0, 2**32 - 1))
def test_it_is_the_transpose_of_the_scatter(xp, case, seed):
    """<scatter(blocks, x), g> == <blocks, dblocks> + <x, dx>, exactly: all numbers are whole.

    So the gradient of the gradient with respect to grad_y is the scatter of the two gradients.
    """
    grad_y, active, options = case
    rng = np.random.default_rng(seed)
    grad_y, x = (rng.integers(-9, 9, grad_y.shape).astype("f8") for _ in range(2))
    dblocks, dx = map(to_numpy, run(xp, grad_y, active, **options))
    blocks = rng.integers(-9, 9, dblocks.shape).astype("f8")
    inputs = map(xp.asarray, (blocks, *active, x))
    y = to_numpy(sparse_scatter(*inputs, **options, atomic=True))
    assert (y * grad_y).sum() == (blocks * dblocks).sum() + (x * dx).sum()


@given(case=cases())
def test_with_add_the_blocks_are_gathered(xp, case):
    grad_y, active, options = case
    options = options | {"add": True}
    blocks = run(xp, grad_y, active, **options).blocks
    del options["add"]
    gathered = sparse_gather(*map(xp.asarray, (grad_y, *active)), **options)
    assert_same(blocks, gathered, allow_nan=True)


def test_a_row_listed_twice_counts_once(xp):
    active = (np.array([2], np.int32), np.zeros((2, 3), np.int32))
    grad_y = np.ones((1, 2, 2, 1), np.float32)
    blocks = to_numpy(run(xp, grad_y, active, bsize=2).blocks)
    assert not blocks[0].any() and blocks[1].all()


@pytest.mark.parametrize("count", [INT32.min, -1, 0, 1, 2, 3, INT32.max])
@pytest.mark.parametrize("add", [False, True])
def test_rows_at_or_past_the_count_hide_nothing(xp, count, add):
    rows = np.array([[0, 0, 0], [9, 0, 0], [0, 0, 0]], np.int32)
    grad_y = np.ones((1, 4, 4, 2), np.float16)
    check(xp, grad_y, (np.array([count], np.int32), rows), {"bsize": (2, 2), "add": add})


@pytest.mark.parametrize(
    ("shape", "rows"),
    [((0, 4, 4, 3), 2), ((1, 0, 4, 3), 2), ((1, 4, 0, 3), 2), ((1, 4, 4, 0), 2), ((1, 4, 4, 3), 0)],
    ids=str,
)
@pytest.mark.parametrize("add", [False, True])
def test_empty_inputs(xp, shape, rows, add):
    active = (np.array([rows], np.int32), np.zeros((rows, 3), np.int32))
    check(xp, np.ones(shape, np.float32), active, {"bsize": (2, 3), "add": add})


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_other_libraries(require, library):
    module = require(library)
    asarray = module.asarray if library == "torch" else module.numpy.asarray
    active = (np.array([2], np.int32), np.array([[0, 0, 0], [0, 1, 0]], np.int32))
    grad_y = np.random.default_rng(0).random((1, 5, 5, 3), np.float32)
    for add in (False, True):
        expected = sparse_scatter_grad(grad_y, *active, bsize=3, bstride=2, add=add)
        arrays = [asarray(a) for a in (grad_y, *active)]
        gradients = sparse_scatter_grad(*arrays, bsize=3, bstride=2, add=add)
        assert (gradients.x is arrays[0]) == add
        for actual, wanted in zip(gradients, expected, strict=True):
            assert type(actual).__module__.startswith(library)
            assert_same(np.asarray(actual), wanted)
