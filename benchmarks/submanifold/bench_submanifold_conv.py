"""submanifold_conv at the sites of scenes: its maps, its convolution, its gradients, its host time.

    python -m benchmarks.submanifold.bench_submanifold_conv [--cpu] [--scan FILE.bin] [--out FOLDER]

The forward pass, with weights packed in the call or before, the gradients of features and weights,
what a call costs the calling thread, the list of sites ("coordinate_map"), that with the kernel map
of a 3^d kernel ("maps"), and that map of known sites with the first convolution by it, which sorts
the map's rows or makes tiles of them ("map, first forward"), are timed apart, after each
convolution was compared with float64.
Beside the forward pass run PyTorch, by pair lists that were made beforehand, and spconv where it is
installed, forwards and with gradients, each by the best of its three algorithms: the sum of its
kernels, without the time between them, and what a call costs the thread. Its results are compared
with float64 before that, and of float16 numbers it runs again with sums in float32. On a CPU the
rows are ratios of one run.
"""

import functools
import itertools

import numpy as np

import sbnet_cupy as sb
from benchmarks.harness.rows import OURS, Ratio, Row, Writer
from benchmarks.harness.timing import Contender, CupyClock, HostClock, TorchClock, WallClock
from benchmarks.submanifold import command, scenes
from benchmarks.submanifold.peers import (
    EXACT_SPCONV,
    SPCONV,
    TORCH,
    Pairs,
    kernel_time,
    spconv_of,
)
from sbnet_cupy.core import libraries

FILE = "submanifold_conv.csv"
EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "tf32": 2.0**-10}
MOST, MOST_ON_CPU = 70_000_000, 40_000_000  # numbers of the features of a case
MOST_ERROR = 0.01  # of another library: more is no rounding
DEVICE = "cuda"  # of PyTorch's tensors, in a run on a GPU


class Case:
    """A scene's map and arrays for one number of channels."""

    def __init__(self, xp, scene, channels, dtype, precision=None):
        rng = np.random.default_rng(channels)
        d = len(scene.spatial_shape)
        n = len(scene.rows)
        self.scene, self.channels, self.dtype, self.precision = scene, channels, dtype, precision
        self.features = rng.standard_normal((n, channels), np.float32).astype(dtype)
        self.w = rng.standard_normal((*[3] * d, channels, channels), np.float32)
        self.w = (self.w / (3**d * channels) ** 0.5).astype(dtype)
        self.rows, self.xp = xp.asarray(scene.rows), xp
        self.sites, self.site_of_row = self.find_sites()
        self.x = sb.SparseTensor(xp.asarray(self.features), self.sites)
        self.weights, self.grad = xp.asarray(self.w), xp.asarray(self.features[::-1].copy())
        self.packed = sb.PackedWeights(self.weights, precision=precision)
        self.map = self.find_map()
        self.unmapped, _ = self.find_sites()

    def find_sites(self):
        """Return a new CoordinateMap and the site of each row; nothing waits for its count."""
        return sb.coordinate_map(
            self.rows, spatial_shape=self.scene.spatial_shape, batch_size=1, capacity=len(self.rows)
        )

    def find_map(self):
        """Return the kernel map of sites that have none yet."""
        return self._map_of(self.find_sites()[0])

    def convolve(self):
        """Return the features of the convolution."""
        return sb.site_conv(self.x.features, self.weights, self.map, precision=self.precision)

    def convolve_alone(self):
        """Return the same of weights that are packed already."""
        return sb.site_conv(self.x.features, self.packed, self.map)

    def convolve_first(self):
        """Return the same by a kernel map that is made for it, and all that it keeps."""
        self.unmapped.clear()
        return sb.site_conv(self.x.features, self.packed, self._map_of(self.unmapped))

    def differentiate(self):
        """Return the gradients of features and weights."""
        return sb.site_conv_grad(
            self.grad, self.x.features, self.weights, self.map, precision=self.precision
        )

    def lists(self):
        """Return the rows that each tap reads, as NumPy has them."""
        rows = self.map.rows
        return rows if isinstance(rows, np.ndarray) else rows.get()

    def features_of_rows(self):
        """Return the features of the rows of the scene, a NumPy array, as others take them."""
        return self.features[self._numpy(self.site_of_row)]

    def _map_of(self, sites):
        return sb.kernel_map(sites, (3,) * len(self.scene.spatial_shape), onto=sites)

    def _numpy(self, array):
        return array if isinstance(array, np.ndarray) else array.get()

    def check(self):
        """Raise unless the result is that in float64 up to the rounding of its sums; keep that."""
        xp, epsilon = self.xp, EPSILON[self.precision or np.dtype(self.dtype).name]
        y, features, w = (
            xp.asarray(self._numpy(array).astype(np.float64))
            for array in (self.convolve(), self.features, self.w)
        )
        exact, size = xp.zeros_like(y), xp.zeros_like(y)
        for read, tap in zip(self.map.rows, w.reshape(-1, *w.shape[-2:]), strict=True):
            out = xp.flatnonzero(read >= 0)
            exact[out] += features[read[out]] @ tap
            size[out] += abs(features[read[out]]) @ abs(tap)
        terms = self.map.taps * self.channels
        bound = (terms + 1) * float(np.finfo(np.float32).eps) * size
        bound += epsilon * ((size if self.precision else abs(exact)) + bound)
        if not (abs(y - exact) <= bound).all():
            raise AssertionError(f"{self.scene.name}, {self.channels} channels: beyond rounding")
        self.exact = exact

    def error(self, y, exact=None):
        """Return the root mean square of the errors of ``y`` over that of the result in float64."""
        exact = self.exact if exact is None else exact
        y = self.xp.asarray(y).astype(np.float64)
        return float(((y - exact) ** 2).mean() ** 0.5 / (exact**2).mean() ** 0.5)


