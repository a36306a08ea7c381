"""CoordinateMap: the distinct sites at which features live.

Kernel: cuda_src/submanifold/coordinate_map.cu, on CuPy arrays.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..core.arrays import array_function, dtype_kind, namespace
from ..core.checks import check_array
from ..core.graph_memory import capture_of, memory_of_graphs
from ..core.list_cells import list_cells
from ..core.readable import is_readable_int32, shape_of
from ..dense.conv2d import check_choice
from ..errors import CapacityError, DTypeError, ShapeError
from . import map_kernels
from .adapted import adapted
from .distinct import DUPLICATE, LEFT_OUT, OUTSIDE, ChosenRows, distinct, duplicates_message
from .keeping_container import KeepingContainer, mark_capture
from .keys import (
    BATCH_BITS,
    coordinates_of,
    leaf_keys,
    packing_of,
    raster_keys,
    raster_packing,
    sort_keys,
)
from .row_lists import UnsortedRows
from .site_arguments import (
    MODES,
    check_capacity,
    check_grid,
    check_indices,
    check_int32,
    takes_sizes,
)
from .site_kernels import by_kernels
from .sources import (
    check_sources,
    has_sources,
    keep_sources,
    keep_sources_only,
    map_sources,
    note_source,
    sources_of,
)


@dataclass(frozen=True, eq=False, repr=False)
class CoordinateMap(KeepingContainer):
    """Sites of a grid, each once: where the rows of a feature array live.

    Made by :func:`coordinate_map`. It keeps the kernel maps that convolutions make for it, so that
    all layers on the same sites share them; :meth:`clear` frees them. Call it after the arrays were
    changed in place: until then results may be those of the old sites.

    Parameters
    ----------
    indices : int32 array, shape (N, 1 + d)
        Rows ``(sample, *position)``, the last axis the fastest. Rows past the count are -1.
    count : int32 array, shape (1,)
        Number of sites, also when there is no room for all of them; :meth:`number` reads it.
    spatial_shape : tuple of int or None
        Cells of the grid along each of its d axes; None if it is not known.
    batch_size : int or None
        Number of samples; None if it is not known.
    status : int32 array, shape (1,), optional
        What :meth:`check` reports: 1 if rows outside the grid were dropped, 2 if sites were listed
        twice where they must not be, or the sum.

    Examples
    --------
    >>> import numpy as np
    >>> sites, _ = coordinate_map(np.array([[0, 3, 1], [0, 0, 2]]), spatial_shape=(4, 4))
    >>> sites
    CoordinateMap: 2 sites on a grid of (4, 4), batch of 1, capacity 2
    >>> sites.indices.tolist()
    [[0, 0, 2], [0, 3, 1]]
    """

    indices: Any
    count: Any
    spatial_shape: tuple[int, ...] | None
    batch_size: int | None
    status: Any = None
    _kept: dict = field(default_factory=dict, init=False, repr=False)

    copies_strided = True

    def __post_init__(self):
        shape = tuple(getattr(self.indices, "shape", ()))
        if len(shape) != 2 or shape[1] < 2:
            raise ShapeError(
                f"indices must have shape (N, 1 + d), d at least 1, got {shape}; rows are "
                "(sample, *position)"
            )
        if tuple(getattr(self.count, "shape", ())) != (1,):
            raise ShapeError(
                f"count must be an array of one int32, got {self.count!r}; use coordinate_map"
            )
        check_int32("indices", self.indices, "coordinate_map")
        check_int32("count", self.count, "coordinate_map")
        spatial_shape, batch_size = check_grid(self.spatial_shape, self.batch_size, shape[1] - 1)
        object.__setattr__(self, "spatial_shape", spatial_shape)
        object.__setattr__(self, "batch_size", batch_size)
        mark_capture(self._kept, capture_of(self.indices))

    def __getstate__(self):
        """Return what copies take over: the fields, and what tells of the lists before."""
        return {**super().__getstate__(), "sources": sources_of(self)}

    def __setstate__(self, state):
        super().__setstate__({name: state[name] for name in state if name != "sources"})
        keep_sources(self, state.get("sources"))

    def _arrays(self):
        return (self.indices, self.count, *(() if self.status is None else (self.status,)))

    def _mapped(self, function):
        arrays = map(function, self._arrays())
        mapped = CoordinateMap(next(arrays), next(arrays), self.spatial_shape, self.batch_size)
        object.__setattr__(mapped, "status", next(arrays, None))
        return map_sources(mapped, self, function)

    def __repr__(self):
        """Tell the number of sites, which waits for a GPU.

        While a framework traces, or a CUDA graph is captured, nothing is read.
        """
        where = f"on a grid of {self.spatial_shape}, batch of {self.batch_size}"
        if self._is_readable():
            return f"CoordinateMap: {self._told()} {where}, capacity {self.capacity}"
        shapes = f"indices {shape_of(self.indices)}, count {shape_of(self.count)}"
        return f"CoordinateMap: not read, {where}, {shapes}"

    def _told(self):
        """Return the number of sites in words."""
        number = self.number()
        return f"{number} sites" if number >= 0 else f"a count of {number}, which is invalid,"

    def _is_readable(self):
        """Whether this is a list of sites that can be counted now, not one of stand-ins."""
        return is_readable_int32(self.count, 1) and len(getattr(self.indices, "shape", ())) == 2

    @property
    def capacity(self):
        """Number of rows of ``indices`` and of feature arrays."""
        return int(self.indices.shape[0])

    @property
    def dimensions(self):
        """Number of axes of the grid, without the batch."""
        return int(self.indices.shape[1]) - 1

    @property
    def overflowed(self):
        """Whether this list has more sites than rows; see :meth:`check`. Waits for the device."""
        return self.number() > self.capacity

    def number(self):
        """Return the number of sites. Waits for the device."""
        return int(self.count[0])

    def check(self):
        """Return self, or raise the error that a call with a capacity could not raise.

        It tells of these sites, and of the lists that they were made of. It does not tell of lists
        that were made of these: where :func:`inverse_conv`, :func:`sparse_unpool` or ``onto`` has
        come back to these sites, check the coarsest list.

        Raises
        ------
        CapacityError
            If there are more sites than rows, here or in a list that these were made of, or rows
            outside the grid were dropped.
        ValueError
            If sites were listed twice though ``mode`` was "unique", or the count is negative.
        """
        number, status = self.number(), 0 if self.status is None else int(self.status[0])
        if number < 0:
            raise ValueError(
                f"count must be the number of sites, got {number}; make them with coordinate_map"
            )
        if number > self.capacity:
            raise CapacityError(
                f"capacity must be at least the number of sites, got {self.capacity} for {number} "
                "sites; pass a larger capacity"
            )
        check_sources(self, status & LEFT_OUT)
        if status & OUTSIDE:
            cure = "spatial_shape" if self.spatial_shape is None else "a larger spatial_shape"
            if self.batch_size is None:
                cure += f", or batch_size, without which samples are below {1 << BATCH_BITS}"
            else:
                cure += ", or a larger batch_size"
            raise CapacityError(
                f"indices must be inside {_grid_of(self.spatial_shape, self.batch_size)}"
                f"{', or that of a list these were made of' if has_sources(self) else ''}; rows "
                f"outside were dropped: drop them before, or pass {cure}"
            )
        if status & DUPLICATE:
            raise ValueError(duplicates_message())
        return self

    def clear(self):
        """Free what is kept for these sites: their sorted keys, and their kernel maps.

        After it nothing is known of the convolutions that read or made them, which
        ``inverse_conv`` and ``sparse_unpool`` undo. Maps onto them are found anew.
        """
        for name in ("native", "twin"):  # the same sites as arrays of another library
            same = self._kept.get(name)
            if isinstance(same, CoordinateMap):
                keep_sources_only(same._kept)
        keep_sources_only(self._kept)

    def select(self, mask, *, capacity=None):
        """Return the sites where a mask is set, in their order, and where they were.

        Parameters
        ----------
        mask : array, shape (N,)
            bool, or float, set where it is not 0; one for each row. Rows that hold no site are
            never selected. Integers, which may be numbers of rows, are refused.
        capacity : int, optional
            Number of rows of the result. With it nothing waits for a GPU. By default as many as are
            selected; in JAX, which must know shapes, as many as these sites have.

        Returns
        -------
        coordinates : CoordinateMap
            The selected sites.
        rows : int32 array, shape (M,)
            The row of each among these sites, -1 past the count: ``features[rows]`` are theirs.

        Raises
        ------
        ShapeError, DTypeError
            If the mask is not one bool or float for each row.

        Examples
        --------
        >>> import numpy as np
        >>> sites, _ = coordinate_map(np.array([[0, 1], [0, 2], [0, 5]]), spatial_shape=8)
        >>> chosen, rows = sites.select(np.array([True, False, True]))
        >>> chosen.indices.tolist(), rows.tolist()
        ([[0, 1], [0, 5]], [0, 2])
        """
        return adapted("select", select_sites, self.indices)(self, mask, capacity)

    def valid(self):
        """Return which rows hold a site: bool, shape (N,)."""
        return adapted("valid", _valid, self.indices)(self.indices, self.count)

    def _columns(self):
        """Return the coordinates as int64 arrays; -1 in rows that hold no site."""
        xp = namespace(self.indices)
        valid = self.valid()
        return [xp.where(valid, column, -1) for column in self.indices.T.astype(np.int64)]

    def _packing(self):
        return packing_of(self.spatial_shape, self.batch_size, self.dimensions)

    def _tree(self):
        """Return the tree that kernels find these sites in; kept, as is which rows hold a site."""

        def make():
            tree, valid = map_kernels.tree_of(self.indices, self.count, self._packing())
            self._keep("valid", lambda: valid)
            return tree

        return self._keep("tree", make)

    def _find(self, coordinates):
        """Return the row of each site given by int64 columns: int32, -1 where there is none."""
        xp = namespace(self.indices)
        packing = self._packing()

        def make():
            order, keys = sort_keys(leaf_keys(self._columns(), packing))
            return keys, order.astype(np.int32)

        keys, order = self._keep("sorted", make)
        wanted = leaf_keys(coordinates, packing)
        if not len(keys):
            return xp.full(wanted.shape, -1, np.int32)
        place = xp.minimum(xp.searchsorted(keys, wanted), len(keys) - 1)
        return xp.where((keys[place] == wanted) & (wanted >= 0), order[place], np.int32(-1))


@array_function
def _valid(indices, count):
    return (namespace(indices).arange(len(indices)) < count) & (indices[:, 0] >= 0)


@takes_sizes
@array_function
def coordinate_map(
    indices, *, spatial_shape=None, batch_size=None, mode="unique", order="leaf", capacity=None
):
    """List the distinct sites of rows of coordinates.

    Parameters
    ----------
    indices : int32 or int64 array, shape (n, 1 + d)
        Rows ``(sample, *position)`` on a grid of d axes. In any order; samples may be mixed.
    spatial_shape : int, tuple of int or integer NumPy array, optional
        Cells of the grid along each axis. Without it positions may be as large as 63 bits allow
        for a row (in 3-D 21 bits an axis for one sample, 17 where the batch size is unknown), and
        :func:`sparse_to_dense` must be told a shape.
    batch_size : int, optional
        Number of samples. By default that of the indices, which waits for a GPU; with a
        ``capacity`` it stays unknown.
    mode : "unique", "first", "last", "sum" or "mean"
        What rows with the same site become: "unique" promises that there are none; with the others
        they become one site (:func:`sparse_tensor` says which features it gets).
    order : "leaf" or "raster"
        Order of the sites: by groups of neighbouring cells, which is fastest later on, or row by
        row of the grid. Both depend on the set of sites only.
    capacity : int, optional
        Number of rows of the result. With it nothing waits for a GPU: rows past the count are -1,
        sites past the capacity are left out, and rows outside the grid are dropped;
        :meth:`CoordinateMap.check` tells. Without it there are as many rows as sites.

    Returns
    -------
    coordinates : CoordinateMap
        The sites, in the library and on the device of ``indices``.
    inverse : int32 array, shape (n,)
        The row of ``coordinates`` that holds each row of ``indices``, -1 for what was left out.

    Raises
    ------
    ShapeError
        If ``indices`` is no list of rows, a row is outside the grid, or keys of the grid need more
        than 63 bits.
    DTypeError
        If ``indices`` is neither int32 nor int64.
    ValueError
        If rows are equal though ``mode`` is "unique", or an option is none of those above.

    Source: B. Graham, M. Engelcke, L. van der Maaten, "3D Semantic Segmentation with Submanifold
    Sparse Convolutional Networks", CVPR 2018, arXiv:1711.10275.

    Examples
    --------
    >>> import numpy as np
    >>> rows = np.array([[0, 5, 5], [0, 1, 2], [0, 5, 5]])
    >>> sites, inverse = coordinate_map(rows, spatial_shape=(8, 8), mode="first")
    >>> sites.indices.tolist(), inverse.tolist()
    ([[0, 1, 2], [0, 5, 5]], [1, 0, 1])
    """
    coordinates, inverse, _ = reduce_rows(indices, spatial_shape, batch_size, mode, order, capacity)
    return coordinates, inverse


def reduce_rows(indices, spatial_shape, batch_size, mode, order, capacity):
    """Do what coordinate_map does; return what features are reduced by, too.

    That is a Reduction, UnsortedRows or, for the modes that choose a row, maybe ChosenRows.
    """
    check_indices(indices)
    check_choice("mode", mode, MODES)
    check_choice("order", order, ("leaf", "raster"))
    check_capacity(capacity)
    dimensions = indices.shape[1] - 1
    if batch_size is None and capacity is None:
        batch_size = max(int(indices[:, 0].max()) + 1, 1) if len(indices) else 1
    spatial_shape, batch_size = check_grid(spatial_shape, batch_size, dimensions)
    with memory_of_graphs(indices):
        return _reduce_rows(indices, spatial_shape, batch_size, mode, order, capacity)


def _reduce_rows(indices, spatial_shape, batch_size, mode, order, capacity):
    """Do what reduce_rows does, of arguments that were checked."""
    packing = packing_of(spatial_shape, batch_size, indices.shape[1] - 1)
    if order == "leaf" and by_kernels(indices):
        found = _reduce_by_kernels(indices, packing, spatial_shape, batch_size, mode, capacity)
        if found is not None:
            return found
    columns = list(namespace(indices).ascontiguousarray(indices.T).astype(np.int64))
    keys = (leaf_keys if order == "leaf" else raster_keys)(columns, packing)
    if capacity is None:
        _check_inside(keys, indices, spatial_shape, batch_size)
    if order == "raster":
        packing = raster_packing(packing)
    found = reduce_keys(keys, packing, spatial_shape, batch_size, mode, capacity)
    if capacity is None and mode == "unique" and int(found[0].status[0]) & DUPLICATE:
        raise ValueError(duplicates_message(found[2]))
    return found


def reduce_columns(kept, columns, spatial_shape, batch_size, mode, order, capacity):
    """Do what reduce_rows does for columns of int64 coordinates, of which some rows are ``kept``.

    Those of other samples are dropped, too; coordinates lie in the grid.
    """
    xp, packing = namespace(kept), packing_of(spatial_shape, batch_size, len(spatial_shape))
    found = None
    if order == "leaf" and by_kernels(kept):
        rows = xp.where(kept[:, None], xp.stack(columns, axis=1), -1)
        grid = packing, spatial_shape, batch_size
        found = _reduce_by_kernels(rows, *grid, mode, capacity, drops=True)
    if found is None:
        if order == "raster":
            packing = raster_packing(packing)
        keys = xp.where(kept, leaf_keys(columns, packing), -1)
        found = reduce_keys(keys, packing, spatial_shape, batch_size, mode, capacity)
    found[0].status[:] = 0  # rows are dropped on purpose
    return found


def _reduce_by_kernels(
    indices, packing, spatial_shape, batch_size, mode, capacity, drops=False
):  # fmt: skip
    """Do what reduce_rows does by kernels.

    Return None where there are none, or for rows that reduce_rows refuses, if none are dropped.
    """
    n, d = len(indices), indices.shape[1] - 1
    if not map_kernels.has_kernel(d, n):
        return None
    most = n if capacity is None else capacity
    found = map_kernels.distinct_sites(indices, packing, most, mode)
    if capacity is None:
        if not drops and found.status.item():
            return None
        found = found.cut(found.count.item())
    made = CoordinateMap(found.indices, found.count, spatial_shape, batch_size, found.status)
    made._kept.update(tree=found.tree, valid=found.valid)
    if mode in ("sum", "mean"):
        return made, found.inverse, UnsortedRows(found.inverse, found.winners, found.sums)
    return made, found.inverse, ChosenRows(found.winners)


def reduce_keys(keys, packing, spatial_shape, batch_size, mode, capacity):
    """Return the sites of the keys of rows, each row's site, and the Reduction."""
    by_key, count, inverse, reduction, status = distinct(keys, mode, capacity)
    rows = coordinates_of(by_key, packing)
    return CoordinateMap(rows, count, spatial_shape, batch_size, status), inverse, reduction


