"""Lists of sites for JAX, and the maps between them: in ``jit``, ``grad`` and ``vmap``.

Everything is made of XLA's own operations, so it is differentiable any number of times. Shapes are
static: lists have a ``capacity``. They keep no kernel maps: XLA finds each once in a compiled
function.
"""

import jax.numpy as jnp
import numpy as np

from ..core.arrays import compute_dtype
from ..core.checks import check_array
from ..dense.conv2d import check_choice
from ..errors import ShapeError
from ..submanifold import coordinate_map as sites
from ..submanifold.coordinate_map import (
    MODES,
    CoordinateMap,
    check_capacity,
    check_grid,
    check_indices,
)
from ..submanifold.dense_conversion import grid_of
from ..submanifold.distinct import DUPLICATE, OUTSIDE
from ..submanifold.kernel_map import KernelMap, axes
from ..submanifold.keys import packing_of
from ..submanifold.new_sites import Window, coarse_shape, fine_shape
from ..submanifold.sparse_tensor import SparseTensor, check_tensor
from ._sites import distinct, find, most_sites, sums_of_runs, valid_rows, words_of
from ._specs import spec_of


def coordinate_map(indices, *, spatial_shape=None, batch_size=None, mode="unique", capacity=None):
    """List the distinct sites of rows of coordinates: :func:`sbnet_cupy.coordinate_map` for JAX.

    Parameters
    ----------
    indices : jax.Array, shape (n, 1 + d), int32
    spatial_shape, batch_size, mode
        As for :func:`sbnet_cupy.coordinate_map`, in leaf order.
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
    made, inverse, _ = _reduced(indices, spatial_shape, batch_size, mode, capacity)
    return made, inverse


def sparse_tensor(
    features, indices, *, spatial_shape=None, batch_size=None, mode="unique", capacity=None
):
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
    spec = spec_of("features", features)
    check_array("features", spec, ndim=2, kinds="f")
    check_array("indices", spec_of("indices", indices), shape=(len(features), None))
    made, _, (order, site, first) = _reduced(indices, spatial_shape, batch_size, mode, capacity)
    rows, width = made.capacity, features.shape[1]
    out = jnp.zeros((rows, width), features.dtype)
    listed, last = features[order], jnp.append(site[1:] != site[:-1], True)[: len(site)]
    if mode not in ("sum", "mean"):
        chosen = last if mode == "last" else first
        return SparseTensor(out.at[jnp.where(chosen, site, rows)].set(listed, mode="drop"), made)
    wide = compute_dtype(features.dtype)
    listed = jnp.where((site < rows)[:, None], listed, 0).astype(wide)
    ones = jnp.ones((len(listed), 1), wide)
    starts = first | (site == rows)
    sums = sums_of_runs(jnp.concatenate([listed, ones], axis=1), starts[:, None])
    if mode == "mean":
        sums = sums / sums[:, -1:]
    sums = sums[:, :width].astype(features.dtype)
    return SparseTensor(out.at[jnp.where(last, site, rows)].set(sums, mode="drop"), made)


def _reduced(indices, spatial_shape, batch_size, mode, capacity):
    """Return the sites of rows, each row's site, and which rows belong to which."""
    spec = spec_of("indices", indices)
    check_indices(spec)
    check_choice("mode", mode, MODES)
    check_capacity(capacity)
    grid = check_grid(spatial_shape, batch_size, spec.shape[1] - 1)
    capacity = spec.shape[0] if capacity is None else int(capacity)
    small = indices.astype(jnp.int32)
    columns, same = list(small.T), (small == indices).all(axis=1)
    words, valid = words_of(columns, same, packing_of(*grid, len(columns) - 1))
    rows, count, order, site, first = distinct(columns, words, valid, capacity)
    inverse = jnp.zeros(len(indices), jnp.int32).at[order].set(jnp.where(site < capacity, site, -1))
    status = (~valid).any() * OUTSIDE
    if mode == "unique":
        status += (valid.sum() > count[0]) * DUPLICATE
    made = CoordinateMap(rows, count, *grid, status.astype(jnp.int32).reshape(1))
    return made, inverse, (order, site, first)


def sparse_to_dense(x, *, fill=0.0):
    """Put features at their cells of a whole grid: :func:`sbnet_cupy.sparse_to_dense` for JAX.

    Channels last.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> rows = jnp.array([[0, 0], [0, 2]])
    >>> x = sparse_tensor(jnp.array([[3.0], [1]]), rows, spatial_shape=4, batch_size=1)
    >>> sparse_to_dense(x).ravel().tolist()
    [3.0, 0.0, 1.0, 0.0]
    """
    shape = grid_of(x, None, "channels_last")
    out = jnp.full((*shape, x.channels), fill, x.features.dtype)
    place = jnp.where(valid_rows(x.coordinates), x.indices.T, jnp.array(shape)[:, None])
    return out.at[tuple(place)].set(x.features, mode="drop")


