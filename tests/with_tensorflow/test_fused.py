"""The layers of the TensorFlow adapter with method="fused": the package's bits, and gradients."""

import numpy as np
import pytest

import sbnet_cupy as sb
from support.adapter_cases import BFLOAT16, X, layer, normal, same


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16, np.float64], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"strides": 2, "activation": "gelu", "bias": True},
        {"data_format": "NCHW", "w_format": "OIHW", "activation": "relu", "bias": True},
        {"base": True, "precision": "tf32"},
    ],
    ids=str,
)
def test_conv(tf, sbt, call_tensors, options, dtype):
    params, active = layer(options.get("strides", 1))
    x, w = X.astype(dtype), normal(3, 3, 3, 4, dtype=dtype)
    if "w_format" in options:
        x = np.ascontiguousarray(x.transpose(0, 3, 1, 2))
        w = np.ascontiguousarray(w.transpose(3, 2, 0, 1))
    arrays = {"bias": normal(4)} if "bias" in options else {}
    if "base" in options:
        arrays["base"] = normal(*X.shape[:3], 4, dtype=dtype)
    options = {k: v for k, v in options.items() if k not in arrays} | {"method": "fused"}
    tables = tuple(map(tf.constant, active))
    tensors = {name: tf.constant(value) for name, value in arrays.items()}
    kernel, shapes = tf.Variable(w), []

    def convolve(x):
        y = sbt.sparse_conv2d(x, kernel, tables, params, **options, **tensors)
        shapes.append(y.shape.as_list())
        return y

    expected = sb.sparse_conv2d(x, w, active, params, **options, **arrays)
    same(call_tensors(convolve)(x), expected)
    assert shapes[0] == [2 if call_tensors.static else None, *expected.shape[1:]]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16, np.float64], ids=str)
@pytest.mark.parametrize("with_base", [False, True])
def test_unit(tf, sbt, call_tensors, dtype, with_base):
    params, active = layer(bottleneck=True)
    weights, x = sb.BottleneckWeights.random(3, 4, dtype=np.dtype(dtype)), X.astype(dtype)
    arrays = {"base": x + x} if with_base else {}
    given = weights._map_arrays(tf.Variable), active._map_arrays(tf.constant), params
    tensors = {name: tf.constant(value) for name, value in arrays.items()}

    def unit(x):
        return sbt.sparse_res_block_bottleneck(x, *given, method="fused", **tensors)

    expected = sb.sparse_res_block_bottleneck(
        x, weights, active, params, method="fused", **arrays
    )
    same(call_tensors(unit)(x), expected)


def test_weights_are_those_of_the_moment(tf, sbt):
    params, active = layer()
    x, w, table = tf.constant(X), tf.Variable(normal(3, 3, 3, 4)), active._map_arrays(tf.constant)
    convolve = tf.function(lambda: sbt.sparse_conv2d(x, w, table, params, method="fused"))
    for _ in range(3):
        expected = sb.sparse_conv2d(X, w.numpy(), active, params, method="fused")
        same(convolve(), expected)
        w.assign_add(tf.ones_like(w))


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_gradient_of_conv_is_that_of_the_gathered_one(tf, sbt, graph, activation):
    """Also that of the gradient."""
    params, active = layer()
    table, v = active._map_arrays(tf.constant), tf.constant(normal(*X.shape[:3], 4))
    given = [tf.constant(a) for a in (X, normal(3, 3, 3, 4), normal(4), 2 * v)]

    def gradients(method):
        options = {"activation": activation, "method": method}
        with tf.GradientTape() as outer:
            outer.watch(given)
            with tf.GradientTape() as tape:
                tape.watch(given)
                x, w, bias, base = given
                y = sbt.sparse_conv2d(x, w, table, params, bias=bias, base=base, **options)
                linear = tf.reduce_sum(v * y)
            first = tape.gradient(linear, given)
            total = tf.add_n([tf.reduce_sum(g * g) for g in first])
        return first, outer.gradient(total, given, unconnected_gradients="zero")

    fused, gathered = (
        (tf.function(gradients) if graph else gradients)(method) for method in ("fused", "gather")
    )
    tf.nest.map_structure(same, fused, gathered)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=str)
