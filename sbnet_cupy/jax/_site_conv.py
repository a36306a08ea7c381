"""Convolutions at sites by kernels, with all their derivatives.

The sum of products over a map and the gradient of its weights are each made of both when they are
differentiated: see ``_derivatives.py``.
"""

import functools
from typing import Any, NamedTuple

import jax

from ._callbacks import vary_alike
from ._derivatives import bilinear, layer_tangent
from ._site_kernels import (
    How,
    by_taps,
    multiplied,
    packed_weights,
    sum_of_products,
    transposed_rows,
    weights,
)
from ._sites import valid_rows


class Table(NamedTuple):
    """What a convolution reads of a map."""

    rows: Any  # int32 [taps, M]
    back: Any  # int32 [taps, N]: the same in the other direction
    indices: Any  # int32 [M, 1 + d]: the sites of the result


def site_conv(weights, features, residual, made, groups, activation, precision):
    """Return the convolution of checked arguments over a map.

    ``weights`` are w, scale, bias, and PackedWeights of the same or None.
    """
    w, scale, bias, of_weights = weights
    symmetric = made.is_symmetric()
    how = How(made.kernel_size, groups, precision, made._kept.get("offsets"), symmetric)
    back = made.rows if symmetric else transposed_rows(made.rows, made.source.capacity)
    arrays = (features, by_taps(made.taps, w), scale, bias, residual)
    table, valid = Table(made.rows, back, made.target.indices), valid_rows(made.target)
    packed = None
    if of_weights is not None:
        packed = packed_weights(of_weights, how, activation, *arrays, made.rows, valid)
    return _convolution(how, activation)(*vary_alike([*arrays, *table, valid, packed]))


@functools.cache
def _convolution(how, activation):
    """Return the jitted convolution with these options.

    It is of arrays, a table, which rows hold, and packed weights.
    """

    @jax.custom_jvp
    def convolve(features, w, scale, bias, residual, rows, back, indices, valid, packed):
        arrays = (features, w, scale, bias, residual)
        return multiplied(how, activation, *arrays, rows, valid, indices, packed)

    def rule(primals, tangents):
        y, valid = convolve(*primals), primals[8]

        def multiply(features, w):
            return _products(features, w, *primals[5:8], how=how)

        arrays = primals[:5], tangents[:5]
        return y, layer_tangent(multiply, activation, *arrays, y, valid[:, None])

    convolve.defjvp(rule, symbolic_zeros=True)
    return jax.jit(convolve)


def _feature_gradient(grad, w, *table, how):
    """Return the gradient of the features: a sum over the map in the other direction."""
    taps, c, k = w.shape
    w = w.reshape(taps, c, how.groups, k // how.groups).transpose(0, 3, 2, 1)
    w = w.reshape(taps, k // how.groups, how.groups * c)
    if how.symmetric:
        return _products(grad, w[::-1], *table, how=how)
    table = Table(*table)
    table = table._replace(rows=table.back, back=table.rows)
    return _products(grad, w, *table, how=how._replace(kernel_size=(taps,), offsets=None))


def _weight_gradient(grad, features, *table, how):
    """Return the gradient of the weights."""
    taps, c = Table(*table).rows.shape[0], features.shape[1] // how.groups
    return _weights(features, grad, *table, how=how).reshape(taps, c, grad.shape[1])


def _by_tap(ct, table):
    """Return the gradient of the weights' gradient as weights."""
    taps = Table(*table).rows.shape[0]
    return ct.reshape(taps, ct.shape[0] // taps, ct.shape[1])


_products = bilinear(
    "site_products",
    sum_of_products,
    lambda features, w, rows, *_, how: (rows.shape[1], w.shape[2]),
    _feature_gradient,
    _weight_gradient,
)
_weights = bilinear(
    "site_weights",
    weights,
    lambda x, grad, rows, *_, how: (rows.shape[0] * (x.shape[1] // how.groups), grad.shape[1]),
    lambda ct, grad, *table, how: _feature_gradient(grad, _by_tap(ct, table), *table, how=how),
    lambda ct, x, *table, how: _products(x, _by_tap(ct, table), *table, how=how),
)
