"""Convolutions and the residual unit as plain loops from their definitions, in float64.

Slow on purpose, on NumPy arrays only, and importing nothing of the library under test. Images are
NHWC, kernels HWIO. ``Bounded`` carries beside each value how far a rounded computation may be off.
"""

import math
from typing import NamedTuple

import numpy as np


class Bounded(NamedTuple):
    """Exact values, and a bound on the error of their computed counterparts."""

    value: np.ndarray
    error: np.ndarray


def exact(array):
    """Input data: known without error."""
    array = np.asarray(array).astype(np.float64)
    return Bounded(array, np.zeros_like(array))


def pads(size, kernel, strides, padding):
    """Resolve padding to ((top, bottom), (left, right)); SAME is TensorFlow's."""
    if padding == "VALID":
        return (0, 0), (0, 0)
    if padding != "SAME":
        return padding
    result = []
    for n, k, s in zip(size, kernel, strides, strict=True):
        outputs = math.ceil(n / s)
        total = max((outputs - 1) * s + k - n, 0) if outputs else 0
        result.append((total // 2, total - total // 2))
    return tuple(result)


def conv2d(x, w, strides=(1, 1), padding="SAME"):
    """``y[n, p, q, k] = sum x[n, p*sh - top + r, q*sw - left + s, c] * w[r, s, c, k]``."""
    x, w = x.astype(np.float64), w.astype(np.float64)
    batch, *size, _ = x.shape
    kernel = w.shape[:2]
    padding = pads(size, kernel, strides, padding)
    outputs = [
        max((n + before + after - k) // s + 1, 0)
        for n, k, s, (before, after) in zip(size, kernel, strides, padding, strict=True)
    ]
    y = np.zeros((batch, *outputs, w.shape[3]))
    for p, q in np.ndindex(*outputs):
        for r, s in np.ndindex(kernel):
            h, v = p * strides[0] - padding[0][0] + r, q * strides[1] - padding[1][0] + s
            if 0 <= h < size[0] and 0 <= v < size[1]:
                y[:, p, q] += x[:, h, v] @ w[r, s]
    return y


def data_gradient(grad_y, w, size, strides=(1, 1), padding="SAME"):
    """``dx[n, p*sh - top + r, q*sw - left + s, c] += grad_y[n, p, q, k] * w[r, s, c, k]``."""
    grad_y, w = grad_y.astype(np.float64), w.astype(np.float64)
    (top, _), (left, _) = pads(size, w.shape[:2], strides, padding)
    dx = np.zeros((len(grad_y), *size, w.shape[2]))
    for p, q in np.ndindex(grad_y.shape[1:3]):
        for r, s in np.ndindex(w.shape[:2]):
            h, v = p * strides[0] - top + r, q * strides[1] - left + s
            if 0 <= h < size[0] and 0 <= v < size[1]:
                dx[:, h, v] += grad_y[:, p, q] @ w[r, s].T
    return dx


def weight_gradient(grad_y, x, kernel, strides=(1, 1), padding="SAME"):
    """``dw[r, s, c, k] += x[n, p*sh - top + r, q*sw - left + s, c] * grad_y[n, p, q, k]``."""
    grad_y, x = grad_y.astype(np.float64), x.astype(np.float64)
    size = x.shape[1:3]
    (top, _), (left, _) = pads(size, kernel, strides, padding)
    dw = np.zeros((*kernel, x.shape[3], grad_y.shape[3]))
    for p, q in np.ndindex(grad_y.shape[1:3]):
        for r, s in np.ndindex(*kernel):
            h, v = p * strides[0] - top + r, q * strides[1] - left + s
            if 0 <= h < size[0] and 0 <= v < size[1]:
                dw[r, s] += x[:, h, v].T @ grad_y[:, p, q]
    return dw


def bounded_conv2d(x, w, strides=(1, 1), padding="SAME", *, epsilon):
    """Convolve bounded images.

    A sum of T products in a float of machine epsilon e, in any order, is off by less than
    T * e * sum|products|: half of that where every operation rounds to nearest (Higham 2002,
    section 3.1), all of it where tensor cores truncate. Errors of x come in through |w|.
    """
    terms = math.prod(w.shape[:3])
    largest = conv2d(abs(x.value) + x.error, abs(w), strides, padding)
    through = conv2d(x.error, abs(w), strides, padding)
    return Bounded(conv2d(x.value, w, strides, padding), through + terms * epsilon * largest)


def bounded_affine(x, scale=None, shift=None, activation=None, *, epsilon):
    """``activation(x * scale + shift)``: two roundings, and those of the activation itself.

    The activations' slopes are at most 1.13, and their own evaluation (erf or exp, sums, products,
    a quotient) is off by less than 8 * e * |argument|.
    """
    value, error = x
    if scale is not None:
        scale = scale.astype(np.float64)
        value, error = value * scale, error * abs(scale)
        error = error + epsilon * (abs(value) + error)
    if shift is not None:
        value = value + shift.astype(np.float64)
        error = error + epsilon * (abs(value) + error)
    size = abs(value) + error
    value = np.vectorize(ACTIVATIONS[activation], otypes=[np.float64])(value)
    if activation in ("silu", "gelu"):
        error = 1.13 * error + 8 * epsilon * size
    return Bounded(value, error)


def bounded_round(x, dtype):
    """Round to a dtype: half a unit in the last place, or half the smallest subnormal."""
    unit, tiny = rounding(dtype)
    return Bounded(x.value, x.error + unit * (abs(x.value) + x.error) + tiny)


def bounded_add(a, b):
    """Add exactly; the rounding is ``bounded_round``."""
    return Bounded(a.value + b.value, a.error + b.error)


def residual_unit(x, weights, strides=(1, 1), w_project=None, *, dtype, epsilon):
    """Return ``x + conv3(a3(conv2(a2(conv1(a1(x))))))`` and the shortcut, x or its projection.

    Every intermediate image is rounded to ``dtype``. ``weights`` are w1, w2, w3, scale1, shift1,
    scale2, shift2, scale3, shift3.
    """
    w1, w2, w3, scale1, shift1, scale2, shift2, scale3, shift3 = weights
    options = {"epsilon": epsilon}
    t = bounded_affine(exact(x), scale1, shift1, "relu", **options)
    t = bounded_conv2d(bounded_round(t, dtype), w1, **options)
    t = bounded_affine(t, scale2, shift2, "relu", **options)
    t = bounded_conv2d(bounded_round(t, dtype), w2, strides, **options)
    t = bounded_affine(t, scale3, shift3, "relu", **options)
    t = bounded_round(bounded_conv2d(bounded_round(t, dtype), w3, **options), dtype)
    shortcut = exact(x)
    if w_project is not None:
        shortcut = bounded_conv2d(shortcut, w_project, strides, **options)
        shortcut = bounded_round(shortcut, dtype)
    return bounded_round(bounded_add(t, shortcut), dtype), shortcut


def active_outputs(shape, rows, block):
    """Return bool [N, H', W']: the output pixels of the blocks ``rows`` (n, hi, wi)."""
    active = np.zeros(shape, bool)
    for n, hi, wi in rows:
        for p in range(hi * block[0], (hi + 1) * block[0]):
            for q in range(wi * block[1], (wi + 1) * block[1]):
                if 0 <= n < shape[0] and 0 <= p < shape[1] and 0 <= q < shape[2]:
                    active[n, p, q] = True
    return active


def max_pool(mask, kernel, strides, padding):
    """Maximum of the mask's pixels under each window; 0 where there is none."""
    size = mask.shape[1:]
    y = conv2d(np.zeros((*mask.shape, 1)), np.zeros((*kernel, 1, 1)), strides, padding)[..., 0]
    padding = pads(size, kernel, strides, padding)
    for n, p, q in np.ndindex(y.shape):
        h, v = p * strides[0] - padding[0][0], q * strides[1] - padding[1][0]
        under = mask[n, max(h, 0) : max(h + kernel[0], 0), max(v, 0) : max(v + kernel[1], 0)]
        y[n, p, q] = under.max() if under.size else 0
    return y


def assert_within(actual, expected):
    """Raise unless every element lies within its bound; NaN never does."""
    actual = np.asarray(actual).astype(np.float64)
    if actual.shape != expected.value.shape:
        raise AssertionError(f"shape {actual.shape}, expected {expected.value.shape}")
    wrong = ~(abs(actual - expected.value) <= expected.error)
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise AssertionError(
            f"{wrong.sum()} of {wrong.size} beyond the bound; first at {at}: {actual[at]!r}, "
            f"expected {expected.value[at]!r} +- {expected.error[at]:.3g}"
        )


def rounding(dtype):
    """Return (unit roundoff, half the smallest subnormal) of a floating dtype."""
    if np.dtype(dtype).name == "bfloat16":
        return 2.0**-8, 2.0**-134
    info = np.finfo(dtype)
    return float(info.eps) / 2, float(info.smallest_subnormal) / 2


def epsilon_of_sums(dtype, *, tf32=False):
    """Machine epsilon of the sums for images of a dtype: those of float32 or float64.

    TF32 rounds or truncates each factor to 11 significant bits: 2**-10 each, so 2**-9 a product.
    """
    if np.dtype(dtype) == np.float64:
        return 2.0**-52
    return 2.0**-9 + 2.0**-23 if tf32 else 2.0**-23


ACTIVATIONS = {
    None: lambda v: v,
    "relu": lambda v: max(v, 0.0),
    "silu": lambda v: v / (1 + math.exp(-v)),
    "gelu": lambda v: v * 0.5 * (1 + math.erf(v / math.sqrt(2))),
}
