"""Training steps at sites in CUDA graphs, whose branches give the bits of eager calls."""

import numpy as np
import pytest

import sbnet_cupy as sb
from support.assertions import assert_same, to_numpy
from support.torch_cases import on_device

ROUNDS = 20  # replays, in which a race would show


def rows_of(seed=0):
    """Return distinct rows of a grid in three dimensions."""
    rng = np.random.default_rng(seed)
    rows = np.unique(rng.integers(0, (1, 40, 40, 12), (6000, 4)), axis=0).astype(np.int32)
    return rng.permutation(rows)


def step(st, torch, rows, features, weights, capacities):
    """Return the gradients of a small U-Net; that of its skip is columns of a wider tensor."""
    first, down, up, last, last_bias, bias = weights
    x = st.sparse_tensor(
        features, rows, spatial_shape=(40, 40, 12), batch_size=1, capacity=capacities[0]
    )
    x = st.submanifold_conv(x, first, bias=bias, activation="relu")
    x = st.submanifold_conv(x, last, bias=last_bias, residual=x, activation="relu")
    y = st.strided_conv(x, down, stride=2, bias=bias, activation="relu", capacity=capacities[1])
    y = st.inverse_conv(y, up, onto=x, bias=bias, activation="relu")
    joined = x.replace(torch.cat([x.features, y.features], 1).split(32, 1)[1])
    y = st.submanifold_conv(joined, last, bias=last_bias, activation="relu")
    loss = y.features.float().square().sum() / 1000 + x.features.float().sum() / 100
    return torch.autograd.grad(loss, weights)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
def test_a_training_step_has_the_bits_of_eager_calls(st, torch, require, name):
    on_device(require, torch, "cuda")
    dtype = getattr(torch, name)
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(shape, generator=generator).div(8).to("cuda", dtype)

    rows = torch.from_numpy(rows_of()).cuda()
    features = drawn(len(rows), 8)
    shapes = (3, 3, 3, 8, 32), (2, 2, 2, 32, 32), (2, 2, 2, 32, 32), (3, 3, 3, 32, 32), (32,), (32,)
    weights = [drawn(*shape).requires_grad_() for shape in shapes]
    call = (st, torch, rows, features, weights, (len(rows) + 50, len(rows)))
    expected = [t.clone() for t in step(*call)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(*call)
    for _ in range(ROUNDS):
        for t in found:
            t.fill_(float("nan"))
        graph.replay()
        for gradient, own in zip(found, expected, strict=True):
            assert torch.equal(gradient, own)


@pytest.mark.gpu
def test_gradients_of_cupy_arrays_have_the_bits_of_eager_calls(require):
    cupy = require("gpu")
    rng = np.random.default_rng(0)
    rows = cupy.asarray(rows_of())
    x = cupy.asarray(rng.standard_normal((len(rows), 48)).astype(np.float16))
    w = cupy.asarray(rng.standard_normal((3, 3, 3, 48, 64)).astype(np.float16) / 8)
    grad = cupy.asarray(rng.standard_normal((len(rows), 64)).astype(np.float16))
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        sites, _ = sb.coordinate_map(rows, spatial_shape=(40, 40, 12), batch_size=1)
        made = sb.kernel_map(sites, 3, onto=sites)
        expected = sb.site_conv_grad(grad, x, w, made)
        stream.begin_capture()
        found = sb.site_conv_grad(grad, x, w, made)
        graph = stream.end_capture()
        for _ in range(ROUNDS):
            for array in (found.features, found.w):
                array.fill(np.nan)
            graph.launch(stream)
            stream.synchronize()
            for name in ("features", "w"):
                assert_same(to_numpy(getattr(found, name)), to_numpy(getattr(expected, name)))
