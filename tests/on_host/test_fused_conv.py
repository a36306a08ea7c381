"""The CUDA kernels of fused_conv on the CPU: exact for whole numbers, within a bound for others.

How they get there, and what of them does not: fused_on_host.py.
"""

import numpy as np
import pytest

from sbnet_cupy.block_sparse.conv.config import ConvConfig
from sbnet_cupy.block_sparse.stack.stack_conv_plan import StackPlan
from support import conv_oracles as oracles
from support.exhaustive import all_but
from support.fused_cases import Case
from support.fused_on_host import AMPERE, BLACKWELL, CONV, FEW_TABLES, TABLES, TURING, Run


def plan(engine="MmaSync", *, planes, slice, tile=(8, 8), warps=(4, 1, 1), stages=1, chunks=1,
         bulk=True):  # fmt: skip
    """Return a plan; weights of several chunks are not resident."""
    resident = chunks == 1
    return ConvConfig(engine, planes, slice, tile, warps, stages, resident, chunks, 1, bulk)


def wide(tile, warps, stages, parts=1, **more):
    """Return a plan of the kernel for many channels."""
    plan = StackPlan("TileMma", tile, warps, stages, 1, False, True, True, 0, 1, parts)
    return plan._replace(**more)


def boxes(tile, warps, stages, parts=1, **more):
    """Return one whose pixels come in boxes."""
    return wide(tile, warps, stages, parts, cached=False, bulk=True, **more)


def direct(tile, warps, stages, parts=1, **more):
    """Return one in which threads that copy look up the blocks of their pixels."""
    return wide(tile, warps, stages, parts, cached=False, direct=True, **more)


EXTRAS = ("scale", "bias", "residual")
HALF, BFLOAT = {"dtype": "float16"}, {"dtype": "bfloat16"}
TF32, IEEE = {"precision": "tf32"}, {"precision": "ieee"}


def image(channels_in, channels_out, size=(2, 21, 19), **options):
    """Return the sizes of a Case."""
    return {"image": (*size, channels_in), "channels": channels_out} | options


