"""The original SBNet's own test cases, as exact tables, and one test for each of its known defects.

The tables are derived from the definitions: block (hi, wi) reads rows boffset + bstride * hi to
that + bsize, is active when it touches a set pixel, and yields its own outputs of the convolution
of an image of ones with a kernel of ones: the number of pixels under the kernel (9 inside, 6 on
an edge, 4 in a corner for 3x3), 0 where no block is active.
"""

from typing import NamedTuple

import numpy as np
import pytest

import sbnet_cupy
from sbnet_cupy import ShapeError, calc_block_params, reduce_mask, sparse_gather, sparse_scatter
from sbnet_cupy.core.sizes import output_size, padding_pairs
from support import oracles
from support.assertions import assert_same


class Case(NamedTuple):
    bsize: int
    stride: int
    padding: str
    rows: str  # of each block row, the input rows it reads (columns are alike)
    indices: list  # (hi, wi) of the active blocks
    y: list  # convolution of ones with ones where a block is active


# A 5x5 mask with pixels (1, 2) and (2, 0) set, a 3x3 kernel.
MASK5 = [
    [0, 0, 0, 0, 0],
    [0, 0, 1, 0, 0],
    [1, 0, 0, 0, 0],
    [0, 0, 0, 0, 0],
    [0, 0, 0, 0, 0],
]
CASES5 = [
    Case(
        3, 1, "SAME", "-1:2 0:3 1:4 2:5 3:6",
        [(0, 1), (0, 2), (0, 3),
         (1, 0), (1, 1), (1, 2), (1, 3),
         (2, 0), (2, 1), (2, 2), (2, 3),
         (3, 0), (3, 1)],
        [[0, 6, 6, 6, 0],
         [6, 9, 9, 9, 0],
         [6, 9, 9, 9, 0],
         [6, 9, 0, 0, 0],
         [0, 0, 0, 0, 0]],
    ),
    Case(
        3, 1, "VALID", "0:3 1:4 2:5",
        [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0)],
        [[9, 9, 9],
         [9, 9, 9],
         [9, 0, 0]],
    ),
    Case(
        4, 1, "SAME", "-1:3 1:5 3:7",
        [(0, 0), (0, 1), (1, 0), (1, 1)],
        [[4, 6, 6, 6, 0],
         [6, 9, 9, 9, 0],
         [6, 9, 9, 9, 0],
         [6, 9, 9, 9, 0],
         [0, 0, 0, 0, 0]],
    ),
    Case(
        4, 1, "VALID", "0:4 2:6",
        [(0, 0), (0, 1), (1, 0)],
        [[9, 9, 9],
         [9, 9, 9],
         [9, 9, 0]],
    ),
    Case(
        5, 1, "SAME", "-1:4 2:7",
        [(0, 0), (0, 1), (1, 0)],
        [[4, 6, 6, 6, 4],
         [6, 9, 9, 9, 6],
         [6, 9, 9, 9, 6],
         [6, 9, 9, 0, 0],
         [4, 6, 6, 0, 0]],
    ),
    Case(
        5, 1, "VALID", "0:5",
        [(0, 0)],
        [[9, 9, 9],
         [9, 9, 9],
         [9, 9, 9]],
    ),
    Case(
        3, 2, "SAME", "-1:2 1:4 3:6",
        [(0, 1), (1, 0), (1, 1)],
        [[0, 6, 0],
         [6, 9, 0],
         [0, 0, 0]],
    ),
    Case(
        3, 2, "VALID", "0:3 2:5",
        [(0, 0), (0, 1), (1, 0)],
        [[9, 9],
         [9, 0]],
    ),
    Case(
        5, 2, "SAME", "-1:4 3:8",
        [(0, 0)],
        [[4, 6, 0],
         [6, 9, 0],
         [0, 0, 0]],
    ),
    Case(
        5, 2, "VALID", "0:5",
        [(0, 0)],
        [[9, 9],
         [9, 9]],
    ),
]  # fmt: skip

