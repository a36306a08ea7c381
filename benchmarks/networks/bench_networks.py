"""Whole networks on active blocks, from image and mask to result, against dense PyTorch.

    python -m benchmarks.networks.bench_networks                       on a GPU
    python -m benchmarks.networks.bench_networks resnet50 --batch 1    one network
    python -m benchmarks.networks.bench_networks vgg16_bn --batch 1    one of torchvision
    python -m benchmarks.networks.bench_networks --sweep --batch 1     5% to 100%, for the picture
    python -m benchmarks.networks.bench_networks --changing            another mask at each call
    python -m benchmarks.networks.bench_networks --autocast            float32, under autocast
    python -m benchmarks.networks.bench_networks --train               training steps
    python -m benchmarks.networks.bench_networks --timeline            the kernels of each graph
    python -m benchmarks.networks.bench_networks --cpu                 ratios on a CPU

On a GPU one CUDA graph holds the call, the mask in it; dense is the best of eager PyTorch and
torch.compile, batch norms folded, float16 or ``--dtype``, channels_last, in a graph of its own.
``tune`` has measured from which share whole images are faster; rows from there on are those of the
compiled whole images, 0 outside active blocks (``--no-tune``: all rows are those of the stack).
Eager calls are timed by the clock; with ``--changing`` they have no capacity, and each has another
mask, of a share up to a fifth more or less. ``--autocast`` takes networks and images of float32 and
calls them, the dense ones too, under autocast of ``--dtype``; whole images are not compiled then,
and all rows are those of the stack. ``--floor`` also times dense whole images of about as
many pixels as are active at the least share: what PyTorch takes where nothing has to be left out.
On a CPU the two take turns, and the least of each counts; ``--processor-time`` counts the time in
which the process ran, for a machine that does other work (with ``--threads 1``: threads that wait
count, too).
"""

import argparse
import functools
import math
import statistics
import time
from pathlib import Path

import torch
from torch.fx.experimental.optimization import fuse

from benchmarks.harness import machine
from benchmarks.harness.rows import OURS, Row, Writer, times_sign
from benchmarks.networks import models, timeline, training
from benchmarks.networks.timing import captured, clock, graph_times, peak_of
from sbnet_cupy.torch import sparsify

DEFAULT = (
    "resnet50", "resnet18", "fcn_resnet50", "unet", "unet_instance", "convnext_tiny",
    "mobilenet_v3_large", "paper",
)  # fmt: skip
TRAINED = ("resnet18",)
ON_CPU = (
    "resnet18", "resnet50", "fcn_resnet50", "convnext_tiny", "unet", "mobilenet_v3_small", "paper",
)  # fmt: skip
SHARES = (0.1, 0.25, 0.5, 1.0)
SWEEP = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
BLOCK = 32
CPU_BLOCK = 64  # what "auto" takes where the active area has no finer structure


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
    ours = ", ".join(models.NETWORKS)
    parser.add_argument("networks", nargs="*", help=f"{ours}; torchvision's, where it is installed")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--batch", type=int, nargs="+", help="[1, 8]; of training [8]")
    parser.add_argument("--dtype", default="float16", help="of networks and images, on a GPU")
    parser.add_argument("--shares", type=float, nargs="+", default=list(SHARES))
    parser.add_argument("--sweep", action="store_true", help="shares from 5 to 100%%")
    parser.add_argument("--changing", action="store_true", help="another mask at each call")
    parser.add_argument("--autocast", action="store_true", help="evaluation, of float32 networks")
    parser.add_argument("--train", action="store_true", help="training steps")
    parser.add_argument("--timeline", action="store_true", help="kernels of graphs: timeline.txt")
    parser.add_argument("--block", type=int, help=f"[{BLOCK}; on a CPU {CPU_BLOCK}]")
    parser.add_argument("--autotune", action="store_true", help="torch.compile's max-autotune, too")
    parser.add_argument("--no-compile", action="store_true", help="whole images: eager alone")
    parser.add_argument("--floor", action="store_true", help="whole images of as many pixels")
    parser.add_argument("--no-tune", action="store_true", help="the stack at every share")
    parser.add_argument("--threads", type=int, default=2, help="of PyTorch, on a CPU")
    parser.add_argument("--processor-time", action="store_true", help="on a CPU, not the clock")
    parser.add_argument("--profile", action="store_true", help="print the time of each layer")
    parser.add_argument("--out", type=Path, help="folder of networks.csv")
    options = parser.parse_args(arguments)
    options.block = options.block or (CPU_BLOCK if options.cpu else BLOCK)
    options.shares = list(SWEEP) if options.sweep else options.shares
    options.batch = options.batch or ([8] if options.train else [1, 8])
    if options.cpu and (options.changing or options.autocast):
        parser.error("--changing and --autocast are for a GPU")
    if options.autocast and (options.train or options.changing):
        parser.error("--autocast is of evaluation, with one mask")
    options.no_tune = options.no_tune or options.autocast
    usual = ON_CPU if options.cpu else TRAINED if options.train else DEFAULT
    names = options.networks or usual
    for name in names:
        if models.find(name) is None:
            parser.error(f"there is no network {name!r}; there are: {ours}, and torchvision's")
    cupy = None if options.cpu else __import__("cupy")
    columns = machine.describe(cupy, torch)
    folder = machine.results_folder(columns, options.cpu, options.out)
    print(f"{columns['gpu']}, torch {columns['torch']}, commit {columns['commit']}", flush=True)
    measure = on_cpu if options.cpu else trained if options.train else on_gpu
    measure = changing if options.changing else measure
    file = "training.csv" if options.train else "networks.csv"
    options.folder = folder
    cast = torch.autocast("cuda", getattr(torch, options.dtype), enabled=options.autocast)
    with torch.set_grad_enabled(options.train), Writer(folder / file, keep=True) as writer, cast:
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


