"""Batch norm over sites in TensorFlow: its formula, gradients, and variables that it updates."""

import functools

import numpy as np
import pytest

import sbnet_cupy as sb
from support.adapter_cases import BFLOAT16, check_examples, normal
from support.assertions import assert_same
from support.exhaustive import thinned_pairs
from support.site_norm_cases import (
    CHANNELS,
    EPS,
    GRID,
    MOMENTUM,
    NAMES,
    ROWS,
    SITES,
    SPARE,
    assert_near,
    batch_norm,
    features_of,
    tables_of,
)

OPTIONS = {"momentum": MOMENTUM, "eps": EPS}


def sparse(tf, sbt, features, rows=ROWS):
    """Return features, given for rows to spare too, at the sites."""
    first = sbt.sparse_tensor(tf.constant(features[: len(rows)]), tf.constant(rows), **GRID)
    return first.replace(features if tf.is_tensor(features) else tf.constant(features))


def test_examples_run(sbt):
    check_examples("sbnet_cupy.tensorflow.norms")


@pytest.mark.parametrize(
    ("dtype", "training", "activation"),
    thinned_pairs(8, ["f2", BFLOAT16, "f4", "f8"], [True, False], [None, "relu", "silu", "gelu"]),
)
def test_formula_and_gradients(tf, sbt, dtype, training, activation):
    """Rows past the count hold NaN."""
    wide = "f8" if dtype == "f8" else "f4"
    features, tables = features_of(dtype), tables_of(wide)
    grad = np.round(4 * normal(SITES + SPARE, CHANNELS, seed=3))
    x = sparse(tf, sbt, features)
    variables = {name: tf.Variable(table) for name, table in tables.items()}
    given = [x.features, variables["weight"], variables["bias"]]
    with tf.GradientTape() as tape:
        tape.watch(x.features)
        y = sbt.masked_batch_norm(
            x, **variables, training=training, activation=activation, **OPTIONS
        )
        total = tf.reduce_sum(tf.cast(y.features, np.dtype(wide)) * grad.astype(wide))
    gradients = [found.numpy() for found in tape.gradient(total, given)]
    wanted = batch_norm(features, tables, training, activation, grad)
    found = y.features.numpy()
    assert found.dtype == np.dtype(dtype) and y.coordinates is x.coordinates
    assert not found[SITES:].any()
    assert_near(found[:SITES], wanted[0], wide)
    for name, expected in zip(NAMES, wanted[1], strict=False):
        assert_near(variables[name].numpy(), expected, wide)
    assert not gradients[0][SITES:].any()
    gradients[0] = gradients[0][:SITES]
    for found, expected in zip(gradients, wanted[2], strict=True):
        assert_near(found, expected, wide)


def test_gradients_of_running_statistics(tf, sbt):
    """In evaluation, where they are tables like the others; in training there are none."""
    x, tables = sparse(tf, sbt, features_of("f8")), tables_of("f8")
    given = [tf.Variable(table) for table in tables.values()]
    found = []
    for training in (False, True):
        with tf.GradientTape() as tape:
            y = sbt.masked_batch_norm(x, *given, training=training, eps=EPS)
            total = tf.reduce_sum(y.features)
        found.append(tape.gradient(total, given[:2]))
    assert found[1] == [None, None]
    step = 1e-5
    for i, name in enumerate(NAMES[:2]):
        sides = []
        for sign in (-1, 1):
            moved = tables | {name: tables[name] + sign * step}
            sides.append(batch_norm(features_of("f8"), moved, False, None)[0].sum(0))
        slope = (sides[1] - sides[0]) / (2 * step)
        np.testing.assert_allclose(found[0][i].numpy(), slope, rtol=1e-7, atol=1e-7)


def test_evaluation_takes_tensors_and_leaves_variables(tf, sbt):
    x, tables = sparse(tf, sbt, features_of("f4")), tables_of()
    variables = {name: tf.Variable(table) for name, table in tables.items()}
    tensors = {name: tf.constant(table) for name, table in tables.items()}
    results = [sbt.masked_batch_norm(x, **given).features for given in (variables, tensors)]
    assert_same(results[0].numpy(), results[1].numpy())
    for name, table in tables.items():
        assert_same(variables[name].numpy(), table)


def test_without_running_statistics(tf, sbt):
    """Those of the sites are taken, in evaluation too."""
    features = features_of("f4")
    x = sparse(tf, sbt, features)
    tables = tables_of() | {"weight": np.ones(CHANNELS), "bias": np.zeros(CHANNELS)}
    expected, _ = batch_norm(features, tables, True, None)
    for training in (False, True):
        y = sbt.masked_batch_norm(x, eps=EPS, training=training)
        assert_near(y.features.numpy()[:SITES], expected, "f4")


