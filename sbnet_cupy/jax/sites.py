"""Lists of sites for JAX, and the maps between them: in ``jit``, ``grad`` and ``vmap``.

On a GPU kernels list sites, if no features are added up, and find the rows of maps. All else is
made of XLA's own operations, so it is differentiable any number of times. Shapes are static: lists
have a ``capacity``. They keep no kernel maps, which XLA finds once in a compiled function, but
whether they are sorted, and new sites by which window they were found.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import sbnet_cupy as core

from ..core.arrays import compute_dtype
from ..core.checks import check_array
from ..core.scalars import as_number
from ..dense.conv2d import check_choice
from ..errors import ShapeError
from ..submanifold import coordinate_map as sites
from ..submanifold import sparse_tensor as sparse_tensors
from ..submanifold.adapted import ADAPTED
from ..submanifold.coordinate_map import CoordinateMap, check_selection
from ..submanifold.dense_conversion import check_grid_array, grid_of, read_fill, read_tol
from ..submanifold.distinct import DUPLICATE, LEFT_OUT, OUTSIDE
from ..submanifold.kernel_map import KernelMap, check_made
from ..submanifold.keys import packing_of, raster_packing
from ..submanifold.map_kernels import most_places
from ..submanifold.new_sites import check_new_grid
from ..submanifold.site_arguments import MODES, check_capacity, check_grid, check_indices
from ..submanifold.sparse_tensor import SparseTensor, check_rows, check_tensor
from ..submanifold.window import Window, coarse_shape, fine_shape, read_offsets, read_window
from ._documentation import documented
from ._site_kernels import Listed, Listing, find_rows, list_sites, transposed_rows
from ._sites import (
    distinct,
    find,
    most_sites,
    rows_at,
    set_cells,
    sums_of_runs,
    valid_rows,
    words_of,
)
from ._specs import sized_spec_of, spec_of

_ADDED = ("sum", "mean")  # modes that add rows up
FAR = np.int32(np.iinfo(np.int32).min)  # a place past all that int32 holds; outside of every grid


def coordinate_map(
    indices, *, spatial_shape=None, batch_size=None, mode="unique", order="leaf", capacity=None
):
    """List the distinct sites of rows of coordinates: :func:`sbnet_cupy.coordinate_map` for JAX.

    Parameters
    ----------
    indices : jax.Array, shape (n, 1 + d), int32
    spatial_shape, batch_size, mode, order
        As for :func:`sbnet_cupy.coordinate_map`.
    capacity : int, optional
        Number of rows; by default ``n``. Rows outside the grid are dropped, and sites past it left
        out: :meth:`CoordinateMap.check` tells, outside of ``jit``.

    Returns
    -------
    coordinates : CoordinateMap
        A pytree.
    inverse : int32 array, shape (n,)

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ValueError
        As :func:`sbnet_cupy.coordinate_map`, for what is known while JAX traces.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> rows = jnp.array([[0, 5, 5], [0, 1, 2], [0, 5, 5]])
    >>> sites, inverse = coordinate_map(rows, spatial_shape=(8, 8), mode="first")
    >>> sites.indices.tolist(), inverse.tolist()
    ([[0, 1, 2], [0, 5, 5], [-1, -1, -1]], [1, 0, 1])
    """
    made, inverse, _ = _reduced(indices, spatial_shape, batch_size, mode, order, capacity)
    return made, inverse


@documented(core.sparse_tensor)
def sparse_tensor(
    features, indices, *, spatial_shape=None, batch_size=None, mode="unique", order="leaf",
    capacity=None,
):  # fmt: skip
    """Put features at their sites: :func:`sbnet_cupy.sparse_tensor` for JAX.

    Sums are added in a fixed order, pair by pair. Differentiable with respect to the features.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> rows = jnp.array([[0, 2, 2], [0, 0, 1], [0, 2, 2]])
    >>> x = sparse_tensor(jnp.array([[1.0], [2], [3]]), rows, spatial_shape=(4, 4), mode="mean")
    >>> x.features.ravel().tolist()
    [2.0, 2.0, 0.0]
    """
    spec = sized_spec_of("features", features)
    check_array("features", spec, ndim=2, kinds="f")
    check_indices(sized_spec_of("indices", indices))
    check_rows(features, indices)
    made, _, runs = _reduced(indices, spatial_shape, batch_size, mode, order, capacity)
    return put_rows(features, made, runs, mode)


def put_rows(features, made, runs, mode):
    """Return the features of the sites ``made``, of the rows that belong to each."""
    rows, width = made.capacity, features.shape[1]
    if mode not in _ADDED:
        return SparseTensor(rows_at(features, jnp.where(valid_rows(made), runs, -1)), made)
    out = jnp.zeros((rows, width), features.dtype)
    if not rows:  # of a scatter into no rows JAX cannot compute the gradient
        return SparseTensor(out, made)
    place, site, first = runs
    last, wide = _last_of(site), compute_dtype(features.dtype)
    listed = jnp.where((site < rows)[:, None], features[place], 0).astype(wide)
    ones = jnp.ones((len(listed), 1), wide)
    starts = first | (site == rows)
    sums = sums_of_runs(jnp.concatenate([listed, ones], axis=1), starts[:, None])
    if mode == "mean":
        sums = sums / sums[:, -1:]
    sums = sums[:, :width].astype(features.dtype)
    return SparseTensor(out.at[jnp.where(last, site, rows)].set(sums, mode="drop"), made)


def _reduced(indices, spatial_shape, batch_size, mode, order, capacity):
    """Return the sites of rows, each row's site, and which rows belong to which."""
    spec = sized_spec_of("indices", indices)
    check_indices(spec)
    check_choice("mode", mode, MODES)
    check_choice("order", order, ("leaf", "raster"))
    check_capacity(capacity)
    grid = check_grid(spatial_shape, batch_size, spec.shape[1] - 1)
    small = indices.astype(jnp.int32)
    same = (small == indices).all(axis=1)
    return reduce_columns(list(small.T), same, grid, mode, order, capacity)


