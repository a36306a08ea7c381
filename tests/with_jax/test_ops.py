"""reduce_mask, sparse_gather, sparse_scatter for JAX: the package's bits, jitted and eager."""

import functools

import numpy as np
import pytest

import sbnet_cupy as sb
from support.adapter_cases import (
    BFLOAT16,
    COUNT,
    MASK,
    OPTIONS,
    PLAIN,
    ROWS,
    TWICE,
    X,
    image,
    same,
    stack,
)


def compare(place, function, core, *arrays, wrap, **options):
    """The function of JAX arrays gives the bits that the package gives for native ones."""
    actual = wrap(functools.partial(function, **options))(*map(place.make, arrays))
    same(actual, core(*map(place.native, arrays), **options))


@pytest.fixture(params=["jit", "eager"])
def wrap(request, jax):
    return jax.jit if request.param == "jit" else lambda function: function


@pytest.mark.parametrize("capacity", [0, 1, 20])
@pytest.mark.parametrize("options", [{}, {"tol": 0.2, "avgpool": True}], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.bool_, np.int8, BFLOAT16], ids=str)
def test_reduce_mask(sbj, place, wrap, dtype, options, capacity):
    grid = {"bsize": 3, "boffset": (-1, 0), "bstride": 2}

    def listed(module, mask):
        return module.reduce_mask(mask, (4, 4), capacity=capacity, **grid, **options)

    mask = MASK.astype(dtype)
    expected = listed(sb, place.native(mask))
    actual = wrap(functools.partial(listed, sbj))(place.make(mask))
    assert type(actual) is sb.ActiveBlocks and actual.grid == expected.grid
    assert actual.count() == expected.count() > 1
    first = wrap(functools.partial(listed, sbj))(place.make(mask[:, None]))  # channels first
    for a, e, f in zip(actual, expected, first, strict=True):
        same(a, e)
        same(f, e)


def test_reduce_mask_counts_where_shapes_may_depend_on_data(sbj, place):
    active = sbj.reduce_mask(place.make(MASK[..., None]), (2, 3), bsize=4)
    same(active.active_block_indices, sb.reduce_mask(MASK, (2, 3), bsize=4).active_block_indices)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16, np.bool_, "c8"], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_sparse_gather(sbj, place, wrap, options, dtype):
    arrays = image(options, dtype), COUNT, ROWS
    compare(place, sbj.sparse_gather, sb.sparse_gather, *arrays, wrap=wrap, **options)


@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu"])
@pytest.mark.parametrize("options", OPTIONS[1:4], ids=str)
def test_fused_sparse_gather(sbj, place, jax, options, activation):
    x, scale, shift = image(options, BFLOAT16), X[0, 0, 0].astype(BFLOAT16), X[0, 0, 1]
    function = jax.jit(functools.partial(sbj.sparse_gather, activation=activation, **options))
    actual = function(*map(place.make, (x, COUNT, ROWS)), scale=place.make(scale),
                      shift=place.make(shift))  # fmt: skip
    options = options | {"scale": place.native(scale), "shift": place.native(shift)}
    native = map(place.native, (x, COUNT, ROWS))
    same(actual, sb.sparse_gather(*native, activation=activation, **options))


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16, np.int8], ids=str)
@pytest.mark.parametrize("rows", [ROWS, TWICE], ids=["once", "twice"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_sparse_scatter(sbj, place, wrap, options, rows, dtype, add):
    arrays = stack(options, dtype), COUNT, rows, image(options, dtype)
    options = options | {"add": add, "atomic": rows is TWICE or (add and "bstride" in options)}
    compare(place, sbj.sparse_scatter, sb.sparse_scatter, *arrays, wrap=wrap, **options)


def test_nothing_to_do(sbj, place, wrap):
    """XLA calls nobody for an empty result, and an empty argument changes nothing."""
    empty = place.make(np.zeros((0, 3), np.int32)), place.make(np.zeros((0, 4, 4, 3), np.float32))
    x, count = place.make(X), place.make(COUNT)
    assert wrap(functools.partial(sbj.sparse_gather, bsize=4))(x, count, empty[0]).shape == (
        0, 4, 4, 3,
    )  # fmt: skip
    scatter = wrap(functools.partial(sbj.sparse_scatter, bsize=4))
    same(scatter(empty[1], count, empty[0], x), X)
    flat = place.make(np.zeros((2, 0, 9, 3), np.float32))
    blocks = wrap(functools.partial(sbj.sparse_gather, bsize=2))(flat, count, place.make(ROWS))
    same(blocks, np.zeros((6, 2, 2, 3), np.float32))
    active = sbj.reduce_mask(flat[..., 0], (2, 2), bsize=4, capacity=3)
    assert active.count() == 0 and (active.active_block_indices == -1).all()
    assert sbj.reduce_mask(x[..., 0], (0, 2), bsize=4, capacity=3).count() == 0


def test_sixty_four_bits_under_x64(sbj, place, jax):
    with jax.enable_x64(True):
        for dtype in (np.float64, np.int64, np.complex128):
            x = image(PLAIN, dtype)
            blocks = jax.jit(functools.partial(sbj.sparse_gather, **PLAIN))
            got = blocks(*map(place.make, (x, COUNT, ROWS)))
            same(got, sb.sparse_gather(*map(place.native, (x, COUNT, ROWS)), **PLAIN))
            active = sbj.reduce_mask(place.make(MASK.astype(np.float64)), 2, bsize=4, capacity=4)
            assert {str(array.dtype) for array in active} == {"int32"}
