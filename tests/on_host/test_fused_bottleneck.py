"""The CUDA kernels of fused_bottleneck on the CPU: exact for whole numbers, bounded for others.

How they get there, and what of them does not: fused_on_host.py.
"""

import math

import numpy as np
import pytest

from sbnet_cupy.block_sparse.bottleneck.config import UnitConfig
from support.assertions import assert_same
from support.exhaustive import all_but, first_of
from support.fused_on_host import AMPERE, BLACKWELL, FEW_TABLES, TABLES, TURING, UNIT, Run
from support.unit_cases import SPREADING, Case, dense, kinds


def plan(chunks, mid, tile=(8, 8), warps=4, split1=1, second=(4, 1, 1), slice=32, ahead=1,
         bulk=True, engine="MmaSync", cluster=1):  # fmt: skip
    """Return a plan."""
    rows3 = math.gcd(math.prod(tile) // 16, warps)
    return UnitConfig(
        engine, chunks, mid, tile, cluster, warps, split1, second, rows3, slice, ahead, 1, bulk
    )


def unit(channels, middle, size=(2, 21, 19), **options):
    """Return the sizes of a Case."""
    return {"image": (*size, channels), "middle": middle, "bsize": (16, 16)} | options


HALF, BFLOAT = {"dtype": "float16"}, {"dtype": "bfloat16"}
TF32 = {"dtype": "float32", "precision": "tf32"}


def _runs():
    rows = [
        ("last unit alone", HALF, unit(96, 24, packed=True),
         plan(3, 24, (8, 16), 8, second=(8, 1, 1), ahead=3)),
        ("warps share chunks", HALF, unit(48, 16, packed=True),
         plan(2, 16, warps=8, split1=2, second=(4, 2, 1), bulk=False)),
        ("chunks left over", HALF, unit(72, 20, bsize=(5, 3)), plan(3, 24, ahead=2, bulk=False)),
        ("warps share K", HALF, unit(64, 64, packed=True),
         plan(2, 64, (4, 8), 8, 2, (2, 1, 4))),
        ("idle warps, channels added", HALF, unit(64, 40, bsize=(8, 6)),
         plan(2, 64, (4, 8), 8, 1, (2, 2, 2), ahead=2, bulk=False)),
        ("idle warps, bulk copy", HALF, unit(64, 40), plan(2, 64, (4, 8), 8, 1, (2, 2, 2))),
        ("narrow slices", HALF, unit(40, 16),
         plan(2, 16, (4, 8), 4, 2, (2, 2, 1), slice=16, bulk=False)),
        ("wide slices", HALF, unit(96, 24), plan(3, 24, slice=96)),
        ("tight", HALF, unit(96, 24, tight=True, packed=True), plan(3, 24, ahead=3)),
        ("tight", BFLOAT, unit(40, 16, tight=True), plan(2, 16, ahead=2, bulk=False)),
        ("a third of the chunks each", BFLOAT, unit(80, 33, packed=True),
         plan(3, 48, warps=12, split1=3, second=(4, 1, 3))),
        ("odd planes", BFLOAT, unit(24, 40), plan(1, 40, (8, 16), 8, second=(8, 1, 1))),
        ("one plane", BFLOAT, unit(8, 3, bsize=(1, 7)), plan(1, 8, bulk=False)),
        ("two rows to a warp", BFLOAT, unit(48, 16),
         plan(2, 16, (8, 16), 8, second=(4, 2, 1), ahead=2)),
        ("channels added", TF32, unit(12, 12), plan(1, 16, slice=16)),
        ("chunks", TF32, unit(96, 24, packed=True), plan(6, 24, slice=16, ahead=3)),
        ("warps share chunks and K", TF32, unit(28, 48, bsize=(9, 5)),
         plan(2, 48, (4, 8), 12, 2, (2, 2, 3), slice=16, bulk=False)),
        ("slices of 8", TF32, unit(20, 16, packed=True),
         plan(2, 16, (8, 16), 8, 2, (8, 1, 1), slice=8)),
        ("four warps", HALF, unit(96, 24, packed=True),
         plan(3, 24, slice=96, ahead=3, engine="WarpGroup")),
        ("four warps share K", BFLOAT, unit(64, 64),
         plan(2, 64, warps=8, second=(4, 1, 2), ahead=2, engine="WarpGroup")),
        ("two share a tile", HALF, unit(96, 40, packed=True),
         plan(3, 48, slice=48, ahead=3, cluster=2)),
        ("four share a tile", TF32, unit(96, 24, bsize=(6, 6)),
         plan(8, 32, (4, 8), 4, 2, (2, 1, 2), slice=16, bulk=False, cluster=4)),
        ("clusters of four warps", BFLOAT, unit(64, 64),
         plan(2, 64, warps=8, second=(4, 1, 2), slice=16, engine="WarpGroup", cluster=2)),
        ("planned", HALF, unit(96, 24, (1, 11, 12), bsize=(6, 6), expected=0), TURING),
        ("planned", HALF, unit(96, 24, (1, 11, 12), expected=10**7), TURING),
        ("planned", BFLOAT, unit(72, 33, (1, 11, 12), expected=0), AMPERE),
        ("planned", TF32, unit(40, 20, (1, 17, 18), bsize=(8, 8), expected=10**7), AMPERE),
        ("planned", HALF, unit(192, 48, (1, 21, 19), bsize=(8, 8), expected=0), BLACKWELL),
    ]  # fmt: skip
    for name, number, sizes, plan_or_device in rows:
        yield Run(Case(**number, **sizes), plan_or_device, name)
    for i, table in enumerate(TABLES):
        for name, number, sizes, given in rows[:2]:  # compiled already
            yield Run(Case(**number, **sizes, table=table, seed=i), given, name)


RUNNABLE = list(_runs())
ONCE = [run for run in RUNNABLE if run.case.table == "some"]
USUAL = [ONCE[0], ONCE[1], ONCE[9], ONCE[15]]  # each of another dtype or way to share the work
USUAL += [run for run in ONCE if run.name in ("four warps", "two share a tile")]
USUAL += [run for run in RUNNABLE if run.case.table in FEW_TABLES and run.name == ONCE[0].name]


@pytest.fixture(scope="module", autouse=True)
def _compiled(request):
    UNIT.compile(request)


@pytest.mark.parametrize("run", all_but(RUNNABLE, USUAL), ids=str)
def test_whole_numbers_are_exact(run, monkeypatch):
    UNIT.check_whole_numbers(run, monkeypatch)


@pytest.mark.parametrize("run", all_but(ONCE, USUAL), ids=str)
def test_other_numbers_within_the_bound(run, monkeypatch):
    UNIT.check_other_numbers(run, monkeypatch, run.case.assert_within_bound)


SPOILED = [(run, SPREADING[(i + j) % len(SPREADING)]) for i, run in enumerate(ONCE) for j in (0, 3)]


@pytest.mark.parametrize(("run", "spoiling"), first_of(SPOILED, 2), ids=str)
def test_nan_and_infinities_spread_as_in_the_dense_unit(run, spoiling, monkeypatch):
    """Not through channels that fill up chunks or planes."""
    arrays, active = run.case.spoiled(*spoiling), run.case.active()
    expected = kinds(dense(*arrays)[active])
    for out in UNIT.run_all(run, arrays, monkeypatch):
        assert_same(kinds(out[active].astype(np.float64)), expected)


def test_weights_are_packed_once_until_refreshed():
    UNIT.check_packing(RUNNABLE[0], lambda packed: packed.weights.w3)


def test_what_has_no_kernel_says_why():
    for case, reason in (
        (Case(dtype="float64"), "float64"),
        (Case(dtype="float32"), "pass precision='tf32'"),
        (Case(image=(1, 8, 8, 12)), "12 channels of float16 .* 16-byte vectors"),
        (Case(image=(1, 8, 8, 512), middle=512), "do not fit this GPU's shared memory"),
        (Case(**BFLOAT), "bfloat16 on this GPU"),
        (Case(**TF32), "float32 on this GPU"),
    ):
        UNIT.check_refusal(case, TURING if "on this GPU" in reason else AMPERE, reason)
