"""Convolutions by tiles that read each row once, on a GPU."""

import numpy as np
import pytest

from sbnet_cupy.core import operator
from sbnet_cupy.submanifold import site_conv_launch
from sbnet_cupy.submanifold.site_conv import SITE_CONV
from sbnet_cupy.submanifold.site_conv_instances import TilesPlan
from sbnet_cupy.submanifold.site_conv_plan import _TILINGS, alone
from sbnet_cupy.submanifold.site_tiles import SiteTiles, TileShape, site_tiles
from support.assertions import assert_same
from support.site_conv_cases import SiteConvCase, assert_result, run_by_plan
from support.site_tables import groups_apart, read_back, sorted_tiles, table

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]
W, SPLIT = "TileWgmma", "SplitWgmma"
Case = SiteConvCase
OTHERS = [
    (TilesPlan(TileShape(64, 64), 32, (2, 1), buffers=1), 24, 32),
    (TilesPlan(TileShape(128, 128), 64, (4, 2), buffers=1), 32, 72),
    (TilesPlan(TileShape(128, 256), 64, (4, 1), stages=3), 64, 72),
    (TilesPlan(TileShape(128, 128), 128, (2, 1), stages=3, engine=W), 64, 136),
    (TilesPlan(TileShape(256, 256), 64, (4, 1), stages=2, buffers=1, engine=W), 128, 64),
    (TilesPlan(TileShape(256, 512), 128, (2, 1), stages=3, engine=W), 192, 128),
    (TilesPlan(TileShape(64, 192), 32, (1, 1), 3, 1, 4, W), 64, 32),
    (TilesPlan(TileShape(64, 128), 16, (2, 1), 0, 2, 4, "NarrowMma"), 16, 16),
    (TilesPlan(TileShape(256, 640), 16, (8, 1), 0, 1, 3, "NarrowMma"), 16, 8),
    (TilesPlan(TileShape(256, 640), 32, (4, 1), 0, 2, 1, W), 32, 32),
    (TilesPlan(TileShape(128, 384), 32, (1, 1), 0, 1, 2, W), 24, 24),
    (TilesPlan(TileShape(64, 192), 32, (1, 1), 0, 1, 2, W), 16, 32),
    (TilesPlan(TileShape(64, 192), 64, (3, 1), 9, 2, 1, SPLIT), 96, 96),
    (TilesPlan(TileShape(64, 64), 64, (4, 1), 8, 2, 1, SPLIT), 192, 136),
    (TilesPlan(TileShape(128, 256), 64, (2, 1), 4, 1, 1, SPLIT), 40, 64),
    (TilesPlan(TileShape(128, 320), 128, (2, 1), 5, 2, 1, W), 96, 72),
    (TilesPlan(TileShape(256, 640), 16, (8, 1), 0, 1, 3, "NarrowMma"), 4, 16),
    (TilesPlan(TileShape(128, 128), 32, (8, 1), 0, 2, 3), 4, 32),
]
TILINGS = list(
    dict.fromkeys(
        (plan, size // 2, plan.columns)
        for tiling, size, _ in _TILINGS
        for plan in (tiling, alone(tiling))
    )
)


@pytest.mark.parametrize("given", TILINGS + OTHERS, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_whole_numbers(given, dtype, cupy, monkeypatch):
    """Several tiles for each thread block, and the same bits again."""
    plan, channels, channels_out = given
    wide = 2 if dtype == "float32" else 1
    case = Case(dtype, 1200, channels // wide, channels_out, (3, 3, 3), spare=40,
                precision="tf32" if wide == 2 else None)  # fmt: skip
    first, again = (run_by_plan(case, plan, cupy.asarray, monkeypatch) for _ in range(2))
    assert_result(case, first, seed=3)
    assert_same(again, first)


@pytest.mark.parametrize("kind", ["strided", "transposed"])
def test_other_maps(kind, cupy, monkeypatch):
    for given in TILINGS[1], TILINGS[7]:
        plan, channels, channels_out = given
        case = Case("float16", 900, channels, channels_out, (2, 3, 2), kind=kind)
        assert_result(case, run_by_plan(case, plan, cupy.asarray, monkeypatch), seed=3)


@pytest.mark.parametrize("number", range(2))
def test_groups_that_share_taps_may_have_few_of_a_tile(number, cupy, monkeypatch):
    plans = [tiling[0] for tiling in _TILINGS if tiling[0].engine == SPLIT]
    monkeypatch.setattr(site_conv_launch, "plan_site_conv", lambda conv, device: plans[number])
    monkeypatch.setattr(operator, "_PLANS", operator._Plans())
    *arrays, expected = groups_apart()
    x, rows, w = map(cupy.asarray, arrays)
    out = cupy.zeros(expected.shape, np.float16)
    operands = (x, rows, None, w, None, None, None, out)
    SITE_CONV.plan_for(operands, ((3, 3, 3), len(x), 1, None, None)).run(*operands)
    assert (out.get() == expected).all()


@pytest.mark.parametrize("shape", [(64, 64), (128, 320), (256, 640), (256, 1024)], ids=str)
@pytest.mark.parametrize("sources", [100, 20000])
def test_tiles_stand_for_the_map(shape, sources, cupy):
    shape = TileShape(*shape)
    rows = table((3, 3, 3), 3001, 0.9)
    rows = np.where(rows < 0, -1, rows * (sources // 50) + np.arange(3001) % (sources // 50))
    tiles, again = (
        site_tiles(cupy.asarray(rows.astype(np.int32)), sources, shape) for _ in range(2)
    )
    found, other = ([array.get() for array in made] for made in (tiles, again))
    assert (read_back(SiteTiles(*found), 27, 3001, shape) == rows).all()
    assert (found[0].ravel()[:3001] == sorted_tiles(rows, np.arange(3001), shape.rows)).all()
    for one, more in zip(found[:2], other[:2], strict=True):
        assert (one[:, :2] == more[:, :2]).all()
