"""Blocks with the pixels around them, by a kernel on a GPU, with all their derivatives."""

import functools

from ..block_sparse.stack.stack_halo import STACK_HALO, halo_axes
from ._derivatives import linear, transposed
from ._kernel_calls import called, kernel_plan, on_gpu
from ._kernel_memory import spec
from ._places import Places, table_of


def fetch(x, table, down, across, fill=0):
    """Return the pixels that two Axis name, around each block, as the core's ``fetch``."""
    axes = down, across
    pads = tuple(
        (max(-axis.first, 0), max(axis.first + axis.count - b, 0))
        for axis, b in zip(axes, table.block_size, strict=True)
    )
    arrays, options = (x, *table._arrays()), (table.block_size, table.image_size, pads, fill)
    if kernel_plan(STACK_HALO, [*map(spec, arrays), None], options) is None:
        return Places(table).fetch(x, *axes, fill)
    halo = _halo(*arrays, how=options)
    starts = (axis.first + before for axis, (before, _) in zip(axes, pads, strict=True))
    lines = (slice(n, n + axis.count) for n, axis in zip(starts, axes, strict=True))
    return halo[:, *lines]


def _by_xla(x, *table, how):
    *stage, pads, fill = how
    return Places(table_of(table, stage)).fetch(x, *halo_axes(stage[0], pads), fill)


def _compute(x, *table, how):
    by_xla = functools.partial(_by_xla, how=how)
    return on_gpu(called(STACK_HALO, how), by_xla, x, *table)


def _tangent(dx, *table, how):
    return _halo(dx, *table, how=_linear(how))


def _transposed(ct, x, *table, how):
    return transposed(lambda dx: _by_xla(dx, *table, how=_linear(how)), x, ct)


def _linear(how):
    """Return the options of the tangent: what was -inf does not change."""
    *others, fill = how
    return (*others, 0 if fill == "-inf" else fill)


def _shape(x, *_, how):
    (bh, bw), _, ((top, bottom), (left, right)), _ = how
    return x.shape[0], top + bh + bottom, left + bw + right, x.shape[3]


_halo = linear("stack_halo", _compute, _shape, _tangent, _transposed)
