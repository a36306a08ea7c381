"""KernelMap: which input row each output row of a convolution reads, at each tap of the kernel.

Kernel: cuda_src/submanifold/kernel_map.cu, where it is asked for (site_kernels.py).
"""

import itertools
import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..core.arrays import ArrayContainer, array_function, library_of, namespace
from ..core.sizes import is_integer
from ..errors import DTypeError, ShapeError
from . import map_kernels
from .coordinate_map import CoordinateMap, coordinate_map
from .keys import packing_of
from .site_kernels import by_kernels
from .transposed_rows import TRANSPOSED_ROWS


@dataclass(frozen=True, eq=False, repr=False)
class KernelMap(ArrayContainer):
    """Which row of the source each row of the target reads, at each tap.

    Made by :func:`kernel_map`. Convolutions, pooling and their gradients compute over it.

    Parameters
    ----------
    rows : int32 array, shape (taps, M)
        Row of the source that row ``m`` of the target reads at each tap, -1 for none. Taps are in
        the order of the kernel's cells, the last axis the fastest.
    source, target : CoordinateMap
        The sites that are read, and those of the result.
    kernel_size : tuple of int
        Cells of the kernel along each axis; ``(taps,)`` for a list of offsets.
    """

    rows: Any
    source: CoordinateMap
    target: CoordinateMap
    kernel_size: tuple[int, ...]
    _kept: dict = field(default_factory=dict, init=False, repr=False)

    copies_strided = True

    def __post_init__(self):
        check_map("source", self.source)
        check_map("target", self.target)
        shape = tuple(getattr(self.rows, "shape", ()))
        if len(shape) != 2 or shape[1] != self.target.capacity:
            raise ShapeError(
                f"rows must have shape (taps, {self.target.capacity}), one column for each row of "
                f"the target, got {shape}; use kernel_map"
            )

    def _arrays(self):
        return (self.rows, *self.source._arrays(), *self.target._arrays())

    def _map_arrays(self, function):
        source = self.source._map_arrays(function)
        same = self.target is self.source
        target = source if same else self.target._map_arrays(function)
        return KernelMap(function(self.rows), source, target, self.kernel_size)

    def __repr__(self):
        kernel = "x".join(map(str, self.kernel_size))
        return (
            f"KernelMap: {kernel} kernel, {self.source.capacity} to {self.target.capacity} rows, "
            f"{self.pairs()} pairs"
        )

    @property
    def taps(self):
        """Number of taps of the kernel."""
        return int(self.rows.shape[0])

    def pairs(self):
        """Return the number of pairs of an input and an output row. Waits for the device."""
        return int((self.rows >= 0).sum())

    def flops(self, channels, channels_out, groups=1):
        """Return the floating-point operations of a convolution over this map."""
        return 2 * self.pairs() * channels * channels_out // groups

    def transposed(self):
        """Return the map in the other direction: from the target's rows to the source's."""
        if "back" not in self._kept:
            self._kept["back"] = _transposed(self.rows, self.source.capacity)
        back = KernelMap(self._kept["back"], self.target, self.source, self.kernel_size)
        back._kept["back"] = self.rows
        return back


