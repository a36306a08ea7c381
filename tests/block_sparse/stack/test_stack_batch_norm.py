"""stack_batch_norm normalizes by the active pixels of images; its gradient, by differences."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbnet_cupy.block_sparse.stack.stack_batch_norm import stack_batch_norm
from sbnet_cupy.block_sparse.stack.stack_batch_norm_grad import stack_batch_norm_grad
from support import stack_cases
from support.assertions import assert_close, assert_same

CHANNELS, EPS = 3, 1e-3


def draw(data, dtype):
    """Draw a table, images, a stack, and parameters; the means are far from 0."""
    blocks, rng = data.draw(stack_cases.blocks()), data.draw(stack_cases.generators())
    table = blocks.table()
    images = blocks.images(table, CHANNELS, rng, np.float64) + [0, 8, -3]
    images = np.where(blocks.mask(table), images, 0).astype(dtype)
    parameters = rng.uniform(0.5, 1.5, (2, CHANNELS))
    return blocks, table, images, rng, parameters


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("affine", [True, False])
@stack_cases.FEW
@given(data=st.data())
def test_equals_the_dense_layer_on_active_pixels(activation, affine, data):
    dtype = data.draw(stack_cases.float_dtypes())
    blocks, table, images, rng, (weight, bias) = draw(data, dtype)
    given_parameters = (weight, bias) if affine else (None, None)
    added = blocks.images(table, CHANNELS, rng, dtype)
    residual = blocks.stack(added, table) if data.draw(st.booleans()) else None
    running = np.array([[1.0] * CHANNELS, [2.0] * CHANNELS])
    mask = blocks.mask(table)[..., 0]
    pixels, momentum = images.astype(np.float64)[mask], 0.25
    y, statistics = stack_batch_norm(
        blocks.stack(images, table), table, *given_parameters, residual=residual, eps=EPS,
        activation=activation, running_mean=running[0], running_var=running[1], momentum=momentum,
    )  # fmt: skip
    blocks.assert_clear_outside(y, table)
    assert y.dtype == dtype and statistics[-1] == len(pixels)
    if not len(pixels):
        assert running.tolist() == [[1.0] * CHANNELS, [2.0] * CHANNELS]
        return
    mean, variance = pixels.mean(0), pixels.var(0)
    unbiased = variance * (len(pixels) / max(len(pixels) - 1, 1))
    assert_close(running, np.stack([0.75 + 0.25 * mean, 1.5 + 0.25 * unbiased]), dtype=np.float64,
                 terms=4 * len(pixels) + 8, magnitude=1 + abs(mean).max() ** 2 + unbiased.max())  # fmt: skip
    scale = 1 / np.sqrt(variance + EPS)
    wide = (images.astype(np.float64) - mean) * scale * (weight if affine else 1)
    wide = wide + (bias if affine else 0)
    size = (abs(images.astype(np.float64)) + abs(mean)) * scale * 2 + 2
    if residual is not None:
        wide = wide + added.astype(np.float64)
        size = size + abs(added.astype(np.float64))
    expected = np.where(mask[..., None], np.maximum(wide, 0) if activation else wide, 0)
    expected, size = (np.nan_to_num(blocks.stack(a, table)) for a in (expected, size))
    assert_close(y, expected, terms=4 * len(pixels) + 16, dtype=stack_cases.sum_dtype(dtype),
                 magnitude=size)  # fmt: skip


@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu"])
@stack_cases.FEW
@given(data=st.data())
def test_gradients_are_differences(activation, data):
    """Along random directions, in float64."""
    blocks, table, images, rng, (weight, bias) = draw(data, np.float64)
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
    blocks, table, images, rng, (weight, bias) = draw(data, np.float32)
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
