"""Products of the channels of images with a matrix: the kernel on a GPU, and its vectors."""

import pytest

from sbnet_cupy.block_sparse.stack.image_linear import ImageLinear
from support.image_linear_cases import CASES, check


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_the_formula(case, require):
    check(case, xp=require("gpu"))


@pytest.mark.parametrize(("channels", "alignment", "vector"), [(24, 16, 8), (24, 8, 4), (5, 16, 1)])
def test_vectors_are_of_whole_rows(channels, alignment, vector):
    assert ImageLinear("Half", 2, 1, channels, 7, 0, alignment).vector == vector
