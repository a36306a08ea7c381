"""Whole networks on active blocks, from image and mask to result, against dense PyTorch.

    python -m benchmarks.networks.bench_networks                       on a GPU
    python -m benchmarks.networks.bench_networks resnet50 --batch 1    one network
    python -m benchmarks.networks.bench_networks --cpu                 ratios on a CPU

On a GPU one CUDA graph holds the call, the mask in it; dense is the best of eager PyTorch and
torch.compile, batch norms folded, float16, channels_last, in a graph of its own. Eager calls are
timed by the clock. On a CPU the two take turns, and the least of each counts.
"""

import argparse
import copy
import statistics
import time
from pathlib import Path

import torch

from benchmarks.harness import machine
from benchmarks.harness.rows import OURS, Row, Writer, times_sign
from benchmarks.networks import models
from sbnet_cupy.torch import sparsify

DEFAULT = ("resnet50", "resnet18", "fcn_resnet50", "unet")
ON_CPU = ("resnet18", "resnet50", "fcn_resnet50", "convnext_tiny", "unet", "mobilenet_v3_small")
SHARES = (0.1, 0.25, 0.5, 1.0)
BLOCK = 32


def blobs(n, size, share, block=BLOCK, seed=0):
    """Return masks whose blocks lie near a few places, as objects do, and how many blocks."""
    generator = torch.Generator().manual_seed(seed)
    gh, gw = (-(-s // block) for s in size)
    count = max(1, round(share * gh * gw))
    masks = torch.zeros(n, *size, dtype=torch.bool)
    rows = torch.arange(gh * gw) // gw
    columns = torch.arange(gh * gw) % gw
    for mask in masks:
        places = torch.randperm(gh * gw, generator=generator)[: max(1, count // 12)]
        away = (rows[:, None] - rows[places]) ** 2 + (columns[:, None] - columns[places]) ** 2
        for i in away.amin(1).argsort(stable=True)[:count].tolist():
            y, x = rows[i] * block, columns[i] * block
            mask[y : y + block, x : x + block] = True
    return masks, n * count


def main(arguments=None):
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="*", help=", ".join(models.NETWORKS))
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--shares", type=float, nargs="+", default=list(SHARES))
    parser.add_argument("--block", type=int, default=BLOCK)
    parser.add_argument("--autotune", action="store_true", help="torch.compile's max-autotune, too")
    parser.add_argument("--no-compile", action="store_true", help="dense: eager in a graph alone")
    parser.add_argument("--threads", type=int, default=2, help="of PyTorch, on a CPU")
    parser.add_argument("--profile", action="store_true", help="print the time of each layer")
    parser.add_argument("--out", type=Path, help="folder of networks.csv")
    options = parser.parse_args(arguments)
    names = options.networks or (ON_CPU if options.cpu else DEFAULT)
    unknown = [name for name in names if name not in models.NETWORKS]
    if unknown:
        parser.error(f"there is no network {unknown[0]!r}; there are: {', '.join(models.NETWORKS)}")
    cupy = None if options.cpu else __import__("cupy")
    columns = machine.describe(cupy, torch)
    folder = options.out or Path(__file__).parents[1] / "results" / (
        "cpu" if options.cpu else machine.folder_name(columns["gpu"])
    )
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{columns['gpu']}, torch {columns['torch']}, commit {columns['commit']}", flush=True)
    measure = on_cpu if options.cpu else on_gpu
    with torch.no_grad(), Writer(folder / "networks.csv") as writer:
        for name in names:
            for batch in [1] if options.cpu else options.batch:
                for row in measure(name, batch, options, columns):
                    writer.write(row)


def row_of(columns, name, shape, dtype, options, share, count, variant, **times):
    """Return a row of the CSV file."""
    return Row(
        **columns, op="network", suite=name, shape=times_sign(shape), dtype=dtype,
        block=times_sign((options.block, options.block)), mask="blobs", density=share,
        blocks=count, variant=variant, implementation=OURS, bytes=None, gb_per_s=None,
        percent_of_copy=None, original_us=None, ratio_to_original=None, **times,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------- GPU


def on_gpu(name, batch, options, columns):
    """Yield rows of a network on a GPU, and print them."""
    size = models.NETWORKS[name][1]
    model = models.make(name).half().to("cuda", memory_format=torch.channels_last)
    x = torch.randn(batch, 3, *size, device="cuda").half()
    x = x.to(memory_format=torch.channels_last)
    torch.backends.cudnn.benchmark = True
    dense = models.folded(copy.deepcopy(model))
    times, peak = dense_times(dense, x, options)
    best = min(times.values())
    wall = clock(lambda: model(x))
    shown = ", ".join(f"{k} {v:,.0f}" for k, v in times.items())
    print(f"{name} {batch}x{size[0]}x{size[1]}: dense {shown} us; {peak:,.0f} MB", flush=True)
    print(f"  eager, by the clock: dense {wall:,.0f} us (batch norms not folded)", flush=True)
    expected = dense(x)
    for share in options.shares:
        mask, count = blobs(batch, size, share, options.block)
        mask = mask.to("cuda")
        sparse = sparsify(model, options.block, capacity=count)
        check(sparse, x, mask, share, expected)
        run = sparse.graphed(x, mask)
        us = graph_times(run.graph)
        eager = clock(lambda s=sparse, m=mask: s(x, m))
        sparse.replay = False  # a graph has its memory already
        _, used = peak_of(lambda s=sparse, m=mask: s(x, m))
        middle = statistics.median(us)
        print(
            f"  {share:4.0%}: graph {middle:,.0f} us = {best / middle:.2f}x; eager {eager:,.0f} us "
            f"= {wall / eager:.2f}x; {used:,.0f} MB",
            flush=True,
        )
        memory = f"peak {used:.0f} MB, dense {peak:.0f} MB"
        note = f"{memory}; eager call {eager:.0f} us, dense {wall:.0f} us"
        yield row_of(
            columns, name, (batch, *size, 3), "float16", options, share, count, f"batch {batch}",
            timed_by="graph", us=middle, us_p10=us[len(us) // 10], us_p90=us[-1 - len(us) // 10],
            note=note, dense_us=best, ratio_to_dense=best / middle,
        )  # fmt: skip
        if options.profile and share == options.shares[0]:
            print(sparse.profile(x, mask))
        del sparse, run
    torch.cuda.empty_cache()


def dense_times(dense, x, options):
    """Return microseconds of the dense network in a graph, by how it was made, and its memory."""
    ways = {"eager": dense}
    if not options.no_compile:
        ways["compiled"] = torch.compile(dense, dynamic=False)
    if options.autotune:
        mode = "max-autotune-no-cudagraphs"
        ways["autotuned"] = torch.compile(dense, dynamic=False, mode=mode)
    times = {}
    for way, call in ways.items():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                call(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            call(x)
        times[way] = statistics.median(graph_times(graph))
        del graph
    return times, peak_of(lambda: dense(x))[1]


def graph_times(graph, repeats=41):
    """Return sorted microseconds of replays."""
    times = []
    for _ in range(repeats + 5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times[5:])


def clock(call, repeats=20):
    """Return the median microseconds of a call that is waited for."""
    times = []
    for _ in range(repeats + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times[3:])


def peak_of(call):
    """Return a call's result and the most memory that it took beside what was there, in MB."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    return result, (torch.cuda.max_memory_allocated() - before) / 1e6


def check(sparse, x, mask, share, dense):
    """Raise unless the stack gives what whole images give, zeroed between layers."""
    sparse.break_even = 2.0
    result = sparse(x, mask).float()
    sparse.break_even = 0.0
    expected = dense.float() if share == 1 else sparse(x, mask).float()
    sparse.break_even = None
    error = ((result - expected).norm() / expected.norm()).item()
    depth = sum(isinstance(m, torch.nn.Conv2d) for m in sparse.modules())
    bound = depth * torch.finfo(x.dtype).eps
    if not error <= bound:
        raise AssertionError(f"relative error {error:.1e} of the stack, above {bound:.1e}")


# ------------------------------------------------------------------------------------------- CPU


def on_cpu(name, batch, options, columns):
    """Yield rows of a network on a CPU, float32, 512x512, and print them."""
    torch.set_num_threads(options.threads)
    size = (512, 512)
    small = (8, 16, 32, 32) if name == "unet" else None
    model = models.make(name, widths=small).to(memory_format=torch.channels_last)
    x = torch.randn(batch, 3, *size).to(memory_format=torch.channels_last)
    calls = {"dense": lambda: model(x)}
    counts = {}
    for share in options.shares:
        mask, counts[share] = blobs(batch, size, share, options.block)
        sparse = sparsify(model, options.block)
        calls[share] = lambda s=sparse, m=mask: s(x, m)
    times = {key: [] for key in calls}
    deadline = time.perf_counter() + 20
    while len(times["dense"]) < 5 or (time.perf_counter() < deadline and len(times["dense"]) < 60):
        for key, call in calls.items():
            start = time.perf_counter()
            call()
            times[key].append((time.perf_counter() - start) * 1e6)
    best = min(times["dense"][1:])
    shown = []
    for share in options.shares:
        us = sorted(times[share][1:])
        shown.append(f"{share:.0%} {best / us[0]:.2f}x")
        yield row_of(
            columns, name, (batch, *size, 3), "float32", options, share, counts[share],
            f"batch {batch}", timed_by="wall", us=us[0], us_p10=us[len(us) // 10],
            us_p90=us[-1 - len(us) // 10], dense_us=best, ratio_to_dense=best / us[0],
            note=f"{options.threads} threads; the least of {len(us)} calls in turns",
        )  # fmt: skip
    print(
        f"{name}: dense {best / 1e3:,.1f} ms; blocks of {options.block}: {', '.join(shown)}",
        flush=True,
    )


if __name__ == "__main__":
    main()
