"""stack_concat's kernel, on the host shim and on a GPU."""

import numpy as np
import pytest

from sbnet_cupy.block_sparse.stack import stack_concat
from support import stack_on_host
from support.assertions import assert_same, to_numpy
from support.exhaustive import thinned_product

JOINED = [
    # channels, which are unfolded, which enlarged, factors
    ((8, 16), (0,), (), (2, 2)), ((16,), (0,), (), (2, 3)), ((3, 1, 4), (), (), (1, 1)),
    ((8, 8, 24, 8), (1, 3), (0,), (1, 2)), ((8, 16, 8, 8, 32, 8, 8, 8), (2,), (), (2, 1)),
    ((4, 2, 6, 2, 2), (), (), (1, 1)), ((16, 8), (), (0,), (2, 2)), ((16,), (), (0,), (4, 2)),
    ((3, 5, 1), (), (2, 0), (2, 3)), ((8, 24, 8), (2,), (0, 1), (2, 1)),
]  # fmt: skip


CASES = thinned_product(5, JOINED, ["f2", "f4", "f8"], [False, True], [False, True])


@pytest.mark.parametrize("joined, dtype, parts, clear_rows", CASES, ids=str)
def test_concatenation(monkeypatch, require, joined, dtype, parts, clear_rows):
    """Channels side by side, those of unfolded stacks as pixels, pixels of enlarged ones repeated.

    Rows past the count are apart. Without ``clear_rows`` the result is a part of another stack, in
    which the last stack comes first, with other channels between them.
    """
    require("g++")
    stack_on_host.use_shim(monkeypatch, stack_on_host.AMPERE)
    check(np, joined, dtype, parts, clear_rows)


@pytest.mark.gpu
@pytest.mark.parametrize("joined, dtype, parts, clear_rows", CASES, ids=str)
def test_on_a_gpu(require, joined, dtype, parts, clear_rows):
    check(require("gpu"), joined, dtype, parts, clear_rows)


def check(xp, joined, dtype, parts, clear_rows):
    """Join stacks; of ``parts`` each is some channels of another, but where it is unfolded."""
    channels, unfolded, enlarged, factors = joined
    dtype = np.dtype(dtype)
    rng, rows, count, block = np.random.default_rng(0), 7, 5, (4, 6)
    inputs, pitches, expected = [], [], []
    for k, c in enumerate(channels):
        fh, fw = factors if k in unfolded else (1, 1)
        small = factors if k in (*unfolded, *enlarged) else (1, 1)
        here = tuple(n // f for n, f in zip(block, small, strict=True))
        x = rng.standard_normal((rows, *here, fh, fw, c)).astype(dtype)
        x_k = x.reshape(*x.shape[:3], fh * fw * c)
        before, after = (8, 16) if parts and k not in unfolded else (0, 0)
        whole = np.full((*x_k.shape[:3], before + x_k.shape[3] + after), np.nan, dtype)
        own = slice(before, before + x_k.shape[3])
        whole[..., own] = x_k
        inputs.append(xp.asarray(whole).reshape(-1)[before:])  # from its first channel on
        pitches.append(whole.shape[3] if k not in unfolded else c)
        if k in enlarged:
            x = np.broadcast_to(x, (rows, *here, *factors, c))
        expected.append(x.transpose(0, 1, 3, 2, 4, 5).reshape(rows, *block, c))
    expected = np.concatenate(expected, axis=3)
    part_of = firsts = None
    if clear_rows:
        expected[count:] = 0
    else:
        part_of, firsts = expected.shape[3] + 4 * len(channels) + 8, []
        whole = np.full((*expected.shape[:3], part_of), 7, dtype)
        for k, c in enumerate(channels):
            at = sum(channels[:k])
            firsts.append(sum(channels[k + 1 :]) + 4 * (len(channels) - 1 - k))
            own = slice(8 + firsts[k], 8 + firsts[k] + c)
            whole[:count, ..., own] = expected[:count, ..., at : at + c]
        expected = whole
    run = stack_concat.prepare_stack_concat(
        rows, block, channels, dtype.itemsize, unfolded, enlarged, factors, pitches,
        clear_rows=clear_rows, part_of=part_of, firsts=firsts,
    )  # fmt: skip
    out = xp.full(expected.shape, 7, dtype)
    its = out if part_of is None else out.reshape(-1)[8:]
    run(*inputs, xp.asarray(np.array([count], np.int32)), its)
    assert_same(to_numpy(out), expected)
