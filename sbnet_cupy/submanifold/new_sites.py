"""The sites of a result: those whose windows meet a site, and those that a site reaches."""

import functools
import itertools
import math
import operator

import numpy as np

from ..core.arrays import namespace
from ..errors import ShapeError
from . import map_kernels
from .coordinate_map import CoordinateMap
from .distinct import OUTSIDE
from .keys import MOST_BITS, coordinates_of, key_bits, key_part, packing_of
from .site_kernels import by_kernels
from .sources import note_source
from .window import coarse_shape, fine_shape


def coarse_sites(fine, window, capacity):
    """Return every site whose window meets a site of ``fine``."""
    shape = coarse_shape(fine.spatial_shape, window)
    check_new_grid(shape, fine, window)

    made = _sites_by_kernels(fine, window, True, shape, capacity)
    if made is not None:
        return made

    def readers(position, axis):
        k, stride, dilation, pad = window.axes()[axis]
        xp, into, shared = namespace(position), position + pad, math.gcd(stride, dilation)
        period = stride // shared  # windows begin a whole number of strides before every such tap
        first = into // shared % period * pow(dilation // shared, -1, period) % period
        for tap in range(0, k, period):
            reads = (into % shared == 0) & (first + tap < k)
            yield xp.where(reads, (into - (first + tap) * dilation) // stride, -1)

    return _sites_at(readers, fine, shape, capacity)


def fine_sites(coarse, window, output_padding, capacity):
    """Return every site that a site of ``coarse`` reaches."""
    shape = fine_shape(coarse.spatial_shape, window, output_padding)
    check_new_grid(shape, coarse, window)

    made = _sites_by_kernels(coarse, window, False, shape, capacity)
    if made is not None:
        return made

    def reached(position, axis):
        k, stride, dilation, pad = window.axes()[axis]
        for r in range(k):
            yield position * stride - pad + r * dilation

    return _sites_at(reached, coarse, shape, capacity)


def check_new_grid(shape, source, window):
    """Raise if the grid of a result, None for one that is not known, is too large for sites."""
    if shape is None:
        return
    bits, _ = key_bits(shape, source.batch_size, len(shape))
    if max(shape) < 2**31 and sum(bits) <= MOST_BITS:
        return
    batch = "" if source.batch_size is None else f" with a batch of {source.batch_size}"
    raise ShapeError(
        "kernel_size, stride and padding must give a grid of fewer than 2**31 cells along each "
        f"axis, and sites with keys of {MOST_BITS} bits, got {shape}{batch} from "
        f"{source.spatial_shape} by kernel_size {window.kernel}, stride {window.stride} and "
        f"padding {window.padding}, with keys of {sum(bits)} bits; split the grid or the batch"
    )


def _sites_at(places, like, shape, capacity):
    """Return the distinct sites at the places of the sites of ``like``.

    ``places`` takes a position array and its axis, and yields the places on this axis; those that
    are outside the grid, as -1 is, are none.
    """
    xp, batch, d = namespace(like.indices), like.batch_size, like.dimensions
    packing, valid = packing_of(shape, batch, d), like.valid()
    sample, *position = like._columns()
    parts, status = [[key_part(sample, 0, packing)]], like.status
    for axis, column in enumerate(position, 1):
        found = list(places(column, axis - 1))
        parts.append([key_part(place, axis, packing) for place in found])
        if shape is None:
            beyond = sum(((place >= packing.limits[axis]) & valid).sum() for place in found)
            status = _beyond(beyond, status, capacity, packing.limits[axis])
    keys = [functools.reduce(operator.or_, of_cell) for of_cell in itertools.product(*parts)]
    # Places that stand for no site were dropped on purpose: the status is that of the source.
    made = _sites_of_keys(xp.concatenate(keys), shape, batch, d, capacity, status)
    return note_source(made, like)


def _beyond(count, status, capacity, limit):
    """Return the status where so many new sites are beyond what keys can hold, or raise."""
    if capacity is None and int(count):
        raise ShapeError(
            f"new sites must be at positions below {limit} where the shape of the grid is not "
            "known; pass spatial_shape to coordinate_map"
        )
    return (0 if status is None else status) | (count > 0).astype(np.int32).reshape(1) * OUTSIDE


def _sites_by_kernels(like, window, readers, shape, capacity):
    """Do what _sites_at does by kernels, for the places that the sites read, or for their readers.

    Return None where there are none: they do not tell which places of a grid of unknown shape are
    beyond what keys can hold.
    """
    if shape is None or not kernels_find(like, window):
        return None
    packing = packing_of(shape, like.batch_size, like.dimensions)
    most = like.capacity * map_kernels.most_places(window, readers)
    found = map_kernels.distinct_sites(
        like.indices, packing, most if capacity is None else capacity, count=like.count,
        window=window, readers=readers,
    )  # fmt: skip
    if capacity is None:
        found = found.cut(found.count.item())
    made = CoordinateMap(found.indices, found.count, shape, like.batch_size, like.status)
    made._kept.update(tree=found.tree, valid=found.valid)
    return note_source(made, like)


def kernels_find(coordinates, window):
    """Whether kernels find what is around these sites."""
    rows, d = coordinates.capacity, coordinates.dimensions
    return by_kernels(coordinates.indices) and map_kernels.has_kernel(d, rows, window)


def _sites_of_keys(keys, spatial_shape, batch_size, dimensions, capacity, status):
    """Return the sites of keys in leaf order, of which equal ones are one site and -1 is none."""
    xp, packing = namespace(keys), packing_of(spatial_shape, batch_size, dimensions)
    if capacity is None:
        keys = keys[keys >= 0]
    keys = xp.sort(keys)
    first = keys >= 0
    first[1:] &= keys[1:] != keys[:-1]
    if capacity is None:
        sites = keys[first]
        count = xp.full(1, len(sites), np.int32)
    else:
        count = first.sum(dtype=np.int32).reshape(1)
        place = xp.where(first, xp.cumsum(first) - 1, capacity)
        sites = xp.full(capacity + 1, -1, np.int64)
        sites[xp.minimum(place, capacity)] = keys
        sites = xp.where(xp.arange(capacity) < count, sites[:capacity], -1)
    rows = coordinates_of(sites, packing)
    return CoordinateMap(rows, count, spatial_shape, batch_size, status)
