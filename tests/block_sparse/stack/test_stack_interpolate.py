"""stack_interpolate is the dense layer on images that are 0 outside of the active blocks."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sbnet_cupy as sb
from support import stack_cases, stack_oracles
from support.assertions import assert_close, assert_same, to_numpy

MODES = [("nearest", False), ("bilinear", False), ("bilinear", True)]


@st.composite
def resizes(draw, blocks):
    """Draw (scale_factor, size): whole factors, halves, and sizes that are no multiples."""
    factors = tuple(
        draw(st.sampled_from([1, 2, 3] + ([0.5, 1.5] if b % 2 == 0 else []))) for b in blocks.block
    )
    new = [int(b * f) for b, f in zip(blocks.block, factors, strict=True)]
    most = [n * b for n, b in zip(blocks.active.shape[1:], new, strict=True)]
    if draw(st.booleans()):
        return factors, None
    return factors, tuple(draw(st.integers(1, m)) for m in most)


def oracle(blocks, after, resize, mode, align_corners):
    """Return the resize of images as a function."""
    factors, size = resize
    if size is None:
        ratios = [1 / Fraction(f) for f in factors]
    else:
        ratios = [Fraction(n, m) for n, m in zip(blocks.size, size, strict=True)]
    options = (after.image_size, ratios, mode, align_corners)
    return lambda x: stack_oracles.interpolate(x, *options)


@pytest.mark.parametrize("mode, align_corners", MODES)
@stack_cases.FEW
@given(data=st.data())
def test_equals_the_dense_layer(xp, body, mode, align_corners, data):
    blocks, dtype = data.draw(stack_cases.blocks(largest=9)), data.draw(stack_cases.float_dtypes())
    if body != "own body" and dtype.itemsize < 4:
        dtype = np.dtype(np.float32)
    resize, table = data.draw(resizes(blocks)), blocks.table(xp.asarray)
    after = table.after_interpolate(*resize)
    images = blocks.images(table, 2, data.draw(stack_cases.generators()), dtype)
    x = xp.asarray(blocks.stack(images, table))
    y = sb.stack_interpolate(
        x, table, scale_factor=resize[0], size=resize[1], mode=mode, align_corners=align_corners
    )
    layer = oracle(blocks, after, resize, mode, align_corners)
    mask, wide = blocks.mask(after), images.astype(np.float64)
    expected = np.where(mask, layer(wide), 0)
    actual = blocks.unstack(to_numpy(y), after)
    if mode == "nearest":
        assert_same(actual, expected, signed_zero=False)
        return
    # Two means of two, and positions that are rounded: to float32 below 2^7, an error of 2^-18.
    assert_close(actual.astype(dtype), expected, terms=8, dtype=stack_cases.sum_dtype(dtype),
                 magnitude=layer(abs(wide)) + abs(wide).max())  # fmt: skip


@pytest.mark.parametrize("mode, align_corners", MODES)
@stack_cases.FEW
@given(data=st.data())
def test_gradient(xp, body, mode, align_corners, data):
    blocks = data.draw(stack_cases.blocks(largest=6))
    resize, table = data.draw(resizes(blocks)), blocks.table(xp.asarray)
    after, rng = table.after_interpolate(*resize), data.draw(stack_cases.generators())
    dtype = data.draw(st.sampled_from([np.dtype("f4"), np.dtype("f8")]))
    grad = blocks.images(after, 2, rng, dtype)
    x = xp.asarray(blocks.stack(blocks.images(table, 2, rng, dtype), table))
    dx = sb.stack_interpolate_grad(
        xp.asarray(blocks.stack(grad, after)), x, table,
        scale_factor=resize[0], size=resize[1], mode=mode, align_corners=align_corners,
    )  # fmt: skip
    layer = oracle(blocks, after, resize, mode, align_corners)
    transpose = stack_oracles.transpose_of(layer, blocks.size)
    wide = grad.astype(np.float64)
    mask = blocks.mask(table)
    blocks.assert_clear_outside(to_numpy(dx), table)
    size = transpose(abs(wide)) + abs(wide).max(initial=0)
    assert_close(
        blocks.unstack(to_numpy(dx), table).astype(dtype), np.where(mask, transpose(wide), 0),
        terms=4 * wide[0, ..., 0].size + 8, dtype=dtype, magnitude=size,
    )  # fmt: skip


@pytest.mark.parametrize("size, factor", [((13, 9), 2), ((5, 16), 4), ((7, 7), 3)])
def test_a_full_mask_is_pytorch(torch, size, factor):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, *size, 3))
    table = sb.block_table(np.ones((2, *size), bool), 4)
    stack, tensor = sb.stack_from_image(x, table), torch.tensor(x).permute(0, 3, 1, 2)
    smaller = tuple(n * factor - factor + 1 for n in size)  # of an input that was not a multiple
    for new_size in (None, smaller):
        for mode, align in MODES:
            options = {} if mode == "nearest" else {"align_corners": align}
            where = {"scale_factor": factor} if new_size is None else {"size": new_size}
            dense = torch.nn.functional.interpolate(tensor, mode=mode, **where, **options)
            y = sb.stack_interpolate(
                stack, table, scale_factor=factor, size=new_size, mode=mode, align_corners=align
            )
            y = sb.stack_to_image(y, table.after_interpolate(factor, new_size))
            dense = dense.permute(0, 2, 3, 1).numpy()
            np.testing.assert_allclose(y, dense, rtol=0, atol=1e-12)


@pytest.mark.parametrize("factor", [1 / 3, 2 / 3, 4 / 3, 5 / 3, 7 / 6, (1 / 6, 11 / 6)])
@pytest.mark.parametrize("mode, align_corners", MODES)
def test_thirds_and_sixths_are_floats(torch, factor, mode, align_corners):
    x = np.random.default_rng(0).standard_normal((2, 18, 23, 3))
    table = sb.block_table(np.ones((2, 18, 23), bool), 6)
    after, stack = table.after_interpolate(factor), sb.stack_from_image(x, table)
    options = {} if mode == "nearest" else {"align_corners": align_corners}
    dense = torch.nn.functional.interpolate(
        torch.tensor(x).permute(0, 3, 1, 2), scale_factor=factor, mode=mode, **options
    )
    dense = dense.permute(0, 2, 3, 1).numpy()
    options = {"scale_factor": factor, "mode": mode, "align_corners": align_corners}
    y = sb.stack_to_image(sb.stack_interpolate(stack, table, **options), after)
    np.testing.assert_allclose(y, dense, rtol=0, atol=1e-12)
    dx = sb.stack_interpolate_grad(np.ones((len(stack), *after.block_size, 3)), stack, table,
                                   **options)  # fmt: skip
    assert dx.shape == stack.shape


def test_the_size_of_an_image_is_pytorchs(torch):
    """The product of a float is rounded: 49 times 1 / 49 is less than 1."""
    for n, factor in itertools.product(range(1, 60), (1 / 49, 3 / 49, 55 / 49)):
        table = sb.block_table(np.ones((1, 49 * 2, n), bool), 49)
        size = table.after_interpolate(factor).image_size
        expected = [int(np.floor(float(m) * factor)) for m in (98, n)]
        assert list(size) == expected
        if min(expected):
            x = torch.zeros(1, 1, 98, n)
            found = torch.nn.functional.interpolate(x, scale_factor=factor)
            assert found.shape[2:] == tuple(expected)
    exact = sb.block_table(np.ones((1, 49, 49), bool), 49).after_interpolate(Fraction(1, 49))
    assert exact.image_size == (1, 1)


def test_what_cannot_be():
    table, x = sb.block_table(np.ones((1, 4, 4)), 4), np.ones((1, 4, 4, 1))
    for options, error, message in [
        ({"scale_factor": 1.3}, sb.ShapeError, "scale_factor must make whole blocks"),
        ({"scale_factor": 0.3333}, sb.ShapeError, "of 4 pixels; pass a whole number over 4"),
        ({"scale_factor": 1 / 3}, sb.ShapeError, "scale_factor must make whole blocks"),
        ({"scale_factor": Fraction(1, 3)}, sb.ShapeError, "must make whole blocks, got 1/3 for"),
        ({"scale_factor": 1e308}, sb.ShapeError, "scale_factor must be a positive number"),
        ({"scale_factor": -1}, sb.ShapeError, "scale_factor must be a positive number"),
        ({"scale_factor": (1, 2, 3)}, sb.ShapeError, "scale_factor must be a positive number"),
        ({"scale_factor": True}, sb.ShapeError, "scale_factor must be a positive number"),
        ({"scale_factor": 2, "size": (9, 8)}, sb.ShapeError, "size must give a result"),
        ({"scale_factor": 2, "mode": "bicubic"}, ValueError, "mode must be 'nearest'"),
        ({"scale_factor": 2, "align_corners": True}, ValueError, "align_corners must be False"),
        ({"scale_factor": 2, "align_corners": 1}, ValueError, "align_corners must be True or"),
    ]:
        with pytest.raises(error, match=message):
            sb.stack_interpolate(x, table, **options)
