"""KernelMap: which input row each output row of a convolution reads, at each tap of the kernel.

Kernel: cuda_src/submanifold/kernel_map.cu, on CuPy arrays.
"""

import inspect
import marshal
import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..core.arrays import array_function, is_cupy, library_of, namespace
from ..core.checks import choice
from ..core.graph_memory import capture_of
from ..core.operator import is_plain
from ..core.readable import is_readable_int32, shape_of
from ..errors import DTypeError, ShapeError
from . import map_kernels
from .cell_search import read_rows
from .coordinate_map import CoordinateMap, check_sites
from .feature_rows import reads
from .keeping_container import CAPTURE, KeepingContainer, kept_now, mark_capture
from .new_sites import coarse_sites, fine_sites, kernels_find
from .site_arguments import check_capacity, check_int32, takes_sizes
from .sources import times_cleared
from .sparse_tensor import sites_of
from .transposed_rows import TRANSPOSED_ROWS
from .window import Window, read_offsets, read_window


@dataclass(frozen=True, eq=False, repr=False)
class KernelMap(KeepingContainer):
    """Which row of the source each row of the target reads, at each tap.

    Made by :func:`kernel_map`. Convolutions, pooling and their gradients compute over it.

    Parameters
    ----------
    rows : int32 array, shape (taps, M)
        Row of the source that row ``m`` of the target reads at each tap, -1 for none; what is no
        row of the source reads none either. Taps are in the order of the kernel's cells, the last
        axis the fastest.
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
        check_int32("rows", self.rows, "kernel_map")

    def _arrays(self):
        return (self.rows, *self.source._arrays(), *self.target._arrays())

    def _mapped(self, function):
        source = self.source._map_arrays(function)
        same = self.target is self.source
        target = source if same else self.target._map_arrays(function)
        return KernelMap(function(self.rows), source, target, self.kernel_size)

    def __repr__(self):
        """Tell the number of pairs, which waits for a GPU; not while a framework traces."""
        kernel = "x".join(map(str, self.kernel_size))
        if not is_readable_int32(self.rows, 2):
            return f"KernelMap: {kernel} kernel, not read, rows {shape_of(self.rows)}"
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
        return _number_of_pairs(self.rows, self.source.capacity)

    def flops(self, channels, channels_out, groups=1):
        """Return the floating-point operations of a convolution over this map."""
        return 2 * self.pairs() * channels * channels_out // groups

    def is_symmetric(self):
        """Whether the map in the other direction is this one with its taps in reverse order.

        It is known of a submanifold convolution with an odd kernel.
        """
        return self._kept.get("symmetric", False)

    def transposed(self):
        """Return the map in the other direction: from the target's rows to the source's."""
        rows, kept = self._keep("back", self._transposed)
        back = KernelMap(rows, self.target, self.source, self.kernel_size)
        object.__setattr__(back, "_kept", kept)
        return back

    def _transposed(self):
        """Return the transposed table, and the dict that all KernelMaps of it share.

        That does not refer to this map: no cycle.
        """
        kept = {"back": (self.rows, {})}
        mark_capture(kept, capture_of(self.rows))
        return _transposed(self.rows, self.source.capacity), kept

    def _ordered(self, plan):
        """Return the SiteOrder or SiteTiles in which an OrderedPlan reads the rows; kept."""
        key = "ordered", plan.order
        order = self._kept.get(key)
        return order or self._keep(key, lambda: plan.sort(self.rows, *self._sites()))

    def _sites(self):
        """Return the indices of the target, and how far from a row's site each tap reads.

        Nothing where the taps read at no such distance, or it is not known.
        """
        offsets = self._kept.get("offsets")
        return () if offsets is None else (self.target.indices, offsets)


@array_function
def _number_of_pairs(rows, sites):
    return int(reads(rows, sites).sum())


@takes_sizes
@array_function
def kernel_map(
    coordinates, kernel_size=None, *, stride: Any = 1, dilation: Any = 1, padding=None, onto=None,
    transposed=False, output_padding: Any = 0, offsets=None, capacity=None,
):  # fmt: skip
    """Find which rows a convolution reads, and the sites of its result.

    Site ``p`` of a convolution's result reads the sites ``p * stride - padding + r * dilation``
    for the cells ``r`` of its kernel. The same relation read backwards is that of a transposed
    convolution. The map is kept by ``coordinates``: asking again is free.

    Parameters
    ----------
    coordinates : CoordinateMap or SparseTensor
        The sites that are read.
    kernel_size : int or tuple of int
        Cells of the kernel along each axis.
    stride, dilation : int or tuple of int
        Distance between the windows of neighbouring results, and between the taps of a window.
    padding : int or tuple of int, optional
        Cells by which the windows begin before the grid. By default 0; with ``onto=coordinates``
        ``kernel_size // 2 * dilation``, which centres an odd kernel.
    onto : CoordinateMap or SparseTensor, optional
        Sites of the result. ``onto=coordinates`` is the submanifold convolution. Without it the
        result has every site that reads one of ``coordinates``.
    transposed : bool
        Read the relation backwards: ``coordinates`` are the sites ``p``.
    output_padding : int or tuple of int
        Cells more at the end of a transposed convolution's grid.
    offsets : array-like of int, shape (taps, d), optional
        In place of a kernel: site ``p`` reads ``p + offset`` for each of these, on the same sites.
        At least one.
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
        If ``coordinates`` or ``onto`` is neither a CoordinateMap nor a SparseTensor.
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
    coordinates, onto = sites_of(coordinates), sites_of(onto)
    check_map("coordinates", coordinates)
    sizes = (kernel_size, stride, dilation, padding)
    if offsets is None:
        options = (*sizes, transposed, output_padding, capacity)
        spelled = _spelled(options, onto)
        kept = coordinates._kept.get(spelled)
        if kept is not None and kept.is_current():
            return kept.of(coordinates)
        if not is_plain(options):  # arrays are spelled as their bytes, which others have, too
            spelled = None
    if onto is not None:
        check_map("onto", onto)
    check_capacity(capacity)
    if offsets is not None:
        sizes = (*sizes, transposed, output_padding)
        return _with_offsets(coordinates, read_offsets(coordinates, onto, offsets, *sizes))
    window, output_padding = read_window(coordinates, onto, *sizes, transposed, output_padding)
    key = (window, bool(transposed), output_padding, id(onto), capacity)
    make = _transposed_map if transposed else _map

    def new():
        made = make(coordinates, window, onto, output_padding, capacity)
        if onto is coordinates and window.is_symmetric():
            made._kept["symmetric"] = True
        if not transposed and set(window.stride) == {1}:
            made._kept["offsets"] = tuple(window.offsets())
        kept = KeptMap.for_source(made)
        capture = capture_of(made.rows)
        if capture != coordinates._kept.get(CAPTURE, 0) and onto is None and not transposed:
            # The source keeps it for this capture at most. The other dict may make a cycle.
            of_target = kept._replace(target=None, kept={})
            mark_capture(of_target.kept, capture)
            made.target._kept["made by"] = weakref.ref(coordinates), of_target
        return kept

    def find():
        return coordinates._keep(key, new)

    _drop_stale(coordinates._kept)
    kept = find() if spelled is None else coordinates._keep(spelled, find)
    return kept.of(coordinates)


