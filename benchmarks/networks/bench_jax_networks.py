"""ResNet-50 on active blocks in JAX, from image and mask to result, against XLA's dense network.

    python -m benchmarks.networks.bench_jax_networks [--batch 1 8] [--quick] [--out FOLDER]

Compiled calls are timed by their wall time: one that is waited for ("forward", "gradients"), and
one of ten that are queued before the last is waited for ("forward, queued"). The list of blocks is
made in the call; weights are packed before, for gradients in the call. The dense network has its
weights in both layouts, and is compared by the faster. Batch norms are folded: there is a bias.
With a full mask the results are compared. float16 on a GPU; on a CPU nothing is written.
"""

import argparse
import functools
import os
from pathlib import Path

import numpy as np

from benchmarks.harness import machine
from benchmarks.harness.rows import OURS, Row, Writer
from benchmarks.harness.timing import Contender, WallClock
from benchmarks.networks.bench_networks import BLOCK, SHARES, blobs
from sbnet_cupy import PackedWeights

FILE = "jax_networks.csv"
DENSE = {"JAX, dense": "HWIO", "JAX, dense, OHWI": "OHWI"}
UNITS, WIDTHS = (3, 4, 6, 3), (64, 128, 256, 512)
QUEUED = 10
TRAINED = (0.1,)


def weights_of(jnp, dtype, units=UNITS, widths=WIDTHS):
    """Return random weights of a ResNet of bottlenecks, each layer's as PackedWeights."""
    rng = np.random.default_rng(0)

    def layer(size, channels, out, gain=2.0):
        kernel = rng.standard_normal((size, size, channels, out), np.float32)
        kernel *= (gain / (size * size * channels)) ** 0.5
        return PackedWeights(jnp.asarray(kernel, dtype), bias=jnp.zeros(out, jnp.float32))

    stages, before = [], widths[0]
    for count, width in zip(units, widths, strict=True):
        stages.append([])
        for number in range(count):
            unit = {
                "first": layer(1, before, width), "middle": layer(3, width, width),
                "last": layer(1, width, 4 * width, 0.2),
            }  # fmt: skip
            if not number:
                unit["shortcut"] = layer(1, before, 4 * width, 1.0)
            stages[-1].append(unit)
            before = 4 * width
    return {"stem": layer(7, 3, widths[0]), "stages": stages}


def units_of(weights):
    """Yield each unit and its stride."""
    for stage, units in enumerate(weights["stages"]):
        for number, unit in enumerate(units):
            yield unit, 2 if stage and not number else 1


def sparse(sbj, capacity, weights, images, mask):
    """Return the features of active blocks, and their table."""
    table = sbj.block_table(mask, BLOCK, capacity=capacity)

    def conv(x, table, layer, activation="relu", **options):
        return sbj.stack_conv2d(x, layer, table, activation=activation, **options)

    x = sbj.stack_from_image(images, table)
    x = conv(x, table, weights["stem"], strides=2, padding=3)
    table = table.after_conv(7, 2, 3)
    x = sbj.stack_max_pool(x, table, kernel=3, strides=2, padding=1)
    table = table.after_conv(3, 2, 1)
    for unit, stride in units_of(weights):
        y = conv(x, table, unit["first"])
        y = conv(y, table, unit["middle"], strides=stride, padding=1)
        after = table.after_conv(3, stride, 1)
        if "shortcut" in unit:
            x = conv(x, table, unit["shortcut"], activation=None, strides=stride, padding=0)
        x, table = conv(y, after, unit["last"], residual=x), after
    return x, table


def dense(jax, layout, weights, images):
    """Return the features of whole images, by XLA; weights are in that layout."""

    def conv(x, layer, activate=True, stride=1, padding=0, residual=None):
        y = jax.lax.conv_general_dilated(
            x, layer.w, (stride, stride), [(padding, padding)] * 2,
            dimension_numbers=("NHWC", layout, "NHWC"),
        )  # fmt: skip
        y += layer.bias.astype(y.dtype)
        y = y if residual is None else y + residual
        return jax.nn.relu(y) if activate else y

    x = conv(images, weights["stem"], stride=2, padding=3)
    low, pads = np.array(-np.inf, x.dtype), [(0, 0), (1, 1), (1, 1), (0, 0)]
    x = jax.lax.reduce_window(x, low, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), pads)
    for unit, stride in units_of(weights):
        y = conv(conv(x, unit["first"]), unit["middle"], stride=stride, padding=1)
        if "shortcut" in unit:
            x = conv(x, unit["shortcut"], activate=False, stride=stride)
        x = conv(y, unit["last"], residual=x)
    return x


