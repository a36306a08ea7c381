"""The pools of a stack for JAX: by kernels on a GPU, elsewhere made of XLA's own operations."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sbnet_cupy as core

from ..block_sparse.stack.block_table import BlockTable
from ..block_sparse.stack.neighbours import Axis
from ..block_sparse.stack.pooling import resolve_pool, tap_slices, window_taps
from ..block_sparse.stack.stack_avg_pool import STACK_AVG_POOL
from ..block_sparse.stack.stack_global_pool import STACK_GLOBAL_POOL
from ..block_sparse.stack.stack_max_pool import STACK_MAX_POOL
from ..core.arrays import compute_dtype
from ._callbacks import vary_alike
from ._documentation import documented
from ._kernel_calls import called, kernel_plan, on_gpu
from ._operation import hashable
from ._places import Places, specs_of_table, table_of
from ._specs import spec_of
from ._stack_halo import fetch


@documented(core.stack_max_pool)
def stack_max_pool(
    x, table, *, kernel, strides=None, padding: Any = 0, dilation: Any = 1, ceil_mode=False
):
    """Take the maximum of each window of a stack: :func:`sbnet_cupy.stack_max_pool`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> table = block_table(jnp.ones((1, 2, 2)), 2)
    >>> stack_max_pool(-jnp.ones((1, 2, 2, 1)), table, kernel=2).tolist()
    [[[[-1.0]]]]
    """
    return _pool(STACK_MAX_POOL, x, table, (kernel, strides, padding, dilation, ceil_mode))


def _max_pool(x, table, *options):
    window = resolve_pool(*_specs(x, table), *options)
    places, axes = Places(table), _halo_of(window)
    halo = fetch(x, table, *axes, "-inf")
    y = _over_taps(halo, window, _larger, order=(1, 0))  # the first in the order of rows
    seen = _over_taps(places.inside(*axes), window, jnp.logical_or)
    after = Places(table.at(*window.coarse))
    return jnp.where(seen & after.own(), y, 0)


@documented(core.stack_avg_pool)
def stack_avg_pool(
    x, table, *, kernel, strides=None, padding: Any = 0, ceil_mode=False, count_include_pad=True,
    divisor=None,
):  # fmt: skip
    """Take the mean of each window of a stack: :func:`sbnet_cupy.stack_avg_pool`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> table = block_table(jnp.ones((1, 2, 2)), 2)
    >>> stack_avg_pool(jnp.arange(4.0).reshape(1, 2, 2, 1), table, kernel=2).tolist()
    [[[[1.5]]]]
    """
    options = (kernel, strides, padding, ceil_mode, count_include_pad, divisor)
    return _pool(STACK_AVG_POOL, x, table, options)


def _avg_pool(x, table, kernel, strides, padding, ceil_mode, count_include_pad, divisor):
    window = resolve_pool(*_specs(x, table), kernel, strides, padding, 1, ceil_mode)
    places, total = Places(table), compute_dtype(x.dtype)
    halo = fetch(x, table, *_halo_of(window)).astype(total)
    sums = _over_taps(halo, window, jnp.add)
    if divisor is None:
        counts = [_counted(places, window, axis, count_include_pad) for axis in (0, 1)]
        divisor = jnp.maximum(counts[0][:, :, None] * counts[1][:, None, :], 1)[..., None]
    after = Places(table.at(*window.coarse))
    return jnp.where(after.own(), sums / jnp.asarray(divisor, total), 0).astype(x.dtype)


def _halo_of(window):
    return [taps.halo() for taps in window_taps(window)]


def _over_taps(halo, window, combine, order=(0, 1)):
    """Reduce each window along one axis, then along the other."""
    for axis in order:
        taps = [halo[(slice(None),) * (1 + axis) + (s,)] for s in tap_slices(window, axis)]
        halo = functools.reduce(combine, taps)
    return halo


def _larger(first, second):
    """Return the larger of two, the first of equal ones; NaN is larger than all."""
    return jnp.where((second > first) | (jnp.isnan(second) & ~jnp.isnan(first)), second, first)


def _counted(places, window, axis, padded):
    """Return int [M, P]: by how many pixels along an axis a window's sum is divided."""
    taps, size = window_taps(window)[axis], window.fine.image_size[axis]
    start = places.pixels(axis, Axis(taps.first, taps.stride, taps.outputs))
    if padded:
        return jnp.maximum(jnp.minimum(start + taps.count, size + window.pads[axis][1]) - start, 0)
    return sum(((start + t >= 0) & (start + t < size)).astype(jnp.int32) for t in range(taps.count))


@documented(core.stack_global_pool)
def stack_global_pool(x, table, *, mode="mean"):
    """Reduce each image of a stack to one value a channel: :func:`sbnet_cupy.stack_global_pool`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> stack_global_pool(jnp.ones((2, 2, 2, 1)), block_table(jnp.eye(4)[None], 2)).tolist()
    [[0.5]]
    """
    return _pool(STACK_GLOBAL_POOL, x, table, (mode,))


