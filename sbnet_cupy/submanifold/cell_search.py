"""Where the sites are that a kernel reads, on NumPy: a search among sorted numbers of cells.

The cells of a box around all sites and windows are numbered row by row, so that every tap of a
kernel reads the number of its window plus a constant. The windows are sorted by these numbers, and
what a sorted list looks for in another is found fast. Taps that follow each other along the last
axis read neighbouring numbers: one search serves them all.
"""

import itertools
import math

import numpy as np

from .keys import sort_keys

_LARGEST = np.iinfo(np.int64).max


def read_rows(source, target, starts, offsets):
    """Return which row of the source each row of the target reads at each offset.

    Parameters
    ----------
    source, target : CoordinateMap
        Sites of NumPy arrays.
    starts : function
        Of a position array and its axis: where on this axis the window begins.
    offsets : sequence of tuple of int
        What is added to the beginning of the window, for each tap.

    Returns
    -------
    rows : int32 array, shape (taps, M), or None
        -1 for no row. None if cell numbers would need more than 63 bits.
    """
    rows = np.full((len(offsets), target.capacity), -1, np.int32)
    read, written = (np.flatnonzero(sites.valid()) for sites in (source, target))
    if not len(read) or not len(written) or not len(offsets):
        return rows
    at = [column[read].astype(np.int64) for column in source.indices.T]
    sample, *position = (column[written].astype(np.int64) for column in target.indices.T)
    begin = [sample, *(starts(column, axis) for axis, column in enumerate(position))]
    numbers = _numbers(at, begin, offsets)
    if numbers is None:
        return None
    cells, windows, steps = numbers
    order, cells = sort_keys(cells)
    first = np.append(True, cells[1:] != cells[:-1])  # of sites that are listed twice
    mirrors = _mirrors(offsets, begin, at) if source is target and first.all() else {}
    cells = np.append(cells[first], _LARGEST)
    read = np.append(read[order[first]], -1).astype(np.int32)
    order = windows.argsort()
    windows, written = windows[order], written[order]
    place = same = previous = None
    for tap, step in enumerate(steps):
        if tap in mirrors:
            continue  # what its opposite has found
        wanted = windows + step
        if previous is not None and step == previous + 1:
            place = place + same  # the next cell, if this one was found
        else:
            place = cells.searchsorted(wanted)
        same, previous = cells[place] == wanted, step
        rows[tap, written] = np.where(same, read[place], -1)
    for tap, opposite in mirrors.items():
        found = np.flatnonzero(rows[opposite] >= 0)
        rows[tap, rows[opposite, found]] = found
    return rows


def _numbers(at, begin, offsets):
    """Return the cell numbers of sites and of windows, and what each offset adds to the latter."""
    offsets = np.array([(0, *offset) for offset in offsets])
    reach = list(zip(offsets.min(axis=0).tolist(), offsets.max(axis=0).tolist(), strict=True))
    lows = [
        min(int(site.min()), int(window.min()) + least)
        for site, window, (least, _) in zip(at, begin, reach, strict=True)
    ]
    sizes = [
        max(int(site.max()), int(window.max()) + most) - low + 1
        for site, window, (_, most), low in zip(at, begin, reach, lows, strict=True)
    ]
    if math.prod(sizes) > _LARGEST:
        return None
    strides = list(itertools.accumulate(sizes[:0:-1], lambda a, b: a * b, initial=1))[::-1]

    def number(columns):
        return sum(
            (column - low) * stride
            for column, low, stride in zip(columns, lows, strides, strict=True)
        )

    return number(at), number(begin), (offsets @ np.array(strides)).tolist()


def _mirrors(offsets, begin, at):
    """Return the taps that read what an earlier tap reads, seen from the other end.

    On the same sites that is the tap of the opposite offset: where one site reads another, the
    other reads it there.
    """
    shift = [int(b[0]) - int(a[0]) for a, b in zip(at[1:], begin[1:], strict=True)]
    if any((b - a != by).any() for a, b, by in zip(at[1:], begin[1:], shift, strict=True)):
        return {}
    taps = {}
    found = {}
    for tap, offset in enumerate(offsets):
        moved = tuple(o + by for o, by in zip(offset, shift, strict=True))
        opposite = taps.get(tuple(-m for m in moved))
        if opposite is not None:
            found[tap] = opposite
        taps.setdefault(moved, tap)
    return found
