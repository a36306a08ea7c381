"""Gradients of convolutions at sites by the kernels on a GPU, against float64 and loops."""

from dataclasses import replace

import numpy as np
import pytest

from sbnet_cupy.core.arrays import compute_dtype
from sbnet_cupy.submanifold.relu_grad import relu_grad
from sbnet_cupy.submanifold.site_conv_grad import SITE_WEIGHT_GRAD
from support.assertions import assert_same, to_numpy
from support.site_conv_cases import SiteConvCase, sb_dtype
from support.site_grad_cases import (
    CASES,
    assert_gradients,
    draw_weight_gradient,
    gradients,
    weight_gradient_by_taps,
)

pytestmark = pytest.mark.gpu


MORE = [
    SiteConvCase(
        dtype, 2000, c, k, (3, 3, 3), precision=precision, spare=100, activation=activation,
        residual=activation is None,
    )
    for dtype, precision in (("float16", None), ("bfloat16", None), ("float32", "tf32"))
    for c, k, activation in ((16, 32, None), (64, 64, "relu"), (128, 96, None), (3, 17, "relu"))
] + [
    SiteConvCase("float32", 2000, 64, 64, (3, 3, 3), activation=None, whole=False),
    SiteConvCase("float16", 2000, 128, 128, (3, 3), activation=None, whole=False, tables=False),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES + MORE, ids=str)
def test_gradients(case, cupy):
    found, again = (gradients(case, cupy.asarray) for _ in range(2))
    assert_gradients(case, found)
    assert_gradients(case, gradients(case, cupy.asarray, by_result=True))
    for name, value in found.items():
        assert_same(again[name], value)


CHANNELS = [
    (8, 16), (24, 40), (64, 64), (100, 128), (128, 64), (7, 130), (64, 128), (128, 128), (128, 256),
    (264, 96), (256, 256),
]  # fmt: skip


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "tf32", "float32", "float64"])
def test_weights(dtype, channels, cupy):
    """Many windows, shares and stages; the last tap is that of no row."""
    precision = "tf32" if dtype == "tf32" else None
    dtype = "float32" if dtype == "tf32" else dtype
    arrays = draw_weight_gradient(dtype, 5000, 30_000, 3, *channels, density=0.3)
    given = (*map(cupy.asarray, arrays), None)
    found, again = (to_numpy(SITE_WEIGHT_GRAD(given, (1, precision))) for _ in range(2))
    assert_same(found, weight_gradient_by_taps(*arrays).astype(found.dtype))
    assert_same(again, found)
    assert not found[-1].any()


def test_no_sites(cupy):
    found = gradients(replace(SiteConvCase(), sites=0), cupy.asarray)
    assert not found["w"].any()
    assert found["features"].shape == (0, 16)


def test_many_rows(cupy):
    """Products of ones: counts of pairs, of more numbers than 32 bits count."""
    rows, channels = 2**21, 1040
    x = cupy.ones((rows, channels), np.float16)
    dy = cupy.ones((rows, 8), np.float16)
    table = cupy.full((2, rows), -1, np.int32)
    table[0, ::1024] = cupy.arange(rows - 1, -1, -1024, dtype=np.int32)
    dw = SITE_WEIGHT_GRAD((x, dy, table, None), (1, None))
    assert (dw[0] == rows // 1024).all()
    assert not dw[1].any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(2000, 64), (5, 3), (30_000, 96)], ids=str)
def test_relu_and_bias_in_one_pass(shape, dtype, cupy):
    dtype = sb_dtype(dtype)
    rng = np.random.default_rng(0)
    grad, y = (rng.integers(-8, 9, shape).astype(dtype) for _ in range(2))
    dx, dbias = relu_grad(cupy.asarray(grad), cupy.asarray(y), compute_dtype(dtype))
    expected = np.where(y.astype(float) > 0, grad.astype(float), 0)
    assert (to_numpy(dx).astype(float) == expected).all()
    assert (to_numpy(dbias).astype(float) == expected.sum(0)).all()  # whole numbers: exact
