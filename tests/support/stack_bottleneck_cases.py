"""Pre-activation units of stacks for tests: sizes, the result by definition, and a run.

Whole numbers small enough that every sum is exact and no value is rounded, so that results are
compared bit for bit. What must not be read is NaN.
"""

import numpy as np

from sbnet_cupy.block_sparse.stack.stack_bottleneck import (
    prepare_bottleneck_pack,
    prepare_stack_bottleneck,
)
from sbnet_cupy.block_sparse.stack.stack_bottleneck_plan import StackBottleneck
from support import conv_oracles as oracles
from support.stack_on_host import UNWRITTEN, loaded, stored
from support.unit_cases import Case


def unit_of(blocks, element="Half", channels=96, width=24, expected=None):
    """Return the StackBottleneck of some blocks."""
    rows = len(blocks.table()[1])
    return StackBottleneck(
        element, rows, blocks.images, blocks.grid_size, blocks.block, blocks.image, channels, width,
        rows if expected is None else expected,
    )  # fmt: skip


def arrays_of(unit, seed=0):
    """Return x, three kernels and six tables, as float64."""
    case = Case(
        image=(unit.rows, *unit.block, unit.channels), middle=unit.width, dtype="float64", seed=seed
    )
    return case.arrays()


def by_definition(unit, blocks, x, weights, listed):
    """Compute on whole images that are 0 outside active blocks; return the listed rows."""
    active = blocks.to_image(np.ones((len(listed), *unit.block, 1)), listed)
    image = t = blocks.to_image(x, listed)
    for w, scale, shift in zip(weights[:3], weights[3::2], weights[4::2], strict=True):
        t = oracles.conv2d(np.maximum(t * scale + shift, 0) * active, w)
    down, across = unit.block
    rows = np.zeros((len(listed), down, across, unit.channels))
    for row, (n, hi, wi) in enumerate(listed):
        block = (image + t)[n, hi * down :, wi * across :][:down, :across]
        rows[row, : block.shape[0], : block.shape[1]] = block
    return rows


def launch(unit, arrays, table, out, plan=None, settled=False, clear_rows=False, xp=np):
    """Pack and run on arrays of NumPy (the shim) or CuPy; ``out`` is one of NumPy."""
    x, *weights = arrays
    given = [stored(a, unit.element) for a in (x, *weights[:3])]
    x, *kernels = map(xp.asarray, given)
    tables = [xp.asarray(a.astype(np.float32)) for a in weights[3:]]
    packed = prepare_bottleneck_pack(unit, plan)(*kernels, *tables)
    run = prepare_stack_bottleneck(unit, settled, clear_rows, plan)
    result = xp.asarray(out.copy())
    run(x, packed, *map(xp.asarray, table), result)
    return result if xp is np else result.get()


def check(unit, blocks, plan=None, settled=False, clear_rows=False, xp=np):
    """Run the kernel and compare every bit."""
    table = blocks.table()
    count, listed = int(table[0][0]), table[1][: int(table[0][0])]
    x, *weights = arrays_of(unit)
    expected = by_definition(unit, blocks, x, weights, listed)
    blocks.spoil(x, listed, np.nan)
    before = stored(np.full(x.shape, UNWRITTEN), unit.element)
    out = launch(unit, (x, *weights), table, before, plan, settled, clear_rows, xp)
    np.testing.assert_array_equal(loaded(out[:count], unit.element), expected)
    np.testing.assert_array_equal(
        out[count:], np.zeros_like(before[count:]) if clear_rows else before[count:]
    )
