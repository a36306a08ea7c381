"""The layers by way of the stack: gather, XLA's convolution, scatter. Arguments have been checked.

Also the gradient of the layers, however they were computed: JAX differentiates this.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..block_sparse.block_params import BlockParams
from ..dense.conv2d import Problem
from ._operations import affine
from .ops import sparse_gather, sparse_scatter


class ConvSpec(NamedTuple):
    """The options of sparse_conv2d."""

    problem: Problem
    block_params: BlockParams
    method: str


class UnitSpec(NamedTuple):
    """The options of sparse_res_block_bottleneck."""

    block_params: BlockParams
    strides: tuple[int, int]
    precision: str | None
    method: str


def gathered_conv(spec, base, x, counts, indices, w, bias):
    """Return sparse_conv2d; a base of None is 0."""
    problem, params = spec.problem, spec.block_params
    last = problem.channels_last
    layout = {"data_format": "NHWC" if last else "NCHW", "transpose": not last}  # NHWC stacks
    blocks = sparse_gather(x, counts, indices, **_input_grid(params), **layout)
    precision = "tf32" if problem.tf32 else None
    blocks = _convolve(blocks, w, problem.strides, "VALID", precision, problem.w_format)
    blocks = affine(blocks, None, bias, problem.activation).astype(x.dtype)
    if base is None:
        base = jnp.zeros((x.shape[0], *problem.out_shape), x.dtype)
    return sparse_scatter(blocks, counts, indices, base, bsize=params.bsize_out, **layout)


def gathered_unit(spec, base, x, counts, indices, weights, w_project=None):
    """Return sparse_res_block_bottleneck; a base of None is the shortcut."""
    params, strides, precision, _ = spec
    active, bsize = (counts, indices), params.bsize_out
    blocks = _residual(x, weights, active, params, strides, precision)
    if base is not None:
        shortcut = _shortcut_blocks(x, w_project, active, params, strides, precision)
        shortcut = sparse_scatter(shortcut, *active, base, bsize=bsize)
    elif w_project is not None:
        shortcut = _convolve(x, w_project, strides, "SAME", precision).astype(x.dtype)
    else:
        shortcut = x
    return sparse_scatter(blocks, *active, shortcut, bsize=bsize, add=True)


def _residual(x, weights, indices, block_params, strides, precision):
    """Return the stack ``conv3(a3(conv2(a2(conv1(a1(x))))))``, one value per output pixel."""
    first = {"scale": weights.scale1, "shift": weights.shift1, "activation": "relu"}
    blocks = sparse_gather(x, *indices, **_input_grid(block_params), **first)
    blocks = _convolve(blocks, weights.w1, (1, 1), "VALID", precision)
    blocks = affine(blocks, weights.scale2, weights.shift2, "relu")
    inside = _inside(indices[1], block_params, x.shape[1:3])
    blocks = jnp.where(inside[..., None], blocks, 0).astype(x.dtype)  # the padding of conv2
    blocks = _convolve(blocks, weights.w2, strides, "VALID", precision)
    blocks = affine(blocks, weights.scale3, weights.shift3, "relu").astype(x.dtype)
    return _convolve(blocks, weights.w3, (1, 1), "VALID", precision).astype(x.dtype)


def _shortcut_blocks(x, w_project, indices, block_params, strides, precision):
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
    return _convolve(blocks, w_project, strides, "VALID", precision).astype(x.dtype)


def _inside(active_block_indices, block_params, image_hw):
    """Return bool ``[M, bh, bw]``: which pixels of the stack lie in the image."""
    axes = []
    for axis, size in enumerate(image_hw):
        corner = active_block_indices[:, 1 + axis] * block_params.bstride[axis]
        pixel = jnp.arange(block_params.bsize[axis], dtype=jnp.int32) + block_params.boffset[axis]
        pixel = corner[:, None] + pixel
        axes.append((pixel >= 0) & (pixel < size))
    return axes[0][:, :, None] & axes[1][:, None, :]


def _input_grid(block_params):
    names = ("bsize", "boffset", "bstride")
    return {name: getattr(block_params, name) for name in names}


def _convolve(x, w, strides, padding, precision, w_format="HWIO"):
    """Convolve NHWC images or stacks; half floats give float32.

    On a CPU that is not rounded yet. On a GPU it is: the tensor cores take half floats, and XLA has
    them give half floats.
    """
    convolve = functools.partial(
        jax.lax.conv_general_dilated,
        window_strides=strides,
        padding=padding,
        dimension_numbers=("NHWC", w_format, "NHWC"),
        precision=jax.lax.Precision("default" if precision == "tf32" else "highest"),
    )
    if x.dtype.itemsize > 2:
        return convolve(x, w)

    def widened(x, w):
        return convolve(x.astype(jnp.float32), w.astype(jnp.float32))

    def rounded(x, w):
        return convolve(x, w).astype(jnp.float32)

    return jax.lax.platform_dependent(x, w, cpu=widened, default=rounded)
