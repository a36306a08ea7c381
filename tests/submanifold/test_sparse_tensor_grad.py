"""The gradient of sparse_tensor with respect to the features."""

import numpy as np
import pytest

import sbnet_cupy as sb
from support.assertions import assert_close, assert_same, to_numpy
from support.strategies import FLOATS

GRID = {"spatial_shape": (6, 5), "batch_size": 2}
MODES = ("unique", "first", "last", "sum", "mean")


def drawn(mode, order="leaf", spare=0):
    """Return rows, some of them equal unless ``unique``, their features, and the options."""
    rng = np.random.default_rng(0)
    cells = rng.permutation(np.argwhere(np.ones((2, 6, 5))))[:30].astype(np.int32)
    rows = cells if mode == "unique" else cells[rng.integers(0, 30, 50)]
    options = GRID | {"mode": mode, "order": order}
    options |= {"capacity": 30 + spare} if spare else {}
    return rows, rng.standard_normal((len(rows), 3)), options


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("order", ["leaf", "raster"])
@pytest.mark.parametrize("spare", [0, 7])
def test_it_is_the_transpose(xp, mode, order, spare):
    """<y, A x> = <A' y, x> for each single row of x: A' is compared number by number."""
    rows, features, options = drawn(mode, order, spare)
    given = xp.asarray(features), xp.asarray(rows)
    y = sb.sparse_tensor(*given, **options)
    count = y.coordinates.number()
    grad = np.random.default_rng(1).standard_normal(y.features.shape)
    poisoned = grad.copy()
    poisoned[count:] = np.nan
    found = to_numpy(sb.sparse_tensor_grad(xp.asarray(poisoned), *given, **options))
    matrix = np.stack([
        to_numpy(sb.sparse_tensor(
            xp.asarray(np.eye(len(rows))[:, [row]]), given[1], **options
        ).features)[:count, 0]
        for row in range(len(rows))
    ])  # fmt: skip
    exact = matrix @ grad[:count]
    # A gradient has one term, which is divided and rounded once.
    assert_close(found, exact, terms=2, dtype=np.float64, magnitude=abs(exact))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_every_dtype(xp, mode, dtype):
    """Whole numbers: divided, they are those of float64, rounded once."""
    rows, features, options = drawn(mode)
    features = xp.asarray(features.astype(dtype))
    y = sb.sparse_tensor(features, xp.asarray(rows), **options)
    grad = np.random.default_rng(1).integers(-9, 10, y.features.shape)
    found = sb.sparse_tensor_grad(xp.asarray(grad.astype(dtype)), features, xp.asarray(rows),
                                  **options)  # fmt: skip
    exact = sb.sparse_tensor_grad(grad.astype(np.float64), to_numpy(features).astype(np.float64),
                                  rows, **options)  # fmt: skip
    wide = np.float64 if np.dtype(dtype) == np.float64 else np.float32
    assert to_numpy(found).dtype == dtype
    assert_same(to_numpy(found), exact.astype(wide).astype(dtype))


@pytest.mark.parametrize("mode", MODES)
def test_rows_outside_and_past_the_capacity_get_nothing(xp, mode):
    rows = np.array([[0, 0, 0], [0, 9, 9], [0, 1, 1], [0, 2, 2]], np.int32)
    given = xp.asarray(np.ones((4, 1))), xp.asarray(rows)
    options = GRID | {"mode": mode, "capacity": 2}
    grad = xp.asarray(np.array([[1.0], [2.0]]))
    found = sb.sparse_tensor_grad(grad, *given, **options)
    assert to_numpy(found).ravel().tolist() == [1, 0, 2, 0]
    options["capacity"] = 0
    found = sb.sparse_tensor_grad(grad[:0], *given, **options)
    assert to_numpy(found).ravel().tolist() == [0] * 4


@pytest.mark.parametrize("mode", MODES)
def test_no_rows(xp, mode):
    given = xp.asarray(np.ones((0, 2))), xp.asarray(np.zeros((0, 3), np.int32))
    for capacity in (None, 3):
        grad = xp.asarray(np.ones((capacity or 0, 2)))
        found = sb.sparse_tensor_grad(grad, *given, **GRID, mode=mode, capacity=capacity)
        assert found.shape == (0, 2)
