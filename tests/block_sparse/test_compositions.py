"""Compositions of operations, in the namespace of NumPy and CuPy, are what the core computes."""

import re

import numpy as np
import pytest

import sbnet_cupy as sb
from sbnet_cupy.block_sparse import compositions, native
from sbnet_cupy.block_sparse.gather_scatter.coverage import last_writers, pixels_read
from sbnet_cupy.block_sparse.grid import inside_image, resolve_grid, resolve_layout
from sbnet_cupy.core.spec import spec_of
from sbnet_cupy.operators import OPERATORS
from support.assertions import assert_same

ROWS = np.array([[0, 0, 0], [0, 1, 2], [1, 3, 1], [1, 0, 4], [0, 1, 2], [-1, 5, 5]], np.int32)
COUNT = np.array([5], np.int32)
GRIDS = [((4, 3), (0, 0), (4, 3)), ((4, 5), (-1, -2), (2, 3))]
LAYOUTS = [("NHWC", False), ("NHWC", True), ("NCHW", False), ("NCHW", True)]


def image(data_format, channels=3, seed=0):
    x = np.random.default_rng(seed).standard_normal((2, 9, 14, channels)).astype(np.float32)
    return x if data_format == "NHWC" else np.ascontiguousarray(x.transpose(0, 3, 1, 2))


def active(xp):
    return xp.asarray(COUNT), xp.asarray(ROWS)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize(("data_format", "transpose"), LAYOUTS)
def test_a_transformed_gather_is_a_plain_one_and_arithmetic(xp, grid, data_format, transpose):
    x = xp.asarray(image(data_format))
    tables = {"scale": xp.asarray(np.float32([2, 3, 4])), "shift": xp.asarray(np.ones(3, "f4"))}
    options = {"transpose": transpose, "data_format": data_format, "activation": "relu"} | tables
    names = dict(zip(("bsize", "boffset", "bstride"), grid, strict=True))
    composed = compositions.transformed_gather(native, x, *active(xp), *grid, **options)
    assert_same(composed, sb.sparse_gather(x, *active(xp), **names, **options))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize(("data_format", "transpose"), LAYOUTS)
def test_which_pixels_are_read_and_which_are_shown(xp, grid, data_format, transpose):
    x, table = xp.asarray(image(data_format)), active(xp)
    layout = resolve_layout(spec_of(x), data_format, transpose)
    places = resolve_grid(*grid)
    read = compositions.pixels_read(native, x, *table, *grid, data_format=data_format)
    plain = layout._replace(blocks_channels_last=True)
    assert_same(read, pixels_read(*table, plain, places))
    options = {"transpose": transpose, "data_format": data_format}
    last = compositions.last_writer(native, x, *table, *grid, **options)
    _, stays = last_writers(*table, layout, places)
    assert_same(last, stays)
    inside = compositions.inside(native, table[1], places, (9, 14))
    assert_same(inside, inside_image(table[1], places, (9, 14)))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize(("data_format", "transpose"), LAYOUTS)
@pytest.mark.parametrize("add", [False, True])
def test_gradients_by_name_are_those_of_the_core(xp, grid, data_format, transpose, add):
    x, table = xp.asarray(image(data_format)), active(xp)
    names = dict(zip(("bsize", "boffset", "bstride"), grid, strict=True))
    options = {"transpose": transpose, "data_format": data_format}
    blocks = sb.sparse_gather(x, *table, **names, **options)
    gather, scatter = OPERATORS["sparse_gather"], OPERATORS["sparse_scatter"]
    arrays = (x, *table, None, None, None)
    given = (*grid, transpose, data_format, None)
    (dx,) = gather.gradient(native, arrays, given, blocks, gather.linear).values()
    assert_same(dx, sb.sparse_gather_grad(blocks, *table, x, **names, **options).x)
    assert gather.gradient(native, arrays, given, blocks, ()) == {}

    arrays, given = (blocks, *table, x, None), (*grid, add, True, transpose, data_format)
    found = scatter.gradient(native, arrays, given, x, scatter.linear)
    wanted = sb.sparse_scatter_grad(x, *table, add=add, **names, **options)
    assert set(found) == {"blocks", "x"}
    assert_same(found["blocks"], wanted.blocks)
    assert_same(found["x"], wanted.x)


def layer(xp, calculate, *sizes):
    x = image("NHWC", channels=4)
    params = calculate(x.shape, *sizes)
    mask = np.random.default_rng(1).random(x.shape[:3]) < 0.05
    grid = {"bsize": params.bsize, "boffset": params.boffset, "bstride": params.bstride}
    return xp.asarray(x), params, tuple(sb.reduce_mask(xp.asarray(mask), params.bcount, **grid))


@pytest.mark.parametrize("base", [False, True])
def test_a_gathered_convolution(xp, base):
    x, params, table = layer(xp, sb.calc_block_params, 5, 3)
    w = xp.asarray(np.random.default_rng(2).standard_normal((3, 3, 4, 4)).astype(np.float32))
    bias = xp.asarray(np.ones(4, np.float32))
    below = x if base else native.zeros(x.shape, x.dtype, x)
    options = {"bias": bias, "activation": "relu"}
    composed = compositions.gathered_convolution(
        native, x, w, table, params, below, strides=(1, 1), **options
    )
    given = {"base": x} if base else {}
    options |= {"method": "gather"} | given
    assert_same(composed, sb.sparse_conv2d(x, w, table, params, **options))


@pytest.mark.parametrize("project", [False, True])
@pytest.mark.parametrize("base", [False, True])
def test_a_residual_unit(xp, base, project):
    x, params, table = layer(xp, sb.calc_block_params_res_block, 6, [1, 3, 1])
    drawn = sb.BottleneckWeights.random(4, 2)._arrays()
    weights = sb.BottleneckWeights(*map(xp.asarray, drawn))
    w = np.random.default_rng(2).standard_normal((1, 1, 4, 4)).astype(np.float32)
    w = xp.asarray(w) if project else None
    below = xp.asarray(np.full(x.shape, 3, np.float32)) if base else None
    composed = compositions.residual_unit(
        native, x, weights, w, table, params, below, strides=(1, 1)
    )
    unit = {"w_project": w, "base": below, "method": "gather"}
    assert_same(composed, sb.sparse_res_block_bottleneck(x, weights, table, params, **unit))


def test_the_documentation_names_the_operations():
    """An adapter supplies what the head of the file names; the functions ask for nothing else."""
    asked = {
        name
        for function in vars(compositions).values()
        if hasattr(function, "__code__")
        for name in function.__code__.co_names
        if hasattr(native, name)
    }
    documented = set(re.findall(r"``(\w+)\(", compositions.__doc__)) - {"activation"}
    assert asked <= documented <= set(vars(native))
