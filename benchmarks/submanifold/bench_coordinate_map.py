"""coordinate_map and kernel_map: lists of sites, and which rows convolutions at them read.

    python -m benchmarks.submanifold.bench_coordinate_map [--cpu] [--scan FILE.bin] [--out FOLDER]

Timed are the distinct sites of points ("sites"), with the mean of their features ("mean"), the map
of a 3^d kernel at the same sites ("same"), and that of a 3^d kernel with stride 2 and padding 1,
which finds new sites ("strided"). The maps are compared with PyTorch's first. Beside them run the
same searches in plain PyTorch, by sorted numbers of cells, and spconv's maps where it is installed.
On a CPU the rows are ratios of one run.
"""

import numpy as np

import sbnet_cupy as sb
from benchmarks.harness.rows import OURS, Ratio, Row
from benchmarks.harness.timing import Contender, CupyClock, HostClock, TorchClock, WallClock
from benchmarks.submanifold import command, scenes
from benchmarks.submanifold.peers import spconv_maps
from benchmarks.submanifold.torch_sites import Cells

FILE = "coordinate_map.csv"
TORCH = "torch, sorted cells"
CHANNELS = 4  # of the points
DEVICE = "cuda"  # of PyTorch's tensors, in a run on a GPU
OPS = {"sites": "coordinate_map", "mean": "sparse_tensor", "same": "kernel_map",
       "strided": "kernel_map"}  # fmt: skip


class Case:
    """The points of a scene, about two at each site, and what is found of them."""

    def __init__(self, xp, scene, waits):
        self.xp, self.scene = xp, scene
        points, features = scenes.points_of(scene, CHANNELS)
        self.points, self.rows = points, xp.asarray(points)
        self.given, self.features = features, xp.asarray(features)
        self.kernel = (3,) * len(scene.spatial_shape)
        self.capacity = None if waits else len(scene.rows)
        self.known, self.coarse = self.sites(), None
        if not waits:
            self.coarse = self.strided().target.capacity

    def sites(self):
        """Return the distinct sites."""
        grid = {"spatial_shape": self.scene.spatial_shape, "batch_size": 1}
        return sb.coordinate_map(self.rows, mode="first", capacity=self.capacity, **grid)[0]

    def mean(self):
        """Return the mean of the features of each site."""
        grid = {"spatial_shape": self.scene.spatial_shape, "batch_size": 1}
        given = self.features, self.rows
        return sb.sparse_tensor(*given, mode="mean", capacity=self.capacity, **grid)

    def same(self):
        """Return the map of a kernel at the sites, found anew."""
        self.known.clear()
        return sb.kernel_map(self.known, self.kernel, onto=self.known)

    def strided(self):
        """Return the map of a kernel with a stride, and so its sites, found anew."""
        self.known.clear()
        return sb.kernel_map(self.known, self.kernel, stride=2, padding=1, capacity=self.coarse)


class Plain:
    """The same of a Case in plain PyTorch."""

    def __init__(self, torch, case, device):
        self.torch, self.shape = torch, (1, *case.scene.spatial_shape)
        self.rows = torch.from_numpy(case.points).to(device)
        self.features = torch.from_numpy(case.given).to(device)
        self.known = self.sites()

    def sites(self):
        """Return the distinct sites."""
        return Cells.of_rows(self.torch, self.rows, self.shape)[0]

    def mean(self):
        """Return the mean of the features of each site."""
        cells, inverse = Cells.of_rows(self.torch, self.rows, self.shape)
        total = self.features.new_zeros(len(cells), CHANNELS).index_add(0, inverse, self.features)
        return total / self.torch.bincount(inverse, minlength=len(cells))[:, None]

    def same(self):
        """Return the table of a kernel at the sites."""
        return self.known.same_map()

    def strided(self):
        """Return the sites and the table of a kernel with a stride."""
        return self.known.strided_map(3, 1)


def check_pairs(case, variant, table):
    """Raise unless another library's table names a row, none of them negative, as often as ours."""
    ours, found = (int((rows >= 0).sum()) for rows in (getattr(case, variant)().rows, table))
    if found != ours:
        raise AssertionError(f"{case.scene.name}, {variant}: {found} pairs of rows, ours {ours}")


