"""Convolutions in float64 on the device, with a bound on what a rounded computation may be off.

Written from the definitions, on any array module, and importing nothing of the library.
"""

import math
from typing import Any, NamedTuple

import numpy as np

# Unit roundoff, and half the smallest subnormal.
ROUNDING = {
    "float16": (2.0**-11, 2.0**-25),
    "bfloat16": (2.0**-8, 2.0**-134),
    "float32": (2.0**-24, 2.0**-150),
}
# A sum of T products in float32, in any order: T * 2**-23 of the sum of their sizes where tensor
# cores truncate (Higham 2002, section 3.1). TF32 truncates both factors, by 2**-10 each.
OF_A_TERM = 2.0**-23
OF_TF32 = 2.0**-9 + 2.0**-20


class Bounded(NamedTuple):
    """Exact values, and how far their computed counterparts may be off."""

    value: Any
    error: Any


class Arithmetic(NamedTuple):
    """How a computation rounds."""

    dtype: str  # of images and intermediate images
    tf32: bool = False
    winograd: bool = False  # cuDNN may choose such an algorithm, which rounds transformed tiles

    def of_sums(self, terms):
        """Error of a sum of products, relative to the sum of their sizes."""
        transforms = 4 * ROUNDING[self.dtype][0] if self.winograd else 0.0
        return terms * OF_A_TERM + transforms + (OF_TF32 if self.tf32 else 0.0)


def exact(image):
    """Input data: known without error."""
    image = image.astype(np.float64)
    return Bounded(image, 0 * image)


def conv(x, w, xp):
    """Convolve images ``[N, H, W, C]`` with ``[R, S, C, K]``, SAME, stride 1, odd kernels."""
    (n, h, width, c), (r, s, _, k) = x.shape, w.shape
    padded = xp.zeros((n, h + r - 1, width + s - 1, c), np.float64)
    padded[:, r // 2 : r // 2 + h, s // 2 : s // 2 + width] = x
    y = xp.zeros((n * h * width, k), np.float64)
    for i, j in np.ndindex(r, s):
        y += padded[:, i : i + h, j : j + width].reshape(-1, c) @ w[i, j]
    return y.reshape(n, h, width, k)


def bounded_conv(x, w, arithmetic, xp):
    """Convolve, sums in float32, and round to the dtype; errors of x come in through ``|w|``."""
    w = w.astype(np.float64)
    size = xp.abs(w)
    relative = arithmetic.of_sums(math.prod(w.shape[:3]))
    error = conv((1 + relative) * x.error + relative * xp.abs(x.value), size, xp)
    return rounded(Bounded(conv(x.value, w, xp), error), arithmetic, xp)


def bounded_affine_relu(x, scale, shift, arithmetic, xp):
    """``relu(x * scale + shift)``, rounded to the dtype.

    Four roundings in float32: of scale and shift (a batch norm computes them), product and sum.
    """
    scale, shift = scale.astype(np.float64), shift.astype(np.float64)
    size = (xp.abs(x.value) + x.error) * xp.abs(scale) + xp.abs(shift)
    error = x.error * xp.abs(scale) + 4 * OF_A_TERM * size
    value = xp.maximum(x.value * scale + shift, 0.0)
    return rounded(Bounded(value, error), arithmetic, xp)


def rounded(x, arithmetic, xp):
    """Round to the dtype of the images."""
    unit, tiny = ROUNDING[arithmetic.dtype]
    return Bounded(x.value, x.error + unit * (xp.abs(x.value) + x.error) + tiny)


def residual_unit(x, weights, arithmetic, xp):
    """``x + conv3(a3(conv2(a2(conv1(a1(x))))))``; each step may be rounded to the dtype."""
    t = exact(x)
    for step in "123":
        scale, shift = (getattr(weights, f"{name}{step}") for name in ("scale", "shift"))
        t = bounded_affine_relu(t, scale, shift, arithmetic, xp)
        t = bounded_conv(t, getattr(weights, f"w{step}"), arithmetic, xp)
    return rounded(Bounded(t.value + x.astype(np.float64), t.error), arithmetic, xp)