def _runs():
    relu = {"extras": EXTRAS, "activation": "relu", "packed": True}
    rows = [
        ("last unit alone", HALF, image(24, 24, bsize=(16, 16), **relu),
         plan(planes=3, slice=24, tile=(8, 16), stages=2)),
        ("cp.async, one stage", HALF, image(24, 24, bsize=(5, 3)),
         plan(planes=3, slice=24, warps=(2, 3, 1), bulk=False)),
        ("warps share K", HALF, image(48, 48, **relu), plan(planes=6, slice=48, warps=(2, 2, 3))),
        ("two slices", HALF, image(64, 64, bsize=(16, 16), extras=EXTRAS),
         plan(planes=8, slice=32, tile=(4, 8), warps=(2, 1, 4), stages=2)),
        ("slice over the end", HALF, image(16, 24, extras=("residual",)),
         plan(planes=2, slice=16, tile=(4, 8), warps=(2, 2, 1), bulk=False)),
        ("elements", BFLOAT, image(20, 20, kernel=(5, 5), strides=(2, 2), bsize=(6, 10), **relu),
         plan(planes=3, slice=24, stages=2)),
        ("elements", BFLOAT, image(17, 3, data_format="NCHW", w_format="OIHW", **relu),
         plan(planes=3, slice=8, warps=(4, 1, 1), bulk=False)),
        ("vectors in alone", HALF, image(8, 9, extras=EXTRAS),
         plan(planes=1, slice=16, tile=(8, 16), warps=(8, 1, 1), stages=2)),
        ("vectors out alone", HALF, image(7, 8, extras=EXTRAS),
         plan(planes=1, slice=8, tile=(8, 16), warps=(8, 1, 1))),
        ("one unit", BFLOAT, image(8, 16, kernel=(1, 1)), plan(planes=1, slice=16, stages=2)),
        ("stem", HALF, image(3, 16, kernel=(7, 7), strides=(2, 2), bsize=(7, 7)),
         plan(planes=1, slice=16)),
        ("rolled taps", BFLOAT, image(32, 8, kernel=(7, 7), padding="VALID"),
         plan(planes=4, slice=8, warps=(4, 1, 1))),
        ("rectangular", HALF, image(16, 16, kernel=(1, 5), strides=(1, 2), **relu),
         plan(planes=2, slice=16)),
        ("chunks", HALF, image(40, 72, strides=(2, 1), **relu),
         plan(planes=2, slice=24, stages=2, chunks=3)),
        ("chunks, cp.async", BFLOAT, image(40, 24, data_format="NCHW", extras=EXTRAS),
         plan(planes=2, slice=24, stages=2, chunks=3, bulk=False)),
        ("chunks, warps share K", TF32, image(32, 16, **relu),
         plan(planes=4, slice=16, tile=(4, 8), warps=(2, 1, 2), stages=2, chunks=2)),
        ("odd chunks", HALF, image(48, 8, kernel=(3, 3)),
         plan(planes=3, slice=8, stages=2, chunks=2)),
        ("vectors", TF32, image(24, 24, bsize=(16, 16), extras=EXTRAS),
         plan(planes=6, slice=24, tile=(8, 16), stages=2)),
        ("last unit alone", TF32, image(12, 8, **relu), plan(planes=3, slice=8, bulk=False)),
        ("elements", TF32, image(7, 9, data_format="NCHW", extras=EXTRAS),
         plan(planes=2, slice=16, stages=2)),
        ("vectors", IEEE, image(24, 24, bsize=(16, 16), **relu),
         plan("Fma", planes=6, slice=24, tile=(8, 16), stages=2)),
        ("elements", IEEE, image(7, 9, kernel=(1, 3), strides=(1, 2), data_format="NCHW",
                                 w_format="OIHW", extras=EXTRAS),
         plan("Fma", planes=2, slice=16, bulk=False)),
        ("last unit alone", IEEE, image(12, 16, extras=("bias",)),
         plan("Fma", planes=3, slice=8, tile=(4, 8), warps=(2, 1, 1))),
        ("chunks, warps share K", IEEE, image(32, 24, strides=(2, 2), **relu),
         plan("Fma", planes=4, slice=24, warps=(2, 3, 2), stages=2, chunks=2)),
        ("four warps", HALF, image(24, 24, bsize=(16, 16), **relu),
         plan("WarpGroup", planes=3, slice=24, tile=(8, 16), warps=(8, 1, 1), stages=2)),
        ("four warps, chunks", BFLOAT, image(40, 72, extras=EXTRAS),
         plan("WarpGroup", planes=2, slice=24, stages=2, chunks=3)),
        ("four warps", TF32, image(32, 16, **relu), plan("WarpGroup", planes=8, slice=16)),
        ("wide", HALF, image(136, 72, bsize=(7, 5), **relu), wide((64, 64), (2, 2), 3)),
        ("wide, strides", BFLOAT, image(64, 128, kernel=(3, 2), strides=(2, 1), extras=EXTRAS),
         wide((128, 64), (4, 2), 2, 2)),
        ("wide, one tap", HALF, image(128, 40, kernel=(1, 1), bsize=(3, 4), w_format="OIHW"),
         wide((64, 64), (2, 2), 4)),
        ("wide, padding", HALF, image(64, 64, padding=((3, 0), (1, 4)), extras=("residual",)),
         wide((128, 128), (4, 2), 2)),
        ("wide", TF32, image(40, 24, padding="VALID", **relu), wide((64, 64), (2, 2), 2)),
        # Blocks that stick out of both images below and on the right; channels that are no chunk.
        ("boxes, a block", HALF, image(136, 72, kernel=(1, 1), bsize=(8, 8), **relu),
         boxes((64, 64), (2, 2), 3)),
        ("boxes, four blocks", HALF, image(64, 136, kernel=(1, 1), bsize=(4, 4), extras=("bias",)),
         boxes((128, 64), (4, 2), 2, 2)),
        ("boxes, many blocks", BFLOAT, image(72, 40, kernel=(1, 1), bsize=(2, 2), **relu),
         boxes((128, 128), (4, 2), 2)),
        ("boxes, a pixel each", HALF, image(200, 64, kernel=(1, 1), bsize=(1, 1), extras=EXTRAS),
         boxes((64, 64), (2, 2), 3)),
        ("boxes, lines", TF32, image(36, 24, kernel=(1, 1), bsize=(2, 16), **relu),
         boxes((64, 64), (2, 2), 2)),
        ("boxes, parts of lines", BFLOAT, image(8, 24, kernel=(1, 1), bsize=(3, 12), **relu),
         boxes((128, 64), (4, 2), 2, 2)),
        ("boxes, a block of 256", HALF, image(64, 13, kernel=(1, 1), bsize=(16, 16), **relu),
         boxes((128, 64), (4, 2), 3)),
        ("boxes, odd blocks", HALF, image(64, 24, kernel=(1, 1), bsize=(7, 5), w_format="OIHW"),
         boxes((64, 64), (2, 2), 2)),
        ("boxes, one chunk a tile", HALF, image(64, 40, kernel=(1, 1), bsize=(2, 2), **relu),
         boxes((64, 64), (2, 2), 4)),
        ("boxes, a cluster", HALF, image(264, 72, kernel=(1, 1), bsize=(4, 4), **relu),
         boxes((64, 64), (2, 2), 2, split=3)),
        ("boxes, a cluster of few", BFLOAT, image(136, 64, kernel=(1, 1), bsize=(2, 2), **relu),
         boxes((64, 64), (2, 2), 3, split=2)),
        ("boxes, four warps", HALF, image(136, 72, kernel=(1, 1), bsize=(2, 4), **relu),
         boxes((64, 64), (1, 1), 3, engine="TileWgmma")),
        ("boxes, four warps", TF32, image(40, 72, kernel=(1, 1), bsize=(4, 4), **relu),
         boxes((64, 64), (1, 1), 2, engine="TileWgmma")),
        ("direct", HALF, image(136, 72, kernel=(1, 1), bsize=(7, 5), **relu),
         direct((64, 64), (2, 2), 3)),
        ("direct, cut", BFLOAT, image(64, 136, kernel=(1, 1), bsize=(1, 1), extras=EXTRAS),
         direct((128, 64), (4, 2), 2, 2)),
        ("direct, wide", TF32, image(36, 130, kernel=(1, 1), bsize=(3, 4), **relu),
         direct((128, 128), (4, 2), 2)),
        ("direct, a cluster", HALF, image(264, 72, kernel=(1, 1), bsize=(2, 3), **relu),
         direct((64, 64), (2, 2), 3, split=3)),
        ("direct, many warps", BFLOAT, image(72, 64, kernel=(1, 1), bsize=(5, 5), **relu),
         direct((192, 64), (3, 1), 3, 3, engine="TileWgmma")),
        ("boxes, many warps", BFLOAT, image(72, 136, kernel=(1, 1), bsize=(1, 2), **relu),
         boxes((192, 128), (3, 1), 2, 3, engine="TileWgmma")),
        ("planned", HALF, image(256, 96, (1, 11, 12), bsize=(6, 6), expected=1,
                                extras=("bias",)), TURING),
        ("planned", BFLOAT, image(96, 40, (1, 11, 12), expected=1), AMPERE),
        ("planned", TF32, image(64, 64, (1, 17, 18), bsize=(8, 8), expected=10**7), AMPERE),
        ("planned", IEEE, image(50, 30, (1, 11, 12), expected=1), TURING),
        ("planned", TF32, image(50, 30, (1, 11, 12), expected=1), TURING),  # IEEE there
        ("planned", HALF, image(48, 48, (1, 21, 19), bsize=(8, 8), expected=10**7), BLACKWELL),
    ]  # fmt: skip
    for name, number, sizes, plan_or_device in rows:
        yield Run(Case(**number, **sizes), plan_or_device, name)
    for i, table in enumerate(TABLES):
        sizes = image(136, 72, bsize=(7, 5), table=table, seed=i, **relu)
        yield Run(Case(**HALF, **sizes), wide((64, 64), (2, 2), 3), "wide")
        for bsize, name in (((8, 8), "boxes, a block"), ((1, 1), "boxes, a pixel each")):
            sizes = image(136, 72, kernel=(1, 1), bsize=bsize, table=table, seed=i, **relu)
            yield Run(Case(**HALF, **sizes), boxes((64, 64), (2, 2), 3), name)
        sizes = image(136, 72, kernel=(1, 1), bsize=(7, 5), table=table, seed=i, **relu)
        yield Run(Case(**HALF, **sizes), direct((64, 64), (2, 2), 3), "direct")
        sizes = image(24, 24, bsize=(16, 16), table=table, seed=i, **relu)
        yield Run(Case(**HALF, **sizes), rows[0][3], rows[0][0])  # compiled already
        sizes = image(40, 72, strides=(2, 1), table=table, seed=i, **relu)
        yield Run(Case(**HALF, **sizes), rows[13][3], rows[13][0])


