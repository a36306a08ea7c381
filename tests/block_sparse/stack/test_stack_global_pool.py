"""stack_global_pool reduces whole images; stack_per_block brings values back to the blocks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sbnet_cupy as sb
from support import stack_cases
from support.assertions import assert_close, assert_same, to_numpy

MODES = {"mean": np.mean, "sum": np.sum, "max": np.max}


@pytest.mark.parametrize("mode", MODES)
@stack_cases.FEW
@given(data=st.data())
def test_equals_the_dense_layer(xp, body, mode, data):
    """Of all pixels of the image: those in no active block are 0."""
    blocks, dtype = data.draw(stack_cases.blocks()), data.draw(stack_cases.float_dtypes())
    if body != "own body" and dtype.itemsize < 4:
        dtype = np.dtype(np.float32)
    table = blocks.table(xp.asarray)
    images = blocks.images(table, 3, data.draw(stack_cases.generators()), dtype)
    if data.draw(st.booleans()):
        images = -abs(images)
    x = xp.asarray(blocks.stack(images, table))
    y = to_numpy(sb.stack_global_pool(x, table, mode=mode))
    assert y.dtype == dtype and y.shape == (blocks.batch, 3)
    wide = images.astype(np.float64)
    expected = MODES[mode](wide, axis=(1, 2))
    if mode == "max":
        assert_same(y.astype(np.float64), expected, signed_zero=False)
        return
    size, terms = MODES[mode](abs(wide), axis=(1, 2)), blocks.size[0] * blocks.size[1] + 1
    assert_close(y, expected, terms=terms, dtype=stack_cases.sum_dtype(dtype), magnitude=size)


@pytest.mark.parametrize("mode", MODES)
@stack_cases.FEW
@given(data=st.data())
def test_gradient(xp, body, mode, data):
    blocks, rng = data.draw(stack_cases.blocks()), data.draw(stack_cases.generators())
    table = blocks.table(xp.asarray)
    images = blocks.images(table, 3, rng, np.float32)
    if mode == "max" and data.draw(st.booleans()):
        images = np.minimum(np.round(images), data.draw(st.sampled_from([0, 9])))  # of several
    grad = rng.standard_normal((blocks.batch, 3)).astype(np.float32)
    x = xp.asarray(blocks.stack(images, table))
    dx = to_numpy(sb.stack_global_pool_grad(xp.asarray(grad), x, table, mode=mode))
    blocks.assert_clear_outside(dx, table)
    expected = np.zeros(images.shape)
    pixels = blocks.size[0] * blocks.size[1]
    mask = blocks.mask(table)
    if mode == "max":
        for n, c in np.ndindex(grad.shape):
            at = np.unravel_index(images[n, ..., c].argmax(), blocks.size)
            expected[(n, *at, c)] = grad[n, c] * mask[(n, *at, 0)]
    else:
        share = 1 / pixels if mode == "mean" else 1
        expected += np.where(mask, grad[:, None, None] * share, 0)
    assert_close(blocks.unstack(dx, table).astype(np.float32), expected, terms=2, dtype=np.float32,
                 magnitude=abs(expected))  # fmt: skip


@pytest.mark.parametrize("active", [0, 1])
def test_a_maximum_of_0_belongs_to_the_first_pixel_that_is_0(xp, active):
    """Also where that lies in no active block."""
    mask = np.zeros((1, 2, 4), bool)
    mask[0, 0, 2 * active] = True
    table, x = sb.block_table(xp.asarray(mask), 2), xp.asarray(np.zeros((1, 2, 2, 1)))
    dx = sb.stack_global_pool_grad(xp.asarray(np.ones((1, 1))), x, table, mode="max")
    assert to_numpy(dx).ravel().tolist() == [1 - active, 0, 0, 0]


@stack_cases.FEW
@given(data=st.data())
def test_per_block(xp, body, data):
    blocks, rng = data.draw(stack_cases.blocks()), data.draw(stack_cases.generators())
    table = blocks.table(xp.asarray)
    values = rng.standard_normal((blocks.batch, 3)).astype(np.float32)
    expected = np.zeros((blocks.capacity, 1, 1, 3), np.float32)
    for row, (n, *_) in enumerate(blocks.rows):
        expected[row, 0, 0] = values[n]
    assert_same(to_numpy(sb.stack_per_block(xp.asarray(values), table)), expected)
    grad = rng.standard_normal(expected.shape).astype(np.float32)
    sums, sizes = np.zeros((2, blocks.batch, 3))
    for row, (n, *_) in enumerate(blocks.rows):
        sums[n] += grad[row, 0, 0]
        sizes[n] += abs(grad[row, 0, 0])
    grad[len(blocks.rows) :] = np.nan
    found = to_numpy(sb.stack_per_block_grad(xp.asarray(grad), table))
    assert_close(found, sums, terms=len(blocks.rows) + 1, dtype=np.float32, magnitude=sizes)


def test_images_without_pixels(xp):
    table = sb.block_table(xp.asarray(np.ones((2, 0, 4), bool)), 2)
    x = xp.asarray(np.ones((0, 2, 2, 3), np.float32))
    for mode in MODES:
        assert to_numpy(sb.stack_global_pool(x, table, mode=mode)).tolist() == [[0] * 3] * 2
