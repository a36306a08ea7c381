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
    sites = active.sites(block, xp.asarray(mask[..., None])).check()
    assert to_numpy(sites.indices).tolist() == np.argwhere(mask).tolist()
    assert sites.number() == mask.sum() and sites.capacity == mask.sum()
    assert (sites.batch_size, *sites.spatial_shape) == mask.shape
    roomy = active.sites(block, xp.asarray(mask), capacity=int(mask.sum()) + 2)
    assert_same(roomy.indices[:-2], sites.indices)
    assert (to_numpy(roomy.indices)[-2:] == -1).all() and int(roomy.count[0]) == mask.sum()
    for listed in (sites, whole, roomy):
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
    active = sb.blocks_of(x, bsize=8, ksize=3)  # or of x.coordinates
    again = sb.sparse_conv2d(*given, active, bsize=8, bias=xp.asarray(bias))
    assert_same(again, blocks)
    params = sb.calc_block_params(image.shape, 10, 3)
    sites = active.sites(params, xp.asarray(mask))
    assert_same(sites.indices, x.indices)
    again = sb.submanifold_conv(sb.SparseTensor(x.features, sites), given[1], bias=xp.asarray(bias))
    assert_same(again.dense(), y)


def test_what_does_not_fit_is_named(xp):
    active = sb.ActiveBlocks.from_mask(xp.asarray(np.ones((1, 8, 8), bool)), bsize=4, ksize=1)
    with pytest.raises(sb.ShapeError, match=r"image_size must have .* got \(3, 8\)"):
        active.sites(4, image_size=(3, 8))
    with pytest.raises(sb.ShapeError, match=r"mask must have .* got \(9, 8\)"):
        active.sites(4, xp.asarray(np.ones((1, 9, 8))))
    with pytest.raises(sb.ShapeError, match="mask must have shape"):
        active.sites(4, xp.asarray(np.ones((2, 8, 8))))
    with pytest.raises(sb.ShapeError, match="params must be a positive integer or a pair"):
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


def test_a_grid_without_blocks_covers_an_image_without_pixels(xp):
    active = sb.reduce_mask(xp.asarray(np.ones((1, 8, 8), bool)), (0, 2), bsize=4)
    with pytest.raises(sb.ShapeError, match=r"image_size must have .* got \(5, 8\)"):
        active.sites(4, image_size=(5, 8))
    with pytest.raises(sb.ShapeError, match=r"mask must have .* got \(8, 8\)"):
        active.sites(4, xp.asarray(np.ones((1, 8, 8))))
    for options in ({"image_size": (0, 7)}, {"mask": xp.asarray(np.ones((1, 0, 7)))}, {}):
        assert active.sites(4, **options).number() == 0


def test_what_is_left_out_is_told(xp):
    """Pixels that have no row, and those of blocks that have none, also by what is made of them."""
    mask = xp.asarray(np.ones((1, 8, 8), bool))
    whole = sb.ActiveBlocks.from_mask(mask, bsize=4, ksize=1)
    with pytest.raises(sb.CapacityError, match="got 63 for 64 sites"):
        whole.sites(4, capacity=63).check()
    few = sb.ActiveBlocks.from_mask(mask, bsize=4, ksize=1, capacity=3).sites(4, capacity=64)
    coarse = sb.kernel_map(few, 2, stride=2, capacity=16).target
    assert few.number() == 48 and coarse.number() == 12
    for sites in (few, coarse):
        with pytest.raises(sb.CapacityError, match="active blocks, got less for a list"):
            sites.check()


@pytest.fixture(params=["torch", "jax", "tensorflow"])
def framework(request):
    """A framework's adapter, and how an array becomes one of its own."""
    names = {"torch": ("torch", "st"), "jax": ("jax", "sbj"), "tensorflow": ("tf", "sbt")}
    library, adapter = map(request.getfixturevalue, names[request.param])
    made = {"torch": "from_numpy", "tensorflow": "constant"}
    if request.param == "jax":
        return adapter, library.numpy.asarray
    return adapter, getattr(library, made[request.param])


def test_arrays_of_frameworks(framework):
    """Sites of their arrays, for their convolutions and for those of the package."""
    adapter, array = framework
    rng = np.random.default_rng(4)
    mask = sb.masks.blobs((2, 21, 30), 0.2, seed=1)
    active = sb.ActiveBlocks.from_mask(mask, bsize=8, ksize=1)
    expected = active.sites(8, mask)
    features = rng.standard_normal((expected.number(), 5)).astype(np.float32)
    w = rng.standard_normal((3, 3, 5, 4)).astype(np.float32)
    y = sb.submanifold_conv(sb.SparseTensor(features, expected), w)
    sites = active._map_arrays(array).sites(8, array(mask)).check()
    assert type(sites) is sb.CoordinateMap
    assert all(type(held) is type(array(mask)) for held in sites._arrays())
    assert_same(to_numpy(sites.indices), expected.indices)
    assert (sites.number(), sites.spatial_shape, sites.batch_size) == (mask.sum(), (21, 30), 2)
    x = sb.SparseTensor(array(features), sites)
    terms = {"terms": 45, "dtype": np.float32}
    size = sb.submanifold_conv(sb.SparseTensor(abs(features), expected), abs(w)).features
    for module in (adapter, sb):
        found = to_numpy(module.submanifold_conv(x, array(w)).features)
        assert_close(found, y.features, **terms, magnitude=size)
    for listed in (sites, x):
        again = sb.blocks_of(listed, bsize=8)
        assert type(again.bin_counts) is type(array(mask))
        assert_same(to_numpy(again.active_block_indices), active.active_block_indices)


def test_jax_takes_the_sites_into_a_compiled_function(jax, sbj):
    mask = jax.numpy.asarray(sb.masks.blobs((1, 16, 16), 0.3, seed=2))
    sites = sb.ActiveBlocks.from_mask(mask, bsize=4, ksize=1).sites(4, mask, capacity=200)
    w = jax.numpy.ones((3, 3, 1, 1))

    def convolve(sites):
        features = sites.valid()[:, None].astype(w.dtype)
        return sbj.submanifold_conv(sb.SparseTensor(features, sites), w).features

    assert_same(to_numpy(jax.jit(convolve)(sites)), to_numpy(convolve(sites)))
