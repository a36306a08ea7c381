"""Which way a layer goes in JAX, and what a GPU would run, in our scratch."""

import contextlib
import functools
import importlib
import re

import numpy as np
import pytest

import sbnet_cupy as sb
from sbnet_cupy.core import launch as kernels
from sbnet_cupy.core import operator as core_operator
from support.adapter_cases import (
    CHANNELS,
    IMAGE,
    MASK,
    X,
    convolution,
    grid_of,
    hand_over,
    layer,
    normal,
    same,
    unit_layer,
    unit_weights,
)


def test_what_is_not_covered_says_so(sbj, jax):
    params, active = layer(2, bottleneck=True)
    pair = tuple(map(jax.numpy.asarray, active))
    weights = sb.BottleneckWeights.random(3, 4, xp=jax.numpy)
    project = jax.numpy.zeros((1, 1, 3, 3))
    unit = functools.partial(sbj.sparse_res_block_bottleneck, jax.numpy.asarray(X), weights, pair)
    with pytest.raises(NotImplementedError, match=r"method='fused' has no strides"):
        unit(params, strides=2, w_project=project, method="fused")
    params, active = layer(bottleneck=True)
    with pytest.raises(NotImplementedError, match=r"method='fused' has no projection"):
        unit(params, w_project=project, method="fused")
    same(unit(params, w_project=project), unit(params, w_project=project, method="gather"))


@pytest.fixture
def gpu_plans(monkeypatch):
    """Plans of a GPU that is not there; XLA computes on the CPU all the same."""
    from support.fused_on_host import AMPERE

    for name in ("conv.fused_conv", "bottleneck.fused_bottleneck"):
        module = importlib.import_module(f"sbnet_cupy.block_sparse.{name}")
        monkeypatch.setattr(module, "current_device", lambda: AMPERE)
    layers = importlib.import_module("sbnet_cupy.jax.layers")
    monkeypatch.setattr(layers, "computes_on_gpu", lambda x: True)
    operation = importlib.import_module("sbnet_cupy.jax._operation")
    monkeypatch.setattr(operation, "has_gpu", lambda: True)
    monkeypatch.setattr(operation._callbacks, "current_device", lambda: 0)
    monkeypatch.setattr(kernels, "prepare", lambda *launch, **sizes: None)  # until it is launched
    for name in ("gather_scatter.sparse_gather", "gather_scatter.sparse_scatter", "background"):
        module = importlib.import_module(f"sbnet_cupy.block_sparse.{name}")
        monkeypatch.setattr(module, "sm_count", lambda: AMPERE.multiprocessors)
        monkeypatch.setattr(module, "shared_bytes", lambda: AMPERE.shared_bytes, raising=False)
    monkeypatch.setattr(core_operator, "_PLANS", core_operator._Plans())
    return AMPERE


def test_without_a_kernel_it_says_why_while_tracing(sbj, jax, gpu_plans):
    params, active = unit_layer()
    pair, weights = tuple(map(jax.numpy.asarray, active)), unit_weights(np.float32)
    weights = weights._map_arrays(jax.numpy.asarray)
    unit = functools.partial(sbj.sparse_res_block_bottleneck, method="fused")
    with pytest.raises(NotImplementedError, match="IEEE float32; pass precision='tf32'"):
        jax.jit(unit)(jax.numpy.asarray(IMAGE), weights, pair, params)
    narrow = sb.BottleneckWeights.random(3, 4, xp=jax.numpy)
    params, active = layer(bottleneck=True)
    with pytest.raises(NotImplementedError, match="3 channels of float32"):
        jax.jit(functools.partial(unit, precision="tf32"))(
            jax.numpy.asarray(X), narrow, tuple(map(jax.numpy.asarray, active)), params
        )


