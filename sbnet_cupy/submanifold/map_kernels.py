"""Launches of the kernels that find sites: trees of sites, and the rows of kernel maps.

Kernels: cuda_src/submanifold/coordinate_map.cu and kernel_map.cu. A tree is a set of sites, as
site_tree.cuh explains. What they return is what the array operations of coordinate_map.py and
kernel_map.py return, bit for bit.
"""

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from ..core import launch as kernels
from ..core.arrays import empties, empty, is_cupy, namespace, place_name
from ..core.compile import cpp_name
from ..core.device import current_device
from ..core.graph_memory import memory_of_graphs
from .keys import Packing
from .row_lists import thread_blocks

LISTS, _MAPS = "submanifold/coordinate_map", "submanifold/kernel_map"
_MOST_AXES = 4
# Words of the highest level, which are all cleared and counted: at least so many may be, and for
# many sites four times as many as sites, up to the second number. A level takes two kernels.
_MOST_TOP = 1 << 19, 1 << 22
_WORDS = 2048  # of a thread block of rank_words
_MOST_ROWS = 2**31 - 2**16
# Where find_near_rows is faster: so many rows, and more places of a window for each leaf looked up.
_MANY_ROWS, _MANY_PLACES = 12_000, 2
_NEAR_ROWS = 64  # of a thread block of it
MOST_LINES = 2**16 - 1  # of a window: thread blocks side by side
_COUNTED = ("sum", "mean")  # modes of which the rows of a site are counted
_NO_WINDOW = ((1,) * _MOST_AXES, (1,) * _MOST_AXES, (1,) * _MOST_AXES, (0,) * _MOST_AXES)


class TreeShape(NamedTuple):
    """Sizes of the tree of a set of sites."""

    levels: int
    top: int  # words of the highest level
    level_words: int  # words of each of the others

    @property
    def words(self):
        """Words of all levels."""
        return self.top + (self.levels - 1) * self.level_words

    def level(self, number):
        """Return the first word of a level, and how many there are at most."""
        if number == 0:
            return 0, self.top
        return self.top + (number - 1) * self.level_words, self.level_words


class Tree(NamedTuple):
    """The tree of a list of sites."""

    words: Any  # uint64 [words, 2]
    shape: TreeShape
    packing: Packing
    order: (
        Any  # int32 [rows]: the row of each site, in the order of keys; None where it is the same
    )
    rows: int  # of the list


class Sites(NamedTuple):
    """The distinct sites of a list."""

    tree: Tree
    indices: Any  # int32 [capacity, 1 + d] or None
    count: Any  # int32 [1]
    valid: Any  # bool [capacity]: which rows hold a site; or None
    winners: Any  # int32 [capacity]: what is chosen of the rows of each site; None if not asked for
    sums: Any  # uint64: zeros for row_lists.py; None unless rows are counted
    inverse: Any  # int32 [n] or None
    held: Any  # bool [n]: which of the given rows hold a site; None where the others are listed
    status: Any  # int32 [1]

    def cut(self, rows):
        """Return them with so many rows, fewer than there are."""
        if rows == self.tree.rows:
            return self
        given = self.indices, self.valid, self.winners
        specs = [a if a is None else ((rows, *a.shape[1:]), a.dtype) for a in given]
        indices, valid, winners = kept = empties(self.indices, *specs)
        for array, whole in zip(kept, given, strict=True):
            if array is not None:
                _copy_first(array, whole)
        tree = self.tree._replace(rows=rows)
        return self._replace(tree=tree, indices=indices, valid=valid, winners=winners)


