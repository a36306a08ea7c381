"""The TensorFlow adapter: the package's bits, eager and in graphs; exact gradients; no abort."""

import doctest
import functools
import importlib
import inspect
import re
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from assertions import assert_close, assert_same, to_numpy
from bad_calls import BAD, VALID, Spoiled
from frameworks import TensorFlow
from test_errors import spoil_id
from test_structure import doctests_of

import sbnet_cupy as sb
from sbnet_cupy import DeviceError, DTypeError, ShapeError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 8, 9, 3)).astype(np.float32)
MASK = (RNG.random((2, 8, 9)) < 0.1).astype(np.float32)
COUNT = np.array([5], np.int32)
ROWS = np.array(  # in no order; one row names no image, one lies past the count
    [[1, 0, 1], [0, 0, 0], [7, 0, 0], [0, 1, 1], [1, 2, 2], [0, 1, 0]], np.int32
)
TWICE = np.array([[0, 1, 1], [1, 0, 0], [0, 1, 1], [0, 0, 0], [-1, -1, -1], [1, 1, 1]], np.int32)
PLAIN = {"bsize": (4, 3)}
OVERLAP = {"bsize": (4, 5), "boffset": (-1, -1), "bstride": (2, 3)}
OPTIONS = [
    PLAIN,
    OVERLAP,
    PLAIN | {"transpose": True},
    PLAIN | {"data_format": "NCHW"},
    OVERLAP | {"data_format": "NCHW", "transpose": True},
]
DTYPES = [np.float32, np.float16, BFLOAT16, np.float64]


@pytest.fixture(scope="module")
def sbt(tf):
    import sbnet_cupy.tensorflow as sbt

    return sbt


def image(options, dtype=np.float32):
    """Return the image, in the layout of the options."""
    x = X if options.get("data_format") != "NCHW" else X.transpose(0, 3, 1, 2)
    return np.ascontiguousarray(x).astype(dtype)


def stack(options, dtype=np.float32):
    """Return a stack of new values, in the layout of the options."""
    shape = sb.sparse_gather(image(options), COUNT, ROWS, **options).shape
    return np.random.default_rng(1).standard_normal(shape).astype(dtype)


@pytest.fixture(params=["eager", "graph", "unknown sizes"])
def wrap(request, tf):
    """Ways to call a function of tensors."""

    def call(function):
        def with_tensors(*arrays):
            tensors = [tf.constant(array) for array in arrays]
            if request.param == "eager":
                return function(*tensors)
            specs = None
            if request.param != "graph":  # a first size, of batch or list, that is not known
                specs = [tf.TensorSpec([None, *t.shape[1:]], t.dtype) for t in tensors]
                specs[1:2] = [tf.TensorSpec(t.shape, t.dtype) for t in tensors[1:2]]
            return tf.function(function, input_signature=specs, autograph=False)(*tensors)

        return with_tensors

    call.static = request.param != "unknown sizes"
    return call


def same(actual, expected):
    assert_same(to_numpy(actual), expected)


# -------------------------------------------------------------------------------------- results


@pytest.mark.parametrize("capacity", [None, 0, 1, 20])
@pytest.mark.parametrize("dtype", [np.float32, np.bool_, BFLOAT16, np.float64], ids=str)
def test_reduce_mask(sbt, wrap, dtype, capacity):
    grid = {"bsize": 3, "boffset": (-1, 0), "bstride": 2, "tol": 0.2, "avgpool": True}
    shapes = []

    def listed(mask):
        active = sbt.reduce_mask(mask, (4, 4), capacity=capacity, **grid)
        shapes.append(active.active_block_indices.shape.as_list())
        return active

    expected = sb.reduce_mask(MASK.astype(dtype), (4, 4), capacity=capacity, **grid)
    actual = wrap(listed)(MASK.astype(dtype))  # TensorFlow takes ActiveBlocks out of a graph
    assert type(actual) is sb.ActiveBlocks and actual.grid[1:] == (4, 4)
    for a, e in zip(actual, expected, strict=True):
        same(a, e)
    assert shapes[0][1] == 3 and shapes[0][0] in (capacity, len(expected[1]))


