"""Plans that are made of one another, for other numbers of sites, are those that are made anew."""

import numpy as np
import pytest

from sbnet_cupy.core import launch, operator
from sbnet_cupy.core.device import Device
from sbnet_cupy.core.spec import ArraySpec, group_of
from sbnet_cupy.submanifold import (
    site_conv,
    site_conv_grad,
    site_conv_grad_launch,
    site_conv_launch,
    site_features_grad,
)
from sbnet_cupy.submanifold.site_conv import SITE_CONV
from sbnet_cupy.submanifold.site_conv_grad import SITE_WEIGHT_GRAD
from sbnet_cupy.submanifold.site_features_grad import SITE_FEATURES_GRAD

HOPPER = Device(132, 232448 - 1024, True, True)
AMPERE = Device(108, 166912 - 1024, False, False)
TAPS = 27
SIZES = [(900,) * 2, (14000,) * 2, (14007,) * 2, (15000, 7000), (50000,) * 2, (400000, 410000)]


class Noted(tuple):
    """The arguments of a launch."""

    def bound(self, *more):
        return Noted((*self, more))

    on = None


@pytest.fixture(params=[HOPPER, AMPERE], ids=["9.0", "8.0"])
def planned(request, monkeypatch):
    """Launches as what they were prepared with, for a GPU that is not there."""
    monkeypatch.setattr(launch, "prepare", lambda *a, **k: Noted((a, tuple(sorted(k.items())))))
    for module in (site_conv_launch, site_conv_grad_launch):
        monkeypatch.setattr(module, "current_device", lambda: request.param)
    for module in (site_conv, site_conv_grad, site_features_grad):
        monkeypatch.setattr(module, "by_kernels", lambda array: True)
    site_conv_launch._pack.cache_clear()
    operator.clear_plans()
    yield
    site_conv_launch._pack.cache_clear()
    operator.clear_plans()


def calls(channels, k, dtype, residual):
    """Yield an operator, and a function of numbers of sites that returns specs and options."""

    def spec(*shape, of=dtype):
        return ArraySpec(shape, np.dtype(of), 0)

    def conv(n, m):
        w, added = spec(3, 3, 3, channels, k), spec(m, k) if residual else None
        specs = spec(n, channels), spec(TAPS, m, of="int32"), spec(m, of="bool"), w, None, None
        return (*specs, added, None), ((3, 3, 3), n, 1, "relu", "tf32")

    def weight_grad(n, m):
        specs = spec(n, channels), spec(m, k), spec(TAPS, m, of="int32"), None
        return specs, (1, "tf32")

    def features_grad(n, m):
        specs = spec(m, k), spec(TAPS, channels, k), spec(TAPS, n, of="int32"), None
        return specs, (1, n == m, "tf32")

    yield SITE_CONV, conv
    yield SITE_WEIGHT_GRAD, weight_grad
    yield SITE_FEATURES_GRAD, features_grad


def facts(plan):
    """Return what two plans of the same call have in common."""
    names = "results", "operands", "scratch", "partials", "shape", "strides", "how", "order"
    launches = [plan.launch, getattr(plan, "early_launch", None)]
    launches = [its._prepare() if isinstance(its, launch.Later) else its for its in launches]
    launches = [getattr(its, "_steps", its) for its in launches]  # those of a series one by one
    return type(plan), launches, *(getattr(plan, name, None) for name in names)


@pytest.mark.parametrize(
    ("channels", "k", "dtype", "residual"),
    [(16, 16, "float16", False), (64, 64, "float16", True), (4, 32, "float32", False),
     (128, 128, "float16", False), (5, 7, "float64", True)],
)  # fmt: skip
def test_a_plan_of_other_lengths_is_the_plan_made_anew(planned, channels, k, dtype, residual):
    for op, call in calls(channels, k, dtype, residual):
        expected = []
        for sizes in SIZES:
            operator.clear_plans()
            assert op.near(*call(*sizes)) is None
            expected.append(op.plan_of(*call(*sizes)))
        operator.clear_plans()
        op.plan_of(*call(700, 700))
        op.plan_of(*call(800, 700))  # of another kind, as its lengths differ
        for sizes, plan in zip(SIZES, expected, strict=True):
            found = op.near(*call(*sizes))
            assert found is op.find(*call(*sizes)) is op.plan_of(*call(*sizes))
            assert facts(found) == facts(plan)


def test_lengths_of_arrays_in_groups_count(planned):
    """As CuPy arrays have them: the table and which rows hold sites; and weights packed once."""
    (op, conv), *_ = calls(16, 24, "float16", False)

    def grouped(n, m):
        (features, rows, valid, *weights, residual, out), options = conv(n, m)
        groups = group_of((rows, valid)), group_of(tuple(weights))
        return (features, *groups, residual, out), options

    op.plan_of(*grouped(608, 489))
    sizes = (608, 480), (700, 489), (900, 300)
    for (n, m), found in [((n, m), op.near(*grouped(n, m))) for n, m in sizes]:
        operator.clear_plans()
        assert facts(found) == facts(op.plan_of(*grouped(n, m)))
        assert found.shape == (m, 24)
    assert op.near(*grouped(608, 608)) is None


def test_the_plan_that_others_are_made_of_outlives_them(planned, monkeypatch):
    """Of inputs of which each has another number of sites, and whose plans are soon dropped."""
    monkeypatch.setattr(operator, "_MOST", 10)
    (op, conv), *_ = calls(16, 16, "float16", False)
    op.plan_of(*conv(500, 500))
    for n in range(600, 700):
        assert op.near(*conv(n, n)) is op.find(*conv(n, n)) is not None
        assert operator._PLANS.weight == len(operator._PLANS) <= 10
    assert op.find(*conv(600, 600)) is None


def test_what_differs_in_more_is_planned_anew(planned):
    """Other channels, options or relations between lengths; no sites; and what must raise."""
    (op, conv), *_ = calls(16, 16, "float16", True)
    op.plan_of(*conv(500, 500))
    (_, other), *_ = calls(16, 32, "float16", True)
    assert op.near(*other(600, 600)) is None
    assert op.near(*conv(600, 500)) is None
    assert op.near(*conv(0, 0)) is None
    specs, options = conv(600, 600)
    assert op.near(specs, (*options[:2], 2, *options[3:])) is None
    assert op.near(specs, (options[0], 599, *options[2:])) is None
    assert op.near(specs, (options[0], 600.0, *options[2:])) is None
    wrong = (*specs[:6], specs[6]._replace(shape=(601, 16)), None)
    assert op.near(wrong, options) is None
    assert op.near((ArraySpec((), np.dtype("float16"), 0), *specs[1:]), options) is None
    assert op.near(specs, options) is not None
