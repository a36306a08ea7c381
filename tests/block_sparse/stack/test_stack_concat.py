"""stack_concat's kernel, on the host shim."""

import numpy as np
import pytest

from sbnet_cupy.block_sparse.stack import stack_concat
from support import stack_on_host
from support.assertions import assert_same
from support.exhaustive import thinned_product

JOINED = [
    # channels, which are unfolded, factors
    ((8, 16), (0,), (2, 2)), ((16,), (0,), (2, 3)), ((3, 1, 4), (), (1, 1)),
    ((8, 8, 24, 8), (1, 3), (1, 2)),
]  # fmt: skip


@pytest.mark.parametrize(
    "joined, dtype, clear_rows",
    thinned_product(5, JOINED, ["f2", "f4", "f8"], [False, True]),
    ids=str,
)
def test_concatenation(monkeypatch, require, joined, dtype, clear_rows):
    """Channels side by side, and those of unfolded stacks as pixels; rows past the count apart."""
    require("g++")
    channels, unfolded, factors = joined
    stack_on_host.use_shim(monkeypatch, stack_on_host.AMPERE)
    dtype = np.dtype(dtype)
    rng, rows, count, block = np.random.default_rng(0), 7, 5, (4, 6)
    inputs, expected = [], []
    for k, c in enumerate(channels):
        fh, fw = factors if k in unfolded else (1, 1)
        x = rng.standard_normal((rows, block[0] // fh, block[1] // fw, fh, fw, c)).astype(dtype)
        inputs.append(np.ascontiguousarray(x.reshape(*x.shape[:3], fh * fw * c)))
        expected.append(x.transpose(0, 1, 3, 2, 4, 5).reshape(rows, *block, c))
    expected = np.concatenate(expected, axis=3)
    expected[count:] = 0 if clear_rows else 7
    run = stack_concat.prepare_stack_concat(
        rows, block, channels, dtype.itemsize, unfolded, factors, clear_rows=clear_rows
    )
    out = np.full_like(expected, 7)
    run(*inputs, np.array([count], np.int32), out)
    assert_same(out, expected)
