"""The layers: by way of the stack, or as the core computes them with method "fused".

The gradient of a layer is that of the same layer by way of the stack, which TensorFlow
differentiates.
"""

import functools

import tensorflow as tf

from ..block_sparse import compositions
from ..block_sparse.block_params import BlockParams
from ..block_sparse.bottleneck.res_block import RES_BLOCK
from ..block_sparse.bottleneck.weights import WEIGHTS, BottleneckWeights
from ..block_sparse.conv.sparse_conv2d import SPARSE_CONV2D
from ..core.sizes import pair
from . import _namespace as ops
from ._operation import Operation


def gathered_conv(tensors, options, shape):
    """Return sparse_conv2d by way of the stack; ``shape`` is that of the result."""
    x, w, *active, _, bias, base, _ = tensors
    params, strides, _, activation, data_format, w_format, precision, _ = options
    if base is None:
        base = ops.zeros((ops.shape(x)[0], *shape[1:]), x.dtype, like=x)
        base = tf.ensure_shape(base, shape)
    return compositions.gathered_convolution(
        ops, x, w, active, BlockParams(*params), base, strides=pair(strides, "strides"), bias=bias,
        activation=activation, channels_last=data_format == "NHWC", w_format=w_format,
        precision=precision,
    )  # fmt: skip


def gathered_unit(tensors, options, shape):
    """Return sparse_res_block_bottleneck by way of the stack."""
    x, *weights, w_project, bin_counts, active_block_indices, base, _ = tensors
    params, strides, precision, _, _ = options
    active, weights = (bin_counts, active_block_indices), BottleneckWeights(*weights)
    fixed = {"strides": strides, "precision": precision}
    return compositions.residual_unit(
        ops, x, weights, w_project, active, BlockParams(*params), base, **fixed
    )


def _gradient(operator, gathered, tensors, options, grad, wanted):
    """Differentiate the composition."""
    given = {n: t for n, t in zip(operator.arrays, tensors, strict=True) if n in wanted}
    with tf.GradientTape() as tape:
        tape.watch(given)
        y = gathered(tensors, options, grad.shape)
    return tape.gradient(y, given, grad, tf.UnconnectedGradients.ZERO)


CONV = Operation(SPARSE_CONV2D, gradient=functools.partial(_gradient, SPARSE_CONV2D, gathered_conv))
UNIT = Operation(
    RES_BLOCK,
    gradient=functools.partial(_gradient, RES_BLOCK, gathered_unit),
    prefixes=dict.fromkeys(WEIGHTS, "weights."),
)
