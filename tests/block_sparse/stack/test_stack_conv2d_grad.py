"""stack_conv2d_grad: the dense layer's gradients, of images that are 0 outside active blocks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sbnet_cupy as sb
from support import stack_cases, stack_oracles
from support.assertions import assert_close, assert_same, to_numpy
from support.stack_conv_cases import cases


def gradients_of(case, grad, x, w):
    """The oracle's (dx, dw), dx 0 outside of the active blocks."""
    oracle = stack_oracles.conv2d_gradients
    if case.transposed:
        oracle = stack_oracles.transposed_gradients
    dx, dw = oracle(*(a.astype(np.float64) for a in (grad, x, w)), *case.geometry)
    return np.where(case.blocks.mask(case.table), dx, 0), dw


@pytest.mark.parametrize("transposed", [False, True], ids=["forward", "transposed"])
@stack_cases.FEW
@given(data=st.data())
def test_equals_the_dense_layer(xp, body, transposed, data):
    """NaN lies where nothing may be read, in the gradient as well as in x."""
    dtype = None if body == "own body" else data.draw(st.sampled_from(["f4", "f8"]))
    case = data.draw(cases(xp.asarray, transposed, dtype, largest=9))
    blocks, rng = case.blocks, data.draw(stack_cases.generators())
    grad = blocks.images(case.after, case.w.shape[3], rng, case.dtype)
    found = sb.stack_conv2d_grad(
        xp.asarray(blocks.stack(grad, case.after)),
        xp.asarray(blocks.stack(case.images, case.table)),
        xp.asarray(case.w), case.table, **case.options,
    )  # fmt: skip
    assert found.scale is found.bias is found.residual is None
    dx, dw = gradients_of(case, grad, case.images, case.w)
    size_x, size_w = gradients_of(case, abs(grad), abs(case.images), abs(case.w))
    blocks.assert_clear_outside(to_numpy(found.x), case.table)
    sums = {"dtype": stack_cases.sum_dtype(case.dtype)}
    taps = int(np.prod(case.w.shape[:2])) * case.w.shape[3]
    actual = blocks.unstack(to_numpy(found.x), case.table).astype(case.dtype)
    assert_close(actual, dx, terms=taps, magnitude=size_x, **sums)
    assert to_numpy(found.x).dtype == case.dtype and to_numpy(found.w).dtype == case.dtype
    pixels = case.blocks.batch * max(
        int(np.prod(case.images.shape[1:3])), int(np.prod(grad.shape[1:3]))
    )
    assert_close(to_numpy(found.w), dw, terms=pixels, magnitude=size_w, **sums)


@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu"])
@pytest.mark.parametrize("transposed", [False, True], ids=["forward", "transposed"])
def test_epilogue(xp, torch, transposed, activation):
    """In float64 against PyTorch's autograd, through scale, bias, residual and activation."""
    rng = np.random.default_rng(4)
    blocks = stack_cases.Blocks(rng.random((2, 3, 3)) < 0.6, (4, 4), (11, 9), spare=1)
    table = blocks.table(xp.asarray)
    options = {"strides": 2, "padding": 1, "transposed": transposed}
    if transposed:
        options["output_padding"] = 1
        after = table.after_transposed(3, 2, 1, output_padding=1)
    else:
        after = table.after_conv(3, 2, 1)
    x = blocks.images(table, 3, rng)
    residual, grad = (blocks.images(after, 5, rng) for _ in range(2))
    w, scale, bias = rng.standard_normal((3, 3, 3, 5)), *rng.standard_normal((2, 5))
    stacks = [xp.asarray(blocks.stack(*a)) for a in ((grad, after), (x, table), (residual, after))]
    epilogue = {"scale": xp.asarray(scale), "bias": xp.asarray(bias), "activation": activation,
                "residual": stacks[2]}  # fmt: skip
    found = sb.stack_conv2d_grad(*stacks[:2], xp.asarray(w), table, **epilogue, **options)
    leaves = [torch.tensor(a, requires_grad=True) for a in (x, w, scale, bias, residual)]
    tx, tw, ts, tb, tr = leaves
    if transposed:
        z = torch.nn.functional.conv_transpose2d(
            tx.permute(0, 3, 1, 2), tw.permute(2, 3, 0, 1), None, 2, 1, 1
        )
    else:
        z = torch.nn.functional.conv2d(tx.permute(0, 3, 1, 2), tw.permute(3, 2, 0, 1), None, 2, 1)
    y = z.permute(0, 2, 3, 1) * ts + tb + tr
    y = y if activation is None else getattr(torch.nn.functional, activation)(y)
    (y * torch.tensor(grad)).sum().backward()
    for name, at, leaf in (("x", table, tx), ("residual", after, tr)):
        actual = blocks.unstack(to_numpy(getattr(found, name)), at)
        expected = np.where(blocks.mask(at), leaf.grad.numpy(), 0)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-11)
        blocks.assert_clear_outside(to_numpy(getattr(found, name)), at)
    for name, leaf in (("w", tw), ("scale", ts), ("bias", tb)):
        actual = to_numpy(getattr(found, name))
        np.testing.assert_allclose(actual, leaf.grad.numpy(), rtol=0, atol=1e-11)


