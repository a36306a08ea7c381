"""sparse_conv2d_grad: the dense convolution's gradients for what active blocks gave."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from conftest import Library
from sbnet_cupy import ShapeError, calc_block_params, sparse_conv2d_grad
from sbnet_cupy.dense.activation import ACTIVATIONS
from support import conv_oracles as oracles
from support.adapter_cases import normal
from support.assertions import assert_same, to_numpy
from support.conv_cases import ORDER
from support.sparse_conv_cases import Case, cases
from support.strategies import FLOATS

NUMPY = Library("numpy", np)
FLOAT64 = np.dtype("f8")
ORDERS = {"x": "data_format", "w": "w_format", "base": "data_format"}


def ordered(case, name, array):
    """Lay an argument, or its gradient, out as the options say."""
    order = ORDER[getattr(case, ORDERS[name])] if name in ORDERS else (0,)
    return np.ascontiguousarray(array.transpose(order))


def gradient_of(case, *, whole=True):
    """NHWC gradient of the result, and which of its pixels are active."""
    shape = oracles.conv2d(*case.data(), case.strides, case.padding).shape
    rng = np.random.default_rng(case.seed + 2)
    grad = rng.integers(-2, 3, shape) if whole else rng.standard_normal(shape)
    active = oracles.active_outputs(shape[:3], case.indices()[2], case.params.bsize_out)
    return grad.astype(case.dtype), active[..., None]


def run(case, xp, grad, x, w, indices=None, **options):
    """Call with arrays of the library, and see that nothing was modified."""
    given = {"grad_y": grad.transpose(ORDER[case.data_format]),
             "x": ordered(case, "x", x), "w": ordered(case, "w", w)}  # fmt: skip
    given |= {k: v for k, v in options.items() if isinstance(v, np.ndarray)}
    if "base" in given:
        given["base"] = ordered(case, "base", options["base"])
    arrays = {name: xp.asarray(array) for name, array in given.items()}
    indices = case.indices()[:2] if indices is None else indices
    gradients = sparse_conv2d_grad(
        indices=tuple(map(xp.asarray, indices)), block_params=case.params, **case.options,
        **(options | arrays),
    )  # fmt: skip
    for name, array in arrays.items():
        assert_same(array, xp.writable(given[name]), allow_nan=True)
    return gradients


@given(case=cases(), based=st.booleans())
@example(case=Case(strides=(2, 2), padding="VALID", density=1.0), based=True)
def test_whole_numbers_are_exact(xp, case, based):
    """To the bit: dense gradients of the active pixels, and the rest for the base."""
    x, w = case.data()
    grad, active = gradient_of(case)
    base = np.full(grad.shape, np.nan, case.dtype) if based else None
    gradients = run(case, xp, grad, x, w, base=base, bias=np.ones(case.channels, np.float32))
    seen = np.where(active, grad, 0)
    options = (case.strides, case.padding)
    expected = {
        "x": oracles.data_gradient(seen, w, x.shape[1:3], *options).astype(case.dtype),
        "w": oracles.weight_gradient(seen, x, case.kernel, *options).astype(case.dtype),
        "bias": seen.astype(np.float64).sum(axis=(0, 1, 2)).astype(np.float32),
        "base": np.where(active, 0, grad).astype(case.dtype),
    }
    assert based or gradients.base is None
    for name in ("x", "w", "bias", *(["base"] if based else [])):
        wanted = xp.writable(ordered(case, name, expected[name]))
        assert_same(getattr(gradients, name), wanted, signed_zero=False)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("case", [
    Case(dtype=FLOAT64),
    Case(dtype=FLOAT64, strides=(2, 2), padding="VALID", data_format="NCHW", w_format="OIHW"),
    Case(dtype=FLOAT64, kernel=(2, 3), steps=(9, 9), density=1.0),  # larger than the image
])  # fmt: skip
def test_central_differences(xp, case, activation):
    """Of <y, g> along a random direction of each argument; see test_sparse_gather_grad.py."""
    rng = np.random.default_rng(5)
    grad, _ = gradient_of(case, whole=False)
    point = dict(zip("xw", case.data(whole=False), strict=True))
    point |= {"bias": rng.standard_normal(case.channels), "base": rng.standard_normal(grad.shape)}
    z = oracles.conv2d(point["x"], point["w"], case.strides, case.padding) + point["bias"]
    assert abs(z).min() > 5e-5  # further from relu's kink than the steps reach
    gradients = run(case, xp, grad, **point, activation=activation)

    def value(name, direction, step):
        moved = point | {name: point[name] + step * direction}
        base = xp.asarray(ordered(case, "base", moved["base"]))
        options = {"bias": xp.asarray(moved["bias"]), "base": base, "activation": activation}
        terms = to_numpy(case.run(xp, moved["x"], moved["w"], **options))
        terms = terms * grad.transpose(ORDER[case.data_format])
        return terms.sum(), abs(terms).sum()

    for name, array in point.items():
        direction = rng.uniform(-1, 1, array.shape)
        (above, size), (below, _) = (value(name, direction, step) for step in (1e-6, -1e-6))
        slope = (to_numpy(getattr(gradients, name)) * ordered(case, name, direction)).sum()
        assert abs(slope - (above - below) / 2e-6) < 1e-7 * size, name


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_dtype(xp, dtype, activation):
    """Against float64 on the same numbers, all of them positive: every sum is one of magnitudes.

    Each is rounded at most 20 times on its way: the convolution, the slope, its products, the sums
    of dx where blocks overlap. TF32 is not asked for.
    """
    case = Case(dtype=dtype)
    x, w = (abs(a) for a in case.data(whole=False))
    grad, _ = gradient_of(case, whole=False)
    bias = np.full(case.channels, 0.25, np.float32)
    arrays = [abs(grad), x, w]
    gradients = run(case, xp, *arrays, bias=bias, activation=activation)
    wide = [a.astype(np.float64) for a in arrays]
    exact = run(replace(case, dtype=FLOAT64), NUMPY, *wide, bias=bias.astype("f8"),
                activation=activation)  # fmt: skip
    unit, tiny = oracles.rounding(dtype)
    sums = oracles.epsilon_of_sums(dtype) * (grad.size // case.channels)
    for name, like in (("x", x), ("w", w), ("bias", bias)):
        actual, value = to_numpy(getattr(gradients, name)), getattr(exact, name)
        assert actual.dtype == like.dtype
        wanted = oracles.Bounded(value, (20 * unit + sums) * value + tiny)
        oracles.assert_within(actual, oracles.bounded_round(wanted, like.dtype))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_rows_that_are_no_blocks_contribute_nothing(xp, activation):
    """Not to the bias either, which every zero of a gathered stack would see."""
    case = Case(image=(1, 9, 11, 3), density=1.0)
    x, w = case.data()
    grad, _ = gradient_of(case)
    worst = np.iinfo(np.int32)
    rows = [[0, 0, 0], [5, 0, 0], [-1, 0, 0], [0, 99, 0], [0, worst.max, worst.min], [0, 1, 1]]
    corrupt = np.array([6], np.int32), np.array([*rows, [0, 1, 0]], np.int32)
    clean = np.array([2], np.int32), np.array([[0, 0, 0], [0, 1, 1]], np.int32)
    options = {"bias": np.ones(5, np.float32), "activation": activation}
    first, second = (run(case, xp, grad, x, w, rows, **options) for rows in (corrupt, clean))
    for name in ("x", "w", "bias"):
        a, b = to_numpy(getattr(first, name)), to_numpy(getattr(second, name))
        close = oracles.Bounded(b.astype("f8"), np.full(b.shape, abs(b).max() * 2.0**-18))
        oracles.assert_within(a, close)  # zeros between the terms change how they are grouped


def test_nan_outside_active_blocks_goes_nowhere(xp):
    case = Case()
    x, w = case.data()
    grad, active = gradient_of(case)
    bias = np.ones(5, np.float32)
    wild = np.where(active, grad, np.float32(np.nan))
    calm = np.where(active, grad, np.float32(0))
    for activation in ACTIVATIONS:
        options = {"bias": bias, "activation": activation}
        first, second = (run(case, xp, g, x, w, **options) for g in (wild, calm))
        for a, b in zip(first[:3], second[:3], strict=True):
            assert_same(a, b)


def test_nan_past_the_last_window_goes_nowhere(xp):
    """With strides an image may have pixels that no window reads, but a block beyond its result."""
    x, w = normal(1, 8, 9, 2), normal(3, 3, 2, 3, seed=1)  # windows read 7 rows and 7 columns
    wild, mask = x.copy(), np.ones((1, 8, 9), bool)
    wild[:, 7:], wild[:, :, 7:] = np.nan, np.inf
    options = {"bsize": 4, "strides": (2, 4), "padding": "VALID", "bias": xp.asarray(w[0, 0, 0])}
    for activation in ACTIVATIONS:
        given = [xp.asarray(a) for a in (normal(1, 3, 2, 3, seed=2), w, mask)]
        calm, found = (
            sparse_conv2d_grad(given[0], xp.asarray(image), *given[1:], **options,
                               activation=activation)
            for image in (x, wild)
        )  # fmt: skip
        for a, b in zip(found[:3], calm[:3], strict=True):
            assert_same(a, b)


def test_only_what_is_wanted_is_computed(xp):
    case = Case()
    x, w = case.data(whole=False)
    grad, _ = gradient_of(case, whole=False)
    options = {"bias": np.ones(5, np.float32), "base": grad, "activation": "silu"}
    whole = run(case, xp, grad, x, w, **options)
    for wanted in ((), ("x",), ("w", "base"), ("bias",), ("base",)):
        gradients = run(case, xp, grad, x, w, **options, wanted=wanted)
        for name in gradients._fields:
            actual = getattr(gradients, name)
            if name in wanted:
                assert_same(actual, getattr(whole, name))
            else:
                assert actual is None


@given(case=cases(), activation=st.sampled_from(ACTIVATIONS))
def test_twice_gives_the_same_bits(xp, case, activation):
    x, w = case.data(whole=False)
    grad, _ = gradient_of(case, whole=False)
    options = {"bias": np.ones(case.channels, case.dtype), "activation": activation}
    first, second = (run(case, xp, grad, x, w, **options) for _ in range(2))
    for a, b in zip(first[:3], second[:3], strict=True):
        assert_same(a, b)


def test_block_params_must_belong_to_the_convolution(xp):
    case = Case()
    grad, *arrays = map(xp.asarray, (gradient_of(case)[0], *case.data()))
    indices = tuple(map(xp.asarray, case.indices()[:2]))
    for params in (
        calc_block_params((9, 20), case.params.bsize, 3),
        calc_block_params((9, 11), case.params.bsize, 5),
        calc_block_params((9, 11), (7, 7), 3, strides=2),
    ):
        with pytest.raises(ShapeError, match="block_params"):
            sparse_conv2d_grad(grad, *arrays, indices, params)


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_other_libraries(require, library):
    module = require(library)
    asarray = module.asarray if library == "torch" else module.numpy.asarray
    case = Case()
    grad, arrays, indices = gradient_of(case)[0], case.data(), case.indices()[:2]
    expected = sparse_conv2d_grad(grad, *arrays, indices, case.params, base=grad)
    gradients = sparse_conv2d_grad(
        *map(asarray, (grad, *arrays)), tuple(map(asarray, indices)), case.params,
        base=asarray(grad),
    )  # fmt: skip
    for name in ("x", "w", "base"):
        actual = getattr(gradients, name)
        assert type(actual).__module__.startswith(library)
        assert_same(np.asarray(actual), getattr(expected, name))
