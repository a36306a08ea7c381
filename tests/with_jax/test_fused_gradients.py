"""Gradients of the fused layers in JAX: those of the gathered layers, of any order."""

import functools

import numpy as np
import pytest

import sbnet_cupy as sb
from support.adapter_cases import (
    IMAGE,
    X,
    convolution,
    layer,
    normal,
    same,
    unit_layer,
    unit_weights,
)
from support.assertions import assert_close, to_numpy


@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"data_format": "NCHW", "activation": "silu"}], ids=str)
@pytest.mark.parametrize("with_base", [False, True])
def test_gradient_of_conv_is_that_of_the_gathered_one(sbj, place, jax, dtype, options, with_base):
    params, active = layer()
    pair = tuple(map(place.make, active))
    axes = (0, 3, 1, 2) if "data_format" in options else (0, 1, 2, 3)
    arrays = X, normal(3, 3, 3, 4), normal(4), normal(*X.shape[:3], 4)
    x, w, bias, v = (place.make(a.astype(dtype)) for a in arrays)
    x, v = x.transpose(axes), v.transpose(axes)
    given = [x, w, bias, *([2 * v] if with_base else [])]

    def gradient(method):
        def linear(x, w, bias, base=None):
            y = convolution(sbj, x, w, pair, params, bias, base, method=method, **options)
            return (v * y).astype("float32").sum()

        return jax.jit(jax.grad(linear, argnums=range(len(given))))(*given)

    for fused, gathered in zip(gradient("fused"), gradient("gather"), strict=True):
        alike(place, fused, gathered, dtype)


@pytest.mark.parametrize("with_base", [False, True])
def test_gradient_of_the_unit_is_that_of_the_gathered_one(sbj, place, jax, with_base):
    params, active = unit_layer()
    pair, v = tuple(map(place.make, active)), place.make(normal(*IMAGE.shape, seed=2))
    weights = unit_weights(np.float32, np.float16)._map_arrays(place.make)
    given = (place.make(IMAGE), weights, *([2 * v] if with_base else []))

    def gradient(method):
        def linear(x, weights, base=None):
            layer = sbj.sparse_res_block_bottleneck
            options = {"precision": "tf32", "method": method}
            return (v * layer(x, weights, pair, params, base=base, **options)).sum()

        return jax.jit(jax.grad(linear, argnums=range(len(given))))(*given)

    fused, gathered = gradient("fused"), gradient("gather")
    assert type(fused[1]) is sb.BottleneckWeights
    jax.tree_util.tree_map(functools.partial(alike, place, dtype=np.float16), fused, gathered)


def alike(place, actual, expected, dtype):
    """The same bits where XLA convolves the same in two programs; on a GPU it may choose anew."""
    if place.name == "cpu":
        return same(actual, expected)
    actual, expected = map(to_numpy, (actual, expected))
    assert actual.dtype == expected.dtype
    wide = expected.astype(np.float64)
    size = np.full(wide.shape, np.abs(wide).max())
    terms = 8 if np.dtype(dtype).itemsize == 2 else 27 * X.size  # rounded each; or sums of products
    return assert_close(actual, wide, terms=terms, dtype=dtype, magnitude=size)


def test_gradients_of_any_order(sbj, jax):
    """Against central differences in float64, twice, and through a checkpointed loop."""
    from jax.test_util import check_grads

    params, active = layer()
    shapes = (X.shape, (3, 3, 3, 2), (2,), (*X.shape[:3], 2))
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        pair = tuple(map(jax.numpy.asarray, active))

        def convolve(x, w, bias, base):
            options = {"activation": "silu", "method": "fused"}
            return convolution(sbj, x, w, pair, params, bias, base, **options)

        arrays = [normal(*s, seed=i, dtype=np.float64) for i, s in enumerate(shapes)]
        check_grads(jax.jit(convolve), arrays, 2, modes=["rev"])

        def loop(x, w, bias, base):
            def step(x, _):
                y = jax.checkpoint(convolve)(x, w, bias, base)
                return jax.numpy.concatenate([y, x[..., :1]], -1), None

            return jax.lax.scan(step, x, length=2)[0]

        check_grads(jax.jit(loop), arrays, 1, modes=["rev"])
