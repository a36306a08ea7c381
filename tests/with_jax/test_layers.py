"""The layers of the JAX adapter: the package's results, within a bound from the dtype."""

import functools

import numpy as np
import pytest

import sbnet_cupy as sb
from support.adapter_cases import BFLOAT16, MASKED, X, check_mask_conv2d, image, layer, normal
from support.assertions import assert_close, to_numpy


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"strides": 2, "activation": "gelu"},
        {"data_format": "NCHW", "w_format": "OIHW", "activation": "relu"},
        {"base": True},
    ],
    ids=str,
)
def test_sparse_conv2d(sbj, place, jax, options, dtype):
    params, active = layer(options.get("strides", 1))
    x = image(options, dtype)
    w = normal(3, 3, 3, 4, dtype=dtype)
    if "w_format" in options:
        w = np.ascontiguousarray(w.transpose(3, 2, 0, 1))
    arrays = {"bias": normal(4)}
    if "base" in options:
        arrays["base"] = normal(*X.shape[:3], 4, dtype=dtype)
    options = {k: v for k, v in options.items() if k != "base"}
    wide = {k: v.astype(np.float64) for k, v in arrays.items()}
    given = x.astype(np.float64), w.astype(np.float64)
    expected = sb.sparse_conv2d(*given, active, params, **options, **wide)
    size = sb.sparse_conv2d(*map(np.abs, given), active, params, **options, **abs_of(wide))
    function = jax.jit(functools.partial(sbj.sparse_conv2d, **options))
    pair = tuple(map(place.make, active))
    arrays = {name: place.make(value) for name, value in arrays.items()}
    actual = function(place.make(x), place.make(w), pair, params, **arrays)
    # 27 products and the bias; no activation has a slope above 1.13. XLA rounds halves on a GPU.
    sums = {"terms": 32, "dtype": np.float32}
    if place.name == "cuda" and np.dtype(dtype).itemsize == 2:
        sums = {"terms": 1, "dtype": dtype}
    assert_close(to_numpy(actual), expected, magnitude=1.2 * size + 1, **sums)


def abs_of(arrays):
    return {name: np.abs(value) for name, value in arrays.items()}


@pytest.mark.parametrize("options", [{}, {"strides": 2}, {"base": True}], ids=str)
def test_sparse_res_block_bottleneck(sbj, place, jax, options):
    strides = options.get("strides", 1)
    params, active = layer(strides, bottleneck=True)
    weights = sb.BottleneckWeights.random(3, 4, 3 if not options else 5, dtype="float64")
    arrays = {}
    if options:
        arrays["w_project"] = normal(1, 1, 3, 5, dtype=np.float64)
    if "base" in options:
        arrays["base"] = normal(*X.shape[:3], 5, dtype=np.float64)
    with jax.enable_x64(True):
        expected = sb.sparse_res_block_bottleneck(
            X.astype(np.float64), weights, active, params, strides=strides, **arrays
        )
        actual = jax.jit(functools.partial(sbj.sparse_res_block_bottleneck, strides=strides))(
            place.make(X.astype(np.float64)),
            weights._map_arrays(place.make),
            active._map_arrays(place.make),
            params,
            **{name: place.make(value) for name, value in arrays.items()},
        )
    # Three sums of at most 36 products, each of which may enlarge the error of the one before.
    bound = 200 * np.finfo(np.float64).eps * np.abs(expected).max() * 36
    np.testing.assert_allclose(to_numpy(actual), expected, rtol=0, atol=bound)




@pytest.mark.parametrize("options", MASKED, ids=str)
def test_mask_conv2d(sbj, place, jax, options):
    function = jax.jit(functools.partial(sbj.mask_conv2d, **options))
    if place.name == "cuda" and options.get("precision") == "tf32":
        pytest.skip("rounds the factors")
    check_mask_conv2d(function, place.make, options)


def test_gradients_of_mask_conv2d(sbj, place, jax):
    x, w = place.make(image({})), place.make(normal(3, 3, 3, 4))
    mask = place.make(np.abs(normal(*X.shape[:3])))
    gradients = jax.jit(jax.grad(lambda *arrays: sbj.mask_conv2d(*arrays).sum(), (0, 1, 2)))
    found = gradients(x, w, mask)
    for position, (array, gradient) in enumerate(zip((x, w, mask), found, strict=True)):
        step = 0.01 * normal(*array.shape, seed=4)
        ends = [
            [array + sign * step if i == position else a for i, a in enumerate((x, w, mask))]
            for sign in (1, -1)
        ]
        change = float(sbj.mask_conv2d(*ends[0]).sum() - sbj.mask_conv2d(*ends[1]).sum()) / 2
        assert abs(change - float((gradient * step).sum())) < 0.02 * (1 + abs(change))
    mapped = jax.vmap(lambda x, mask: sbj.mask_conv2d(x[None], w, mask[None])[0])(x, mask)
    expected = to_numpy(sbj.mask_conv2d(x, w, mask))
    assert_close(to_numpy(mapped), expected, terms=32, dtype=np.float32, magnitude=32)
