"""stack_sum: cases of its kernel, compared with loops, and with the kernels of one layer each."""

import math

import numpy as np

from sbnet_cupy.block_sparse.stack.stack_affine import StackAffine, prepare_stack_affine
from sbnet_cupy.block_sparse.stack.stack_concat import prepare_stack_concat
from sbnet_cupy.block_sparse.stack.stack_sum import StackSum, prepare_stack_sum

from .exhaustive import pairs
from .stack_on_host import ACTIVATIONS, UNWRITTEN, Blocks, loaded, stored

ONE = (1, 1)
# Blocks of the result, and by which factors each stack is enlarged to them.
SHAPES = [
    ((8, 8), (ONE, (2, 2), (4, 4), (8, 8))), ((8, 8), (ONE, (2, 2))),
    ((4, 4), ((4, 4), ONE, (2, 2))), ((6, 4), ((3, 1), (2, 4), ONE)),
    ((4, 2), (ONE, ONE, ONE, ONE)), ((2, 6), ((2, 3), (1, 2))), ((1, 1), (ONE, ONE, ONE)),
    ((4, 4), (ONE, (4, 4), ONE, (4, 4))),
]  # fmt: skip
# Channels, and those ahead of them and behind in the memory of each stack in turn, then of y.
LAYOUTS = [
    (16, ()), (24, ()), (5, ()), (12, (None, (8, 4))), (16, ((8, 8), None, (0, 8), None, (16, 8))),
    (6, ((2, 0), (1, 1), None, (0, 2), (3, 3))), (16, (None, None, None, None, (8, 0))),
]  # fmt: skip
CASES = pairs(["Half", "BFloat16", "float"], SHAPES, LAYOUTS, list(ACTIVATIONS), [False, True])


def rounded(values, element):
    """Return float32 values rounded to an element, as float32."""
    return loaded(stored(values.astype(np.float64), element), element).astype(np.float32)


def summed(stacks, factors, block, count, activation, element):
    """Return the sum by its formula, pixel by pixel, as float64."""
    y = np.zeros((count, *block, stacks[0].shape[3]))
    for m, i, j in np.ndindex(count, *block):
        value = None
        for stack, (down, across) in zip(stacks, factors, strict=True):
            pixel = stack[m, i // down, j // across].astype(np.float32)
            value = pixel if value is None else rounded(value, element) + pixel
        y[m, i, j] = rounded(ACTIVATIONS[activation](value), element)
    return y


def widened(array, beside, fill):
    """Return a stack that has an array's channels among others; without ``beside`` a copy."""
    return np.pad(array, ((0, 0),) * 3 + (tuple(beside or (0, 0)),), constant_values=fill)


def from_first(stack, beside):
    """Return the memory of a stack from the first of its channels that are read on."""
    return stack.reshape(-1)[(beside or (0, 0))[0] :]


def check(case, xp=np):
    """Run a case on arrays of NumPy or CuPy; what must not be read is NaN."""
    element, (block, factors), (channels, besides), activation, settled = case
    rng = np.random.default_rng(channels)
    bin_counts, indices, _ = Blocks(block=block, image=(3 * block[0] - 1, 2 * block[1])).table()
    count, rows = int(bin_counts[0]), len(indices)
    besides = dict(enumerate(besides))
    *its, out_beside = [besides.get(k) for k in [*range(len(factors)), 4]]
    stacks = []
    for down, across in factors:
        shape = rows, block[0] // down, block[1] // across, channels
        stacks.append(stored(rng.normal(0, 2, shape), element))
        stacks[-1][count:] = stored(np.array(np.nan), element)
    nan, before = (stored(np.array(n), element) for n in (np.nan, UNWRITTEN))
    y = widened(np.full((rows, *block, channels), before), out_beside, before)
    given = [xp.asarray(widened(s, b, nan)) for s, b in zip(stacks, its, strict=True)]
    itemsize, out = stacks[0].itemsize, xp.array(y)  # a copy
    total = StackSum(
        element, itemsize, rows, block, channels, factors, activation,
        math.gcd(16, *(b[0] * itemsize for b in (*its, out_beside) if b)),
        tuple(b and channels + sum(b) for b in its), out_beside and channels + sum(out_beside),
    )  # fmt: skip
    parts = [from_first(s, b) for s, b in zip(given, its, strict=True)]
    none = [None] * (4 - len(parts))
    lists = xp.asarray(bin_counts), from_first(out, out_beside)
    prepare_stack_sum(total, settled)(*parts, *none, *lists)
    out = out if xp is np else xp.asnumpy(out)
    y[:count, ..., (out_beside or (0, 0))[0] :][..., :channels] = stored(
        summed([loaded(s, element) for s in stacks], factors, block, count, activation, element),
        element,
    )
    assert np.array_equal(out, y)
    check_apart(total, stacks, bin_counts, indices, out, out_beside, xp)


def check_apart(total, stacks, bin_counts, indices, out, out_beside, xp):
    """Compare a sum with the results of kernels that enlarge a stack, or add two."""
    first, rows, count = (out_beside or (0, 0))[0], total.rows, int(bin_counts[0])
    lists = xp.asarray(bin_counts), xp.asarray(indices)
    y = None
    for k, (stack, factors) in enumerate(zip(stacks, total.factors, strict=True)):
        x = xp.asarray(stack)
        if factors != ONE:
            small, x = x, xp.zeros((rows, *total.block, total.channels), x.dtype)
            sizes = rows, total.block, (total.channels,), total.element_bytes
            enlarged = prepare_stack_concat(*sizes, (), (0,), factors, clear_rows=False)
            enlarged(small, lists[0], x)
        if y is not None:
            last = k + 1 == len(stacks)
            sizes = StackAffine(
                total.element, total.element_bytes, *[total.element] * 4, rows, 1, total.block,
                total.channels, False, total.activation if last else 0,
            )  # fmt: skip
            other, x = x, xp.zeros_like(x)
            prepare_stack_affine(sizes)(y, None, None, other, None, *lists, x, None)
        y = x
    y = y if xp is np else xp.asnumpy(y)
    out = out[:count, ..., first : first + total.channels]
    assert out.tobytes() == y[:count].tobytes()
