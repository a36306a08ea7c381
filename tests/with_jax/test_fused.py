"""The layers of the JAX adapter by one kernel: the package's bits, fresh weights, own memory."""

import functools

import numpy as np
import pytest

import sbnet_cupy as sb
from support.adapter_cases import (
    BFLOAT16,
    COUNT,
    IMAGE,
    X,
    convolution,
    hand_over,
    layer,
    normal,
    same,
    unit_layer,
    unit_weights,
)

HALVES = [np.float16, BFLOAT16]


@pytest.fixture(params=["jit", "eager"])
def wrap(request, jax):
    return jax.jit if request.param == "jit" else lambda function: function


def precise(dtype):
    """A GPU has no kernel for the unit in IEEE float32."""
    return {"precision": "tf32"} if dtype is np.float32 else {}


@pytest.mark.parametrize("dtype", [np.float32, *HALVES], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"strides": 2, "activation": "gelu", "bias": np.float32},
        {"data_format": "NCHW", "w_format": "OIHW", "activation": "relu", "bias": np.float16},
        {"base": True, "precision": "tf32"},
    ],
    ids=str,
)
def test_conv(sbj, place, wrap, options, dtype):
    params, active = layer(options.get("strides", 1))
    x, w = X.astype(dtype), normal(3, 3, 3, 4, dtype=dtype)
    if "w_format" in options:
        x = np.ascontiguousarray(x.transpose(0, 3, 1, 2))
        w = np.ascontiguousarray(w.transpose(3, 2, 0, 1))
    bias = normal(4, dtype=options["bias"]) if "bias" in options else None
    base = normal(*X.shape[:3], 4, dtype=dtype) if "base" in options else None
    options = {k: v for k, v in options.items() if k not in ("bias", "base")}
    given = x, w, tuple(active), params, bias, base

    def run(module, make):
        function = functools.partial(convolution, module, method="fused", **options)
        function = wrap(function) if module is sbj else function
        return function(*hand_over(given, make))

    same(run(sbj, place.make), run(sb, place.native))


@pytest.mark.parametrize("dtype", [np.float32, *HALVES], ids=str)
@pytest.mark.parametrize("tables", ["wide", "tight", "doubles"])
@pytest.mark.parametrize("with_base", [False, True])
def test_unit(sbj, place, wrap, jax, dtype, tables, with_base):
    params, active = unit_layer()
    tables = {"wide": np.float32, "tight": dtype, "doubles": np.float64}[tables]
    base = (2 * IMAGE).astype(dtype) if with_base else None
    given = IMAGE.astype(dtype), unit_weights(dtype, tables), tuple(active), params, base

    def run(module, make):
        def unit(x, weights, active, params, base):
            layer = module.sparse_res_block_bottleneck
            return layer(x, weights, active, params, base=base, method="fused", **precise(dtype))

        return (wrap(unit) if module is sbj else unit)(*hand_over(given, make))

    with jax.enable_x64(True):
        same(run(sbj, place.make), run(sb, place.native))


def test_sixty_four_bits(sbj, jax):
    """On a CPU, in which float64 is no worse than others."""
    params, active = layer()
    x, w, bias = (normal(*s, dtype=np.float64) for s in (X.shape, (3, 3, 3, 4), (4,)))
    given = x, w, tuple(active), params, bias
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        convolve = functools.partial(convolution, sbj, method="fused")
        same(jax.jit(convolve)(*hand_over(given, jax.numpy.asarray)),
             convolution(sb, *given, method="fused"))  # fmt: skip
        params, active = unit_layer()
        given = IMAGE.astype(np.float64), unit_weights(np.float64), tuple(active), params
        unit = functools.partial(sbj.sparse_res_block_bottleneck, method="fused")
        same(jax.jit(unit)(*hand_over(given, jax.numpy.asarray)),
             sb.sparse_res_block_bottleneck(*given, method="fused"))  # fmt: skip


def test_weights_are_those_of_the_moment(sbj, place, jax):
    """The same compiled function, other weights each time: in other memory, and in the same."""
    params, active = layer()
    pair = tuple(map(place.make, active))
    compiled = jax.jit(functools.partial(convolution, sbj, method="fused"))
    stepped = jax.jit(lambda w: w + 1, donate_argnums=0)
    w = place.make(normal(3, 3, 3, 4).round())
    for _ in range(4):
        known = place.native(np.asarray(w))
        expected = convolution(sb, place.native(X), known, tuple(map(place.native, active)), params,
                               method="fused")  # fmt: skip
        same(compiled(place.make(X), w, pair, params), expected)
        w = stepped(w)


def test_the_base_is_written_in_place_and_nothing_else(sbj, place, jax):
    params, active = unit_layer()
    given = place.make(IMAGE), unit_weights(np.float32)._map_arrays(place.make)
    pair = tuple(map(place.make, active))

    def unit(base, x, weights):
        options = {"precision": "tf32", "method": "fused"}
        return sbj.sparse_res_block_bottleneck(x, weights, pair, params, base=base, **options)

    expected = unit(*hand_over((2 * IMAGE,), place.make), *given)
    base = jax.jit(lambda x: 2 * x)(given[0])  # XLA's own memory
    donated = place.address(base)
    y = jax.jit(unit, donate_argnums=0)(base, *given).block_until_ready()
    assert place.address(y) == donated and base.is_deleted()
    same(y, expected)
    same(given[0], IMAGE)

    # The image is both read and under the result: XLA must copy it, donated or its own.
    plain = unit(None, *given)
    same(given[0], IMAGE)
    same(jax.jit(lambda x, weights: unit(None, x / 2, weights))(2 * given[0], given[1]), plain)
    image = jax.jit(lambda x: x / 2)(2 * given[0])
    same(jax.jit(functools.partial(unit, None), donate_argnums=0)(image, given[1]), plain)
    same(jax.jit(lambda x, weights: unit(x, x, weights))(*given), plain)


def test_nothing_to_do(sbj, place, wrap):
    """No row, no image, and images of no channel, of which activation(bias) is left."""
    params, active = layer()
    none = place.make(COUNT), place.make(np.zeros((0, 3), np.int32))
    w, base = place.make(normal(3, 3, 3, 4)), place.make(normal(*X.shape[:3], 4))
    convolve = wrap(functools.partial(convolution, sbj, method="fused"))
    same(convolve(place.make(X), w, none, params), np.zeros((*X.shape[:3], 4), np.float32))
    same(convolve(place.make(X), w, none, params, None, base), base)
    pair = tuple(map(place.make, active))
    assert convolve(place.make(X[:0]), w, pair, params).shape == (0, *X.shape[1:3], 4)
    unit = wrap(functools.partial(sbj.sparse_res_block_bottleneck, method="fused",
                                  precision="tf32"))  # fmt: skip
    params, active = unit_layer()
    weights, pair = unit_weights(np.float32)._map_arrays(place.make), tuple(map(place.make, active))
    same(unit(place.make(IMAGE), weights, none, params), IMAGE)
    assert unit(place.make(IMAGE[:0]), weights, pair, params).shape == (0, *IMAGE.shape[1:])


def test_images_of_no_channel(sbj, jax):
    params, active = layer()
    x, w, bias = X[..., :0], np.zeros((3, 3, 0, 4), np.float32), normal(4)
    given = np.ascontiguousarray(x), w, tuple(active), params, bias
    with jax.default_device(jax.devices("cpu")[0]):
        y = convolution(sbj, *hand_over(given, jax.numpy.asarray), method="fused")
    same(y, convolution(sb, *given, method="fused"))