class Calls:
    """The compiled calls of both networks on images of a size, each forward and its gradients."""

    def __init__(self, jax, dtype, batch, size, weights):
        import sbnet_cupy.jax as sbj

        rng = np.random.default_rng(batch)
        self.jax, self.sbj, self.weights = jax, sbj, weights
        self.images = jax.numpy.asarray(rng.standard_normal((batch, *size, 3), np.float32), dtype)

    def of(self, network, gradients=False):
        """Return a call of weights and images, and what else the network takes."""
        if not gradients:
            return self.jax.jit(network)

        def loss(weights, *given):
            return network(weights, *given).astype(self.jax.numpy.float32).mean()

        return self.jax.jit(self.jax.grad(loss))

    def dense(self, layout="HWIO", gradients=False):
        """Return the dense call, without arguments."""
        axes = ["HWIO".index(letter) for letter in layout]
        weights = self.jax.tree.map(
            lambda leaf: leaf.transpose(axes) if leaf.ndim == 4 else leaf, self.weights
        )
        call = self.of(functools.partial(dense, self.jax, layout), gradients)
        return functools.partial(call, weights, self.images)

    def sparse(self, mask, capacity, gradients=False):
        """Return the call on active blocks, without arguments."""
        weights = self.weights

        def run(*given):
            return sparse(self.sbj, capacity, *given)[0]

        if not gradients:
            weights = self.sbj.pack_weights(weights, run, self.images, mask)
        return functools.partial(self.of(run, gradients), weights, self.images, mask)

    def compare(self):
        """Raise unless a full mask gives the dense result, up to a rounding in each layer."""
        batch, *size, _ = self.images.shape
        mask = self.jax.numpy.ones((batch, *size), bool)
        blocks = batch * int(np.prod([-(-n // BLOCK) for n in size]))

        def image(weights, images, mask):
            return self.sbj.stack_to_image(*sparse(self.sbj, blocks, weights, images, mask))

        found = self.jax.jit(image)(self.weights, self.images, mask)
        found, expected = (np.asarray(y, np.float64) for y in (found, self.dense()()))
        error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        layers = len(self.jax.tree.leaves(self.weights)) // 2
        if not error <= layers * np.finfo(self.images.dtype).eps:
            raise AssertionError(f"batch {batch}: relative error {error:.1e} to the dense network")


def main(arguments=None):
    """Time all calls; print and write their rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="compare results, and write nothing")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="[1 8]")
    parser.add_argument("--quick", action="store_true", help="a small network, few rounds")
    parser.add_argument("--out", type=Path, help=f"folder of {FILE}")
    options = parser.parse_args(arguments)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leave memory to the others
    import jax

    on_gpu = jax.default_backend() == "gpu" and not options.cpu
    if not on_gpu:
        print(f"JAX {jax.__version__} has no GPU: results are compared, and nothing is written")
    torch = machine.import_torch(options.cpu)
    columns = machine.describe(__import__("cupy") if on_gpu else None, torch)
    columns["note"] = f"JAX {jax.__version__}"
    folder = machine.results_folder(columns, not on_gpu, options.out)
    with Writer(folder / FILE, Row, keep=True) as writer:
        for batch in options.batch:
            for row in _rows(jax, on_gpu, batch, columns, options.quick):
                if on_gpu:
                    writer.write(row)
    return 0


def _rows(jax, on_gpu, batch, columns, quick):
    dtype, size = np.float16 if on_gpu else np.float32, (96, 160) if quick else (800, 1408)
    small = {"units": (1, 1), "widths": (16, 32)} if quick else {}
    calls = Calls(jax, dtype, batch, size, weights_of(jax.numpy, dtype, **small))
    calls.compare()
    clock = WallClock(quick)
    for gradients, shares in ((False, SHARES), (True, TRAINED)):
        contenders = [calls.dense(layout, gradients) for layout in DENSE.values()]
        cases = [(name, 1.0, None) for name in DENSE]
        for share in shares:
            mask, blocks = blobs(batch, size, share)
            mask = jax.numpy.asarray(mask.numpy())
            contenders.append(calls.sparse(mask, blocks, gradients))
            cases.append((OURS, share, blocks))
        variants = {"gradients": 1} if gradients else {"forward": 1, "forward, queued": QUEUED}
        for variant, queued in variants.items():
            timings = clock.time_all([
                Contender(name, [functools.partial(_last_of, jax, call, queued)])
                for call, (name, *_) in zip(contenders, cases, strict=True)
            ])  # fmt: skip
            us = [[v / queued for v in (t.us, t.p10, t.p90)] for t in timings]
            dense_us = min(own[0] for own in us[: len(DENSE)])
            for (name, share, blocks), own in zip(cases, us, strict=True):
                ratio = dense_us / own[0]
                print(f"batch {batch} {variant:>15} {name:>16} {share:5.0%}: {own[0]:9.1f} us, "
                      f"{ratio:.2f} of dense", flush=True)  # fmt: skip
                yield Row(
                    **columns, op="network", suite="resnet50",
                    shape="x".join(map(str, calls.images.shape)), dtype=np.dtype(dtype).name,
                    block=f"{BLOCK}x{BLOCK}", mask="blobs", density=share, blocks=blocks,
                    variant=f"batch {batch}, {variant}", implementation=name, timed_by="wall",
                    us=own[0], us_p10=own[1], us_p90=own[2], bytes=None, gb_per_s=None,
                    percent_of_copy=None, original_us=None, ratio_to_original=None,
                    dense_us=dense_us, ratio_to_dense=ratio,
                )  # fmt: skip


def _last_of(jax, call, number):
    """Queue a number of calls, and wait for the last."""
    return jax.block_until_ready([call() for _ in range(number)][-1])


if __name__ == "__main__":
    raise SystemExit(main())