def test_auto_asks_where_it_runs(sbj, jax, gpu_plans):
    """In a process with a GPU one program goes both ways: fused on it, gathered on a CPU."""
    with jax.default_device(jax.devices("cpu")[0]):
        params, active = layer()
        pair, x = tuple(map(jax.numpy.asarray, active)), jax.numpy.asarray(X)
        w = jax.numpy.asarray(normal(3, 3, 3, 4))

        def value_and_grad(method):
            def loss(w):
                return (convolution(sbj, x, w, pair, params, method=method) ** 2).sum()

            return jax.jit(jax.vmap(jax.value_and_grad(loss)))(jax.numpy.stack([w, 2 * w]))

        traced = jax.jit(functools.partial(convolution, sbj)).trace(x, w, pair, params)
        for platform, calls, convolutions in (("cuda", 1, 0), ("cpu", 2, 1)):
            program = traced.lower(lowering_platforms=(platform,)).as_text()
            assert len(re.findall(r"custom_call @xla_buffer_python", program)) == calls
            assert len(re.findall(r"stablehlo\.convolution", program)) == convolutions
        jax.tree_util.tree_map(same, value_and_grad("auto"), value_and_grad("gather"))


@pytest.mark.parametrize("dtype", [np.float16, np.float32], ids=str)
@pytest.mark.parametrize("name", ["conv", "unit"])
def test_the_cuda_kernels_inside_jit(sbj, jax, require, gpu_plans, monkeypatch, name, dtype):
    """What a GPU would run, with weights packed in our scratch: exact for whole numbers."""
    require("g++")
    import host_cuda
    from support.fused_on_host import CONV, UNIT
    from support.host_memory import Memory

    hosted = CONV if name == "conv" else UNIT
    callbacks, pieces = importlib.import_module("sbnet_cupy.jax._callbacks"), []

    @contextlib.contextmanager
    def allocating_from(scratch):
        """CuPy's allocator takes pieces of the scratch: so does NumPy's here."""
        left = [scratch]

        def empty(shape, dtype, like=None):
            size = np.prod(shape, dtype=int) * np.dtype(dtype).itemsize
            assert size <= left[0].nbytes
            pieces.append(left[0][:size])
            left[0] = left[0][-(-size // 256) * 256 :]
            return pieces[-1].view(dtype).reshape(shape)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(importlib.import_module("sbnet_cupy.core.packed"), "empty", empty)
            yield
        assert not left[0].nbytes  # what was asked for is what is needed

    monkeypatch.setattr(callbacks, "allocating_from", allocating_from)
    rng = np.random.default_rng(4)
    x = rng.integers(-3, 4, IMAGE.shape).astype(dtype)
    if name == "conv":
        params = sb.calc_block_params(x.shape, 5, 3)
        w = rng.integers(-1, 2, (3, 3, CHANNELS, 8)).astype(dtype)
        call = functools.partial(convolution, method="fused", precision="tf32")
    else:
        params, w = unit_layer()[0], whole_weights(rng, dtype)

        def call(module, *arrays):
            options = {"precision": "tf32", "method": "fused"}
            return module.sparse_res_block_bottleneck(*arrays, **options)

    active = sb.reduce_mask(MASK, params.bcount, capacity=30, **grid_of(params))
    given = x, w, tuple(active), params
    expected = call(sb, *given)
    with jax.default_device(jax.devices("cpu")[0]):
        arrays = hand_over(given, jax.numpy.asarray)
        with hosted.device(host_cuda.launch, gpu_plans, 4, Memory()) as launched:
            compiled = jax.jit(functools.partial(call, sbj))
            for _ in range(2):
                same(compiled(*arrays).block_until_ready(), expected)
    assert len(launched) == 4 and len({*launched}) == 2  # each time packed, each time computed
    assert len(pieces) == (6 if (name, dtype) == ("unit", np.float16) else 2)  # with two tables


def whole_weights(rng, dtype):
    """Weights of which all sums are whole and small."""
    shapes = (1, 1, CHANNELS, 8), (3, 3, 8, 8), (1, 1, 8, CHANNELS)
    kernels = [rng.integers(-1, 2, s) * (rng.random(s) < 0.1) for s in shapes]
    tables = [rng.choice(values, c) for c in (CHANNELS, 8, 8) for values in ((-1, 1), (-1, 0, 1))]
    return sb.BottleneckWeights(*(a.astype(dtype) for a in (*kernels, *tables)))
