"""The original's op-level size sweep, and a regression test for each of its known defects."""

import numpy as np
import pytest

import sbnet_cupy
from sbnet_cupy import (
    calc_block_params,
    calc_block_params_res_block,
    reduce_mask,
    sparse_gather,
    sparse_scatter,
)
from support import oracles
from support.assertions import assert_close, assert_same

# (H, W, C), bsize, bstride, boffset: uneven sizes, holes between blocks, overlap, large blocks.
SWEEP = [
    ((2, 3, 2), (2, 3), (3, 4), (-1, -2)),
    ((5, 5, 1), (3, 3), (1, 1), (-1, -2)),
    ((2, 2, 1), (1, 1), (1, 1), (0, 0)),
    ((6, 6, 1), (1, 1), (1, 1), (-1, -2)),
    ((3, 3, 1), (2, 2), (1, 1), (0, 0)),
    ((13, 12, 1), (2, 3), (1, 2), (0, 0)),
    ((20, 30, 32), (3, 4), (2, 3), (-1, -2)),
    ((40, 50, 15), (18, 18), (18, 18), (-1, -2)),
    ((40, 50, 16), (18, 18), (18, 18), (-1, -2)),
    ((40, 50, 24), (16, 16), (16, 16), (-1, -2)),
    ((40, 50, 48), (18, 18), (18, 18), (-1, -2)),
    ((40, 50, 64), (18, 18), (18, 18), (-1, -2)),
    ((1, 1, 1024 * 49), (1, 1), (1, 1), (0, 0)),
    ((8, 10, 7), (3, 4), (3, 4), (-1, -2)),
    ((8, 10, 1), (3, 4), (4, 5), (-1, -2)),
    ((8, 10, 7), (3, 4), (4, 5), (-1, -2)),
    ((5, 5, 1), (3, 2), (3, 2), (-1, -2)),
    ((5, 3, 1), (2, 3), (2, 3), (0, 0)),
    ((3, 3, 1), (1, 1), (2, 2), (-1, -2)),
    ((200, 210, 1), (150, 49), (30, 39), (-1, -2)),
]


