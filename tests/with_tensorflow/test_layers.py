"""The layers of the TensorFlow adapter: the package's results, within a bound from the dtype."""

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
def test_sparse_conv2d(tf, sbt, call_tensors, options, dtype):
    params, active = layer(options.get("strides", 1))
    x, w = image(options, dtype), normal(3, 3, 3, 4, dtype=dtype)
    if "w_format" in options:
        w = np.ascontiguousarray(w.transpose(3, 2, 0, 1))
    arrays = {"bias": normal(4)}
    if "base" in options:
        arrays["base"] = normal(*X.shape[:3], 4, dtype=dtype)
    options = {k: v for k, v in options.items() if k != "base"}
    wide = {k: v.astype(np.float64) for k, v in arrays.items()}
    given = x.astype(np.float64), w.astype(np.float64)
    expected = sb.sparse_conv2d(*given, active, params, **options, **wide)
    sizes = {k: np.abs(v) for k, v in wide.items()}
    size = sb.sparse_conv2d(*map(np.abs, given), active, params, **options, **sizes)
    tables = tuple(map(tf.constant, active))
    arrays = {name: tf.constant(value) for name, value in arrays.items()}

    def convolve(x):
        return sbt.sparse_conv2d(x, tf.constant(w), tables, params, **options, **arrays)

    # 27 products and the bias; no activation has a slope above 1.13.
    actual = to_numpy(call_tensors(convolve)(x))
    assert_close(actual, expected, terms=32, dtype=np.float32, magnitude=1.2 * size + 1)


@pytest.mark.parametrize("options", [{}, {"strides": 2}, {"base": True}], ids=str)
def test_sparse_res_block_bottleneck(tf, sbt, call_tensors, options):
    strides = options.get("strides", 1)
    params, active = layer(strides, bottleneck=True)
    weights = sb.BottleneckWeights.random(3, 4, 3 if not options else 5, dtype="float64")
    arrays = {"w_project": normal(1, 1, 3, 5, dtype=np.float64)} if options else {}
    if "base" in options:
        arrays["base"] = normal(*X.shape[:3], 5, dtype=np.float64)
    x = X.astype(np.float64)
    expected = sb.sparse_res_block_bottleneck(
        x, weights, active, params, strides=strides, **arrays
    )
    given = weights._map_arrays(tf.Variable), active._map_arrays(tf.constant), params
    arrays = {name: tf.constant(value) for name, value in arrays.items()}
    arrays["strides"] = strides
    unit = call_tensors(lambda x: sbt.sparse_res_block_bottleneck(x, *given, **arrays))
    # Three sums of at most 36 products, each of which may enlarge the error of the one before.
    bound = 200 * np.finfo(np.float64).eps * np.abs(expected).max() * 36
    np.testing.assert_allclose(to_numpy(unit(x)), expected, rtol=0, atol=bound)




@pytest.mark.parametrize("options", MASKED, ids=str)
@pytest.mark.parametrize("graph", [False, True])
def test_mask_conv2d(tf, sbt, graph, options):
    def call(x, w, mask):
        return sbt.mask_conv2d(x, w, mask, **options)

    check_mask_conv2d(tf.function(call) if graph else call, tf.constant, options)


def test_gradients_of_mask_conv2d(tf, sbt):
    x, w = tf.constant(image({})), tf.Variable(normal(3, 3, 3, 4))
    mask = tf.constant(np.abs(normal(*X.shape[:3])))
    signature = [tf.TensorSpec((None, *t.shape[1:]), t.dtype) for t in (x, mask)]

    @tf.function(input_signature=signature)
    def gradient(x, mask):
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(sbt.mask_conv2d(x, w, mask) ** 2)
        return tape.gradient(y, w)

    y = sbt.mask_conv2d(x, w, mask)
    step = 0.01 * normal(3, 3, 3, 4, seed=4)
    change = float(tf.reduce_sum(2 * y * sbt.mask_conv2d(x, tf.constant(step), mask)))
    assert abs(change - float(tf.reduce_sum(gradient(x, mask) * step))) < 1e-3 * (1 + abs(change))