RUNNABLE = list(_runs())
ONCE = [run for run in RUNNABLE if run.case.table == "some"]
USUAL = [ONCE[0], ONCE[5], ONCE[13], ONCE[17], ONCE[20]]  # each of another dtype, layout or engine
NAMES = "four warps", "wide", "boxes, four blocks", "boxes, a pixel each", "direct, cut"
USUAL += [next(run for run in ONCE if run.name == name) for name in NAMES]
USUAL += [run for run in RUNNABLE if run.case.table == "corrupt" and "boxes" in run.name]
USUAL += [run for run in RUNNABLE if run.case.table in FEW_TABLES and run.name == ONCE[0].name]
SMOOTH = [
    Run(Case(**number, **image(*channels, activation=activation, extras=EXTRAS)), given)
    for activation in ("silu", "gelu")
    for number, channels, given in (
        (HALF, (8, 16), plan(planes=1, slice=16)),
        (TF32, (7, 9), plan(planes=2, slice=16)),
        (IEEE, (8, 8), plan("Fma", planes=2, slice=8)),
    )
]


@pytest.fixture(scope="module", autouse=True)
def _compiled(request):
    CONV.compile(request)


@pytest.mark.parametrize("run", all_but(RUNNABLE, USUAL), ids=str)
def test_whole_numbers_are_exact(run, monkeypatch):
    CONV.check_whole_numbers(run, monkeypatch)