@pytest.mark.parametrize(("size", "bsize", "bstride", "boffset"), SWEEP, ids=str)
@pytest.mark.parametrize("transpose", [False, True])
def test_the_sweep_of_sizes(xp, size, bsize, bstride, boffset, transpose):
    """reduce_mask, gather and atomic scatter of a random image, as large as the loops bear."""
    rng = np.random.default_rng(0)
    mask = rng.standard_normal((1, *size[:2], 1)).astype(np.float32)
    x = rng.standard_normal((1, *size)).astype(np.float32)
    grid = {"bsize": bsize, "bstride": bstride, "boffset": boffset}
    bcount = tuple(1 + (n - o - 1) // s for n, o, s in zip(size, boffset, bstride, strict=False))
    for avgpool, tol in [(False, 1.0), (True, 0.1)]:
        active = reduce_mask(xp.asarray(mask), bcount, **grid, tol=tol, avgpool=avgpool)
        count, rows = oracles.reduce_mask(mask, bcount, **grid, tol=tol, avgpool=avgpool)
        assert_same(active.active_block_indices, xp.writable(rows))
        table = (np.array([count], np.int32), rows)
        stack = oracles.sparse_gather(x, *table, **grid, transpose=transpose)
        blocks = sparse_gather(xp.asarray(x), *active, **grid, transpose=transpose)
        assert_same(blocks, xp.writable(stack))
        y = sparse_scatter(
            blocks, *active, xp.asarray(x), **grid, add=True, atomic=True, transpose=transpose
        )
        expected = oracles.sparse_scatter(stack, *table, x, **grid, add=True, transpose=transpose)
        assert_same(y, xp.writable(expected))


@pytest.mark.parametrize("bsize", [(32, 32), (33, 31), (40, 40), (1, 1025), (64, 48)], ids=str)
def test_average_pooling_over_1024_pixels_and_more(xp, bsize):
    """The original averages with one thread per pixel, of which a block has at most 1024."""
    rng = np.random.default_rng(0)
    shape = (2, 2 * bsize[0], 2 * bsize[1])
    mask = (rng.integers(0, 9, shape) / 8).astype(np.float32)
    first = mask[0, : bsize[0], : bsize[1]]
    first[-1, -1] += 1  # the last pixel of a block counts like the others
    mean = float(first.mean(dtype=np.float64))
    for tol in (mean - 2.0**-15, mean):
        tol = float(np.float32(tol))
        active = reduce_mask(xp.asarray(mask), (2, 2), bsize=bsize, avgpool=True, tol=tol)
        _, rows = oracles.reduce_mask(mask, (2, 2), bsize=bsize, avgpool=True, tol=tol)
        assert_same(active.active_block_indices, xp.writable(rows))
        assert ([0, 0, 0] in rows.tolist()) == (mean > tol)


@pytest.mark.parametrize("avgpool", [False, True])
@pytest.mark.parametrize("capacity", [None, 4])
def test_an_empty_mask_has_no_active_block(xp, avgpool, capacity):
    """The original reports one, block (0, 0, 0)."""
    mask = xp.asarray(np.zeros((1, 8, 8), np.float32))
    active = reduce_mask(mask, (4, 4), bsize=2, avgpool=avgpool, capacity=capacity)
    assert xp.to_numpy(active.bin_counts).tolist() == [0]
    rows = xp.to_numpy(active.active_block_indices)
    assert rows.shape == (capacity or 0, 3) and (rows == -1).all()


def test_the_last_rows_are_covered(xp):
    """n=18, b=18, k=3, SAME: the original's single block yields output rows 0 to 15 of 18."""
    params = calc_block_params((1, 18, 18, 1), (18, 18), (3, 3))
    assert params.bcount == (2, 2)
    rng = np.random.default_rng(0)
    x, w = rng.random((1, 18, 18, 2), np.float32), rng.random((3, 3, 2, 3), np.float32)
    active = reduce_mask(
        xp.asarray(np.ones((1, 18, 18), np.float32)), params.bcount,
        bsize=params.bsize, boffset=params.boffset, bstride=params.bstride,
    )  # fmt: skip
    y = sbnet_cupy.sparse_conv2d(xp.asarray(x), xp.asarray(w), active, params)
    dense = oracles.conv2d(x, w)
    assert_close(xp.to_numpy(y), dense, terms=18, dtype=np.float32, magnitude=dense)


def test_transpose_is_kept_in_both_directions(xp):
    """The original's gradient of a transposed scatter gathers without transposing."""
    rng = np.random.default_rng(0)
    x = rng.random((1, 6, 6, 4), np.float32)  # bsize == C: a lost transpose changes no shape
    active = reduce_mask(xp.asarray(np.ones((1, 6, 6), bool)), (2, 2), bsize=4, bstride=4)
    stack = sparse_gather(xp.asarray(x), *active, bsize=4, transpose=True)
    back = sparse_scatter(stack, *active, xp.asarray(np.zeros_like(x)), bsize=4, transpose=True)
    assert_same(back, xp.writable(x))
    assert_same(
        xp.writable(xp.to_numpy(stack).transpose(0, 2, 3, 1)),
        sparse_gather(xp.asarray(x), *active, bsize=4),
    )


@pytest.mark.parametrize(("cin", "cout"), [(3, 5), (8, 1), (1, 8)])
def test_input_and_output_channels_may_differ(xp, cin, cout):
    """The original scatters into a copy of x, so Cin must equal Cout."""
    rng = np.random.default_rng(0)
    x, w = rng.random((1, 9, 9, cin), np.float32), rng.random((3, 3, cin, cout), np.float32)
    mask = np.zeros((1, 9, 9), bool)
    mask[0, 4, 4] = True
    params = calc_block_params(x.shape, 5, 3)
    grid = {"bsize": params.bsize, "boffset": params.boffset, "bstride": params.bstride}
    active = reduce_mask(xp.asarray(mask), params.bcount, **grid)
    y = xp.to_numpy(sbnet_cupy.sparse_conv2d(xp.asarray(x), xp.asarray(w), active, params))
    dense = oracles.conv2d(x, w)
    wanted = np.zeros_like(dense)
    for _, hi, wi in xp.to_numpy(active.active_block_indices):
        wanted[:, 3 * hi : 3 * hi + 3, 3 * wi : 3 * wi + 3] = 1
    assert 0 < wanted.sum() < wanted.size
    assert_close(y, dense * wanted, terms=9 * cin, dtype=np.float32, magnitude=dense)


@pytest.mark.parametrize("size", [(9, 11), (6, 6), (3, 4)])
def test_borders_of_a_residual_unit(xp, size):
    """Zeros pad relu(bn2(...)), not x: the original is wrong at borders wherever shift2 > 0."""
    rng = np.random.default_rng(0)
    cin, cmid = 6, 4
    shapes = [(1, 1, cin, cmid), (3, 3, cmid, cmid), (1, 1, cmid, cin)]
    w1, w2, w3 = (rng.standard_normal(s).astype(np.float32) for s in shapes)
    scales = [rng.random(c, np.float32) + np.float32(0.5) for c in (cin, cmid, cmid)]
    shifts = [rng.random(c, np.float32) + np.float32(0.5) for c in (cin, cmid, cmid)]  # all > 0
    x = rng.standard_normal((2, *size, cin)).astype(np.float32)

    def unit(x, w1, w2, w3):
        a1, a2, a3 = (
            lambda t, s=s, b=b: np.maximum(t * s.astype(np.float64) + b, 0)
            for s, b in zip(scales, shifts, strict=True)
        )
        inner = oracles.conv2d(a2(oracles.conv2d(a1(x), w1)), w2)
        return x + oracles.conv2d(a3(inner), w3)

    weights = sbnet_cupy.BottleneckWeights(
        *map(xp.asarray, (w1, w2, w3)),
        **{f"scale{i}": xp.asarray(s) for i, s in enumerate(scales, 1)},
        **{f"shift{i}": xp.asarray(s) for i, s in enumerate(shifts, 1)},
    )
    params = calc_block_params_res_block(x.shape, 5, [1, 3, 1])
    active = reduce_mask(
        xp.asarray(np.ones((2, *size), bool)), params.bcount,
        bsize=params.bsize, boffset=params.boffset, bstride=params.bstride,
    )  # fmt: skip
    y = sbnet_cupy.sparse_res_block_bottleneck(xp.asarray(x), weights, active, params)
    magnitude = unit(abs(x), abs(w1), abs(w2), abs(w3))
    terms = cin + 9 * cmid + cmid + 8  # the three sums in a row, scales, shifts and the residual
    assert_close(
        xp.to_numpy(y), unit(x, w1, w2, w3), terms=terms, dtype=np.float32, magnitude=magnitude
    )


def test_the_order_of_blocks_is_always_the_raster_order(xp):
    """The original appends with an atomic counter: another order on every run."""
    mask = xp.asarray(np.random.default_rng(0).random((3, 64, 96)) < 0.05)
    first = reduce_mask(mask, (32, 48), bsize=2)
    rows = [tuple(row) for row in xp.to_numpy(first.active_block_indices).tolist()]
    assert len(rows) > 500 and rows == sorted(rows)
    for _ in range(5):
        again = reduce_mask(mask, (32, 48), bsize=2)
        assert_same(again.active_block_indices, first.active_block_indices)
