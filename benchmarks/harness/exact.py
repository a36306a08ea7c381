"""Convolutions in float64 on the device, with a bound on what a rounded computation may be off.

Written from the definitions, on any array module, and calling nothing of the library.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness.inputs import to_host

# Unit roundoff, and half the smallest subnormal.
ROUNDING = {
    "float16": (2.0**-11, 2.0**-25),
    "bfloat16": (2.0**-8, 2.0**-134),
    "float32": (2.0**-24, 2.0**-150),
}
# A sum of T products in float32, in any order: T * 2**-23 of the sum of their sizes where tensor
# cores truncate (Higham 2002, section 3.1). TF32 rounds or truncates each factor.
OF_A_TERM = 2.0**-23
OF_TF32 = 2.0**-10


class Bounded(NamedTuple):
    """Exact values, and how far their computed counterparts may be off."""

    value: Any  # [N, H, W, C]
    error: Any  # of each value; or of each pixel [N, H, W, 1], in the 2-norm over its channels


class Arithmetic(NamedTuple):
    """How a computation rounds."""

    dtype: str  # of images and intermediate images
    tf32: bool = False
    winograd: bool = False  # cuDNN may choose such an algorithm, which rounds transformed tiles

    def of_sums(self, terms):
        """Error of a sum of so many products, relative to the sum of their sizes, TF32 apart."""
        transforms = 4 * ROUNDING[self.dtype][0] if self.winograd else 0.0
        return terms * OF_A_TERM + transforms


def conv(x, w, xp):
    """Convolve images ``[N, H, W, C]`` with ``[R, S, C, K]``, SAME, stride 1, odd kernels."""
    (n, h, width, c), (r, s, _, k) = x.shape, w.shape
    padded = xp.zeros((n, h + r - 1, width + s - 1, c), np.float64)
    padded[:, r // 2 : r // 2 + h, s // 2 : s // 2 + width] = x
    y = xp.zeros((n * h * width, k), np.float64)
    for i, j in np.ndindex(r, s):
        y += padded[:, i : i + h, j : j + width].reshape(-1, c) @ w[i, j]
    return y.reshape(n, h, width, k)


def convolution(x, w, arithmetic, xp):
    """Convolve an image; the sums are in float32 and rounded to the dtype. A bound per value."""
    x, w = x.astype(np.float64), w.astype(np.float64)
    relative = arithmetic.of_sums(math.prod(w.shape[:3]))
    if arithmetic.tf32:
        relative += (1 + OF_TF32) ** 2 - 1
    y = conv(x, w, xp)
    unit, tiny = ROUNDING[arithmetic.dtype]
    error = relative * conv(xp.abs(x), xp.abs(w), xp)
    return Bounded(y, error + unit * (xp.abs(y) + error) + tiny)


def residual_unit(x, weights, arithmetic, xp):
    """``x + conv3(a3(conv2(a2(conv1(a1(x))))))``; each step may be rounded to the dtype.

    Bounds of single values would grow through three sums of absolute values, and say nothing in
    the end. Norms of pixels grow by the largest singular values instead.
    """
    x = x.astype(np.float64)
    t = Bounded(x, 0 * x[..., :1])
    for step in "123":
        scale, shift = (getattr(weights, f"{name}{step}") for name in ("scale", "shift"))
        t = _affine_relu(t, scale.astype(np.float64), shift.astype(np.float64), arithmetic, xp)
        t = _convolved(t, getattr(weights, f"w{step}").astype(np.float64), arithmetic, xp)
    return _rounded(Bounded(x + t.value, t.error), arithmetic, xp)


def norm(image, xp):
    """Return the 2-norm of each pixel, ``[N, H, W, 1]``."""
    return xp.sqrt((image * image).sum(axis=-1, keepdims=True))


def _affine_relu(x, scale, shift, arithmetic, xp):
    """``relu(x * scale + shift)``; four roundings, for a batch norm computes scale and shift."""
    through = float(xp.abs(scale).max()) * x.error
    size = norm(xp.abs(x.value * scale) + xp.abs(shift), xp) + through
    value = xp.maximum(x.value * scale + shift, 0.0)
    return _rounded(Bounded(value, through + 4 * OF_A_TERM * size), arithmetic, xp)


def _convolved(x, w, arithmetic, xp):
    """Convolve; TF32 is an error of x and one of w, that of the sums comes in through ``|w|``."""
    matrix = to_host(w).reshape(-1, w.shape[3])
    largest, largest_of_sizes = (np.linalg.norm(m, 2) for m in (matrix, abs(matrix)))
    window = xp.ones((*w.shape[:2], 1, 1))
    reach, error = (
        xp.sqrt(conv(v * v, window, xp)) for v in (norm(x.value, xp) + x.error, x.error)
    )
    relative = arithmetic.of_sums(len(matrix)) * largest_of_sizes
    if arithmetic.tf32:
        relative += OF_TF32 * (largest + (1 + OF_TF32) * np.linalg.norm(matrix))
    value = conv(x.value, w, xp)
    return _rounded(Bounded(value, largest * error + relative * reach), arithmetic, xp)


def _rounded(x, arithmetic, xp):
    """Round to the dtype of the images."""
    unit, tiny = ROUNDING[arithmetic.dtype]
    error = unit * (norm(x.value, xp) + x.error) + tiny * math.sqrt(x.value.shape[-1])
    return Bounded(x.value, x.error + error)