def check_sites(name, value):
    """Raise unless ``value`` is a CoordinateMap."""
    if not isinstance(value, CoordinateMap):
        raise DTypeError(
            f"{name} must be a CoordinateMap, got {type(value).__name__}; make one with "
            "coordinate_map"
        )


def _check_inside(keys, indices, spatial_shape, batch_size):
    """Raise if a row has no key."""
    outside = keys < 0
    if bool(outside.any()):
        row = int(outside.argmax())
        found = indices[row].tolist()
        cure = "pass a larger spatial_shape"
        if min(found[1:]) < 0:
            cure = "shift positions so that none is negative"
        elif found[0] < 0 or (batch_size is not None and found[0] >= batch_size):
            cure = "number the samples from 0 on, below batch_size"
        elif max(found[1:]) >= 2**31:
            cure = "shift or divide positions, which are below 2**31 in any grid"
        elif spatial_shape is None:
            most = packing_of(None, batch_size, indices.shape[1] - 1).limits[1]
            cure = f"pass spatial_shape, without which positions are below {most}"
        raise ShapeError(
            f"indices must be inside {_grid_of(spatial_shape, batch_size)}, got {found} in row "
            f"{row}; drop such rows, or {cure}"
        )


def _grid_of(spatial_shape, batch_size):
    """Return a grid as errors name it."""
    grid = f"a grid of {'63 bits' if spatial_shape is None else spatial_shape}"
    return grid if batch_size is None else f"{grid} with a batch of {batch_size}"


