"""stack_max_pool and stack_avg_pool are the dense layers on images 0 outside active blocks."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sbnet_cupy as sb
from support import stack_cases, stack_oracles
from support.assertions import assert_close, assert_same, to_numpy


@dataclass
class Case:
    """A pooling of drawn blocks."""

    blocks: Any
    table: Any
    after: Any
    images: np.ndarray
    kernel: tuple
    strides: tuple
    dilation: tuple
    pads: tuple
    ceil_mode: bool
    dtype: Any

    @property
    def options(self):
        """What the functions take."""
        return {"kernel": self.kernel, "strides": self.strides, "padding": self.pads,
                "ceil_mode": self.ceil_mode}  # fmt: skip

    @property
    def area(self):
        return self.kernel[0] * self.kernel[1]


@st.composite
def poolings(draw, asarray, *, dilated, dtype=None, largest=12):
    strides = (draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2])))
    blocks = draw(stack_cases.blocks(strides, largest))
    kernel = (draw(st.sampled_from([3, 1, 2, 5])), draw(st.sampled_from([3, 1, 2])))
    dilation = draw(st.sampled_from([(1, 1), (2, 1), (1, 3)])) if dilated else (1, 1)
    table, ceil_mode, pads = blocks.table(asarray), draw(st.booleans()), []
    for n, b, count, k, d in zip(
        blocks.size, blocks.block, blocks.active.shape[1:], kernel, dilation, strict=True
    ):
        # PyTorch's limit of half a window, which leaves every window a pixel, and ours: the blocks.
        most = min(k // 2, max(b * count - 1 - n + (k - 1) * d + 1, 0))
        before = draw(st.integers(0, most))
        pads.append((before, draw(st.integers(0, most - before))))
    dtype = draw(stack_cases.float_dtypes()) if dtype is None else np.dtype(dtype)
    images = blocks.images(table, 2, draw(stack_cases.generators()), dtype)
    try:
        after = table.after_conv(kernel, strides, tuple(pads), dilation, ceil_mode=ceil_mode)
    except sb.ShapeError:  # ceil_mode can give one more than the blocks hold
        ceil_mode = False
        after = table.after_conv(kernel, strides, tuple(pads), dilation)
    return Case(blocks, table, after, images, kernel, strides, dilation, tuple(pads), ceil_mode,
                dtype)  # fmt: skip


def own(body, data):
    """Dtypes that each body can be tried with: BLAS does not multiply halves."""
    return None if body == "own body" else data.draw(st.sampled_from(["f4", "f8"]))


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


@given(data=st.data())
def test_max_pool_gradient(xp, body, data):
    case = data.draw(poolings(xp.asarray, dilated=True, dtype=own(body, data), largest=9))
    if data.draw(st.booleans()):  # many equal pixels: the first has the gradient
        case.images = np.round(case.images.astype(np.float64) / 2).astype(case.dtype)
    rng = data.draw(stack_cases.generators())
    grad = case.blocks.images(case.after, 2, rng, case.dtype)
    dx = sb.stack_max_pool_grad(
        xp.asarray(case.blocks.stack(grad, case.after)),
        xp.asarray(case.blocks.stack(case.images, case.table)), case.table,
        dilation=case.dilation, **case.options,
    )  # fmt: skip
    wide = [a.astype(np.float64) for a in (grad, case.images)]
    geometry = (case.kernel, case.strides, case.dilation, case.pads)
    expected = stack_oracles.max_pool_gradient(*wide, *geometry)
    size = stack_oracles.max_pool_gradient(abs(wide[0]), wide[1], *geometry)
    mask = case.blocks.mask(case.table)
    case.blocks.assert_clear_outside(to_numpy(dx), case.table)
    actual = case.blocks.unstack(to_numpy(dx), case.table).astype(case.dtype)
    assert_close(actual, np.where(mask, expected, 0), terms=case.area, magnitude=size,
                 dtype=stack_cases.sum_dtype(case.dtype))  # fmt: skip


COUNTING = [{}, {"count_include_pad": False}, {"divisor": 3.0}]


@pytest.mark.parametrize("counting", COUNTING, ids=str)
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
            sb.stack_max_pool(stack, table, **options)
        return
    after = table.after_conv(kernel, stride, padding, ceil_mode=ceil_mode)
    y = sb.stack_to_image(sb.stack_max_pool(stack, table, **options), after)
    assert_same(y, dense.permute(0, 2, 3, 1).contiguous().numpy())
    for include in (True, False):
        y = sb.stack_avg_pool(stack, table, count_include_pad=include, **options)
        dense = torch.nn.functional.avg_pool2d(tensor, *sizes, ceil_mode, include)
        np.testing.assert_allclose(
            sb.stack_to_image(y, after), dense.permute(0, 2, 3, 1).numpy(), rtol=1e-13, atol=1e-14
        )


def test_nan_wins(xp):
    """In the image only, and only in the windows that read it."""
    x = np.zeros((1, 4, 4, 1), np.float32)
    x[0, 1, 1] = np.nan
    table = sb.block_table(xp.asarray(np.ones((1, 4, 4), bool)), 2)
    y = sb.stack_max_pool(sb.stack_from_image(xp.asarray(x), table), table, kernel=2)
    assert np.isnan(to_numpy(y)).reshape(4).tolist() == [True, False, False, False]
