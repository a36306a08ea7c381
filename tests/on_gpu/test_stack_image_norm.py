"""Group norms of images of a stack by their kernels, on a GPU."""

import pytest

from support.stack_image_norm_cases import CASES, check

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_the_formula(case, require):
    check(case, xp=require("gpu"))
