"""conv2d_grad: loops = NumPy = CUDA; central differences; transposes."""

import math
import tracemalloc
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from conftest import Library
from sbnet_cupy import conv2d, conv2d_grad
from sbnet_cupy.dense import cudnn_grad, im2col
from sbnet_cupy.dense.activation import ACTIVATIONS
from support import conv_oracles as oracles
from support.assertions import assert_same, to_numpy
from support.conv_cases import ORDER, Case, cases
from support.conv_grad_cases import (
    check_exact,
    gradient_of,
    gradients_by_loops,
    run,
    with_examples,
)
from support.strategies import FLOATS

NUMPY = Library("numpy", np)


@with_examples
@given(case=cases())
def test_whole_numbers_are_exact(xp, case):
    check_exact(case, xp)


@given(case=cases(), limit=st.sampled_from([1, 300, 2000, 20000]))
@example(case=Case(image=(5, 3, 3, 2), padding="VALID"), limit=300)
@example(case=Case(image=(2, 9, 5, 2), strides=(2, 1)), limit=1)  # row by row
def test_any_chunk_gives_the_same(xp, case, limit):
    with (
        mock.patch.object(im2col, "NUMPY_CHUNK_BYTES", limit),
        mock.patch.object(im2col, "CUPY_CHUNK_BYTES", limit),
        mock.patch.object(cudnn_grad, "takes", lambda x, y: False),
    ):
        check_exact(case, xp)


@given(case=cases())
def test_numbers(xp, case):
    """Sums of T products in the compute dtype, rounded once; see bounded_conv2d.

    On a GPU partial sums of dw may have been rounded to the dtype of x: one more roundoff of the
    sum of sizes.
    """
    x, w = case.numbers()
    grad = gradient_of(case, whole=False)
    gradients = run(case, xp, grad, x, w)
    exact, size = (gradients_by_loops(case, *a) for a in ((grad, x, w), map(abs, (grad, x, w))))
    epsilon = oracles.epsilon_of_sums(case.dtype, tf32=case.precision == "tf32")
    terms = (math.prod(case.kernel) * case.channels, math.prod(grad.shape[:3]))
    unit, tiny = oracles.rounding(case.dtype)
    for name, value, sizes, count in zip("xw", exact, size, terms, strict=True):
        error = count * epsilon * sizes
        if name == "w" and xp.name == "cupy":
            error = error + unit * sizes + count * tiny
        expected = oracles.bounded_round(oracles.Bounded(value, error), case.dtype)
        oracles.assert_within(to_numpy(getattr(gradients, name)), expected)


