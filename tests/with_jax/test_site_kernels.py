"""Convolutions at sites that XLA calls back: on a CPU into NumPy, on a GPU into kernels.

They are compared with those of XLA's own operations, and all their derivatives with theirs.
"""

import numpy as np
import pytest

from support.adapter_cases import normal
from support.assertions import to_numpy
from support.exhaustive import thinned_pairs
from support.jax_site_cases import tensors

CONVS = {
    "submanifold": ("submanifold_conv", {}, (3, 3, 3)),
    "dilated": ("submanifold_conv", {"dilation": (1, 2, 1)}, (3, 1, 3)),
    "even": ("submanifold_conv", {}, (2, 2, 2)),
    "strided": ("strided_conv", {"stride": 2, "padding": 1}, (3, 3, 3)),
    "transposed": ("transposed_conv", {"stride": 2}, (2, 2, 2)),
}


@pytest.fixture
def routes(sbj, place, monkeypatch):
    """Return a function of a name: which route convolutions take from now on."""
    from sbnet_cupy.jax import _site_kernels, submanifold

    def take(name):
        called = name == "called back"
        monkeypatch.setattr(submanifold, "by_kernels", lambda features, made: called)
        if called and place.name == "cpu":  # NumPy's plans have no kernels
            monkeypatch.setattr(_site_kernels, "_plan", lambda operator, specs, options: True)
            monkeypatch.setattr(_site_kernels, "_scratch", lambda key, specs: 0)
            monkeypatch.setattr(
                _site_kernels, "on_gpu", lambda kernel, otherwise, *arrays: kernel(*arrays)
            )

    return take


def losses(sbj, jax, x, name, options):
    """Return a jitted function of the arrays of a convolution: its result."""
    function, window, _ = CONVS[name]

    @jax.jit
    def run(arrays):
        features, w, rest = arrays["features"], arrays["w"], arrays["rest"]
        y = getattr(sbj, function)(x.replace(features), w, **window, **rest, **options)
        return y.features

    return run


@pytest.mark.parametrize(
    ("name", "epilogue"),
    thinned_pairs(5, list(CONVS), ["plain", "relu", "silu", "groups", "tf32"]),
)
def test_all_derivatives_are_those_of_xla(sbj, place, jax, routes, name, epilogue):
    jnp = jax.numpy
    _, x = tensors(sbj, place)
    kernel, groups = CONVS[name][2], 3 if epilogue == "groups" else 1
    options = {"groups": groups}
    rest = {}
    if epilogue in ("relu", "silu"):
        options["activation"] = epilogue
        rest = {"bias": place.make(normal(6, seed=2)), "scale": place.make(normal(6, seed=3))}
    if epilogue == "tf32":
        options["precision"] = "tf32"
    arrays = {
        "features": x.features,
        "w": place.make(normal(*kernel, 3 // groups, 6, seed=1)),
        "rest": rest,
    }
    tangents = jax.tree.map(lambda a: place.make(normal(*a.shape, seed=a.size)), arrays)
    found = {}
    for route in ("xla", "called back"):
        routes(route)
        run = losses(sbj, jax, x, name, options)
        y, dy = jax.jvp(run, (arrays,), (tangents,))

        def loss(arrays, run=run):
            return (run(arrays).astype(jnp.float32) ** 3).sum()

        gradient = jax.jit(jax.grad(loss))
        along = jax.jit(lambda a, t, gradient=gradient: jax.jvp(gradient, (a,), (t,))[1])
        found[route] = y, dy, gradient(arrays), along(arrays, tangents)
    for one, other in zip(*map(jax.tree.leaves, found.values()), strict=True):
        one, other = map(to_numpy, (one, other))
        size = abs(other).max() + 1e-30
        tolerance = (2e-3 if epilogue == "tf32" and place.name == "gpu" else 2e-5) * size
        np.testing.assert_allclose(one, other, atol=tolerance, rtol=0)