def reduce_columns(columns, there, grid, mode, order, capacity, drops=False):
    """Return the sites of columns of coordinates, each row's site, and which rows are whose.

    ``there`` are the rows that have one; that others have none is no error where it ``drops`` them.
    Which rows are whose is the row that is chosen for each site, int32 [capacity], or, for modes
    that add rows up, what :func:`distinct` returns of their order.
    """
    rows = columns[0].shape[0]
    capacity = rows if capacity is None else int(capacity)
    packing = packing_of(*grid, len(columns) - 1)
    packing = raster_packing(packing) if order == "raster" else packing

    def by_sorting():
        words, valid = words_of(columns, there, packing)
        listed, count, *runs = distinct(columns, words, valid, capacity)
        place, site, first = runs
        inverse = jnp.zeros(rows, jnp.int32).at[place].set(jnp.where(site < capacity, site, -1))
        status = (~valid).any() * OUTSIDE
        if mode == "unique":
            status += (valid.sum() > count[0]) * DUPLICATE
        if mode not in _ADDED:
            chosen = jnp.where(_last_of(site) if mode == "last" else first, site, capacity)
            runs = jnp.full(capacity, -1, jnp.int32).at[chosen].set(place, mode="drop")
        return Listed(listed, count, inverse, runs, status.astype(jnp.int32).reshape(1))

    if order == "leaf" and mode not in _ADDED:
        listing = Listing(packing, capacity, mode)
        given = jnp.where(there[:, None], jnp.stack(columns, axis=1), -1)
        found = list_sites(listing, given, None, by_sorting)
    else:
        found = by_sorting()
    status = found.status & ~OUTSIDE if drops else found.status
    made = CoordinateMap(found.indices, found.count, *grid, status)
    made._kept["leaf_order"] = order == "leaf"
    return made, found.inverse, found.winners


def _last_of(site):
    """Return which rows are the last of their site, of rows in the order of sites."""
    return jnp.append(site[1:] != site[:-1], True)[: len(site)]