def _drop_stale(kept):
    """Drop maps to sites that were cleared since."""
    for key, value in list(kept.items()):  # another thread may add some meanwhile
        made = value[1] if isinstance(key, tuple) and key[0] == CAPTURE else value
        if isinstance(made, KeptMap) and not made.is_current():
            kept.pop(key, None)


def _spelled(options, onto):
    """Return what a map is also kept under: options as they were given, None for odd ones.

    Spelled by marshal, since 1, 1.0 and True are equal, but not as a size.
    """
    try:
        return marshal.dumps(options, 2), id(onto)
    except ValueError:
        return None


find_map = inspect.unwrap(kernel_map)  # of native arrays, as functions behind the door have them


def made_by(onto, kernel_size, coarse):
    """Return the kept map of the convolution of ``onto`` that made the sites ``coarse``, or raise.

    Of a pooling or a convolution of any kernel size if ``kernel_size`` is None. None makes the
    sites that it reads.
    """
    known = {} if coarse is onto else _known(onto, coarse)
    made = _chosen(known, kernel_size)
    check_made(made is not None, kernel_size, [each.kernel_size for each in known.values()])
    return made


_COPIES = (
    " (with a function of the same module, sbnet_cupy or an adapter; "
    "copies, and sites that were pickled, do not keep it: make those of x from them anew)"
)


def check_made(is_known, kernel_size, others=()):
    """Raise unless it is known what made the sites that an inverse starts from.

    ``others`` are kernel sizes of what did make them.
    """
    if not is_known and others:
        raise ShapeError(
            "w must have the kernel size of the convolution or pooling that made the sites of x, "
            f"{choice(others)}, got {kernel_size}; its axes are (*kernel_size, C, K) here, and "
            "(K, C, *kernel_size) in PyTorch"
        )
    if not is_known and kernel_size is None:
        raise ValueError(
            "onto must be the sites that a pooling or a strided_conv read to make those of x; "
            f"there was none{_COPIES}"
        )
    if not is_known:
        raise ValueError(
            f"onto must be the sites that a strided_conv with a kernel of {kernel_size} read to "
            "make those of x; there was none: use transposed_conv, or run that convolution first"
            f"{_COPIES}"
        )


def _known(coordinates, target):
    """Return the windows, and maps, of what read the sites ``coordinates`` to make ``target``."""
    known = {}
    for key, kept in kept_now(coordinates._kept, coordinates.indices).items():
        if isinstance(key, tuple) and isinstance(key[0], Window) and not key[1]:
            made = kept.of(coordinates)
            if made.target is target and kept.is_current():
                known.setdefault(key[0], made)
    source, kept = target._kept.get("made by", (lambda: None, None))
    if source() is coordinates:
        known[None] = kept._replace(target=target).of(coordinates)
    return known


