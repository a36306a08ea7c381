"""The layers of the TensorFlow adapter: the package's results, within a bound from the dtype."""

import sys

import numpy as np
import pytest

import sbnet_cupy as sb
from sbnet_cupy.dense.conv2d import resolve_problem
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


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_a_layer_of_keras_learns(tf, sbt, policy):
    """Its weights are variables of Keras, in the dtype that it computes in while it is called."""

    class Convolution(tf.keras.layers.Layer):
        def build(self, shapes):
            self.kernel = self.add_weight(shape=(3, 3, shapes[0][-1], 5))
            self.bias = self.add_weight(shape=(5,), initializer="ones")

        def call(self, given):
            x, mask = given
            return sbt.sparse_conv2d(x, self.kernel, mask, bsize=4, bias=self.bias)

    tf.keras.utils.set_random_seed(0)
    x, mask = normal(2, 8, 8, 3), np.zeros((2, 8, 8), bool)
    mask[1, 5, 2] = True
    images, masks = tf.keras.Input((8, 8, 3)), tf.keras.Input((8, 8), dtype="bool")
    convolution = Convolution(dtype=policy)
    model = tf.keras.Model([images, masks], convolution([images, masks]))
    model.compile("sgd", "mse", run_eagerly=policy == "float32")
    before = [weight.numpy() for weight in convolution.weights]
    model.fit([x, mask], np.zeros((2, 8, 8, 5), np.float32), verbose=0)
    y = model([x, mask])
    assert y.dtype == policy.removeprefix("mixed_")
    assert np.argwhere(y[..., 0])[:, 0].tolist() == [1] * 16
    for weight, old in zip(convolution.weights, before, strict=True):
        assert (weight.numpy() != old).all()


def test_variables_of_keras_are_differentiated(tf, sbt):
    x, w, mask = normal(1, 8, 8, 3), normal(3, 3, 3, 4), np.ones((1, 8, 8), bool)
    kernel = tf.keras.Variable(w)
    with tf.GradientTape() as tape:
        y = sbt.sparse_conv2d(tf.constant(x), kernel, tf.constant(mask), bsize=4)
        total = tf.reduce_sum(y)
    expected = sb.sparse_conv2d_grad(np.ones_like(y), x, w, mask, bsize=4).w
    size = sb.sparse_conv2d_grad(np.ones_like(y), abs(x), w, mask, bsize=4).w
    found = tape.gradient(total, kernel.value)
    assert_close(to_numpy(found), expected.astype("f8"), terms=128, dtype="f4", magnitude=size)


def test_images_of_no_channels(tf, sbt):
    """The result is the bias, and gradients of nothing are empty, in a graph too."""
    x, w, bias = tf.ones([1, 8, 7, 0]), tf.ones([3, 3, 0, 4]), tf.ones([4])
    mask = np.eye(8)[:, :7]

    def gradients(x, w, bias):
        with tf.GradientTape() as tape:
            tape.watch([x, w, bias])
            y = sbt.sparse_conv2d(x, w, tf.constant(mask), bsize=3, strides=2, bias=bias)
        return y, tape.gradient(y, [x, w, bias])

    expected = sb.sparse_conv2d(*map(to_numpy, (x, w)), mask, bsize=3, strides=2, bias=np.ones(4))
    for function in (gradients, tf.function(gradients)):
        y, found = function(x, w, bias)
        np.testing.assert_array_equal(to_numpy(y), expected)
        assert [g.shape for g in found] == [t.shape for t in (x, w, bias)]
        assert to_numpy(found[2]).sum() == expected.sum()
    assert sbt.mask_conv2d(x, w, tf.constant(mask)).shape == (1, 8, 7, 4)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("method", ["gather", "fused"])
def test_nan_past_the_last_window_is_in_no_gradient(tf, sbt, activation, method):
    """With strides an image may have pixels that no window reads, but a block beyond its result."""
    x, w, mask = normal(1, 8, 9, 2), normal(3, 3, 2, 3, seed=1), np.ones((1, 8, 9), bool)
    wild = x.copy()  # windows read 7 rows and 7 columns
    wild[:, 7:], wild[:, :, 7:] = np.nan, np.inf
    options = {"bsize": 4, "strides": (2, 4), "padding": "VALID", "activation": activation}
    found = []
    for values in (x, wild):
        given = [tf.constant(values), tf.constant(w)]
        with tf.GradientTape() as tape:
            tape.watch(given)
            y = sbt.sparse_conv2d(*given, tf.constant(mask), method=method, **options)
        found.append([to_numpy(g) for g in tape.gradient(y, given)])
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)


def test_autograph_leaves_the_package_as_it_is(tf, sbt, monkeypatch):
    """It rewrote all that is called, which took seconds, and warned of what it cannot rewrite."""
    layers, callers = sys.modules["sbnet_cupy.tensorflow.layers"], []

    def seen(*arguments):
        callers.append(sys._getframe(1).f_code.co_filename)
        return resolve_problem(*arguments)

    monkeypatch.setattr(layers, "resolve_problem", seen)
    x, mask = tf.ones((1, 4, 4, 2)), tf.ones((1, 4, 4))
    y = tf.function(lambda x: sbt.sparse_conv2d(x, tf.ones((1, 1, 2, 3)), mask, bsize=2))(x)
    assert y.shape == (1, 4, 4, 3)
    assert callers == [layers.__file__]
    for name in sbt.__all__:
        function = getattr(sbt, name)
        own = function.__module__.startswith(sbt.__name__)
        assert own == hasattr(function, "__wrapped__"), name
