"""Sums of stacks, some of them enlarged: the kernel on a GPU, and its sizes."""

import pytest

from sbnet_cupy.block_sparse.stack.stack_sum import StackSum, prepare_stack_sum, sums
from support.stack_sum_cases import CASES, check

ONES = ((1, 1), (1, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_the_sum(case, require):
    check(case, xp=require("gpu"))


@pytest.mark.parametrize(
    ("channels", "parts", "out_part", "vector"),
    [(16, None, None, 8), (12, None, None, 4), (16, (None, 20), None, 4), (16, None, 18, 2),
     (5, None, None, 1)],
)  # fmt: skip
def test_vectors_are_of_whole_pixels(channels, parts, out_part, vector):
    sizes = StackSum("Half", 2, 9, (4, 4), channels, ONES, 0, 16, parts, out_part)
    assert sizes.vector == vector


def test_what_there_is_no_kernel_for():
    assert sums((64, 64)) and sums((1, 1)) and not sums((2048, 2048)) and not sums((1 << 17, 1))
    for factors, block in (((1, 1),) * 5, (4, 4)), (ONES[:1], (4, 4)), (ONES, (2048, 2048)):
        with pytest.raises(AssertionError, match="no kernel"):
            prepare_stack_sum(StackSum("Half", 2, 9, block, 16, factors, 0))
