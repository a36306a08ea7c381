"""mask_conv2d on tensors: the package's results, and gradients."""

import functools

import numpy as np
import pytest

import sbnet_cupy as sb
from support.adapter_cases import MASKED, check_mask_conv2d
from support.torch_cases import draw


@pytest.mark.parametrize("options", MASKED, ids=str)
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16], ids=str)
def test_mask_conv2d(st, torch, options, dtype):
    call = functools.partial(st.mask_conv2d, **options)
    check_mask_conv2d(call, torch.from_numpy, options, dtype)


def test_gradients(st, torch):
    x, w = (draw(torch, *s, dtype=torch.float64) for s in ((2, 5, 4, 3), (3, 3, 3, 2)))
    mask = draw(torch, 2, 5, 4, seed=3, dtype=torch.float64)
    given = [t.requires_grad_() for t in (x, w, mask)]
    call = functools.partial(st.mask_conv2d, strides=2)
    assert torch.autograd.gradcheck(call, given)
    assert torch.autograd.gradgradcheck(call, [x, w, mask.detach()])
    y = st.mask_conv2d(x[:, :2], w, mask[:, :2], 1, "VALID")
    assert y.shape == (2, 0, 2, 2) and st.mask_conv2d(x[:0], w, mask[:0]).shape == (0, 5, 4, 2)


def test_images_of_no_channels(st, torch):
    x, w = torch.ones(1, 6, 5, 0).requires_grad_(), torch.ones(3, 3, 0, 2).requires_grad_()
    y = st.mask_conv2d(x, w, torch.ones(1, 6, 5), strides=2)
    assert y.shape == (1, 3, 3, 2) and not y.any()
    y.sum().backward()
    assert x.grad.shape == x.shape and w.grad.shape == w.shape


def test_compiled_and_under_autocast(st, torch):
    x, w, mask = draw(torch, 1, 6, 6, 3), draw(torch, 3, 3, 3, 2), torch.eye(6)
    compiled = torch.compile(lambda *tensors: 2 * st.mask_conv2d(*tensors), backend="aot_eager")
    torch.testing.assert_close(compiled(x, w, mask), 2 * st.mask_conv2d(x, w, mask))
    with torch.autocast("cpu", torch.bfloat16):
        assert st.mask_conv2d(x, w, mask).dtype == torch.bfloat16


def test_bad_calls(st, torch):
    x, w, mask = torch.ones(1, 6, 6, 3), torch.ones(3, 3, 3, 2), torch.ones(1, 6, 6)
    for error, word, call in [
        (sb.ShapeError, "mask must have shape", lambda: st.mask_conv2d(x, w, mask[:, 1:])),
        (sb.DTypeError, "mask must be a torch.Tensor", lambda: st.mask_conv2d(x, w, None)),
        (sb.DTypeError, "w must have the dtype", lambda: st.mask_conv2d(x, w.double(), mask)),
        (sb.ShapeError, "w must have shape", lambda: st.mask_conv2d(x, w[:, :, 1:], mask)),
        (ValueError, "precision must be", lambda: st.mask_conv2d(x, w, mask, precision="half")),
    ]:
        with pytest.raises(error, match=word):
            call()