# An 8x8 mask with the right end of five rows and pixel (2, 0) set, a 2x2 kernel.
MASK8 = [
    [0, 0, 0, 0, 0, 1, 1, 1],
    [0, 0, 0, 0, 0, 1, 1, 1],
    [1, 0, 0, 0, 0, 1, 1, 1],
    [0, 0, 0, 0, 0, 1, 1, 1],
    [0, 0, 0, 0, 0, 1, 1, 1],
    [0, 0, 0, 0, 0, 0, 0, 0],
    [0, 0, 0, 0, 0, 0, 0, 0],
    [0, 0, 0, 0, 0, 0, 0, 0],
]
CASES8 = [
    Case(
        5, 1, "VALID", "0:5 4:9",
        [(0, 0), (0, 1), (1, 1)],
        [[4, 4, 4, 4, 4, 4, 4],
         [4, 4, 4, 4, 4, 4, 4],
         [4, 4, 4, 4, 4, 4, 4],
         [4, 4, 4, 4, 4, 4, 4],
         [0, 0, 0, 0, 4, 4, 4],
         [0, 0, 0, 0, 4, 4, 4],
         [0, 0, 0, 0, 4, 4, 4]],
    ),
    Case(
        5, 1, "SAME", "0:5 4:9",
        [(0, 0), (0, 1), (1, 1)],
        [[4, 4, 4, 4, 4, 4, 4, 2],
         [4, 4, 4, 4, 4, 4, 4, 2],
         [4, 4, 4, 4, 4, 4, 4, 2],
         [4, 4, 4, 4, 4, 4, 4, 2],
         [0, 0, 0, 0, 4, 4, 4, 2],
         [0, 0, 0, 0, 4, 4, 4, 2],
         [0, 0, 0, 0, 4, 4, 4, 2],
         [0, 0, 0, 0, 2, 2, 2, 1]],
    ),
]  # fmt: skip
TABLES = [(MASK5, 3, case) for case in CASES5] + [(MASK8, 2, case) for case in CASES8]
tables = pytest.mark.parametrize(
    ("mask", "k", "case"),
    TABLES,
    ids=[f"{len(m)}x{len(m)}-b{c.bsize}-k{k}-s{c.stride}-{c.padding}" for m, k, c in TABLES],
)


def blocks_of_case(xp, mask, k, case):
    """Block parameters and active blocks of a table, from TensorFlow's spelling of the sizes."""
    mask = np.array([mask], np.float32)
    params = calc_block_params(
        [1, *mask.shape[1:], 1],
        [1, case.bsize, case.bsize, 1],
        [k, k, 1, 1],
        [1, case.stride, case.stride, 1],
        case.padding,
    )
    active = reduce_mask(
        xp.asarray(mask), params.bcount, bsize=params.bsize, boffset=params.boffset,
        bstride=params.bstride,
    )  # fmt: skip
    return mask, params, active


@tables
def test_block_rows(xp, mask, k, case):
    _, params, _ = blocks_of_case(xp, mask, k, case)
    for axis in (0, 1):
        first = range(params.bcount[axis])
        starts = [params.boffset[axis] + params.bstride[axis] * hi for hi in first]
        assert " ".join(f"{s}:{s + case.bsize}" for s in starts) == case.rows
    assert output_size((len(mask),) * 2, (k, k), (case.stride,) * 2, case.padding) == (
        len(case.y),
        len(case.y[0]),
    )


@tables
def test_active_indices(xp, mask, k, case):
    _, _, active = blocks_of_case(xp, mask, k, case)
    expected = np.array([(0, hi, wi) for hi, wi in case.indices], np.int32)
    assert_same(active.active_block_indices, xp.writable(expected))
    assert_same(active.bin_counts, xp.writable(np.array([len(expected)], np.int32)))