def test_only_what_is_wanted(xp):
    table = sb.block_table(xp.asarray(np.ones((1, 4, 4), bool)), 2)
    x = xp.asarray(np.ones((4, 2, 2, 3), np.float32))
    w, bias = xp.asarray(np.ones((3, 3, 3, 3), np.float32)), xp.asarray(np.ones(3, np.float32))
    found = sb.stack_conv2d_grad(x, x, w, table, bias=bias, wanted=("bias",))
    assert found.x is found.w is found.scale is found.residual is None
    assert to_numpy(found.bias).tolist() == [16.0] * 3
    assert sb.stack_conv2d_grad(x, x, w, table, bias=bias).scale is None


def test_the_same_bits_each_time(xp):
    rng = np.random.default_rng(5)
    blocks = stack_cases.Blocks(rng.random((2, 4, 4)) < 0.6, (8, 8), (30, 32), spare=3)
    table = blocks.table(xp.asarray)
    x, grad = (blocks.stack(blocks.images(table, c, rng, np.float32), table) for c in (16, 8))
    w = xp.asarray(rng.standard_normal((3, 3, 16, 8)).astype(np.float32))
    calls = [sb.stack_conv2d_grad(xp.asarray(grad), xp.asarray(x), w, table) for _ in range(2)]
    for first, second in zip(*(call[:2] for call in calls), strict=True):
        assert_same(to_numpy(first), to_numpy(second))


def test_no_active_block(xp):
    table = sb.block_table(xp.asarray(np.zeros((1, 4, 4), bool)), 2, capacity=2)
    x = xp.asarray(np.full((2, 2, 2, 3), np.nan, np.float32))
    w = xp.asarray(np.ones((3, 3, 3, 3), np.float32))
    found = sb.stack_conv2d_grad(x, x, w, table)
    assert not to_numpy(found.x).any() and not to_numpy(found.w).any()
    assert not to_numpy(sb.stack_conv2d(x, w, table)).any()


@pytest.mark.parametrize("transposed", [False, True])
def test_no_channels(xp, transposed):
    table = sb.block_table(xp.asarray(np.ones((1, 4, 4), bool)), 2)
    x, w = xp.asarray(np.ones((4, 2, 2, 0), np.float32)), np.ones((3, 3, 0, 4), np.float32)
    grad, bias = np.ones((4, 2, 2, 4), np.float32), np.ones(4, np.float32)
    found = sb.stack_conv2d_grad(
        xp.asarray(grad), x, xp.asarray(w), table, transposed=transposed, bias=xp.asarray(bias)
    )
    assert found.x.shape == x.shape and found.w.shape == w.shape
    assert to_numpy(found.bias).tolist() == [16.0] * 4


def test_packed_weights_are_refused(xp):
    table = sb.block_table(xp.asarray(np.ones((1, 4, 4), bool)), 2)
    x, w = (xp.asarray(np.ones(shape, np.float32)) for shape in ((4, 2, 2, 3), (3, 3, 3, 3)))
    with pytest.raises(sb.DTypeError, match="got PackedWeights; pass the arrays that it was made"):
        sb.stack_conv2d_grad(x, x, sb.PackedWeights(w), table)
