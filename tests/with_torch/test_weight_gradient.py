"""Gradients of weights whose last axis has one channel: strided views of them are handed on."""

import numpy as np
import pytest

import sbnet_cupy as sb
from support.adapter_cases import X, normal
from support.assertions import assert_close, to_numpy
from support.torch_cases import grid


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("w_format", ["HWIO", "OIHW"])
@pytest.mark.parametrize("kernel", [(3, 3), (1, 1), (2, 3)], ids=str)
def test_one_output_channel(torch, st, dtype, w_format, kernel):
    """Also with one active block, for which PyTorch takes another convolution than for many."""
    w = normal(*kernel, 3, 1, dtype=dtype)
    w = w if w_format == "HWIO" else np.ascontiguousarray(w.transpose(3, 2, 0, 1))
    params = sb.calc_block_params(X.shape, (4, 5), kernel)
    corner = np.zeros(X.shape[:3], bool)
    corner[0, 0, 0] = True
    for mask in (corner, np.ones(X.shape[:3], bool)):
        active = sb.reduce_mask(mask, params.bcount, **grid(params))
        x = X.astype(dtype)
        leaves = [torch.from_numpy(x.copy()).requires_grad_(), torch.from_numpy(w).requires_grad_()]
        y = st.sparse_conv2d(
            *leaves, active._map_arrays(torch.from_numpy), params, w_format=w_format
        )
        grad_y = normal(*y.shape, seed=1, dtype=dtype)
        y.backward(torch.from_numpy(grad_y))
        options = {"w_format": w_format}
        wide = [a.astype(np.float64) for a in (grad_y, x, w)]
        expected = sb.sparse_conv2d_grad(*wide, active, params, **options)
        sizes = sb.sparse_conv2d_grad(*map(np.abs, wide), active, params, **options)
        for leaf, e, size in zip(leaves, expected, sizes, strict=False):
            terms = X[..., 0].size + w.size
            assert_close(to_numpy(leaf.grad), e, terms=terms, dtype=dtype, magnitude=size)