@given(case=cases())
def test_they_are_the_transposes_of_the_convolution(xp, case):
    """<conv(x, w), g> == <x, dx> == <w, dw>, exactly: all numbers are whole."""
    case = replace(case, dtype=np.dtype("f8"))
    x, w = case.integers()
    grad = gradient_of(case, whole=True)
    y = to_numpy(conv2d(*case.arrange(x, w, xp), **case.options))
    product = (y * grad.transpose(ORDER[case.data_format])).sum()
    gradients = run(case, xp, grad, x, w)
    dx, dw = to_numpy(gradients.x), to_numpy(gradients.w)
    assert product == (x.transpose(ORDER[case.data_format]) * dx).sum()
    assert product == (w.transpose(ORDER[case.w_format]) * dw).sum()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("case", [
    Case(dtype=np.dtype("f8"), strides=(2, 1)),
    Case(dtype=np.dtype("f8"), data_format="NCHW", w_format="OIHW", padding="VALID"),
    Case(dtype=np.dtype("f8"), kernel=(1, 1)),
])  # fmt: skip
def test_central_differences(xp, case, activation):
    """Of <y, g> along a random direction; the bound is that of test_sparse_gather_grad.py."""
    rng = np.random.default_rng(3)
    point = [*case.numbers(), rng.uniform(0.5, 1.5, case.channels), rng.standard_normal(5)]
    direction = [rng.uniform(-1, 1, a.shape) for a in point]
    grad = gradient_of(case, whole=False)
    x, w, scale, bias = point
    z = oracles.conv2d(x, w, case.strides, case.padding) * scale + bias
    assert abs(z).min() > 1e-4  # nowhere near relu's kink

    def value(step):
        x, w, scale, bias = (a + step * d for a, d in zip(point, direction, strict=True))
        tables = {"scale": xp.asarray(scale), "bias": xp.asarray(bias)}
        arrays = case.arrange(x, w, xp)
        y = to_numpy(conv2d(*arrays, **case.options, **tables, activation=activation))
        terms = y * grad.transpose(ORDER[case.data_format])
        return terms.sum(), abs(terms).sum()

    (above, size), (below, _) = value(1e-5), value(-1e-5)
    gradients = run(case, xp, grad, x, w, scale=scale, bias=bias, activation=activation)
    orders = (ORDER[case.data_format], ORDER[case.w_format], (0,), (0,))
    named = (gradients.x, gradients.w, gradients.scale, gradients.bias)
    slope = sum(
        (to_numpy(g) * d.transpose(order)).sum()
        for g, d, order in zip(named, direction, orders, strict=True)
    )
    assert abs(slope - (above - below) / 2e-5) < 1e-8 * size


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_tables_have_gradients_of_their_own_dtype(xp, dtype, activation):
    """In every dtype the result is that of float64, off by roundings of conv(x, w) and of the end.

    z is rounded to the dtype before the activation, whose slope changes by at most 1.13 of that.
    """
    case = replace(Case(), dtype=dtype)
    x, w = case.numbers()
    scale, bias = case.tables()
    grad = gradient_of(case, whole=False)
    if activation == "relu":
        bias += np.asarray(9, dtype)  # away from the kink, where a rounding is a jump
    options = {"scale": scale, "bias": bias, "activation": activation}
    gradients = run(case, xp, grad, x, w, **options)
    wide = [a.astype(np.float64) for a in (grad, x, w)]
    tables = {k: v.astype(np.float64) for k, v in options.items() if k != "activation"}
    exact = run(replace(case, dtype=np.dtype("f8")), NUMPY, *wide, **tables, activation=activation)
    unit = oracles.rounding(dtype)[0]
    z = abs(oracles.conv2d(abs(x), abs(w)))
    slope = 1.13 * (1 + z.max() * 1.5)  # of the gradient by z, and by the change of slope
    sizes = {
        "scale": (abs(grad) * slope * z).sum(axis=(0, 1, 2)),
        "bias": (abs(grad) * slope).sum(axis=(0, 1, 2)),
        "x": oracles.data_gradient(abs(grad) * slope * 1.5, abs(w), x.shape[1:3]),
        "w": oracles.weight_gradient(abs(grad) * slope * 1.5, abs(x), (3, 3)),
    }
    for name, like in (("x", x), ("w", w), ("scale", scale), ("bias", bias)):
        actual = to_numpy(getattr(gradients, name))
        assert (actual.dtype, actual.shape) == (like.dtype, like.shape)
        wanted = oracles.Bounded(getattr(exact, name), 8 * unit * sizes[name])
        oracles.assert_within(actual, oracles.bounded_round(wanted, actual.dtype))


@pytest.mark.parametrize("activation", [None, "silu"])
def test_only_what_is_wanted_is_computed(xp, activation):
    case = Case()
    x, w = case.numbers()
    scale, bias = case.tables()
    grad = gradient_of(case, whole=False)
    options = {"scale": scale, "bias": bias, "activation": activation}
    whole = run(case, xp, grad, x, w, **options)
    for wanted in ((), ("x",), ["w"], {"bias"}, frozenset({"scale"}), ("w", "bias")):
        gradients = run(case, xp, grad, x, w, **options, wanted=wanted)
        for name in gradients._fields:
            actual = getattr(gradients, name)
            if name in wanted:
                assert_same(actual, getattr(whole, name))
            else:
                assert actual is None
    assert run(case, xp, grad, x, w, wanted=("bias", "scale")) == (None,) * 4


