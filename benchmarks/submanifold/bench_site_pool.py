"""sparse_max_pool, sparse_avg_pool and global_pool at sites, with the map found before.

    python -m benchmarks.submanifold.bench_site_pool [--cpu] [--scan FILE.bin] [--out FOLDER]

Windows are 2^d cells with a stride of 2, and 3^d with a stride of 2 and padding 1. Gradients go to
all of equal largest values, as PyTorch's. Beside them run the same poolings in plain PyTorch, by a
list of pairs of rows. Global pooling is of one sample, of which PyTorch reduces all rows. On a GPU
features are float16, on a CPU float32 and rows are ratios of one run.
"""

import itertools

import numpy as np

import sbnet_cupy as sb
from benchmarks.harness.rows import OURS, Ratio, Row
from benchmarks.harness.timing import Contender, CupyClock, TorchClock, WallClock
from benchmarks.submanifold import command
from benchmarks.submanifold.torch_sites import pairs_of

FILE = "site_pool.csv"
TORCH, TORCH_ROWS = "torch, pairs of rows", "torch, all rows"
DEVICE = "cuda"  # of PyTorch's tensors, in a run on a GPU
CHANNELS = (32, 128)
WINDOWS = {"2": (2, 0), "3": (3, 1)}  # kernel, padding; the stride is 2
WHOLE = "sample"  # in place of a window: global pooling
OPS = {"max": "sparse_max_pool", "average": "sparse_avg_pool",
       "max, gradient": "sparse_max_pool_grad"}  # fmt: skip
GLOBAL = {"max": "global_pool", "average": "global_pool"}


class Case:
    """Features at the sites of a scene, and a window."""

    ops = OPS

    def __init__(self, xp, scene, channels, window, dtype):
        self.scene, self.window, self.dtype = scene, window, np.dtype(dtype)
        rng = np.random.default_rng(len(scene.rows))
        features = rng.standard_normal((len(scene.rows), channels)).astype(dtype)
        self.x = sb.sparse_tensor(
            xp.asarray(features), xp.asarray(scene.rows), spatial_shape=scene.spatial_shape,
            batch_size=1,
        )  # fmt: skip
        self.rows = self._find_rows()  # that each row of a result reads, tap by tap
        shape = 1 if self.rows is None else self.rows.shape[1], channels
        self.grad = xp.asarray(rng.standard_normal(shape).astype(dtype))

    def _find_rows(self):
        kernel, padding = WINDOWS[self.window]
        self.options = {"kernel_size": kernel, "stride": 2, "padding": padding}
        self.options["capacity"] = self.max().coordinates.capacity
        return sb.kernel_map(self.x, **self.options).rows

    @property
    def nbytes(self):
        """Bytes of features that are read and written at least once."""
        return self.x.features.nbytes + self.grad.nbytes

    def call(self, variant):
        """Return the features of a result, or a gradient."""
        return {"max": self.max, "average": self.average}.get(variant, self.gradient)()

    def max(self):
        """Return the largest value of each window."""
        return sb.sparse_max_pool(self.x, **self.options)

    def average(self):
        """Return the average of the sites in each window."""
        return sb.sparse_avg_pool(self.x, count="active", **self.options)

    def gradient(self):
        """Return the gradient of the largest values."""
        return sb.sparse_max_pool_grad(self.grad, self.x, ties="all", **self.options)


class GlobalCase(Case):
    """The same features, of which the largest, or the average, of a whole sample is taken."""

    ops = GLOBAL

    def _find_rows(self):
        return None

    def max(self):
        """Return the largest value of each sample."""
        return sb.global_pool(self.x)

    def average(self):
        """Return the average of each sample."""
        return sb.global_pool(self.x, "mean")


class Plain:
    """The same of a Case in plain PyTorch."""

    name = TORCH

    def __init__(self, torch, case, device):
        self.torch = torch
        arrays = case.x.features, case.grad
        self.x, self.grad = (torch.from_numpy(host(array)).to(device) for array in arrays)
        if case.rows is not None:
            self._list_pairs(torch.from_numpy(host(case.rows)).to(device))

    def _list_pairs(self, rows):
        torch = self.torch
        read, out = zip(*pairs_of(rows), strict=True)
        self.read, self.out = torch.cat(read).long(), torch.cat(out)
        self.into = self.out[:, None].expand(-1, self.x.shape[1])
        self.count = torch.bincount(self.out, minlength=len(self.grad))[:, None]

    def call(self, variant):
        """Return the features of a result, or a gradient."""
        return {"max": self.max, "average": self.average}.get(variant, self.gradient)()

    def max(self):
        """Return the largest value of each window."""
        least = self.grad.new_full(self.grad.shape, -self.torch.inf)
        return least.scatter_reduce(0, self.into, self.x[self.read], "amax")

    def average(self):
        """Return the average of the sites in each window."""
        total = self.torch.zeros_like(self.grad).index_add(0, self.out, self.x[self.read])
        return total / self.count

    def gradient(self):
        """Return the gradient of the largest values."""
        wins = self.x[self.read] == self.max()[self.out]
        share = self.torch.where(wins, self.grad[self.out], 0)
        return self.torch.zeros_like(self.x).index_add(0, self.read, share)