def _global_pool(x, table, mode):
    places, total, here = Places(table), compute_dtype(x.dtype), math.prod(table.image_size)
    own = places.own()
    if mode != "max":
        sums = jnp.where(own, x, 0).astype(total).sum((1, 2))
        y = places.by_place(sums, 0).sum(1)
        return (y / max(here, 1) if mode == "mean" else y).astype(x.dtype)
    y = _largest(jax.lax.stop_gradient(x), own, places)
    counts = places.by_place(own.sum((1, 2)), 0).sum(1)
    y = jnp.where((counts == here) & (here > 0), y, jnp.maximum(y, 0))
    chosen = _first(x, own, y, places)
    values = places.by_place(jnp.where(chosen, x, 0).sum((1, 2)), 0).sum(1)
    is_chosen = places.by_place(chosen.any((1, 2)), False).any(1)
    return jnp.where(is_chosen, values, y)


def _largest(x, own, places):
    """Return the largest active pixel of each image [N, C]; -inf for an image with none."""
    low = jnp.asarray(-np.inf, x.dtype)
    return places.by_place(jnp.where(own, x, low).max((1, 2)), -np.inf).max(1, initial=low)


def _first(x, own, y, places):
    """Return bool [M, b_h, b_w, C]: the first pixel of each image that has its maximum."""
    block, width = places.table.block_size, places.table.image_size[1]
    lines = [places.pixels(axis, Axis(0, 1, b)) for axis, b in enumerate(block)]
    number = (lines[0][:, :, None] * width + lines[1][:, None, :])[..., None]
    most = np.iinfo(np.int32).max
    value = places.of_images(y)[:, None, None]
    same = own & ((x == value) | (jnp.isnan(x) & jnp.isnan(value)))
    first = places.by_place(jnp.where(same, number, most).min((1, 2)), most).min(1, initial=most)
    zero = _first_inactive(places, most)[:, None]
    first = jnp.where(y == 0, jnp.minimum(first, zero), first)
    return same & (number == places.of_images(first)[:, None, None])


def _first_inactive(places, most):
    """Return the number of each image's first pixel in no active block, which is 0: int32 [N]."""
    grid, (height, width) = places.table.grid, places.table.image_size
    sizes = zip(grid.shape[1:], places.table.block_size, strict=True)
    line, column = (jnp.arange(n, dtype=jnp.int32) * b for n, b in sizes)
    free = (line < height)[:, None] & (column < width) & ((grid < 0) | (grid >= places.limit))
    return jnp.where(free, line[:, None] * width + column, most).min((1, 2), initial=most)


def _pool(operator, x, table, options):
    """Check a pooling and compute it, by a kernel on a GPU if there is one."""
    arrays, sizes = specs_of_table(table)
    specs, options = (spec_of("x", x), *arrays, None), hashable((*sizes, *options))
    operator.infer(specs, options)
    given = x, *table._arrays()
    if kernel_plan(operator, specs, options) is None:
        return _by_xla(operator, options, *given)
    return _by_kernel(operator, options)(*vary_alike(given))


@functools.cache
def _by_kernel(operator, options):
    """Return the jitted pooling of a stack and a table; its tangent is that of XLA's operations."""
    by_xla = functools.partial(_by_xla, operator, options)

    def by_kernel(x, *arrays):
        y = called(operator, options)(x, *arrays)
        table = table_of(arrays, options[:2])
        return y if operator is STACK_GLOBAL_POOL else _inside(operator, x, y, table, *options[2:])

    @jax.custom_jvp
    def pool(*arrays):
        return on_gpu(by_kernel, by_xla, *arrays)

    @pool.defjvp
    def _(primals, tangents):
        x, *table = primals
        _, change = jax.jvp(lambda x: by_xla(x, *table), (x,), tangents[:1])
        return pool(*primals), change

    return jax.jit(pool)


def _inside(operator, x, y, table, kernel, strides, padding, *others):
    """Return a stack that was pooled with zeros outside the image, where the kernel leaves any."""
    dilation, ceil_mode = others if operator is STACK_MAX_POOL else (1, others[0])
    window = resolve_pool(*_specs(x, table), kernel, strides, padding, dilation, ceil_mode)
    after = table.at(*window.coarse)
    covered = (n * b for n, b in zip(after.grid.shape[1:], after.block_size, strict=True))
    return y if tuple(covered) == after.image_size else jnp.where(Places(after).own(), y, 0)


def _by_xla(operator, options, x, *arrays):
    """Compute a checked pooling in XLA's own operations."""
    block_size, image_size, *options = options
    table = table_of(arrays, (block_size, image_size))
    return _IN_XLA[operator.name](x, table, *options)


_IN_XLA = {
    "stack_max_pool": _max_pool,
    "stack_avg_pool": _avg_pool,
    "stack_global_pool": _global_pool,
}


def _specs(x, table):
    """Return the spec of a stack, and the table as specs."""
    arrays, sizes = specs_of_table(table)
    return spec_of("x", x), BlockTable(*arrays, *sizes)
