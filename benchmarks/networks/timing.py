"""Times of CUDA graphs and of calls, and memory."""

import statistics
import time
from typing import NamedTuple

import torch


def captured(call, warm=3):
    """Return a CUDA graph of a call, after some calls on a stream of its own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph


def graph_times(graph, repeats=41):
    """Return sorted microseconds of replays, each behind one in which the host submits it."""
    times = []
    for _ in range(repeats + 5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times[5:])


def clock(call, repeats=20, warm=3):
    """Return the median microseconds of a call that is waited for."""
    times = []
    for _ in range(repeats + warm):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times[warm:])


class Peak(NamedTuple):
    """The most memory that a call took beside what was there, in MB, and that it requested."""

    taken: float
    requested: float  # before PyTorch's allocator rounds blocks up

    def __str__(self):
        return f"{self.taken:,.1f} MB (requested {self.requested:,.1f})"


def peak_of(call):
    """Return the Peak of a call."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    result = call()
    after = torch.cuda.memory_stats()
    del result
    kinds = ("allocated_bytes.all", "requested_bytes.all")
    return Peak(*((after[f"{kind}.peak"] - before[f"{kind}.current"]) / 1e6 for kind in kinds))