def tree_shape(packing, most):
    """Return the fewest levels whose highest has not too many words, for at most so many sites."""
    leaves = math.prod(_leaves(packing))
    levels, most_top = 1, min(max(_MOST_TOP[0], 4 * most), _MOST_TOP[1])
    while -(-leaves // 64 ** (levels - 1)) > most_top:
        levels += 1
    return TreeShape(levels, -(-leaves // 64 ** (levels - 1)), max(most, 1))


def _leaves(packing):
    """Return how many samples there are, and leaves along each axis; at least one each."""
    axes = zip(packing.limits, packing.low_bits, strict=True)
    return tuple(max(-(-limit // (1 << low)), 1) for limit, low in axes)


def has_kernel(dimensions, rows, window=None):
    """Whether there are kernels for rows of so many axes, and their places in a window."""
    taps = 1 if window is None else math.prod(window[0])
    lines = 1 if window is None else math.prod(window[0][:-1])
    return dimensions <= _MOST_AXES and rows * taps < _MOST_ROWS and lines <= MOST_LINES


def distinct_sites(rows, packing, capacity, mode="first", *, count=None, window=None, readers=False,
                   listed=True):  # fmt: skip
    """Return the distinct Sites of rows of coordinates, or of the places of a window around them.

    Parameters
    ----------
    rows : int32 or int64 array, shape (n, 1 + d)
        Rows ``(sample, *position)``. There must be a kernel: :func:`has_kernel`.
    packing : Packing
        Of the grid of the sites.
    capacity : int
        Rows of the result.
    mode : str
        Whether ``winners`` are the "last" rows of the sites, for "sum" and "mean" how many rows
        each has, less one, or else the first ones. Only with "unique" do rows that are listed twice
        set a bit of the status.
    count : int32 array, shape (1,), optional
        How many of the rows hold a site.
    window : (kernel, stride, dilation, padding), optional
        Look for all places that the rows read, or, if ``readers``, that read them.
    listed : bool
        Whether to return ``indices``, ``valid`` and ``inverse``, or else ``held``.
    """
    with memory_of_graphs(rows):
        rows = namespace(rows).ascontiguousarray(rows)
    n, d = len(rows), rows.shape[1] - 1
    most = n * (1 if window is None else most_places(window, readers))
    shape = tree_shape(packing, most)
    given = window is None
    build = _Build(cpp_name(rows.dtype, "indices"), n, d, packing, shape, capacity, mode, window,
                   readers, listed)  # fmt: skip
    launches = _launches(build, place_name(rows))
    listing = _listing(build)
    with memory_of_graphs(rows):
        words, winners = empties(  # kept with the sites
            rows,
            ((2 * _cleared(shape, listing),), np.uint64),
            ((capacity,), np.int32) if given else None,
        )
        totals, status, indices, valid, inverse, held = empties(  # what they consist of
            rows,
            ((shape.levels,), np.int32),
            ((1,), np.int32),
            ((capacity, 1 + d), np.int32) if listed else None,
            ((capacity,), np.bool_) if listed else None,
            ((n,), np.int32) if listed and given else None,
            None if listed else ((n,), np.bool_),
        )
    launches.clear(words, winners, status)
    for level, (mark, rank_words) in enumerate(launches.levels):
        start, _ = shape.level(level)
        sums = words[2 * shape.words + level * _blocks(shape) :]
        mark(rows, count, words, status)
        rank_words(words[2 * start :], sums, totals)
    launches.place(rows, count, words, totals[-1:], status, indices, winners, valid, inverse, held)
    tree = Tree(words, shape, packing, None, capacity)
    sums = words[len(words) - listing :] if listing else None
    return Sites(tree, indices, totals[-1:], valid, winners, sums, inverse, held, status)


def tree_of(indices, count, packing):
    """Return the Tree of a list of sites in any order, and which rows hold a site: bool [rows].

    The first of equal sites counts.
    """
    found = distinct_sites(indices, packing, len(indices), count=count, listed=False)
    return found.tree._replace(order=found.winners), found.held


def find_rows(tree, target, count, window, readers, out=None):
    """Return which row of a tree's list each row of ``target`` reads: int32 [taps, M], or ``out``.

    ``target`` is int32 [M, 1 + d], of which ``count`` rows hold a site. With ``readers`` rows read
    what reads them through the window.
    """
    with memory_of_graphs(target):
        target = namespace(target).ascontiguousarray(target)
        rows = out
        if rows is None:
            rows = empty((math.prod(window[0]), len(target)), np.int32, target)
        launch = _finder(
            len(target), target.shape[1] - 1, tree.rows, tree.packing, tree.shape, window, readers,
            place_name(target),
        )  # fmt: skip
        launch(target, count, tree.words, tree.order, rows)
    return rows


def transpose_rows(rows, out):
    """Write the rows of a kernel map in the other direction: int32 [taps, sources]."""
    if is_cupy(out):
        # -1, in a tenth of the time that fill takes
        kernels.enqueue(out.data.memset_async, 0xFF, out.nbytes)
    else:
        out.fill(-1)
    _transposer(*rows.shape, out.shape[1], place_name(rows))(rows, out)


def _copy_first(out, rows):
    """Copy the first of some rows: in a fifth of the time that a copy of a slice takes the host."""
    if is_cupy(out):
        kernels.copy_first(LISTS, out, rows)
    else:
        out[...] = rows[: len(out)]


def _blocks(shape):
    """Return the most thread blocks that rank the words of a level."""
    return -(-max(shape.top, shape.level_words) // _WORDS)


def _listing(build):
    """Return how many sums are needed to list the rows of each site, if they are counted."""
    return thread_blocks(build.capacity) if build.mode in _COUNTED else 0


def _cleared(shape, listing):
    """Return how many words are cleared: those of a tree, and blocks' sums.

    These are of each level, and the last ones for ``listing``.
    """
    return shape.words + -(-(shape.levels * _blocks(shape) + listing) // 2)


class _Build(NamedTuple):
    """What the launches that make a tree depend on."""

    element: str
    rows: int
    dimensions: int
    packing: Packing
    shape: TreeShape
    capacity: int
    mode: str
    window: tuple | None
    readers: bool
    listed: bool


class _Launches(NamedTuple):
    clear: Any
    levels: tuple  # of (mark, rank)
    place: Any


@functools.lru_cache(maxsize=1024)
def _launches(build, place):
    """Prepare the launches that make a tree on the current device."""
    d, shape, given = build.dimensions, build.shape, build.window is None
    window = _NO_WINDOW if given else build.window
    candidates = _candidates(window, build.readers)
    each = math.prod(candidates)
    kind = "GIVEN" if given else "READERS" if build.readers else "READ"
    grid = -(-build.rows * each // 256)
    sizes = (build.rows, each, shape.top, shape.level_words, shape.levels)
    geometry = _grid_scalars(build.packing) + _window_scalars(window) + candidates

    def prepare(kernel, template, blocks, pointers, scalars, persistent=True):
        return kernels.prepare(
            LISTS, kernel, template, blocks, 256, pointers, scalars, persistent=persistent,
            dependent=True,
        )  # fmt: skip

    cleared, winners = _cleared(shape, _listing(build)), build.capacity if given else 0
    blocks = -(-max(cleared, winners) // 256)
    clear = prepare("clear_sites", ("uint4",), blocks, 3, (cleared, winners))
    levels = []
    for level in range(shape.levels):
        most = shape.level(level)[1]
        twice = int(build.mode == "unique" and level == shape.levels - 1)
        template, blocks = (build.element, d, kind), -(-most // _WORDS)
        levels.append((
            prepare("mark_sites", template, grid, 4, (*sizes, level, twice, *geometry)),
            prepare("rank_words", (_WORDS,), blocks, 3, (level, most), persistent=False),
        ))  # fmt: skip
    chosen = 2 if build.mode in _COUNTED else int(build.mode == "last")
    scalars = (*sizes, build.capacity, chosen, *geometry)
    placed = max(grid, -(-build.capacity // 256)) if build.listed else grid
    return _Launches(clear, tuple(levels), prepare("place_sites", template, placed, 10, scalars))


@functools.lru_cache(maxsize=1024)
def _finder(targets, dimensions, sources, packing, shape, window, readers, place):
    """Prepare the launch of find_rows on the current device."""
    scalars = (
        targets, sources, shape.top, shape.level_words, shape.levels, *_grid_scalars(packing),
        *_window_scalars(window),
    )  # fmt: skip
    if readers or not _by_leaves(targets, packing, window):
        template, grid = (dimensions, readers), (-(-targets // 256), math.prod(window[0][:-1]))
        return kernels.prepare(_MAPS, "find_rows", template, grid, 256, 5, scalars, dependent=True)
    slices, grid = 3 if targets < 2**18 and dimensions < 4 else 2, -(-targets // _NEAR_ROWS)
    template, needed = (dimensions, _NEAR_ROWS, slices), 16 * _NEAR_ROWS << dimensions
    return kernels.prepare(
        _MAPS, "find_near_rows", template, grid, _NEAR_ROWS * slices, 5, scalars,
        shared=current_device().spread_evenly(needed, grid), dependent=True,
    )  # fmt: skip


def _by_leaves(targets, packing, window):
    """Whether rows are found by the words of all leaves that a window may meet.

    The places that a row reads must lie in two leaves on each axis at most, of two axes or more.
    """
    kernel, _, dilations, _ = window
    several = len(kernel) > 1 and math.prod(kernel) > _MANY_PLACES << len(kernel)
    axes = zip(kernel, dilations, packing.low_bits[1:], strict=True)
    near = all((k - 1) * dilation <= 1 << low for k, dilation, low in axes)
    return targets >= _MANY_ROWS and several and near


@functools.lru_cache(maxsize=1024)
def _transposer(taps, targets, sources, place):
    """Prepare the launch of transpose_rows on the current device."""
    grid = (-(-targets // 256), taps)
    sizes = (targets, sources)
    return kernels.prepare(
        _MAPS, "transpose_rows", ("int",), grid, 256, 2, sizes, dependent=True
    )


def _candidates(window, readers):
    """Return how many places of each of four axes kernels try for a row and a window."""
    axes = zip(*window[:3], strict=True)
    tried = tuple(-(-k // s) if readers and dilation == 1 else k for k, s, dilation in axes)
    return tried + (1,) * (_MOST_AXES - len(tried))


def most_places(window, readers):
    """Return how many places at most a window relates to one."""
    if not readers:
        return math.prod(window[0])
    axes = zip(*window, strict=True)
    return math.prod(-(-k * math.gcd(s, dilation) // s) for k, s, dilation, _ in axes)


@functools.lru_cache(maxsize=1024)
def _grid_scalars(packing):
    """Return limits and numbers of leaves, one of each for the sample and four axes."""
    ones = (1,) * (_MOST_AXES + 1 - len(packing.bits))
    return (*packing.limits, *ones, *_leaves(packing), *ones)


@functools.lru_cache(maxsize=1024)
def _window_scalars(window):
    """Return four numbers of kernel, stride, dilation and padding each."""
    return tuple(
        value
        for given, default in zip(window, _NO_WINDOW, strict=True)
        for value in (*given, *default[len(given) :])
    )
