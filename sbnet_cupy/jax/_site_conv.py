"""Convolutions at sites, called back from XLA, with all their derivatives.

What is linear are two primitives of JAX, each made of both when it is differentiated: the sum of
products over a map, and the gradient of its weights. The convolution itself, with all that follows
the sum, is one kernel; its tangent is made of these two.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ..core.arrays import compute_dtype
from . import _namespace as ops
from ._callbacks import vary_alike
from ._mapped import one_by_one
from ._site_kernels import How, multiplied, sum_of_products, transposed_rows, weights
from ._sites import valid_rows


class Table(NamedTuple):
    """What a convolution reads of a map."""

    rows: Any  # int32 [taps, M]
    back: Any  # int32 [taps, N]: the same in the other direction
    indices: Any  # int32 [M, 1 + d]: the sites of the result


def site_conv(features, w, scale, bias, residual, made, groups, activation, precision):
    """Return the convolution of checked arguments over a map."""
    symmetric = made.is_symmetric()
    how = How(made.kernel_size, groups, precision, made._kept.get("offsets"), symmetric)
    back = made.rows if symmetric else transposed_rows(made.rows, made.source.capacity)
    arrays = (features, w.reshape(made.taps, *w.shape[-2:]), scale, bias, residual)
    table = Table(made.rows, back, made.target.indices)
    given = vary_alike([*arrays, *table, valid_rows(made.target)])
    return _convolution(how, activation)(*given)


@functools.cache
def _convolution(how, activation):
    """Return the jitted convolution with these options, of arrays, a table and which rows hold."""

    @jax.custom_jvp
    def convolve(features, w, scale, bias, residual, rows, back, indices, valid):
        arrays = (features, w, scale, bias, residual, rows, valid, indices)
        return multiplied(how, activation, *arrays)

    def rule(primals, tangents):
        y = convolve(*primals)
        return y, _tangent(how, activation, primals, tangents, y)

    convolve.defjvp(rule, symbolic_zeros=True)
    return jax.jit(convolve)


def _tangent(how, activation, primals, tangents, y):
    """Return the tangent of a convolution, linear in those of its arrays."""
    features, w, scale, bias, residual, *table, valid = primals
    dfeatures, dw, dscale, dbias, dresidual, *_ = map(_given, tangents)
    table, wide, there = Table(*table), compute_dtype(y.dtype), valid[:, None]
    total, change = None, jnp.zeros(y.shape, wide)
    if dfeatures is not None:
        change += products(how, dfeatures, w, table).astype(wide)
    if dw is not None:
        change += products(how, features, dw, table).astype(wide)
    if scale is not None:
        change *= scale.astype(wide)
    if dscale is not None or activation not in (None, "relu"):
        total = products(how, features, w, table).astype(wide)
    if dscale is not None:
        change += total * dscale.astype(wide)
    if dbias is not None:
        change += dbias.astype(wide)
    if dresidual is not None:
        change += dresidual.astype(wide)
    change = jnp.where(there, change, 0)
    if activation == "relu":
        change = jnp.where(y > 0, change, 0)
    elif activation is not None:
        before = ops.affine(total, scale, bias, None)
        if residual is not None:
            before += residual.astype(wide)
        before = jnp.where(there, before, 0)
        activate = functools.partial(
            ops.affine, scale=None, shift=None, activation=activation
        )
        _, change = jax.jvp(activate, (before,), (change,))
        change = jnp.where(there, change, 0)
    return change.astype(y.dtype)


def _given(tangent):
    """Return a tangent, None where there is none."""
    is_zero = tangent is None or isinstance(tangent, jax.custom_derivatives.SymbolicZero)
    return None if is_zero else tangent


def products(how, features, w, table):
    """Return the sum over the taps of ``features[rows[t]] @ w[t]``, in the dtype of both."""
    return _PRODUCTS.bind(*vary_alike([features, w, *table]), how=how)


def weight_gradient(how, features, grad, table):
    """Return the gradient of the weights of such a sum from that of its result."""
    found = _WEIGHTS.bind(*vary_alike([features, grad, *table]), how=how)
    taps, c = table.rows.shape[0], features.shape[1] // how.groups
    return found.reshape(taps, c, grad.shape[1])


def _feature_gradient(how, grad, w, table):
    """Return the gradient of the features: a sum over the map in the other direction."""
    taps, c, k = w.shape
    w = w.reshape(taps, c, how.groups, k // how.groups).transpose(0, 3, 2, 1)
    w = w.reshape(taps, k // how.groups, how.groups * c)
    if how.symmetric:
        return products(how, grad, w[::-1], table)
    table = table._replace(rows=table.back, back=table.rows)
    return products(how._replace(kernel_size=(taps,), offsets=None), grad, w, table)


def _products_transposed(grad, features, w, *table, how):
    table = Table(*table)
    found = [None] * 5
    if type(grad) is ad.Zero:
        return found
    if ad.is_undefined_primal(features):
        found[0] = _feature_gradient(how, grad, w, table)
    else:
        found[1] = weight_gradient(how, features, grad, table)
    return found


def _weights_transposed(ct, features, grad, *table, how):
    table, found = Table(*table), [None] * 5
    if type(ct) is ad.Zero:
        return found
    taps = table.rows.shape[0]
    ct = ct.reshape(taps, ct.shape[0] // taps, ct.shape[1])
    if ad.is_undefined_primal(features):
        found[0] = _feature_gradient(how, grad, ct, table)
    else:
        found[1] = products(how, features, ct, table)
    return found


def _bilinear(name, compute, shape, transpose):
    """Return a primitive of five arrays, linear in each of the first two."""
    primitive = Primitive(name)

    @primitive.def_abstract_eval
    def _(first, *others, how):
        return first.update(shape=shape(first, *others, how=how))

    @primitive.def_impl
    def _(*arrays, how):
        return _jitted(compute, how)(*arrays)

    def tangent(primals, tangents, *, how):
        first, second, *table = primals
        y, found = primitive.bind(*primals, how=how), []
        if type(tangents[0]) is not ad.Zero:
            found.append(primitive.bind(*vary_alike([tangents[0], second, *table]), how=how))
        if type(tangents[1]) is not ad.Zero:
            found.append(primitive.bind(*vary_alike([first, tangents[1], *table]), how=how))
        return y, functools.reduce(jnp.add, found)  # one of both is not zero

    def mapped(arrays, axes, *, how):
        over = [axis is not None for axis in axes]
        arrays = [
            jnp.moveaxis(array, axis, 0) if is_mapped else array
            for array, axis, is_mapped in zip(arrays, axes, over, strict=True)
        ]
        return one_by_one(functools.partial(primitive.bind, how=how), over, arrays), 0

    ad.primitive_jvps[primitive] = tangent
    ad.primitive_transposes[primitive] = transpose
    batching.primitive_batchers[primitive] = mapped
    mlir.register_lowering(primitive, mlir.lower_fun(compute, multiple_results=False))
    return primitive


@functools.cache
def _jitted(compute, how):
    return jax.jit(functools.partial(compute, how=how))


_PRODUCTS = _bilinear(
    "site_products",
    sum_of_products,
    lambda features, w, rows, *_, how: (rows.shape[1], w.shape[2]),
    _products_transposed,
)
_WEIGHTS = _bilinear(
    "site_weights",
    weights,
    lambda x, grad, rows, *_, how: (rows.shape[0] * (x.shape[1] // how.groups), grad.shape[1]),
    _weights_transposed,
)
