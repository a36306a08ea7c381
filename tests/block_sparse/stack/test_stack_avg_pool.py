"""stack_avg_pool is the dense layer on images that are 0 outside of the active blocks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sbnet_cupy as sb
from support import stack_cases, stack_oracles
from support.assertions import assert_close, to_numpy
from support.stack_pool_cases import own, poolings

COUNTING = [{}, {"count_include_pad": False}, {"divisor": 3.0}]


@pytest.mark.parametrize("counting", COUNTING, ids=str)
@stack_cases.FEW
@given(data=st.data())
def test_avg_pool(xp, body, counting, data):
    case = data.draw(poolings(xp.asarray, dilated=False, dtype=own(body, data)))
    x = xp.asarray(case.blocks.stack(case.images, case.table))
    y = sb.stack_avg_pool(x, case.table, **case.options, **counting)
    geometry = (case.kernel, case.strides, case.pads, case.ceil_mode)
    wide = case.images.astype(np.float64)
    expected = stack_oracles.avg_pool(wide, *geometry, **counting)
    size = stack_oracles.avg_pool(abs(wide), *geometry, **counting)
    mask = case.blocks.mask(case.after)
    actual = case.blocks.unstack(to_numpy(y), case.after).astype(case.dtype)
    # A term more for the division.
    assert_close(actual, np.where(mask, expected, 0), terms=case.area + 1, magnitude=size,
                 dtype=stack_cases.sum_dtype(case.dtype))  # fmt: skip


@pytest.mark.parametrize("counting", COUNTING, ids=str)
@stack_cases.FEW
@given(data=st.data())
def test_avg_pool_gradient(xp, body, counting, data):
    case = data.draw(poolings(xp.asarray, dilated=False, dtype=own(body, data), largest=7))
    rng = data.draw(stack_cases.generators())
    grad = case.blocks.images(case.after, 2, rng, case.dtype)
    dx = sb.stack_avg_pool_grad(
        xp.asarray(case.blocks.stack(grad, case.after)),
        xp.asarray(case.blocks.stack(case.images, case.table)), case.table, **case.options,
        **counting,
    )  # fmt: skip
    geometry = (case.kernel, case.strides, case.pads, case.ceil_mode)
    transpose = stack_oracles.transpose_of(
        lambda x: stack_oracles.avg_pool(x, *geometry, **counting), case.blocks.size
    )
    expected, size = transpose(grad.astype(np.float64)), transpose(abs(grad.astype(np.float64)))
    mask = case.blocks.mask(case.table)
    case.blocks.assert_clear_outside(to_numpy(dx), case.table)
    actual = case.blocks.unstack(to_numpy(dx), case.table).astype(case.dtype)
    assert_close(actual, np.where(mask, expected, 0), terms=case.area + 1, magnitude=size,
                 dtype=stack_cases.sum_dtype(case.dtype))  # fmt: skip


@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("kernel, stride, padding", [(3, 2, 1), (2, 2, 0), (3, 1, 1), (4, 4, 2)])
@pytest.mark.parametrize("size", [(13, 9), (16, 12), (5, 23)])
def test_a_full_mask_is_pytorch(torch, kernel, stride, padding, size, ceil_mode):
    """The sizes too, and its divisors in the padding."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, *size, 3))
    table = sb.block_table(np.ones((2, *size), bool), 8)
    stack, tensor = sb.stack_from_image(x, table), torch.tensor(x).permute(0, 3, 1, 2)
    options = {"kernel": kernel, "strides": stride, "padding": padding, "ceil_mode": ceil_mode}
    sizes = (kernel, stride, padding)
    dense = torch.nn.functional.max_pool2d(tensor, *sizes, ceil_mode=ceil_mode)
    if any(n > -(-m // 8) * 8 // stride for n, m in zip(dense.shape[2:], size, strict=True)):
        with pytest.raises(sb.ShapeError, match="pixels all lie in blocks"):
            sb.stack_avg_pool(stack, table, **options)
        return
    after = table.after_conv(kernel, stride, padding, ceil_mode=ceil_mode)
    for include in (True, False):
        y = sb.stack_avg_pool(stack, table, count_include_pad=include, **options)
        dense = torch.nn.functional.avg_pool2d(tensor, *sizes, ceil_mode, include)
        np.testing.assert_allclose(
            sb.stack_to_image(y, after), dense.permute(0, 2, 3, 1).numpy(), rtol=1e-13, atol=1e-14
        )
