"""The CUDA kernels of fused_conv on the CPU: exact for whole numbers, within a bound for others.

As in test_cuda_on_host.py the op's CUDA body goes to the host shim, which has the tensor cores of
mma.sync but no wgmma: of the engines, ``WarpGroup`` runs on GPUs of compute capability 9.0 alone
(test_fused_conv.py there). Plans are given, so that every branch of the kernels runs; those of the
planner follow, for GPUs with little shared memory and with much.
"""

import contextlib
import importlib
import math
from dataclasses import dataclass

import conv_oracles as oracles
import host_cuda
import numpy as np
import pytest
from assertions import assert_same
from fused_cases import Case
from host_memory import Memory, signature_of

from sbnet_cupy import _kernels
from sbnet_cupy.ops import _packed_weights, _plans
from sbnet_cupy.ops._fused_plan import ConvPlan, Device

op = importlib.import_module("sbnet_cupy.ops.fused_conv")  # sbnet_cupy.fused_conv is the function
RESIDENT = 2  # thread blocks that a multiprocessor holds at once
# order of the threads, multiprocessors, what results hold at first
RUNS = (("forward", 132, 0xA5), ("reverse", 1, 0xFF))
TURING = Device(multiprocessors=40, shared_bytes=64 << 10, hopper=False, bulk_copy=False,
                tensor_floats=False)  # fmt: skip
AMPERE = Device(multiprocessors=84, shared_bytes=99 << 10, hopper=False, bulk_copy=False)
BLACKWELL = Device(multiprocessors=148, shared_bytes=227 << 10, hopper=False, bulk_copy=True)


@dataclass(frozen=True)
class Run:
    """A call, and the plan that it gets: one of ours, or a device for the planner."""

    case: Case
    plan: ConvPlan | Device
    name: str = ""

    def __str__(self):
        return f"{self.name}:_{self.case}"


def plan(engine="MmaSync", *, planes, slice, tile=(8, 8), warps=(4, 1, 1), stages=1, chunks=1,
         bulk=True):  # fmt: skip
    """Return a plan; weights of several chunks are not resident."""
    resident = chunks == 1
    return ConvPlan(engine, planes, slice, tile, warps, stages, resident, chunks, 1, bulk)


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
        ("planned", HALF, image(256, 96, (1, 11, 12), bsize=(6, 6), expected=1), TURING),
        ("planned", BFLOAT, image(96, 40, (1, 11, 12), expected=1), AMPERE),
        ("planned", TF32, image(64, 64, (1, 17, 18), bsize=(8, 8), expected=10**7), AMPERE),
        ("planned", IEEE, image(50, 30, (1, 11, 12), expected=1), TURING),
        ("planned", TF32, image(50, 30, (1, 11, 12), expected=1), TURING),  # IEEE there
        ("planned", HALF, image(48, 48, (1, 21, 19), bsize=(8, 8), expected=10**7), BLACKWELL),
    ]  # fmt: skip
    for name, number, sizes, plan_or_device in rows:
        yield Run(Case(**number, **sizes), plan_or_device, name)
    for i, table in enumerate(("all", "empty", "count 0", "count negative", "count too large",
                               "corrupt", "repeated")):  # fmt: skip
        sizes = image(24, 24, bsize=(16, 16), table=table, seed=i, **relu)
        yield Run(Case(**HALF, **sizes), rows[0][3], rows[0][0])  # compiled already
        sizes = image(40, 72, strides=(2, 1), table=table, seed=i, **relu)
        yield Run(Case(**HALF, **sizes), rows[13][3], rows[13][0])


RUNNABLE = list(_runs())
SMOOTH = [
    Run(Case(**number, **image(*channels, activation=activation, extras=EXTRAS)), given)
    for activation in ("silu", "gelu")
    for number, channels, given in (
        (HALF, (8, 16), plan(planes=1, slice=16)),
        (TF32, (7, 9), plan(planes=2, slice=16)),
        (IEEE, (8, 8), plan("Fma", planes=2, slice=8)),
    )
]


@contextlib.contextmanager
def device(launch, given, multiprocessors, memory):
    """Send what the op launches to ``launch``; yield the list of what was launched."""
    launched = []

    def prepare(stem, kernel, template, grid, block, pointers, scalars, shared=0,
                persistent=False, dependent=False):  # fmt: skip
        if persistent:
            most = RESIDENT * multiprocessors // math.prod(grid[1:])
            grid = (min(grid[0], max(most, 1)), *grid[1:])

        def run(*arrays):
            assert len(arrays) == pointers
            launched.append((stem, kernel, template))
            launch(stem, kernel, template, grid, block, (*arrays, *scalars), shared)

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_kernels, "prepare", prepare)
        patch.setattr(_plans, "device_of", lambda array: 0)
        patch.setattr(_plans, "signature_of", signature_of)
        patch.setattr(op, "is_cupy", lambda array: True)
        patch.setattr(op, "_PLANS", _plans.Plans())
        planned = isinstance(given, ConvPlan)
        patch.setattr(op, "current_device", lambda: BLACKWELL if planned else given)
        if planned:
            patch.setattr(op, "plan_for", lambda *case: given)
        patch.setattr(op, "apart", lambda *arrays: False)  # check_apart will say
        for module in (op, _packed_weights):
            patch.setattr(module, "empty", memory.poisoned)
        yield launched


