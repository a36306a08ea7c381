"""What the JAX adapter takes: the package's arguments and errors, while tracing; its documents."""

import ctypes
import inspect
import re
import subprocess
import sys

import numpy as np
import pytest

import sbnet_cupy as sb
from sbnet_cupy import DeviceError, DTypeError, ShapeError
from sbnet_cupy.core.operator import Operator
from support.adapter_cases import COUNT, MASK, ROWS, X, check_examples, check_parameters, layer
from support.bad_calls import BAD, VALID, Spoiled, spoil_id


@pytest.mark.parametrize("name", ["", ".ops", ".layers", ".stack"])
def test_examples_run(sbj, name):
    check_examples("sbnet_cupy.jax" + name)


def test_arguments_are_those_of_the_package(sbj):
    check_parameters(sbj)


def test_every_function_documents_its_parameters_and_none_that_it_does_not_have(sbj):
    for name in sbj.__all__:
        function = getattr(sbj, name)
        if callable(function):
            listed = inspect.getdoc(function).split("Parameters\n", 1)[1].split("Returns\n")[0]
            heads = re.findall(r"^\*?(\w[\w, ]*?)(?: :.*)?$", listed, re.MULTILINE)
            found = {name for head in heads for name in head.split(", ")}
            assert found == set(inspect.signature(function).parameters), name


def test_packed_weights_are_refused_by_name(sbj):
    """By layers from image to image, whose weights are packed at each call."""
    import jax.numpy as jnp

    w = sb.PackedWeights(jnp.ones((3, 3, 1, 1)))
    active = sbj.reduce_mask(jnp.ones((1, 4, 4)), (2, 2), bsize=2)
    with pytest.raises(DTypeError, match="got PackedWeights; pass the arrays that it was made of"):
        sbj.sparse_conv2d(jnp.ones((1, 4, 4, 1)), w, active, bsize=2)


ELSEWHERE = re.compile(r"object|'U1'|'S3'|M8|masked|'[if]8'|float64|asfortran|::|np.float32\(1\)")


def give(value):
    """Hand what a table of NumPy calls holds to JAX."""
    import jax.numpy as jnp

    if isinstance(value, np.ndarray):
        return jnp.asarray(value)
    if isinstance(value, tuple | list) and any(isinstance(v, np.ndarray) for v in value):
        return tuple(map(give, value))
    return value


def bad_calls():
    known = ("reduce_mask", "sparse_gather", "sparse_scatter", "sparse_conv2d",
             "sparse_res_block_bottleneck", "mask_conv2d")  # fmt: skip
    for function, argument, value, error in BAD:
        told = f"{value!r} {getattr(value, 'dtype', '')}"
        if function in known and argument != "out" and not ELSEWHERE.search(told):
            yield function, argument, value, error


@pytest.mark.parametrize(("function", "argument", "value", "error"), [*bad_calls()], ids=spoil_id)
def test_bad_call(sbj, function, argument, value, error):
    """The errors are those of the package, and come while tracing."""
    arguments = {name: give(value) for name, value in VALID[function].items()}
    if "weights" in arguments:
        arguments["weights"] = sb.BottleneckWeights(*map(give, VALID[function]["weights"]))
    if isinstance(value, Spoiled):
        value = value.of(VALID[function].get(argument), np)
    arguments[argument] = give(value)
    with pytest.raises(error, match=rf"\b{argument}\b"):
        getattr(sbj, function)(**arguments)


