"""A U-Net of SparseConvNet's layers, with batch norms, on scans: what a user of it calls.

    python -m benchmarks.submanifold.bench_scn_unet [--cpu] [--scan FILE.bin] [--out FOLDER]

Eager calls in evaluation, on the same points again and again and on other points at each call, and
eager training steps, by the clock; on a GPU also what ``scn.graphed`` makes of them, and both as
CUDA graphs of the user's own, the layers that make sites with capacities. Its result in float16 is
compared with float64 first.
"""

import copy
import itertools
import statistics
import time

import numpy as np

from benchmarks.harness.rows import OURS, Row, Writer
from benchmarks.networks.timing import captured, graph_times
from benchmarks.submanifold import command, scenes

FILE = "scn_unet.csv"
PLANES = (32, 64, 96, 128)
CALLS = 30


def main(arguments=None):
    """Time the network on each scene; print and write the rows."""
    options = command.parser_of(__doc__, FILE).parse_args(arguments)
    count = 500 if options.quick or options.cpu else 14_000
    listed, _, torch, columns, folder = command.start(
        options, [scenes.scan(count)], "these networks run on PyTorch's tensors"
    )
    device = "cpu" if options.cpu else "cuda"
    with Writer(folder / FILE, Row, keep=True) as writer:
        for scene in listed:
            for row in measure(torch, scene, device, columns, 5 if options.quick else CALLS):
                writer.write(row)
    return 0


def network(torch, shape):
    """Return the U-Net, with running statistics of its own."""
    from sbnet_cupy.torch import scn

    torch.manual_seed(0)
    axes = len(shape)
    net = scn.Sequential(
        scn.InputLayer(axes, shape, mode=4),
        scn.SubmanifoldConvolution(axes, 16, PLANES[0], 3, False),
        scn.UNet(axes, 1, list(PLANES), residual_blocks=True, downsample=[2, 2]),
        scn.BatchNormReLU(PLANES[0]), scn.OutputLayer(axes),
    )  # fmt: skip
    for module in net.modules():
        if isinstance(module, scn.BatchNormalization):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.8, 1.2)
    return net


def inputs(torch, scene, device, dtype, number):
    """Return as many sets of points: coordinates with the sample last, features, samples."""
    rows, features = scenes.points_of(scene, 16)
    coordinates = torch.from_numpy(np.roll(rows, -1, axis=1)).long()
    features = torch.from_numpy(features)
    few = max(len(rows) // 400, 1)
    given = []
    for i in range(number):
        n = len(rows) - few * i
        given.append([coordinates[:n].to(device), features[:n].to(device, dtype), 1])
    return given


def measure(torch, scene, device, columns, calls):
    """Yield the rows of a scene."""
    dtype = torch.float16 if device == "cuda" else torch.float32
    net = network(torch, tuple(-(-n // 16) * 16 for n in scene.spatial_shape)).to(device, dtype)
    given = inputs(torch, scene, device, dtype, 2 * calls)
    with torch.no_grad():
        net.eval()
        check(torch, net(given[0]), net, given[0])
        same = clock(torch, net, itertools.repeat(given[0], calls))
        yield row_of(columns, scene, dtype, "forward, the same points", "wall", same)
        others = clock(torch, net, given)[calls:]
        yield row_of(columns, scene, dtype, "forward, other points at each call", "wall", others)

    def step(points, call=net):
        call(points).float().square().mean().backward()
        for parameter in net.parameters():
            parameter.grad = None

    def graphed(call, what):
        times = clock(torch, call, given)[calls:]
        return row_of(columns, scene, dtype, f"{what}, graphed, other points", "wall", times)

    if device == "cuda":
        from sbnet_cupy.torch import scn

        run = scn.graphed(net, given[:1])
        check(torch, run(given[1]), net, given[1])
        yield graphed(run, "forward")
        run.check()
        del run
    net.train()
    times = clock(torch, step, itertools.repeat(given[0], calls))
    yield row_of(columns, scene, dtype, "training step, the same points", "wall", times)
    times = clock(torch, step, given)[calls:]
    yield row_of(columns, scene, dtype, "training step, other points", "wall", times)
    if device == "cuda":
        run = scn.graphed(net, given[:1])
        yield graphed(lambda points: step(points, run), "training step")
        run.check()
        del run
        scn.set_capacities(net, given[:1])
        us = graph_times(captured(lambda: step(given[0])))
        yield row_of(columns, scene, dtype, "training step", "graph", us)
        net.eval()
        with torch.no_grad():
            us = graph_times(captured(lambda: net(given[0])))
        yield row_of(columns, scene, dtype, "forward", "graph", us)


def check(torch, found, net, points):
    """Raise unless ``found`` is what the network gives in float64, to an epsilon for each layer."""
    coordinates, features, samples = points
    found = found.double()
    expected = copy.deepcopy(net).double()([coordinates, features.double(), samples])
    error = ((found - expected).norm() / expected.norm()).item()
    depth = sum(len(parameter.shape) > 1 for parameter in net.parameters())
    bound = depth * torch.finfo(features.dtype).eps
    if not error <= bound:
        raise AssertionError(f"relative error {error:.1e}, above {bound:.1e}")


def clock(torch, call, inputs):
    """Return microseconds of calls that are waited for, after one that is not timed."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    inputs, times = iter(inputs), []
    call(next(inputs))
    for points in inputs:
        wait()
        start = time.perf_counter()
        call(points)
        wait()
        times.append((time.perf_counter() - start) * 1e6)
    return times


def row_of(columns, scene, dtype, variant, timed_by, us):
    """Return a row; print it."""
    us, dtype = sorted(us), str(dtype).partition(".")[2]
    middle = statistics.median(us)
    print(f"{scene.name:>16} U-Net {variant:>36}: {middle:9.1f} us ({timed_by})", flush=True)
    return Row(
        **columns, op="scn_unet", suite=scene.name, shape=scene.size, dtype=dtype, block="3",
        mask="", density=None, blocks=len(scene.rows), variant=variant, implementation=OURS,
        timed_by=timed_by, us=middle, us_p10=us[len(us) // 10], us_p90=us[-1 - len(us) // 10],
        bytes=None, gb_per_s=None, percent_of_copy=None, original_us=None, ratio_to_original=None,
    )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
