"""The namespace of ``block_sparse/compositions.py`` for tensors; all of it is differentiable.

Gather and scatter are linear, and each other's transposes: their gradients, which the core
declares, are made of themselves, and can be differentiated again, any number of times.
"""

import sys

import tensorflow as tf

from ..block_sparse import compositions
from ..block_sparse.gather_scatter import sparse_gather, sparse_scatter
from ..core.arrays import compute_dtype
from ..dense.onednn import step_to_one_column
from ._empty_batch import convolve_any_number
from ._operation import Operation


def gather(
    x, bin_counts, active_block_indices, bsize, boffset=(0, 0), bstride=None, *,
    transpose=False, data_format="NHWC", scale=None, shift=None, activation=None,
):  # fmt: skip
    """Return the active blocks of an image."""
    tensors = (x, bin_counts, active_block_indices, None, scale, shift)
    return GATHER(tensors, (bsize, boffset, bstride, transpose, data_format, activation))


def scatter(
    blocks, bin_counts, active_block_indices, x, bsize, boffset=(0, 0), bstride=None, *,
    add=False, atomic=False, transpose=False, data_format="NHWC", out=None,
):  # fmt: skip
    """Return an image with the blocks in it."""
    tensors = (blocks, bin_counts, active_block_indices, x, None)
    return SCATTER(tensors, (bsize, boffset, bstride, add, atomic, transpose, data_format))


def convolve(
    x, w, *, strides=(1, 1), padding="VALID", scale=None, bias=None, activation=None,
    w_format="HWIO", precision=None, bin_counts=None, out=None,
):  # fmt: skip
    """Return TensorFlow's convolution of NHWC images or stacks, of which all blocks are computed.

    Half floats are convolved in float32.
    """
    dtype = compute_dtype(x.dtype.as_numpy_dtype)
    w = w if w_format == "HWIO" else tf.transpose(w, (2, 3, 1, 0))
    wide, w = tf.cast(x, dtype), tf.cast(w, dtype)
    kernel_width = w.shape[1]
    step = step_to_one_column(x.shape[3], x.shape[2], kernel_width, strides)
    if step is not None and padding == "VALID":
        wide, strides = wide[:, :, :kernel_width], step
    y = convolve_any_number(wide, w, strides, padding)
    return cast(affine(y, scale, bias, activation), x.dtype)


def zero_outside(blocks, bin_counts, active_block_indices, grid, image_hw):
    """Return the NHWC stack with zeros where it is outside the image."""
    inside = compositions.inside(sys.modules[__name__], active_block_indices, grid, image_hw)
    return where(inside[..., None], blocks, 0)


def affine(values, scale, shift, activation, channels_last=True):
    """Return ``activation(values * scale + shift)`` in the dtype to compute in."""
    dtype = compute_dtype(values.dtype.as_numpy_dtype)
    per_channel = (-1,) if channels_last else (-1, 1, 1)
    values = tf.cast(values, dtype)
    if scale is not None:
        values *= tf.reshape(tf.cast(scale, dtype), per_channel)
    if shift is not None:
        values += tf.reshape(tf.cast(shift, dtype), per_channel)
    return _ACTIVATIONS[activation](values)


def _gelu(values):
    """Return the exact gelu; that of TensorFlow rounds the root of 2 to float32, in float64 too."""
    return 0.5 * values * (1 + tf.math.erf(0.5**0.5 * values))


_ACTIVATIONS = {
    None: lambda values: values, "relu": tf.nn.relu, "silu": tf.nn.silu, "gelu": _gelu
}  # fmt: skip


def where(condition, values, other):
    """Return the values where the condition holds, elsewhere a number."""
    return tf.where(condition, values, tf.cast(other, values.dtype))


def cast(values, dtype):
    """Return the values in a dtype."""
    return tf.cast(values, dtype)


def pad(image, pads, number):
    """Return an NHWC image with a number around it."""
    return tf.pad(image, ((0, 0), *pads, (0, 0)), constant_values=number)


def maximum(a, b):
    """Return the greater of two numbers each."""
    return tf.maximum(a, b)


def shape(tensor):
    """Return the sizes of an image or a stack, or of a list; tensors where they are not known."""
    known = tensor.shape
    if known.rank is not None and None not in known:
        return tuple(known)
    sizes = tf.unstack(tf.shape(tensor), 4 if known.rank is None else known.rank)
    return tuple(s if n is None else n for n, s in zip(known or [None] * 4, sizes, strict=True))


def zeros(shape, dtype, like):
    """Return zeros; a size may be a tensor."""
    return tf.zeros(tf.stack(shape), dtype)


def ones(shape, dtype, like):
    """Return ones; a size may be a tensor."""
    return tf.ones(tf.stack(shape), dtype)


def arange(size, like):
    """Return 0, 1, 2... as int32."""
    return tf.range(size)


def move_channels_first(stack):
    """Return an NHWC stack as NCHW."""
    return tf.transpose(stack, (0, 3, 1, 2))


# ------------------------------------------------------------------------- gradients of the copies


def _gather_gradient(tensors, options, grad, wanted):
    """Return the gradients of a plain gather, followed by arithmetic if it transforms."""
    x, *active, _, scale, shift = tensors
    *grid, transpose, data_format, activation = options
    ops = sys.modules[__name__]
    if scale is shift is activation is None:
        return GATHER.operator.gradient(ops, tensors, options, grad, wanted)
    fixed = {"transpose": transpose, "data_format": data_format, "activation": activation}
    given = {"x": x, "scale": scale, "shift": shift}
    given = {name: tensor for name, tensor in given.items() if tensor is not None}
    with tf.GradientTape() as tape:
        tape.watch(given)
        tables = {"scale": scale, "shift": shift}
        y = compositions.transformed_gather(ops, x, *active, *grid, **tables, **fixed)
    return tape.gradient(y, given, grad, tf.UnconnectedGradients.ZERO)


def _scatter_gradient(tensors, options, grad, wanted):
    return SCATTER.operator.gradient(sys.modules[__name__], tensors, options, grad, wanted)


GATHER = Operation(sparse_gather.GATHER, gradient=_gather_gradient)
SCATTER = Operation(sparse_scatter.SCATTER, gradient=_scatter_gradient)