def _select(coordinates, mask, capacity):
    """See :meth:`CoordinateMap.select`; inside ``jit``, too."""
    check_selection(spec_of("mask", mask), coordinates.capacity)
    check_capacity(capacity)
    capacity = coordinates.capacity if capacity is None else int(capacity)
    rows, count = set_cells((mask != 0) & valid_rows(coordinates), capacity)
    rows = rows.astype(jnp.int32)
    indices = rows_at(coordinates.indices, rows, fill=-1)
    grid = coordinates.spatial_shape, coordinates.batch_size
    made = CoordinateMap(indices, count, *grid, _status_after(coordinates))
    made._kept["leaf_order"] = coordinates._kept.get("leaf_order", False)
    return made, rows


ADAPTED["jax", "select"] = _select


@documented(core.dense_to_sparse)
def dense_to_sparse(x, *, tol=0.0, mask=None, capacity=None, data_format="channels_last"):
    """List the cells of a grid that are not 0: :func:`sbnet_cupy.dense_to_sparse` for JAX.

    Differentiable with respect to ``x``. By default the capacity is the number of cells.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> image = jnp.zeros((1, 4, 4, 1)).at[0, 1, 2].set(5.0)
    >>> dense_to_sparse(image, capacity=2).indices.tolist()
    [[0, 1, 2], [-1, -1, -1]]
    """
    spec = sized_spec_of("x", x)
    check_grid_array("x", spec, data_format)
    check_capacity(capacity)
    x = jnp.moveaxis(x, 1, -1) if data_format == "channels_first" else x
    tol = number_of("tol", tol) if isinstance(tol, jax.Array) else read_tol(tol)
    if mask is None:
        listed = ~(abs(x) <= tol).all(axis=-1)
    else:
        check_array("mask", spec_of("mask", mask), shape=x.shape[:-1])
        listed = mask != 0
    cells, count = set_cells(listed, listed.size if capacity is None else int(capacity))
    places = jnp.stack(jnp.unravel_index(jnp.maximum(cells, 0), listed.shape), axis=1)
    indices = jnp.where((cells >= 0)[:, None], places, -1).astype(jnp.int32)
    made = CoordinateMap(indices, count, x.shape[1:-1], x.shape[0])
    return SparseTensor(rows_at(x.reshape(listed.size, x.shape[-1]), cells), made)


@documented(core.sparse_to_dense)
def sparse_to_dense(x, *, fill=0.0, data_format="channels_last", spatial_shape=None):
    """Put features at their cells of a whole grid: :func:`sbnet_cupy.sparse_to_dense` for JAX.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> rows = jnp.array([[0, 0], [0, 2]])
    >>> x = sparse_tensor(jnp.array([[3.0], [1]]), rows, spatial_shape=4, batch_size=1)
    >>> sparse_to_dense(x).ravel().tolist()
    [3.0, 0.0, 1.0, 0.0]
    """
    shape = grid_of(x, spatial_shape, data_format)
    array = isinstance(fill, jax.Array)  # which may be traced
    fill = number_of("fill", fill) if array else read_fill(fill, x.features.dtype)
    out = jnp.full((*shape, x.channels), fill, x.features.dtype)
    place = jnp.where(valid_rows(x.coordinates), x.indices.T, jnp.array(shape)[:, None])
    out = out.at[tuple(place)].set(x.features, mode="drop")
    return jnp.moveaxis(out, -1, 1) if data_format == "channels_first" else out


ADAPTED["jax", "sparse_to_dense"] = sparse_to_dense