def instantiations(runs):
    """What the runs would launch."""
    found = {}
    for run in runs:
        with device(lambda *launch: None, run.plan, 1, Memory()) as launched:
            run.case.run(run.case.arrays(), Memory().read_only)
        found |= dict.fromkeys(launched)
    return list(found)


@pytest.fixture(scope="module", autouse=True)
def _compiled(request, require):
    """Compile what the chosen tests need, together."""
    require("g++")
    items = [item for item in request.session.items if item.module is request.module]
    runs = [item.callspec.params["run"] for item in items if hasattr(item, "callspec")]
    host_cuda.prepare(instantiations(runs))


def run_all(run, arrays, monkeypatch):
    """Yield the result of each run, over NaN, after checking what was written around it."""
    for order, multiprocessors, poison in RUNS:
        monkeypatch.setenv("SBNET_HOST_ORDER", order)
        memory = Memory(poison)
        out = memory.poisoned(run.case.laid_out(np.empty(run.case.shape)).shape, run.case.type)
        out[...] = np.nan
        with device(host_cuda.launch, run.plan, multiprocessors, memory) as launched:
            run.case.run(arrays, memory.read_only, out=out)
        assert {kernel for _, kernel, _ in launched} == {"pack_weights", "fused_conv"}
        memory.check()
        yield out


@pytest.mark.parametrize("run", RUNNABLE, ids=str)
def test_whole_numbers_are_exact(run, monkeypatch):
    case = run.case
    expected = np.where(case.active()[..., None], case.exact(), np.nan).astype(case.type)
    for out in run_all(run, case.arrays(), monkeypatch):
        assert_same(out, case.laid_out(expected), allow_nan=True, signed_zero=False)


@pytest.mark.parametrize("run", [run for run in RUNNABLE if run.case.table == "some"] + SMOOTH,
                         ids=str)  # fmt: skip
def test_other_numbers_within_the_bound(run, monkeypatch):
    case = run.case
    active = case.laid_out(np.broadcast_to(case.active()[..., None], case.shape))
    expected = oracles.Bounded(*(case.laid_out(a)[active] for a in case.bounded()))
    first = None
    for out in run_all(run, case.arrays(whole=False), monkeypatch):
        oracles.assert_within(out[active], expected)
        assert np.isnan(out[~active].astype(np.float32)).all()
        first = out if first is None else first
        assert_same(out[active], first[active])  # the same bits in any order of the threads


@pytest.mark.parametrize("run", [run for run in RUNNABLE if run.case.table == "some"], ids=str)
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
    for out in run_all(run, (x, *rest), monkeypatch):
        assert np.isfinite(out[clean].astype(np.float32)).all()
        if value is np.nan:
            assert np.isnan(out[dirty].astype(np.float32)).all()


def test_weights_are_packed_once_until_refreshed():
    run = RUNNABLE[0]
    (x, weights, *active), keywords = run.case.arguments(run.case.arrays(), np.array)
    with device(host_cuda.launch, run.plan, 4, Memory(0xA5)) as launched:
        first = op.fused_conv(x, weights, *active, **keywords)
        weights.w *= 2
        assert_same(op.fused_conv(x, weights, *active, **keywords), first)
        assert [kernel for _, kernel, _ in launched] == ["pack_weights"] + 2 * ["fused_conv"]
        weights.refresh()
        assert len(launched) == 4
        assert (op.fused_conv(x, weights, *active, **keywords) != first).any()
        assert len(launched) == 5


def test_what_has_no_kernel_says_why():
    for case, reason in (
        (Case(dtype="float64"), "float64"),
        (Case(dtype="bfloat16"), "bfloat16 on this GPU"),
        (Case(image=(1, 8, 8, 0)), "empty images"),
        (Case(kernel=(600, 600), padding=((600, 600), (600, 600))), "shared memory"),
        (Case(image=(1, 8, 8, 1), padding=((2**30 + 1, 0), (0, 0)), strides=(2**30, 1)), "above"),
    ):
        refused = pytest.raises(NotImplementedError, match=reason)
        with device(lambda *launch: None, TURING, 4, Memory()) as launched, refused:
            case.run(case.arrays(), np.array)
        assert not launched
