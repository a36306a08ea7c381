"""Whole networks at sites, from points to features, their sites and maps included.

    python -m benchmarks.submanifold.bench_site_networks [--cpu] [--scan FILE.bin] [--out FOLDER]

The encoder of SECOND and a U-Net with residual units (networks.py): the forward pass, and the
forward pass with the gradients of all weights. Ours is compared with plain PyTorch in float64
before it is timed. Beside it run plain PyTorch by pair lists, dense PyTorch where the whole grid is
small, and spconv where it is installed. On a GPU ours has capacities, so that nothing waits, and
runs as a CUDA graph where it can be captured; the host's time is a row of its own, and so is the
wall time of calls without capacities, of which each has other points, 80 to 100% of them: eager
ones, and those of what ``sbnet_cupy.torch.graphed`` makes of a module. On a CPU the rows are ratios
of one run.
"""

import math
import time

import numpy as np

from benchmarks.harness.rows import OURS, Ratio, Row, Writer
from benchmarks.harness.timing import Contender, HostClock, TorchClock, WallClock, spread
from benchmarks.submanifold import command, networks, scenes
from benchmarks.submanifold.peers import kernel_time

FILE = "site_networks.csv"
PAIRS, DENSE, GRAPHED = "torch, pair lists", "torch, dense", "graphed"
MOST_CELLS = 300_000  # of a grid that is also computed dense
ONE_A_ROUND = 2e9  # bytes, from which a round of the clock is one call
MOST_ERROR = 0.02  # of spconv, relative: sums of float16 numbers may be in float16
OTHERS = 60  # calls with other points each, of which two thirds are timed
DEVICE = "cuda"  # in a run on a GPU