@documented(core.kernel_map)
def kernel_map(
    coordinates, kernel_size=None, *, stride: Any = 1, dilation: Any = 1, padding=None, onto=None,
    transposed=False, output_padding: Any = 0, offsets=None, capacity=None,
):  # fmt: skip
    """Find which rows a convolution reads, and the sites of its result.

    As :func:`sbnet_cupy.kernel_map` for JAX. By default the ``capacity`` of new sites is the
    largest possible number of sites.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> sites, _ = coordinate_map(jnp.array([[0, 1], [0, 2], [0, 5]]), spatial_shape=8)
    >>> kernel_map(sites, 3, onto=sites).rows.tolist()
    [[-1, 0, -1], [0, 1, 2], [1, -1, -1]]
    """
    coordinates, onto = map(sparse_tensors.sites_of, (coordinates, onto))
    check_sites("coordinates", coordinates)
    if onto is not None:
        check_sites("onto", onto)
    check_capacity(capacity)
    sizes = (kernel_size, stride, dilation, padding)
    if offsets is not None:
        sizes = (*sizes, transposed, output_padding)
        steps = read_offsets(coordinates, onto, offsets, *sizes)
        ones = (1,) * coordinates.dimensions
        rows = _rows(coordinates, coordinates, Window(ones, ones, ones, (0,) * len(ones)), steps)
        return _made(rows, coordinates, coordinates, (len(steps),))
    window, output_padding = read_window(coordinates, onto, *sizes, transposed, output_padding)
    if not transposed:
        coarse = _coarse_sites(coordinates, window, capacity) if onto is None else onto
        made = map_by(window, coordinates, coarse)
        if onto is coordinates and window.is_symmetric():
            made._kept["symmetric"] = True
        if set(window.stride) == {1}:
            made._kept["offsets"] = tuple(window.offsets())
        return made
    if onto is None:
        onto = _fine_sites(coordinates, window, output_padding, capacity)
    return reversed_map(map_by(window, onto, coordinates))


def map_by(window, fine, coarse):
    """Return the map of a convolution from ``fine`` to ``coarse``."""
    rows = find_rows(fine, coarse, window, lambda: _rows(fine, coarse, window, window.offsets()))
    return _made(rows, fine, coarse, window.kernel)


def _made(rows, source, target, kernel_size):
    """Return a map in which, at each tap, no two rows of the target read the same one."""
    made = KernelMap(rows, source, target, kernel_size)
    made._kept["made"] = True
    return made


def _rows(source, target, window, offsets):
    """Return which row of the source each row of the target reads, int32 ``[taps, M]``.

    ``offsets`` are from the beginning of the window on.
    """
    offsets = np.array(offsets, np.int64).reshape(-1, target.dimensions)
    _, *position = target.indices.T
    axes = zip(position, window.axes(), offsets.T, strict=True)
    columns = [_reached(column, s, pad, steps) for column, (_, s, _, pad), steps in axes]
    shape = (len(offsets), target.capacity)
    columns = [jnp.broadcast_to(target.indices[:, 0], shape), *columns]
    return find(source, columns, jnp.broadcast_to(valid_rows(target), shape))