@pytest.mark.parametrize("run", all_but(ONCE + SMOOTH, USUAL), ids=str)
def test_other_numbers_within_the_bound(run, monkeypatch):
    case = run.case
    active = case.laid_out(np.broadcast_to(case.active()[..., None], case.shape))
    expected = oracles.Bounded(*(case.laid_out(a)[active] for a in case.bounded()))

    def assert_within_bound(out):
        oracles.assert_within(out[active], expected)

    CONV.check_other_numbers(run, monkeypatch, assert_within_bound)


@pytest.mark.parametrize("run", all_but(ONCE, USUAL), ids=str)
@pytest.mark.parametrize("value", [np.nan, np.inf], ids=str)
def test_nan_reaches_exactly_the_windows_that_hold_it(run, value, monkeypatch):
    case = run.case
    x, *rest = case.arrays()
    rng = np.random.default_rng(3)
    bad = rng.random(x.shape[:3]) < 0.02
    bad[0, 0, 0] = True
    x[bad, rng.integers(0, x.shape[3], bad.sum())] = value
    reached = oracles.max_pool(bad.astype(float), case.kernel, case.strides, case.padding) > 0
    clean = case.laid_out(np.broadcast_to((case.active() & ~reached)[..., None], case.shape))
    dirty = case.laid_out(np.broadcast_to((case.active() & reached)[..., None], case.shape))
    for out in CONV.run_all(run, (x, *rest), monkeypatch):
        assert np.isfinite(out[clean].astype(np.float32)).all()
        if value is np.nan:
            assert np.isnan(out[dirty].astype(np.float32)).all()


def test_weights_are_packed_once_until_refreshed():
    CONV.check_packing(RUNNABLE[0], lambda packed: packed.w)


def test_what_has_no_kernel_says_why():
    for case, reason in (
        (Case(dtype="float64"), "float64"),
        (Case(dtype="bfloat16"), "bfloat16 on this GPU"),
        (Case(image=(1, 8, 8, 0)), "empty images"),
        (Case(kernel=(600, 600), padding=((600, 600), (600, 600))), "shared memory"),
        (Case(image=(1, 8, 8, 1), padding=((2**30 + 1, 0), (0, 0)), strides=(2**30, 1)), "above"),
    ):
        CONV.check_refusal(case, TURING, reason)
