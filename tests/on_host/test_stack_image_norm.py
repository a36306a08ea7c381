"""Group norms of images of a stack by their kernels, on the CPU, against the formula in float64."""

import pytest

from support.exhaustive import thinned
from support.stack_image_norm_cases import CASES, check
from support.stack_on_host import BLACKWELL, use_shim


@pytest.mark.parametrize("case", thinned(CASES, 2), ids=str)
def test_it_is_the_formula(case, monkeypatch):
    use_shim(monkeypatch, BLACKWELL)
    check(case)
