"""TensorFlow with an empty mask: the base comes back, and gradients are those of the base."""

import numpy as np
import pytest

import sbnet_cupy as sb
from support.adapter_cases import X, normal
from support.assertions import to_numpy


def listed(sbt, tf, mask, params):
    """Return the active blocks of a mask that may be symbolic."""
    grid = {"bsize": params.bsize, "boffset": params.boffset, "bstride": params.bstride}
    return sbt.reduce_mask(mask, params.bcount, **grid)


@pytest.mark.parametrize("options", [{}, {"strides": 2}, {"data_format": "NCHW"}], ids=str)
def test_conv_of_an_empty_mask(tf, sbt, call_tensors, options):
    params = sb.calc_block_params(X.shape, 5, 3, options.get("strides", 1))
    w = normal(3, 3, 3, 4)  # as many output as input channels would hide a wrong shape
    x = X if not options.get("data_format") else np.ascontiguousarray(X.transpose(0, 3, 1, 2))

    def gradients(x, w, mask):
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            active = listed(sbt, tf, mask, params)
            y = sbt.sparse_conv2d(x, w, active, params, **options)
            total = tf.reduce_sum(y)
        return [y, *tape.gradient(total, [x, w])]

    y, dx, dw = map(to_numpy, call_tensors(gradients)(x, w, np.zeros(X.shape[:3], np.float32)))
    dense = sb.conv2d(x, w, **options)
    assert y.shape == dense.shape and not y.any()
    assert dx.shape == x.shape and not dx.any()
    assert dw.shape == w.shape and not dw.any()


def test_a_graph_takes_empty_and_full_masks(tf, sbt):
    """One trace, whose list of blocks has any length."""
    params = sb.calc_block_params(X.shape, 5, 3)
    w = normal(3, 3, 3, 4)

    @tf.function(autograph=False)
    def convolve(x, w, mask):
        return sbt.sparse_conv2d(x, w, listed(sbt, tf, mask, params), params)

    shape = X.shape[:3]
    full = convolve(tf.constant(X), tf.constant(w), tf.ones(shape))
    empty = convolve(tf.constant(X), tf.constant(w), tf.zeros(shape))
    assert convolve.experimental_get_tracing_count() == 1
    assert to_numpy(full).any() and not to_numpy(empty).any()


@pytest.mark.parametrize("projected", [False, True])
def test_unit_of_an_empty_mask(tf, sbt, call_tensors, projected):
    weights = sb.BottleneckWeights.random(3, 4, 5 if projected else 3)
    params = sb.calc_block_params_res_block(X.shape, 5, [1, 3, 1])
    project = tf.constant(normal(1, 1, 3, 5)) if projected else None

    def gradients(x, w1, mask):
        given = weights._map_arrays(tf.constant)
        given = sb.BottleneckWeights(w1, *given._arrays()[1:])
        with tf.GradientTape() as tape:
            tape.watch([x, w1])
            active = listed(sbt, tf, mask, params)
            y = sbt.sparse_res_block_bottleneck(x, given, active, params, w_project=project)
            total = tf.reduce_sum(y)
        return [y, *tape.gradient(total, [x, w1])]

    mask = np.zeros(X.shape[:3], np.float32)
    y, dx, dw = map(to_numpy, call_tensors(gradients)(X, weights.w1, mask))
    if not projected:
        assert (y == X).all() and (dx == 1).all()
    assert y.shape == (*X.shape[:3], 5 if projected else 3)
    assert dw.shape == weights.w1.shape and not dw.any()


def test_a_base_under_an_empty_mask(tf, sbt):
    params = sb.calc_block_params(X.shape, 5, 3)
    base = tf.constant(normal(*X.shape[:3], 4))
    active = listed(sbt, tf, tf.zeros(X.shape[:3]), params)
    with tf.GradientTape() as tape:
        tape.watch(base)
        x, w = tf.constant(X), tf.constant(normal(3, 3, 3, 4))
        y = sbt.sparse_conv2d(x, w, active, params, base=base, activation="gelu")
    assert (to_numpy(y) == to_numpy(base)).all()
    assert (to_numpy(tape.gradient(y, base)) == 1).all()
