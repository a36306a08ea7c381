"""What the TensorFlow adapter takes: arguments and errors, also while tracing; its documents."""

import re
import subprocess
import sys

import numpy as np
import pytest

import sbnet_cupy as sb
from sbnet_cupy import DeviceError, DTypeError, ShapeError
from support.adapter_cases import (
    COUNT,
    MASK,
    ROWS,
    X,
    check_examples,
    check_parameters,
    layer,
    same,
)
from support.bad_calls import BAD, VALID, Spoiled, spoil_id


@pytest.mark.parametrize("name", ["", ".ops", ".layers", ".sites", ".submanifold"])
def test_examples_run(sbt, name):
    check_examples("sbnet_cupy.tensorflow" + name)


def test_arguments_are_those_of_the_package(sbt):
    check_parameters(sbt)


ELSEWHERE = re.compile(r"object|'U1'|'S3'|M8|masked|asfortran|::|np.float32\(1\)")


def give(value):
    """Hand what a table of NumPy calls holds to TensorFlow."""
    import tensorflow as tf

    if isinstance(value, np.ndarray):
        return tf.constant(value)
    if isinstance(value, tuple | list) and any(isinstance(v, np.ndarray) for v in value):
        return tuple(map(give, value))
    return value


def bad_calls():
    known = ("reduce_mask", "sparse_gather", "sparse_scatter", "sparse_conv2d",
             "sparse_res_block_bottleneck", "mask_conv2d")  # fmt: skip
    for function, argument, value, error in BAD:
        if function in known and argument != "out" and not ELSEWHERE.search(str(value)):
            yield function, argument, value, error


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize(("function", "argument", "value", "error"), [*bad_calls()], ids=spoil_id)
def test_bad_call(tf, sbt, function, argument, value, error, graph):
    """The errors are those of the package, also while tracing, where shapes are known."""
    arguments = {name: give(value) for name, value in VALID[function].items()}
    if "weights" in arguments:
        arguments["weights"] = sb.BottleneckWeights(*map(give, VALID[function]["weights"]))
    if isinstance(value, Spoiled):
        value = value.of(VALID[function].get(argument), np)
    arguments[argument] = give(value)

    def call():
        return getattr(sbt, function)(**arguments)

    with pytest.raises(error, match=rf"\b{argument}\b"):
        (tf.function(call) if graph else call)()


@pytest.mark.parametrize("function", ["gather", "sites"])
def test_ragged_and_sparse_tensors_are_refused_by_name(tf, sbt, function):
    values = {"RaggedTensor; use to_tensor": tf.ragged.constant([[1.0, 2.0], [3.0]])}
    values["SparseTensor; use tf.sparse.to_dense"] = tf.sparse.from_dense([[1.0, 0.0], [0.0, 2.0]])
    for message, value in values.items():
        with pytest.raises(DTypeError, match=f"must be dense, got a {message}"):
            if function == "gather":
                sbt.sparse_gather(value, tf.constant(COUNT), tf.constant(ROWS), bsize=4)
            else:
                sbt.sparse_tensor(value, tf.constant([[0, 1], [0, 2]]), spatial_shape=8)


def test_what_holds_tensors_is_refused_by_name(tf, sbt):
    sites = sbt.sparse_tensor(tf.ones((1, 2)), tf.constant([[0, 1]]), spatial_shape=8)
    with pytest.raises(DTypeError, match=r"^x must be a TensorFlow tensor, .*; pass its .features"):
        sbt.sparse_gather(sites, tf.constant(COUNT), tf.constant(ROWS), bsize=4)


def test_mixed_libraries_are_refused(tf, sbt, torch):
    x, count, rows = tf.constant(X), tf.constant(COUNT), tf.constant(ROWS)
    with pytest.raises(DeviceError, match=r"^x must be a TensorFlow tensor, got .*numpy.*convert"):
        sbt.sparse_gather(X, count, rows, bsize=4)
    with pytest.raises(DeviceError, match=r"^bin_counts .* torch"):
        sbt.sparse_gather(x, torch.from_numpy(COUNT.copy()), rows, bsize=4)
    with pytest.raises(DeviceError, match=r"^weights\.w1 .*numpy"):
        weights = sb.BottleneckWeights.random(3, 4)
        sbt.sparse_res_block_bottleneck(x, weights, (count, rows), layer(bottleneck=True)[0])
    with pytest.raises(TypeError, match="out"):
        sbt.sparse_gather(x, count, rows, bsize=4, out=x)


def test_what_a_graph_cannot_know_it_asks_for_or_finds_when_it_runs(tf, sbt):
    unknown = tf.TensorSpec(None, tf.float32)
    with pytest.raises(ShapeError, match=r"mask must have a known height .*set_shape"):
        tf.function(lambda m: sbt.reduce_mask(m, (2, 2), bsize=4), [unknown])(MASK)
    params, active = layer()
    table, w = active._map_arrays(tf.constant), tf.ones((3, 3, 3, 2))
    with pytest.raises(ShapeError, match=r"x must have a known height, .*set_shape"):
        tf.function(lambda x: sbt.sparse_conv2d(x, w, table, params), [unknown])(X)
    pair = tf.constant(COUNT), tf.constant(ROWS)
    late = tf.function(lambda x: sbt.sparse_gather(x, *pair, bsize=4), [unknown])
    same(late(X), sb.sparse_gather(X, COUNT, ROWS, bsize=4))
    with pytest.raises(tf.errors.InvalidArgumentError, match="x must have 4 dimensions"):
        late(X[0])


