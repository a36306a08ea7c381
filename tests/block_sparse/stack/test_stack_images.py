"""stack_from_image and stack_to_image copy, to the bit; their gradients are each other."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sbnet_cupy as sb
from support import stack_cases, stack_oracles, strategies
from support.assertions import assert_same, to_numpy

FORMATS = {"NHWC": lambda x: x, "NCHW": lambda x: np.ascontiguousarray(x.transpose(0, 3, 1, 2))}


@pytest.mark.parametrize("data_format", FORMATS)
@stack_cases.FEW
@given(data=st.data())
def test_from_image(xp, data_format, data):
    blocks = data.draw(stack_cases.blocks())
    shape = (blocks.batch, *blocks.size, data.draw(strategies.channels()))
    x = data.draw(strategies.images(shape))
    given_x = xp.asarray(FORMATS[data_format](x))
    stack = sb.stack_from_image(given_x, blocks.table(xp.asarray), data_format=data_format)
    expected = stack_oracles.to_stack(x, blocks.rows, blocks.block, blocks.capacity)
    assert_same(to_numpy(stack), expected, allow_nan=True)


@pytest.mark.parametrize("data_format", FORMATS)
@stack_cases.FEW
@given(data=st.data())
def test_to_image(xp, data_format, data):
    """What sticks out and rows past the count are left out, whatever they hold."""
    blocks = data.draw(stack_cases.blocks())
    channels = data.draw(strategies.channels())
    dtype = data.draw(stack_cases.float_dtypes())
    stack = data.draw(strategies.images((blocks.capacity, *blocks.block, channels), dtype))
    background = data.draw(strategies.images((blocks.batch, *blocks.size, channels), dtype))
    table, order = blocks.table(xp.asarray), FORMATS[data_format]
    at = (blocks.block, blocks.size, blocks.batch)
    mask = stack_oracles.block_mask(blocks.rows, *at)[..., None]
    image = stack_oracles.to_image(stack, blocks.rows, *at)
    per_channel = (
        background.reshape(-1, channels)[:1].reshape(channels) if background.size else None
    )
    for given_background, value in [(0, 0), (2.5, 2.5), (background, background),
                                    (per_channel, per_channel)]:  # fmt: skip
        if value is None:
            continue
        expected = order(np.where(mask, image, np.asarray(value).astype(dtype)))
        if given_background is background:
            given_background = order(background)
        if isinstance(given_background, np.ndarray):
            given_background = xp.asarray(given_background)
        options = {"background": given_background, "data_format": data_format}
        y = sb.stack_to_image(xp.asarray(stack), table, **options)
        assert_same(to_numpy(y), expected, allow_nan=True)


def test_into_the_background(xp):
    blocks = stack_cases.Blocks(np.array([[[True, False]]]), (2, 2), (2, 3))
    image = xp.writable(np.ones((1, 2, 3, 1)))
    stack = xp.asarray(np.full((1, 2, 2, 1), 5.0))
    y = sb.stack_to_image(stack, blocks.table(xp.asarray), background=image, out=image)
    assert y is image
    assert to_numpy(y)[0, 0, :, 0].tolist() == [5, 5, 1]


UNHELD = [
    ("u1", 300, "an integer that uint8 holds, from 0 to 255, got 300"),
    ("u1", np.int64(-1), "an integer that uint8 holds"),
    ("i4", 1.5, "an integer .* got 1.5; convert the stack"),
    ("i8", float("nan"), "an integer .* got nan"),
    ("u8", np.float64(1e300), "an integer that uint64 holds"),
    ("i2", np.complex64(1j), "an integer that int16 holds"),
    ("f4", np.complex64(1j), "a number, got"),
    ("f4", 10**400, "a number that a float can hold"),
]


@pytest.mark.parametrize("dtype, background, message", UNHELD)
def test_a_background_that_the_images_cannot_hold(xp, dtype, background, message):
    blocks = stack_cases.Blocks(np.array([[[True, False]]]), (2, 2), (2, 3))
    stack = xp.asarray(np.ones((1, 2, 2, 1), dtype))
    with pytest.raises(sb.DTypeError, match=f"background must be {message}"):
        sb.stack_to_image(stack, blocks.table(xp.asarray), background=background)


@pytest.mark.parametrize("data_format", FORMATS)
@stack_cases.FEW
@given(data=st.data())
def test_gradients(xp, data_format, data):
    blocks = data.draw(stack_cases.blocks())
    table, order = blocks.table(xp.asarray), FORMATS[data_format]
    grad = data.draw(strategies.numbers((blocks.batch, *blocks.size, 3), np.dtype("f4")))
    mask = stack_oracles.block_mask(blocks.rows, blocks.block, blocks.size, blocks.batch)
    cut = stack_oracles.to_stack(grad, blocks.rows, blocks.block, blocks.capacity)
    found = sb.stack_to_image_grad(xp.asarray(order(grad)), table, data_format=data_format)
    assert_same(to_numpy(found.stack), cut)
    assert_same(to_numpy(found.background), order(np.where(mask[..., None], np.float32(0), grad)))
    poisoned = stack_oracles.to_stack(
        grad, blocks.rows, blocks.block, blocks.capacity, outside=np.nan
    )
    back = sb.stack_from_image_grad(xp.asarray(poisoned), table, data_format=data_format)
    assert_same(to_numpy(back), order(np.where(mask[..., None], grad, np.float32(0))))


@stack_cases.FEW
@given(data=st.data())
def test_pixel_mask(xp, body, data):
    blocks = data.draw(stack_cases.blocks())
    ones = np.ones((blocks.batch, *blocks.size, 1))
    expected = stack_oracles.to_stack(ones, blocks.rows, blocks.block, blocks.capacity)
    assert_same(to_numpy(sb.stack_pixel_mask(blocks.table(xp.asarray))), expected[..., 0] > 0)
