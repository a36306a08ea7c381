"""Convolutions at sites in JAX, and whole networks: the wall time of compiled calls.

    python -m benchmarks.submanifold.bench_jax_sites [--scan FILE.bin] [--networks] [--quick]
        [--out FOLDER]

A layer is a submanifold convolution with a 3^d kernel over a map that was found before: ten of
them, one after another, in a compiled function, whose time is divided by ten. Beside it runs the
same in plain JAX, which takes the rows of each tap and multiplies them, in the same rounds. A map
is found anew in each call. Networks are those of networks.py, from points to features, with
capacities; their weights are packed before, for gradients in the call. Results are compared first.
Features are float16 on a GPU; on a CPU nothing is written.
"""

import functools
import itertools
import os

import numpy as np

import sbnet_cupy as sb
from benchmarks.harness.rows import OURS, Row, Writer
from benchmarks.harness.timing import Contender, WallClock
from benchmarks.submanifold import command, networks, scenes

FILE = "jax_sites.csv"
PLAIN = "JAX, rows of each tap"
CHANNELS, LAYERS = (32, 128), 10
MOST = 13_000_000  # numbers of the features of a layer: JAX keeps 27 copies for the gradient


class Layers:
    """Some convolutions over the map of a scene, as this library and plain JAX compute them."""

    def __init__(self, jax, scene, channels, dtype):
        import sbnet_cupy.jax as sbj

        rng, jnp = np.random.default_rng(channels), jax.numpy
        d, n = len(scene.spatial_shape), len(scene.rows)
        self.scene, self.channels, self.taps = scene, channels, 3**d
        w = rng.standard_normal((3**d, channels, channels), np.float32)
        self.w = jnp.asarray(w / (3**d * channels) ** 0.5, dtype)
        self.features = jnp.asarray(rng.standard_normal((n, channels), np.float32), dtype)
        self.rows = jnp.asarray(scene.rows)
        sites = functools.partial(
            sbj.coordinate_map, spatial_shape=scene.spatial_shape, batch_size=1
        )
        self.sites, _ = jax.jit(sites)(self.rows)
        self.find = jax.jit(lambda sites: sbj.kernel_map(sites, 3, onto=sites))
        self.map = self.find(self.sites)
        self.jax, self.calls = jax, {OURS: sbj.site_conv, PLAIN: functools.partial(plain, jax)}

    def function(self, name, variant):
        """Return a compiled function without arguments: all layers, or their gradients.

        Those of plain JAX are a loop, which takes XLA minutes less to compile.
        """
        jax, call = self.jax, self.calls[name]

        def layers(features, w, made):
            if name == PLAIN:
                return jax.lax.fori_loop(0, LAYERS, lambda _, x: call(x, w, made), features)
            for _ in range(LAYERS):
                features = call(features, w, made)
            return features

        def total(*given):
            return layers(*given).astype(jax.numpy.float32).sum()

        compiled = jax.jit(layers if variant == "forward" else jax.grad(total, argnums=(0, 1)))
        given = self.features, self.w, self.map
        return lambda: jax.block_until_ready(compiled(*given))

    def compare(self, variant, functions):
        """Raise unless both find the same, up to a rounding in each layer."""
        found = (self.jax.tree.leaves(function()) for function in functions)
        for one, other in zip(*found, strict=True):
            one, other = (np.asarray(array, np.float64) for array in (one, other))
            bound = 4 * LAYERS * np.finfo(self.features.dtype).eps * abs(other).max()
            if not (abs(one - other) <= bound).all():
                raise AssertionError(
                    f"{self.scene.name}, {self.channels} channels: {variant} of plain JAX differs"
                )


def plain(jax, features, w, made):
    """Convolve as one does without a library: the rows of each tap, products and a sum."""
    jnp, total = jax.numpy, 0
    for rows, matrix in zip(made.rows, w, strict=True):
        taken = features.at[jnp.where(rows < 0, len(features), rows)].get(mode="fill", fill_value=0)
        total += jnp.dot(taken, matrix, preferred_element_type=jnp.float32)
    return total.astype(features.dtype)


