"""Blocks whose result is one column wide: oneDNN gets these convolutions wrong, the layers do not.

With one input channel, a step along the width and none along the height, whatever the framework.
"""

import numpy as np
import pytest

import sbnet_cupy as sb
from support.adapter_cases import normal
from support.assertions import assert_close, to_numpy

# Kernel, block and strides: a block as wide as the kernel, and one with columns to spare.
CASES = [((3, 3), (7, 3), (1, 2)), ((2, 2), (7, 2), (1, 3)), ((5, 4), (9, 4), (1, 5))]


def case(kernel, block, strides, channels=1, channels_out=2):
    """Return an image, a kernel, its block parameters and all blocks."""
    x = normal(3, 14, 13, channels, dtype=np.float32)
    w = normal(*kernel, channels, channels_out, seed=1, dtype=np.float32)
    params = sb.calc_block_params(x.shape, block, kernel, strides)
    grid = {"bsize": params.bsize, "boffset": params.boffset, "bstride": params.bstride}
    return x, w, params, sb.reduce_mask(np.ones(x.shape[:3], bool), params.bcount, **grid)


def convolutions(*arrays, strides):
    """Return the dense result in float64, and the sum of its products' absolute values."""
    wide = [a.astype(np.float64) for a in arrays]
    return [sb.conv2d(*given, strides=strides) for given in (wide, [np.abs(a) for a in wide])]


@pytest.mark.parametrize(("kernel", "block", "strides"), CASES)
def test_torch(torch, st, kernel, block, strides):
    x, w, params, active = case(kernel, block, strides)
    tensors = [torch.from_numpy(a).requires_grad_() for a in (x, w)]
    active = active._map_arrays(torch.from_numpy)
    expected, size = convolutions(x, w, strides=strides)
    y = st.sparse_conv2d(*tensors, active, params, strides=strides, method="gather")
    assert_close(to_numpy(y.detach()), expected, terms=w.size, dtype=np.float32, magnitude=size)


@pytest.mark.parametrize(("kernel", "block", "strides"), CASES)
def test_torch_gradients(torch, st, kernel, block, strides):
    """Also those of a smooth activation, which convolves again to differentiate it."""
    x, w, params, active = case(kernel, block, strides)
    active = active._map_arrays(torch.from_numpy)
    grads = []
    for dtype in (torch.float32, torch.float64):
        tensors = [torch.from_numpy(a).to(dtype).requires_grad_() for a in (x, w)]
        y = st.sparse_conv2d(*tensors, active, params, strides=strides, activation="silu")
        grads.append([to_numpy(g) for g in torch.autograd.grad(y.square().sum(), tensors)])
    for narrow, wide in zip(*grads, strict=True):
        # Of sums of at most 300 squares each, of numbers that are sums of 20 products.
        assert_close(narrow, wide, terms=400, dtype=np.float32, magnitude=np.abs(wide).max() * 4)


@pytest.mark.parametrize("strides", [(1, 2), (2, 2)])
@pytest.mark.parametrize("kernel", [(1, 1), (2, 1)])
@pytest.mark.parametrize("width", [1, 2])
def test_torch_gradients_in_bfloat16(torch, st, width, kernel, strides):
    """oneDNN reads the pixel past the end of the images, too: that of the kernel was NaN."""
    from sbnet_cupy.torch._convolve import convolve_backward

    x = normal(3, 9, width, 1, dtype=np.float32)
    w, grad = normal(2, 1, *kernel, seed=1), normal(3, (9 - kernel[0]) // strides[0] + 1, 1, 2)
    given = [torch.from_numpy(a).bfloat16() for a in (grad, x, w)]
    memory = torch.full((given[1].numel() + 1000,), torch.nan).bfloat16()
    memory[:-1000] = given[1].flatten()
    given[1] = memory[:-1000].view(given[1].shape)
    options = [*strides], None, True, True
    narrow = convolve_backward(*given, *options)
    wide = convolve_backward(*map(torch.Tensor.double, given), *options)
    for actual, exact in zip(narrow, wide, strict=True):
        assert actual.shape == exact.shape
        assert (actual.double() - exact).abs().max() <= 2.0**-6 * exact.abs().max()


@pytest.mark.parametrize(("kernel", "block", "strides"), CASES)
def test_tensorflow(sbt, call_tensors, tf, kernel, block, strides):
    x, w, params, active = case(kernel, block, strides)
    table = active._map_arrays(tf.constant)
    expected, size = convolutions(x, w, strides=strides)

    def convolve(x):
        return sbt.sparse_conv2d(x, tf.constant(w), tuple(table), params, strides=strides)

    y = to_numpy(call_tensors(convolve)(x))
    assert_close(y, expected, terms=w.size, dtype=np.float32, magnitude=size)


def unit_case(dtype):
    """Return what a unit with one channel in the middle takes, on blocks of 7x3 with strides."""
    x = normal(2, 14, 12, 4, dtype=dtype)
    weights = sb.BottleneckWeights.random(4, 1, 3, dtype=np.dtype(dtype).name)
    params = sb.calc_block_params_res_block(x.shape, (7, 3), [1, 3, 1], (1, 2))
    grid = {"bsize": params.bsize, "boffset": params.boffset, "bstride": params.bstride}
    active = sb.reduce_mask(np.ones(x.shape[:3], bool), params.bcount, **grid)
    return x, weights, normal(1, 1, 4, 3, seed=2, dtype=dtype), active, params


def assert_gradients_close(narrow, wide):
    """Assert what float32 gives of float64; what oneDNN gets wrong is wrong by the largest."""
    for a, e in zip(narrow, wide, strict=True):
        # Three sums of at most 40 products, then one over 200 pixels, from numbers that differ by
        # the rounding of float32.
        assert_close(a, e, terms=1000, dtype=np.float32, magnitude=np.abs(e).max() + 1)


def test_gradient_of_a_torch_unit(torch, st):
    grads = []
    for dtype in (np.float32, np.float64):
        x, weights, project, active, params = unit_case(dtype)
        leaves = [torch.from_numpy(np.array(a)).requires_grad_() for a in (x, *weights._arrays())]
        y = st.sparse_res_block_bottleneck(
            leaves[0], sb.BottleneckWeights(*leaves[1:]), active._map_arrays(torch.from_numpy),
            params, strides=(1, 2), w_project=torch.from_numpy(project),
        )  # fmt: skip
        grads.append([to_numpy(g) for g in torch.autograd.grad(y.sum(), leaves)])
    assert_gradients_close(*grads)


def test_gradient_of_a_tensorflow_unit(tf, sbt):
    grads = []
    for dtype in (np.float32, np.float64):
        x, weights, project, active, params = unit_case(dtype)
        leaves = [tf.constant(a) for a in (x, *weights._arrays())]
        with tf.GradientTape() as tape:
            tape.watch(leaves)
            y = sbt.sparse_res_block_bottleneck(
                leaves[0], sb.BottleneckWeights(*leaves[1:]), active._map_arrays(tf.constant),
                params, strides=(1, 2), w_project=tf.constant(project),
            )  # fmt: skip
            total = tf.reduce_sum(y)
        grads.append([to_numpy(g) for g in tape.gradient(total, leaves)])
    assert_gradients_close(*grads)
