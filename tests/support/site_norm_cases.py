"""Batch norms over sites by their formula in NumPy, for the tests of adapters."""

import math

import numpy as np

from support.adapter_cases import normal
from support.assertions import assert_close, to_numpy

CHANNELS, SITES, SPARE, MOMENTUM, EPS = 3, 11, 4, 0.25, 1e-3
GRID = {"spatial_shape": 16, "capacity": SITES + SPARE}
ROWS = np.array([[0, i] for i in range(SITES)], np.int32)
NAMES = ("running_mean", "running_var", "weight", "bias")


def features_of(dtype):
    """Return features with NaN in the rows to spare."""
    values = 2 * normal(SITES + SPARE, CHANNELS, seed=1) + 1
    values[SITES:] = np.nan
    return values.astype(dtype)


def tables_of(dtype=np.float32):
    """Return running statistics, weight and bias; by name."""
    tables = normal(4, CHANNELS, seed=2)
    tables[1] = np.abs(tables[1]) + 0.5
    return dict(zip(NAMES, tables.astype(dtype), strict=True))


def batch_norm(features, tables, training, activation, grad=None):
    """Return the result, new running statistics, and the gradients of features, weight and bias.

    In float64, of the rows that are sites.
    """
    x = features[:SITES].astype(np.float64)
    mean, variance, weight, bias = (tables[name].astype(np.float64) for name in NAMES)
    running = mean, variance
    if training:
        mean, variance = x.mean(0), x.var(0)
        new = mean, x.var(0, ddof=1)
        running = [(1 - MOMENTUM) * old + MOMENTUM * n for old, n in zip(running, new, strict=True)]
    factor = weight / np.sqrt(variance + EPS)
    normal_ = (x - mean) / np.sqrt(variance + EPS)
    y, slope = _activated(normal_ * weight + bias, activation)
    if grad is None:
        return y, running
    grad = grad[:SITES].astype(np.float64) * slope
    by_weight = grad * normal_
    dx = grad - grad.mean(0) - normal_ * by_weight.mean(0) if training else grad
    return y, running, (factor * dx, by_weight.sum(0), grad.sum(0))


def _activated(z, activation):
    """Return the activation of numbers, and its derivative."""
    if activation is None:
        return z, np.ones_like(z)
    if activation == "relu":
        return np.maximum(z, 0), (z > 0).astype(z.dtype)
    if activation == "silu":
        s = 1 / (1 + np.exp(-z))
        return z * s, s * (1 + z * (1 - s))
    share = (1 + np.vectorize(math.erf)(z / 2**0.5)) / 2
    return z * share, share + z * np.exp(-z * z / 2) / (2 * np.pi) ** 0.5


def assert_near(actual, expected, dtype):
    """Compare what a few sums over the sites were made of; computed in the dtype."""
    largest = np.abs(expected).max() + 4  # as the features are, and the largest factors
    actual = to_numpy(actual)
    assert_close(actual, np.asarray(expected), terms=8 * SITES, dtype=dtype, magnitude=largest)