@array_function
def select_sites(coordinates, mask, capacity):
    """See :meth:`CoordinateMap.select`."""
    check_selection(mask, coordinates.capacity, coordinates.indices)
    check_capacity(capacity)
    xp, grid = namespace(mask), (coordinates.spatial_shape, coordinates.batch_size)
    with memory_of_graphs(mask):
        _, count, rows = list_cells((mask != 0) & coordinates.valid(), capacity)
        indices = xp.full((len(rows), coordinates.indices.shape[1]), -1, np.int32)
        if coordinates.capacity:
            indices = xp.where((rows >= 0)[:, None], coordinates.indices[rows], indices)
        made = CoordinateMap(indices, count, *grid, coordinates.status)
        return note_source(made, coordinates), rows.astype(np.int32)


def check_selection(mask, rows, like=None):
    """Raise unless ``mask``, or its spec, is a mask of so many rows; integers may be indices."""
    check_array("mask", mask, like=like)
    if dtype_kind(mask.dtype) in "iu":
        raise DTypeError(
            f"mask must be bool or float, one for each of {rows} rows, got {mask.dtype} of shape "
            f"{tuple(mask.shape)}, which may be indices of rows; pass mask != 0 for a mask, and of "
            f"indices make one: mask = zeros({rows}, bool), then mask[indices] = True"
        )
    check_array("mask", mask, shape=(rows,), kinds="bf")
