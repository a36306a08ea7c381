"""Sites in JAX: containers as pytrees, distinct sites by sorting, rows by binary search.

A key of the core has 63 bits, which JAX has only where 64-bit numbers are enabled. Here it is a few
int32 words, compared from the first to the last; they sort as the key does. The order of sites is
the core's.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from ..submanifold.adapted import ADAPTED
from ..submanifold.coordinate_map import CoordinateMap
from ..submanifold.feature_rows import reads
from ..submanifold.keeping_container import KeepingContainer
from ..submanifold.kernel_map import KernelMap
from ..submanifold.keys import packing_of
from ..submanifold.sparse_tensor import SparseTensor
from ._callbacks import vary_alike

_WORD_BITS = 31
_NONE = np.int32(np.iinfo(np.int32).max)  # first word of what is no site: sorted last


def _register(kind, data, static, kept=()):
    """Make a container a pytree; it is made anew without checks, which JAX's stand-ins fail.

    Of what it keeps besides its fields, it takes along what ``kept`` names.
    """

    def flatten(value):
        own = tuple(getattr(value, name) for name in static)
        also = tuple((name, value._kept[name]) for name in kept if name in value._kept)
        return [getattr(value, name) for name in data], (own, also)

    def unflatten(fixed, arrays):
        made, (own, also) = object.__new__(kind), fixed
        for name, value in zip((*data, *static), (*arrays, *own), strict=True):
            object.__setattr__(made, name, value)
        if issubclass(kind, KeepingContainer):
            object.__setattr__(made, "_kept", dict(also))
        return made

    jax.tree_util.register_pytree_node(kind, flatten, unflatten)


_register(
    CoordinateMap, ("indices", "count", "status"), ("spatial_shape", "batch_size"),
    ("leaf_order", "window"),
)  # fmt: skip
_register(SparseTensor, ("features", "coordinates"), ())
_register(
    KernelMap, ("rows", "source", "target"), ("kernel_size",), ("made", "symmetric", "offsets")
)


def valid_rows(coordinates):
    """Return which rows hold a site: bool, shape (N,)."""
    return _valid(coordinates.indices, coordinates.count)


def _valid(indices, count):
    """See :meth:`CoordinateMap.valid`; inside ``jit``, too."""
    return (jnp.arange(indices.shape[0]) < count[0]) & (indices[:, 0] >= 0)


ADAPTED["jax", "valid"] = _valid


def rows_at(features, rows, fill=0):
    """Return rows of features, ``fill`` for those that are none."""
    if not len(features):  # of which JAX takes none
        return jnp.full((*rows.shape, *features.shape[1:]), fill, features.dtype)
    place = jnp.where(reads(rows, len(features)), rows, np.int32(len(features)))
    return features.at[place].get(mode="fill", fill_value=fill)


def set_cells(mask, capacity):
    """Return the flat cells where a mask is set, -1 past the last, and their number: int32 [1]."""
    count = mask.sum(dtype=jnp.int32).reshape(1)
    (cells,) = jnp.nonzero(mask.ravel(), size=capacity)
    return jnp.where(jnp.arange(capacity) < count, cells, -1), count


def words_of(columns, valid, packing):
    """Return the words of the keys of coordinates, and which rows have one.

    Parameters
    ----------
    columns : list of int32 array
        The sample, and the position on each axis.
    valid : bool array
        Rows that are none have no key, and neither have those outside the limits.
    packing : Packing
        Of the core: how coordinates become a key.
    """
    low, digits = jnp.zeros_like(columns[0]), []
    for values, limit, bits, low_bits in zip(columns, *packing, strict=True):
        valid &= (values >= 0) & (values <= min(limit, 2**31) - 1)
        digits.append((values >> low_bits, bits - low_bits))
        low = low << low_bits | values & ((1 << low_bits) - 1)
    words, used = [jnp.zeros_like(low)], 1  # the first stays below what stands for no site
    for digit, bits in (*digits, (low, sum(packing.low_bits))):
        if used + bits > _WORD_BITS:
            words.append(digit)
            used = bits
        else:
            words[-1] = words[-1] << bits | digit
            used += bits
    words[0] = jnp.where(valid, words[0], _NONE)
    return words, valid


def packing(coordinates):
    """Return the packing of the grid of sites."""
    return packing_of(coordinates.spatial_shape, coordinates.batch_size, coordinates.dimensions)


def distinct(columns, words, valid, capacity):
    """List the distinct sites among rows with these words.

    Returns
    -------
    indices : int32 [capacity, 1 + d]
    count : int32 [1]
    order : int32 [n], rows of the list in the order of the sites
    site : int32 [n], the site of each of these, or the capacity if it has none
    first : bool [n], whether it is the first row of its site
    """
    rows = jnp.arange(len(valid), dtype=jnp.int32)
    *words, order = jax.lax.sort((*words, rows), num_keys=len(words), is_stable=True)
    there = valid[order]
    changes = jnp.zeros(max(len(rows) - 1, 0), bool)
    for word in words:
        changes |= word[1:] != word[:-1]
    first = there.at[1:].set(there[1:] & changes)
    site = jnp.cumsum(first, dtype=jnp.int32) - 1
    count = first.sum(dtype=jnp.int32).reshape(1)
    site = jnp.where(there & (site < capacity), site, capacity)
    listed = jnp.stack(columns, axis=1)[order]
    indices = jnp.full((capacity, len(columns)), -1, jnp.int32)
    indices = indices.at[jnp.where(first, site, capacity)].set(listed, mode="drop")
    return indices, count, order, site, first


def find(coordinates, columns, valid):
    """Return the row of each site given by columns: int32, -1 where there is none."""
    if not coordinates.capacity:
        return jnp.full(valid.shape, -1, jnp.int32)
    where = packing(coordinates)
    own, _ = words_of(list(coordinates.indices.T), valid_rows(coordinates), where)
    rows = jnp.arange(coordinates.capacity, dtype=jnp.int32)
    order = rows
    if not coordinates._kept.get("leaf_order"):
        *own, order = jax.lax.sort((*own, rows), num_keys=len(own), is_stable=True)
    wanted, valid = words_of(columns, valid, where)

    def before(place):
        """Whether the key at a place is less than the one that is wanted."""
        less, same = jnp.zeros(valid.shape, bool), jnp.ones(valid.shape, bool)
        for mine, other in zip(own, wanted, strict=True):
            there = mine[place]
            less |= same & (there < other)
            same &= there == other
        return less, same

    def halve(_, ends):
        low, high = ends
        middle = (low + high) // 2
        less, _ = before(jnp.minimum(middle, coordinates.capacity - 1))
        less &= middle < high
        return jnp.where(less, middle + 1, low), jnp.where(less, high, middle)

    start = jnp.zeros(valid.shape, jnp.int32)
    ends = tuple(vary_alike([start, start + coordinates.capacity], [valid, *own, *wanted]))
    place, _ = jax.lax.fori_loop(0, coordinates.capacity.bit_length(), halve, ends)
    place = jnp.minimum(place, coordinates.capacity - 1)
    return jnp.where(valid & before(place)[1], order[place], -1)


def most_sites(places, batch_size, shape):
    """Return how many sites there may be at so many places: at most all cells of the grid."""
    if shape is None or batch_size is None:
        return places
    return min(places, batch_size * math.prod(shape))


def sums_of_runs(values, starts):
    """Return the sums of runs up to each row; a run begins where ``starts`` is set."""

    def combine(before, after):
        (total, begun), (value, begins) = before, after
        return jnp.where(begins, value, total + value), begun | begins

    starts = jnp.broadcast_to(starts, values.shape)
    return jax.lax.associative_scan(combine, (values, starts))[0] if len(values) else values
