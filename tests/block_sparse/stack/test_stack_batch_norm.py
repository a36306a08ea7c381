"""stack_batch_norm normalizes by the active pixels of images."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbnet_cupy.block_sparse.stack.stack_batch_norm import stack_batch_norm
from support import stack_cases
from support.assertions import assert_close
from support.stack_norm_cases import draw_norm

CHANNELS, EPS = 3, 1e-3


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("affine", [True, False])
@stack_cases.FEW
@given(data=st.data())
def test_equals_the_dense_layer_on_active_pixels(activation, affine, data):
    dtype = data.draw(stack_cases.float_dtypes())
    blocks, table, images, rng, (weight, bias) = draw_norm(data, CHANNELS, dtype)
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
    followed = np.stack([0.75 + 0.25 * mean, 1.5 + 0.25 * unbiased])
    size = 1 + abs(mean).max() ** 2 + unbiased.max()
    assert_close(running, followed, terms=4 * len(pixels) + 8, dtype=np.float64, magnitude=size)
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