@pytest.mark.parametrize("dtype", ["f2", BFLOAT16, "f4", "f8"])
@pytest.mark.parametrize("keras", [False, True])
def test_variables_keep_their_dtype(tf, sbt, dtype, keras):
    """The share is taken in float32 at least. A variable of Keras is one, too."""
    features, tables = features_of("f4"), tables_of(dtype)
    x = sparse(tf, sbt, features)
    make = tf.keras.Variable if keras else tf.Variable
    kept = [make(tables[name]) for name in NAMES[:2]]
    sbt.masked_batch_norm(x, *kept, training=True, **OPTIONS)
    for table, expected in zip(kept, batch_norm(features, tables, True, None)[1], strict=True):
        found = table.numpy()
        assert found.dtype == np.dtype(dtype)
        assert_near(found, expected, "f4")


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_running_statistics_of_a_layer_in_mixed_precision(tf, sbt, policy, training):
    """They were rounded to the dtype that the layer computes in, whenever it read them."""
    features, tables = features_of("f4"), tables_of()
    x = sparse(tf, sbt, features)

    class Norm(tf.keras.layers.Layer):
        def build(self, _):
            options = {"shape": (CHANNELS,), "trainable": False}
            self.kept = [self.add_weight(name=name, **options) for name in NAMES[:2]]

        def call(self, _):
            return sbt.masked_batch_norm(x, *self.kept, training=training, **OPTIONS).features

    layer = Norm(dtype=policy)
    layer.build(None)
    for variable, name in zip(layer.kept, NAMES, strict=False):
        variable.assign(tables[name])
    y = layer(x.features)
    kept = {name: tables[name] for name in NAMES[:2]}
    ones = {"weight": np.ones(CHANNELS), "bias": np.zeros(CHANNELS)}
    expected, moved = batch_norm(features, kept | ones, training, None)
    assert_near(y.numpy()[:SITES], expected, "f4")
    for variable, wanted in zip(layer.kept, moved if training else kept.values(), strict=True):
        assert_near(variable.numpy(), wanted, "f4")


@pytest.mark.parametrize("eps", [0.0, 1e-5])
@pytest.mark.parametrize("capacity", [0, SPARE])
def test_no_sites_at_all(tf, sbt, capacity, eps):
    """Rows of NaN alone: the result and gradients are 0, running statistics stay."""
    features, rows = tf.zeros((0, CHANNELS)), tf.zeros((0, 2), tf.int32)
    x = sbt.sparse_tensor(features, rows, spatial_shape=8, batch_size=1, capacity=capacity)
    tables = tables_of()
    tables["running_mean"][0] = np.inf
    variables = {name: tf.Variable(table) for name, table in tables.items()}
    given = [tf.fill((capacity, CHANNELS), np.nan), variables["weight"], variables["bias"]]
    with tf.GradientTape() as tape:
        tape.watch(given[0])
        y = sbt.masked_batch_norm(
            x.replace(given[0]), **variables, training=True, eps=eps, activation="gelu"
        )
        total = tf.reduce_sum(y.features)
    for found in (y.features, *tape.gradient(total, given)):
        assert not found.numpy().any()
    for name, table in tables.items():
        assert_same(variables[name].numpy(), table)


def test_one_site(tf, sbt):
    """Its variance is 0, the running one moves towards 0."""
    x, tables = sparse(tf, sbt, features_of("f4"), ROWS[:1]), tables_of()
    variables = [tf.Variable(table) for table in tables.values()]
    y = sbt.masked_batch_norm(x, *variables, training=True, **OPTIONS)
    features = x.features.numpy()[0]
    assert_near(y.features.numpy()[0], tables["bias"], "f4")
    assert_near(variables[0].numpy(), 0.75 * tables["running_mean"] + 0.25 * features, "f4")
    assert_near(variables[1].numpy(), 0.75 * tables["running_var"], "f4")


def test_what_it_refuses(tf, sbt):
    x = sparse(tf, sbt, features_of("f4"))
    three, four = (tf.Variable(tf.ones(n)) for n in (3, 4))
    tensor, whole = tf.ones(3), tf.ones(3, tf.int32)
    calls = [
        ((x.features,), {}, sb.DTypeError, "x must be a SparseTensor"),
        ((x.replace(tf.zeros(x.features.shape, tf.int32)),), {}, sb.DTypeError,
         "features must be float16"),
        ((x.replace(features_of("f4")),), {}, sb.DeviceError, "features must be a TensorFlow ten"),
        ((x, four, three), {}, sb.ShapeError, r"running_mean must have shape \(3,\), got \(4,\)"),
        ((x,), {"weight": tensor[None]}, sb.ShapeError, r"weight must have shape \(3,\)"),
        ((x, three), {}, ValueError, "running_mean and running_var must be given together"),
        ((x, three, tensor), {"training": True}, sb.DTypeError,
         "running_var must be a tf.Variable, to which training assigns, got EagerTensor"),
        ((x,), {"bias": [1.0] * 3}, sb.DTypeError, "bias must be a TensorFlow tensor, got list"),
        ((x,), {"bias": np.ones(3)}, sb.DeviceError, "bias must be a TensorFlow tensor, got an"),
        ((x,), {"bias": whole}, sb.DTypeError, "bias must have a float dtype"),
        ((x,), {"activation": "relu6"}, ValueError, "activation must be None, 'relu'"),
        ((x,), {"eps": None}, sb.DTypeError, "eps must be a number"),
        ((x,), {"eps": float("nan")}, ValueError, "eps must not be NaN"),
        ((x,), {"momentum": "a"}, sb.DTypeError, "momentum must be a number"),
        ((x,), {"momentum": float("nan")}, ValueError, "momentum must not be NaN"),
        ((x,), {"momentum": tensor}, sb.DTypeError, "momentum must be a number"),
    ]  # fmt: skip
    for args, options, error, words in calls:
        with pytest.raises(error, match=words):
            sbt.masked_batch_norm(*args, **options)
    native = sb.sparse_tensor(features_of("f4")[:SITES], ROWS, **GRID)
    with pytest.raises(sb.DeviceError, match=r"coordinates\.indices must be a TensorFlow tensor"):
        sbt.masked_batch_norm(sb.SparseTensor(x.features, native.coordinates))
    graph = tf.function(functools.partial(sbt.masked_batch_norm, x), autograph=False)
    with pytest.raises(sb.DTypeError, match=r"outside of tf\.function"):
        graph()
