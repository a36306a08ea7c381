"""stack_max_pool is the dense layer on images that are 0 outside of the active blocks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sbnet_cupy as sb
from support import stack_cases, stack_oracles
from support.assertions import assert_same, to_numpy
from support.stack_pool_cases import own, poolings


@stack_cases.FEW
@given(data=st.data())
def test_max_pool(xp, body, data):
    """To the bit: what is in no active block is 0 and counts, outside the image is nothing."""
    case = data.draw(poolings(xp.asarray, dilated=True, dtype=own(body, data)))
    if data.draw(st.booleans()):  # no 0 above all pixels
        case.images = -abs(case.images)
    x = xp.asarray(case.blocks.stack(case.images, case.table))
    y = sb.stack_max_pool(x, case.table, dilation=case.dilation, **case.options)
    geometry = (case.kernel, case.strides, case.dilation, case.pads, case.ceil_mode)
    expected = stack_oracles.max_pool(case.images.astype(np.float64), *geometry)
    assert to_numpy(y).dtype == case.dtype
    assert_same(
        case.blocks.unstack(to_numpy(y), case.after),
        np.where(case.blocks.mask(case.after), expected, 0), signed_zero=False,
    )  # fmt: skip
    finite = np.where(np.isnan(to_numpy(x)), 0, to_numpy(x).astype(np.float64))
    assert abs(to_numpy(y).astype(np.float64)).max(initial=0) <= abs(finite).max(initial=0)


@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("kernel, stride, padding", [(3, 2, 1), (2, 2, 0), (3, 1, 1), (4, 4, 2)])
@pytest.mark.parametrize("size", [(13, 9), (16, 12), (5, 23)])
def test_a_full_mask_is_pytorch(torch, kernel, stride, padding, size, ceil_mode):
    """The sizes too."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, *size, 3))
    table = sb.block_table(np.ones((2, *size), bool), 8)
    stack, tensor = sb.stack_from_image(x, table), torch.tensor(x).permute(0, 3, 1, 2)
    options = {"kernel": kernel, "strides": stride, "padding": padding, "ceil_mode": ceil_mode}
    sizes = (kernel, stride, padding)
    dense = torch.nn.functional.max_pool2d(tensor, *sizes, ceil_mode=ceil_mode)
    if any(n > -(-m // 8) * 8 // stride for n, m in zip(dense.shape[2:], size, strict=True)):
        with pytest.raises(sb.ShapeError, match="pixels all lie in blocks"):
            sb.stack_max_pool(stack, table, **options)
        return
    after = table.after_conv(kernel, stride, padding, ceil_mode=ceil_mode)
    y = sb.stack_to_image(sb.stack_max_pool(stack, table, **options), after)
    assert_same(y, dense.permute(0, 2, 3, 1).contiguous().numpy())


def test_a_window_without_a_pixel_of_the_image_gives_0(xp, body):
    """Here the image lies between the two taps of each window."""
    x = -np.ones((1, 4, 1, 1), np.float32)
    table = sb.block_table(xp.asarray(np.ones((1, 4, 1), bool)), (2, 1))
    stack, options = sb.stack_from_image(xp.asarray(x), table), {"padding": (0, 1), "strides": 1}
    y = sb.stack_max_pool(stack, table, kernel=(1, 2), dilation=(1, 2), **options)
    assert y.shape == stack.shape and not to_numpy(y).any()


def test_nan_wins(xp):
    """In the image only, and only in the windows that read it."""
    x = np.zeros((1, 4, 4, 1), np.float32)
    x[0, 1, 1] = np.nan
    table = sb.block_table(xp.asarray(np.ones((1, 4, 4), bool)), 2)
    y = sb.stack_max_pool(sb.stack_from_image(xp.asarray(x), table), table, kernel=2)
    assert np.isnan(to_numpy(y)).reshape(4).tolist() == [True, False, False, False]
