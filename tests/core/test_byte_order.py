"""Arrays in the other byte order: the message names the one to convert, and how."""

import dataclasses

import numpy as np
import pytest

import sbnet_cupy as sb
from sbnet_cupy import DTypeError
from support.bad_calls import VALID


def swapped(array):
    """Return the same values in the byte order that is not this machine's."""
    return array.astype(array.dtype.newbyteorder("S"))


CALLS = [
    ("conv2d", "x"),
    ("conv2d", "w"),
    ("conv2d_grad", "grad_y"),
    ("sparse_conv2d", "x"),
    ("sparse_conv2d", "w"),
    ("sparse_conv2d_grad", "grad_y"),
    ("fused_conv", "x"),
    ("sparse_scatter", "x"),
    ("sparse_scatter", "blocks"),
    ("sparse_gather_grad", "grad_blocks"),
    ("sparse_gather", "bin_counts"),
    ("sparse_scatter", "active_block_indices"),
]
ORDER = "big-endian" if np.dtype("=i4") == np.dtype("<i4") else "little-endian"


def message(name):
    return (
        f"{name} must be in this machine's byte order, got a {ORDER} array; pass "
        f"{name}.astype({name}.dtype.newbyteorder('='))"
    )


@pytest.mark.parametrize(("function", "name"), CALLS)
def test_the_message_names_the_array(function, name):
    arguments = VALID[function]
    getattr(sb, function)(**arguments)
    with pytest.raises(DTypeError) as raised:
        getattr(sb, function)(**arguments | {name: swapped(arguments[name])})
    assert str(raised.value) == message(name)


def test_base_residual_and_masks():
    call = VALID["sparse_conv2d"]
    y = sb.sparse_conv2d(**call)
    with pytest.raises(DTypeError) as raised:
        sb.sparse_conv2d(**call, base=swapped(y))
    assert str(raised.value) == message("base")
    with pytest.raises(DTypeError) as raised:
        sb.fused_conv(**VALID["fused_conv"], residual=swapped(y))
    assert str(raised.value) == message("residual")
    with pytest.raises(DTypeError) as raised:
        sb.masks.change(y, swapped(y), 0.5)
    assert str(raised.value) == message("current")


def test_units():
    x, weights = np.ones((1, 8, 8, 4), np.float32), sb.BottleneckWeights.random(4, 6)
    params = sb.calc_block_params_res_block(x.shape, 4, [1, 3, 1])
    table = np.array([1], np.int32), np.zeros((1, 3), np.int32)
    sb.sparse_res_block_bottleneck(x, weights, table, params)
    with pytest.raises(DTypeError) as raised:
        sb.sparse_res_block_bottleneck(swapped(x), weights, table, params)
    assert str(raised.value) == message("x")
    weights = dataclasses.replace(weights, w2=swapped(weights.w2))
    with pytest.raises(DTypeError) as raised:
        sb.sparse_res_block_bottleneck(x, weights, table, params)
    assert str(raised.value) == message("weights.w2")


def test_features_at_sites():
    rows, features = np.array([[0, 1], [0, 2], [0, 5]]), np.ones((3, 2), np.float32)
    w = np.ones((3, 2, 4), np.float32)
    x = sb.sparse_tensor(features, rows, spatial_shape=8)
    big = sb.sparse_tensor(swapped(features), rows, spatial_shape=8, mode="mean")
    y, pooled = sb.submanifold_conv(x, w), sb.sparse_max_pool(x, 2)
    window = sb.kernel_map(x, 3, onto=x)
    for name, call in {
        "features": lambda: sb.submanifold_conv(big, w),
        "w": lambda: sb.submanifold_conv(x, swapped(w)),
        "residual": lambda: sb.submanifold_conv(x, w, residual=swapped(y.features)),
        "grad_y": lambda: sb.sparse_max_pool_grad(swapped(pooled.features), x, 2),
        "indices": lambda: sb.coordinate_map(swapped(rows), spatial_shape=8),
    }.items():
        with pytest.raises(DTypeError) as raised:
            call()
        assert str(raised.value) == message(name)
    with pytest.raises(DTypeError) as raised:
        sb.site_conv_grad(swapped(y.features), x.features, w, window)
    assert str(raised.value) == message("grad_y")
    assert (sb.submanifold_conv(big, swapped(w)).features == y.features).all()


def test_what_the_message_says_works():
    call = VALID["sparse_conv2d"]
    x = swapped(call["x"])
    x = x.astype(x.dtype.newbyteorder("="))
    assert (sb.sparse_conv2d(**call | {"x": x}) == sb.sparse_conv2d(**call)).all()


def test_arrays_that_agree_are_taken():
    call = VALID["sparse_conv2d"]
    both = {name: swapped(call[name]) for name in ("x", "w")}
    y = sb.sparse_conv2d(**call | both)
    assert (y == sb.sparse_conv2d(**call)).all() and y.dtype == both["x"].dtype