def _reached(position, stride, padding, offsets):
    """Return ``position * stride - padding + offset`` for each offset: int32 ``[offsets, M]``.

    FAR for what int32 cannot hold.
    """
    most = np.clip((2**31 - 1 + padding - offsets) // stride, -1, 2**31 - 1).astype(np.int32)
    shift = np.clip(offsets - padding, -(2**31), 2**31 - 1).astype(np.int32)
    place = position[None] * np.int32(stride) + shift[:, None]
    return jnp.where(position[None] <= most[:, None], place, FAR)


def reversed_map(forward):
    """Return the map in the other direction."""
    rows = transposed_rows(forward.rows, forward.source.capacity)
    return _made(rows, forward.target, forward.source, forward.kernel_size)


def _coarse_sites(fine, window, capacity):
    """Return every site whose window meets a site of ``fine``."""
    shape = coarse_shape(fine.spatial_shape, window)
    check_new_grid(shape, fine, window)

    def readers(position, axis):
        k, stride, dilation, pad = window.axes()[axis]
        into, shared = position.astype(jnp.uint32) + np.uint32(pad), math.gcd(stride, dilation)
        period = stride // shared  # windows begin a whole number of strides before every such tap
        rest = into // np.uint32(shared) % np.uint32(period)
        first = jnp.full_like(into, k)
        for tap in range(min(k, period)):
            first = jnp.where(rest == tap * dilation // shared % period, np.uint32(tap), first)
        found = []
        for tap in range(0, k, period):
            tap = first + np.uint32(tap)
            reads = (tap < k) & (tap <= into // np.uint32(dilation))
            place = ((into - tap * np.uint32(dilation)) // np.uint32(stride)).astype(jnp.int32)
            place = jnp.where(place < 0, FAR, place)  # from 2**31 on
            found.append(jnp.where(reads & (into % np.uint32(shared) == 0), place, -1))
        return jnp.stack(found)

    made = _sites_at(readers, fine, window, True, shape, capacity)
    made._kept["window"] = window
    return made


def _fine_sites(coarse, window, output_padding, capacity):
    """Return every site that a site of ``coarse`` reaches."""
    shape = fine_shape(coarse.spatial_shape, window, output_padding)
    check_new_grid(shape, coarse, window)

    def reached(position, axis):
        k, stride, dilation, pad = window.axes()[axis]
        return _reached(position, stride, pad, np.arange(k, dtype=np.int64) * dilation)

    return _sites_at(reached, coarse, window, False, shape, capacity)


def _status_after(source):
    """Return the status of what is made of a list of sites."""
    status = jnp.where(source.count > source.capacity, jnp.int32(LEFT_OUT), jnp.int32(0))
    return status if source.status is None else source.status | status


def _sites_at(places, like, window, readers, shape, capacity):
    """Return the distinct sites at the places of the sites of ``like``.

    These are the places that sites read through a window, or the ``readers`` that read them.
    """
    if capacity is None:
        most = like.capacity * most_places(window, readers)
        capacity = most_sites(most, like.batch_size, shape)
    packing, status = packing_of(shape, like.batch_size, like.dimensions), _status_after(like)
    if shape is None:  # kernels do not tell which places are beyond what keys can hold
        found, beyond = _sorted_sites(places, like, packing, capacity)
        status = status | jnp.int32(OUTSIDE) * beyond.reshape(1)
    else:
        listing = Listing(packing, capacity, "first", window, readers)
        by_sorting = functools.partial(_sorted_sites, places, like, packing, capacity)
        found = list_sites(listing, like.indices, like.count, lambda: by_sorting()[0])
    made = CoordinateMap(found.indices, found.count, shape, like.batch_size, status)
    made._kept["leaf_order"] = True
    return made


def _sorted_sites(places, like, packing, capacity):
    """Return the sites at places, and whether there are places past the limits, by sorting."""
    sample, *position = like.indices.T
    lists = [places(column, axis) for axis, column in enumerate(position)]
    grid = np.stack(np.meshgrid(*map(np.arange, map(len, lists)), indexing="ij"), -1)
    columns = [
        found[choice].ravel()
        for found, choice in zip(lists, grid.reshape(-1, len(lists)).T, strict=True)
    ]
    copies = len(columns[0]) // max(like.capacity, 1)
    columns = [jnp.tile(sample, copies), *columns]
    valid, beyond = valid_rows(like), jnp.zeros((), bool)
    for found, limit in zip(lists, packing.limits[1:], strict=True):
        beyond |= (((found > limit - 1) | (found == FAR)) & valid).any()
    words, valid = words_of(columns, jnp.tile(valid, copies), packing)
    rows, count, *_ = distinct(columns, words, valid, capacity)
    return Listed(rows, count, None, None, jnp.zeros(1, jnp.int32)), beyond


def way_back(coarse, fine, kernel_size=None):
    """Return the map back to the sites ``fine`` that were read to make new sites, or raise.

    They were made with this kernel size, or with any if it is None.
    """
    fine = sparse_tensors.sites_of(fine)
    check_sites("onto", fine)
    if fine.dimensions != coarse.dimensions:
        raise ShapeError(f"onto must have {coarse.dimensions} dimensions, got {fine.dimensions}")
    window = coarse._kept.get("window")
    is_known = window is not None and kernel_size in (None, window.kernel)
    check_made(is_known, kernel_size, () if window is None else [window.kernel])
    return reversed_map(map_by(window, fine, coarse))


def number_of(name, value, nan=True):
    """Return an option that is a number as a float; what JAX may be tracing as it is; or raise.

    NaN is refused unless ``nan`` allows it, where it is known.
    """
    if not isinstance(value, jax.Array):
        return as_number(name, value, nan=nan)
    check_array(name, spec_of(name, value), ndim=0, kinds="biuf")
    return value


def check_sites(name, value):
    """Raise unless a value is a CoordinateMap of JAX arrays."""
    sites.check_sites(name, value)
    spec_of(f"{name}.indices", value.indices)


def sites_of(x):
    """Return the CoordinateMap of a SparseTensor; raise for what is none."""
    check_tensor(x)
    return x.coordinates
