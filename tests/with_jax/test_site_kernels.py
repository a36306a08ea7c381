"""Convolutions at sites that XLA calls back: on a CPU into NumPy, on a GPU into kernels.

They are compared with those of XLA's own operations, and all their derivatives with theirs.
"""

from typing import NamedTuple

import numpy as np
import pytest

import sbnet_cupy as sb
from support.adapter_cases import normal
from support.assertions import assert_same, to_numpy
from support.exhaustive import thinned_pairs
from support.jax_callbacks import call_back_on_cpu, check_close, check_members, derivatives_of
from support.jax_site_cases import BATCH, SHAPE, tensors

CONVS = {
    "submanifold": ("submanifold_conv", {}, (3, 3, 3)),
    "dilated": ("submanifold_conv", {"dilation": (1, 2, 1)}, (3, 1, 3)),
    "even": ("submanifold_conv", {}, (2, 2, 2)),
    "strided": ("strided_conv", {"stride": 2, "padding": 1}, (3, 3, 3)),
    "transposed": ("transposed_conv", {"stride": 2}, (2, 2, 2)),
}


@pytest.fixture
def routes(sbj, place, jax, monkeypatch):
    """Return a function that says whether convolutions are called back from now on."""
    from sbnet_cupy.jax import _site_kernels, submanifold

    def take(called_back):
        if jax.default_backend() != "cpu":  # what was traced for a GPU
            jax.clear_caches()
        by_kernels = _site_kernels.by_kernels
        if place.name == "cpu":
            by_kernels = lambda features, made: bool(made._kept.get("made"))  # noqa: E731
            call_back_on_cpu(monkeypatch.setattr)
        chosen = by_kernels if called_back else lambda features, made: False
        monkeypatch.setattr(submanifold, "by_kernels", chosen)

    before = _site_kernels.by_kernels, submanifold.by_kernels
    yield take
    _site_kernels.by_kernels, submanifold.by_kernels = before


