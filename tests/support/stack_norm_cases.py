"""The batch norm of a stack in training by kernels, on the host shim or a GPU.

Statistics are compared within the bound of their sums, what follows from them bit by bit.
"""

import numpy as np

from sbnet_cupy.block_sparse.stack.stack_batch_norm import (
    before_activation,
    pixels_inside,
    stack_batch_norm,
)
from sbnet_cupy.block_sparse.stack.stack_batch_norm_grad import stack_batch_norm_grad
from sbnet_cupy.core.arrays import compute_dtype
from sbnet_cupy.dense.activation import apply_activation
from support import stack_cases
from support.assertions import assert_close, assert_same
from support.strategies import BFLOAT16

DTYPES = [np.dtype("f2"), BFLOAT16, np.dtype("f4"), np.dtype("f8")]


def draw_norm(data, channels, dtype):
    """Draw a table, images, a stack, and parameters; the means are far from 0."""
    blocks, rng = data.draw(stack_cases.blocks()), data.draw(stack_cases.generators())
    table = blocks.table()
    images = blocks.images(table, channels, rng, np.float64) + np.resize([0, 8, -3], channels)
    images = np.where(blocks.mask(table), images, 0).astype(dtype)
    parameters = rng.uniform(0.5, 1.5, (2, channels))
    return blocks, table, images, rng, parameters


def drawn(dtype, sizes, corrupt):
    """Return blocks, their table, and stacks of x, a residual and a gradient."""
    channels, block, size, spare = sizes
    rng = np.random.default_rng(3)
    shape = (2, *(-(-n // b) for n, b in zip(size, block, strict=True)))
    blocks = stack_cases.Blocks(rng.random(shape) < 0.7, block, size, spare)
    table = blocks.table()
    stacks = []
    for away in (5.0, 0.0, 0.0):
        images = blocks.images(table, channels, rng) + away
        stacks.append(blocks.stack(images.astype(dtype), table))
    if corrupt:
        table.active_block_indices[1] = 2, 0, 0
    return table, stacks, rng


def check(norm, gradient, by_numpy, dtype, sizes, activation, parameters, corrupt=False):
    """Compare ``stack_batch_norm`` and its gradient by kernels with the NumPy bodies.

    ``by_numpy`` calls a function so that these compute; ``parameters`` is a dtype or None.
    """
    table, (x, residual, grad), rng = drawn(dtype, sizes, corrupt)
    residual = residual if activation in (None, "relu") and sizes[0] != 3 else None
    wide, channels = compute_dtype(dtype), sizes[0]
    kept = np.dtype(parameters or wide)
    weight, bias, mean, variance = rng.uniform(0.5, 1.5, (4, channels)).astype(kept)
    if parameters is None:
        weight = bias = mean = variance = None
    running = [None if mean is None else [t.copy() for t in (mean, variance)] for _ in range(2)]
    options = {"residual": residual, "activation": activation, "eps": 1e-3, "momentum": 0.25}
    names = [
        {} if own is None else dict(zip(("running_mean", "running_var"), own, strict=True))
        for own in running
    ]
    _, expected = by_numpy(stack_batch_norm, x, table, weight, bias, **options, **names[0])
    y, statistics = norm(x, table, weight, bias, **options, **names[1])
    number = expected[-1]
    assert statistics[-1] == number
    pixels = pixels_inside(x, table)
    values = np.where(pixels, x.astype(np.float64), 0)
    # A pixel's difference from another is rounded, then its square, and some sums of a thread.
    terms, rows = 64, expected[:-1].astype(np.float64).reshape(5, -1)
    largest = abs(values).max((0, 1, 2)) + 1
    relative = [largest, (2 * largest) ** 2]
    for row, size in enumerate(relative):
        assert_close(statistics[:-1].reshape(5, -1)[row], rows[row], terms=terms, dtype=wide,
                     magnitude=size)  # fmt: skip
    # What follows from them, of the kernel's own numbers.
    found = statistics[:-1].astype(np.float64).reshape(5, -1)
    scale = (1 if weight is None else weight.astype(np.float64)) / np.sqrt(found[1] + 1e-3)
    assert_close(found[3], scale, terms=8, dtype=wide, magnitude=scale)
    shift = (0 if bias is None else bias.astype(np.float64)) - found[0] * scale
    assert_close(found[4], shift, terms=8, dtype=wide, magnitude=abs(found[0] * scale) + 2)
    if mean is not None:
        after = [0.75 * mean.astype(np.float64) + 0.25 * found[0],
                 0.75 * variance.astype(np.float64) + 0.25 * found[1] * number / max(number - 1, 1)]
        for actual, value in zip(running[1], after, strict=True):
            assert_close(actual, value, terms=8, dtype=wide, magnitude=abs(value) + 1)
    t = before_activation(x, statistics, residual)
    at = abs(np.where(pixels, t, 0)).astype(np.float64) + 1
    t = np.where(pixels, apply_activation(t.copy(), activation), wide.type(0))
    if activation in (None, "relu"):
        assert_same(y, t.astype(dtype), signed_zero=False)
    else:
        assert_close(y, t.astype(np.float64), terms=32, dtype=wide, magnitude=at)
    # Gradients of the kernel's statistics.
    options = {"y": None if residual is None else y, "activation": activation}
    actual = gradient(grad, x, table, statistics, **options, dtype=kept)
    grad, x = (t.astype(wide) for t in (grad, x))
    expected = by_numpy(stack_batch_norm_grad, grad, x, table, statistics, **options)
    g = abs(np.where(pixels, grad.astype(np.float64), 0)) * 2
    hat = (abs(values) + abs(found[0])) * found[2]
    sums, products = (s.sum((0, 1, 2)) for s in (g, g * hat))
    count = max(number, 1)
    bounds = [
        abs(found[3]) * (g + sums / count + hat * products / count), products, sums, g
    ]  # fmt: skip
    for name, value, like, size in zip(actual._fields, actual, expected, bounds, strict=True):
        if name == "residual" and activation in (None, "relu"):
            assert_same(value, like.astype(dtype), signed_zero=False)
        else:
            assert_close(value, like.astype(np.float64), terms=64, dtype=wide, magnitude=size)
        if value.ndim == 4:
            assert not np.where(pixels, 0, value.astype(np.float64)).any()
