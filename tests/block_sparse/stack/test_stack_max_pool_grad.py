"""stack_max_pool_grad is the gradient of the dense layer on masked images."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import sbnet_cupy as sb
from support import stack_cases, stack_oracles
from support.assertions import assert_close, to_numpy
from support.stack_pool_cases import own, poolings


@stack_cases.FEW
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
