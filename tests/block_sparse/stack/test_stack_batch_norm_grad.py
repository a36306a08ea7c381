"""Gradients of stack_batch_norm: by differences, and through relu."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbnet_cupy.block_sparse.stack.stack_batch_norm import stack_batch_norm
from sbnet_cupy.block_sparse.stack.stack_batch_norm_grad import stack_batch_norm_grad
from support import stack_cases
from support.assertions import assert_same
from support.stack_norm_cases import draw_norm

CHANNELS, EPS = 3, 1e-3


@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu"])
@stack_cases.FEW
@given(data=st.data())
def test_gradients_are_differences(activation, data):
    """Along random directions, in float64."""
    blocks, table, images, rng, (weight, bias) = draw_norm(data, CHANNELS, np.float64)
    if not len(blocks.rows):
        return
    added = blocks.images(table, CHANNELS, rng, np.float64)
    grad = blocks.images(table, CHANNELS, rng, np.float64)
    point = (images, weight, bias, added)

    def result(images, weight, bias, added):
        x, residual = (np.nan_to_num(blocks.stack(a, table)) for a in (images, added))
        options = {"residual": residual if summed else None, "activation": activation, "eps": EPS}
        y, statistics = stack_batch_norm(x, table, weight, bias, **options)
        return x, y, statistics

    summed = activation in (None, "relu")
    x, y, statistics = result(*point)
    found = stack_batch_norm_grad(
        blocks.stack(grad, table), x, table, statistics, y=y if summed else None,
        activation=activation,
    )  # fmt: skip
    own = [blocks.unstack(found.x, table), found.weight, found.bias]
    own.append(blocks.unstack(found.residual, table))
    for number, (value, gradient) in enumerate(zip(point, own, strict=True)):
        if number == 3 and not summed:
            break
        step = rng.standard_normal(np.shape(value)) * 1e-6
        if np.ndim(value) == 4:
            step = step * blocks.mask(table)
        ends = []
        for sign in (1, -1):
            moved = [v + sign * step if k == number else v for k, v in enumerate(point)]
            ends.append((blocks.unstack(result(*moved)[1], table) * grad).sum())
        slope, expected = (ends[0] - ends[1]) / 2, (gradient * step).sum()
        if activation == "relu" and abs(slope - expected) > 1e-9:
            continue  # a difference across the kink of relu; the test below is exact
        assert abs(slope - expected) <= 1e-9 * (1 + abs(grad).sum()) + 1e-4 * abs(slope)


@stack_cases.FEW
@given(data=st.data())
def test_gradients_through_relu(data):
    """Those of a norm alone, of the gradient where the result is over 0."""
    blocks, table, images, rng, (weight, bias) = draw_norm(data, CHANNELS, np.float32)
    x, grad = (
        blocks.stack(a, table)
        for a in (images, blocks.images(table, CHANNELS, rng, np.float32))
    )
    residual = blocks.stack(blocks.images(table, CHANNELS, rng, np.float32), table)
    residual = residual if data.draw(st.booleans()) else None
    y, statistics = stack_batch_norm(
        x, table, weight, bias, residual=residual, activation="relu"
    )
    found = stack_batch_norm_grad(
        grad, x, table, statistics, y=None if residual is None else y, activation="relu"
    )
    passed = np.where(y > 0, grad, np.float32(0))
    for actual, expected in zip(found, stack_batch_norm_grad(passed, x, table, statistics),
                                strict=True):  # fmt: skip
        assert_same(actual, expected, signed_zero=False)
