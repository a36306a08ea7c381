"""Gradients of the JAX adapter: of first and second order, in loops, past what has none."""

import numpy as np
import pytest

import sbnet_cupy as sb
from support.adapter_cases import COUNT, MASK, OPTIONS, ROWS, TWICE, X, image, layer, normal, stack
from support.assertions import assert_close, to_numpy


@pytest.fixture
def check_grads(jax):
    """Compare gradients of first and second order with central differences, in float64."""
    from jax.test_util import check_grads

    def check(function, arguments, order=2):  # it passes NumPy arrays too: jit takes them
        check_grads(jax.jit(function), arguments, order, modes=["rev"])

    with jax.enable_x64(True):
        yield check


def doubles(place, *arrays):
    return tuple(place.make(array.astype(np.float64)) for array in arrays)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradient_of_gather(sbj, place, check_grads, options):
    table = place.make(COUNT), place.make(ROWS)
    (x,) = doubles(place, image(options))
    check_grads(lambda x: sbj.sparse_gather(x, *table, **options), (x,))


@pytest.mark.parametrize(
    ("options", "activation"),
    [(OPTIONS[1], None), (OPTIONS[2], "relu"), (OPTIONS[3], "silu"), (OPTIONS[1], "gelu")],
    ids=str,
)
def test_gradient_of_fused_gather(sbj, place, check_grads, options, activation):
    table = place.make(COUNT), place.make(ROWS)

    def gather(x, scale, shift):
        fused = {"scale": scale, "shift": shift, "activation": activation}
        return sbj.sparse_gather(x, *table, **fused, **options)

    check_grads(gather, doubles(place, image(options), X[0, 0, 0], X[0, 0, 1]))


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(
    ("options", "rows"),  # each grid with one of the lists, one grid with both
    [(options, (ROWS, TWICE)[i % 2]) for i, options in enumerate(OPTIONS)] + [(OPTIONS[0], TWICE)],
)
def test_gradient_of_scatter(sbj, place, check_grads, options, rows, add):
    table = place.make(COUNT), place.make(rows)

    def scatter(blocks, x):
        return sbj.sparse_scatter(blocks, *table, x, add=add, atomic=True, **options)

    check_grads(scatter, doubles(place, stack(options), image(options)))


def test_gradients_pass_by_what_has_none(sbj, place, jax):
    """A whole-number image and a mask have no gradient, and hinder nobody else's."""
    numbers, count, rows = map(place.make, (X.astype(np.int32), COUNT, ROWS))

    def loss(scale):
        active = sbj.reduce_mask(scale * place.make(MASK), (2, 2), bsize=4, capacity=8)
        blocks = sbj.sparse_gather(numbers, count, rows, bsize=4)
        y = sbj.sparse_scatter(blocks, count, rows, numbers, bsize=4)
        return scale * (blocks.sum() + y.sum()) + active.bin_counts.sum()

    expected = sb.sparse_gather(X.astype(np.int32), COUNT, ROWS, bsize=4).sum()
    expected += X.astype(np.int32).sum()
    assert float(jax.grad(loss)(2.0)) == expected
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda x: sbj.sparse_gather(x, count, rows, bsize=4), (X,), (X,))


def test_gradients_through_scan_and_checkpoint(sbj, place, jax):
    """Frames one after the other, recomputed for the gradient: the sum of each frame's own."""
    frames, masks = np.stack([X, X[::-1]]), np.stack([MASK, MASK[::-1]])
    w = place.make(normal(3, 3, 3, 2))
    params, _ = layer()
    grid = {"bsize": params.bsize, "boffset": params.boffset, "bstride": params.bstride}

    @jax.checkpoint
    def frame(w, x, mask):
        active = sbj.reduce_mask(mask, params.bcount, capacity=30, **grid)
        return (sbj.sparse_conv2d(x, w, active, params) ** 2).sum()

    def film(w):
        step = lambda total, both: (total + frame(w, *both), None)  # noqa: E731
        return jax.lax.scan(step, 0.0, (place.make(frames), place.make(masks)))[0]

    actual = jax.jit(jax.grad(film))(w)
    parts = [jax.grad(frame)(w, *map(place.make, both)) for both in zip(frames, masks, strict=True)]
    wide = [to_numpy(part).astype(np.float64) for part in parts]
    size = sum(map(np.abs, wide)).max() * np.sqrt(X.size)  # of what cancels in a part
    assert_close(to_numpy(actual), sum(wide), terms=200, dtype=np.float32, magnitude=size)


def test_gradients_of_the_layers(sbj, place, check_grads, jax):
    params, active = layer()
    active = active._map_arrays(place.make)
    w, bias, base = normal(3, 3, 3, 2, dtype=np.float64), normal(2, dtype=np.float64), X[..., :2]

    def convolve(x, w, bias, base):
        options = {"bias": bias, "base": base, "activation": "silu"}
        return sbj.sparse_conv2d(x, w, active, params, **options)

    check_grads(convolve, doubles(place, X, w, bias, base))
    params, active = layer(bottleneck=True)
    active = active._map_arrays(place.make)
    weights = sb.BottleneckWeights.random(3, 2, dtype="float64")._map_arrays(place.make)

    def unit(x, weights):
        return sbj.sparse_res_block_bottleneck(x, weights, active, params)

    check_grads(unit, (*doubles(place, X), weights), order=1)
    gradient = jax.grad(lambda weights: unit(place.make(X.astype("f8")), weights).sum())(weights)
    assert type(gradient) is sb.BottleneckWeights and float(abs(gradient.w2).sum()) > 0


@pytest.mark.parametrize("activation", [None, "silu"])
def test_nan_past_the_last_window_is_in_no_gradient(jax, sbj, place, activation):
    """With strides an image may have pixels that no window reads, but a block beyond its result."""
    x, w, mask = normal(1, 8, 9, 2), normal(3, 3, 2, 3, seed=1), np.ones((1, 8, 9), bool)
    wild = x.copy()  # windows read 7 rows and 7 columns
    wild[:, 7:], wild[:, :, 7:] = np.nan, np.inf
    options = {"bsize": 4, "strides": (2, 4), "padding": "VALID", "activation": activation}

    def loss(x, w):
        return sbj.sparse_conv2d(x, w, place.make(mask), capacity=2, **options).sum()

    gradients = jax.jit(jax.grad(loss, (0, 1)))
    calm, found = (gradients(*map(place.make, (image, w))) for image in (x, wild))
    for a, b in zip(found, calm, strict=True):
        np.testing.assert_array_equal(to_numpy(a), to_numpy(b))
