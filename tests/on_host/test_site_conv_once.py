"""Convolutions whose tiles copy all that they read at once, on the CPU."""

import pytest

from sbnet_cupy.submanifold import site_conv_launch
from support import site_on_host
from support.assertions import assert_same
from support.exhaustive import thinned
from support.site_conv_cases import assert_result
from support.site_conv_once import GIVEN, PLANS, RANDOM


def run(case, plan, monkeypatch):
    monkeypatch.setattr(site_conv_launch, "current_device", lambda: site_on_host.AMPERE)
    monkeypatch.setattr(site_conv_launch, "plan_site_conv", lambda conv, device: plan)
    with site_on_host.by_kernels():
        found = case.run(seed=3)
        assert site_on_host.LAUNCHED[-1] == "site_conv_once"
    return found


@pytest.mark.parametrize("given", thinned(GIVEN, 15, sanitized=7), ids=str)
def test_results_are_those_of_float64(given, monkeypatch):
    plan, case = given
    assert_result(case, run(case, plan, monkeypatch), seed=3)


def test_every_tile_gives_the_same_bits(monkeypatch):
    """Random numbers: the groups that share a sum, and their order, are the same for all tiles."""
    first, *others = (run(RANDOM, plan, monkeypatch) for plan in PLANS)
    for other in others:
        assert_same(other, first)
