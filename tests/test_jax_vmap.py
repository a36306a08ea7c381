"""vmap of the JAX adapter: a mapped call gives the bits of one call after the other."""

import functools

import numpy as np
import pytest
from adapter_cases import COUNT, OVERLAP, PLAIN, ROWS, TWICE, X, normal, same, stack
from assertions import to_numpy

import sbnet_cupy as sb

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
