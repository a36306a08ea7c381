"""Pools of features at sites for JAX, over the maps of :mod:`.sites`."""

from typing import Any

import jax
import jax.numpy as jnp

from ..core.arrays import compute_dtype
from ..core.checks import check_array
from ..dense.conv2d import check_choice
from ..submanifold import sparse_tensor
from ..submanifold.feature_rows import reads
from ..submanifold.global_pool import samples_of
from ..submanifold.site_max import TIES
from ..submanifold.site_pool import read_floor
from ..submanifold.sparse_tensor import SparseTensor
from ._sites import rows_at, sums_of_runs, valid_rows
from ._specs import spec_of
from .sites import kernel_map, sites_of, way_back


def sparse_max_pool(
    x, kernel_size, *, stride=None, padding: Any = 0, dilation: Any = 1, floor=None, ties="first",
    onto=None, capacity=None,
):  # fmt: skip
    """Take the largest value in each window: :func:`sbnet_cupy.sparse_max_pool` for JAX.

    Parameters
    ----------
    x : SparseTensor
    kernel_size, stride, padding, dilation, floor, ties, onto
        As for :func:`sbnet_cupy.sparse_max_pool`.
    capacity : int, optional
        Rows of the result; by default as many as there can be sites.

    Returns
    -------
    SparseTensor

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ValueError
        As :func:`sbnet_cupy.sparse_max_pool`, for what is known while JAX traces.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> rows = jnp.array([[0, 0], [0, 1], [0, 5]])
    >>> x = sparse_tensor(jnp.array([[-3.0], [-1], [-2]]), rows, spatial_shape=8)
    >>> sparse_max_pool(x, 2, capacity=3).features.ravel().tolist()
    [-1.0, -2.0, 0.0]
    """
    check_choice("ties", ties, TIES)
    floor = read_floor(floor)
    window = _window(x, kernel_size, stride, padding, dilation, onto, capacity)
    shape, dtype = (window.target.capacity, x.channels), x.features.dtype
    there = reads(window.rows, len(x.features))
    masks = there[:, :, None]
    taken = [(h, rows_at(x.features, rows)) for h, rows in zip(masks, window.rows, strict=True)]
    largest = jnp.full(shape, -jnp.inf, dtype)
    for here, values in taken:
        largest = jnp.where(here, jnp.maximum(largest, values), largest)
    nothing = dtype.type(0 if floor is None else floor)
    largest = jnp.where(there.any(axis=0)[:, None], largest, nothing)
    largest = largest if floor is None else jnp.maximum(largest, nothing)
    total, left = jnp.zeros(shape, dtype), jnp.ones(shape, bool)
    for here, values in taken:
        same = (values == largest) | (jnp.isnan(values) & jnp.isnan(largest))
        total += jnp.where(left & same & here, values, 0)
        left &= ~(same & here) if ties == "first" else True
    return SparseTensor(_at_sites(_with_gradient_of(total, largest), window), window.target)


@jax.custom_jvp
def _with_gradient_of(total, largest):
    """Return the largest values, with the gradient of the sum of those that hold them."""
    return largest


@_with_gradient_of.defjvp
def _(values, tangents):
    return values[1], tangents[0]


def sparse_avg_pool(
    x, kernel_size, *, stride=None, padding: Any = 0, dilation: Any = 1, count="volume", onto=None,
    capacity=None,
):  # fmt: skip
    """Average the sites in each window: :func:`sbnet_cupy.sparse_avg_pool` for JAX.

    Parameters
    ----------
    x : SparseTensor
    kernel_size, stride, padding, dilation, count, onto
        As for :func:`sbnet_cupy.sparse_avg_pool`.
    capacity : int, optional
        Rows of the result; by default as many as there can be sites.

    Returns
    -------
    SparseTensor

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ValueError
        As :func:`sbnet_cupy.sparse_avg_pool`, for what is known while JAX traces.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> rows = jnp.array([[0, 0], [0, 1], [0, 5]])
    >>> x = sparse_tensor(jnp.array([[3.0], [1], [2]]), rows, spatial_shape=8)
    >>> sparse_avg_pool(x, 2, capacity=2).features.ravel().tolist()
    [2.0, 1.0]
    """
    check_choice("count", count, ("volume", "active"))
    window = _window(x, kernel_size, stride, padding, dilation, onto, capacity)
    if count == "volume":
        share = max(window.taps, 1)
    else:
        share = jnp.maximum(reads(window.rows, len(x.features)).sum(axis=0), 1)[:, None]
    return SparseTensor(_at_sites(_sum(x.features, window, share), window), window.target)