UNKNOWN = [
    ("w", (3, 3, None, 2)), ("w", (None, 3, 3, 2)), ("bin_counts", (None,)),
    ("active_block_indices", None), ("bias", (None,)), ("base", (None, None, None, 2)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "shape"), UNKNOWN, ids=str)
def test_layers_name_what_a_graph_does_not_know(tf, sbt, name, shape):
    params, active = layer()
    tensors = {
        "x": tf.constant(X), "w": tf.ones((3, 3, 3, 2)), "bin_counts": active.bin_counts,
        "active_block_indices": active.active_block_indices, "bias": tf.ones(2),
        "base": tf.ones((*X.shape[:3], 2)),
    }  # fmt: skip

    def convolve(x, w, bin_counts, active_block_indices, bias, base):
        active = bin_counts, active_block_indices
        return sbt.sparse_conv2d(x, w, active, params, bias=bias, base=base)

    signature = [
        tf.TensorSpec(shape if each == name else array.shape, array.dtype)
        for each, array in tensors.items()
    ]
    with pytest.raises(ShapeError, match=rf"{name} must have known sizes .*set_shape"):
        tf.function(convolve, signature)(*map(tf.constant, tensors.values()))


@pytest.mark.parametrize("shape", [None, (None, None, None)], ids=str)
def test_layers_name_a_mask_of_unknown_size(tf, sbt, shape):
    x, w, mask = tf.constant(X), tf.ones((3, 3, 3, 2)), tf.TensorSpec(shape, tf.float32)
    for layer_of in (
        lambda mask: sbt.sparse_conv2d(x, w, mask, bsize=4),
        lambda mask: sbt.mask_conv2d(x, w, mask),
    ):
        with pytest.raises(ShapeError, match=r"mask,? must have a known height and .*set_shape"):
            tf.function(layer_of, [mask])(MASK)


def test_mask_conv2d_takes_an_unknown_number_of_masks_or_images(tf, sbt):
    x, w, mask = tf.constant(X), tf.ones((3, 3, 3, 2)), tf.constant(MASK, tf.float32)
    expected = sbt.mask_conv2d(x, w, mask)

    def convolve(x, mask):
        return sbt.mask_conv2d(x, w, mask)

    for shapes in (((None, *x.shape[1:]), mask.shape), (x.shape, (None, *mask.shape[1:]))):
        signature = [tf.TensorSpec(shape, tf.float32) for shape in shapes]
        assert np.array_equal(tf.function(convolve, signature)(x, mask), expected)


def test_tensors_as_numbers(tf, sbt):
    mask = tf.ones((1, 4, 4))

    def count(tol):
        return sbt.reduce_mask(mask, (2, 2), bsize=2, tol=tol).bin_counts

    assert count(tf.constant(0.5)).numpy() == 4 and count(tf.constant(1)).numpy() == 0
    with pytest.raises(DTypeError, match=r"^tol must be a number, got"):
        count(tf.constant("a"))
    with pytest.raises(DTypeError, match="tol must be a number that is known while"):
        tf.function(count)(tf.constant(0.5))
    assert tf.function(count)(0.5).numpy() == 4


@pytest.mark.parametrize(
    ("setup", "message"),
    [
        ("sys.modules['tensorflow'] = None", "needs TensorFlow; pip install"),
        ("m = types.ModuleType('tensorflow'); m.__version__ = '2.9.1'; "
         "sys.modules['tensorflow'] = m", "needs TensorFlow 2.18 or newer, got 2.9.1"),
    ],
)  # fmt: skip
def test_without_tensorflow_or_with_an_old_one(tf, setup, message):
    code = f"import sys, types; {setup}; import sbnet_cupy.tensorflow"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and message in done.stderr.splitlines()[-1]
    assert done.stderr.splitlines()[-1].startswith("ImportError")


def test_xla_says_that_it_cannot(tf, sbt):
    table = tf.constant(COUNT), tf.constant(ROWS)
    gather = tf.function(lambda x: sbt.sparse_gather(x, *table, bsize=4), jit_compile=True)
    with pytest.raises(tf.errors.InvalidArgumentError, match="PyFunc"):
        gather(tf.constant(X))


def test_a_dtype_error_is_a_dtype_error(tf, sbt):
    with pytest.raises(DTypeError, match=r"^blocks must have the dtype of x"):
        sbt.sparse_scatter(
            tf.zeros((6, 4, 4, 3), tf.float16), tf.constant(COUNT), tf.constant(ROWS),
            tf.constant(X), bsize=4,
        )  # fmt: skip
