"""affine_grad equals its loops: slopes of the activations, sums per channel, masked pixels."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbnet_cupy.dense.affine_grad import affine_grad
from support import oracles, strategies
from support.assertions import assert_close, assert_same, to_numpy
from support.strategies import FLOATS

ACTIVATIONS = [None, "relu", "silu", "gelu"]


def run(xp, grad, x, scale, shift, activation, channels_last, inside=None):
    """Call with arrays of the library, and see that nothing was modified."""
    originals = (grad, x, scale, shift, inside)
    arrays = [None if a is None else xp.asarray(a) for a in originals]
    gradients = affine_grad(*arrays[:4], activation, channels_last, arrays[4])
    for array, original in zip(arrays, originals, strict=True):
        if array is not None:
            assert_same(array, xp.writable(original), allow_nan=True)
    return gradients


@st.composite
def cases(draw):
    """The arguments: any of the tables, in any dtypes, and pixels that were not computed."""
    n, h, w = (draw(st.integers(0, 2)), *draw(st.tuples(st.integers(1, 9), st.integers(1, 9))))
    c, last, dtype = draw(strategies.channels()), draw(st.booleans()), draw(st.sampled_from(FLOATS))
    shape = (n, h, w, c) if last else (n, c, h, w)
    grad, x = (draw(strategies.numbers(shape, dtype)) for _ in range(2))
    tables = [
        draw(strategies.numbers((c,), draw(st.sampled_from(FLOATS[:3]))) | st.none())
        for _ in range(2)
    ]
    inside = draw(strategies.images((n, h, w, 1) if last else (n, 1, h, w), np.dtype("?")))
    inside = draw(st.sampled_from([None, inside]))
    return grad, x, *tables, draw(st.sampled_from(ACTIVATIONS)), last, inside


@given(case=cases())
def test_equals_the_loops(xp, case):
    """Up to three rounded products, and the slope itself, off by 8 u; sums of as many as pixels."""
    grad, x, scale, shift, *_ = case
    gradients = run(xp, *case)
    expected = oracles.affine_grad(*case)
    wide = np.float64 if x.dtype == np.float64 else np.float32
    pixels = grad.size // max(expected["shift"].shape[1], 1)
    for name, like in (("x", x), ("scale", scale), ("shift", shift)):
        actual = getattr(gradients, name)
        assert (actual is None) == (like is None)
        if like is not None:
            assert (actual.dtype, actual.shape) == (like.dtype, like.shape)
            value, size = expected[name]
            terms = 12 if name == "x" else 12 + pixels
            assert_close(to_numpy(actual), value, terms=terms, dtype=wide, magnitude=size)


@given(case=cases())
def test_twice_gives_the_same_bits(xp, case):
    for first, second in zip(run(xp, *case), run(xp, *case), strict=True):
        if first is not None:
            assert_same(first, second)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("channels_last", [True, False])
def test_relu_has_no_slope_at_zero_and_lets_nan_pass(xp, dtype, channels_last):
    x = np.array([-1, -0.0, 0, 1, np.nan, np.inf, -np.inf], dtype)
    x = x.reshape((1, 1, 7, 1) if channels_last else (1, 1, 1, 7))
    grad = np.full_like(x, 3)
    dx = to_numpy(run(xp, grad, x, None, None, "relu", channels_last).x)
    assert dx.ravel().tolist() == [0, 0, 0, 3, 3, 3, 0]
    grad.reshape(-1)[[0, 1, 2, 6]] = np.inf  # selected away, not multiplied by 0
    dx = to_numpy(run(xp, grad, x, None, None, "relu", channels_last).x)
    assert dx.ravel().tolist() == [0, 0, 0, 3, 3, 3, 0]


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_slopes_far_from_zero(xp, activation, dtype):
    """0 on the left and 1 on the right, with no overflow on the way."""
    x = np.array([-1e30, -1e4, -200, 200, 1e4, 1e30], dtype).reshape(1, 1, 6, 1)
    dx = to_numpy(run(xp, np.ones_like(x), x, None, None, activation, True).x).ravel().astype("f8")
    assert dx[3:].tolist() == [1, 1, 1] and (abs(dx[:3]) < 1e-80).all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_outside_goes_nowhere(xp, activation):
    x = np.ones((1, 3, 4, 8), np.float32)
    inside = np.zeros((1, 3, 4, 1), bool)
    inside[0, 1, 1] = True
    grad = np.where(inside, np.float32(1), np.float32(np.nan)) + np.zeros_like(x)
    table = np.ones(8, np.float32)
    gradients = run(xp, grad, x, table, table, activation, True, inside)
    slope = oracles.SLOPES[activation](2.0)
    for name, value in (("x", inside * slope + 0 * x), ("scale", slope), ("shift", slope)):
        value = np.broadcast_to(np.asarray(value, np.float64), getattr(gradients, name).shape)
        assert_close(to_numpy(getattr(gradients, name)), value, terms=8, dtype="f4")


def test_what_needs_no_computing_is_not_copied(xp):
    grad = xp.asarray(np.ones((1, 4, 4, 2), np.float32))
    assert affine_grad(grad, None, None, None, None, True) == (grad, None, None)
    shift = xp.asarray(np.zeros(2, np.float16))
    gradients = affine_grad(grad, None, None, shift, None, True)
    assert gradients.x is grad and gradients.scale is None
    assert_same(gradients.shift, xp.writable(np.full(2, 16, np.float16)))


def test_sums_of_many_pixels_keep_their_digits(xp):
    """A million ones of float16 are 2048 if added in float16; 0.1s drift if added one by one.

    Over two axes of 1024 no number goes through more than 2048 roundings, of 2**-24 each.
    """
    shift = np.zeros(8, np.float32)
    for value, dtype in ((1, "f2"), (0.1, "f4")):
        grad = np.full((1, 1024, 1024, 8), value, dtype)
        total = to_numpy(run(xp, grad, None, None, shift, None, True).shift).astype(np.float64)
        exact = float(grad[0, 0, 0, 0]) * 2**20
        assert (abs(total - exact) <= 2.0**-13 * exact).all()
