"""Blocks of pixels and lists of pixels: two ways to say where a picture matters."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sbnet_cupy as sb
from support.assertions import assert_close, assert_same, to_numpy


@st.composite
def masks(draw):
    """Draw a mask of images that no whole number of blocks need cover, and the block."""
    shape = draw(st.tuples(st.integers(1, 3), st.integers(1, 13), st.integers(1, 13)))
    density = draw(st.sampled_from([0.0, 0.05, 0.3, 1.0]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    block = draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    return rng.random(shape) < density, block


@given(drawn=masks())
def test_there_and_back(xp, drawn):
    mask, block = drawn
    active = sb.ActiveBlocks.from_mask(xp.asarray(mask), bsize=block, ksize=1)
    whole = active.sites(block, image_size=mask.shape[1:])
    covered = to_numpy(active.to_dense()).repeat(block[0], 1).repeat(block[1], 2)
    covered = covered[:, : mask.shape[1], : mask.shape[2]]
    assert to_numpy(whole.indices).tolist() == np.argwhere(covered).tolist()
    sites = sb.CoordinateMap(*active.sites(block, xp.asarray(mask[..., None])))
    assert to_numpy(sites.indices).tolist() == np.argwhere(mask).tolist()
    assert sites.number() == mask.sum() and sites.spatial_shape == mask.shape[1:]
    roomy = active.sites(block, xp.asarray(mask), capacity=int(mask.sum()) + 2)
    assert_same(roomy.indices[:-2], sites.indices)
    assert (to_numpy(roomy.indices)[-2:] == -1).all() and int(roomy.count[0]) == mask.sum()
    for listed in (sites, whole, sb.CoordinateMap(*roomy)):
        again = sb.blocks_of(listed, bsize=block)
        assert_same(again.active_block_indices, active.active_block_indices)
        assert again.grid == active.grid
    few = sb.blocks_of(sites, bsize=block, capacity=1)
    assert few.capacity == 1 and few.count() == active.count()


def test_block_convolution_then_masking_is_submanifold_convolution(xp):
    """With zeros outside of the mask."""
    rng = np.random.default_rng(3)
    mask = sb.masks.blobs((2, 21, 30), 0.2, seed=1)
    image = np.where(mask[..., None], rng.standard_normal((*mask.shape, 5)), 0)
    w, bias = rng.standard_normal((3, 3, 5, 4)), rng.standard_normal(4)
    given = xp.asarray(image), xp.asarray(w)
    blocks = sb.sparse_conv2d(*given, xp.asarray(mask), bsize=8, bias=xp.asarray(bias))
    x = sb.dense_to_sparse(given[0], mask=xp.asarray(mask))
    y = sb.submanifold_conv(x, given[1], bias=xp.asarray(bias)).dense()
    size = sb.conv2d(abs(image), abs(w), padding="SAME", bias=abs(bias))
    masked = to_numpy(blocks) * mask[..., None]
    assert_close(to_numpy(y), masked, terms=2 * 46, dtype=np.float64, magnitude=size)
    sites = sb.blocks_of(x, bsize=8, ksize=3)  # or of x.coordinates
    again = sb.sparse_conv2d(*given, sites, bsize=8, bias=xp.asarray(bias))
    assert_same(again, blocks)


def test_what_does_not_fit_is_named(xp):
    active = sb.ActiveBlocks.from_mask(xp.asarray(np.ones((1, 8, 8), bool)), bsize=4, ksize=1)
    with pytest.raises(sb.ShapeError, match=r"image_size must have .* got \(3, 8\)"):
        active.sites(4, image_size=(3, 8))
    with pytest.raises(sb.ShapeError, match=r"mask must have .* got \(9, 8\)"):
        active.sites(4, xp.asarray(np.ones((1, 9, 8))))
    with pytest.raises(sb.ShapeError, match="mask must have shape"):
        active.sites(4, xp.asarray(np.ones((2, 8, 8))))
    with pytest.raises(sb.ShapeError, match="bsize"):
        active.sites(0)
    with pytest.raises(sb.ShapeError, match="capacity"):
        active.sites(4, capacity=-1)
    rows = xp.asarray(np.array([[0, 1, 1, 1]], np.int32))
    cloud, _ = sb.coordinate_map(rows, spatial_shape=(4, 4, 4))
    with pytest.raises(sb.ShapeError, match="coordinates must be those of images"):
        sb.blocks_of(cloud, bsize=4)
    unknown, _ = sb.coordinate_map(rows[:, :3].copy(), capacity=2)
    with pytest.raises(sb.ShapeError, match="known shape and batch size"):
        sb.blocks_of(unknown, bsize=4)