def main(arguments=None):
    """Time all cases; print and write their rows."""
    parser = command.parser_of(__doc__, FILE)
    parser.add_argument("--channels", type=int, nargs="+", help="those of each scene")
    parser.add_argument("--numbers", nargs="+", default=["float16"], choices=list(EPSILON))
    parser.add_argument("--alone", action="store_true", help="without PyTorch and spconv, on a GPU")
    options = parser.parse_args(arguments)
    listed, cupy, torch, columns, folder = command.start(
        options, scenes.standard(options.quick), options.cpu and "this compares with PyTorch"
    )
    measure, kind = (_on_cpu, Ratio) if options.cpu else (_on_gpu, Row)
    most = MOST_ON_CPU if options.cpu else MOST
    with Writer(folder / FILE, kind, keep=True) as writer:
        for scene in listed:
            wanted = options.channels or scene.channels
            taken = [c for c in wanted if len(scene.rows) * c <= most]
            for numbers, channels in itertools.product(options.numbers, taken):
                first = (numbers, channels) == (options.numbers[0], taken[0])
                peers = None if options.alone and not options.cpu else torch
                case = scene, channels, numbers, columns, options.quick, first
                for row in measure(cupy, peers, *case):
                    writer.write(row)
    return 0


def _on_cpu(_, torch, scene, channels, numbers, columns, quick, first):
    """Yield our times for a case over PyTorch's, in the same rounds."""
    case = Case(np, scene, channels, np.float32)
    case.check()
    pairs = Pairs(torch, case.features, case.w, case.lists(), "cpu")
    with torch.no_grad():
        contenders = [Contender(OURS, [case.convolve]), pairs.contender()]
        theirs = WallClock(quick).time_all(contenders)[1]
    shown = {key: columns[key] for key in ("torch", "numpy", "commit")}
    print(f"{scene.name:>16} {channels:4} channels: {theirs.ratio:5.2f} of PyTorch's time")
    yield Ratio(
        cpu=columns["gpu"], **shown, op="submanifold_conv", suite=scene.name, shape=scene.size,
        dtype="float32", block="3", mask="", variant=f"{channels} channels", implementation=TORCH,
        note="pair lists made beforehand", ratio=theirs.ratio, ratio_p90=theirs.ratio_p90,
    )  # fmt: skip


