"""Squares of pixels, against loops over them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbnet_cupy.demo.reduction import block_max, block_mean

SIZES = st.integers(1, 17)


def squares(values, factor, reduce):
    h, w = (-(-n // factor) for n in values.shape[:2])
    result = np.empty((h, w, *values.shape[2:]))
    for i, j in np.ndindex(h, w):
        rows, columns = (slice(k * factor, (k + 1) * factor) for k in (i, j))
        result[i, j] = reduce(values[rows, columns], axis=(0, 1))
    return result


@given(SIZES, SIZES, st.sampled_from([(), (3,)]), st.integers(1, 20), st.sampled_from("BHf?"))
def test_squares(h, w, channels, factor, dtype):
    values = (np.random.default_rng(h).random((h, w, *channels)) * 250).astype(dtype)
    mean, most = block_mean(values, factor), block_max(values, factor)
    assert most.dtype == values.dtype
    assert np.array_equal(most, squares(values, factor, np.max))
    expected = squares(values.astype(float), factor, np.mean)
    # The mean is of a float64 sum, and rounded once to float32.
    assert np.all(abs(mean - expected) <= 250 * np.finfo(np.float32).eps)


@pytest.mark.parametrize("function", [block_mean, block_max])
def test_a_nan_stays_in_its_square(function):
    values = np.zeros((4, 6), np.float32)
    values[1, 1] = np.nan
    assert np.argwhere(np.isnan(function(values, 2))).tolist() == [[0, 0]]


def test_factor_1_changes_nothing():
    values = np.arange(6, dtype=np.uint8).reshape(2, 3)
    assert block_mean(values, 1) is values
    assert block_max(values, 1) is values
