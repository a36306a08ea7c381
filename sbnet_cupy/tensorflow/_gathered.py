"""The layers by way of the stack: gather, tf.nn.conv2d, scatter. Arguments have been checked.

Also the gradient of the layers, however they were computed: TensorFlow differentiates this.
"""

import tensorflow as tf

from ..core.arrays import compute_dtype
from ..dense.onednn import step_to_one_column
from ._empty_batch import convolve_any_number
from .ops import affine, sparse_gather, sparse_scatter


def gathered_conv(x, w, indices, block_params, problem, bias=None, base=None):
    """Return sparse_conv2d; a base of None is 0."""
    last = problem.channels_last
    layout = {"data_format": "NHWC" if last else "NCHW", "transpose": not last}  # NHWC stacks
    blocks = sparse_gather(x, *indices, **_input_grid(block_params), **layout)
    w = w if problem.w_format == "HWIO" else tf.transpose(w, (2, 3, 1, 0))
    blocks = _convolve(blocks, w, problem.strides, "VALID")
    blocks = tf.cast(affine(blocks, None, bias, problem.activation), x.dtype)
    if base is None:
        base = _zeros(x, problem.out_shape)
    return sparse_scatter(blocks, *indices, base, bsize=block_params.bsize_out, **layout)


def gathered_unit(x, weights, indices, block_params, strides, w_project=None, base=None):
    """Return sparse_res_block_bottleneck; a base of None is the shortcut."""
    blocks = _residual(x, weights, indices, block_params, strides)
    bsize = block_params.bsize_out
    if base is not None:
        shortcut = _shortcut_blocks(x, w_project, indices, block_params, strides)
        shortcut = sparse_scatter(shortcut, *indices, base, bsize=bsize)
    elif w_project is not None:
        shortcut = tf.cast(_convolve(x, w_project, strides, "SAME"), x.dtype)
    else:
        shortcut = x
    return sparse_scatter(blocks, *indices, shortcut, bsize=bsize, add=True)


def _residual(x, weights, indices, block_params, strides):
    """Return the stack ``conv3(a3(conv2(a2(conv1(a1(x))))))``, one value per output pixel."""
    first = {"scale": weights.scale1, "shift": weights.shift1, "activation": "relu"}
    blocks = sparse_gather(x, *indices, **_input_grid(block_params), **first)
    blocks = _convolve(blocks, weights.w1, (1, 1), "VALID")
    blocks = affine(blocks, weights.scale2, weights.shift2, "relu")
    inside = _inside(indices[1], block_params, x.shape[1:3])
    blocks = tf.where(inside[..., None], blocks, tf.zeros((), blocks.dtype))  # pads conv2
    blocks = _convolve(tf.cast(blocks, x.dtype), weights.w2, strides, "VALID")
    blocks = tf.cast(affine(blocks, weights.scale3, weights.shift3, "relu"), x.dtype)
    return tf.cast(_convolve(blocks, weights.w3, (1, 1), "VALID"), x.dtype)


def _shortcut_blocks(x, w_project, indices, block_params, strides):
    """Return the stack of the shortcut's values, one per output pixel of the active blocks."""
    size = block_params.bsize_out
    if w_project is None:
        return sparse_gather(x, *indices, bsize=size)
    axes = list(zip(size, strides, strict=True))
    blocks = sparse_gather(  # SAME pads a 1x1 kernel with nothing: output p reads input p * stride
        x,
        *indices,
        bsize=tuple((n - 1) * s + 1 for n, s in axes),
        bstride=tuple(n * s for n, s in axes),
    )
    return tf.cast(_convolve(blocks, w_project, strides, "VALID"), x.dtype)


def _inside(active_block_indices, block_params, image_hw):
    """Return bool ``[M, bh, bw]``: which pixels of the stack lie in the image."""
    axes = []
    for axis, size in enumerate(image_hw):
        corner = active_block_indices[:, 1 + axis] * block_params.bstride[axis]
        pixel = tf.range(block_params.bsize[axis]) + block_params.boffset[axis]
        pixel = corner[:, None] + pixel
        axes.append((pixel >= 0) & (pixel < size))
    return axes[0][:, :, None] & axes[1][:, None, :]


def _input_grid(block_params):
    names = ("bsize", "boffset", "bstride")
    return {name: getattr(block_params, name) for name in names}


def _zeros(x, shape):
    """Return zeros of a static shape but for the batch, which is that of x."""
    zeros = tf.zeros(tf.stack([tf.shape(x)[0], *shape]), x.dtype)
    return tf.ensure_shape(zeros, (x.shape[0], *shape))


def _convolve(x, w, strides, padding):
    """Convolve NHWC images or stacks; half floats give float32, not yet rounded."""
    dtype = compute_dtype(x.dtype.as_numpy_dtype)
    x, w = tf.cast(x, dtype), tf.cast(w, dtype)
    kernel_width = w.shape[1]
    step = step_to_one_column(x.shape[3], x.shape[2], kernel_width, strides)
    if step is not None and padding == "VALID":
        x, strides = x[:, :, :kernel_width], step
    return convolve_any_number(x, w, strides, padding)
