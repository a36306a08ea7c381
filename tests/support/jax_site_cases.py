"""Features at sites of the package, and the same in JAX with rows to spare."""

import functools

import numpy as np

import sbnet_cupy as sb
from support.adapter_cases import normal
from support.assertions import assert_same, to_numpy

SHAPE, BATCH, SPARE = (9, 8, 7), 3, 5


def listed(seed=0, repeats=False):
    """Return rows of coordinates; with repeats several are the same."""
    rng = np.random.default_rng([4, seed])
    rows = np.argwhere(rng.random((BATCH, *SHAPE)) < 0.06)
    rows = rows[rows[:, 0] != 1]  # an empty sample
    chosen = rng.integers(0, len(rows), 2 * len(rows)) if repeats else rng.permutation(len(rows))
    return rows[chosen].astype(np.int32)


def tensors(sbj, place, channels=3, dtype=np.float32):
    """Return the same features at the same sites, exact and with rows to spare."""
    rows = listed()
    grid = {"spatial_shape": SHAPE, "batch_size": BATCH}
    features = normal(len(rows), channels, dtype=dtype)
    exact = sb.sparse_tensor(features, rows, **grid)
    make = _maker(sbj.sparse_tensor, len(rows) + SPARE)
    return exact, make(place.make(features), place.make(rows))


@functools.cache
def _maker(sparse_tensor, capacity):
    """Return the function compiled, as one program for each dtype in place of one a step."""
    import jax

    grid = {"spatial_shape": SHAPE, "batch_size": BATCH, "capacity": capacity}
    return jax.jit(functools.partial(sparse_tensor, **grid))


def same_sites(found, expected):
    """Assert that the first rows are those of the exact list, and the others none."""
    count = expected.number()
    assert found.number() == count
    assert_same(to_numpy(found.indices)[:count], to_numpy(expected.indices))
    assert (to_numpy(found.indices)[count:] == -1).all()
    assert (found.spatial_shape, found.batch_size) == (expected.spatial_shape, expected.batch_size)