class InJax(networks.Network):
    """A network by sbnet_cupy.jax, with room for a tenth more sites than a list needs."""

    def __init__(self, jax, name, weights, shape, counts):
        import sbnet_cupy.jax as sbj

        super().__init__(jax, name, weights, shape)
        self.sbj, self.jnp = sbj, jax.numpy
        self.capacities = {number: n + n // 10 + 8 for number, n in counts.items()}

    def begin(self, rows, features):
        """Find the sites of the points; return the mean of their features."""
        batch, *spatial = self.shape
        return self.sbj.sparse_tensor(
            features, rows, spatial_shape=tuple(spatial), batch_size=batch, mode="mean",
            capacity=self.capacities[-1],
        )  # fmt: skip

    def convolve(self, number, layer, x, w, b, onto, residual):
        """Run a layer, with bias, residual and relu as part of it."""
        how = {"activation": "relu"}  # and the bias of the PackedWeights w
        if layer.kind == "point":
            return x.replace(self.jnp.maximum(x.features @ w + b, 0))
        if layer.kind == "same":
            return self.sbj.submanifold_conv(x, w, residual=residual, **how)
        if layer.kind == "up":
            return self.sbj.inverse_conv(x, w, onto=onto, **how)
        how["capacity"] = self.capacities[number]
        return self.sbj.strided_conv(x, w, stride=2, padding=layer.padding, **how)

    def join(self, x, y):
        """Return the channels of both side by side."""
        return x.replace(self.jnp.concatenate([x.features, y.features], axis=1))

    def end(self, x):
        """Return the rows and features of the result."""
        return x.indices, x.features


def network(jax, torch, name, scene, dtype):
    """Return two compiled functions without arguments, forward and gradients, once compared."""
    import sbnet_cupy.jax as sbj

    jnp, device = jax.numpy, "cuda" if torch.cuda.is_available() else "cpu"
    shape = (1, *(-(-n // 8) * 8 for n in scene.spatial_shape))
    rows, features = scenes.points_of(scene, networks.INPUT)
    kind = getattr(torch, np.dtype(dtype).name)
    weights = networks.weights_of(torch, name, len(shape) - 1, kind, device)
    ours = networks.Ours(torch, name, weights, shape)
    with torch.no_grad():
        given = torch.from_numpy(rows).to(device), torch.from_numpy(features).to(device, kind)
        expected = ours(*given)[1].cpu().numpy()
    weights = [[jnp.asarray(t.cpu().numpy()) for t in pair] for pair in weights]
    weights = [(w, b) if w.ndim == 2 else (sb.PackedWeights(w, bias=b), None) for w, b in weights]

    def run(weights, *points):  # not as constants, of which XLA would sort the rows beforehand
        return InJax(jax, name, weights, shape, ours.counts)(*points)[1]

    def total(weights, *points):
        return jnp.square(run(weights, *points).astype(jnp.float32)).mean()

    points = jnp.asarray(rows), jnp.asarray(features, dtype)
    packed = sbj.pack_weights(weights, run, *points)
    found = np.asarray(jax.jit(run)(packed, *points), np.float64)
    size = np.linalg.norm(expected.astype(np.float64))
    error = np.linalg.norm(found[: len(expected)] - expected) / size
    if not error <= len(weights) * np.finfo(dtype).eps or found[len(expected) :].any():
        raise AssertionError(f"{scene.name}, {name}: relative error {error:.1e}")
    calls = (jax.jit(run), packed), (jax.jit(jax.grad(total)), weights)
    return [lambda f=f, own=own: jax.block_until_ready(f(own, *points)) for f, own in calls]


def main(arguments=None):
    """Time all scenes; print and write their rows."""
    parser = command.parser_of(__doc__, FILE)
    parser.add_argument("--networks", action="store_true", help="networks alone")
    options = parser.parse_args(arguments)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leave memory to the others
    import jax

    on_gpu = jax.default_backend() == "gpu" and not options.cpu
    listed, _, torch, columns, folder = command.start(
        options, scenes.standard(options.quick), "this takes the sites of networks from PyTorch"
    )
    if not on_gpu:
        print(f"JAX {jax.__version__} has no GPU: results are compared, and nothing is written")
    dtype = np.float16 if on_gpu else np.float32
    columns["note"] = f"JAX {jax.__version__}"
    with Writer(folder / FILE, Row, keep=True) as writer:
        clock = WallClock(options.quick)
        for scene in listed:
            given = clock, jax, scene, dtype, columns
            layers = () if options.networks else _rows_of_layers(*given)
            for row in itertools.chain(layers, _rows_of_networks(torch, *given)):
                if on_gpu:
                    writer.write(row)
    return 0


def _rows_of_layers(clock, jax, scene, dtype, columns):
    for channels in CHANNELS:
        if channels * len(scene.rows) > MOST:
            continue
        layers = Layers(jax, scene, channels, dtype)
        for variant in ("forward", "gradients"):
            functions = [layers.function(name, variant) for name in layers.calls]
            layers.compare(variant, functions)
            contenders = [
                Contender(name, [function])
                for name, function in zip(layers.calls, functions, strict=True)
            ]
            timings = clock.time_all(contenders)
            for contender, timing in zip(contenders, timings, strict=True):
                how = "site_conv", variant, f"{channels} channels", contender.name
                yield _row(columns, scene, dtype, *how, timing, LAYERS)
    layers = Layers(jax, scene, CHANNELS[0], dtype)
    find = Contender(OURS, [lambda: jax.block_until_ready(layers.find(layers.sites))])
    (timing,) = clock.time_all([find])
    yield _row(columns, scene, dtype, "kernel_map", "same", "", OURS, timing, 1)


def _rows_of_networks(torch, clock, jax, scene, dtype, columns):
    for name in networks.NETWORKS:
        calls = network(jax, torch, name, scene, dtype)
        for variant, call in zip(("forward", "gradients"), calls, strict=True):
            (timing,) = clock.time_all([Contender(OURS, [call])])
            yield _row(columns, scene, dtype, name, variant, "", OURS, timing, 1)


def _row(columns, scene, dtype, op, variant, channels, name, timing, number):
    us = [value / number for value in (timing.us, timing.p10, timing.p90)]
    print(f"{scene.name:>16} {op:>10} {channels:>12} {variant:>9}  {name:>21}: {us[0]:9.1f} us",
          flush=True)  # fmt: skip
    shape = f"{scene.size}{channels and ', '}{channels}"
    return Row(
        **columns, op=op, suite=scene.name, shape=shape, dtype=np.dtype(dtype).name, block="3",
        mask="", density=None, blocks=len(scene.rows), variant=variant, implementation=name,
        timed_by="wall", us=us[0], us_p10=us[1], us_p90=us[2], bytes=None, gb_per_s=None,
        percent_of_copy=None, original_us=None, ratio_to_original=None,
    )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
