"""The fused ops on the host shim: GPUs for the planner, runs, and what every run is checked for.

As in on_host/test_kernels.py an op's CUDA body goes to the shim. Plans are given, so that every
branch of the kernels runs, also for tiles that a cluster of thread blocks shares; those of the
planner follow, for GPUs with little shared memory and with much.
"""

import contextlib
import importlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import host_cuda
from sbnet_cupy.block_sparse import background
from sbnet_cupy.block_sparse.conv import wide
from sbnet_cupy.block_sparse.stack.stack_conv_plan import StackPlan
from sbnet_cupy.core import launch as kernels
from sbnet_cupy.core import packed as core_packed
from sbnet_cupy.core.device import Device
from support.assertions import assert_same
from support.host_memory import Memory, plan_as_on_a_gpu

RESIDENT = 2  # thread blocks that a multiprocessor holds at once
# order of the threads, multiprocessors, what results hold at first
RUNS = (("forward", 132, 0xA5), ("reverse", 1, 0xFF))
TURING = Device(multiprocessors=40, shared_bytes=64 << 10, hopper=False, bulk_copy=False,
                tensor_floats=False)  # fmt: skip
AMPERE = Device(multiprocessors=84, shared_bytes=99 << 10, hopper=False, bulk_copy=False)
BLACKWELL = Device(multiprocessors=148, shared_bytes=227 << 10, hopper=False, bulk_copy=True)
WIDE = {"pack_image_conv_weights", "stack_conv_pipelined"}  # of fused_conv of many channels
TABLES = ("all", "empty", "count 0", "count negative", "count too large", "corrupt", "repeated")
FEW_TABLES = ("empty", "count too large", "corrupt", "repeated")  # those of a plain pytest


@dataclass(frozen=True)
class Run:
    """A call, and the plan that it gets: one of ours, or a device for the planner."""

    case: Any
    plan: Any
    name: str = ""

    def __str__(self):
        return f"{self.name}:_{self.case}"


@dataclass(frozen=True)
class HostOp:
    """A fused op whose launches go elsewhere."""

    folder: str  # of block_sparse
    stem: str
    planner: str  # name of the function in whose place a plan of ours is given
    pack: str  # the kernel that packs weights

    @property
    def module(self):
        """Where the op is defined; ``sbnet_cupy.<stem>`` is the function."""
        return importlib.import_module(f"sbnet_cupy.block_sparse.{self.folder}.{self.stem}")

    @contextlib.contextmanager
    def device(self, launch, plan, multiprocessors, memory):
        """Send what the op launches to ``launch``; yield the list of what was launched."""
        launched = []

        def prepare(stem, kernel, template, grid, block, pointers, scalars, shared=0,
                    persistent=False, dependent=False, cluster=1, maps=()):  # fmt: skip
            if persistent:
                most = RESIDENT * multiprocessors // math.prod(grid[1:]) // cluster
                grid = (min(grid[0], max(most, 1) * cluster), *grid[1:])

            def run(*arrays):
                assert len(arrays) == pointers
                launched.append((stem, kernel, template))
                args = (*arrays, *scalars, *host_cuda.describe(maps, arrays))
                launch(stem, kernel, template, grid, block, args, shared, cluster=cluster)

            return run

        op, planned = self.module, isinstance(plan, Device)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "prepare", prepare)
            plan_as_on_a_gpu(patch)
            patch.setattr(background, "sm_count", lambda: multiprocessors)
            patch.setattr(op, "current_device", lambda: plan if planned else BLACKWELL)
            if isinstance(plan, StackPlan):
                patch.setattr(op, "is_for_wide", lambda *conv: True)
                patch.setattr(wide, "plan_stack_conv", lambda *conv: plan)
            elif not planned:
                patch.setattr(op, "is_for_wide", lambda *conv: False, raising=False)
                patch.setattr(op, self.planner, lambda *case: plan)
            patch.setattr(core_packed, "empty", memory.poisoned)

            def filled(array, value):
                array[...] = value
                return array

            patch.setattr(
                op, "zeros", lambda *like: filled(memory.poisoned(*like), 0), raising=False
            )
            patch.setattr(
                op, "copy_image", lambda x: filled(memory.poisoned(x.shape, x.dtype, x), x),
                raising=False,
            )  # fmt: skip
            yield launched

    def compile(self, request):
        """Compile what the chosen tests of a module launch, together."""
        items = [item for item in request.session.items if item.module is request.module]
        runs = [item.callspec.params["run"] for item in items if hasattr(item, "callspec")]
        found = {}
        for run in runs:
            with self.device(lambda *launch, **options: None, run.plan, 1, Memory()) as launched:
                run.case.run(run.case.arrays(), Memory().read_only)
            found |= dict.fromkeys(launched)
        host_cuda.prepare(list(found))

    def run_all(self, run, arrays, monkeypatch):
        """Yield the result of each run, over NaN, after checking what was written around it."""
        for order, multiprocessors, poison in RUNS:
            monkeypatch.setenv("SBNET_HOST_ORDER", order)
            memory = Memory(poison)
            out = memory.poisoned(run.case.laid_out(np.empty(run.case.shape)).shape, run.case.type)
            out[...] = np.nan
            with self.device(host_cuda.launch, run.plan, multiprocessors, memory) as launched:
                run.case.run(arrays, memory.read_only, out=out)
            usual = not isinstance(run.plan, StackPlan)
            kernels_of = {self.pack, self.stem} if usual else WIDE
            assert {kernel for _, kernel, _ in launched} == kernels_of
            memory.check()
            yield out

    def check_whole_numbers(self, run, monkeypatch):
        """Exact at every active pixel; no other is written."""
        case = run.case
        expected = np.where(case.active()[..., None], case.exact(), np.nan).astype(case.type)
        for out in self.run_all(run, case.arrays(), monkeypatch):
            assert_same(out, case.laid_out(expected), allow_nan=True, signed_zero=False)

    def check_other_numbers(self, run, monkeypatch, assert_within_bound):
        """Within the bound at active pixels, the same bits in any order of the threads."""
        case, first = run.case, None
        active = case.laid_out(np.broadcast_to(case.active()[..., None], case.shape))
        for out in self.run_all(run, case.arrays(whole=False), monkeypatch):
            assert_within_bound(out)
            assert np.isnan(out[~active].astype(np.float32)).all()
            first = out if first is None else first
            assert_same(out[active], first[active])

    def check_packing(self, run, array_of):
        """Weights are packed once until refreshed; ``array_of`` finds one of what was packed."""
        (x, packed, *active), keywords = run.case.arguments(run.case.arrays(), np.array)
        call = getattr(self.module, self.stem)
        with self.device(host_cuda.launch, run.plan, 4, Memory(0xA5)) as launched:
            first = call(x, packed, *active, **keywords)
            array = array_of(packed)
            array *= 2
            assert_same(call(x, packed, *active, **keywords), first)
            assert [kernel for _, kernel, _ in launched] == [self.pack] + 2 * [self.stem]
            packed.refresh()
            assert len(launched) == 4
            assert (call(x, packed, *active, **keywords) != first).any()
            assert len(launched) == 5

    def check_refusal(self, case, device, reason):
        """Say why there is no kernel, and launch nothing."""
        refused = pytest.raises(NotImplementedError, match=reason)
        with self.device(lambda *launch, **options: None, device, 4, Memory()) as launched, refused:
            case.run(case.arrays(), np.array)
        assert not launched


CONV = HostOp("conv", "fused_conv", "configure_conv", "pack_weights")
UNIT = HostOp("bottleneck", "fused_bottleneck", "configure_bottleneck", "pack_bottleneck")