@array_function
def kernel_map(
    coordinates, kernel_size=None, *, stride=1, dilation=1, padding=None, onto=None,
    transposed=False, output_padding=0, offsets=None, capacity=None,
):  # fmt: skip
    """Find which rows a convolution reads, and the sites of its result.

    Site ``p`` of a convolution's result reads the sites ``p * stride - padding + r * dilation``
    for the cells ``r`` of its kernel. The same relation read backwards is that of a transposed
    convolution. The map is kept by ``coordinates``: asking again is free.

    Parameters
    ----------
    coordinates : CoordinateMap
        The sites that are read.
    kernel_size : int or tuple of int
        Cells of the kernel along each axis.
    stride, dilation : int or tuple of int
        Distance between the windows of neighbouring results, and between the taps of a window.
    padding : int or tuple of int, optional
        Cells by which the windows begin before the grid. By default 0; with ``onto=coordinates``
        ``kernel_size // 2 * dilation``, which centres an odd kernel.
    onto : CoordinateMap, optional
        Sites of the result. ``onto=coordinates`` is the submanifold convolution. Without it the
        result has every site that reads one of ``coordinates``.
    transposed : bool
        Read the relation backwards: ``coordinates`` are the sites ``p``.
    output_padding : int or tuple of int
        Cells more at the end of a transposed convolution's grid.
    offsets : array-like of int, shape (taps, d), optional
        In place of a kernel: site ``p`` reads ``p + offset`` for each of these, on the same sites.
    capacity : int, optional
        Rows of a new list of sites. With it nothing waits for a GPU; see :func:`coordinate_map`.

    Returns
    -------
    KernelMap
        With the sites of the result as its ``target``.

    Raises
    ------
    ShapeError
        If a size is not positive, or does not fit the dimensions of the grid.
    DTypeError
        If ``coordinates`` or ``onto`` is no CoordinateMap.
    ValueError
        If options do not go together.

    Source: Graham et al. 2018, arXiv:1711.10275, section 3.

    Examples
    --------
    >>> import numpy as np
    >>> sites, _ = coordinate_map(np.array([[0, 1], [0, 2], [0, 5]]), spatial_shape=8)
    >>> kernel_map(sites, 3, onto=sites).rows.tolist()
    [[-1, 0, -1], [0, 1, 2], [1, -1, -1]]
    >>> kernel_map(sites, 2, stride=2).target.indices.tolist()
    [[0, 0], [0, 1], [0, 2]]
    """
    check_map("coordinates", coordinates)
    if onto is not None:
        check_map("onto", onto)
    d = coordinates.dimensions
    if offsets is not None:
        return _with_offsets(coordinates, offsets, kernel_size, stride, dilation, padding, onto)
    if kernel_size is None:
        raise ShapeError("kernel_size must be given unless offsets are, got None")
    kernel = axes(kernel_size, d, "kernel_size")
    stride, dilation = axes(stride, d, "stride"), axes(dilation, d, "dilation")
    output_padding = axes(output_padding, d, "output_padding", minimum=0)
    if padding is None:
        centre = tuple(k // 2 * dil for k, dil in zip(kernel, dilation, strict=True))
        padding = centre if onto is coordinates else 0
    padding = axes(padding, d, "padding", minimum=0)
    if any(output_padding) and (not transposed or onto is not None):
        raise ValueError(
            f"output_padding must be 0 unless transposed is True, with no onto, got "
            f"{output_padding}"
        )
    if onto is not None and onto.dimensions != d:
        raise ShapeError(f"onto must have the {d} dimensions of coordinates, got {onto.dimensions}")
    window = Window(kernel, stride, dilation, padding)
    key = (window, bool(transposed), output_padding, id(onto), capacity)
    if key not in coordinates._kept:
        make = _transposed_map if transposed else _map
        _keep(key, make(coordinates, window, onto, output_padding, capacity))
    return coordinates._kept[key].of(coordinates)


def axes(value, dimensions, name, minimum=1):
    """Read an int or one for each axis as a tuple, or raise ShapeError."""
    given = value
    value = (value,) * dimensions if is_integer(value) else value
    if (
        isinstance(value, tuple | list)
        and len(value) == dimensions
        and all(is_integer(v) and v >= minimum for v in value)
    ):
        return tuple(map(int, value))
    kind = "positive" if minimum else "non-negative"
    raise ShapeError(f"{name} must be {dimensions} {kind} integers, got {given!r}")


def found(coordinates, kernel_size, target):
    """Return the kept map of a convolution from ``coordinates`` onto ``target``, or None.

    Of any kernel size if ``kernel_size`` is None.
    """
    for key, kept in list(coordinates._kept.items()):  # another thread may make a map meanwhile
        if isinstance(key, tuple) and isinstance(key[0], Window) and not key[1]:
            made = kept.of(coordinates)
            if made.target is target and kernel_size in (None, made.kernel_size):
                return made
    return None


class _Kept(NamedTuple):
    """What the source keeps of a map: not itself, so that both are freed when they go."""

    rows: Any
    target: CoordinateMap | None  # None for the source
    kernel_size: tuple[int, ...]
    kept: dict  # that of all KernelMaps made of it

    def of(self, source):
        """Return the map."""
        target = source if self.target is None else self.target
        made = KernelMap(self.rows, source, target, self.kernel_size)
        object.__setattr__(made, "_kept", self.kept)
        return made


def _keep(key, made):
    """Let the source keep a map."""
    target = None if made.target is made.source else made.target
    made.source._kept[key] = _Kept(made.rows, target, made.kernel_size, made._kept)


def check_map(name, value):
    """Raise unless ``value`` is a CoordinateMap of native arrays."""
    if not isinstance(value, CoordinateMap):
        raise DTypeError(
            f"{name} must be a CoordinateMap, got {type(value).__name__}; make one with "
            "coordinate_map"
        )
    dtype = re.findall(r"\w+", str(getattr(value.indices, "dtype", "")))  # of any library
    if library_of(value.indices) is None or dtype[-1:] != ["int32"]:
        raise DTypeError(f"{name}.indices must be an int32 array; use coordinate_map")


class Window(NamedTuple):
    """Kernel, stride, dilation and padding along each axis; in the key of a kept map."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...]

    def axes(self):
        """Return (kernel, stride, dilation, padding) of each axis."""
        return list(zip(*self, strict=True))

    def cells(self):
        """Return the cells of the kernel, in the order of the taps."""
        return itertools.product(*map(range, self.kernel))


def _with_offsets(coordinates, offsets, kernel_size, stride, dilation, padding, onto):
    """Return the map of a list of offsets on the same sites."""
    if kernel_size is not None or stride != 1 or dilation != 1 or padding is not None:
        raise ValueError("offsets must not be given with kernel_size, stride, dilation or padding")
    if onto not in (None, coordinates):
        raise ValueError("onto must be coordinates, or None, where offsets are given")
    d = coordinates.dimensions
    given = np.asarray(offsets)
    if given.ndim != 2 or given.shape[1] != d or given.dtype.kind not in "iu":
        raise ShapeError(
            f"offsets must be integers of shape (taps, {d}), got {given.dtype} of shape "
            f"{given.shape}"
        )
    key = ("offsets", given.shape, given.astype(np.int64).tobytes())
    if key not in coordinates._kept:
        sample, *position = coordinates._columns()
        rows = []
        for offset in given.tolist():
            read = [p + o for p, o in zip(position, offset, strict=True)]
            rows.append(coordinates._find([sample, *read]))
        _keep(key, _of_rows(rows, coordinates, coordinates, (len(given),)))
    return coordinates._kept[key].of(coordinates)


def _of_rows(rows, source, target, kernel):
    xp = namespace(source.indices)
    rows = xp.stack(rows) if rows else xp.empty((0, target.capacity), np.int32)
    valid = target.valid()
    return KernelMap(xp.where(valid, rows, np.int32(-1)), source, target, kernel)


def _by_kernels(coordinates, window):
    """Whether kernels find what is around these sites."""
    rows, d = coordinates.capacity, coordinates.dimensions
    return by_kernels(coordinates.indices) and map_kernels.has_kernel(d, rows, window)


def _map(fine, window, onto, output_padding, capacity):
    """Return the map of a convolution that reads ``fine``."""
    coarse = _coarse_sites(fine, window, capacity) if onto is None else onto
    if _by_kernels(coarse, window):
        rows = map_kernels.find_rows(fine._tree(), coarse.indices, coarse.count, window, False)
        return KernelMap(rows, fine, coarse, window.kernel)
    sample, *position = coarse._columns()
    rows = []
    for cell in window.cells():
        read = [
            p * s - pad + r * dil
            for p, r, (_, s, dil, pad) in zip(position, cell, window.axes(), strict=True)
        ]
        rows.append(fine._find([sample, *read]))
    return _of_rows(rows, fine, coarse, window.kernel)


def _transposed_map(coarse, window, onto, output_padding, capacity):
    """Return the map of a transposed convolution that reads ``coarse``."""
    fine = _fine_sites(coarse, window, output_padding, capacity) if onto is None else onto
    if _by_kernels(fine, window):
        rows = map_kernels.find_rows(coarse._tree(), fine.indices, fine.count, window, True)
        return KernelMap(rows, coarse, fine, window.kernel)
    sample, *position = fine._columns()
    rows = []
    for cell in window.cells():
        reader, readers = [], sample
        xp = namespace(sample)
        for p, r, (_, s, dil, pad) in zip(position, cell, window.axes(), strict=True):
            from_start = p + pad - r * dil
            readers = xp.where(from_start % s == 0, readers, -1)
            reader.append(from_start // s)
        rows.append(coarse._find([readers, *reader]))
    return _of_rows(rows, coarse, fine, window.kernel)


def _coarse_sites(fine, window, capacity):
    """Return every site whose window meets a site of ``fine``."""
    shape = fine.spatial_shape
    if shape is not None:
        shape = tuple(
            max((n + 2 * pad - dil * (k - 1) - 1) // s + 1, 0)
            for n, (k, s, dil, pad) in zip(shape, window.axes(), strict=True)
        )

    made = _sites_by_kernels(fine, window, True, shape, capacity)
    if made is not None:
        return made

    def reader(p, r, stride, dilation, pad):
        from_start = p + pad - r * dilation
        return from_start // stride, from_start % stride == 0

    return _sites_at(reader, fine, window, shape, capacity)


def _fine_sites(coarse, window, output_padding, capacity):
    """Return every site that a site of ``coarse`` reaches."""
    shape = coarse.spatial_shape
    if shape is not None:
        shape = tuple(
            max((n - 1) * s - 2 * pad + dil * (k - 1) + 1 + more, 0)
            for n, more, (k, s, dil, pad) in zip(shape, output_padding, window.axes(), strict=True)
        )

    made = _sites_by_kernels(coarse, window, False, shape, capacity)
    if made is not None:
        return made

    def reached(p, r, stride, dilation, pad):
        return p * stride - pad + r * dilation, p >= 0

    return _sites_at(reached, coarse, window, shape, capacity)


def _sites_at(place_of, like, window, shape, capacity):
    """Return the distinct sites at the places of the sites of ``like``, for each tap.

    ``place_of`` takes a coordinate, a cell of the kernel, stride, dilation and padding of an axis;
    it returns the place on that axis, and whether there is one.
    """
    xp = namespace(like.indices)
    sample, *position = like._columns()
    listed = []
    for cell in window.cells():
        columns, there = [], xp.ones(sample.shape, bool)
        each = zip(position, cell, window.axes(), strict=True)
        for axis, (p, r, (_, stride, dilation, pad)) in enumerate(each):
            place, exists = place_of(p, r, stride, dilation, pad)
            there &= exists & (place >= 0)
            if shape is not None:
                there &= place < shape[axis]
            columns.append(place)
        rows = xp.stack([sample, *columns], axis=1)
        listed.append(xp.where(there[:, None], rows, -1))
    return _new_sites(listed, like, shape, capacity)


def _new_sites(listed, like, shape, capacity):
    """Return the distinct sites among lists of rows, of which those with sample -1 are none."""
    xp = namespace(like.indices)
    rows = xp.concatenate(listed)
    if capacity is None:
        rows = rows[rows[:, 0] >= 0]
    batch = like.batch_size
    options = {"spatial_shape": shape, "mode": "first", "capacity": capacity}
    made, _ = coordinate_map(rows, batch_size=batch, **options)
    # Rows that stand for no site were dropped on purpose: the status is that of the source.
    return CoordinateMap(made.indices, made.count, shape, batch, like.status)


def _sites_by_kernels(like, window, readers, shape, capacity):
    """Do what _sites_at does by kernels, for the places that the sites read, or for their readers.

    Return None where there are none, or where coordinate_map refuses the places.
    """
    if not _by_kernels(like, window):
        return None
    packing = packing_of(shape, like.batch_size, like.dimensions)
    most = like.capacity * map_kernels.most_places(window, readers)
    found = map_kernels.distinct_sites(
        like.indices, packing, most if capacity is None else capacity, count=like.count,
        window=window, readers=readers,
    )  # fmt: skip
    if capacity is None:
        if shape is None and int(found.status[0]):
            return None
        found = found.cut(int(found.count[0]))
    made = CoordinateMap(found.indices, found.count, shape, like.batch_size, like.status)
    made._kept["tree"] = found.tree
    return made


@array_function
def _transposed(rows, sites):
    """Return the table from the target's rows to the source's, of which there are ``sites``."""
    return TRANSPOSED_ROWS((rows, None), (sites,))
