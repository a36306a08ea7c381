"""Kernels for features at sites that XLA calls back where it computes on a GPU.

Elsewhere, and where there is no kernel, the same is made of XLA's own operations. Nothing here is
differentiated: see ``_site_conv.py``.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..core.arrays import compute_dtype
from ..core.spec import ArraySpec
from ..submanifold import map_kernels
from ..submanifold.feature_rows import reads
from ..submanifold.site_conv import SITE_CONV
from ..submanifold.site_conv_grad import SITE_WEIGHT_GRAD
from ..submanifold.site_conv_launch import OrderedPlan
from ..submanifold.site_order import site_order
from ..submanifold.site_tiles import TileShape, site_tiles
from ..submanifold.transposed_rows import TRANSPOSED_ROWS
from . import _namespace as ops
from ._callbacks import call, has_gpu
from ._kernel_calls import as_tables, called, kernel_plan, on_gpu
from ._kernel_memory import layout_of, made, spec
from ._mapped import jit_one_by_one
from ._sites import packing, rows_at
from .packed_weights import Reading, packed_form


class How(NamedTuple):
    """Options of a sum of products."""

    kernel_size: tuple
    groups: int
    precision: str | None
    offsets: tuple | None  # how far from a row's site each tap reads, where that is known
    symmetric: bool  # whether ``back`` is ``rows`` with its taps in reverse order

    def options(self, features, activation):
        """Return those of a call of site_conv."""
        return self.kernel_size, features.shape[0], self.groups, activation, self.precision


def by_kernels(features, made):
    """Whether a convolution runs by kernels where it is on a GPU: over maps made by functions here.

    In others several rows may read the same one at a tap, which a table in the other direction
    does not tell.
    """
    return bool(made._kept.get("made")) and features.size > 0 and has_gpu()


def sum_by_xla(features, w, rows, groups, precision):
    """Return the sum over the taps, ``w`` being ``[taps, C / groups, K]``: not rounded yet."""
    wide = compute_dtype(features.dtype)
    taps, c, k = w.shape
    by_group = w.reshape(taps, c, groups, k // groups).transpose(0, 2, 1, 3)
    exact = jax.lax.Precision("default" if precision == "tf32" else "highest")
    total = jnp.zeros((rows.shape[1], k), wide)
    for tap in range(taps):
        read = rows[tap]
        taken = rows_at(features, read).reshape(len(read), groups, c)
        how = {"precision": exact, "preferred_element_type": wide}
        if groups == 1:
            product = jnp.dot(taken[:, 0], w[tap], **how)
        else:
            product = jnp.einsum("mgc,gck->mgk", taken, by_group[tap], **how)
        total += jnp.where(reads(read, len(features))[:, None], product.reshape(len(read), k), 0)
    return total


def convolve_by_xla(
    features, rows, valid, w, scale, bias, residual, groups, activation, precision
):
    """Return a convolution in XLA's own operations, all of which are differentiable."""
    total = sum_by_xla(features, w, rows, groups, precision)
    total = ops.affine(total, scale, bias, None)
    there = True if valid is None else valid[:, None]
    if residual is not None:
        # Not read where there is no site: a NaN there would be one in gradients of bias and scale.
        total += jnp.where(there, residual.astype(total.dtype), 0)
    y = ops.cast(ops.affine(total, None, None, activation), features.dtype)
    return jnp.where(there, y, 0)


