"""The CUDA kernels of fused_bottleneck on the CPU: exact for whole numbers, bounded for others.

As in test_cuda_on_host.py the op's CUDA body goes to the host shim, which has the tensor cores of
mma.sync but neither wgmma nor clusters: the engine ``WarpGroup`` and tiles that thread blocks share
run on GPUs of compute capability 9.0 alone (test_fused_bottleneck.py there). Plans are given, so
that every branch of the kernels runs; those of the planner follow, for GPUs with little shared
memory and with much.
"""

import contextlib
import importlib
import math
from dataclasses import dataclass

import host_cuda
import numpy as np
import pytest
from assertions import assert_same
from host_memory import Memory, signature_of
from unit_cases import SPREADING, Case, dense, kinds

from sbnet_cupy import _kernels
from sbnet_cupy.ops import _plans
from sbnet_cupy.ops._bottleneck_plan import UnitPlan
from sbnet_cupy.ops._fused_plan import Device

# sbnet_cupy.fused_bottleneck is the function
op = importlib.import_module("sbnet_cupy.ops.fused_bottleneck")
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
    plan: UnitPlan | Device
    name: str = ""

    def __str__(self):
        return f"{self.name}:_{self.case}"


def plan(chunks, mid, tile=(8, 8), warps=4, split1=1, second=(4, 1, 1), columns=32, ahead=1,
         bulk=True):  # fmt: skip
    """Return a plan of the engine MmaSync without clusters."""
    rows3 = math.gcd(math.prod(tile) // 16, warps)
    return UnitPlan(
        "MmaSync", chunks, mid, tile, 1, warps, split1, second, rows3, columns, ahead, 1, bulk
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
        ("narrow columns", HALF, unit(40, 16),
         plan(2, 16, (4, 8), 4, 2, (2, 2, 1), columns=16, bulk=False)),
        ("wide columns", HALF, unit(96, 24), plan(3, 24, columns=96)),
        ("tight", HALF, unit(96, 24, tight=True, packed=True), plan(3, 24, ahead=3)),
        ("tight", BFLOAT, unit(40, 16, tight=True), plan(2, 16, ahead=2, bulk=False)),
        ("a third of the chunks each", BFLOAT, unit(80, 33, packed=True),
         plan(3, 48, warps=12, split1=3, second=(4, 1, 3))),
        ("odd planes", BFLOAT, unit(24, 40), plan(1, 40, (8, 16), 8, second=(8, 1, 1))),
        ("one plane", BFLOAT, unit(8, 3, bsize=(1, 7)), plan(1, 8, bulk=False)),
        ("two rows to a warp", BFLOAT, unit(48, 16),
         plan(2, 16, (8, 16), 8, second=(4, 2, 1), ahead=2)),
        ("channels added", TF32, unit(12, 12), plan(1, 16, columns=16)),
        ("chunks", TF32, unit(96, 24, packed=True), plan(6, 24, columns=16, ahead=3)),
        ("warps share chunks and K", TF32, unit(28, 48, bsize=(9, 5)),
         plan(2, 48, (4, 8), 12, 2, (2, 2, 3), columns=16, bulk=False)),
        ("columns of 8", TF32, unit(20, 16, packed=True),
         plan(2, 16, (8, 16), 8, 2, (8, 1, 1), columns=8)),
        ("planned", HALF, unit(96, 24, (1, 11, 12), bsize=(6, 6), expected=0), TURING),
        ("planned", HALF, unit(96, 24, (1, 11, 12), expected=10**7), TURING),
        ("planned", BFLOAT, unit(72, 33, (1, 11, 12), expected=0), AMPERE),
        ("planned", TF32, unit(40, 20, (1, 17, 18), bsize=(8, 8), expected=10**7), AMPERE),
        ("planned", HALF, unit(192, 48, (1, 21, 19), bsize=(8, 8), expected=0), BLACKWELL),
    ]  # fmt: skip
    for name, number, sizes, plan_or_device in rows:
        yield Run(Case(**number, **sizes), plan_or_device, name)
    for i, table in enumerate(("all", "empty", "count 0", "count negative", "count too large",
                               "corrupt", "repeated")):  # fmt: skip
        for name, number, sizes, given in rows[:2]:  # compiled already
            yield Run(Case(**number, **sizes, table=table, seed=i), given, name)


RUNNABLE = list(_runs())
ONCE = [run for run in RUNNABLE if run.case.table == "some"]


@contextlib.contextmanager
def device(launch, given, multiprocessors, memory):
    """Send what the op launches to ``launch``; yield the list of what was launched."""
    launched = []

    def prepare(stem, kernel, template, grid, block, pointers, scalars, shared=0,
                persistent=False, dependent=False, cluster=1):  # fmt: skip
        assert cluster == 1
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
        patch.setattr(op, "current_device", lambda: given if isinstance(given, Device) else AMPERE)
        if isinstance(given, UnitPlan):
            patch.setattr(op, "plan_bottleneck", lambda case, blocks, bsize, device: given)
        patch.setattr(op, "empty", memory.poisoned)
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
        out = memory.poisoned(run.case.shape, run.case.type)
        out[...] = np.nan
        with device(host_cuda.launch, run.plan, multiprocessors, memory) as launched:
            run.case.run(arrays, memory.read_only, out=out)
        assert {kernel for _, kernel, _ in launched} == {"pack_bottleneck", "fused_bottleneck"}
        memory.check()
        yield out


@pytest.mark.parametrize("run", RUNNABLE, ids=str)
def test_whole_numbers_are_exact(run, monkeypatch):
    case = run.case
    expected = np.where(case.active()[..., None], case.exact(), np.nan).astype(case.type)
    for out in run_all(run, case.arrays(), monkeypatch):
        assert_same(out, expected, allow_nan=True, signed_zero=False)


@pytest.mark.parametrize("run", ONCE, ids=str)
def test_other_numbers_within_the_bound(run, monkeypatch):
    active, first = run.case.active(), None
    for out in run_all(run, run.case.arrays(whole=False), monkeypatch):
        run.case.assert_within_bound(out)
        assert np.isnan(out[~active].astype(np.float32)).all()
        first = out if first is None else first
        assert_same(out[active], first[active])  # the same bits in any order of the threads


@pytest.mark.parametrize("run", ONCE, ids=str)
@pytest.mark.parametrize(("value", "signs"), SPREADING, ids=str)
def test_nan_and_infinities_spread_as_in_the_dense_unit(run, value, signs, monkeypatch):
    """Not through channels that fill up chunks or planes."""
    arrays, active = run.case.spoiled(value, signs), run.case.active()
    expected = kinds(dense(*arrays)[active])
    for out in run_all(run, arrays, monkeypatch):
        assert_same(kinds(out[active].astype(np.float64)), expected)


def test_weights_are_packed_once_until_refreshed():
    run = RUNNABLE[0]
    (x, packed, *active), keywords = run.case.arguments(run.case.arrays(), np.array)
    with device(host_cuda.launch, run.plan, 4, Memory(0xA5)) as launched:
        first = op.fused_bottleneck(x, packed, *active, **keywords)
        w3 = packed.weights.w3
        w3 *= 2
        assert_same(op.fused_bottleneck(x, packed, *active, **keywords), first)
        kernels = ["pack_bottleneck", "fused_bottleneck", "fused_bottleneck"]
        assert [kernel for _, kernel, _ in launched] == kernels
        packed.refresh()
        assert len(launched) == 4
        assert (op.fused_bottleneck(x, packed, *active, **keywords) != first).any()
        assert len(launched) == 5


def test_what_has_no_kernel_says_why():
    for case, reason in (
        (Case(dtype="float64"), "float64"),
        (Case(dtype="float32"), "pass precision='tf32'"),
        (Case(image=(1, 8, 8, 12)), "12 channels of float16 .* 16-byte vectors"),
        (Case(image=(1, 8, 8, 512), middle=512), "do not fit this GPU's shared memory"),
        (Case(**BFLOAT), "bfloat16 on this GPU"),
        (Case(**TF32), "float32 on this GPU"),
    ):
        refused = pytest.raises(NotImplementedError, match=reason)
        given = TURING if "on this GPU" in reason else AMPERE
        with device(lambda *launch: None, given, 4, Memory()) as launched, refused:
            case.run(case.arrays(), np.array)
        assert not launched