@tables
@pytest.mark.parametrize("transpose", [False, True])
def test_gather_convolve_scatter(xp, mask, k, case, transpose):
    """The whole chain by hand: the blocks are convolved by the loop oracle, in between the ops."""
    mask, params, active = blocks_of_case(xp, mask, k, case)
    grid = {"bsize": params.bsize, "boffset": params.boffset, "bstride": params.bstride}
    x = xp.asarray(np.ones((*mask.shape, 1), np.float32))
    stack = xp.to_numpy(sparse_gather(x, *active, **grid, transpose=transpose))
    stack = stack.transpose(0, 2, 3, 1) if transpose else stack
    kernel = np.ones((k, k, 1, 1), np.float32)
    q = oracles.conv2d(stack, kernel, strides=(case.stride,) * 2, padding="VALID")
    q = (q.transpose(0, 3, 1, 2) if transpose else q).astype(np.float32)
    expected = np.array(case.y, np.float32)[None, :, :, None]
    y = sparse_scatter(
        xp.asarray(q), *active, xp.asarray(np.zeros_like(expected)),
        bsize=params.bsize_out, transpose=transpose,
    )  # fmt: skip
    assert_same(y, xp.writable(expected))


@tables
def test_sparse_conv2d(xp, mask, k, case):
    mask, params, active = blocks_of_case(xp, mask, k, case)
    x, w = np.ones((*mask.shape, 1), np.float32), np.ones((k, k, 1, 1), np.float32)
    y = sbnet_cupy.sparse_conv2d(
        xp.asarray(x), xp.asarray(w), active, params,
        strides=(case.stride,) * 2, padding=case.padding,
    )  # fmt: skip
    assert_same(y, xp.writable(np.array(case.y, np.float32)[None, :, :, None]))


def test_gathered_pixels(xp):
    """Blocks of 4 on 0..24 in a 5x5 image, SAME: zeros at the top and left, the far end cut off."""
    _, params, active = blocks_of_case(xp, MASK5, 3, CASES5[2])
    x = xp.asarray(np.arange(25, dtype=np.float32).reshape(1, 5, 5, 1))
    blocks = sparse_gather(
        x, *active, bsize=params.bsize, boffset=params.boffset, bstride=params.bstride
    )
    expected = [
        [[0, 0, 0, 0], [0, 0, 1, 2], [0, 5, 6, 7], [0, 10, 11, 12]],
        [[0, 0, 0, 0], [1, 2, 3, 4], [6, 7, 8, 9], [11, 12, 13, 14]],
        [[0, 5, 6, 7], [0, 10, 11, 12], [0, 15, 16, 17], [0, 20, 21, 22]],
        [[6, 7, 8, 9], [11, 12, 13, 14], [16, 17, 18, 19], [21, 22, 23, 24]],
    ]
    assert_same(blocks, xp.writable(np.array(expected, np.float32)[..., None]))


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize("bsize", [4])
def test_a_block_of_4_does_not_fit_stride_2(bsize, padding):
    with pytest.raises(ShapeError, match="bsize"):
        calc_block_params((5, 5), bsize, 3, 2, padding)


# The outputs of TensorFlow's convolution, (n, k, s): (SAME, VALID).
SIZES = {
    (6, 1, 1): (6, 6), (6, 3, 1): (6, 4), (6, 2, 2): (3, 3), (6, 3, 2): (3, 2), (6, 4, 3): (2, 1),
    (7, 2, 1): (7, 6), (7, 3, 2): (4, 3), (7, 7, 1): (7, 1), (7, 4, 2): (4, 2), (7, 3, 3): (3, 2),
    (10, 3, 2): (5, 4), (10, 7, 3): (4, 2), (11, 4, 3): (4, 3), (11, 7, 2): (6, 3),
}  # fmt: skip


@pytest.mark.parametrize("case", SIZES, ids=str)
def test_output_sizes(case):
    n, k, s = case
    for padding, size in zip(("SAME", "VALID"), SIZES[case], strict=True):
        assert output_size((n, n), (k, k), (s, s), padding) == (size, size)


def test_paddings():
    """A 5x6 image with a 2x3 kernel: the odd pixel goes to the bottom and the right."""
    assert padding_pairs((5, 6), (2, 3), (1, 1), "SAME") == ((0, 1), (1, 1))
    assert padding_pairs((5, 6), (2, 3), (2, 2), "SAME") == ((0, 1), (0, 1))
    assert padding_pairs((5, 6), (2, 3), (1, 1), "VALID") == ((0, 0), (0, 0))