def _on_gpu(cupy, torch, scene, channels, numbers, columns, quick, first):
    """Yield the rows of a case; ``first`` of its scene, those of its maps too."""
    stream = cupy.cuda.Stream(non_blocking=True)
    clock = CupyClock(cupy, stream, quick)
    with stream:
        dtype = libraries.bfloat16("dtype") if numbers == "bfloat16" else numbers
        dtype, precision = (np.float32, "tf32") if numbers == "tf32" else (dtype, None)
        case = Case(cupy, scene, channels, dtype, precision)
        case.check()
        timed = [
            ("forward", case.convolve), ("forward, weights packed", case.convolve_alone),
            ("map, first forward", case.convolve_first), ("backward", case.differentiate),
        ]  # fmt: skip
        if first:
            timed += [("coordinate_map", case.find_sites), ("maps", case.find_map)]
        for variant, call in timed:
            timing = clock.time(Contender(OURS, [call]), case.features.nbytes)
            yield _row(columns, case, variant, OURS, timing)
        wait = cupy.cuda.Device().synchronize
        for variant, call in [("host", case.convolve), *_kept_calls(case, torch)]:
            host = HostClock(wait, quick).time(Contender(OURS, [call]), None)
            yield _row(columns, case, variant, OURS, host)
    if torch is None:
        return
    clock = TorchClock(torch, quick)
    pairs = Pairs(torch, case.features, case.w, case.lists(), DEVICE).contender()
    yield _row(columns, case, "forward", TORCH, clock.time(pairs, case.features.nbytes))
    if numbers == "bfloat16":  # which spconv has not
        return
    rows = [
        row
        for name in ((SPCONV, EXACT_SPCONV) if numbers == "float16" else (SPCONV,))
        for row in _rows_of_spconv(columns, case, name, torch, quick)
    ]
    yield from rows
    if rows:
        with stream:
            ours = kernel_time(torch, case.convolve_alone)
            note = f"error {case.error(case.convolve_alone()):.1e}"
        yield _row(columns, case, "forward, weights packed, kernels", OURS, ours, note)


def _rows_of_spconv(columns, case, implementation, torch, quick):
    """Yield the rows of its layers, by the best of its algorithms; none where it is missing."""
    found = list(
        spconv_of(
            torch, case.scene, case.features_of_rows(), case.w, tf32=case.precision == "tf32",
            exact=implementation == EXACT_SPCONV,
        )
    )  # fmt: skip
    errors = {}
    for name, call, _ in found:
        y = call().detach().double().cpu().numpy()
        errors[name] = case.error(y, case.exact[case.site_of_row])
        if not errors[name] <= MOST_ERROR:
            raise AssertionError(f"{implementation}, {case.scene.name}: error {errors[name]:.1e}")
    for place, variant in enumerate(("forward", "forward and backward"), 1):
        times = [(kernel_time(torch, its[place]), its) for its in found]
        if not times:
            return
        timing, (name, call, _) = min(times, key=lambda timed: timed[0])
        note = f"its best algorithm, {name}"
        if place == 1:
            best = call
            note += f"; error {errors[name]:.1e}"
        yield _row(columns, case, variant, implementation, timing, note)
    host = HostClock(torch.cuda.synchronize, quick).time(Contender("", [best]), None)
    yield _row(columns, case, "host", implementation, host)


def _kept_calls(case, torch):
    """Return submanifold_conv of sites whose map is kept and weights that are packed, by name."""
    alone = functools.partial(sb.submanifold_conv, case.x, case.packed)
    calls = [("host, weights packed", alone)]
    if torch is not None and np.dtype(case.dtype).name != "bfloat16":
        from sbnet_cupy import torch as tensors

        features, rows, w = map(torch.from_dlpack, (case.x.features, case.rows, case.weights))
        sites, _ = tensors.coordinate_map(
            rows, spatial_shape=case.scene.spatial_shape, batch_size=1, capacity=len(rows)
        )
        x, w = sb.SparseTensor(features, sites), sb.PackedWeights(w, precision=case.precision)
        call = torch.no_grad()(functools.partial(tensors.submanifold_conv, x, w))
        calls.append(("host, weights packed, tensors", call))
    return calls


def _row(columns, case, variant, implementation, timing, note=""):
    scene = case.scene
    print(f"{scene.name:>16} {case.channels:4} channels {variant:>23} {implementation:>18}: "
          f"{timing.us:9.1f} us ({timing.timed_by})", flush=True)  # fmt: skip
    return Row(
        **columns, op="submanifold_conv", suite=scene.name, shape=scene.size,
        dtype=case.precision or np.dtype(case.dtype).name, block="3", mask="", density=None,
        blocks=len(scene.rows),
        variant=f"{case.channels} channels, {variant}", implementation=implementation,
        timed_by=timing.timed_by, us=timing.us, us_p10=timing.p10, us_p90=timing.p90, bytes=None,
        gb_per_s=None, percent_of_copy=None, original_us=None, ratio_to_original=None, note=note,
    )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