def inputs(name, batch, dtype):
    """Return a network and images on the GPU, in channels_last."""
    model = models.make(name).to("cuda", dtype, memory_format=torch.channels_last)
    x = torch.randn(batch, 3, *models.image_size(name), device="cuda").to(dtype)
    torch.backends.cudnn.benchmark = True
    return model, x.to(memory_format=torch.channels_last)


def on_gpu(name, batch, options, columns):
    """Yield rows of a network on a GPU, and print them."""
    size, dtype = models.image_size(name), getattr(torch, options.dtype)
    model, x = inputs(name, batch, torch.float32 if options.autocast else dtype)
    dense = fuse(model)
    times, peak = dense_times(dense, x, options), peak_of(lambda: dense(x))
    best, wall = min(times.values()), clock(lambda: model(x))
    shown = ", ".join(f"{k} {v:,.0f}" for k, v in times.items())
    print(f"{name} {batch}x{size[0]}x{size[1]}: dense {shown} us; {peak}", flush=True)
    print(f"  eager, by the clock: dense {wall:,.0f} us (batch norms not folded)", flush=True)
    expected = models.picture(dense(x))
    sparse = sparsify(model, options.block, capacity=1.0)
    if options.no_tune:
        sparse.break_even = 2.0
    else:
        tuned = sparse.tune(x, compile=not options.no_compile)
        found = ", ".join(
            f"{key if isinstance(key, str) else f'{key:.0%}'} {ms:.2f}" for key, ms in tuned.items()
        )
        print(f"  tune: {found} ms; break-even {sparse.break_even:.0%}", flush=True)
    for share in options.shares:
        mask, count = blobs(batch, size, share, options.block)
        mask, sparse.capacity = mask.to("cuda"), count
        check(sparse, x, mask, share, expected, dtype)
        run = sparse.graphed(x, mask)
        full = batch * math.prod(-(-s // options.block) for s in size)
        whole = " (whole images)" if count >= sparse.break_even * full else ""
        us = graph_times(run.graph)
        same = None
        if options.floor and share == min(options.shares):
            same = same_pixels(dense, x, count, options)
        call = functools.partial(sparse, x, mask)
        eager = clock(call)
        sparse.replay = False  # a graph has its memory already
        used = peak_of(call)
        sparse.replay = "auto"
        middle = statistics.median(us)
        print(
            f"  {share:4.0%}: graph {middle:,.0f} us = {best / middle:.2f}x{whole}; eager "
            f"{eager:,.0f} us = {wall / eager:.2f}x; {used}"
            + (f"; whole images of as many pixels {same:,.0f} us" if same else ""),
            flush=True,
        )
        memory = f"dense {shown} us; peak {used}, dense {peak}"
        note = f"{memory}; eager call {eager:.0f} us, dense {wall:.0f} us{whole}"
        note += f"; whole images of as many pixels {same:.0f} us" if same else ""
        yield row_of(
            columns, name, (batch, *size, 3), str(x.dtype).removeprefix("torch."), options, share,
            count, f"batch {batch}" + f", autocast {options.dtype}" * options.autocast,
            timed_by="graph", us=middle, us_p10=us[len(us) // 10],
            us_p90=us[-1 - len(us) // 10], note=note, dense_us=best, ratio_to_dense=best / middle,
        )  # fmt: skip
        if options.profile and share == options.shares[0]:
            print(sparse.profile(x, mask))
        if options.timeline and share in (options.shares[0], options.shares[-1]):
            write_timeline(options.folder, f"{name}, batch {batch}, {share:.0%} active", run.graph)
        del run
    if options.timeline:
        run = dense if options.no_compile else torch.compile(dense, dynamic=False)
        graph = captured(functools.partial(run, x))
        write_timeline(options.folder, f"{name}, batch {batch}, dense", graph)
    del sparse, call
    torch.cuda.empty_cache()


def write_timeline(folder, title, graph):
    """Add a table of a graph's kernels to the folder's file."""
    with (folder / "timeline.txt").open("a") as out:
        print(*timeline.lines(title, graph), sep="\n", file=out)


def dense_times(dense, x, options):
    """Return microseconds of the dense network in a graph, by how it was made."""
    ways = {"eager": dense}
    if not options.no_compile:
        ways["compiled"] = torch.compile(dense, dynamic=False)
    if options.autotune:
        mode = "max-autotune-no-cudagraphs"
        ways["autotuned"] = torch.compile(dense, dynamic=False, mode=mode)
    return {
        way: statistics.median(graph_times(captured(functools.partial(call, x))))
        for way, call in ways.items()
    }


def same_pixels(dense, x, count, options):
    """Return microseconds of the dense network on an image of about ``count`` blocks of pixels."""
    height = math.isqrt(count // len(x))
    width = round(count / len(x) / height)
    size = (len(x), x.shape[1], height * options.block, width * options.block)
    small = torch.randn(size, device=x.device).to(x.dtype)
    torch.compiler.reset()
    times = dense_times(dense, small.to(memory_format=torch.channels_last), options)
    return min(times.values())


def changing(name, batch, options, columns):
    """Yield rows of eager calls without a capacity, each with another mask, and print them."""
    size = models.image_size(name)
    model, x = inputs(name, batch, getattr(torch, options.dtype))
    wall = clock(lambda: model(x))
    for share in options.shares:
        shares = [min(share * (0.8 + 0.1 * (i % 5)), 1.0) for i in range(120)]
        made = [blobs(batch, size, s, options.block, seed) for seed, s in enumerate(shares)]
        masks = [mask.to("cuda") for mask, _ in made]
        sparse = sparsify(model, options.block)
        us = [clock(functools.partial(sparse, x, mask), 1, warm=0) for mask in masks]
        first, us = us[0], sorted(us[40:])
        middle = statistics.median(us)
        print(
            f"{name} {batch}x{size[0]}x{size[1]}, {share:.0%}, another mask at each call: "
            f"{middle:,.0f} us, from {us[0]:,.0f} to {us[-1]:,.0f}; the first {first:,.0f}; dense "
            f"{wall:,.0f} us = {wall / middle:.2f}x",
            flush=True,
        )
        yield row_of(
            columns, name, (batch, *size, 3), options.dtype, options, share, made[0][1],
            f"batch {batch}, another mask at each call", timed_by="wall", us=middle,
            us_p10=us[len(us) // 10], us_p90=us[-1 - len(us) // 10], dense_us=wall,
            ratio_to_dense=wall / middle, note="no capacity; calls 41 to 120 of a network",
        )  # fmt: skip


def trained(name, batch, options, columns):
    """Yield rows of training steps on a GPU, and print them."""
    size = models.image_size(name)
    model, x = inputs(name, batch, torch.float16)
    made = [blobs(batch, size, share, options.block) for share in options.shares]
    masks = [(mask.to("cuda"), count) for mask, count in made]
    dense, wall, peak = {}, None, None
    print(f"training {name} {batch}x{size[0]}x{size[1]}", flush=True)
    for what, us, eager, used, more in training.times(
        model, x, masks, options.block, not options.no_compile
    ):
        middle = statistics.median(us)
        if isinstance(what, str):
            dense[what] = middle
            wall, peak = wall or eager, peak or used
            print(f"  dense {what}: {middle:,.0f} us; by the clock {eager:,.0f} us; {used}")
            continue
        graphed, replayed = more
        best, share = min(dense.values()), options.shares[[c for _, c in masks].index(what)]
        print(
            f"  {share:4.0%}: graph {middle:,.0f} us = {best / middle:.2f}x; by the clock "
            f"{eager:,.0f} us = {wall / eager:.2f}x, the network graphed {graphed:,.0f} us = "
            f"{wall / graphed:.2f}x, by replay=True {replayed:,.0f} us = "
            f"{wall / replayed:.2f}x; {used}",
            flush=True,
        )
        yield row_of(
            columns, f"{name}, training step", (batch, *size, 3), "bfloat16", options, share, what,
            f"batch {batch}", timed_by="graph", us=middle, us_p10=us[len(us) // 10],
            us_p90=us[-1 - len(us) // 10], dense_us=best, ratio_to_dense=best / middle,
            note=f"peak {used}, dense {peak}; eager step {eager:.0f} us, "
            f"the network graphed {graphed:.0f} us, by replay=True {replayed:.0f} us, "
            f"dense {wall:.0f} us",
        )  # fmt: skip


def check(sparse, x, mask, share, dense, dtype):
    """Raise unless the stack gives what whole images give, zeroed between layers."""
    tuned, sparse.replay = sparse.break_even, False
    sparse.break_even = 2.0
    result = models.picture(sparse(x, mask)).float()
    sparse.break_even = 0.0
    expected = (dense if share == 1 else models.picture(sparse(x, mask))).float()
    sparse.break_even, sparse.replay = tuned, "auto"
    error = ((result - expected).norm() / expected.norm()).item()
    depth = sum(isinstance(m, torch.nn.Conv2d) for m in sparse.modules())
    bound = depth * (2**-10 if dtype == torch.float32 else torch.finfo(dtype).eps)  # TF32
    if not error <= bound:
        raise AssertionError(f"relative error {error:.1e} of the stack, above {bound:.1e}")


# ------------------------------------------------------------------------------------------- CPU


def on_cpu(name, batch, options, columns):
    """Yield rows of a network on a CPU, float32, 512x512, and print them.

    One sparsified network is called with masks of all shares in turns, as masks change from call to
    call.
    """
    torch.set_num_threads(options.threads)
    size = (512, 512)
    small = (8, 16, 32, 32) if name == "unet" else None
    model = models.make(name, widths=small).to(memory_format=torch.channels_last)
    x = torch.randn(batch, 3, *size).to(memory_format=torch.channels_last)
    calls = {"dense": lambda: model(x)}
    sparse, counts = sparsify(model, options.block), {}
    for share in options.shares:
        mask, counts[share] = blobs(batch, size, share, options.block)
        calls[share] = lambda m=mask: sparse(x, m)
    times = {key: [] for key in calls}
    now = time.process_time if options.processor_time else time.perf_counter
    deadline = time.perf_counter() + 20
    while len(times["dense"]) < 5 or (time.perf_counter() < deadline and len(times["dense"]) < 60):
        for key, call in calls.items():
            start = now()
            call()
            times[key].append((now() - start) * 1e6)
    best = min(times["dense"][1:])
    shown = []
    for share in options.shares:
        us = sorted(times[share][1:])
        shown.append(f"{share:.0%} {best / us[0]:.2f}x")
        yield row_of(
            columns, name, (batch, *size, 3), "float32", options, share, counts[share],
            f"batch {batch}", timed_by="wall", us=us[0], us_p10=us[len(us) // 10],
            us_p90=us[-1 - len(us) // 10], dense_us=best, ratio_to_dense=best / us[0],
            note=f"{options.threads} threads; the least of {len(us)} calls in turns"
            + "; time of the process" * options.processor_time,
        )  # fmt: skip
    print(
        f"{name}: dense {best / 1e3:,.1f} ms; blocks of {options.block}: {', '.join(shown)}",
        flush=True,
    )


if __name__ == "__main__":
    main()
