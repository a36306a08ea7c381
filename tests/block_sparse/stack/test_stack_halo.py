"""stack_halo copies pixels of neighbours, to the bit; its gradient is its transpose."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sbnet_cupy as sb
from sbnet_cupy.block_sparse.stack.fetch import fetch
from sbnet_cupy.block_sparse.stack.neighbours import Axis, Places
from support import stack_cases, strategies
from support.assertions import assert_close, assert_same, to_numpy

FILLS = (0, "-inf", "edge")


def loop(blocks, images, pads, fill):
    """Every pixel of every block with its rim, from images that are 0 where nothing is active."""
    (top, bottom), (left, right) = pads
    (bh, bw), (height, width) = blocks.block, blocks.size
    shape = (blocks.capacity, top + bh + bottom, left + bw + right, images.shape[3])
    y = np.zeros(shape, images.dtype)
    for row, (n, hi, wi) in enumerate(blocks.rows):
        for i, j in np.ndindex(*shape[1:3]):
            h, w = hi * bh - top + i, wi * bw - left + j
            near_h, near_w = min(max(h, 0), height - 1), min(max(w, 0), width - 1)
            if (h, w) == (near_h, near_w) or fill == "edge":
                y[row, i, j] = images[n, near_h, near_w]
            else:
                y[row, i, j] = -np.inf if fill == "-inf" else 0
    return y


def rims():
    """Draw ((top, bottom), (left, right)): none, usual ones, some wider than a block."""
    pixels = st.sampled_from([0, 1, 2, 3, 5, 9])
    return st.tuples(st.tuples(pixels, pixels), st.tuples(pixels, pixels))


@stack_cases.FEW
@given(data=st.data())
def test_equals_the_loop(xp, body, data):
    blocks, pads = data.draw(stack_cases.blocks()), data.draw(rims())
    fill = data.draw(st.sampled_from(FILLS))
    dtype = data.draw(stack_cases.float_dtypes())
    table = blocks.table(xp.asarray)
    images = blocks.images(table, data.draw(st.sampled_from([1, 3])), data.draw(
        stack_cases.generators()), dtype)  # fmt: skip
    x = xp.asarray(blocks.stack(images, table))
    y = sb.stack_halo(x, table, pads, fill=fill)
    expected = loop(blocks, images, pads, fill)
    assert_same(to_numpy(y), expected)
    out = xp.writable(np.full(y.shape, 7, dtype))
    assert sb.stack_halo(x, table, pads, fill=fill, out=out) is out
    assert_same(to_numpy(out), expected)


def test_pads_can_be_short(xp):
    table = sb.block_table(xp.asarray(np.ones((1, 4, 4), bool)), 2)
    x = xp.asarray(np.ones((4, 2, 2, 1), np.float32))
    assert sb.stack_halo(x, table, 1).shape == (4, 4, 4, 1)
    assert sb.stack_halo(x, table, (0, 2)).shape == (4, 2, 6, 1)
    assert sb.stack_halo(x, table, ((1, 0), (0, 3))).shape == (4, 3, 5, 1)


@stack_cases.FEW
@given(data=st.data())
def test_any_lattice_by_both_bodies(data):
    """Steps of several pixels, lattices that begin inside a block; both ways give the same bits."""
    from sbnet_cupy.block_sparse.stack import neighbours

    blocks = data.draw(stack_cases.blocks())
    table = blocks.table()
    x = blocks.stack(blocks.images(table, 2, data.draw(stack_cases.generators())), table)
    axes = [
        Axis(
            data.draw(st.integers(-7, 7)),
            data.draw(st.integers(1, 4)),
            data.draw(st.integers(1, 9)),
        )
        for _ in range(2)
    ]
    fill = data.draw(st.sampled_from([0, -np.inf]))
    places, results = Places.of(table), []
    for body in (neighbours.fetch_by_slices, neighbours.fetch_by_number):
        out = np.full((len(places), axes[0].count, axes[1].count, 2), np.nan)
        if out.size and table.grid.size:
            body(x, places, axes, out, fill)
            results.append(out)
    if results:
        assert_same(*results)


@stack_cases.FEW
@given(data=st.data())
def test_corrupt_tables_read_nothing_else(xp, body, data):
    """Whatever counts, rows and grid hold, a result has 0 or a pixel of the stack."""
    grid = data.draw(strategies.grids())
    counts, rows = data.draw(strategies.actives(grid, corrupt=True))
    rng = data.draw(stack_cases.generators())
    places = rng.choice([-1, 0, 1, 5, 2**31 - 1, -(2**31)], (grid.batch, *grid.bcount))
    size = tuple(n * b for n, b in zip(grid.bcount, grid.bsize, strict=True))
    arrays = (counts, rows, places.astype(np.int32))
    table = sb.BlockTable(*map(xp.asarray, arrays), grid.bsize, size)
    x = np.ones((len(rows), *grid.bsize, 1), np.float32)
    y = to_numpy(sb.stack_halo(xp.asarray(x), table, 2))
    assert np.isin(y, (0, 1)).all()
    assert not y[max(int(counts[0]), 0) :].any()
    dx = to_numpy(sb.stack_halo_grad(xp.asarray(y), table, 2))
    assert np.isfinite(dx).all()


@stack_cases.FEW
@given(data=st.data())
def test_gradient_is_the_transpose(xp, body, data):
    """<g, halo(x)> = <halo_grad(g), x>, pixel by pixel: x runs through the unit vectors."""
    blocks, pads = data.draw(stack_cases.blocks(largest=7)), data.draw(rims())
    fill = data.draw(st.sampled_from([0, "edge"]))
    table, rng = blocks.table(xp.asarray), data.draw(stack_cases.generators())
    dtype = data.draw(stack_cases.float_dtypes())
    shape = to_numpy(sb.stack_halo(xp.asarray(np.zeros((blocks.capacity, *blocks.block, 1))), table,
                                   pads, fill=fill)).shape  # fmt: skip
    grad = rng.standard_normal(shape).astype(dtype)
    grad[len(blocks.rows) :] = np.nan
    dx = sb.stack_halo_grad(xp.asarray(grad), table, pads, fill=fill)
    blocks.assert_clear_outside(dx, table)
    number = np.arange(1, blocks.batch * blocks.size[0] * blocks.size[1] + 1, dtype=np.float64)
    images = np.where(blocks.mask(table), number.reshape(blocks.batch, *blocks.size, 1), 0)
    source = loop(blocks, images, pads, fill)  # which pixel each place holds; 0 for none
    count = len(blocks.rows)
    sums, sizes = np.zeros(len(number) + 1), np.zeros(len(number) + 1)
    np.add.at(sums, source[:count].astype(int), grad[:count].astype(np.float64))
    np.add.at(sizes, source[:count].astype(int), abs(grad[:count].astype(np.float64)))
    expected, size = (np.where(images > 0, s[images.astype(int)], 0) for s in (sums, sizes))
    # Blocks of 1 pixel with rims of 9 give a pixel to 19 * 19 others, and edges many more.
    terms = max(int(np.bincount(source[:count].astype(int).ravel()).max(initial=1)), 1)
    assert_close(blocks.unstack(to_numpy(dx), table).astype(dtype), expected, terms=terms,
                 dtype=stack_cases.sum_dtype(dtype), magnitude=size)  # fmt: skip


@pytest.mark.parametrize("fill", [1, None, False, 0.0, "zero", b"edge"])
def test_fills_that_are_none(fill):
    table = sb.block_table(np.ones((1, 2, 2)), 2)
    with pytest.raises(ValueError, match="fill must be 0, '-inf' or 'edge'"):
        sb.stack_halo(np.ones((1, 2, 2, 1)), table, 1, fill=fill)


def test_fetch_into_a_wider_dtype():
    table = sb.block_table(np.ones((1, 2, 4)), 2)
    x = np.ones((2, 2, 2, 1), np.float16)
    out = np.full((2, 4, 4, 1), np.nan, np.float32)
    fetch(x, Places.of(table), Axis(-1, 1, 4), Axis(-1, 1, 4), out)
    assert out.sum() == 2 * 2 * 3
