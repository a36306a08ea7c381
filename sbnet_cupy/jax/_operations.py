"""The operations with their options, made once for each set of them (a spec), in three layers.

The call back into the package, with a rule for ``vmap``; around it the gradient, made of the same
operations; and ``jit``. Arguments have been checked.
"""

import functools
import inspect
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from ..block_sparse.gather_scatter.overlap import scratch_sizes
from ..block_sparse.gather_scatter.sparse_gather import sparse_gather
from ..block_sparse.gather_scatter.sparse_scatter import sparse_scatter
from ..block_sparse.grid import Grid, resolve_layout
from ..block_sparse.mask.config import scratch_slots
from ..block_sparse.mask.reduce_mask import reduce_mask_into
from ..core.arrays import compute_dtype
from ._callbacks import allocating_from, call, piece_bytes, vary_alike
from ._mapped import one_by_one, one_list, spread

# Without their door: what XLA hands over is native, on one device, which is the current one.
core_gather, core_scatter = map(inspect.unwrap, (sparse_gather, sparse_scatter))

# -------------------------------------------------------------------------------- reduce_mask


class MaskSpec(NamedTuple):
    """The options of reduce_mask."""

    block_count: tuple[int, int]
    grid: Grid
    tol: float
    avgpool: bool
    capacity: int


@functools.cache
def mask_op(spec):
    """Return reduce_mask with these options."""

    @custom_vmap
    def reduce_mask(mask):
        candidates = mask.shape[0] * math.prod(spec.block_count)
        if not candidates or not mask.size:  # XLA would not call for nothing
            return jnp.zeros(1, jnp.int32), jnp.full((spec.capacity, 3), -1, jnp.int32)
        rows = max(spec.capacity, 1)  # of no rows XLA would not call either
        results = [_struct((1,), jnp.int32), _struct((rows, 3), jnp.int32)]
        blocks = (mask.shape[0], *spec.block_count)
        slots = 8 * scratch_slots(mask.shape, blocks, spec.grid, spec.avgpool)
        counts, indices = call(_mask_body, spec, results, (mask,), scratch=slots)
        return counts, indices[: spec.capacity]

    @reduce_mask.def_vmap
    def rule(size, batched, mask):
        return one_by_one(reduce_mask, batched, (mask,)), (True, True)

    return jax.jit(reduce_mask)


def _mask_body(spec, results, scratch, mask):
    """Fill the count and the rows."""
    options = {"tol": spec.tol, "avgpool": spec.avgpool}
    slots = scratch.view("uint64")
    reduce_mask_into(*results, slots, mask, spec.block_count, *spec.grid, **options)


# ------------------------------------------------------------------------------ sparse_gather


class GatherSpec(NamedTuple):
    """The options of sparse_gather."""

    grid: Grid
    transpose: bool
    data_format: str
    activation: str | None = None

    @property
    def keywords(self):
        """The options as the package takes them."""
        return {**self.grid._asdict(), **_layout(self), "activation": self.activation}


def _layout(spec):
    return {"transpose": spec.transpose, "data_format": spec.data_format}


@functools.cache
def gather_op(spec):
    """Return sparse_gather with these options."""
    plain = spec._replace(activation=None)

    def forward(*arrays):  # through the gradient again, which may be asked for too
        return gather_op(spec)(*arrays), arrays

    def backward(arrays, grad):
        x, counts, indices, scale, shift = arrays
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return (None,) * 5
        if scale is None and shift is None and spec.activation is None:
            add = ScatterSpec(*spec[:3], add=True, atomic=True)
            return scatter_op(add)(grad, counts, indices, jnp.zeros_like(x)), *(None,) * 4

        # The fused operation is the plain one followed by arithmetic: so is its gradient.
        def unfused(x, scale, shift):
            blocks = gather_op(plain)(x, counts, indices, None, None)
            return _transform(spec, blocks, x, counts, indices, scale, shift)

        dx, dscale, dshift = jax.vjp(unfused, x, scale, shift)[1](grad)
        return dx, None, None, dscale, dshift

    gather = jax.custom_vjp(_mapped_gather(spec))
    gather.defvjp(forward, backward)

    @jax.jit
    def varying(*arrays):
        return gather(*vary_alike(arrays))

    return varying


@functools.cache
def _mapped_gather(spec):
    """Return the call, which vmap turns into a call over more images."""

    @custom_vmap
    def gather(x, counts, indices, scale, shift):
        layout = resolve_layout(x, spec.data_format, spec.transpose)
        shape = layout.blocks_shape(len(indices), spec.grid.bsize)
        if 0 in shape or not x.size:  # XLA would not call for nothing
            return jnp.zeros(shape, x.dtype)
        if scale is not None and shift is not None:  # the kernel takes them in one dtype
            wide = jnp.promote_types(scale.dtype, shift.dtype)
            scale, shift = scale.astype(wide), shift.astype(wide)
        arrays = (x, counts, indices, scale, shift)
        return call(_gather_body, spec, [_struct(shape, x.dtype)], arrays)[0]

    @gather.def_vmap
    def rule(size, batched, x, counts, indices, scale, shift):
        if batched[3] or batched[4]:  # a table of its own for each member
            return one_by_one(gather, batched, (x, counts, indices, scale, shift)), True
        n = x.shape[int(batched[0])]
        listed = one_list(size, batched[1:3], counts, indices, n, n if batched[0] else 0)
        blocks = gather(x.reshape(-1, *x.shape[-3:]), *listed, scale, shift)
        return blocks.reshape(size, -1, *blocks.shape[1:]), True

    return gather