def kernel_map(
    coordinates, kernel_size, *, stride=1, dilation=1, padding=None, onto=None, transposed=False,
    capacity=None,
):  # fmt: skip
    """Find which rows a convolution reads, and the sites of its result.

    As :func:`sbnet_cupy.kernel_map` for JAX. New sites need a ``capacity`` inside ``jit`` and
    outside of it; by default there is room for all that there can be.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> sites, _ = coordinate_map(jnp.array([[0, 1], [0, 2], [0, 5]]), spatial_shape=8)
    >>> kernel_map(sites, 3, onto=sites).rows.tolist()
    [[-1, 0, -1], [0, 1, 2], [1, -1, -1]]
    """
    check_sites("coordinates", coordinates)
    d, kernel = coordinates.dimensions, axes(kernel_size, coordinates.dimensions, "kernel_size")
    stride, dilation = axes(stride, d, "stride"), axes(dilation, d, "dilation")
    if padding is None:
        centre = tuple(k // 2 * dil for k, dil in zip(kernel, dilation, strict=True))
        padding = centre if onto is coordinates else 0
    window = Window(kernel, stride, dilation, axes(padding, d, "padding", minimum=0))
    check_capacity(capacity)
    if onto is not None:
        check_sites("onto", onto)
        if onto.dimensions != d:
            raise ShapeError(
                f"onto must have the {d} dimensions of coordinates, got {onto.dimensions}"
            )
    if transposed:
        fine = _fine_sites(coordinates, window, capacity) if onto is None else onto
        return _transposed(_map(fine, coordinates, window))
    coarse = _coarse_sites(coordinates, window, capacity) if onto is None else onto
    return _map(coordinates, coarse, window)


def _map(fine, coarse, window):
    """Return the map of a convolution from ``fine`` to ``coarse``."""
    sample, *position = coarse.indices.T
    valid = valid_rows(coarse)
    begin = [p * s - pad for p, (_, s, _, pad) in zip(position, window.axes(), strict=True)]
    offsets = np.array(window.offsets(), np.int32)
    columns = [b[None] + o[:, None] for b, o in zip(begin, offsets.T, strict=True)]
    columns = [jnp.broadcast_to(sample, columns[0].shape), *columns]
    rows = find(fine, columns, jnp.broadcast_to(valid, columns[0].shape))
    return KernelMap(rows, fine, coarse, window.kernel)


def _transposed(forward):
    """Return the map in the other direction."""
    rows = jnp.full((forward.taps, forward.source.capacity), -1, jnp.int32)
    read = jnp.where(forward.rows >= 0, forward.rows, forward.source.capacity)
    taps = jnp.arange(forward.taps)[:, None]
    own = jnp.arange(forward.target.capacity, dtype=jnp.int32)
    rows = rows.at[taps, read].set(jnp.broadcast_to(own, read.shape), mode="drop")
    return KernelMap(rows, forward.target, forward.source, forward.kernel_size)


def _coarse_sites(fine, window, capacity):
    """Return every site whose window meets a site of ``fine``."""
    shape = coarse_shape(fine.spatial_shape, window)

    def readers(position, axis):
        k, stride, dilation, pad = window.axes()[axis]
        for back in range((k - 1) * dilation // stride + 1):
            place = (position + pad) // stride - back
            into = position + pad - place * stride
            yield jnp.where((into <= (k - 1) * dilation) & (into % dilation == 0), place, -1)

    per_axis = [(k - 1) * dil // s + 1 for k, s, dil, _ in window.axes()]
    return _sites_at(readers, fine, per_axis, shape, capacity)


def _fine_sites(coarse, window, capacity):
    """Return every site that a site of ``coarse`` reaches."""
    shape = fine_shape(coarse.spatial_shape, window, (0,) * coarse.dimensions)

    def reached(position, axis):
        k, stride, dilation, pad = window.axes()[axis]
        return (position * stride - pad + r * dilation for r in range(k))

    return _sites_at(reached, coarse, window.kernel, shape, capacity)


def _sites_at(places, like, per_axis, shape, capacity):
    """Return the distinct sites at the places of the sites of ``like``."""
    if capacity is None:
        capacity = most_sites(like.capacity, per_axis, like.batch_size, shape)
    sample, *position = like.indices.T
    lists = [list(places(column, axis)) for axis, column in enumerate(position)]
    grid = np.stack(np.meshgrid(*map(np.arange, map(len, lists)), indexing="ij"), -1)
    columns = [
        jnp.stack(found)[choice].ravel()
        for found, choice in zip(lists, grid.reshape(-1, len(lists)).T, strict=True)
    ]
    copies = len(columns[0]) // max(like.capacity, 1)
    columns = [jnp.tile(sample, copies), *columns]
    valid = jnp.tile(valid_rows(like), copies)
    words, valid = words_of(columns, valid, packing_of(shape, like.batch_size, like.dimensions))
    rows, count, *_ = distinct(columns, words, valid, capacity)
    return CoordinateMap(rows, count, shape, like.batch_size, like.status)


def check_sites(name, value):
    """Raise unless a value is a CoordinateMap of JAX arrays."""
    sites.check_sites(name, value)
    spec_of(f"{name}.indices", value.indices)


def sites_of(x):
    """Return the CoordinateMap of a SparseTensor; raise for what is none."""
    check_tensor(x)
    return x.coordinates