def _chosen(known, kernel_size):
    """Return the map with a kernel of this size, or of any for None; None if there is none."""
    found = {k: made for k, made in known.items() if kernel_size in (None, made.kernel_size)}
    if len(found) > 1:
        found.pop(None, None)
    if len(found) > 1:
        raise ValueError(
            "onto must be what one convolution or pooling read to make the sites of x, got "
            f"{len(found)} with unlike windows ({_spelled_windows(found)}); pass "
            "kernel_map(...).transposed() of the one to undo to site_conv"
        )
    return next(iter(found.values()), None)


def _spelled_windows(windows):
    """Return unlike windows in words: kernels, strides, and what else they differ in."""
    told = [
        name for name, *values in zip(Window._fields, *windows, strict=True)
        if name in ("kernel", "stride") or len(set(values)) > 1
    ]  # fmt: skip
    return " and ".join(", ".join(f"{name} {getattr(w, name)}" for name in told) for w in windows)


class KeptMap(NamedTuple):
    """What the source keeps of a map: not itself, so that both are freed when they go."""

    rows: Any
    target: CoordinateMap | None  # None for the source
    kernel_size: tuple[int, ...]
    kept: dict  # that of all KernelMaps made of it
    times_cleared: int  # of the target, when the map was made

    @classmethod
    def for_source(cls, made):
        """Return what the source of a new map keeps of it."""
        mark_capture(made._kept, capture_of(made.rows))
        target = None if made.target is made.source else made.target
        times = 0 if target is None else times_cleared(target._kept)
        return cls(made.rows, target, made.kernel_size, made._kept, times)

    def is_current(self):
        """Whether the target was not cleared since; the source drops its maps when it is."""
        return self.target is None or times_cleared(self.target._kept) == self.times_cleared

    def of(self, source):
        """Return the map."""
        made = KernelMap.__new__(KernelMap)  # its arguments were checked when it was made
        made.__dict__.update(
            rows=self.rows, source=source, target=source if self.target is None else self.target,
            kernel_size=self.kernel_size, _kept=self.kept,
        )  # fmt: skip
        return made


def check_kernel_map(value):
    """Raise unless the argument ``kernel_map`` is a KernelMap."""
    if not isinstance(value, KernelMap):
        raise DTypeError(
            f"kernel_map must be a KernelMap, got {type(value).__name__}; make one with kernel_map"
        )


def check_map(name, value):
    """Raise unless ``value`` is a CoordinateMap of native arrays."""
    check_sites(name, value)
    if library_of(value.indices) is None:
        raise DTypeError(f"{name}.indices must be an int32 array; use coordinate_map")


def _with_offsets(coordinates, offsets):
    """Return the map of a list of offsets on the same sites."""

    def make():
        steps = [tuple(offset) for offset in offsets.tolist()]
        rows = _rows(coordinates, coordinates, lambda position, axis: position, steps)
        made = KernelMap(rows, coordinates, coordinates, (len(offsets),))
        made._kept["offsets"] = tuple(steps)
        return KeptMap.for_source(made)

    key = ("offsets", offsets.shape, offsets.tobytes())
    return coordinates._keep(key, make).of(coordinates)


def _rows(source, target, starts, offsets):
    """Return which row of the source each row of the target reads, int32 ``[taps, M]``.

    ``starts`` takes a position array and its axis, and returns where on it the window begins.
    """
    on_gpu = is_cupy(source.indices)
    rows = None if on_gpu else read_rows(source, target, starts, offsets)
    if rows is None:
        xp = namespace(source.indices)
        rows = xp.full((len(offsets), target.capacity), -1, np.int32)
        sample, *position = target._columns()
        begin = [starts(column, axis) for axis, column in enumerate(position)]
        for tap, offset in enumerate(offsets):
            read = [column + step for column, step in zip(begin, offset, strict=True)]
            rows[tap] = source._find([sample, *read])
        rows = xp.where(target.valid(), rows, np.int32(-1))
    return rows


def _map(fine, window, onto, output_padding, capacity):
    """Return the map of a convolution that reads ``fine``."""
    coarse = coarse_sites(fine, window, capacity) if onto is None else onto
    if kernels_find(coarse, window):
        rows = map_kernels.find_rows(fine._tree(), coarse.indices, coarse.count, window, False)
        return KernelMap(rows, fine, coarse, window.kernel)

    def starts(position, axis):
        return position * window.stride[axis] - window.padding[axis]

    return KernelMap(_rows(fine, coarse, starts, window.offsets()), fine, coarse, window.kernel)


def _transposed_map(coarse, window, onto, output_padding, capacity):
    """Return the map of a transposed convolution that reads ``coarse``."""
    fine = fine_sites(coarse, window, output_padding, capacity) if onto is None else onto
    if kernels_find(fine, window):
        rows = map_kernels.find_rows(coarse._tree(), fine.indices, fine.count, window, True)
        return KernelMap(rows, coarse, fine, window.kernel)
    forward = _map(fine, window, coarse, output_padding, capacity)
    return forward.transposed()


@array_function
def _transposed(rows, sites):
    """Return the table from the target's rows to the source's, of which there are ``sites``."""
    return TRANSPOSED_ROWS((rows, None), (sites,))