@pytest.mark.parametrize("with_base", [False, True])
def test_gradient_of_the_unit_is_that_of_the_gathered_one(tf, sbt, graph, dtype, with_base):
    params, active = layer(bottleneck=True)
    table, v = active._map_arrays(tf.constant), tf.constant(normal(*X.shape, dtype=dtype))
    arrays = sb.BottleneckWeights.random(3, 4, dtype=np.dtype(dtype))._arrays()
    weights = sb.BottleneckWeights(*map(tf.Variable, arrays))
    x = tf.constant(X.astype(dtype))
    base = 2 * v if with_base else None

    def gradient(method):
        with tf.GradientTape() as tape:
            tape.watch([x, v])
            options = {"base": base, "method": method}
            y = sbt.sparse_res_block_bottleneck(x, weights, table, params, **options)
            linear = tf.reduce_sum(tf.cast(v * y, tf.float32))
        return tape.gradient(linear, [x, v, *weights._arrays()])

    fused, gathered = (
        (tf.function(gradient) if graph else gradient)(method) for method in ("fused", "gather")
    )
    same(fused[0], gathered[0])
    for of_fused, of_gathered in zip(fused[2:], gathered[2:], strict=True):
        same(of_fused, of_gathered)


def test_weights_of_a_unit_are_arguments_of_a_graph(tf, sbt):
    """Others with the same shapes are no reason to trace it again."""
    params, active = layer(bottleneck=True)
    x, table, traced = tf.constant(X), active._map_arrays(tf.constant), []

    def unit(weights):
        traced.append(weights)
        return sbt.sparse_res_block_bottleneck(x, weights, table, params)

    graph, given = tf.function(unit), [
        sb.BottleneckWeights.random(3, 4, seed=seed)._map_arrays(tf.constant) for seed in (0, 1)
    ]  # fmt: skip
    found = list(map(graph, given))
    assert len(traced) == 1
    for y, weights in zip(found, given, strict=True):
        same(y, unit(weights))


def test_what_is_not_covered_says_so(tf, sbt):
    params, active = layer(2, bottleneck=True)
    x, table = tf.constant(X), tuple(active._map_arrays(tf.constant))  # for both grids
    weights = sb.BottleneckWeights.random(3, 4)._map_arrays(tf.constant)
    project = tf.zeros((1, 1, 3, 3))

    def unit(params, **options):
        options |= {"w_project": project, "method": "fused"}
        return sbt.sparse_res_block_bottleneck(x, weights, table, params, **options)

    for way in (unit, tf.function(unit)):
        with pytest.raises(NotImplementedError, match=r"method='fused' has no strides"):
            way(params, strides=2)
        with pytest.raises(NotImplementedError, match=r"method='fused' has no projection"):
            way(layer(bottleneck=True)[0])


def test_bad_indices_are_refused_while_tracing(tf, sbt):
    params, active = layer()
    x, w = tf.constant(X), tf.ones((3, 3, 3, 4))
    counts, rows = active._map_arrays(tf.constant)
    convolve = tf.function(lambda *pair: sbt.sparse_conv2d(x, w, pair, params, method="fused"))
    with pytest.raises(sb.DTypeError, match=r"active_block_indices must be int32"):
        convolve(counts, tf.cast(rows, tf.int64))
    with pytest.raises(sb.ShapeError, match=r"bin_counts must have shape \(1,\)"):
        convolve(counts[0], rows)
    with pytest.raises(sb.DeviceError, match=r"bin_counts must be a TensorFlow tensor"):
        sbt.sparse_conv2d(x, w, tuple(active), params, method="fused")
