"""Convolutions by tiles that read each row once, on the CPU, against the other kernels."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from sbnet_cupy.core.arrays import vector_bytes
from sbnet_cupy.core.device import Device
from sbnet_cupy.submanifold import site_conv_launch
from sbnet_cupy.submanifold.site_conv import SITE_CONV
from sbnet_cupy.submanifold.site_conv_instances import (
    ELEMENT_BYTES,
    MmaPlan,
    OncePlan,
    SiteConvSizes,
    TilesPlan,
)
from sbnet_cupy.submanifold.site_conv_plan import _SORTED, _TILINGS, alone, plan_site_conv
from sbnet_cupy.submanifold.site_tiles import MOST_TAPS, TileShape, shared_bytes
from support import site_on_host
from support.assertions import assert_same
from support.exhaustive import thinned
from support.site_conv_cases import SiteConvCase, assert_result
from support.site_tables import groups_apart


@pytest.fixture(scope="module", autouse=True)
def _compiler(require):
    require("g++")


def results(case, plans, monkeypatch):
    """Return the results of plans, from random numbers."""
    monkeypatch.setattr(site_conv_launch, "current_device", lambda: site_on_host.AMPERE)
    found = []
    for plan in plans:
        monkeypatch.setattr(site_conv_launch, "plan_site_conv", lambda conv, device, p=plan: p)
        with site_on_host.by_kernels():
            found.append(case.run(seed=3))
            assert plan.kernel in site_on_host.LAUNCHED
    return found


Case = SiteConvCase
ONE_PART = [  # of channels: the order of sums is that of site_conv
    (TilesPlan(TileShape(64, 128), 32, (2, 1)),
     Case(channels=16, channels_out=24, kernel=(3, 3, 3), sites=150, spare=4, whole=False)),
    (TilesPlan(TileShape(64, 64), 32, (2, 1), buffers=1),
     Case(channels=24, channels_out=40, kernel=(3, 3, 3), sites=150, spare=4, whole=False)),
    (TilesPlan(TileShape(128, 256), 64, (4, 2)),
     Case(channels=64, channels_out=72, kernel=(3, 3), sites=300, whole=False)),
    (TilesPlan(TileShape(128, 256), 64, (4, 1), stages=3),
     Case("bfloat16", channels=64, channels_out=72, kernel=(3, 3, 3), sites=300, whole=False)),
    (TilesPlan(TileShape(128, 128), 128, (4, 2), stages=2),
     Case(channels=64, channels_out=136, kernel=(5, 3, 3), sites=300, whole=False)),
    (TilesPlan(TileShape(64, 128), 32, (2, 1)),
     Case("float32", channels=12, channels_out=36, kernel=(3, 3), kind="transposed", sites=300,
          precision="tf32")),
]  # fmt: skip
ONE_PART += [
    (TilesPlan(TileShape(64, 64), 16, (2, 1), engine="NarrowMma"),
     Case(channels=16, channels_out=16, kernel=(3, 3, 3), sites=150, spare=4, whole=False)),
    (TilesPlan(TileShape(128, 128), 16, (8, 1), buffers=1, engine="NarrowMma"),
     Case("bfloat16", channels=8, channels_out=8, kernel=(3, 3), sites=300, spare=4, whole=False)),
    (TilesPlan(TileShape(64, 64), 32, (2, 1), buffers=2),
     Case(channels=4, channels_out=24, kernel=(3, 3, 3), sites=150, spare=4, whole=False)),
    (TilesPlan(TileShape(64, 128), 16, (2, 1), engine="NarrowMma"),
     Case("float32", channels=12, channels_out=12, kernel=(3, 3, 3), sites=150, precision="tf32")),
]  # fmt: skip
ONE_PART += [  # tiles of other channels read the same rows, and weights that stay
    (TilesPlan(TileShape(128, 256), 32, (8, 1), buffers=1),
     Case(channels=4, channels_out=72, kernel=(3, 3, 3), sites=150, spare=4, whole=False)),
    (TilesPlan(TileShape(128, 384), 32, (8, 1), buffers=2),
     Case("float32", channels=8, channels_out=96, kernel=(3, 3), sites=300, precision="tf32")),
]  # fmt: skip
ONE_PART += [  # rows that are no whole vectors of 16 bytes: by 2, 4 or 8 bytes together
    (TilesPlan(TileShape(64, 64), 32, (2, 1), buffers=2),
     Case(channels=3, channels_out=24, kernel=(3, 3, 3), sites=150, spare=4, whole=False)),
    (TilesPlan(TileShape(64, 128), 32, (2, 1), buffers=1),
     Case("bfloat16", channels=15, channels_out=40, kernel=(3, 3, 3), sites=150, whole=False)),
    (TilesPlan(TileShape(64, 64), 16, (2, 1), engine="NarrowMma"),
     Case(channels=6, channels_out=16, kernel=(3, 3, 3), sites=150, spare=4, whole=False)),
    (TilesPlan(TileShape(64, 128), 32, (2, 1), buffers=2),
     Case("float32", channels=5, channels_out=32, kernel=(3, 3, 3), sites=150, precision="tf32")),
    (TilesPlan(TileShape(64, 128), 32, (2, 1), buffers=2),
     Case("float32", channels=3, channels_out=16, kernel=(3, 3), sites=300, precision="tf32")),
]  # fmt: skip
PARTS = [
    Case(channels=128, channels_out=64, kernel=(3, 3, 3), sites=300, whole=False),
    Case(channels=72, channels_out=40, kernel=(3, 3), sites=300, whole=False),
    Case("float32", channels=64, channels_out=64, kernel=(2, 2, 2), kind="strided", sites=300,
         precision="tf32", whole=False),
]  # fmt: skip


@pytest.mark.parametrize(
    "given", thinned(ONE_PART, 7, sanitized=3), ids=lambda given: str(given[0][:3])
)
def test_rows_of_one_part_have_the_bits_of_the_other_kernel(given, monkeypatch):
    plan, case = given
    other, found = results(case, (MmaPlan((64, 64), (2, 2), 3), plan), monkeypatch)
    assert_result(case, found, seed=3)
    assert_same(found, other)


@pytest.mark.parametrize("case", thinned(PARTS, 3), ids=str)
def test_every_tile_gives_the_same_bits(case, monkeypatch):
    """Part after part, in a part tap after tap: in tiles of any size, in rounds or not."""
    plans = (
        TilesPlan(TileShape(128, 256), 64, (4, 1), stages=3),
        TilesPlan(TileShape(64, 64), 64, (2, 2), stages=2, buffers=1),
    )
    first, other = results(case, plans, monkeypatch)
    assert_same(other, first)
    exact = replace(case, whole=True)
    assert_result(exact, *results(exact, plans[:1], monkeypatch), seed=3)


FOUR_WARPS = [  # that multiply together
    (TilesPlan(TileShape(64, 192), 32, (1, 1), 3, 1, 4, "TileWgmma"),
     Case(channels=64, channels_out=32, kernel=(3, 3, 3), sites=150, spare=4)),
    (TilesPlan(TileShape(64, 64), 64, (3, 1), 9, 2, 1, "SplitWgmma"),
     Case("bfloat16", channels=96, channels_out=96, kernel=(3, 3, 3), sites=130, spare=4)),
    (TilesPlan(TileShape(128, 256), 64, (2, 1), 4, 1, 1, "TileWgmma"),
     Case("float32", channels=32, channels_out=64, kernel=(3, 3), sites=300, precision="tf32")),
    (TilesPlan(TileShape(128, 384, True), 64, (2, 1), 4, 1, 2, "TileWgmma"),
     Case("float32", channels=128, channels_out=128, kernel=(3, 3, 3), sites=150,
          precision="tf32")),
    (TilesPlan(TileShape(128, 384), 64, (2, 1), 0, 1, 1, "TileWgmma"),
     Case(channels=32, channels_out=136, kernel=(3, 3), sites=300, spare=4)),
]  # fmt: skip


@pytest.mark.parametrize("given", thinned(FOUR_WARPS, 4, sanitized=4), ids=str)
def test_products_of_four_warps_are_exact(given, monkeypatch):
    plan, case = given
    assert_result(case, *results(case, [plan], monkeypatch), seed=3)


SPLIT = [tiling[0] for tiling in _TILINGS if tiling[0].engine == "SplitWgmma"]


@pytest.mark.parametrize("plan", SPLIT, ids=lambda plan: str(plan.columns))
def test_groups_that_share_taps_may_have_few_of_a_tile(plan, monkeypatch):
    monkeypatch.setattr(site_conv_launch, "current_device", lambda: site_on_host.AMPERE)
    monkeypatch.setattr(site_conv_launch, "plan_site_conv", lambda conv, device: plan)
    x, rows, w, expected = groups_apart()
    out = np.zeros(expected.shape, np.float16)
    arrays = (x, rows, None, w, None, None, None, out)
    with site_on_host.by_kernels():
        SITE_CONV.plan_for(arrays, ((3, 3, 3), len(x), 1, None, None)).run(*arrays)
        assert plan.kernel in site_on_host.LAUNCHED
    assert (out == expected).all()


HOPPER = Device(132, 227 << 10, hopper=True, bulk_copy=True)


@pytest.mark.parametrize("taps", [9, 27])
@pytest.mark.parametrize("element", ["Half", "float"])
@pytest.mark.parametrize("row_bytes", [8, 16, 32, 64])
def test_narrow_rows_are_copied_once_for_any_number_of_channels(row_bytes, element, taps):
    """By tiles side by side, each as wide as there are, where weights stay in shared memory."""
    channels = row_bytes // (2 if element == "Half" else 4)
    widest = 32 if row_bytes <= 32 else 64
    for sites, channels_out in itertools.product((9000, 14_000, 100_000), (72, 96, 128, 256)):
        conv = SiteConvSizes(element, sites, sites, taps, channels, channels_out, 1, 0,
                             element == "float", min(row_bytes, 16), 16)  # fmt: skip
        plan = plan_site_conv(conv, HOPPER)
        assert isinstance(plan, TilesPlan) and plan.columns == widest and not plan.stages
        assert plan.tiles(conv)[1] == -(-channels_out // widest)


@pytest.mark.parametrize(("element", "channels", "together"), [
    ("Half", 3, 2), ("Half", 15, 2), ("Half", 17, None), ("Half", 6, 4), ("Half", 14, 4),
    ("Half", 18, None), ("Half", 4, 8), ("Half", 12, 8), ("Half", 20, None), ("Half", 8, 16),
    ("float", 1, 4), ("float", 5, 4), ("float", 7, 4), ("float", 9, None), ("float", 6, 8),
])  # fmt: skip
def test_narrow_rows_are_copied_in_pieces(element, channels, together):
    """Rows that are no whole vectors of 16 bytes."""
    alignment = vector_bytes(channels * ELEMENT_BYTES[element])
    conv = SiteConvSizes(element, 14_000, 14_000, 27, channels, 32, 1, 0, element == "float",
                         alignment, 16)  # fmt: skip
    assert TilesPlan.copied(conv) == together
    assert isinstance(plan_site_conv(conv, HOPPER), TilesPlan) == (together is not None)


@pytest.mark.parametrize("taps", [9, 27, 64])
@pytest.mark.parametrize("channels", [8, 16, 32, 64, 96, 128, 256])
def test_plans_of_tiles_fit_the_device(taps, channels):
    for sites in (300, 1700, 9000, 14_000, 50_000, 100_000, 500_000):
        conv = SiteConvSizes("Half", sites, sites, taps, channels, channels, 1, 0, False, 16, 16)
        plan = plan_site_conv(conv, HOPPER)
        if isinstance(plan, OncePlan):
            assert sites < 9000 and plan.shared_bytes(conv) <= HOPPER.shared_bytes
            assert math.prod(plan.tiles(conv)) <= HOPPER.multiprocessors
        elif getattr(plan, "shared", False):
            assert channels >= 128 and plan.shared_bytes(conv) <= HOPPER.shared_bytes
        elif taps < 64 and plan not in [its.plan for its in _SORTED[2]]:
            assert isinstance(plan, TilesPlan)
        if isinstance(plan, TilesPlan):
            assert plan.shared_bytes(conv) * plan.blocks <= HOPPER.shared_bytes
            assert plan.order.rows <= plan.order.most <= 1024
            if math.prod(plan.tiles(conv)) <= HOPPER.multiprocessors:
                assert plan == alone(plan)


@pytest.mark.parametrize("rows", sorted({tiling[0].order.rows for tiling in _TILINGS}))
def test_lists_of_tiles_fit_the_device(rows):
    """With any number of taps: a tile of 256 rows has a hash table of up to 128 KiB."""
    for slices in (4, 8) if rows == 64 else (4,):
        sizes = [shared_bytes(taps, rows, slices) for taps in range(1, MOST_TAPS + 1)]
        assert sizes == sorted(sizes) and sizes[-1] <= HOPPER.shared_bytes


def test_other_sizes_leave_tiles():
    conv = SiteConvSizes("Half", 9000, 9000, 27, 64, 64, 1, 0, False, 16, 16)
    assert isinstance(plan_site_conv(conv, HOPPER), TilesPlan)
    for change in (
        {"taps": 4}, {"taps": 125}, {"groups": 2}, {"channels": 320}, {"alignment_in": 8},
        {"alignment_out": 2}, {"targets": 60}, {"element": "double"}, {"alignment_in": 4},
    ):  # fmt: skip
        assert not isinstance(plan_site_conv(conv._replace(**change), HOPPER), TilesPlan)
    floats = conv._replace(element="float", tf32=True, sources=15_000, targets=15_000)
    for channels in (64, 96):  # two parts of a row, and three
        plan = plan_site_conv(floats._replace(channels=channels), HOPPER)
        assert isinstance(plan, TilesPlan) == (channels == 64)
    narrow = {"channels": 4, "channels_out": 32, "alignment_in": 8}
    for change in (narrow, {"channels": 48}, {"channels_out": 96}):
        assert isinstance(plan_site_conv(conv._replace(**change), HOPPER), TilesPlan)
    assert not isinstance(plan_site_conv(conv, HOPPER._replace(hopper=False)), TilesPlan)
