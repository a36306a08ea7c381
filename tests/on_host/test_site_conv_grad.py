"""Gradients of convolutions over kernel maps by the CUDA kernels, on the CPU."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from sbnet_cupy.core.device import Device
from sbnet_cupy.core.spec import spec_of
from sbnet_cupy.submanifold import site_conv_grad_launch, site_conv_launch
from sbnet_cupy.submanifold.site_conv_grad import SITE_WEIGHT_GRAD
from sbnet_cupy.submanifold.site_conv_grad_plan import (
    PIPELINED,
    FmaPlan,
    MmaPlan,
    PipelinedPlan,
    WeightGradSizes,
    plan_weight_grad,
)
from support import site_on_host
from support.assertions import assert_same
from support.exhaustive import thinned
from support.site_conv_cases import SiteConvCase
from support.site_grad_cases import (
    CASES,
    assert_gradients,
    draw_weight_gradient,
    gradients,
    weight_gradient_by_taps,
)


@pytest.fixture(autouse=True)
def on_host(monkeypatch):
    """Plan for a GPU that the shim can stand for."""
    for module in (site_conv_launch, site_conv_grad_launch):
        monkeypatch.setattr(module, "current_device", lambda: site_on_host.AMPERE)


@pytest.mark.parametrize("case", thinned(CASES, 8, sanitized=4), ids=str)
def test_gradients_are_those_of_float64(case):
    with site_on_host.by_kernels():
        found, again = (gradients(case, by_result=given) for given in (False, True))
        assert {"site_weight_grad", "site_weight_grad_fma"} & set(site_on_host.LAUNCHED)
    assert_gradients(case, found)
    assert_gradients(case, again)


def weight_gradient(x, dy, rows, groups=1, precision=None):
    """Return the gradient of the weights by the operator, on the shim."""
    with site_on_host.by_kernels():
        return SITE_WEIGHT_GRAD((x, dy, rows, None), (groups, precision))


TILES = list(itertools.product((16, 32, 64, 128), repeat=2))


@pytest.mark.parametrize("tile", thinned(TILES, 10, sanitized=5), ids=str)
def test_every_tile(tile):
    """Several windows and stages; the last tap is that of no row."""
    x, dy, rows = draw_weight_gradient("float16", 500, 1300, 2, tile[0] - 8, tile[1])
    found = weight_gradient(x, dy, rows)
    assert "site_weight_grad" in site_on_host.LAUNCHED
    assert_same(found, weight_gradient_by_taps(x, dy, rows).astype(x.dtype))
    assert not found[-1].any()


@pytest.mark.parametrize(("dtype", "precision"), [("float32", "tf32"), ("float32", None)])
def test_floats(dtype, precision):
    x, dy, rows = draw_weight_gradient(dtype, 300, 900, 2, 72, 40)
    assert_same(
        weight_gradient(x, dy, rows, 1, precision),
        weight_gradient_by_taps(x, dy, rows).astype(dtype),
    )


@pytest.fixture
def hopper(monkeypatch):
    """Plan for a GPU with wgmma, which the shim has too."""
    device = site_on_host.AMPERE._replace(hopper=True, shared_bytes=227 << 10)
    monkeypatch.setattr(site_conv_grad_launch, "current_device", lambda: device)
    return device


WIDE = [(*tile, "float16") for tile in PIPELINED] + [(96, 264, "bfloat16"), (40, 72, "bfloat16")]


@pytest.mark.parametrize("wide", thinned(WIDE, 7, sanitized=3), ids=str)
def test_warps_that_copy_for_others(wide, hopper):
    """Several lists, stages and rounds of the ring; the last tap is that of no row."""
    channels, channels_out, dtype = wide
    x, dy, rows = draw_weight_gradient(dtype, 500, 1300, 2, channels, channels_out, density=0.7)
    rows[0, 3], rows[0, 5] = len(x), -9  # rows that are not there
    found = weight_gradient(x, dy, rows)
    assert site_on_host.LAUNCHED[-2:] == ["site_weight_grad_pipelined", "sum_shares"]
    rows[0, 3] = -1
    assert_same(found, weight_gradient_by_taps(x, dy, rows).astype(x.dtype))
    assert not found[-1].any()


@pytest.mark.parametrize("pairs", [0, 1, 63, 64, 65, 128, 512, 513, 641])
def test_numbers_of_pairs(pairs, hopper):
    """None, whole stages and parts of one, whole looks at the table and more."""
    x, dy, rows = draw_weight_gradient("float16", 700, 700, 1, 64, 64)
    rows = np.full_like(rows, -1)
    rows[0, 10 : 10 + pairs] = np.arange(pairs)[::-1]
    found = weight_gradient(x, dy, rows)
    assert "site_weight_grad_pipelined" in site_on_host.LAUNCHED
    assert_same(found, weight_gradient_by_taps(x, dy, rows).astype(x.dtype))


def test_plans_of_wide_layers(hopper):
    """Warps copy for others where all rows are whole vectors of numbers of two bytes."""
    conv = WeightGradSizes("Half", 90_000, 90_000, 27, 64, 96, 1, False, 16, 16)
    for found in (conv, conv._replace(element="BFloat16"), conv._replace(channels_out=33)):
        assert isinstance(plan_weight_grad(found, hopper), PipelinedPlan)
    for change in (
        {"channels": 32}, {"alignment_in": 8}, {"alignment_out": 8}, {"sources": 2**30},
        {"element": "float", "tf32": True}, {"groups": 2},
    ):  # fmt: skip
        assert not isinstance(plan_weight_grad(conv._replace(**change), hopper), PipelinedPlan)
    assert isinstance(plan_weight_grad(conv, site_on_host.AMPERE), MmaPlan)
    for plan in PIPELINED.values():
        assert plan.shared_bytes(conv) * plan.blocks <= hopper.shared_bytes
        fewer, more = (plan.shares(conv._replace(targets=rows)) for rows in (90_000, 2**18))
        assert (fewer[0] < more[0]) == (plan.blocks > 1)


def test_fewer_shares_of_numbers_of_two_bytes(hopper):
    """Where rows are neither few nor many; the tap in the middle has more of them."""
    for channels, (element, more) in itertools.product((32, 128), (("Half", 2), ("float", 1))):
        conv = WeightGradSizes(element, 40_000, 40_000, 27, channels, 96, 1, True, 16, 16)
        each, middle = plan_weight_grad(conv, hopper).shares(conv)
        assert middle == more * each
        many = conv._replace(targets=60_000)
        assert plan_weight_grad(many, hopper).shares(many)[0] >= each


def test_shares_are_added_in_their_order():
    """Random numbers, other numbers of shares: rounding alone differs; the same one, nothing."""
    x, dy, rows = draw_weight_gradient("float16", 400, 3000, 3, 16, 16)
    x, dy = x.astype(np.float16) / 8, dy / 8
    first, again = (weight_gradient(x, dy, rows) for _ in range(2))
    assert_same(again, first)
    assert_same(first, weight_gradient_by_taps(x, dy, rows).astype(np.float16))


def test_the_tap_in_the_middle_has_more_shares():
    """Of a kernel in three dimensions; sums over many shares of whole numbers are exact."""
    x, dy, rows = draw_weight_gradient("float16", 2000, 2100, 27, 8, 16, density=0.05)
    rows[13, :-1] = np.arange(2099) % 1999
    conv = site_conv_grad_launch.describe(*map(spec_of, (x, dy, rows)), 1, False)
    each, middle = plan_weight_grad(conv, site_on_host.AMPERE).shares(conv)
    assert 1 < each < middle
    assert_same(weight_gradient(x, dy, rows), weight_gradient_by_taps(x, dy, rows).astype(x.dtype))


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_rows_that_are_not_there_are_left_out(dtype):
    """A table may name rows past the features: they read nothing."""
    x, dy = np.ones((2, 8), dtype), np.ones((3, 8), dtype)
    rows = np.array([[0, 2, 5], [-1, 1, -7]], np.int32)
    dw = weight_gradient(x, dy, rows)
    assert (dw[0] == 1).all()
    assert (dw[1] == 1).all()


@pytest.mark.parametrize(("sources", "targets"), [(0, 5), (5, 0), (0, 0)])
def test_no_rows(sources, targets):
    x, dy = np.ones((sources, 8), np.float16), np.ones((targets, 8), np.float16)
    dw = weight_gradient(x, dy, np.full((3, targets), -1, np.int32))
    assert dw.shape == (3, 8, 8)
    assert not dw.any()


def test_no_sites():
    case = replace(SiteConvCase(), sites=0)
    with site_on_host.by_kernels():
        found = gradients(case)
    assert not found["w"].any()
    assert not found["bias"].any()
    assert found["features"].shape == (0, case.channels)


def test_plans():
    conv = WeightGradSizes("Half", 9000, 9000, 27, 64, 64, 1, False, 16, 16)
    turing = Device(40, 64 << 10, hopper=False, bulk_copy=False, tensor_floats=False)
    assert isinstance(plan_weight_grad(conv, turing), MmaPlan)
    assert isinstance(plan_weight_grad(conv._replace(element="BFloat16"), turing), FmaPlan)
    assert plan_weight_grad(conv._replace(sources=2**31), turing) is None
    for change in ({"groups": 2}, {"element": "double"}, {"element": "float"}):
        assert isinstance(plan_weight_grad(conv._replace(**change), site_on_host.AMPERE), FmaPlan)


SIZES = list(itertools.product((1, 8, 33, 64, 500), (1, 16, 64, 300), (1, 27), (1, 2**20)))


@pytest.mark.parametrize(("channels", "channels_out", "taps", "rows"), SIZES)
def test_plans_fit_every_device(channels, channels_out, taps, rows):
    turing = Device(40, 64 << 10, hopper=False, bulk_copy=False, tensor_floats=False)
    for element, tf32 in (("Half", False), ("float", True), ("float", False), ("double", False)):
        conv = WeightGradSizes(element, rows, rows, taps, channels, channels_out, 1, tf32, 8, 8)
        for device in (turing, site_on_host.AMPERE):
            plan = plan_weight_grad(conv, device)
            assert plan.shared_bytes(conv) <= device.shared_bytes
            assert plan.threads in (128, 256)
            assert all(1 <= shares <= rows for shares in plan.shares(conv))
