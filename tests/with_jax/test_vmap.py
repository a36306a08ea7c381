"""vmap of the JAX adapter: a mapped call gives the bits of one call after the other."""

import functools

import numpy as np
import pytest

import sbnet_cupy as sb
from support.adapter_cases import (
    COUNT,
    MASK,
    OVERLAP,
    PLAIN,
    ROWS,
    TWICE,
    X,
    grid_of,
    layer,
    normal,
    same,
    stack,
)
from support.assertions import to_numpy

MANY = normal(4, *X.shape)
COUNTS = np.array([[5], [0], [2], [6]], np.int32)
TABLES = np.stack([ROWS, TWICE, TWICE[::-1], ROWS])


def vmap_compare(place, jax, function, in_axes, *arrays, jit=True):
    """A mapped call gives the bits of one call after the other."""
    arrays = [place.make(array) for array in arrays]
    mapped = jax.vmap(function, in_axes)
    actual = (jax.jit(mapped) if jit else mapped)(*arrays)
    single = jax.jit(function)
    for i in range(len(MANY)):
        own = [a if axis is None else a.take(i, axis) for a, axis in zip(arrays, in_axes)]  # noqa: B905
        each = jax.tree_util.tree_map(lambda result, i=i: result[i], actual)
        jax.tree_util.tree_map(same, each, jax.tree_util.tree_map(to_numpy, single(*own)))


@pytest.mark.parametrize("in_axes", [(0, None, None), (None, 0, 0), (0, 0, None), (0, None, 0)])
@pytest.mark.parametrize("options", [OVERLAP, PLAIN | {"data_format": "NCHW"}], ids=str)
def test_vmap_of_gather(sbj, place, jax, in_axes, options):
    arrays = (
        many if axis == 0 else one
        for axis, many, one in zip(in_axes, (MANY, COUNTS, TABLES), (X, COUNT, ROWS), strict=True)
    )
    gather = functools.partial(sbj.sparse_gather, **options)
    vmap_compare(place, jax, gather, in_axes, *arrays)


@pytest.mark.parametrize("in_axes", [(0, None, None, None), (None, 0, 0, None), (None, None, 0, 0)])
@pytest.mark.parametrize("options", [{}, {"add": True}], ids=str)
def test_vmap_of_scatter(sbj, place, jax, in_axes, options):
    one = stack(OVERLAP), COUNT, ROWS, X
    many = np.stack([one[0] * k for k in range(4)]), COUNTS, TABLES, MANY
    arrays = (m if axis == 0 else o for axis, m, o in zip(in_axes, many, one, strict=True))
    scatter = functools.partial(sbj.sparse_scatter, atomic=True, **OVERLAP, **options)
    vmap_compare(place, jax, scatter, in_axes, *arrays)


def test_vmap_of_the_rest(sbj, place, jax):
    """Tables that are mapped themselves, masks, gradients, a second vmap and other axes."""
    table = place.make(COUNT), place.make(ROWS)

    def fused(x, scale):
        return sbj.sparse_gather(x, *table, bsize=4, scale=scale, activation="silu")

    scales = np.ascontiguousarray(MANY[:, 0, 0, 0])
    vmap_compare(place, jax, fused, (0, 0), MANY, scales)
    vmap_compare(place, jax, fused, (None, 0), X, scales)
    vmap_compare(place, jax, fused, (3, None), np.moveaxis(MANY, 0, 3).copy(), scales[0])

    def listed(mask):
        return tuple(sbj.reduce_mask(mask, (2, 3), bsize=4, tol=1, capacity=5))

    vmap_compare(place, jax, listed, (0,), MANY[..., 0], jit=False)

    def gradient(x, count):
        return jax.grad(lambda x: (sbj.sparse_gather(x, count, table[1], **OVERLAP) ** 2).sum())(x)

    vmap_compare(place, jax, gradient, (0, 0), MANY, COUNTS)
    twice = jax.vmap(jax.vmap(lambda x: sbj.sparse_gather(x, *table, bsize=4)))
    actual = twice(place.make(MANY.reshape(2, 2, *X.shape)))
    expected = np.stack([sb.sparse_gather(x, COUNT, ROWS, bsize=4) for x in MANY])
    same(actual, expected.reshape(2, 2, *expected.shape[1:]))


def whole(*shape, seed=0):
    """Return whole numbers, of which sums are exact in any order."""
    return np.random.default_rng([4, seed]).integers(-2, 3, shape).astype(np.float32)


def tables_of(active):
    """Return four tables of as many rows: as they are, none, half of them, all in reverse."""
    counts, rows = active
    count = np.clip([counts, 0 * counts, counts // 2, 0 * counts + len(rows)], 0, len(rows))
    return count.astype(np.int32), np.stack([rows, rows, rows, rows[::-1]])


@pytest.mark.parametrize(
    "in_axes",
    [(0, None, None, None, None), (0, None, 0, 0, 0), (None, None, None, 0, None),
     (None, None, None, None, 0), (0, 0, None, None, 0)],
)  # fmt: skip
def test_vmap_of_a_fused_conv(sbj, place, jax, in_axes):
    """Mapped weights run once for each member; all else joins the images."""
    params, active = layer()
    one = whole(*X.shape), whole(3, 3, 3, 4), *active, whole(*X.shape[:3], 4)
    many = (whole(4, *X.shape), whole(4, 3, 3, 3, 4), *tables_of(active),
            whole(4, *X.shape[:3], 4))  # fmt: skip
    arrays = [m if axis == 0 else o for axis, m, o in zip(in_axes, many, one, strict=True)]

    def convolve(x, w, counts, rows, base=None):
        return sbj.sparse_conv2d(x, w, (counts, rows), params, base=base, method="fused")

    vmap_compare(place, jax, convolve, in_axes, *arrays)
    if in_axes[:4] != (None,) * 4:
        vmap_compare(place, jax, convolve, in_axes[:4], *arrays[:4])


@pytest.mark.parametrize("mapped_weights", [False, True])
@pytest.mark.parametrize("with_base", [False, True])
def test_vmap_of_a_fused_unit_and_its_gradient(sbj, place, jax, mapped_weights, with_base):
    shape = (2, 8, 9, 16)
    params = sb.calc_block_params_res_block(shape, 5, [1, 3, 1])
    active = sb.reduce_mask(MASK, params.bcount, capacity=30, **grid_of(params))
    pair = tuple(map(place.make, active))
    shapes = [(1, 1, 16, 4), (3, 3, 4, 4), (1, 1, 4, 16), (16,), (16,), *[(4,)] * 4]
    many = (4,) if mapped_weights else ()
    weights = [np.clip(whole(*many, *s, seed=i), -1, 1) for i, s in enumerate(shapes)]
    arrays = whole(4, *shape), whole(4, *shape, seed=20), *weights

    def unit(x, base, *weights):
        options = {"base": base if with_base else None, "precision": "tf32", "method": "fused"}
        return sbj.sparse_res_block_bottleneck(
            x, sb.BottleneckWeights(*weights), pair, params, **options
        )

    def gradient(x, base, *weights):
        def linear(*given):
            return (base * unit(*given)).sum()

        return jax.grad(linear, argnums=range(11))(x, base, *weights)

    in_axes = (0, 0, *[0 if mapped_weights else None] * 9)
    vmap_compare(place, jax, unit, in_axes, *arrays)
    vmap_compare(place, jax, gradient, in_axes, *arrays)
