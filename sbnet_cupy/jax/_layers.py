"""The layers: by one kernel, from image to image, or by way of the stack.

The gradient of a layer by one kernel is that of the same layer by way of the stack, which JAX
differentiates. Weights are packed in the call, into scratch of XLA's: they are those of the moment,
also when a command buffer is replayed.
"""

import functools

import jax
import jax.numpy as jnp

from ..block_sparse import compositions
from ..block_sparse.block_params import BlockParams
from ..block_sparse.bottleneck.res_block import RES_BLOCK
from ..block_sparse.bottleneck.weights import WEIGHTS, BottleneckWeights
from ..block_sparse.conv.sparse_conv2d import SPARSE_CONV2D
from ..core.arrays import compute_dtype
from . import _namespace as ops
from ._operation import Operation, spelled
from ._specs import Like


class Layer(Operation):
    """An operation that is one kernel where there is one, and a composition elsewhere.

    Parameters
    ----------
    operator : Operator
        The declaration; "method" is one of its options.
    gathered : function
        Of arrays and options: the result by way of the stack, in terms of operations that JAX can
        differentiate.
    prepare, prefixes
        As for :class:`Operation`.
    """

    def __init__(self, operator, gathered, prepare, prefixes=None):
        own = {"gradient": self._gradient, "saves": _all_but_base}
        super().__init__(operator, **own, prepare=prepare, prefixes=prefixes)
        self.gathered = gathered
        self._method = operator.options.index("method")

    def fused(self, arrays, options):
        """Return the result by one kernel; with method "auto" only where that runs on a GPU."""
        return self.function(spelled(self.operator, options))(*arrays)

    def _computed(self, options):
        method = options[self._method]
        options = (*options[: self._method], "fused", *options[self._method + 1 :])
        fused = super()._computed(options)
        if method == "fused":
            return fused
        gathered = functools.partial(self._gathered, options)
        return lambda *arrays: jax.lax.platform_dependent(*arrays, cuda=fused, default=gathered)

    def _gathered(self, options, *arrays):
        return self.gathered(arrays, options)

    def _gradient(self, arrays, options, grad, wanted):
        """Differentiate the composition; of the base, in which it is linear, any values will do."""
        names = [name for name in self.operator.arrays if name in wanted]
        places = [self.operator.arrays.index(name) for name in names]
        arrays = [jnp.zeros_like(grad) if isinstance(a, Like) else a for a in arrays]

        def gathered(*given):
            called = list(arrays)
            for place, array in zip(places, given, strict=True):
                called[place] = array
            return self.gathered(called, options)

        found = jax.vjp(gathered, *(arrays[place] for place in places))[1](grad)
        return dict(zip(names, found, strict=True))


def _all_but_base(arrays, options):
    return set(arrays) - {"base"}


def _gathered_conv(arrays, options):
    """Return sparse_conv2d by way of the stack."""
    x, w, *active, _, bias, base, _ = arrays
    params, strides, _, activation, data_format, w_format, precision, _ = options
    if base is None:
        result = CONV.infer(arrays, options)[1]
        base = jnp.zeros(result.shape, result.dtype)
    return compositions.gathered_convolution(
        ops, x, w, active, BlockParams(*params), base, strides=strides, bias=bias,
        activation=activation, channels_last=data_format == "NHWC", w_format=w_format,
        precision=precision,
    )  # fmt: skip


def _gathered_unit(arrays, options):
    """Return sparse_res_block_bottleneck by way of the stack."""
    x, *weights, w_project, bin_counts, active_block_indices, base, _ = arrays
    params, strides, precision, _, _ = options
    active, weights = (bin_counts, active_block_indices), BottleneckWeights(*weights)
    fixed = {"strides": strides, "precision": precision}
    return compositions.residual_unit(
        ops, x, weights, w_project, active, BlockParams(*params), base, **fixed
    )


def _wide_bias(x, *arrays):
    """Bring the bias to the dtype to compute in, which saves a copy when weights are packed."""
    *arrays, bias, base, out = arrays
    bias = None if bias is None else bias.astype(compute_dtype(x.dtype))
    return x, *arrays, bias, base, out


def _wide_tables(x, w1, w2, w3, *arrays):
    """Bring the tables to the dtype to compute in, which saves copies when weights are packed.

    The first scale and shift stay in the dtype of x, for which there is a kernel of its own.
    """
    tables, others = arrays[:6], arrays[6:]
    tight = x.dtype.itemsize == 2 and all(table.dtype == x.dtype for table in tables[:2])
    kept = tables[:2] if tight else ()
    wide = (table.astype(compute_dtype(x.dtype)) for table in tables[len(kept) :])
    return x, w1, w2, w3, *kept, *wide, *others


CONV = Layer(SPARSE_CONV2D, _gathered_conv, _wide_bias)
UNIT = Layer(RES_BLOCK, _gathered_unit, _wide_tables, dict.fromkeys(WEIGHTS, "weights."))