@given(case=cases())
def test_twice_gives_the_same_bits(xp, case):
    x, w = case.numbers()
    grad = gradient_of(case, whole=False)
    bias = np.ones(case.channels, case.dtype)
    first, second = (run(case, xp, grad, x, w, bias=bias) for _ in range(2))
    for a, b in zip(first[:3], second[:3], strict=True):
        assert_same(a, b)


def test_halves_are_summed_in_float32(xp):
    """4096 ones would stop at 2048; and 60000 + 60000 - 60000 be infinite."""
    x, w = np.ones((1, 64, 64, 8), np.float16), np.ones((1, 1, 8, 8), np.float16)
    gradients = run(Case(padding="VALID"), xp, np.ones_like(x), x, w, bias=np.ones(8, np.float16))
    assert_same(gradients.w, xp.writable(np.full_like(w, 4096)))
    assert_same(gradients.bias, xp.writable(np.full(8, 4096, np.float16)))
    big = np.full((1, 1, 3, 8), 60000, np.float16)
    big[0, 0, 2] = -60000
    dw = run(Case(padding="VALID"), xp, big, np.ones_like(big), w).w
    assert_same(dw, xp.writable(np.full_like(w, 60000)))


def test_what_overflows_is_infinite(xp):
    big = np.full((1, 1, 4, 8), 60000, np.float16)
    w = np.ones((1, 1, 8, 8), np.float16)
    gradients = run(Case(padding="VALID"), xp, big, np.ones_like(big), w, bias=w[0, 0, 0])
    for gradient in gradients[:3]:
        assert np.isinf(to_numpy(gradient)).all()


def test_an_empty_batch_has_gradients_of_zero(xp):
    case = Case(image=(0, 5, 5, 3))
    x, w = case.numbers()
    bias = np.ones(5, np.float32)
    gradients = run(case, xp, gradient_of(case, whole=True), x, w, bias=bias, activation="silu")
    assert gradients.x.shape == x.shape
    assert_same(gradients.w, xp.writable(np.zeros_like(w)))
    assert_same(gradients.bias, xp.writable(np.zeros_like(bias)))


@pytest.mark.parametrize("kernel", [3, 1])
@pytest.mark.parametrize("dtype", ["f4", "f2"])
def test_memory_is_bounded(kernel, dtype):
    """All columns of these images would take 9 times their 16 MiB; one image, padded, is 1 MiB."""
    x, w = np.ones((16, 128, 128, 16), dtype), np.ones((kernel, kernel, 16, 16), dtype)
    grad = np.ones_like(x)
    tracemalloc.start()
    try:
        conv2d_grad(grad, x, w)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < x.nbytes + 4 * im2col.NUMPY_CHUNK_BYTES


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_other_libraries(require, library):
    module = require(library)
    asarray = module.asarray if library == "torch" else module.numpy.asarray
    case = Case()
    arrays = gradient_of(case, whole=True), *case.integers()
    bias = np.ones(5, np.float32)
    expected = conv2d_grad(*arrays, bias=bias)
    gradients = conv2d_grad(*map(asarray, arrays), bias=asarray(bias))
    assert gradients.scale is None
    for actual, wanted in zip(gradients[:3], expected[:3], strict=True):
        assert type(actual).__module__.startswith(library)
        assert_same(np.asarray(actual), wanted)


def test_pytorch_agrees(torch):
    """The same gradients as those of an implementation that others wrote, strides and all."""
    case = Case(dtype=np.dtype("f8"), strides=(2, 3), padding=((2, 1), (1, 2)), data_format="NCHW",
                w_format="OIHW")  # fmt: skip
    x, w = case.arrange(*case.integers(), NUMPY)
    tensors = [torch.tensor(a, requires_grad=True) for a in (x, w)]
    padded = torch.nn.functional.pad(tensors[0], (1, 2, 2, 1))
    y = torch.nn.functional.conv2d(padded, tensors[1], stride=(2, 3))
    grad = gradient_of(case, whole=True)
    y.backward(torch.tensor(grad.transpose(0, 3, 1, 2).copy()))
    gradients = run(case, NUMPY, grad, *case.integers())
    for actual, tensor in zip(gradients[:2], tensors, strict=True):
        assert_same(actual, tensor.grad.numpy(), signed_zero=False)
