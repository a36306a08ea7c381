"""16-bit floats are compared, added and widened as NumPy would, bit by bit."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from sbnet_cupy.core import half_floats
from support.assertions import assert_same

ALL = np.arange(2**16, dtype=np.uint16)
DTYPES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
LARGE = np.float16(32768)  # from here on sums are left to NumPy


@pytest.fixture(params=DTYPES, ids=str)
def numbers(request):
    """Every number of a dtype, infinities and NaN too."""
    return ALL.view(request.param)


@pytest.fixture(params=[False, True], ids=["", "subnormals are 0"])
def _flushes(request, monkeypatch):
    smallest = np.float32(0 if request.param else half_floats._SMALLEST)
    monkeypatch.setattr(half_floats, "_SMALLEST", smallest)


def pairs_of(numbers, rounds=40):
    """Yield the numbers with others, so that all sizes meet, and neighbours of either sign."""
    generator = np.random.default_rng(5)
    for k in range(rounds):
        yield numbers, generator.permutation(numbers)
        yield numbers, np.roll(numbers, k * k - 20)
        yield numbers, np.roll(-numbers, k * k - 20)


def added(a, b):
    """Return the sum of two arrays, of which neither changes."""
    total = a.copy(order="C")
    half_floats.adder(a.dtype)(total, b)
    return total


@pytest.mark.usefixtures("_flushes")
@pytest.mark.parametrize("every", [True, False], ids=["all", "those added here"])
def test_sums(numbers, every):
    if not every:
        with np.errstate(invalid="ignore"):
            numbers = numbers[abs(numbers.astype(np.float32)) < LARGE]
    with np.errstate(over="ignore", invalid="ignore"):
        for a, b in pairs_of(numbers):
            found, expected = added(a, b), a + b
            no_number = np.isnan(expected)
            assert_same(np.isnan(found), no_number)
            assert_same(found[~no_number], expected[~no_number])


def test_pieces_end_anywhere():
    """A piece that NumPy adds lies beside one that is added here, in more than one dimension."""
    a = np.resize(np.linspace(-8, 8, 999, dtype=np.float16), (3, half_floats._PIECE - 1))
    b = a[::-1].copy()
    b[1, 7] = np.inf
    assert_same(added(a, b), a + b)
    assert_same(added(a.T, b.T), a.T + b.T)
    assert_same(half_floats.widen(b.T), b.T.astype(np.float32))
    assert added(a[:0], b[:0]).shape == (0, a.shape[1])


@pytest.mark.usefixtures("_flushes")
def test_widening(numbers):
    finite = numbers[np.isfinite(numbers.astype(np.float32))]
    for values in (numbers, finite):
        assert_same(half_floats.widen(values), values.astype(np.float32), allow_nan=True)
    double = np.array([0.1, -np.inf])
    assert_same(half_floats.widen(double), double)
    assert not np.shares_memory(half_floats.widen(double), double)


def test_comparisons(numbers):
    finite = numbers[np.isfinite(numbers.astype(np.float32))]
    thresholds = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, *map(float, finite[:: 2**12 - 1])]
    for threshold, values in itertools.product(thresholds, (numbers, numbers[5:7])):
        found = np.empty(values.shape, bool)
        half_floats.greater_than(values.dtype, threshold)(values, found)
        expected = values.astype(np.float32) > np.float32(threshold)
        assert_same(found, expected)