def _weights_by_xla(features, grad, rows, how):
    shape = (rows.shape[0], features.shape[1] // how.groups, grad.shape[1])
    w = jax.ShapeDtypeStruct(shape, features.dtype)

    def multiply(w):
        return sum_by_xla(features, w, rows, how.groups, how.precision).astype(grad.dtype)

    (found,) = jax.linear_transpose(multiply, w)(grad)
    return found


def sum_of_products(features, w, rows, back, indices, *, how):
    """Return the sum of products over a map, in the dtype of the features."""
    return multiplied(how, None, features, w, None, None, None, rows, None, indices)


def weights(features, grad, rows, back, indices, *, how):
    """Return the gradient of its weights, as a matrix: a row for each tap and channel."""
    options = (how.groups, how.precision)
    shape = rows.shape[0] * (features.shape[1] // how.groups), grad.shape[1]
    by_xla = functools.partial(_weights_by_xla, how=how)
    if kernel_plan(SITE_WEIGHT_GRAD, [*map(spec, (features, grad, rows)), None], options) is None:
        found = by_xla(features, grad, rows)
    else:
        found = on_gpu(called(SITE_WEIGHT_GRAD, options), by_xla, features, grad, rows)
    return found.reshape(shape)


def multiplied(
    how, activation, features, w, scale, bias, residual, rows, valid, indices, packed=None
):  # fmt: skip
    """Return a convolution; ``w`` is ``[taps, C / groups, K]``, with its packed bytes if any."""
    options = how.options(features, activation)
    arrays = (features, rows, valid, w, *as_tables(features, scale, bias), residual)
    plan = kernel_plan(SITE_CONV, [*map(spec, arrays), None], options)

    def by_xla(*arrays):
        return convolve_by_xla(*arrays[:7], how.groups, activation, how.precision)

    def by_kernel(*arrays):
        *arrays, indices, packed = arrays
        if not isinstance(plan, OrderedPlan):
            return called(SITE_CONV, options)(*arrays)
        offsets = how.offsets if isinstance(plan.order, TileShape) else None
        sort = Sort(plan.order, features.shape[0], how.kernel_size, offsets)
        order = made(_sorted, sort, arrays[1], None if offsets is None else indices)
        if packed is None:
            return called(SITE_CONV, options, sort)(*arrays, order)
        return called(SITE_CONV, options, sort, plan.how)(*arrays, packed, order)

    if plan is None:
        return by_xla(*arrays)
    return on_gpu(by_kernel, by_xla, *arrays, indices, packed)


def packed_weights(weights, how, activation, features, w, scale, bias, residual, rows, valid):
    """Return the bytes that were packed of PackedWeights for a convolution; None if none were.

    ``w``, ``scale`` and ``bias`` are theirs, ``w`` being ``[taps, C / groups, K]``.
    """
    arrays = (features, rows, valid, w, *as_tables(features, scale, bias), residual)
    options, specs = how.options(features, activation), tuple(map(spec, arrays))
    plan = kernel_plan(SITE_CONV, [*specs, None], options)
    return packed_form(weights, plan, Reading(_read, (len(rows),)), SITE_CONV, options, specs)


def _read(taps, w, scale, bias):
    """Return weights as a kernel packs them."""
    return by_taps(taps, w), *as_tables(w, scale, bias)


def by_taps(taps, w):
    """Return a kernel of any number of axes as ``[taps, C / groups, K]``."""
    return w.reshape(taps, *w.shape[-2:])


def transposed_rows(rows, sites):
    """Return the table of a map in the other direction, of so many sites."""

    def by_xla(rows):
        read = jnp.where(rows >= 0, rows, sites)
        taps = jnp.arange(len(rows))[:, None]
        own = jnp.broadcast_to(jnp.arange(rows.shape[1], dtype=jnp.int32), rows.shape)
        back = jnp.full((len(rows), sites), -1, jnp.int32)
        return back.at[taps, read].set(own, mode="drop")

    if not has_gpu() or len(rows) > map_kernels.MOST_LINES:
        return by_xla(rows)
    return on_gpu(called(TRANSPOSED_ROWS, (sites,)), by_xla, rows)


def find_rows(source, target, window, by_xla):
    """Return which row of the source each row of the target reads: int32 ``[taps, M]``.

    ``by_xla()`` finds them where there is no kernel for it.
    """
    if not _has_finder(source, target, window):
        return by_xla()
    grid = packing(source)

    def by_kernel(target, target_count, source_indices, source_count):
        tree = made(_tree, grid, source_indices, source_count)
        return _found(grid, len(source_indices), window)(target, target_count, tree)

    arrays = target.indices, target.count, source.indices, source.count
    return on_gpu(by_kernel, lambda *_: by_xla(), *arrays)


def _has_finder(source, target, window):
    """Whether there is a kernel for such a map."""
    if not (source.capacity and target.capacity and has_gpu()):
        return False
    d = source.dimensions
    return map_kernels.has_kernel(d, target.capacity, window) and map_kernels.has_kernel(
        d, source.capacity
    )


@functools.cache
def _found(grid, sources, window):
    def found(target, count, tree):
        taps = int(np.prod(window.kernel))
        result = jax.ShapeDtypeStruct((taps, len(target)), jnp.int32)
        return call(_find, (grid, sources, window), [result], (target, count, tree))[0]

    return jit_one_by_one(found)


def _find(key, results, _, target, count, arena):
    grid, sources, window = key
    listed = ArraySpec((sources, target.shape[1]), target.dtype), ArraySpec((1,), count.dtype)
    words, order, _ = layout_of(_tree, grid, listed).views(arena)
    shape = map_kernels.tree_shape(grid, sources)
    tree = map_kernels.Tree(words, shape, grid, order, sources)
    map_kernels.find_rows(tree, target, count, window, False, out=results[0])


def _tree(grid, indices, count):
    """Return the arrays of the tree of a list of sites."""
    tree, held = map_kernels.tree_of(indices, count, grid)
    return tree.words, tree.order, held


class Listed(NamedTuple):
    """The distinct sites of a list: see :func:`list_sites`."""

    indices: Any  # int32 [capacity, 1 + d]
    count: Any  # int32 [1]
    inverse: Any  # int32 [n]: the site of each row; None for places of a window
    winners: Any  # int32 [capacity]: the row that is chosen for each site; or None
    status: Any  # int32 [1]


class Listing(NamedTuple):
    """Which sites are listed."""

    packing: Any
    capacity: int
    mode: str
    window: Any = None
    readers: bool = False


def list_sites(listing, indices, count, by_xla):
    """Return the Listed sites of rows, or of places around ``count`` of them.

    ``by_xla()`` lists them where there is no kernel for it.
    """
    if not _has_lister(listing, indices):
        return by_xla()

    def by_kernel(indices, count):
        specs = spec(indices), None if count is None else spec(count)
        return layout_of(_listed, listing, specs).in_xla(made(_listed, listing, indices, count))

    return on_gpu(by_kernel, lambda *_: by_xla(), indices, count)


def _has_lister(listing, indices):
    """Whether there is a kernel for such a list."""
    rows, d = len(indices), indices.shape[1] - 1
    if not (rows and listing.capacity and has_gpu()):
        return False
    return map_kernels.has_kernel(d, rows, listing.window)


def _listed(listing, indices, count):
    packing, capacity, mode, window, readers = listing
    how = {"count": count, "window": window, "readers": readers}
    found = map_kernels.distinct_sites(indices, packing, capacity, mode, **how)
    return Listed(found.indices, found.count, found.inverse, found.winners, found.status)


class Sort(NamedTuple):
    """What the order of a map's rows, as kernels read them, depends on besides the map."""

    order: bool | TileShape  # as that of an OrderedPlan
    sources: int
    kernel_size: tuple
    offsets: tuple | None

    def fits(self, plan):
        """Whether a plan reads rows in this order."""
        return isinstance(plan, OrderedPlan) and plan.order == self.order

    def read(self, arrays, arena):
        """Return the SiteOrder or SiteTiles among the bytes that :func:`_sorted` allocated."""
        rows, sites = arrays[1], None
        if self.offsets is not None:
            sites = ArraySpec((rows.shape[1], 1 + len(self.offsets[0])), rows.dtype)
        layout = layout_of(_sorted, self, (ArraySpec(rows.shape, rows.dtype), sites))
        return layout.kind(*layout.views(arena, rows))


def _sorted(sort, rows, indices):
    """Return the SiteOrder or SiteTiles of a table."""
    if isinstance(sort.order, TileShape):
        return site_tiles(rows, sort.sources, sort.order, indices, sort.offsets)
    return site_order(rows, sort.sources, sort.kernel_size, sort.order)
