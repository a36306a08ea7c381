"""Convolutions over kernel maps by the CUDA kernels, on the CPU, against the array operations."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

import sbnet_cupy as sb
from sbnet_cupy.core import launch as kernels
from sbnet_cupy.core.device import Device
from sbnet_cupy.submanifold import site_conv_launch
from sbnet_cupy.submanifold.site_conv import SITE_CONV
from sbnet_cupy.submanifold.site_conv_instances import (
    FmaPlan,
    MmaPlan,
    PipelinedPlan,
    SiteConvSizes,
)
from sbnet_cupy.submanifold.site_conv_plan import _candidates, plan_site_conv
from sbnet_cupy.submanifold.site_features_grad import features_grad
from support import site_on_host
from support.assertions import assert_same
from support.count_calls import count_calls
from support.exhaustive import thinned
from support.host_memory import Memory
from support.site_conv_cases import CASES, SiteConvCase, assert_result

TILES = [(128, 128), (128, 64), (128, 32), (64, 128), (64, 64), (64, 32)]


@pytest.fixture
def on_host(monkeypatch):
    """Plan for a GPU that the shim can stand for."""
    monkeypatch.setattr(site_conv_launch, "current_device", lambda: site_on_host.AMPERE)


@pytest.mark.parametrize("case", thinned(CASES, 7, sanitized=5), ids=str)
def test_results_are_those_of_float64(case, on_host):
    with site_on_host.by_kernels():
        found = case.run()
        assert {"site_conv", "site_conv_fma"} & set(site_on_host.LAUNCHED)
    assert_result(case, found)


@pytest.mark.parametrize(
    "given", thinned(itertools.product(TILES, (2, 4)), 12, sanitized=7), ids=str
)
def test_every_tile_gives_the_same_bits(given, on_host, monkeypatch):
    """Random numbers: the order of sums is that of the taps, whatever the tile."""
    tile, stages = given
    case = SiteConvCase(
        channels=24, channels_out=40, kernel=(3, 3, 3), sites=150, spare=4, whole=False
    )
    warps = (tile[0] // 32, 1 if tile[1] == 32 else 2)
    results = []
    for plan in (MmaPlan((64, 64), (2, 2), 3), MmaPlan(tile, warps, stages, stages > 2)):
        monkeypatch.setattr(site_conv_launch, "plan_site_conv", lambda conv, device, p=plan: p)
        with site_on_host.by_kernels():
            results.append(case.run(seed=3))
    assert_same(results[1], results[0])


PIPELINED = [
    (PipelinedPlan((128, 64), (2, 1), 4, engine="TileMma"), SiteConvCase(
        channels=64, channels_out=64, kernel=(3, 3, 3), sites=500, spare=300, whole=False)),
    (PipelinedPlan((128, 128), (2, 2), 3, False, engine="TileMma"), SiteConvCase(
        "bfloat16", channels=128, channels_out=200, kernel=(2, 2, 2), kind="strided", sites=400)),
    (PipelinedPlan((256, 64), (4, 1), 2, engine="TileMma"), SiteConvCase(
        channels=64, channels_out=72, kernel=(3, 3), sites=200, activation=None)),
    (PipelinedPlan((128, 256), (4, 2), 2, engine="TileMma"), SiteConvCase(
        "float32", channels=32, channels_out=256, kernel=(3, 3), sites=200, precision="tf32")),
    (PipelinedPlan((128, 64), (4, 1), 2, engine="TileMma"), SiteConvCase(
        channels=64, channels_out=64, kernel=(5, 5, 5), sites=150, tables=False, residual=False)),
    (PipelinedPlan((128, 64), (2, 1), 3), SiteConvCase(
        channels=64, channels_out=64, kernel=(3, 3), sites=200, spare=30)),
    (PipelinedPlan((256, 64), (2, 1), 2), SiteConvCase(
        "float32", channels=96, channels_out=64, kernel=(3, 3), sites=300, precision="tf32")),
]  # fmt: skip


@pytest.mark.parametrize(
    "given", thinned(PIPELINED, 4, sanitized=3), ids=lambda given: str(given[0].tile)
)
def test_pipelined_sums_are_those_of_one_thread_block_role(given, on_host, monkeypatch):
    """Some warps copy and others multiply: the bits of the other kernel."""
    pipelined, case = given
    results = []
    for plan in (MmaPlan((64, 64), (2, 2), 3), pipelined):
        monkeypatch.setattr(site_conv_launch, "plan_site_conv", lambda conv, device, p=plan: p)
        with site_on_host.by_kernels():
            results.append(case.run(seed=5))
    assert_same(results[1], results[0])
    assert_result(case, results[1], seed=5)


SHARED = [
    (PipelinedPlan((128, 64), (4, 1), 2, engine="TileMma", shared=True), SiteConvCase(
        channels=64, channels_out=64, kernel=(3, 3, 3), sites=500, spare=300), 40),
    (PipelinedPlan((128, 128), (2, 2), 3, engine="TileMma", shared=True), SiteConvCase(
        "bfloat16", channels=128, channels_out=200, kernel=(2, 2, 2), kind="strided", sites=400),
        5),
    (PipelinedPlan((128, 256), (4, 2), 2, engine="TileMma", shared=True), SiteConvCase(
        "float32", channels=32, channels_out=256, kernel=(3, 3), sites=200, precision="tf32"), 9),
    (PipelinedPlan((128, 64), (4, 1), 2, engine="TileMma", shared=True), SiteConvCase(
        channels=64, channels_out=64, kernel=(5, 5, 5), sites=150, tables=False, residual=False),
        30),
    (PipelinedPlan((128, 64), (2, 1), 3, shared=True), SiteConvCase(
        channels=64, channels_out=40, kernel=(3, 3), sites=200, spare=30, activation="silu"), 12),
    (PipelinedPlan((128, 128), (2, 1), 2, shared=True), SiteConvCase(
        "float32", channels=64, channels_out=136, kernel=(3, 3, 3), precision="tf32", sites=260),
        100),
    (PipelinedPlan((128, 64), (4, 1), 2, engine="TileMma", shared=True), SiteConvCase(
        channels=64, channels_out=64, kernel=(1, 1), sites=300, whole=False), 1),
    (PipelinedPlan((128, 64), (4, 1), 2, engine="TileMma", shared=True), SiteConvCase(
        channels=64, channels_out=128, kernel=(3, 3), sites=330), 2),
]  # fmt: skip


def run_shared(plan, case, shares, monkeypatch):
    """Return a case's result by so many thread blocks that share tiles.

    Parts of tiles begin as NaN, and nothing is written beyond them.
    """
    memory = Memory(poison=255)
    device = site_on_host.AMPERE._replace(multiprocessors=shares)
    monkeypatch.setattr(site_on_host, "AMPERE", device)
    monkeypatch.setattr(site_conv_launch, "plan_site_conv", lambda conv, device: plan)
    monkeypatch.setattr(site_conv_launch, "empty", memory.poisoned)
    with site_on_host.by_kernels():
        found = case.run(seed=5)
        assert site_on_host.LAUNCHED[-2:] == ["site_conv_shared", "site_conv_sum"]
    memory.check()
    return found


@pytest.mark.parametrize(
    "given", thinned(SHARED, 5, sanitized=4), ids=lambda given: str(given[0].tile)
)
def test_thread_blocks_share_tiles(given, on_host, monkeypatch):
    """Most tiles are cut, into two parts or many; results are exact, or within the bound.

    Of the last case most are whole, of several columns, and the last cut is alone in its tile.
    """
    plan, case, shares = given
    assert_result(case, run_shared(plan, case, shares, monkeypatch), seed=5)


def test_shared_tiles_of_all_widths_give_the_same_bits(on_host, monkeypatch):
    """Random numbers: tiles are cut between the same taps, however many channels they have."""
    case = SiteConvCase(
        channels=64, channels_out=160, kernel=(3, 3, 3), sites=200, spare=4, whole=False
    )
    plans = [PipelinedPlan((128, width), (4, 1), 2, engine="TileMma", shared=True)
             for width in (64, 128, 256)]  # fmt: skip
    first, *others = (run_shared(plan, case, 23, monkeypatch) for plan in plans)
    for other in others:
        assert_same(other, first)
    assert (first != run_shared(plans[0], case, 5, monkeypatch)).any()  # between other taps


def test_products_begin_early_only_behind_what_packs_weights(on_host, monkeypatch):
    """Else what made the map may still run; a sum waits for the parts itself."""
    monkeypatch.setattr(kernels, "prepare", lambda file, name, *_, dependent=False, **__: (
        name, dependent))  # fmt: skip
    conv = SiteConvSizes("Half", 900, 900, 27, 64, 64, 1, 0, False, 16, 16)
    shared = PipelinedPlan((128, 64), (4, 1), 2, engine="TileMma", shared=True)
    for plan in (shared, shared._replace(shared=False), MmaPlan((64, 64), (2, 2), 3)):
        launches = site_conv_launch._by_tensor_cores(conv, plan)
        for its, early in zip(launches, (False, True), strict=True):
            its = its._prepare()
            if plan is shared:
                its, add_up = (launch for launch, _ in its._steps)
                assert add_up == ("site_conv_sum", True)
            assert its == (plan.kernel, early)


@pytest.mark.parametrize("shift", [0, 1])  # of a map that is its own reverse, or not
def test_a_gradient_of_features_shares_tiles(shift, on_host, monkeypatch):
    rng = np.random.default_rng(3)
    sites = np.argwhere(rng.random((1, 20, 20)) < 0.5)
    x = sb.sparse_tensor(np.zeros((len(sites), 1)), sites, spatial_shape=(20, 20))
    onto = np.flip(sites + np.array([0, shift, 0]), 0)[:150] if shift else sites
    onto = sb.coordinate_map(onto, spatial_shape=(21, 20), batch_size=1)[0] if shift else None
    made = sb.kernel_map(x.coordinates, 3, onto=onto or x.coordinates)
    y = rng.integers(-3, 4, (made.target.capacity, 64)).astype(np.float16)
    w = rng.integers(-2, 3, (9, 64, 64)).astype(np.float16)
    expected = features_grad(y, w, made, 1, None)
    plan = PipelinedPlan((128, 64), (4, 1), 2, engine="TileMma", shared=True)
    monkeypatch.setattr(site_conv_launch, "plan_site_conv", lambda conv, device: plan)
    with site_on_host.by_kernels():
        assert_same(features_grad(y, w, made, 1, None), expected)
        assert site_on_host.LAUNCHED[-2:] == ["site_conv_shared", "site_conv_sum"]


def test_parts_of_a_tile_are_added_in_the_order_of_taps(on_host, monkeypatch):
    """Of one tile, cut behind 8 and behind 18 of 27 taps: 2**24 + 1 - 2**24 is 0 in float32."""
    plan = PipelinedPlan((128, 64), (4, 1), 2, engine="TileMma", shared=True)
    monkeypatch.setattr(site_conv_launch, "plan_site_conv", lambda conv, device: plan)
    x, w = np.zeros((128, 32), np.float32), np.zeros((27, 32, 64), np.float32)
    x[:, 0], w[[0, 8, 18], 0] = 1, np.array([[2**24], [1], [-(2**24)]])
    rows = np.tile(np.arange(128, dtype=np.int32), (27, 1))
    out = np.full((128, 64), np.nan, np.float32)
    arrays = (x, rows, None, w, None, None, None, out)
    with site_on_host.by_kernels():
        SITE_CONV.plan_for(arrays, ((3, 3, 3), 128, 1, None, "tf32")).run(*arrays)
    assert (out == 0).all()


@pytest.mark.parametrize(
    "given", [(128, 3 * 65 * 128 - 5), (256, 46 * 256 - 5), (256, 7 * 256 - 200)], ids=str
)
@pytest.mark.exhaustive
def test_many_turns_of_a_thread_block(given, on_host, monkeypatch):
    """Three thread blocks, dealt out: barriers and places are used again.

    They have 65 tiles each; or 15 tiles of 256 rows, and two of them half of one; or the same of 2,
    where there is nothing in one of the halves.
    """
    height, count = given
    plan = PipelinedPlan((height, 64), (4, 1), 2, engine="TileMma")
    monkeypatch.setattr(site_conv_launch, "plan_site_conv", lambda conv, device: plan)
    rng = np.random.default_rng(4)
    x = rng.integers(-3, 4, (count, 64)).astype(np.float16)
    w = rng.integers(-2, 3, (2, 64, 64)).astype(np.float16)
    rows = rng.integers(-1, count, (2, count)).astype(np.int32)
    out = np.full((count, 64), np.nan, np.float16)
    arrays = (x, rows, None, w, None, None, None, out)
    with site_on_host.by_kernels():
        SITE_CONV.plan_for(arrays, ((2,), count, 1, None, None)).run(*arrays)
        assert plan.kernel in site_on_host.LAUNCHED
    wide = np.concatenate([x, np.zeros((1, 64))]).astype(np.float32)
    assert (out == wide[rows[0]] @ w[0] + wide[rows[1]] @ w[1]).all()


def planned(sites, channels, channels_out, taps=27, **other):
    """Return the plan of a convolution of float16, or of another, on an H200."""
    conv = SiteConvSizes("Half", sites, sites, taps, channels, channels_out, 1, 0, False, 16, 16)
    return plan_site_conv(conv._replace(**other), Device(132, 227 << 10, True, True))


def test_wide_features_of_few_sites_are_shared():
    """Up to a number of tiles for each multiprocessor; floats of wide rows in pictures, too."""
    floats, few, some = {"element": "float", "tf32": True}, 100, 4000
    for channels, channels_out, taps, other, columns, between in (
        (128, 128, 27, {}, 128, (897, 14_336)),
        (128, 65, 10, {}, 128, (16_897, 33_792)),
        (192, 128, 27, {}, 128, (few, 33_792)),
        (256, 64, 27, {}, 64, (few, 21_888)),
        (128, 33, 27, {}, 64, (897, 8448)),
        (128, 256, 27, {}, 256, (8449, 16_896)),
        (256, 256, 27, {}, 256, (897, 33_792)),
        (320, 256, 27, {}, 256, (few, 10**6)),
        (256, 512, 27, {}, 256, (4225, 10**6)),
        (512, 512, 27, {}, 256, (few, 10**6)),
        (64, 64, 27, floats, 64, (few, 14_336)),
        (128, 64, 9, floats, 64, (some, 11_776)),
        (64, 128, 27, floats, 128, (few, 14_336)),
        (64, 256, 27, floats, 256, (12_673, 10**6)),
        (128, 128, 27, floats, 128, (few, 33_792)),
        (128, 128, 9, floats, 128, (some, 9216)),
        (128, 256, 27, floats, 256, (few, 43_904)),
        (256, 256, 9, floats, 256, (few, 11_776)),
    ):
        for sites in between:
            plan = planned(sites, channels, channels_out, taps, **other)
            assert plan.shared and plan.by_taps and plan.tile == (128, columns), (channels, sites)
        for sites in (between[0] - 1, between[1] + 1):
            if few < sites < 10**6 and sites != some - 1:
                plan = planned(sites, channels, channels_out, taps, **other)
                assert not getattr(plan, "shared", False), (channels, channels_out, sites)
    for sizes in (
        (9000, 64, 128), (5000, 128, 32), (9000, 256, 256, 9), (9000, 200, 256),
        (9000, 320, 256, 59),  # which needs too much shared memory
    ):  # fmt: skip
        assert not getattr(planned(*sizes), "shared", False), sizes


def test_wide_features_of_many_sites_are_sorted():
    """Where thread blocks have several tiles; else others are faster."""
    for channels, taps, channels_out, tile, sites in (
        (128, 27, 128, (256, 128), (33_793, 10**6)),
        (192, 10, 72, (256, 128), (33_793, 10**6)),
        (64, 27, 256, (128, 256), (16_897, 10**6)),
        (256, 10, 256, (128, 256), (33_793, 10**6)),
        (256, 9, 136, (128, 256), (27_009, 10**6)),
        (256, 27, 64, (256, 64), (33_793, 10**6)),
    ):
        for number in sites:
            plan = planned(number, channels, channels_out, taps)
            assert isinstance(plan, PipelinedPlan) and plan.tile == tile and plan.by_taps
            assert not plan.shared
        plan = planned(sites[0] - 1, channels, channels_out, taps)
        assert not isinstance(plan, PipelinedPlan) or plan.tile != tile or plan.shared
    for sizes in (
        (10**6, 64, 128), (10**6, 248, 256), (10**6, 128, 128, 9), (10**6, 256, 256, 8),
        (10**6, 192, 64), (10**6, 256, 264, 9),
    ):  # fmt: skip
        assert not isinstance(planned(*sizes), PipelinedPlan), sizes
    for channels, taps, channels_out, tile, sites in (
        (128, 27, 128, (256, 128), (33_793, 10**6)),
        (96, 9, 96, (256, 128), (25_345, 10**6)),
        (128, 9, 128, (128, 128), (9217, 25_344)),
        (128, 27, 256, (128, 256), (44_000, 10**6)),
        (256, 9, 192, (128, 256), (16_897, 10**6)),
    ):
        for number in sites:
            plan = planned(number, channels, channels_out, taps, element="float", tf32=True)
            assert isinstance(plan, PipelinedPlan) and plan.tile == tile and plan.by_taps
    assert not isinstance(planned(10**6, 64, 64, element="float", tf32=True), PipelinedPlan)
    assert not isinstance(planned(10**6, 256, 256, alignment_in=8), PipelinedPlan)
    assert not isinstance(planned(2**26, 256, 256), PipelinedPlan)  # 32 GiB


def test_many_taps_and_wide_weights_leave_tensor_cores():
    conv = SiteConvSizes("Half", 100, 100, 27, 16, 16, 1, 0, False, 16, 16)
    assert isinstance(plan_site_conv(conv, site_on_host.AMPERE), MmaPlan)
    for change in (
        {"taps": 400}, {"groups": 2}, {"element": "double"}, {"element": "float"},
    ):  # fmt: skip
        assert isinstance(plan_site_conv(conv._replace(**change), site_on_host.AMPERE), FmaPlan)
    turing = Device(40, 64 << 10, hopper=False, bulk_copy=False, tensor_floats=False)
    assert isinstance(plan_site_conv(conv, turing), MmaPlan)
    assert isinstance(plan_site_conv(conv._replace(element="BFloat16"), turing), FmaPlan)
    assert plan_site_conv(conv._replace(sources=2**31), turing) is None


@pytest.mark.parametrize("channels_out", [8, 32, 48, 64, 128, 500])
def test_plans_fit_the_device(channels_out):
    conv = SiteConvSizes("Half", 9000, 9000, 27, 64, channels_out, 1, 0, False, 16, 16)
    plans = list(_candidates(conv, site_on_host.AMPERE))
    assert plan_site_conv(conv, site_on_host.AMPERE) in plans
    for plan in plans:
        assert plan.shared_bytes(conv) <= site_on_host.AMPERE.shared_bytes
        assert plan.threads <= 256


def test_a_grouped_convolution_skips_taps_that_are_not_there(on_host):
    """By fused multiply-add, a weight that is not finite reaches only those who use it."""
    rows = np.array([[0, 1], [0, 2], [0, 5]], np.int32)
    w = np.array([np.inf, 1.0, 1.0]).reshape(3, 1, 1)
    with site_on_host.by_kernels():
        x = sb.sparse_tensor(np.ones((3, 1)), rows, spatial_shape=8)
        y = sb.submanifold_conv(x, w)
    assert y.features.ravel().tolist() == [2.0, np.inf, 1.0]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_without_valid_rows_all_are(dtype, on_host):
    """The operator, as gradients call it: every row of the result is written."""
    x, w = np.ones((3, 8), dtype), np.ones((2, 8, 8), dtype)
    rows = np.array([[0, -1, 2, -1], [1, -1, -1, 0]], np.int32)
    out, bias = np.zeros((4, 8), dtype), np.ones(8, np.float32)
    arrays = (x, rows, None, w, None, bias, None, out)
    with site_on_host.by_kernels():
        SITE_CONV.plan_for(arrays, ((2,), 3, 1, None, None)).run(*arrays)
    assert out[:, 0].tolist() == [17, 1, 9, 9]


def test_no_rows_need_no_kernel(on_host):
    case = replace(SiteConvCase(), sites=0)
    with site_on_host.by_kernels():
        assert case.run().shape == (0, case.channels_out)


@pytest.mark.parametrize("packed", [False, True])
def test_a_call_like_an_earlier_one_launches_what_it_must(packed, on_host):
    """Sites, map and order are kept, and packed weights are not packed again."""
    rng = np.random.default_rng(1)
    rows = np.unique(rng.integers(0, 9, (60, 4)) % (1, 9, 9, 9), axis=0).astype(np.int32)
    with site_on_host.by_kernels():
        features = rng.standard_normal((len(rows), 16)).astype(np.float16)
        x = sb.sparse_tensor(features, rows, spatial_shape=(9, 9, 9), batch_size=1)
        w = rng.standard_normal((3, 3, 3, 16, 16)).astype(np.float16)
        weights = sb.PackedWeights(w) if packed else w
        first = sb.submanifold_conv(x, weights).features
        site_on_host.LAUNCHED.clear()
        again = sb.submanifold_conv(x, weights).features
        launched = list(site_on_host.LAUNCHED)
        calls = count_calls(lambda: sb.submanifold_conv(x, weights))
        assert_same(first, sb.submanifold_conv(x, w).features)
    assert_same(again, first)
    assert launched == ["pack_site_weights"] * (not packed) + ["site_conv"]
    assert calls < (16 if packed else 75)
