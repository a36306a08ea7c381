"""What a network's CUDA graph consists of: time of each kernel, and time between them."""

import re
from collections import defaultdict

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.networks.timing import graph_times

REPLAYS = 5


def kernels(graph):
    """Return (name, start, end) in microseconds of the kernels of one replay, in order."""
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    events = [event for event in found.events() if event.device_type == on_device]
    events.sort(key=lambda event: event.time_range.start)
    last = events[-(len(events) // REPLAYS) :]
    return [(event.name, event.time_range.start, event.time_range.end) for event in last]


def lines(title, graph):
    """Return a table of the time that kernels of each name take, longest first.

    "own" is the time in which no kernel before runs any more: kernels that start early, while the
    one before ends, share the rest. "idle" is the time in which nothing runs.
    """
    each, idle, before = defaultdict(lambda: [0, 0.0, 0.0]), 0.0, None
    listed = kernels(graph)
    for name, start, end in listed:
        row = each[short(name)]
        before = start if before is None else before
        row[0] += 1
        row[1] += end - start
        row[2] += max(end - max(before, start), 0.0)
        idle += max(start - before, 0.0)
        before = max(before, end)
    replay = sorted(graph_times(graph))[20]
    whole = before - listed[0][1]
    yield f"== {title}: {len(listed)} kernels, {whole:.0f} us; replay {replay:.0f} us"
    yield f"{'count':>5} {'us':>8} {'own us':>8} {'own':>6}  kernel"
    for name, (count, time, own) in sorted(each.items(), key=lambda item: -item[1][2]):
        yield f"{count:5} {time:8.1f} {own:8.1f} {own / whole:6.1%}  {name}"
    yield f"{'':5} {'':8} {idle:8.1f} {idle / whole:6.1%}  (idle)"


def short(name):
    """Return a kernel's name without its namespaces, arguments, and long template arguments."""
    name = re.sub(r"^void ", "", name).replace("(anonymous namespace)::", "")
    head, _, rest = name.partition("<")
    head = head.split("(")[0].split("::")[-1]
    inner = re.search(r"(\w+_kernel_cuda|CUDAFunctor_\w+|launch_\w+_scalar|\w+_kernel_impl)", rest)
    if inner:
        return f"{head}<{inner.group(1)}>"
    if rest and "at::native" not in name and len(rest) < 120:
        return f"{head}<{rest.split('(')[0].rstrip('> ')}>"
    return head[:90]
