"""One run: the device, its clocks and ceilings, and how a workload becomes rows.

A workload is checked first, each contender on the very arrays that are timed. One that gives a
wrong result is not timed and has no row.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.harness import ceiling, machine
from benchmarks.harness.check import WrongResult
from benchmarks.harness.rows import OURS, Ratio, Row, gigabytes_per_second
from benchmarks.harness.timing import Contender, CupyClock, HostClock, TorchClock, WallClock
from sbnet_cupy.core import workspace

ORIGINAL_DEVICE = "H200"  # where the original's kernels were timed
LARGEST = 6e9  # bytes of inputs that a case may rotate


@dataclass(frozen=True)
class Work:
    """What the contenders of one row group compute."""

    variant: str
    bytes: int | None  # read and written, or None where no bandwidth makes sense
    contenders: list[Contender]
    check: Callable[[Contender], None]  # runs the first call; raises where the result is wrong
    original_us: float | None = None
    dense: bool = False  # whether its best time is what others of the op, shape and dtype gain on


class Session:
    """The device of a run. Use as a context: its stream is current inside."""

    def __init__(self, *, cpu=False, quick=False, points=None, commit=None):
        self.cpu, self.quick, self.points = cpu, quick, points
        self.torch = machine.import_torch(cpu)
        if cpu:
            self.xp, self.stream, cupy = np, None, None
            self.cache_bytes = machine.cpu_cache_bytes()
        else:
            import cupy

            self.xp, self.stream = cupy, cupy.cuda.Stream(non_blocking=True)
            self.cache_bytes = machine.gpu_cache_bytes(cupy)
        self.columns = machine.describe(cupy, self.torch, commit)
        self.clocks = self._clocks()
        self.ceilings = []  # rows of the copy and the empty kernel
        self.copy_gb_per_s = None
        self.dense_us = {}  # (op, shape, dtype) -> best time for the whole image
        self.ratios = []  # on a CPU: of our times to others'
        self.failures, self.warnings = [], []  # ours; others'

    def __enter__(self):
        self._stack = contextlib.ExitStack()
        if self.stream is not None:
            self._stack.enter_context(self.stream)
        return self

    def __exit__(self, *_):
        self._stack.close()

    def _clocks(self):
        if self.cpu:
            return {"wall": WallClock(self.quick)}
        clocks = {"": CupyClock(self.xp, self.stream, self.quick)}
        clocks["host"] = HostClock(self.synchronize, self.quick)
        if self.torch:
            clocks["torch"] = TorchClock(self.torch, self.quick)
        return clocks

    def synchronize(self):
        """Wait for the device."""
        if not self.cpu:
            self.xp.cuda.Device().synchronize()

    def release(self):
        """Give the memory of a case back, on all sides."""
        if self.cpu:
            return
        self.synchronize()
        workspace.release()  # no graph is left that could use its scratch
        self.xp.get_default_memory_pool().free_all_blocks()
        if self.torch:
            self.torch.cuda.empty_cache()

    def sets(self, touched, allocated, most=160):
        """Return how many sets of inputs to rotate, so that the cache holds none of the next.

        ``touched`` are the bytes that one call reads and writes, ``allocated`` those of a set.
        """
        wanted = int(2 * self.cache_bytes / max(touched, 1)) + 2
        most_sets = int((1e9 if self.cpu else LARGEST) / max(allocated, 1))
        return max(2, min(wanted, most_sets, 4 if self.quick else most))

    def native(self, result):
        """View a result as an array of ``xp``, once the device is done with it."""
        self.synchronize()
        if self.torch and isinstance(result, self.torch.Tensor):
            if not result.numel():  # an empty tensor may have no address to share
                return result.cpu().numpy()
            return self.xp.from_dlpack(result)
        return result

    def time(self, contenders, byte_count):
        """Return a timing for each contender, in their order."""
        if self.cpu:
            return self.clocks["wall"].time_all(contenders)
        return [self.clocks[c.clock].time(c, byte_count) for c in contenders]

    def measure_ceilings(self):
        """Time the copy and the empty kernel; later rows are held against them."""
        if self.cpu:
            size, copies = ceiling.cpu_copies(self.torch, self.quick)
        else:
            size, copies = ceiling.gpu_copies(self.xp, self.torch, self.quick)
        name, timing = ceiling.best(copies, lambda c: self.time([c], size)[0])
        del copies
        self.release()
        self.copy_gb_per_s = gigabytes_per_second(size, timing.us)
        self.ceilings.append(self._plain_row("copy", name, timing, size))
        if not self.cpu:
            empty = ceiling.gpu_empty(self.xp)
            (timing,) = self.time([empty], None)
            self.ceilings.append(self._plain_row("empty", empty.name, timing, None))

    def _plain_row(self, op, name, timing, byte_count):
        empty = dict.fromkeys(("suite", "shape", "dtype", "block", "mask", "variant"), "")
        return Row(
            **self.columns, **empty, op=op, density=None, blocks=None, implementation=name,
            **self._numbers(timing, byte_count), original_us=None, ratio_to_original=None,
        )  # fmt: skip

    def measure(self, case, density, blocks, work):
        """Check, then time, the contenders of a workload; return their rows."""
        right = [contender for contender in work.contenders if self._passes(case, work, contender)]
        rows = []
        for group in [right] if self.cpu else [[contender] for contender in right]:
            try:
                timings = self.time(group, work.bytes) if group else []
            except Exception as error:
                self._note(case, work, group[0], "could not be timed", error)
                continue
            for contender, timing in zip(group, timings, strict=True):
                rows.append(self._row(case, density, blocks, work, contender, timing))
                if self.cpu and group[0].name == OURS != contender.name:
                    self.ratios.append(self._ratio(case, work, contender, timing))
        if work.dense and rows:
            self.dense_us[case.op, case.shape, case.dtype] = min(row.us for row in rows)
        elif work.dense:
            self.failures.append(f"{case.op}: {case.label}: no dense time, so no ratios")
        return rows

    def _passes(self, case, work, contender):
        try:
            work.check(contender)
            return True
        except Exception as error:  # an error is as bad as a wrong result
            what = "is wrong" if isinstance(error, WrongResult) else "does not run"
            self._note(case, work, contender, what, error)
            return False

    def _note(self, case, work, contender, what, error):
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        line = f"{contender.name} {what} and has no row: {case.label}, {work.variant}: {reason}"
        ours = contender.name.startswith(OURS)
        (self.failures if ours else self.warnings).append(line)

    def _row(self, case, density, blocks, work, contender, timing):
        same_device = contender.name == OURS and ORIGINAL_DEVICE in self.columns["gpu"]
        original = work.original_us if same_device else None
        dense = None if work.dense else self.dense_us.get((case.op, case.shape, case.dtype))
        return Row(
            **self.columns,
            **case.columns,
            density=density,
            blocks=blocks,
            variant=work.variant,
            implementation=contender.name,
            **self._numbers(timing, work.bytes),
            original_us=original,
            ratio_to_original=original / timing.us if original else None,
            note=contender.note,
            dense_us=dense,
            ratio_to_dense=dense / timing.us if dense else None,
        )

    def _ratio(self, case, work, contender, timing):
        columns = {name: self.columns[name] for name in ("torch", "numpy", "commit")}
        return Ratio(
            cpu=self.columns["gpu"],
            **columns,
            **case.columns,
            variant=work.variant,
            implementation=contender.name,
            note=contender.note,
            ratio=timing.ratio,
            ratio_p90=timing.ratio_p90,
        )

    def _numbers(self, timing, byte_count):
        rate = gigabytes_per_second(byte_count, timing.us) if byte_count else None
        percent = 100 * rate / self.copy_gb_per_s if rate and self.copy_gb_per_s else None
        return {
            "timed_by": timing.timed_by,
            "us": timing.us,
            "us_p10": timing.p10,
            "us_p90": timing.p90,
            "bytes": byte_count,
            "gb_per_s": rate,
            "percent_of_copy": percent,
        }