def check(case, plain):
    """Raise unless both found the same sites, maps and, within rounding, means."""
    mean, rounding = case.mean(), np.finfo(np.float32).eps
    ours, order = in_raster_order(case.known)
    given = host(mean.features)[in_raster_order(mean.coordinates)[1]]
    most = np.unique(case.points, axis=0, return_counts=True)[1].max(initial=1)
    near = abs(given - plain.mean().cpu().numpy()) <= 2 * most * rounding * abs(case.given).max()
    smaller, table = plain.strided()
    strided = case.strided()
    coarse, coarse_order = in_raster_order(strided.target)
    right = {
        "sites": np.array_equal(ours, plain.known.rows().cpu().numpy()),
        "mean": near.all(),
        "same": np.array_equal(_turned(case.same(), order, order), plain.same().cpu().numpy()),
        "strided": np.array_equal(coarse, smaller.rows().cpu().numpy())
        and np.array_equal(_turned(strided, order, coarse_order), table.cpu().numpy()),
    }
    if not all(right.values()):
        wrong = ", ".join(name for name, is_right in right.items() if not is_right)
        raise AssertionError(f"{case.scene.name}: PyTorch finds something else for {wrong}")


def in_raster_order(coordinates):
    """Return the sites in raster order, and their rows in the list."""
    indices = host(coordinates.indices)[: int(host(coordinates.count)[0])]
    order = np.lexsort(indices.T[::-1])
    return indices[order], order


def host(array):
    """Return an array of NumPy or CuPy in NumPy."""
    return array if isinstance(array, np.ndarray) else array.get()


def _turned(made, source, target):
    """Return a table with the rows of both lists numbered in raster order."""
    rank = np.full(made.source.capacity + 1, -1)
    rank[source] = np.arange(len(source))
    return rank[host(made.rows)[:, target]]


def main(arguments=None):
    """Time all scenes; print and write their rows."""
    return command.compare(__doc__, FILE, arguments, list, _on_cpu, _on_gpu)


def _on_cpu(_, torch, scene, columns, quick):
    """Yield our times over PyTorch's, in the same rounds."""
    case = Case(np, scene, waits=True)
    plain = Plain(torch, case, "cpu")
    check(case, plain)
    shown = command.ratio_columns(torch, columns)
    for variant, op in OPS.items():
        contenders = [
            Contender(name, [getattr(found, variant)])
            for name, found in ((OURS, case), (TORCH, plain))
        ]
        theirs = WallClock(quick).time_all(contenders)[1]
        print(f"{scene.name:>16} {variant:>8}: {theirs.ratio:5.2f} of PyTorch's time", flush=True)
        yield Ratio(
            **shown, op=op, suite=scene.name, shape=scene.size, dtype="int32",
            block="3" if op == "kernel_map" else "", mask="", variant=variant, implementation=TORCH,
            ratio=theirs.ratio, ratio_p90=theirs.ratio_p90,
        )  # fmt: skip


def _on_gpu(cupy, torch, scene, columns, quick):
    """Yield the rows of a scene."""
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        case = Case(cupy, scene, waits=False)
        plain = Plain(torch, case, DEVICE)
        check(case, plain)
        clock = CupyClock(cupy, stream, quick)
        host_clock = HostClock(cupy.cuda.Device().synchronize, quick)
        host_clock.count //= 10  # calls of a millisecond, not of microseconds
        for variant in OPS:
            call = Contender(OURS, [getattr(case, variant)])
            yield _row(columns, scene, variant, OURS, clock.time(call, case.rows.nbytes))
            yield _row(columns, scene, variant, OURS, host_clock.time(call, None))
    clock = TorchClock(torch, quick)
    theirs = [(TORCH, name, getattr(plain, name), False) for name in OPS]
    for name, call in spconv_maps(torch, scene):
        check_pairs(case, name, call()[2])
        theirs.append(("spconv", name, call, False))
    for implementation, variant, call, capturable in theirs:
        contender = Contender(implementation, [call], clock="torch", capturable=capturable)
        yield _row(columns, scene, variant, implementation, clock.time(contender, None))


def _row(columns, scene, variant, implementation, timing):
    print(f"{scene.name:>16} {variant:>8} {implementation:>20}: {timing.us:9.1f} us "
          f"({timing.timed_by})", flush=True)  # fmt: skip
    op = OPS[variant]
    return Row(
        **columns, op=op, suite=scene.name, shape=scene.size, dtype="int32",
        block="3" if op == "kernel_map" else "", mask="", density=None, blocks=len(scene.rows),
        variant=variant, implementation=implementation, timed_by=timing.timed_by, us=timing.us,
        us_p10=timing.p10, us_p90=timing.p90, bytes=None, gb_per_s=None, percent_of_copy=None,
        original_us=None, ratio_to_original=None,
    )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
