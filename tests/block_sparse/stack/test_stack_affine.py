"""A scale and a shift of each channel of a stack: the kernel on a GPU, and its vectors."""

import pytest

from sbnet_cupy.block_sparse.stack.stack_affine import StackAffine
from support.stack_affine_cases import CASES, check


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_the_formula(case, require):
    check(case, xp=require("gpu"))


@pytest.mark.parametrize(
    ("channels", "alignment", "vector"), [(16, 16, 8), (12, 16, 4), (16, 4, 2), (5, 16, 1)]
)
def test_vectors_are_of_whole_pixels(channels, alignment, vector):
    elements = "float", "Half", "Half", "Half"
    sizes = StackAffine("Half", 2, *elements, 9, 1, (4, 4), channels, False, 0, alignment)
    assert sizes.vector == vector
