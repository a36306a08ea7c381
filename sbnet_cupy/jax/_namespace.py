"""The namespace of ``block_sparse/compositions.py`` for JAX arrays; all of it is differentiable.

Gather and scatter are linear, and each other's transposes: their gradients, which the core
declares, are made of themselves, and can be differentiated again, any number of times.
"""

import functools
import sys

import jax
import jax.numpy as jnp

from ..block_sparse import compositions
from ..block_sparse.gather_scatter import sparse_gather, sparse_scatter
from ..core.arrays import compute_dtype
from ._operation import Operation


def gather(
    x, bin_counts, active_block_indices, bsize, boffset=(0, 0), bstride=None, *,
    transpose=False, data_format="NHWC", scale=None, shift=None, activation=None,
):  # fmt: skip
    """Return the active blocks of an image."""
    arrays = (x, bin_counts, active_block_indices, None, scale, shift)
    return GATHER(arrays, (bsize, boffset, bstride, transpose, data_format, activation))


def scatter(
    blocks, bin_counts, active_block_indices, x, bsize, boffset=(0, 0), bstride=None, *,
    add=False, atomic=False, transpose=False, data_format="NHWC", out=None,
):  # fmt: skip
    """Return an image with the blocks in it."""
    arrays = (blocks, bin_counts, active_block_indices, x, None)
    return SCATTER(arrays, (bsize, boffset, bstride, add, atomic, transpose, data_format))


def convolve(
    x, w, *, strides=(1, 1), padding="VALID", scale=None, bias=None, activation=None,
    w_format="HWIO", precision=None, bin_counts=None, out=None,
):  # fmt: skip
    """Return XLA's convolution of NHWC images or stacks, of which all blocks are computed."""
    options = {"window_strides": strides, "padding": padding, "w_format": w_format}
    y = convolve_wide(x, w, precision=precision, **options)
    return cast(affine(y, scale, bias, activation), x.dtype)


def convolve_wide(x, w, *, w_format="HWIO", precision=None, **options):
    """Return XLA's convolution with its own options; half floats give float32.

    On a CPU that is not rounded yet. On a GPU it is: the tensor cores take half floats, and XLA has
    them give half floats.
    """
    convolve = functools.partial(
        jax.lax.conv_general_dilated,
        dimension_numbers=("NHWC", w_format, "NHWC"),
        precision=jax.lax.Precision("default" if precision == "tf32" else "highest"),
        **options,
    )
    if x.dtype.itemsize > 2:
        return convolve(x, w)

    def widened(x, w):
        return convolve(x.astype(jnp.float32), w.astype(jnp.float32))

    def rounded(x, w):
        return convolve(x, w).astype(jnp.float32)

    return jax.lax.platform_dependent(x, w, cpu=widened, default=rounded)


def zero_outside(blocks, bin_counts, active_block_indices, grid, image_hw):
    """Return the NHWC stack with zeros where it is outside the image."""
    inside = compositions.inside(sys.modules[__name__], active_block_indices, grid, image_hw)
    return where(inside[..., None], blocks, 0)


def affine(values, scale, shift, activation, channels_last=True):
    """Return ``activation(values * scale + shift)`` in the dtype to compute in."""
    dtype = compute_dtype(values.dtype)
    per_channel = (-1,) if channels_last else (-1, 1, 1)
    values = values.astype(dtype)
    if scale is not None:
        values *= scale.astype(dtype).reshape(per_channel)
    if shift is not None:
        values += shift.astype(dtype).reshape(per_channel)
    return _ACTIVATIONS[activation](values)


_ACTIVATIONS = {
    None: lambda values: values,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
}


def where(condition, values, other):
    """Return the values where the condition holds, elsewhere a number."""
    return jnp.where(condition, values, other)


def cast(values, dtype):
    """Return the values in a dtype."""
    return values.astype(dtype)


def pad(image, pads, number):
    """Return an NHWC image with a number around it."""
    return jnp.pad(image, ((0, 0), *pads, (0, 0)), constant_values=number)


def maximum(a, b):
    """Return the greater of two numbers each."""
    return jnp.maximum(a, b)


def shape(array):
    """Return the sizes of an array."""
    return array.shape


def zeros(shape, dtype, like):
    """Return zeros."""
    return jnp.zeros(shape, dtype)


def ones(shape, dtype, like):
    """Return ones."""
    return jnp.ones(shape, dtype)


def arange(size, like):
    """Return 0, 1, 2... as int32."""
    return jnp.arange(size, dtype=jnp.int32)


def move_channels_first(stack):
    """Return an NHWC stack as NCHW."""
    return jnp.moveaxis(stack, 3, 1)


# ------------------------------------------------------------------------- gradients of the copies


def _gather_saves(arrays, options):
    if arrays["scale"] is arrays["shift"] is options["activation"] is None:
        return {"bin_counts", "active_block_indices"}
    return set(arrays)


def _gather_gradient(arrays, options, grad, wanted):
    """Return the gradients of a plain gather, followed by arithmetic if it transforms."""
    x, *active, _, scale, shift = arrays
    *grid, transpose, data_format, activation = options
    ops = sys.modules[__name__]
    if scale is shift is activation is None:
        return GATHER.operator.gradient(ops, arrays, options, grad, wanted)
    fixed = {"transpose": transpose, "data_format": data_format, "activation": activation}

    def unfused(x, scale, shift):
        tables = {"scale": scale, "shift": shift}
        return compositions.transformed_gather(ops, x, *active, *grid, **tables, **fixed)

    gradients = jax.vjp(unfused, x, scale, shift)[1](grad)
    return dict(zip(("x", "scale", "shift"), gradients, strict=True))


def _one_dtype(x, bin_counts, active_block_indices, out, scale, shift):
    """Bring both tables to one dtype, in which the kernel takes them."""
    if scale is not None and shift is not None:
        wide = jnp.promote_types(scale.dtype, shift.dtype)
        scale, shift = scale.astype(wide), shift.astype(wide)
    return x, bin_counts, active_block_indices, out, scale, shift


def _scatter_gradient(arrays, options, grad, wanted):
    return SCATTER.operator.gradient(sys.modules[__name__], arrays, options, grad, wanted)


GATHER = Operation(
    sparse_gather.GATHER, gradient=_gather_gradient, saves=_gather_saves, prepare=_one_dtype
)
SCATTER = Operation(sparse_scatter.SCATTER, gradient=_scatter_gradient)
