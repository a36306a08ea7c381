"""Gradients of the TensorFlow adapter: of first and second order, eager and in graphs."""

import numpy as np
import pytest

import sbnet_cupy as sb
from support.adapter_cases import COUNT, MASK, OPTIONS, ROWS, TWICE, X, image, layer, normal, stack


def check_gradient(tf, function, *arrays):
    """Compare first and second order with central differences along a random direction."""
    points = [tf.constant(array.astype(np.float64)) for array in arrays]
    rng = np.random.default_rng(2)
    directions = [tf.constant(rng.standard_normal(p.shape)) for p in points]
    weights = tf.constant(rng.standard_normal(function(*points).shape))

    def loss(*points):
        y = function(*points)
        return tf.reduce_sum(weights * y * y)

    def slope(*points):
        with tf.GradientTape() as tape:
            tape.watch(points)
            y = loss(*points)
        grads = tape.gradient(y, points, unconnected_gradients="zero")
        return tf.add_n([tf.reduce_sum(g * d) for g, d in zip(grads, directions, strict=True)])

    def curvature(*points):
        with tf.GradientTape() as tape:
            tape.watch(points)
            y = slope(*points)
        grads = tape.gradient(y, points, unconnected_gradients="zero")
        return tf.add_n([tf.reduce_sum(g * d) for g, d in zip(grads, directions, strict=True)])

    step = 1e-5  # error of the difference: step^2 times a third derivative, and rounding / step
    up = [p + step * d for p, d in zip(points, directions, strict=True)]
    down = [p - step * d for p, d in zip(points, directions, strict=True)]
    for value, exact in ((loss, slope), (slope, curvature)):
        numeric = (float(value(*up)) - float(value(*down))) / (2 * step)
        size = abs(float(value(*points))) + abs(numeric) + 1
        assert abs(float(tf.function(exact)(*points)) - numeric) < 1e-7 * size
        assert abs(float(exact(*points)) - numeric) < 1e-7 * size


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradient_of_gather(tf, sbt, options):
    table = tf.constant(COUNT), tf.constant(ROWS)
    check_gradient(tf, lambda x: sbt.sparse_gather(x, *table, **options), image(options))


@pytest.mark.parametrize(
    ("options", "activation"),
    [(OPTIONS[1], None), (OPTIONS[2], "silu"), (OPTIONS[3], "gelu"), (OPTIONS[1], "silu")],
    ids=str,
)
def test_gradient_of_fused_gather(tf, sbt, options, activation):
    table = tf.constant(COUNT), tf.constant(ROWS)

    def gather(x, scale, shift):
        fused = {"scale": scale, "shift": shift, "activation": activation}
        return sbt.sparse_gather(x, *table, **fused, **options)

    check_gradient(tf, gather, image(options), X[0, 0, 0], X[0, 0, 1])


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(
    ("options", "rows"),  # each grid with one of the lists, one grid with both
    [(options, (ROWS, TWICE)[i % 2]) for i, options in enumerate(OPTIONS)] + [(OPTIONS[0], TWICE)],
)
def test_gradient_of_scatter(tf, sbt, options, rows, add):
    table = tf.constant(COUNT), tf.constant(rows)

    def scatter(blocks, x):
        return sbt.sparse_scatter(blocks, *table, x, add=add, atomic=True, **options)

    check_gradient(tf, scatter, stack(options), image(options))


def test_gradients_pass_by_what_has_none(tf, sbt):
    table, mask = (tf.constant(COUNT), tf.constant(ROWS)), tf.Variable(MASK)
    numbers = tf.constant(X.astype(np.int32))
    with tf.GradientTape() as tape:
        active = sbt.reduce_mask(mask, (2, 2), bsize=4)
        blocks = sbt.sparse_gather(numbers, *table, bsize=4)
        y = sbt.sparse_scatter(blocks, *table, numbers, bsize=4)
        total = tf.reduce_sum(tf.cast(y, tf.float32)) * tf.reduce_sum(mask)
        total *= tf.cast(active.bin_counts[0], tf.float32)
    assert tape.gradient(total, mask) is not None


def test_gradients_of_the_layers(tf, sbt):
    params, active = layer()
    table = active._map_arrays(tf.constant)

    def convolve(x, w, bias, base):
        options = {"bias": bias, "base": base, "activation": "silu"}
        return sbt.sparse_conv2d(x, w, table, params, **options)

    w, bias = normal(3, 3, 3, 2, dtype=np.float64), normal(2, dtype=np.float64)
    check_gradient(tf, convolve, X, w, bias, X[..., :2])
    params_, active = layer(bottleneck=True)
    table_ = active._map_arrays(tf.constant)
    weights = sb.BottleneckWeights.random(3, 2, dtype="float64")
    weights = sb.BottleneckWeights(*map(tf.Variable, weights._arrays()))
    with tf.GradientTape() as tape:
        y = sbt.sparse_res_block_bottleneck(tf.constant(X, tf.float64), weights, table_, params_)
    assert None not in tape.gradient(y, weights._arrays())
