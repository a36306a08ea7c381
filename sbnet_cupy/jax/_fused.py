"""The layers by one kernel, from image to image, made once for each set of options (a spec).

As in ``_operations``: the call back into the package with a rule for ``vmap``, around it the
gradient, and ``jit``. Weights are packed in the call, into scratch of XLA's: they are those of the
moment, also when a command buffer is replayed. Arguments have been checked.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from ..block_sparse.bottleneck.fused_bottleneck import fused_bottleneck
from ..block_sparse.bottleneck.fused_bottleneck import packed_bytes as packed_unit_bytes
from ..block_sparse.bottleneck.weights import BottleneckWeights
from ..block_sparse.conv.fused_conv import fused_conv
from ..block_sparse.conv.fused_conv import packed_bytes as packed_conv_bytes
from ..core.arrays import compute_dtype
from ._arguments import stand_ins
from ._callbacks import allocating_from, call, has_gpu, piece_bytes, vary_alike
from ._gathered import gathered_conv, gathered_unit
from ._mapped import one_by_one, one_list, spread

core_conv, core_unit = map(inspect.unwrap, (fused_conv, fused_bottleneck))  # without their door


def _differentiable(spec, fused, gathered, again):
    """Return the op: forwards one kernel, backwards the gradient of the same thing gathered.

    Both take (base, x, counts, indices, *weights); ``again()`` returns the op itself. With method
    "auto" it is fused on a GPU, and elsewhere gathered.
    """

    def op(*arrays):
        if spec.method == "fused":
            return fused(*arrays)
        return jax.lax.platform_dependent(*arrays, cuda=fused, default=gathered)

    def forward(base, *arrays):  # through the gradient again, which may be asked for too
        kept = None if base is None else ()  # the result is linear in the base: not its values
        return again()(base, *arrays), (kept, *arrays)

    def backward(residuals, grad):
        kept, x, counts, indices, *weights = residuals
        base = None if kept is None else jnp.zeros_like(grad)

        def linear(base, x, *weights):
            return gathered(base, x, counts, indices, *weights)

        dbase, dx, *dweights = jax.vjp(linear, base, x, *weights)[1](grad)
        return dbase, dx, None, None, *dweights

    op = jax.custom_vjp(op)
    op.defvjp(forward, backward)

    @jax.jit
    def varying(*arrays):
        return op(*vary_alike(arrays))

    return varying


def _mapped(function):
    """Return the function, which vmap turns into a call over more images.

    It takes (base, x, counts, indices, *weights) and returns images, as many as x.
    """
    mapped = custom_vmap(function)

    @mapped.def_vmap
    def rule(size, batched, base, x, counts, indices, *weights):
        if any(batched[4:]):  # weights of its own for each member
            return one_by_one(mapped, batched, (base, x, counts, indices, *weights)), True
        n = x.shape[int(batched[1])]
        listed = one_list(size, batched[2:4], counts, indices, n, n)
        base = None if base is None else spread(size, batched[0], base)
        y = mapped(base, spread(size, batched[1], x), *listed, *weights)
        return y.reshape(size, n, *y.shape[1:]), True

    return mapped


# ------------------------------------------------------------------------------ sparse_conv2d


@functools.cache
def conv_op(spec):
    """Return sparse_conv2d with these options: of base, x, counts, indices, w, bias."""

    @_mapped
    def fused(base, x, counts, indices, w, bias):
        if base is None:
            base = jnp.zeros((x.shape[0], *spec.problem.out_shape), x.dtype)
        if not base.size or not len(indices):  # XLA would not call for nothing
            return base
        bias = None if bias is None else bias.astype(compute_dtype(x.dtype))
        scratch = 0
        if has_gpu():
            (image,) = stand_ins(x=x)
            size = (spec.problem, spec.block_params.bsize_out, len(indices))
            scratch = piece_bytes(packed_conv_bytes(image, *size))
        arrays = (base, x, counts, indices, w, bias)
        results = [jax.ShapeDtypeStruct(base.shape, base.dtype)]
        return call(_conv_body, spec, results, arrays, scratch=scratch, alias={0: 0})[0]

    gathered = functools.partial(gathered_conv, spec)
    return _differentiable(spec, fused, gathered, lambda: conv_op(spec))


def _conv_body(spec, results, scratch, base, x, counts, indices, w, bias):
    """Write the active pixels of the result, which holds the base already."""
    problem = spec.problem
    with allocating_from(scratch):
        core_conv(
            x, w, counts, indices, bsize=spec.block_params.bsize_out, strides=problem.strides,
            padding=problem.pads, bias=bias, activation=problem.activation,
            data_format="NHWC" if problem.channels_last else "NCHW", w_format=problem.w_format,
            precision="tf32" if problem.tf32 else None, out=results[0],
        )  # fmt: skip


# ---------------------------------------------------------------- sparse_res_block_bottleneck


@functools.cache
def unit_op(spec):
    """Return the residual unit with these options: of base, x, counts, indices, *weights."""

    @_mapped
    def fused(base, x, counts, indices, *weights):
        base = x if base is None else base
        if not x.size or not len(indices):  # XLA would not call for nothing
            return base
        weights, own = _widened(x, BottleneckWeights(*weights))
        scratch = 0
        if has_gpu():
            image, *shown = stand_ins(x=x, **vars(weights))
            size = (spec.block_params.bsize_out, len(indices), spec.precision)
            scratch = packed_unit_bytes(image, BottleneckWeights(*shown), *size)
            scratch = piece_bytes(scratch) + sum(piece_bytes(4 * table.size) for table in own)
        arrays = (base, x, counts, indices, *weights._arrays())
        results = [jax.ShapeDtypeStruct(base.shape, base.dtype)]
        return call(_unit_body, spec, results, arrays, scratch=scratch, alias={0: 0})[0]

    def gathered(base, x, counts, indices, *weights):
        return gathered_unit(spec, base, x, counts, indices, BottleneckWeights(*weights))

    return _differentiable(spec, fused, gathered, lambda: unit_op(spec))


def _unit_body(spec, results, scratch, base, x, counts, indices, *weights):
    """Write the active pixels of the result, which holds the base already."""
    with allocating_from(scratch):
        core_unit(
            x, BottleneckWeights(*weights), counts, indices, bsize=spec.block_params.bsize_out,
            precision=spec.precision, out=results[0],
        )  # fmt: skip


def _widened(x, weights):
    """Return the weights with tables in the dtype to compute in, and which tables are not.

    Those are the first scale and shift in the dtype of x, for which there is a kernel of its own.
    """
    wide = compute_dtype(x.dtype)
    w1, w2, w3, *tables = weights._arrays()
    tight = x.dtype.itemsize == 2 and all(table.dtype == x.dtype for table in tables[:2])
    own = tables[:2] if tight else []
    tables = [*own, *(table.astype(wide) for table in tables[len(own) :])]
    return BottleneckWeights(w1, w2, w3, *tables), own