@pytest.mark.parametrize("dtype", [*DTYPES, np.int8, "c8"], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_sparse_gather(sbt, wrap, options, dtype):
    shapes = []

    def gather(*arrays):
        blocks = sbt.sparse_gather(*arrays, **options)
        shapes.append(blocks.shape.as_list())
        return blocks

    arrays = image(options, dtype), COUNT, ROWS
    expected = sb.sparse_gather(*arrays, **options)
    same(wrap(gather)(*arrays), expected)
    assert shapes[0] == [6 if wrap.static else None, *expected.shape[1:]]


@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu"])
@pytest.mark.parametrize("options", OPTIONS[1:4], ids=str)
def test_fused_sparse_gather(sbt, wrap, options, activation):
    def gather(module, x, counts, rows, scale, shift):
        fused = {"scale": scale, "shift": shift, "activation": activation}
        return module.sparse_gather(x, counts, rows, **fused, **options)

    scale, shift = X[0, 0, 0].astype(BFLOAT16), X[0, 0, 1]
    arrays = image(options, BFLOAT16), COUNT, ROWS, scale, shift
    same(wrap(functools.partial(gather, sbt))(*arrays), gather(sb, *arrays))


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [ROWS, TWICE], ids=["once", "twice"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_sparse_scatter(sbt, wrap, options, rows, dtype, add):
    options = options | {"add": add, "atomic": True}
    arrays = stack(options_of_gather(options), dtype), COUNT, rows, image(options, dtype)
    actual = wrap(functools.partial(sbt.sparse_scatter, **options))(*arrays)
    same(actual, sb.sparse_scatter(*arrays, **options))


def options_of_gather(options):
    return {name: value for name, value in options.items() if name not in ("add", "atomic")}


def test_variables_are_read_and_not_written(tf, sbt):
    x = tf.Variable(X)
    table = tf.constant(COUNT), tf.constant(ROWS)
    blocks = sbt.sparse_gather(x, *table, **PLAIN)
    same(blocks, sb.sparse_gather(X, COUNT, ROWS, **PLAIN))
    sbt.sparse_scatter(blocks * 2, *table, x, **PLAIN)
    same(x.read_value(), X)


# --------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("dtype", [*DTYPES, np.int8], ids=str)
def test_no_byte_is_copied(tf, sbt, monkeypatch, dtype, graph):
    """What our code reads and writes is the memory of the caller's tensors and of the results."""
    seen = {}
    module = sys.modules["sbnet_cupy.tensorflow.ops"]
    core = module.core_gather

    def watched(x, *arrays, **options):
        blocks = core(x, *arrays, **options)
        seen.update(x=address(x), blocks=address(blocks))
        return blocks

    def address(array):
        return array.ctypes.data if isinstance(array, np.ndarray) else lib.address(array)

    lib = TensorFlow(tf)
    monkeypatch.setattr(module, "core_gather", watched)
    x, count, rows = map(tf.constant, (image(PLAIN, dtype), COUNT, ROWS))
    gather = functools.partial(sbt.sparse_gather, **PLAIN)
    blocks = (tf.function(gather) if graph else gather)(x, count, rows)
    assert seen == {"x": lib.address(x), "blocks": lib.address(blocks)}


@pytest.mark.parametrize("graph", [False, True])
def test_memory_that_is_not_aligned_is_taken(tf, sbt, graph):
    """TensorFlow aborts when it is given such memory; in and out of here it never is."""
    whole = np.zeros(X.size + 64, np.float32)
    start = (-whole.ctypes.data % 64) // 4 + 1
    whole[start : start + X.size] = X.reshape(-1)
    x = tf.convert_to_tensor(whole[start : start + X.size].reshape(X.shape))
    piece = tf.constant(np.concatenate([X, X]))[1:3]  # a slice of a tensor's memory
    for value in (x, piece):
        gather = functools.partial(sbt.sparse_gather, bsize=1)
        for rows in (ROWS, ROWS[:1], ROWS[:0]):
            table = tf.constant(COUNT), tf.constant(rows)
            actual = (tf.function(gather) if graph else gather)(value, *table)
            same(actual, sb.sparse_gather(value.numpy(), COUNT, rows, bsize=1))


# ------------------------------------------------------------------------------------ gradients


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


@pytest.mark.parametrize("activation", [None, "silu", "gelu"])
@pytest.mark.parametrize("options", OPTIONS[1:4], ids=str)
def test_gradient_of_fused_gather(tf, sbt, options, activation):
    table = tf.constant(COUNT), tf.constant(ROWS)

    def gather(x, scale, shift):
        fused = {"scale": scale, "shift": shift, "activation": activation}
        return sbt.sparse_gather(x, *table, **fused, **options)

    check_gradient(tf, gather, image(options), X[0, 0, 0], X[0, 0, 1])


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("rows", [ROWS, TWICE], ids=["once", "twice"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
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


# --------------------------------------------------------------------------------------- layers


def layer(strides=1, bottleneck=False):
    """Return block parameters and the active blocks of the mask, for an image like X."""
    if bottleneck:
        params = sb.calc_block_params_res_block(X.shape, 3 + 2 * strides, [1, 3, 1], strides)
    else:
        params = sb.calc_block_params(X.shape, 3 + 2 * strides, 3, strides)
    grid = {"bsize": params.bsize, "boffset": params.boffset, "bstride": params.bstride}
    return params, sb.reduce_mask(MASK, params.bcount, **grid)


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
def test_sparse_conv2d(tf, sbt, wrap, options, dtype):
    params, active = layer(options.get("strides", 1))
    x, w = image(options, dtype), RNG.standard_normal((3, 3, 3, 4)).astype(dtype)
    if "w_format" in options:
        w = np.ascontiguousarray(w.transpose(3, 2, 0, 1))
    arrays = {"bias": RNG.standard_normal(4).astype(np.float32)}
    if "base" in options:
        arrays["base"] = RNG.standard_normal((*X.shape[:3], 4)).astype(dtype)
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
    actual = to_numpy(wrap(convolve)(x))
    assert_close(actual, expected, terms=32, dtype=np.float32, magnitude=1.2 * size + 1)


@pytest.mark.parametrize("options", [{}, {"strides": 2}, {"base": True}], ids=str)
def test_sparse_res_block_bottleneck(tf, sbt, wrap, options):
    strides = options.get("strides", 1)
    params, active = layer(strides, bottleneck=True)
    weights = sb.BottleneckWeights.random(3, 4, 3 if not options else 5, dtype="float64")
    arrays = {"w_project": RNG.standard_normal((1, 1, 3, 5))} if options else {}
    if "base" in options:
        arrays["base"] = RNG.standard_normal((*X.shape[:3], 5))
    x = X.astype(np.float64)
    expected = sb.sparse_res_block_bottleneck(
        x, weights, active, params, strides=strides, **arrays
    )
    given = weights._map_arrays(tf.Variable), active._map_arrays(tf.constant), params
    arrays = {name: tf.constant(value) for name, value in arrays.items()}
    unit = wrap(lambda x: sbt.sparse_res_block_bottleneck(x, *given, strides=strides, **arrays))
    # Three sums of at most 36 products, each of which may enlarge the error of the one before.
    bound = 200 * np.finfo(np.float64).eps * np.abs(expected).max() * 36
    np.testing.assert_allclose(to_numpy(unit(x)), expected, rtol=0, atol=bound)


def test_gradients_of_the_layers(tf, sbt):
    params, active = layer()
    table = active._map_arrays(tf.constant)

    def convolve(x, w, bias, base):
        options = {"bias": bias, "base": base, "activation": "silu"}
        return sbt.sparse_conv2d(x, w, table, params, **options)

    w, bias = RNG.standard_normal((3, 3, 3, 2)), RNG.standard_normal(2)
    check_gradient(tf, convolve, X, w, bias, X[..., :2])
    params_, active = layer(bottleneck=True)
    table_ = active._map_arrays(tf.constant)
    weights = sb.BottleneckWeights.random(3, 2, dtype="float64")
    weights = sb.BottleneckWeights(*map(tf.Variable, weights._arrays()))
    with tf.GradientTape() as tape:
        y = sbt.sparse_res_block_bottleneck(tf.constant(X, tf.float64), weights, table_, params_)
    assert None not in tape.gradient(y, weights._arrays())


# ------------------------------------------------------------------------- documents and errors


@pytest.mark.parametrize("name", ["", ".ops", ".layers"])
def test_examples_run(sbt, name):
    runner = doctest.DocTestRunner()
    tests = list(doctests_of(importlib.import_module("sbnet_cupy.tensorflow" + name)))
    for test in tests:
        runner.run(test)
    assert not runner.summarize().failed and sum(len(test.examples) for test in tests) >= 5


def test_arguments_are_those_of_the_package(sbt):
    for name in sbt.__all__:
        known = inspect.signature(getattr(sb, name)).parameters
        taken = inspect.signature(getattr(sbt, name)).parameters
        assert [*taken] == [parameter for parameter in known if parameter != "out"]
        assert all(taken[parameter].default == known[parameter].default for parameter in taken)


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
             "sparse_res_block_bottleneck")  # fmt: skip
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
