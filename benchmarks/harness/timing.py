"""Clocks. On a GPU: CUDA-graph replays between events. On a CPU: rounds that run everyone in turn.

A contender has one call for each set of inputs, and there are so many sets that a call finds
nothing of its own in the cache. Every clock reports microseconds for one call: the median, and the
10th and 90th percentile, over rounds.
"""

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

WARM_UP = 3
LOOP_CALLS = 8  # at most, in a round of calls that cannot be captured


@dataclass(frozen=True)
class Contender:
    """One implementation of a workload, ready to be called."""

    name: str
    calls: list[Callable]  # one for each set of inputs; returns arrays, which a capture keeps alive
    clock: str = ""  # "torch" when PyTorch's stream has the work, "host" to time the calling thread
    capturable: bool = True
    target: Any = None  # the image that the first call writes, if it writes one
    note: str = ""


class Timing(NamedTuple):
    """Microseconds for one call."""

    us: float
    p10: float
    p90: float
    timed_by: str
    ratio: float | None = None  # of the first contender's time to this one's, by rounds: the median
    ratio_p90: float | None = None


def spread(samples, timed_by):
    """Return the median of samples and their spread."""
    p10, median, p90 = np.percentile(samples, (10, 50, 90))
    return Timing(float(median), float(p10), float(p90), timed_by)


def calls_per_round(sets, byte_count):
    """Return how often a round goes through all sets: some 24 calls, fewer when they are long."""
    wanted = min(24, 2e9 / max(byte_count or 1, 1))
    return max(1, math.ceil(wanted / sets))


class GraphClock:
    """Captures the calls of all sets in one CUDA graph and times its replays with events."""

    def __init__(self, quick=False):
        self.rounds, self.seconds = (5, 0.1) if quick else (20, 0.25)

    def time(self, contender, byte_count):
        """Time one contender; what cannot be captured is timed around a loop of eager calls."""
        with self._streaming():
            calls = contender.calls * calls_per_round(len(contender.calls), byte_count)
            for call in contender.calls:  # compiles kernels, fills the memory pool
                call()
            self._wait()
            graph = self._try_capture(calls) if contender.capturable else None
            if graph is None:
                calls = calls[:LOOP_CALLS]
                samples = self._samples(lambda: _run(calls))
            else:
                replay, kept = graph
                samples = self._samples(replay)
                del kept
        return spread(np.array(samples) / len(calls), "events" if graph is None else "graph")

    def _try_capture(self, calls):
        try:
            return self._capture(calls)
        except Exception:  # whatever the library raises for what a capture does not allow
            self._wait()
            return None

    def _samples(self, run):
        for _ in range(WARM_UP):
            self._between_events(run)
        samples, end = [], time.perf_counter() + self.seconds
        while len(samples) < 5 or (len(samples) < self.rounds and time.perf_counter() < end):
            samples.append(self._between_events(run))
        return samples


def _run(calls):
    for call in calls:
        call()


class CupyClock(GraphClock):
    """Times work on the one CuPy stream that the whole run makes current."""

    def __init__(self, cupy, stream, quick=False):
        super().__init__(quick)
        self.cuda, self.stream = cupy.cuda, stream

    def _streaming(self):
        return contextlib.nullcontext()

    def _wait(self):
        self.cuda.Device().synchronize()

    def _capture(self, calls):
        self.stream.begin_capture()
        try:
            kept = [call() for call in calls]
        except BaseException:
            with contextlib.suppress(Exception):  # ends the capture; it is spoilt anyway
                self.stream.end_capture()
            raise
        graph = self.stream.end_capture()
        return lambda: graph.launch(self.stream), kept

    def _between_events(self, run):
        start, end = self.cuda.Event(), self.cuda.Event()
        start.record(self.stream)
        run()
        end.record(self.stream)
        end.synchronize()
        return self.cuda.get_elapsed_time(start, end) * 1e3


class TorchClock(GraphClock):
    """Times PyTorch on a stream of its own."""

    def __init__(self, torch, quick=False):
        super().__init__(quick)
        self.torch, self.cuda = torch, torch.cuda
        self.stream = torch.cuda.Stream()

    @contextlib.contextmanager
    def _streaming(self):
        with self.torch.no_grad(), self.cuda.stream(self.stream):
            yield

    def _wait(self):
        self.cuda.synchronize()

    def _capture(self, calls):
        graph = self.cuda.CUDAGraph()
        graph.capture_begin()
        try:
            kept = [call() for call in calls]
        except BaseException:
            with contextlib.suppress(Exception):
                graph.capture_end()
            raise
        graph.capture_end()
        return graph.replay, kept

    def _between_events(self, run):
        start, end = (self.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(self.stream)
        run()
        end.record(self.stream)
        end.synchronize()
        return start.elapsed_time(end) * 1e3


class HostClock:
    """Times the calling thread: what a call costs before the GPU has done anything."""

    def __init__(self, synchronize, quick=False):
        self.synchronize = synchronize
        self.batches, self.count = (3, 100) if quick else (9, 1000)

    def time(self, contender, byte_count):
        """Return the wall time of a call, over batches that begin with an idle device."""
        call = contender.calls[0]
        for _ in range(self.count // 5):
            call()
        samples = []
        for _ in range(self.batches):
            self.synchronize()
            start = time.perf_counter()
            for _ in range(self.count):
                call()
            samples.append((time.perf_counter() - start) * 1e6 / self.count)
        self.synchronize()
        return spread(samples, "host")


class WallClock:
    """Times contenders on a CPU, in turn, so that what else the machine does meets all alike.

    Ratios are those of the shorter half of the rounds: in the others, it did more.
    """

    def __init__(self, quick=False):
        self.least, self.most, self.seconds = (3, 3, 0.0) if quick else (7, 60, 1.0)

    def time_all(self, contenders):
        """Return a timing for each contender."""
        samples, start = [], time.perf_counter()
        while len(samples) < self.least or (
            len(samples) < self.most and time.perf_counter() - start < self.seconds
        ):
            samples.append([self._once(contender, len(samples)) for contender in contenders])
        table = np.array(samples)
        quiet = table[np.argsort(table.sum(axis=1))[: -(-len(table) // 2)]]
        ratios = np.percentile(quiet[:, :1] / quiet, (50, 90), axis=0).T.tolist()
        return [
            spread(column, "wall")._replace(ratio=median, ratio_p90=p90)
            for column, (median, p90) in zip(table.T, ratios, strict=True)
        ]

    @staticmethod
    def _once(contender, turn):
        """Time one call, after one on other inputs: threads of the contender before go to rest."""
        call, before = (contender.calls[(turn - i) % len(contender.calls)] for i in (0, 1))
        before()
        start = time.perf_counter()
        kept = call()
        elapsed = (time.perf_counter() - start) * 1e6
        del kept
        return elapsed
