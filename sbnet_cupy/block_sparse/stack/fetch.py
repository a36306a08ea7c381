"""fetch: pixels of a stack around the corner of each block, by the body that is best for them."""

import numpy as np

from ...core.arrays import empty, is_cupy
from .block_table import split_table
from .neighbours import fetch_by_number, fetch_by_slices
from .stack_halo import STACK_HALO


def fetch(x, places, down, across, out, fill=0):
    """Write the pixels that two Axis name, around each block, to ``out`` [m, P, Q, C].

    What is in no active block is 0; outside the image is ``fill``: a number, or "edge" for the
    nearest pixel of the image (the steps are 1 then; where a lattice misses the image there is
    none, and nothing is defined). ``out`` may be of a wider dtype. Rows that are no block are 0.
    """
    if not out.size:
        return
    if not places.table.grid.size:
        out[...] = np.zeros((), out.dtype) if not is_cupy(out) else 0
        return
    body = fetch_by_slices
    if is_cupy(x):
        whole = len(places) == len(x) and is_rim(places.table, down, across)
        body = fetch_rim if whole else fetch_by_number
    body(x, places, (down, across), out, fill)


def is_rim(table, down, across):
    """Whether two Axis name whole blocks with what is around them."""
    return all(
        axis.step == 1 and axis.first <= 0 and axis.first + axis.count >= size
        for axis, size in zip((down, across), table.block_size, strict=True)
    )


def fetch_rim(x, places, axes, out, fill):
    """CuPy: whole blocks with a rim, as stack_halo reads them."""
    arrays, sizes = split_table(places.table)
    same = out.dtype == x.dtype and out.flags.c_contiguous
    target = out if same else empty(out.shape, x.dtype, x)
    block = places.table.block_size
    pads = tuple((-a.first, a.first + a.count - b) for a, b in zip(axes, block, strict=True))
    fill = "-inf" if fill == -np.inf else fill
    STACK_HALO((x, *arrays, target), (*sizes, pads, fill))
    if not same:
        out[...] = target
