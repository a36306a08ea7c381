"""Residual units of stacks for tests: sizes, weights, the result by definition, and a run.

Whole numbers small enough that every sum is exact and no value is rounded, so that results are
compared bit for bit. What must not be read is NaN.
"""

import numpy as np

from sbnet_cupy.block_sparse.stack.stack_launch import prepare_stack_pack
from sbnet_cupy.block_sparse.stack.stack_unit import prepare_stack_unit
from sbnet_cupy.block_sparse.stack.stack_unit_plan import StackUnit
from support.stack_on_host import UNWRITTEN, loaded, stored


def unit_of(blocks, bottleneck=True, element="Half", channels=128, width=64, out=128, inner=1,
            activation=1):  # fmt: skip
    """Return the StackUnit of some blocks."""
    rows = len(blocks.table()[1])
    return StackUnit(
        element, rows, blocks.images, blocks.grid_size, blocks.block, blocks.image, channels, width,
        out, bottleneck, inner, activation, rows,
    )  # fmt: skip


def weights_of(unit, rng):
    """Return (w, scale, bias) of each layer, of few and small numbers so that sums are exact."""
    made = []
    for layer in unit.layers():
        shape = (*layer.kernel, layer.channels, layer.channels_out)
        w = rng.integers(-1, 2, shape) * (rng.random(shape) < 8 / np.prod(shape[:3]))
        scale = rng.choice([0.5, 1, 2], layer.channels_out).astype(np.float32)
        bias = rng.integers(-3, 4, layer.channels_out).astype(np.float32)
        made.append((w.astype(np.float64), scale, bias))
    return made


def by_definition(unit, blocks, x, weights, residual, listed):
    """Compute on whole images that are 0 outside active blocks; return the listed rows."""
    active = blocks.to_image(np.ones((len(listed), *unit.block, 1)), listed)
    image = blocks.to_image(x, listed)
    for number, (layer, (w, scale, bias)) in enumerate(zip(unit.layers(), weights, strict=True)):
        r, s = layer.pads
        padded = np.pad(image, ((0, 0), (r, r), (s, s), (0, 0)))
        result = np.zeros((*image.shape[:3], layer.channels_out))
        for i, j in np.ndindex(layer.kernel):
            result += padded[:, i:, j:][:, : image.shape[1], : image.shape[2]] @ w[i, j]
        result = result * scale + bias
        if number + 1 == len(weights) and residual is not None:
            result = result + blocks.to_image(residual, listed)
        if layer.activation:
            result = np.maximum(result, 0)
        image = loaded(stored(result * active, unit.element), unit.element)
    down, across = unit.block
    rows = np.zeros((len(listed), down, across, unit.channels_out))
    for row, (n, hi, wi) in enumerate(listed):
        block = image[n, hi * down :, wi * across :][:down, :across]
        rows[row, : block.shape[0], : block.shape[1]] = block
    return rows


def check(unit, blocks, plan, with_residual=True, settled=False, clear_rows=False, xp=np):
    """Run the kernel on arrays of NumPy (the shim) or CuPy, and compare every bit."""
    rng = np.random.default_rng(3)
    bin_counts, indices, grid = blocks.table()
    count = int(bin_counts[0])
    x = rng.integers(-2, 3, (len(indices), *unit.block, unit.channels)).astype(np.float64)
    residual = rng.integers(-4, 5, (len(indices), *unit.block, unit.channels_out)).astype(float)
    weights = weights_of(unit, rng)
    expected = by_definition(
        unit, blocks, x, weights, residual if with_residual else None, indices[:count]
    )
    blocks.spoil(x, indices[:count], np.nan)
    residual[count:] = np.nan
    packed = [
        prepare_stack_pack(layer, "HWIO")(*map(xp.asarray, (stored(w, unit.element), scale, bias)))
        for layer, (w, scale, bias) in zip(unit.layers(), weights, strict=True)
    ]
    before = stored(np.full(residual.shape, UNWRITTEN), unit.element)
    out, given = xp.asarray(before.copy()), xp.asarray(stored(x, unit.element))
    addend = xp.asarray(stored(residual, unit.element)) if with_residual else None
    run = prepare_stack_unit(unit, settled, clear_rows, plan)
    packed += [None] * (3 - len(packed))
    run(given, *packed, addend, *map(xp.asarray, (bin_counts, indices, grid)), out)
    out = out if xp is np else out.get()
    np.testing.assert_array_equal(loaded(out[:count], unit.element), expected)
    np.testing.assert_array_equal(
        out[count:], np.zeros_like(before[count:]) if clear_rows else before[count:]
    )
