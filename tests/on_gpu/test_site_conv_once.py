"""Convolutions whose tiles copy all that they read at once, on a GPU."""

import pytest

from support.assertions import assert_same
from support.site_conv_cases import assert_result, run_by_plan
from support.site_conv_once import GIVEN, PLANS, RANDOM

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_results_are_those_of_float64(given, cupy, monkeypatch):
    """And the same bits again."""
    plan, case = given
    first, again = (run_by_plan(case, plan, cupy.asarray, monkeypatch) for _ in range(2))
    assert_result(case, first, seed=3)
    assert_same(again, first)


def test_every_tile_gives_the_same_bits(cupy, monkeypatch):
    first, *others = (run_by_plan(RANDOM, plan, cupy.asarray, monkeypatch) for plan in PLANS)
    for other in others:
        assert_same(other, first)