def sparse_unpool(x, *, onto):
    """Give each site the value of the window that read it: :func:`sbnet_cupy.sparse_unpool`.

    Parameters
    ----------
    x : SparseTensor
        On new sites of a pooling or a strided_conv.
    onto : CoordinateMap or SparseTensor
        The sites that were read to make those of ``x``.

    Returns
    -------
    SparseTensor
        On the sites of ``onto``.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ValueError
        As :func:`sbnet_cupy.sparse_unpool`. Whether ``onto`` is what was read is not checked.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> rows = jnp.array([[0, 0], [0, 1], [0, 5]])
    >>> x = sparse_tensor(jnp.array([[3.0], [1], [2]]), rows, spatial_shape=8)
    >>> sparse_unpool(sparse_max_pool(x, 2), onto=x).features.ravel().tolist()
    [3.0, 3.0, 2.0]
    """
    window = way_back(_float_sites_of(x), onto)
    return SparseTensor(_at_sites(_sum(x.features, window), window), window.target)


def global_pool(x, reduce="max"):
    """Reduce all sites of each sample to one row: :func:`sbnet_cupy.global_pool` for JAX.

    Parameters
    ----------
    x : SparseTensor
        Of a known batch size.
    reduce : "max", "mean" or "sum"
        Sums are added in a fixed order, pair by pair. The gradient of a maximum goes to the first
        site that holds it.

    Returns
    -------
    array, shape (batch_size, C)

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ValueError
        As :func:`sbnet_cupy.global_pool`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> rows = jnp.array([[0, 0], [0, 1], [1, 5]])
    >>> x = sparse_tensor(jnp.array([[3.0], [1], [2]]), rows, spatial_shape=8, batch_size=3)
    >>> global_pool(x).ravel().tolist(), global_pool(x, "mean").ravel().tolist()
    ([3.0, 2.0, 0.0], [2.0, 2.0, 0.0])
    """
    sites = _float_sites_of(x)
    batch, rows, features = samples_of(x, reduce), len(x.features), x.features
    if not rows:
        return jnp.zeros((batch, x.channels), features.dtype)
    sample = jnp.where(valid_rows(sites), sites.indices[:, 0], batch)
    if reduce == "max":
        most = jax.ops.segment_max(jax.lax.stop_gradient(features), sample, batch + 1)
        is_most = (features == most[sample]) | jnp.isnan(features)
        numbers = jnp.where(is_most, jnp.arange(rows, dtype=jnp.int32)[:, None], rows)
        first = jax.ops.segment_min(numbers, sample, batch + 1)[:batch]
        first = jnp.where((first >= 0) & (first < rows), first, rows)
        column = jnp.arange(x.channels)
        return features.at[first, column].get(mode="fill", fill_value=0)
    wide = compute_dtype(features.dtype)
    order = jnp.argsort(sample, stable=True)
    sample = sample[order]
    listed = jnp.where((sample < batch)[:, None], features[order], 0).astype(wide)
    numbers = jnp.ones((rows, 1), wide)
    begins = jnp.append(True, sample[1:] != sample[:-1])[:rows]
    ends = jnp.append(sample[1:] != sample[:-1], True)[:rows]
    sums = sums_of_runs(jnp.concatenate([listed, numbers], axis=1), begins[:, None])
    if reduce == "mean":
        sums = sums / sums[:, -1:]
    out = jnp.zeros((batch, x.channels), features.dtype)
    place = jnp.where(ends, sample, batch)
    return out.at[place].set(sums[:, :-1].astype(features.dtype), mode="drop")


def _window(x, kernel_size, stride, padding, dilation, onto, capacity):
    """Return the map of a pool."""
    onto = sparse_tensor.sites_of(onto)
    return kernel_map(
        _float_sites_of(x), kernel_size, stride=kernel_size if stride is None else stride,
        padding=0 if padding is None else padding, dilation=dilation, onto=onto, capacity=capacity,
    )  # fmt: skip


def _sum(features, window, divisor=1):
    """Return the sums of the rows that each row of a map reads, divided before they are rounded."""
    wide = compute_dtype(features.dtype)
    total = jnp.zeros((window.target.capacity, features.shape[1]), wide)
    for rows in window.rows:
        total += rows_at(features, rows).astype(wide)
    return (total / jnp.asarray(divisor, wide)).astype(features.dtype)


def _float_sites_of(x):
    """Return the CoordinateMap of a SparseTensor of floats; raise for what is none."""
    sites = sites_of(x)
    check_array("features", spec_of("features", x.features), ndim=2, kinds="f")
    return sites


def _at_sites(values, window):
    """Return values with 0 in the rows that hold no site."""
    return jnp.where(valid_rows(window.target)[:, None], values, 0)
