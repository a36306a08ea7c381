"""stack_conv2d is the dense layer on images that are 0 outside of the active blocks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sbnet_cupy as sb
from sbnet_cupy.block_sparse.stack import taps
from support import conv_oracles, stack_cases
from support.assertions import assert_same, to_numpy
from support.conv_oracles import Bounded
from support.stack_conv_cases import assert_result, cases

ACTIVATIONS = (None, "relu", "silu", "gelu")


@pytest.mark.parametrize("transposed", [False, True], ids=["forward", "transposed"])
@stack_cases.FEW
@given(data=st.data())
def test_equals_the_dense_layer(xp, body, transposed, data):
    """NaN lies where nothing may be read: in rows past the count and outside the image."""
    dtype = None if body == "own body" else data.draw(st.sampled_from(["f4", "f8"]))
    case = data.draw(cases(xp.asarray, transposed, dtype))
    x = xp.asarray(case.blocks.stack(case.images, case.table))
    y = sb.stack_conv2d(x, xp.asarray(case.w), case.table, **case.options)
    expected, _ = case.bounded()
    assert_result(case, y, conv_oracles.bounded_round(expected, case.dtype))


@pytest.mark.parametrize("transposed", [False, True], ids=["forward", "transposed"])
@stack_cases.FEW
@given(data=st.data())
def test_epilogue(xp, body, transposed, data):
    """Scale, bias, residual, activation, in this order, and one rounding at the end."""
    dtype = None if body == "own body" else data.draw(st.sampled_from(["f4", "f8"]))
    case = data.draw(cases(xp.asarray, transposed, dtype, largest=7))
    rng, k = data.draw(stack_cases.generators()), case.w.shape[3]
    scale, bias = rng.standard_normal((2, k)).astype(stack_cases.sum_dtype(case.dtype))
    scale, bias = (v if data.draw(st.booleans()) else None for v in (scale, bias))
    activation = data.draw(st.sampled_from(ACTIVATIONS))
    residual = None
    value, epsilon = case.bounded()
    value = conv_oracles.bounded_affine(value, scale, bias, None, epsilon=epsilon)
    if data.draw(st.booleans()):
        added = case.blocks.images(case.after, k, rng, case.dtype)
        residual = xp.asarray(case.blocks.stack(added, case.after))
        value = conv_oracles.bounded_add(value, conv_oracles.exact(added))
        value = Bounded(value.value, value.error + epsilon * (abs(value.value) + value.error))
    value = conv_oracles.bounded_affine(value, None, None, activation, epsilon=epsilon)
    y = sb.stack_conv2d(
        xp.asarray(case.blocks.stack(case.images, case.table)), xp.asarray(case.w), case.table,
        scale=None if scale is None else xp.asarray(scale),
        bias=None if bias is None else xp.asarray(bias),
        residual=residual, activation=activation, **case.options,
    )  # fmt: skip
    assert_result(case, y, conv_oracles.bounded_round(value, case.dtype))


@stack_cases.FEW
@given(data=st.data())
def test_layouts_of_the_kernel(xp, data):
    """They are the same kernel: with NumPy the results are the same to the bit."""
    transposed = data.draw(st.booleans())
    case = data.draw(cases(xp.asarray, transposed))
    x, groups = xp.asarray(case.blocks.stack(case.images, case.table)), case.geometry[3]
    first = sb.stack_conv2d(x, xp.asarray(case.w), case.table, **case.options)
    kernels = {"OIHW": case.w.transpose(3, 2, 0, 1)}
    if transposed:  # (C, K / groups, R, S): channel c of group g has the outputs of g
        r, s, c, k = case.w.shape
        apart = case.w.reshape(r, s, c, groups, k // groups)
        kernels["IOHW"] = apart.transpose(3, 2, 4, 0, 1).reshape(groups * c, k // groups, r, s)
    for name, w in kernels.items():
        w = xp.asarray(np.ascontiguousarray(w))
        y = sb.stack_conv2d(x, w, case.table, w_format=name, **case.options)
        assert_result(case, y, conv_oracles.bounded_round(case.bounded()[0], case.dtype))
        if xp.module is not np:
            continue
        at = to_numpy(sb.stack_pixel_mask(case.after))[..., None]
        assert_same(*(np.where(at, to_numpy(a), np.zeros((), case.dtype)) for a in (y, first)))


@pytest.mark.parametrize("channels", [(3, 7, 1), (6, 6, 6), (4, 8, 2)], ids=str)
@pytest.mark.parametrize("block", [16, 5])
def test_chunks_change_nothing_but_the_order_of_blocks(monkeypatch, channels, block):
    """A chunk may be one line of one block."""
    c, k, groups = channels
    rng = np.random.default_rng(0)
    blocks = stack_cases.Blocks(
        rng.random((2, 3, 4)) < 0.6, (block, block), (3 * block - 2, 4 * block)
    )
    table = blocks.table()
    x = blocks.stack(blocks.images(table, c, rng, np.float32), table)
    w = rng.standard_normal((3, 3, c // groups, k)).astype(np.float32)
    calls = ({"strides": 1}, {"dilation": 2}, {"transposed": True, "strides": 2, "padding": 1})
    for options in calls:
        results = []
        for limit in (1 << 30, 1 << 12, 1):
            monkeypatch.setattr(taps.im2col, "NUMPY_CHUNK_BYTES", limit)
            y = sb.stack_conv2d(x, w, table, groups=groups, **options)
            results.append(np.where(np.isnan(y), 0, y))
        # Other sizes of matrices may add in another order.
        bound = 9 * c * 2.0**-23 * np.abs(w).max() * 40 * 9 * c
        assert np.abs(results[1] - results[0]).max() < bound
        assert np.abs(results[2] - results[0]).max() < bound


def test_two_calls_give_the_same_bits(xp):
    rng = np.random.default_rng(1)
    blocks = stack_cases.Blocks(rng.random((1, 4, 4)) < 0.6, (8, 8), (29, 32), spare=2)
    table = blocks.table(xp.asarray)
    x = xp.asarray(blocks.stack(blocks.images(table, 16, rng, np.float32), table))
    w = xp.asarray(rng.standard_normal((3, 3, 16, 16)).astype(np.float32))
    first, second = (to_numpy(sb.stack_conv2d(x, w, table)) for _ in range(2))
    assert_same(first, second, allow_nan=True)


def test_inputs_may_not_be_the_output(xp):
    table = sb.block_table(xp.asarray(np.ones((1, 2, 2), bool)), 2)
    x = xp.writable(np.ones((1, 2, 2, 1), np.float32))
    w = xp.asarray(np.ones((1, 1, 1, 1), np.float32))
    with pytest.raises(sb.ShapeError, match="out must not share memory with x"):
        sb.stack_conv2d(x, w, table, out=x)
    out = xp.writable(np.zeros((1, 2, 2, 1), np.float32))
    assert sb.stack_conv2d(x, w, table, out=out) is out
    assert to_numpy(out).tolist() == to_numpy(x).tolist()


def test_a_full_mask_is_the_dense_layer(xp):
    """Also where no side is a multiple of the block, against conv2d."""
    rng = np.random.default_rng(2)
    x = rng.standard_normal((2, 37, 27, 6)).astype(np.float32)
    w = rng.standard_normal((3, 3, 6, 5)).astype(np.float32)
    table = sb.block_table(xp.asarray(np.ones((2, 37, 27), bool)), 8)
    stack = sb.stack_from_image(xp.asarray(x), table)
    y = sb.stack_conv2d(stack, xp.asarray(w), table, strides=2, padding=1, activation="relu")
    y = sb.stack_to_image(y, table.after_conv(3, 2, 1))
    dense = sb.conv2d(xp.asarray(x), xp.asarray(w), strides=2, padding=((1, 1), (1, 1)),
                      activation="relu")  # fmt: skip
    size = sb.conv2d(xp.asarray(abs(x)), xp.asarray(abs(w)), strides=2, padding=((1, 1), (1, 1)))
    error = np.abs(to_numpy(y) - to_numpy(dense))
    assert (error <= 2 * 54 * 2.0**-23 * to_numpy(size)).all()
