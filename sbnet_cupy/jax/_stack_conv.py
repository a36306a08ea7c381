"""Convolutions of a stack by kernels, with all their derivatives.

A convolution, its transpose and the gradient of its weights are sums over the same products. Each
is a primitive, made of the two others when it is differentiated: see ``_derivatives.py``.
"""

import functools

import jax

from ._callbacks import vary_alike
from ._derivatives import bilinear, layer_tangent
from ._places import Places, table_of
from ._stack_kernels import convolved, sum_of_products, weight_gradient


def stack_conv(x, w, scale, bias, residual, table, packed, form, back, activation):
    """Return the convolution of checked arguments; ``w`` is that of the form.

    ``packed`` is what was packed of it before, or None.
    """
    arrays = x, w, scale, bias, residual, *table, packed
    return _convolution(form, back, activation)(*vary_alike(arrays))


@functools.cache
def _convolution(form, back, activation):
    """Return the jitted convolution with these options, of arrays, a table and packed weights."""

    @jax.custom_jvp
    def convolve(*arrays):
        *arrays, packed = arrays
        return convolved(form, back, activation, *arrays, packed=packed)

    def rule(primals, tangents):
        y, table = convolve(*primals), primals[5:8]
        there = Places(table_of(table, form.stage(back))).own()

        def multiply(x, w):
            return _sum(x, w, *table, how=(form, back))

        return y, layer_tangent(multiply, activation, primals[:5], tangents[:5], y, there)

    convolve.defjvp(rule, symbolic_zeros=True)
    return jax.jit(convolve)


def _sum_shape(x, w, *table, how):
    form, back = how
    channels = form.groups * w.shape[2] if back else w.shape[3]
    return (x.shape[0], *form.stage(back).block_size, channels)


def _of_x(ct, w, *table, how):
    """The same sum in the other direction."""
    form, back = how
    return _sum(ct, w, *table, how=(form, not back))


def _of_w(ct, x, *table, how):
    form, back = how
    fine, coarse = (ct, x) if back else (x, ct)
    return _weights(fine, coarse, *table, how=form)


_sum = bilinear("stack_products", sum_of_products, _sum_shape, _of_x, _of_w)
_weights = bilinear(
    "stack_weights",
    weight_gradient,
    lambda x, ct, *_, how: (*how.window.kernel, x.shape[3] // how.groups, ct.shape[3]),
    lambda ct, coarse, *table, how: _sum(coarse, ct, *table, how=(how, True)),
    lambda ct, fine, *table, how: _sum(fine, ct, *table, how=(how, False)),
)
