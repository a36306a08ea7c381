"""Convolutions whose tiles copy all that they read at once, on a GPU."""

import pytest

from sbnet_cupy.core import operator
from sbnet_cupy.core.device import current_device
from sbnet_cupy.submanifold import site_conv_launch
from support.assertions import assert_same
from support.site_conv_cases import assert_result
from support.site_conv_once import GIVEN, PLANS, RANDOM

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cupy(require):
    return require("gpu")


@pytest.fixture(autouse=True)
def _hopper(cupy):
    if not current_device().hopper:
        pytest.skip("needs bulk copies")


def run(case, plan, cupy, monkeypatch):
    monkeypatch.setattr(site_conv_launch, "plan_site_conv", lambda conv, device: plan)
    monkeypatch.setattr(operator, "_PLANS", operator._Plans())
    return case.run(cupy.asarray, seed=3)


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_results_are_those_of_float64(given, cupy, monkeypatch):
    """And the same bits again."""
    plan, case = given
    first, again = (run(case, plan, cupy, monkeypatch) for _ in range(2))
    assert_result(case, first, seed=3)
    assert_same(again, first)


def test_every_tile_gives_the_same_bits(cupy, monkeypatch):
    first, *others = (run(RANDOM, plan, cupy, monkeypatch) for plan in PLANS)
    for other in others:
        assert_same(other, first)