def test_mixed_libraries_are_refused(sbj, jax):
    x, count, rows = jax.numpy.asarray(X), jax.numpy.asarray(COUNT), jax.numpy.asarray(ROWS)
    with pytest.raises(DeviceError, match=r"^x must be a JAX array, got one of numpy.*asarray"):
        sbj.sparse_gather(X.astype(np.float64), count, rows, bsize=4)
    with pytest.raises(DeviceError, match=r"^bin_counts .*numpy"):
        jax.jit(lambda x: sbj.sparse_gather(x, COUNT, rows, bsize=4))(x)
    with pytest.raises(DeviceError, match=r"^weights\.w1 .*numpy"):
        weights = sb.BottleneckWeights.random(3, 4)
        sbj.sparse_res_block_bottleneck(x, weights, (count, rows), layer(bottleneck=True)[0])
    with pytest.raises(DTypeError, match=r"^x must have elements of whole bytes, got int4"):
        sbj.sparse_gather(x.astype("int4"), count, rows, bsize=4)
    with pytest.raises(DTypeError, match=r"^x must have elements of whole bytes, got key"):
        sbj.sparse_gather(jax.random.key(0), count, rows, bsize=4)
    with pytest.raises(TypeError, match="out"):
        sbj.sparse_gather(x, count, rows, bsize=4, out=x)


@pytest.mark.parametrize("transform", ["jit", "vmap", "grad"])
def test_capacity_is_needed_while_tracing(sbj, jax, transform):
    def count(mask):
        return sbj.reduce_mask(mask, (2, 3), bsize=4).bin_counts.sum() + mask.sum()

    mask = MASK if transform != "vmap" else np.stack([MASK] * 4)
    with pytest.raises(ShapeError, match=r"^capacity must be given.* 12 has room"):
        getattr(jax, transform)(count)(mask)


def test_a_number_that_jax_traces_is_refused_by_name(sbj, jax):
    mask = jax.numpy.ones((1, 4, 4))

    def count(tol):
        return sbj.reduce_mask(mask, (2, 2), bsize=2, tol=tol, capacity=4).bin_counts

    assert count(jax.numpy.float32(0.5)).item() == 4
    with pytest.raises(DTypeError, match=r"^tol must be a number that is known while"):
        jax.jit(count)(0.5)
    assert jax.jit(count, static_argnums=0)(0.5).item() == 4


@pytest.mark.parametrize("name", ["bsize", "capacity"])
def test_a_size_that_jax_traces_must_be_static(sbj, jax, name):
    def count(size):
        sizes = {"bsize": 2, "capacity": 4, name: size}
        return sbj.reduce_mask(jax.numpy.ones((1, 4, 4)), (2, 2), **sizes).bin_counts

    with pytest.raises(ShapeError, match=f"{name} must be a .*; give Python integers, as static "):
        jax.jit(count)(2)
    assert jax.jit(count, static_argnums=0)(2) == 4


def test_an_error_inside_a_callback_reaches_the_caller(sbj, jax, monkeypatch):
    def fail(operator, arrays, options):
        raise RuntimeError("the message")

    monkeypatch.setattr(Operator, "plan_for", fail)
    table = jax.numpy.asarray(COUNT), jax.numpy.asarray(ROWS)
    with pytest.raises(jax.errors.JaxRuntimeError, match="the message"):
        sbj.sparse_gather(jax.numpy.asarray(X), *table, bsize=2).block_until_ready()


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("jax", "sbnet_cupy.jax needs JAX; pip install 'sbnet-cupy[jax]'"),
        ("jax.experimental.buffer_callback", "pip install -U 'jax"),
    ],
)
def test_without_jax_or_with_an_old_one(jax, missing, message):
    code = f"import sys; sys.modules[{missing!r}] = None; import sbnet_cupy.jax"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and message in done.stderr.splitlines()[-1]
    assert done.stderr.splitlines()[-1].startswith("ImportError")


def test_a_jax_without_local_double_precision_is_refused(jax):
    """JAX 0.7 cannot compile a function with 64-bit numbers in a part of it."""
    code = "import jax; del jax.enable_x64; import sbnet_cupy.jax"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install -U 'jax>=0.8'" in done.stderr.splitlines()[-1]


def test_the_prototype_of_ctypes_is_left_alone(sbj):
    assert ctypes.pythonapi.PyCapsule_GetPointer is not sys.modules[
        "sbnet_cupy.jax._callbacks"
    ]._capsule_words
