"""The pools of a stack for JAX, made of XLA's own operations, as :mod:`.stack` is."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sbnet_cupy as core

from ..block_sparse.stack.block_table import BlockTable
from ..block_sparse.stack.checks import check_stack
from ..block_sparse.stack.neighbours import Axis
from ..block_sparse.stack.pooling import resolve_pool, tap_slices, window_taps
from ..block_sparse.stack.stack_avg_pool import STACK_AVG_POOL
from ..block_sparse.stack.stack_global_pool import MODES
from ..block_sparse.stack.stack_max_pool import STACK_MAX_POOL
from ..core.arrays import compute_dtype
from ..dense.conv2d import check_choice
from ._documentation import documented
from ._places import Places, specs_of_table
from ._specs import spec_of


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
    arrays, sizes = specs_of_table(table)
    options = (kernel, strides, padding, dilation, ceil_mode)
    STACK_MAX_POOL.infer((spec_of("x", x), *arrays, None), (*sizes, *options))
    window = resolve_pool(spec_of("x", x), BlockTable(*arrays, *sizes), *options)
    places, axes = Places(table), _halo_of(window)
    halo = places.fetch(x, *axes, "-inf")
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
    arrays, sizes = specs_of_table(table)
    options = (kernel, strides, padding, ceil_mode, count_include_pad, divisor)
    STACK_AVG_POOL.infer((spec_of("x", x), *arrays, None), (*sizes, *options))
    window = resolve_pool(
        spec_of("x", x), BlockTable(*arrays, *sizes), kernel, strides, padding, 1, ceil_mode
    )
    places, total = Places(table), compute_dtype(x.dtype)
    halo = places.fetch(x, *_halo_of(window)).astype(total)
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
    check_choice("mode", mode, MODES)
    arrays, sizes = specs_of_table(table)
    check_stack("x", spec_of("x", x), BlockTable(*arrays, *sizes))
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
