"""stack_sum by its kernel, on the CPU, against loops and the kernels of one layer each."""

import pytest

from support.exhaustive import thinned
from support.stack_on_host import BLACKWELL, use_shim
from support.stack_sum_cases import CASES, check


@pytest.mark.parametrize("case", thinned(CASES, 5), ids=str)
def test_it_is_the_sum(case, monkeypatch):
    use_shim(monkeypatch, BLACKWELL)
    check(case)