class Case:
    """A network on the points of a scene, by each library."""

    def __init__(self, torch, name, scene, device, dtype):
        self.torch, self.name, self.scene = torch, name, scene
        shape = (1, *(-(-n // 8) * 8 for n in scene.spatial_shape))  # whole windows on all levels
        d = len(scene.spatial_shape)
        rows, features = scenes.points_of(scene, networks.INPUT)
        self.rows = torch.from_numpy(rows).to(device)
        self.features = torch.from_numpy(features).to(device, dtype)
        self.points, self.kept = (self.rows, self.features), None
        self.weights = networks.weights_of(torch, name, d, dtype, device)
        kinds = {OURS: networks.Ours, PAIRS: networks.Plain}
        if math.prod(shape) <= MOST_CELLS:
            kinds[DENSE] = networks.Dense
        if device == DEVICE:
            kinds[GRAPHED] = networks.Graphed
        if device == "cuda" and _has_spconv():
            kinds["spconv"] = networks.Spconv
        self.networks = {
            library: kind(torch, name, self.weights, shape) for library, kind in kinds.items()
        }

    def forward(self, library):
        """Return rows and features of the result."""
        given = self.rows, self.features
        if library == "spconv":
            given = self.distinct()
        return self.networks[library](*given)

    def distinct(self):
        """Return the sites of the points, with any features; found once."""
        if self.kept is None or self.kept[0] is not self.rows:
            if self.rows is self.points[0]:
                rows = self.torch.from_numpy(self.scene.rows).to(self.rows.device)
            else:
                rows = self.rows.unique(dim=0)
            self.kept = self.rows, (rows, self.features[: len(rows)].contiguous())
        return self.kept[1]

    def take_others(self):
        """Take 80 to 100% of the points, in their order, until :meth:`take_all`."""
        torch, (rows, features) = self.torch, self.points
        count = int(len(rows) * (0.8 + 0.2 * float(torch.rand(()))))
        chosen = torch.randperm(len(rows))[:count].sort().values.to(rows.device)
        self.rows, self.features = rows[chosen], features[chosen]

    def take_all(self):
        """Take all points."""
        self.rows, self.features = self.points

    def step(self, library):
        """Return the gradients of all weights; those of spconv are its layers' own."""
        torch, network = self.torch, self.networks[library]
        if library == "spconv":
            learnt = [p for layer in network.layers.values() for p in layer.parameters()]
        elif library == GRAPHED:
            learnt = list(network.net.parameters())
        else:
            learnt = [t for pair in self.weights for t in pair]
        with torch.enable_grad():
            for t in learnt:
                t.requires_grad_(True)
            found = self.forward(library)[1].float().square().mean()
            grads = torch.autograd.grad(found, learnt, allow_unused=library == "spconv")
            for t in learnt:
                t.requires_grad_(False)
        return grads

    def check(self):
        """Raise unless each library finds what plain PyTorch does in float64.

        Ours up to rounding; spconv, whose sums are its own matter, up to MOST_ERROR.
        """
        torch, d = self.torch, self.rows.shape[1] - 1
        weights = [[t.double() for t in pair] for pair in self.weights]
        exact = networks.Plain(torch, self.name, weights, self.networks[OURS].shape)
        points = exact(self.rows, self.features.double())
        depth, terms = len(weights), 3**d * max(w.shape[-2] for w, _ in weights)
        bound = depth * (torch.finfo(self.features.dtype).eps + terms * torch.finfo().eps)
        for library in self.networks:
            rows, expected = points
            if library == "spconv":  # has sites, and other features
                given = self.distinct()
                rows, expected = exact(given[0], given[1].double())
                bound = max(bound, MOST_ERROR)
            found_rows, found = self.forward(library)
            real = (found_rows[:, 0] >= 0).nonzero()[:, 0]  # rows past the count are -1
            found_rows, found = found_rows[real].long(), found[real].double()
            order = np.lexsort(found_rows.cpu().numpy().T[::-1])
            if not torch.equal(found_rows[order], rows.long()):
                raise AssertionError(f"{self.scene.name}, {library}: other sites")
            error = float((found[order] - expected).norm() / expected.norm())
            if not error <= bound:
                raise AssertionError(
                    f"{self.scene.name}, {library}: relative error {error:.1e}, above {bound:.1e}"
                )


def _has_spconv():
    try:
        import spconv.pytorch  # noqa: F401
    except ImportError:
        return False
    return True


def main(arguments=None):
    """Time all cases; print and write their rows."""
    parser = command.parser_of(__doc__, FILE)
    parser.add_argument("--networks", nargs="+", default=list(networks.NETWORKS))
    options = parser.parse_args(arguments)
    unknown = [name for name in options.networks if name not in networks.NETWORKS]
    if unknown:
        known = ", ".join(networks.NETWORKS)
        parser.error(f"there is no network {unknown[0]!r}; there are: {known}")
    listed, _, torch, columns, folder = command.start(
        options, scenes.networks(options.quick, options.cpu),
        "these networks run on PyTorch's tensors",
    )  # fmt: skip
    measure, kind = (_on_cpu, Ratio) if options.cpu else (_on_gpu, Row)
    with torch.no_grad(), Writer(folder / FILE, kind, keep=True) as writer:
        for scene in listed:
            for name in options.networks:
                for row in measure(torch, name, scene, columns, options.quick):
                    writer.write(row)
    return 0


def _on_cpu(torch, name, scene, columns, quick):
    """Yield our times over PyTorch's, in the same rounds."""
    case = Case(torch, name, scene, "cpu", torch.float32)
    case.check()
    shown = command.ratio_columns(torch, columns)
    for variant, call in (("forward", case.forward), ("forward and backward", case.step)):
        contenders = [
            Contender(library, [lambda call=call, library=library: call(library)])
            for library in case.networks
        ]
        for contender, timing in list(
            zip(contenders, WallClock(quick).time_all(contenders), strict=True)
        )[1:]:
            print(f"{scene.name:>16} {name:>7} {variant:>20}: {timing.ratio:5.2f} of the time of "
                  f"{contender.name}", flush=True)  # fmt: skip
            yield Ratio(
                **shown, op="site_network", suite=scene.name, shape=scene.size, dtype="float32",
                block="3", mask="", variant=f"{name}, {variant}", implementation=contender.name,
                ratio=timing.ratio, ratio_p90=timing.ratio_p90,
            )  # fmt: skip


def _on_gpu(torch, name, scene, columns, quick):
    """Yield the rows of a network on a scene."""
    case = Case(torch, name, scene, DEVICE, torch.float16)
    case.check()
    for library in case.networks:
        if library in (OURS, GRAPHED, "spconv"):
            how, by = (f", {GRAPHED}", OURS) if library == GRAPHED else ("", library)
            for variant, call in (("forward", case.forward), ("forward and backward", case.step)):
                timing = _of_other_points(case, call, library, quick)
                yield _row(columns, case, f"{variant}{how}, other points", by, timing)
    del case.networks[GRAPHED]
    case.networks[OURS].fix(case.rows, case.features)
    case.check()
    clock, host = TorchClock(torch, quick), HostClock(torch.cuda.synchronize, quick)
    host.count = 5  # networks in a batch
    for library in case.networks:
        ours = library == OURS
        for variant, call in (("forward", case.forward), ("forward and backward", case.step)):
            contender = Contender(
                library, [lambda call=call, library=library: call(library)], clock="torch",
                capturable=ours or library == DENSE,
            )  # fmt: skip
            yield _row(columns, case, variant, library, clock.time(contender, ONE_A_ROUND))
            if ours:
                timing = host.time(contender, None)
                yield _row(columns, case, f"{variant}, host", library, timing)
            elif library == "spconv":
                timing = kernel_time(torch, contender.calls[0])
                yield _row(columns, case, f"{variant}, kernels", library, timing)


def _of_other_points(case, call, library, quick):
    """Return the wall time of calls, until their results are there, that have other points each."""
    samples = []
    call(library)  # of all points
    for _ in range(3 if quick else OTHERS):
        case.take_others()
        case.distinct()
        case.torch.cuda.synchronize()
        start = time.perf_counter()
        call(library)
        case.torch.cuda.synchronize()
        samples.append((time.perf_counter() - start) * 1e6)
    case.take_all()
    return spread(samples[len(samples) // 3 :], "wall")


def _row(columns, case, variant, implementation, timing):
    scene = case.scene
    print(f"{scene.name:>16} {case.name:>7} {variant:>26} {implementation:>18}: "
          f"{timing.us:9.1f} us ({timing.timed_by})", flush=True)  # fmt: skip
    return Row(
        **columns, op="site_network", suite=scene.name, shape=scene.size, dtype="float16",
        block="3", mask="", density=None, blocks=len(scene.rows), variant=f"{case.name}, {variant}",
        implementation=implementation, timed_by=timing.timed_by, us=timing.us, us_p10=timing.p10,
        us_p90=timing.p90, bytes=None, gb_per_s=None, percent_of_copy=None, original_us=None,
        ratio_to_original=None, note="distinct sites" if implementation == "spconv" else "",
    )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
