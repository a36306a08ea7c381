"""Every comparison helper raises on every kind of difference, and passes what is right."""

import ml_dtypes
import numpy as np
import pytest

from support.assertions import assert_close, assert_same, assert_same_library, epsilon

F32 = np.arange(6, dtype=np.float32).reshape(2, 3)


def changed(array, at, value):
    copy = array.copy()
    copy[at] = value
    return copy


DTYPES = ["?", "i1", "u2", "i4", "u8", "f2", "f4", "f8", "c8", "c16"]
DTYPES.append(ml_dtypes.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (2, 3)], ids=str)
def test_same_accepts_equal_arrays(dtype, shape):
    array = np.ones(shape, np.dtype(dtype))
    assert_same(array, array.copy())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_sees_one_element_of_any_dtype(dtype):
    array = np.ones((2, 3), np.dtype(dtype))
    with pytest.raises(AssertionError, match=r"1 of 6 elements differ; first at \(1, 2\)"):
        assert_same(changed(array, (1, 2), 0), array)


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        (F32, F32.astype(np.float64), "dtype"),
        (F32, F32.astype(ml_dtypes.bfloat16), "dtype"),
        (F32, F32.reshape(3, 2), "shape"),
        (F32[:1], F32[0], "shape"),  # would broadcast
        (F32[:0], F32[:, :0], "shape"),  # both empty
        (F32[0, 0], F32[:1, :1], "array"),
        (F32.tolist(), F32, "array"),
        (F32, F32.tolist(), "array"),
        (2.0, 2.0, "array"),
        (None, None, "array"),
        (changed(F32, (0, 0), -0.0), F32, "differ"),
        (changed(F32, (0, 0), np.nextafter(F32[0, 0], F32[0, 1])), F32, "differ"),
        (changed(F32, (0, 0), np.nan), changed(F32, (0, 0), np.nan), "NaN"),
        (changed(F32, (0, 0), np.nan), F32, "NaN"),
        (F32, changed(F32, (0, 0), np.nan), "NaN"),
        (changed(F32, (0, 0), np.inf), changed(F32, (0, 0), -np.inf), "differ"),
        (np.array([1j * np.nan]), np.array([1j * np.nan]), "NaN"),
        (np.array([np.nan], ml_dtypes.bfloat16), np.array([np.nan], ml_dtypes.bfloat16), "NaN"),
        (np.array([1 + 2j]), np.array([1 - 2j]), "differ"),
    ],
)
def test_same_raises(actual, expected, message):
    with pytest.raises(AssertionError, match=message):
        assert_same(actual, expected)


def test_same_may_allow_nan_but_still_compares_its_bits():
    nan = np.array([0x7FC00000, 0x3F800000], np.uint32).view(np.float32)
    payload = np.array([0x7FC00001, 0x3F800000], np.uint32).view(np.float32)
    assert_same(nan, nan.copy(), allow_nan=True)
    with pytest.raises(AssertionError, match="1 of 2 elements differ"):
        assert_same(payload, nan, allow_nan=True)


def test_same_may_ignore_the_sign_of_zero_only():
    zeros = np.array([0.0, -0.0, 1.0], np.float32)
    assert_same(zeros, abs(zeros), signed_zero=False)
    with pytest.raises(AssertionError, match="1 of 3"):
        assert_same(zeros, np.array([0.0, 0.0, -1.0], np.float32), signed_zero=False)


def test_same_sees_the_library(require):
    torch = require("torch")
    with pytest.raises(AssertionError, match="library numpy, expected torch"):
        assert_same(F32, torch.from_numpy(F32.copy()))
    assert_same(torch.ones(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16))
    with pytest.raises(AssertionError, match="1 of 3"):
        assert_same(torch.tensor([1.0, 2, 3]), torch.tensor([1.0, 2, 4]))
    with pytest.raises(AssertionError, match="dtype"):
        assert_same(torch.ones(3), torch.ones(3, dtype=torch.float64))


def test_same_sees_the_device(require):
    torch = require("torch")
    with pytest.raises(AssertionError, match="device cpu, expected meta"):
        assert_same_library(torch.ones(3), torch.ones(3, device="meta"))


def test_close_bound_is_that_of_the_sum():
    expected = np.array([1.0, 100.0])
    actual = expected.astype(np.float32)
    assert_close(actual, expected, terms=1, dtype=np.float32)
    off = actual + np.float32(16 * epsilon("f4"))
    with pytest.raises(AssertionError, match="2 of 2 beyond"):
        assert_close(changed(off, 1, 100.001), expected, terms=8, dtype=np.float32, magnitude=1.0)
    assert_close(off, expected, terms=8, dtype=np.float32)  # 100 stands in for the magnitude


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        (F32, F32.astype(np.float64).reshape(3, 2), "shape"),
        (F32[:1], F32[0].astype(np.float64), "shape"),
        (changed(F32, (0, 0), np.nan), F32.astype(np.float64), "NaN"),
        (F32, changed(F32, (0, 0), np.nan).astype(np.float64), "NaN"),
        (changed(F32, (0, 1), np.nan), changed(F32, (0, 1), np.nan).astype(np.float64), "NaN"),
        (changed(F32, (0, 1), np.inf), F32.astype(np.float64), "beyond"),
        (changed(F32, (1, 2), 5.00001), F32.astype(np.float64), "beyond"),
        (F32 * np.float32(1.05), F32.astype(np.float64), "beyond"),  # 5% wrong is wrong
        (-F32, F32.astype(np.float64), "beyond"),
        (F32.tolist(), F32, "array"),
    ],
)
def test_close_raises(actual, expected, message):
    with pytest.raises(AssertionError, match=message):
        assert_close(actual, expected, terms=1, dtype=np.float32)


def test_close_takes_one_rounding_of_a_narrow_output():
    exact = np.array([1.0 + 2.0**-12, 3.0])
    assert_close(exact.astype(np.float16), exact, terms=0, dtype=np.float32)
    assert_close(exact.astype(ml_dtypes.bfloat16), exact, terms=0, dtype=np.float32)
    with pytest.raises(AssertionError, match="beyond"):
        assert_close(np.array([1.0 + 2.0**-7], ml_dtypes.bfloat16), exact[:1], terms=0, dtype="f4")


def test_close_takes_empty_arrays_and_equal_infinities():
    assert_close(np.ones((0, 3), np.float32), np.ones((0, 3)), terms=1, dtype=np.float32)
    assert_close(np.array([np.inf, 1]), np.array([np.inf, 1]), terms=1, dtype=np.float64)
    with pytest.raises(AssertionError, match="beyond"):  # an infinity does not widen the bound
        assert_close(np.array([np.inf, 2]), np.array([np.inf, 1]), terms=1, dtype=np.float64)
    with pytest.raises(AssertionError, match="beyond"):
        assert_close(np.array([np.inf, 1]), np.array([-np.inf, 1]), terms=1, dtype=np.float64)
