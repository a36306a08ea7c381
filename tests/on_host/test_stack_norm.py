"""The batch norm of a stack in training by its CUDA kernels, on the shim, and its gradient.

Statistics are compared within the bound of their sums, what follows from them bit by bit.
"""

import numpy as np
import pytest

import host_cuda
from sbnet_cupy.block_sparse.stack import stack_batch_norm as norms
from sbnet_cupy.block_sparse.stack import stack_batch_norm_grad as gradients
from sbnet_cupy.block_sparse.stack.stack_batch_norm import stack_batch_norm
from sbnet_cupy.block_sparse.stack.stack_batch_norm_grad import stack_batch_norm_grad
from sbnet_cupy.block_sparse.stack.stack_norm_launch import StackNorm, prepare_stack_running
from sbnet_cupy.core import launch as kernels
from support import stack_cases
from support.assertions import assert_close
from support.exhaustive import thinned_pairs
from support.fused_on_host import RESIDENT
from support.host_memory import Memory
from support.stack_norm_cases import DTYPES, check

SIZES = [
    # channels, block, image, spare rows
    (8, (8, 8), (29, 20), 2), (3, (4, 2), (13, 9), 1), (72, (1, 1), (7, 5), 0),
    (40, (4, 4), (16, 24), 3), (64, (16, 16), (48, 48), 0),
]  # fmt: skip
ACTIVATIONS = [None, "relu", "silu", "gelu"]
TABLES = ["whole", "checked", "corrupt"]


@pytest.fixture(params=[pytest.param(84, marks=pytest.mark.exhaustive), 1], ids=["large", "tiny"])
def on_shim(request, monkeypatch, require):
    """Send launches to the shim, as on a GPU of many multiprocessors or one."""
    require("g++")
    memory, launched = Memory(0xFF), []

    def prepare(stem, kernel, template, grid, block, pointers, scalars, shared=0,
                persistent=False, dependent=False):  # fmt: skip
        grid = min(grid, RESIDENT * request.param) if persistent else grid

        def run(*arrays):
            assert len(arrays) == pointers
            launched.append(kernel)
            host_cuda.launch(stem, kernel, template, grid, block, (*arrays, *scalars), shared)

        return run

    monkeypatch.setattr(kernels, "prepare", prepare)
    for module in (norms, gradients):
        monkeypatch.setattr(module, "is_cupy", lambda array: True)
        monkeypatch.setattr(module, "empty", memory.poisoned)
        monkeypatch.setattr(module, "keep_if_capturing", lambda array: None)
    yield launched
    memory.check()


def by_numpy(function, *arguments, **options):
    """Call with the NumPy bodies."""
    with pytest.MonkeyPatch.context() as back:
        for module in (norms, gradients):
            back.setattr(module, "is_cupy", lambda array: False)
        return function(*arguments, **options)


@pytest.mark.parametrize(
    "dtype, sizes, kind, activation",
    thinned_pairs(4, DTYPES, SIZES, TABLES, ACTIVATIONS, sanitized=10),
    ids=str,
)
def test_norm_and_gradient(on_shim, monkeypatch, dtype, sizes, kind, activation):
    parameters = dtype if dtype.itemsize == 8 or activation == "silu" else np.float32
    parameters = None if activation == "gelu" and sizes[0] == 8 else parameters
    whole = kind == "whole" and all(n % b == 0 for n, b in zip(sizes[2], sizes[1], strict=True))
    described = norms.describe_norm
    for module in (norms, gradients):
        monkeypatch.setattr(
            module, "describe_norm", lambda x, table: described(x, table)._replace(whole=whole)
        )
    check(stack_batch_norm, stack_batch_norm_grad, by_numpy, dtype, sizes, activation, parameters,
          corrupt=kind == "corrupt")  # fmt: skip
    assert on_shim == [
        "stack_norm_moments", "stack_norm_finish", "stack_norm_apply",
        "stack_norm_grad_sums", "stack_norm_grad_finish", "stack_norm_grad_apply",
    ]  # fmt: skip


@pytest.mark.parametrize("parameters", [True, False], ids=["affine", "plain"])
@pytest.mark.parametrize("element, dtype", [("Half", "f2"), ("float", "f4"), ("double", "f8")])
def test_running_statistics(on_shim, element, dtype, parameters):
    channels, eps = 37, 1e-3
    norm = StackNorm(element, np.dtype(dtype).itemsize, 5, 1, (1, 1), channels, (1, 1), (1, 1))
    wide = np.float64 if dtype == "f8" else np.float32
    given = np.random.default_rng(0).uniform(0.5, 1.5, (4, channels)).astype(wide)
    before, found = given.copy(), np.full(5 * channels + 1, np.nan, wide)
    own = (given[2], given[3]) if parameters else (None, None)
    find = prepare_stack_running(norm, norm.compute, eps)
    find(given[0], given[1], *own, found, kernels.Number(0))
    expected = norms.statistics_of(given[0], given[1], *own, eps)
    assert_close(found[:-1], expected, terms=2, dtype=wide, magnitude=abs(expected))
    assert found[-1] == 0 and (given == before).all() and on_shim == ["stack_norm_finish"]


def test_no_pixel_leaves_running_statistics_as_they_are(on_shim):
    blocks = stack_cases.Blocks(np.zeros((1, 2, 2), bool), (2, 2), (4, 4), 2)
    table = blocks.table()
    running = np.ones((2, 4), np.float32)
    x = np.full((2, 2, 2, 4), np.nan, np.float32)
    y, statistics = norms.stack_batch_norm(
        x, table, eps=0.25, running_mean=running[0], running_var=running[1]
    )
    assert not y.any() and statistics[-1] == 0 and (running == 1).all()
    found = gradients.stack_batch_norm_grad(x, x, table, statistics)
    assert not any(t.any() for t in found)


def test_a_large_mean_costs_no_digits_of_the_variance(on_shim):
    """The error grows with mean / deviation, that of a sum of squares with its square: 10^8."""
    rng = np.random.default_rng(0)
    blocks = stack_cases.Blocks(np.ones((1, 4, 4), bool), (8, 8), (32, 32))
    table = blocks.table()
    x = (rng.standard_normal((16, 8, 8, 4)) + 1e4).astype(np.float32)
    _, statistics = norms.stack_batch_norm(x, table)
    mean, variance = statistics[:8].reshape(2, -1)
    wide = x.reshape(-1, 4).astype(np.float64)
    assert_close(mean, wide.mean(0), terms=2, dtype=np.float32, magnitude=wide.mean(0))
    size = wide.var(0) + abs(wide.mean(0)) * wide.std(0)
    assert_close(variance, wide.var(0), terms=8, dtype=np.float32, magnitude=size)