class GlobalPlain(Plain):
    """The same of a GlobalCase."""

    name = TORCH_ROWS

    def max(self):
        """Return the largest value of all rows."""
        return self.x.amax(0, keepdim=True)

    def average(self):
        """Return the average of all rows."""
        return self.x.mean(0, keepdim=True)


def both_of(xp, torch, device, scene, channels, window, dtype):
    """Return the case of a window, or of a whole sample, and the same in plain PyTorch."""
    kinds = (GlobalCase, GlobalPlain) if window == WHOLE else (Case, Plain)
    case = kinds[0](xp, scene, channels, window, dtype)
    return case, kinds[1](torch, case, device)


def check(case, plain):
    """Raise unless both give the same, within the rounding of sums."""
    for variant in case.ops:
        ours, theirs = case.call(variant), plain.call(variant).cpu().numpy().astype(np.float64)
        ours = host(getattr(ours, "features", ours)).astype(np.float64)
        rounding = 64 * np.finfo(case.dtype).eps  # of 27 numbers, in two orders
        bound = 0 if variant == "max" else rounding * abs(theirs).max(initial=1)
        if not (abs(ours - theirs) <= bound).all():
            raise AssertionError(
                f"{case.scene.name}, {variant} of {case.window}: PyTorch finds something else"
            )


def host(array):
    """Return an array of NumPy or CuPy in NumPy."""
    return array if isinstance(array, np.ndarray) else array.get()


def main(arguments=None):
    """Time all scenes; print and write their rows."""
    return command.compare(__doc__, FILE, arguments, _cases, _on_cpu, _on_gpu)


def _cases(listed):
    return itertools.product(listed, CHANNELS, (*WINDOWS, WHOLE))


def _named(case, variant):
    shape = f"{case.scene.size}, {case.x.channels} channels"
    return {
        "op": case.ops[variant], "suite": case.scene.name, "shape": shape, "dtype": case.dtype.name,
        "block": case.window, "mask": "", "variant": variant,
    }  # fmt: skip


def _on_cpu(_, torch, given, columns, quick):
    """Yield our times over PyTorch's, in the same rounds."""
    case, plain = both_of(np, torch, "cpu", *given, np.float32)
    check(case, plain)
    shown = command.ratio_columns(torch, columns)
    for variant in case.ops:
        contenders = [
            Contender(name, [lambda found=found, variant=variant: found.call(variant)])
            for name, found in ((OURS, case), (plain.name, plain))
        ]
        theirs = WallClock(quick).time_all(contenders)[1]
        yield Ratio(
            **shown, **_named(case, variant), implementation=plain.name, ratio=theirs.ratio,
            ratio_p90=theirs.ratio_p90,
        )  # fmt: skip


def _on_gpu(cupy, torch, given, columns, quick):
    """Yield the rows of a scene, with some channels and a window."""
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        case, plain = both_of(cupy, torch, DEVICE, *given, np.float16)
        check(case, plain)
        clocks = CupyClock(cupy, stream, quick), TorchClock(torch, quick)
        for variant in case.ops:
            for name, found, clock in ((OURS, case, clocks[0]), (plain.name, plain, clocks[1])):
                calls = [lambda found=found, variant=variant: found.call(variant)]
                call = Contender(name, calls, clock="" if name == OURS else "torch")
                timing = clock.time(call, case.nbytes)
                yield _row(columns, case, variant, name, timing)


def _row(columns, case, variant, name, timing):
    print(f"{case.scene.name:>16} {variant:>13} of {case.window}, {case.x.channels:>3} channels, "
          f"{name:>20}: {timing.us:9.1f} us ({timing.timed_by})", flush=True)  # fmt: skip
    return Row(
        **columns, **_named(case, variant), density=None, blocks=len(case.scene.rows),
        implementation=name, timed_by=timing.timed_by, us=timing.us, us_p10=timing.p10,
        us_p90=timing.p90, bytes=case.nbytes, gb_per_s=case.nbytes / timing.us / 1e3,
        percent_of_copy=None, original_us=None, ratio_to_original=None,
    )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
