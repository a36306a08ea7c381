"""Back through a relu, and sums for the bias, by the CUDA kernels on the CPU: against loops."""

import numpy as np
import pytest

from sbnet_cupy.core.arrays import compute_dtype
from sbnet_cupy.submanifold.relu_grad import relu_grad
from support import site_on_host
from support.assertions import assert_same
from support.site_conv_cases import sb_dtype


@pytest.fixture(scope="module", autouse=True)
def _compiler(require):
    require("g++")


def by_loops(grad, y):
    """Return dx, and the sum of its rows in float64."""
    dx = np.zeros(grad.shape, np.float64)
    for m, k in np.ndindex(grad.shape):
        if not float(y[m, k]) <= 0:
            dx[m, k] = float(grad[m, k])
    return dx, dx.sum(0)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((300, 64), "float16"), ((1, 3), "float32"), ((70, 17), "float16"), ((130, 300), "bfloat16"),
     ((2100, 4), "float64"), ((33, 260), "float32")],
    ids=str,
)  # fmt: skip
def test_relu_and_bias_in_one_pass(shape, dtype):
    dtype = sb_dtype(dtype)
    rng = np.random.default_rng(0)
    grad, y = (rng.integers(-8, 9, shape).astype(dtype) for _ in range(2))
    y[0, 0], grad[0, 0] = np.nan, 5  # passes
    dx, dbias = by_loops(grad, y)
    with site_on_host.by_kernels():
        found, bias = relu_grad(grad, y, compute_dtype(dtype))
        assert site_on_host.LAUNCHED == ["relu_grad", "sum_shares"]
    assert_same(found, dx.astype(dtype), signed_zero=False)
    assert_same(bias, dbias.astype(bias.dtype), signed_zero=False)  # whole numbers: exact


@pytest.mark.parametrize(("first", "last"), [(8, 24), (3, 17), (0, 1)])
def test_columns_of_a_wider_array(first, last):
    """Whose vectors may be narrower, which puts other rows together: sums of whole numbers."""
    rng = np.random.default_rng(1)
    wide = rng.integers(-8, 9, (90, 40)).astype(np.float16)
    y = rng.integers(-8, 9, (90, last - first)).astype(np.float16)
    dx, dbias = by_loops(wide[:, first:last], y)
    with site_on_host.by_kernels():
        found, bias = relu_grad(wide[:, first:last], y, np.float32)
    assert_same(found, dx.astype(np.float16), signed_zero=False)
    assert_same(bias, dbias.astype(np.float32), signed_zero=False)


@pytest.mark.parametrize("grad", [np.ones((20, 1)), np.ones((8, 20)).T, np.ones((1, 8))])
def test_other_gaps_are_closed(grad):
    """Rows that are all the same, and columns far from each other."""
    grad = np.broadcast_to(grad, (20, 8))
    with site_on_host.by_kernels():
        dx, bias = relu_grad(grad, np.ones((20, 8)), np.dtype("float64"))
    assert dx.tolist() == [[1.0] * 8] * 20
    assert bias.tolist() == [20.0] * 8