@pytest.mark.parametrize(
    ("name", "epilogue"),
    thinned_pairs(5, list(CONVS), ["plain", "relu", "silu", "groups", "tf32"]),
)
def test_all_derivatives_are_those_of_xla(sbj, place, jax, routes, name, epilogue):
    """Of the result, forwards, backwards, and of the gradient again."""
    function, window, kernel = CONVS[name]
    _, x = tensors(sbj, place)
    options, rest = dict(window), {}
    groups = options["groups"] = 3 if epilogue == "groups" else 1
    if epilogue in ("relu", "silu"):
        options["activation"] = epilogue
        rest = {"bias": place.make(normal(6, seed=2)), "scale": place.make(normal(6, seed=3))}
    if epilogue == "tf32":
        options["precision"] = "tf32"
    w = place.make(normal(*kernel, 3 // groups, 6, seed=1))
    arrays = {"features": x.features, "w": w, "rest": rest}
    tangents = jax.tree.map(lambda a: place.make(normal(*a.shape, seed=a.size)), arrays)
    found = {}
    for called_back in (False, True):
        routes(called_back)

        def run(arrays):
            own = x.replace(arrays["features"])
            return getattr(sbj, function)(own, arrays["w"], **options, **arrays["rest"]).features

        found[called_back] = derivatives_of(jax, run, arrays, tangents)
    rounded = epilogue == "tf32" and place.name != "cpu"
    for one, other in zip(*map(jax.tree.leaves, found.values()), strict=True):
        check_close(other, one, 4e-3 if rounded else 2e-5)


def test_members_of_a_batch_are_convolved_one_by_one(sbj, place, jax, routes):
    """Features, weights, or both; and the gradients of each member."""
    _, x = tensors(sbj, place)
    w = place.make(normal(2, 3, 3, 3, 3, 4, seed=1))
    many = place.make(normal(2, *x.features.shape, seed=2))
    routes(True)

    def loss(features, w):
        y = sbj.strided_conv(x.replace(features), w, stride=2, padding=1, activation="silu")
        return (y.features**2).sum()

    check_members(jax, loss, many, w)


def test_a_table_that_was_made_by_hand_is_xlas(sbj, place, jax, routes):
    """Several rows may read the same one at a tap: its gradient is the sum of theirs."""
    _, x = tensors(sbj, place)
    routes(True)
    rows = place.make(np.zeros((1, x.coordinates.capacity), np.int32))
    made = sb.KernelMap(rows, x.coordinates, x.coordinates, (1,))
    w = place.make(np.ones((1, 3, 2), np.float32))

    def loss(features):
        return sbj.site_conv(features, w, made).sum()

    count = int(x.coordinates.count[0])
    assert to_numpy(jax.grad(loss)(x.features))[0].tolist() == [2 * count] * 3


class Parts(NamedTuple):
    """What :func:`part` makes."""

    given: object
    none: object
    small: object
    large: object


def part(key, rows, nothing):
    cupy = pytest.importorskip("cupy")
    assert nothing is None and rows.shape == (2, 3)
    small, _ = (cupy.empty(n, np.uint16) for n in (5, 300))
    return Parts(rows, None, small, cupy.empty((key, 2), np.int32))


def test_a_dry_run_tells_where_arrays_are(sbj, require, monkeypatch):
    """Nothing is read, launched or allocated, so that it needs no GPU."""
    from sbnet_cupy.core.rehearsal import REHEARSING
    from sbnet_cupy.core.spec import ArraySpec
    from sbnet_cupy.jax import _callbacks, _kernel_memory

    require("cupy")
    monkeypatch.setattr(_kernel_memory, "current_device", lambda: 0)
    layout = _kernel_memory.layout_of(part, 7, (ArraySpec((2, 3), np.dtype(np.int32)), None))
    assert layout.nbytes == 256 + 768 + 256 and layout.kind is Parts  # in pieces of 256
    assert layout.fields == (0, None, (0, (5,), np.uint16), (256 + 768, (7, 2), np.int32))
    memory = np.zeros(layout.nbytes, np.uint8)
    arena = _callbacks._cupy_view(memory.ctypes.data, (memory.shape, memory.dtype), 0)
    rows = object()
    given, none, small, large = layout.views(arena, rows)
    assert given is rows and none is None and small.data.ptr == arena.data.ptr
    assert large.data.ptr == arena.data.ptr + 1024 and large.shape == (7, 2)
    assert REHEARSING.now is None
    with _kernel_memory.dry_run():
        assert REHEARSING.now.skips("any", []) and REHEARSING.now.kernels is _callbacks.BESIDE


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_layers_in_a_loop_are_those_of_the_package(sbj, place, jax, routes, dtype):
    """To the bit on a CPU, where the package's own code is called back."""
    exact, x = tensors(sbj, place, dtype=np.dtype(dtype))
    w = normal(3, 3, 3, 3, 3, seed=1).astype(dtype)
    routes(True)

    @jax.jit
    def run(features, w):
        def layer(features, _):
            y = sbj.submanifold_conv(x.replace(features), w, activation="relu")
            return y.features, y.features.sum()

        return jax.lax.scan(layer, features, length=3)

    found, sums = run(x.features, place.make(w))
    for _ in range(3):
        exact = sb.submanifold_conv(exact, w, activation="relu")
    count = len(exact.features)
    if place.name == "cpu":
        assert_same(to_numpy(found)[:count], exact.features)
    check_close(to_numpy(found)[:count].astype(np.float32), exact.features.astype(np.float32), 2e-2)
    assert not to_numpy(found)[count:].any() and sums.shape == (3,)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("channels", [16, 64, 256])
def test_bits_on_a_gpu_are_those_of_cupy(sbj, jax, require, dtype, channels):
    """Of each call of a compiled function, on other features too."""
    cupy, arrays = require("cupy"), _on_gpu(jax, channels, dtype)
    rows, w = arrays

    @jax.jit
    def run(features, rows, w):
        x = sbj.sparse_tensor(features, rows, **GRID)
        y = sbj.submanifold_conv(x, w, activation="relu")
        z = sbj.strided_conv(y, w, stride=2, padding=1)
        return y.features, sbj.submanifold_conv(y, w).features, z.features, z.coordinates.count

    for seed in range(3):
        features = normal(len(rows), channels, seed=seed, dtype=dtype)
        *found, count = run(*map(jax.numpy.asarray, (features, rows, w)))
        x = sb.sparse_tensor(cupy.asarray(features), cupy.asarray(rows), **GRID)
        native = cupy.asarray(w)
        y = sb.submanifold_conv(x, native, activation="relu")
        z = sb.strided_conv(y, native, stride=2, padding=1).features
        assert int(count[0]) == len(z)
        assert_same(to_numpy(found[0]), cupy.asnumpy(y.features))
        assert_same(to_numpy(found[1]), cupy.asnumpy(sb.submanifold_conv(y, native).features))
        check_close(to_numpy(found[2])[: len(z)], cupy.asnumpy(z), 2e-3)  # of another kernel


GRID = {"spatial_shape": tuple(3 * n for n in SHAPE), "batch_size": BATCH}


def _on_gpu(jax, channels, dtype):
    """Return rows of sites and weights, if JAX computes on a GPU."""
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no GPU")
    rng = np.random.default_rng(channels)
    rows = np.argwhere(rng.random((BATCH, *GRID["spatial_shape"])) < 0.2).astype(np.int32)
    w = normal(3, 3, 3, channels, channels, seed=1) / np.sqrt(9 * channels)
    return rows, w.astype(dtype)


@pytest.mark.gpu
def test_convolutions_on_a_gpu_share_a_map(sbj, jax, require):
    """Its tree, its rows and its tiles: another convolution is one more call of kernels."""
    require("cupy")
    rows, w = _on_gpu(jax, 32, np.float16)
    given = normal(len(rows), 32, dtype=np.float16), rows, w
    given = tuple(map(jax.numpy.asarray, given))

    def calls(number):
        def run(features, rows, w):
            x = sbj.sparse_tensor(features, rows, **GRID)
            for _ in range(number):
                x = sbj.submanifold_conv(x, w)
            return x.features

        text = jax.jit(run).lower(*given).compile().as_text()
        return text.count('custom_call_target="xla_buffer_python_gpu_callback')

    assert calls(1) >= 4 and calls(3) == calls(1) + 2
