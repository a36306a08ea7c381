"""Derivatives of layers that kernels compute: what is linear in them are primitives of JAX.

A bilinear primitive is made of others when it is differentiated, so that there are derivatives of
any order. A layer, with all that follows its sums, is one kernel; its tangent is made of these.
"""

import functools

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ..core.arrays import compute_dtype
from . import _namespace as ops
from ._callbacks import vary_alike
from ._mapped import one_by_one


def bilinear(name, compute, shape, of_first, of_second):
    """Return a function of arrays that is linear in each of the first two, a primitive of JAX.

    Parameters
    ----------
    compute, shape : function
        Of all arrays and ``how``, a static option: the result, and its shape. It has the dtype and
        the number of axes of the first array.
    of_first, of_second : function
        Of the gradient of the result, the second or the first array, the other arrays, and ``how``:
        the gradient of the first or of the second.
    """

    def tangent(bind, primals, tangents, how):
        first, second, *others = primals
        found = []
        if type(tangents[0]) is not ad.Zero:
            found.append(bind(tangents[0], second, *others, how=how))
        if type(tangents[1]) is not ad.Zero:
            found.append(bind(first, tangents[1], *others, how=how))
        return functools.reduce(jnp.add, found)  # one of both is not zero

    def transposed(ct, first, second, *others, how):
        if ad.is_undefined_primal(first):
            return of_first(ct, second, *others, how=how), None
        return None, of_second(ct, first, *others, how=how)

    return _primitive(name, compute, shape, tangent, transposed)


def linear(name, compute, shape, tangent, transposed):
    """Return a function of arrays whose first one alone is differentiated, a primitive of JAX.

    ``tangent`` is of the tangent of the first array, the others and ``how``; ``transposed`` of the
    gradient of the result, the spec of the first array, the others and ``how``.
    """

    def of_tangents(bind, primals, tangents, how):
        return tangent(tangents[0], *primals[1:], how=how)

    def of_gradient(ct, first, *others, how):
        return (transposed(ct, first.aval, *others, how=how),)

    return _primitive(name, compute, shape, of_tangents, of_gradient)


def transposed(function, like, ct):
    """Return what the transpose of a linear function of an array ``like`` this makes of ``ct``."""
    (zeros,) = vary_alike([jnp.zeros(like.shape, like.dtype)], [ct])
    (found,) = jax.vjp(function, zeros)[1](ct)
    return found


def _primitive(name, compute, shape, tangent, transposed):
    primitive = Primitive(name)

    def bind(*arrays, how):
        return primitive.bind(*vary_alike(arrays), how=how)

    @primitive.def_abstract_eval
    def _(first, *others, how):
        return first.update(shape=shape(first, *others, how=how))

    @primitive.def_impl
    def _(*arrays, how):
        return _jitted(compute, how)(*arrays)

    def jvp(primals, tangents, *, how):
        return bind(*primals, how=how), tangent(bind, primals, tangents, how)

    def transpose(ct, *arrays, how):
        found = () if type(ct) is ad.Zero else transposed(ct, *arrays, how=how)
        return [*found, *[None] * (len(arrays) - len(found))]

    def mapped(arrays, axes, *, how):
        over = [axis is not None for axis in axes]
        arrays = [
            jnp.moveaxis(array, axis, 0) if is_mapped else array
            for array, axis, is_mapped in zip(arrays, axes, over, strict=True)
        ]
        return one_by_one(functools.partial(primitive.bind, how=how), over, arrays), 0

    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose
    batching.primitive_batchers[primitive] = mapped
    mlir.register_lowering(primitive, mlir.lower_fun(compute, multiple_results=False))
    return bind


@functools.cache
def _jitted(compute, how):
    return jax.jit(functools.partial(compute, how=how))


def layer_tangent(multiply, activation, arrays, tangents, y, there):
    """Return the tangent of a layer, linear in those of its arrays.

    Parameters
    ----------
    multiply : function
        The sum of products, of x and the weights.
    arrays, tangents : tuple
        x, weights, scale, bias, residual; a tangent may be a symbolic zero.
    y, there : jax.Array
        The result, and where it holds: elsewhere it is 0.
    """
    x, w, scale, bias, residual = arrays
    dx, dw, dscale, dbias, dresidual = map(_given, tangents)
    wide, total, change = compute_dtype(y.dtype), None, jnp.zeros(y.shape, compute_dtype(y.dtype))
    if dx is not None:
        change += multiply(dx, w).astype(wide)
    if dw is not None:
        change += multiply(x, dw).astype(wide)
    if scale is not None:
        change *= scale.astype(wide)
    if dscale is not None or activation not in (None, "relu"):
        total = multiply(x, w).astype(wide)
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
        activate = functools.partial(ops.affine, scale=None, shift=None, activation=activation)
        _, change = jax.jvp(activate, (before,), (change,))
        change = jnp.where(there, change, 0)
    return change.astype(y.dtype)


def _given(tangent):
    """Return a tangent, None where there is none."""
    is_zero = tangent is None or isinstance(tangent, jax.custom_derivatives.SymbolicZero)
    return None if is_zero else tangent
