"""Sites give the same bits at every run, and whatever the order in which their rows come."""

import numpy as np
import pytest

import sbnet_cupy as sb
from support.assertions import assert_same, to_numpy

RUNS = 100


def network(xp, rows, features, weights, capacity=None, precision=None):
    """Return what a strided network and its gradients give, from the points on."""
    x = sb.sparse_tensor(
        xp.asarray(features), xp.asarray(rows), spatial_shape=(24, 24, 12), batch_size=2,
        capacity=capacity,
    )  # fmt: skip
    same, down, up = map(xp.asarray, weights)
    h = sb.submanifold_conv(x, same, activation="relu", precision=precision)
    low = sb.strided_conv(h, down, stride=2, precision=precision)
    pooled = sb.sparse_max_pool(low, 2, stride=2)
    back = sb.inverse_conv(low, up, onto=h, precision=precision)
    window = sb.kernel_map(x.coordinates, 3, onto=x.coordinates)
    gradients = sb.site_conv_grad(back.features, h.features, same, window, precision=precision)
    return [
        x.indices, h.features, low.indices, low.features, pooled.indices, pooled.features,
        back.features, gradients.features, gradients.w,
    ]  # fmt: skip


def given(dtype):
    """Return distinct rows in random order, with features and weights."""
    rng = np.random.default_rng(4)
    rows = rng.permutation(np.argwhere(rng.random((2, 24, 24, 12)) < 0.04)).astype(np.int32)
    shapes = (3, 3, 3, 16, 16), (2, 2, 2, 16, 24), (2, 2, 2, 24, 16)
    weights = [(rng.standard_normal(s) / s[-2]).astype(dtype) for s in shapes]
    return rows, rng.standard_normal((len(rows), 16)).astype(dtype), weights


@pytest.mark.parametrize("numbers", ["float16", "tf32", "float32", "float64"])
@pytest.mark.parametrize("spare", [None, 40])
def test_of_all_reruns_and_orders_of_rows(xp, numbers, spare):
    """Each run makes its sites and maps anew; every second one has its rows in another order."""
    precision = "tf32" if numbers == "tf32" else None
    rows, features, weights = given("float32" if precision else numbers)
    capacity = spare and len(rows) + spare
    rng, first = np.random.default_rng(0), None
    for run in range(RUNS if xp.module is not np else 4):
        order = rng.permutation(len(rows)) if run % 2 else np.arange(len(rows))
        found = network(xp, rows[order], features[order], weights, capacity, precision)
        found = [to_numpy(array) for array in found]
        first = first or found
        for array, other in zip(found, first, strict=True):
            assert_same(array, other)
    assert any(array.any() for array in first[1:])