def _gather_body(spec, results, scratch, x, counts, indices, scale, shift):
    """Fill the blocks."""
    core_gather(x, counts, indices, scale=scale, shift=shift, out=results[0], **spec.keywords)


def _transform(spec, blocks, x, counts, indices, scale, shift):
    """Apply scale, shift and activation to what a plain gather read inside the image."""
    channels_last = (spec.data_format == "NHWC") != spec.transpose
    ones = jnp.ones((x.shape[0], *_image_hw(spec, x), 1), bool)
    inside = gather_op(GatherSpec(spec.grid, False, "NHWC"))(ones, counts, indices, None, None)
    inside = inside if channels_last else jnp.moveaxis(inside, 3, 1)
    values = affine(blocks, scale, shift, spec.activation, channels_last)
    return jnp.where(inside, values, 0).astype(blocks.dtype)


def _image_hw(spec, x):
    return x.shape[1:3] if spec.data_format == "NHWC" else x.shape[2:]


def affine(values, scale, shift, activation, channels_last=True):
    """Return ``activation(values * scale + shift)`` in float32, or float64 for float64."""
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


# ----------------------------------------------------------------------------- sparse_scatter


class ScatterSpec(NamedTuple):
    """The options of sparse_scatter."""

    grid: Grid
    transpose: bool
    data_format: str
    add: bool
    atomic: bool

    @property
    def keywords(self):
        """The options as the package takes them."""
        return {**self.grid._asdict(), **_layout(self), "add": self.add, "atomic": self.atomic}

    @property
    def in_order(self):
        """Whether rows may share pixels, so that their order counts."""
        return self.grid.overlaps or self.atomic


@functools.cache
def scatter_op(spec):
    """Return sparse_scatter with these options."""

    def forward(blocks, counts, indices, x):
        return scatter_op(spec)(blocks, counts, indices, x), (counts, indices)

    def backward(residuals, grad):
        counts, indices = residuals
        if not jnp.issubdtype(grad.dtype, jnp.inexact):
            return (None,) * 4
        gather = gather_op(GatherSpec(spec.grid, spec.transpose, spec.data_format))
        dblocks = gather(grad, counts, indices, None, None)
        if spec.add:
            return dblocks, None, None, grad
        dx = scatter_op(spec)(jnp.zeros_like(dblocks), counts, indices, grad)
        if spec.in_order:
            dblocks = jnp.where(_last(spec, counts, indices, grad), dblocks, 0)
        return dblocks, None, None, dx

    scatter = jax.custom_vjp(_mapped_scatter(spec))
    scatter.defvjp(forward, backward)

    @jax.jit
    def varying(*arrays):
        return scatter(*vary_alike(arrays))

    return varying


def _last(spec, counts, indices, x):
    """Return which pixels of the stack no later row overwrites, one channel of the layout."""
    rows = jnp.arange(len(indices), dtype=jnp.int32)
    stack = jnp.broadcast_to(rows[:, None, None, None], (len(rows), *spec.grid.bsize, 1))
    nobody = jnp.full((x.shape[0], *_image_hw(spec, x), 1), -1, jnp.int32)
    overwrite = ScatterSpec(spec.grid, False, "NHWC", add=False, atomic=True)
    owner = scatter_op(overwrite)(stack, counts, indices, nobody)
    owner = gather_op(GatherSpec(spec.grid, False, "NHWC"))(owner, counts, indices, None, None)
    channels_last = (spec.data_format == "NHWC") != spec.transpose
    return owner == stack if channels_last else jnp.moveaxis(owner == stack, 3, 1)


@functools.cache
def _mapped_scatter(spec):
    """Return the call, which vmap turns into a call over more images."""

    @custom_vmap
    def scatter(blocks, counts, indices, x):
        if not blocks.size or not x.size:  # XLA would not call for nothing
            return x
        scratch = 0
        if spec.in_order:
            layout = resolve_layout(x, spec.data_format, spec.transpose)
            sizes = scratch_sizes(len(indices), layout, spec.grid)
            scratch = sum(piece_bytes(size) for size in sizes)
        arrays = (blocks, counts, indices, x)
        results = [_struct(x.shape, x.dtype)]
        return call(_scatter_body, spec, results, arrays, scratch=scratch, alias={3: 0})[0]

    @scatter.def_vmap
    def rule(size, batched, blocks, counts, indices, x):
        blocks, x = spread(size, batched[0], blocks), spread(size, batched[3], x)
        n = x.shape[0] // size
        y = scatter(blocks, *one_list(size, batched[1:3], counts, indices, n, n), x)
        return y.reshape(size, n, *y.shape[1:]), True

    return scatter


def _scatter_body(spec, results, scratch, blocks, counts, indices, x):
    """Write the blocks over the result, which holds x already."""
    y = results[0]
    with allocating_from(scratch):
        core_scatter(blocks, counts, indices, y, out=y, **spec.keywords)


def _struct(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype)
