"""The batch norm of a stack in training by its CUDA kernels, on the shim, and its gradient.

Statistics are compared within the bound of their sums, what follows from them bit by bit.
"""

import numpy as np
import pytest

import host_cuda
from sbnet_cupy.block_sparse.stack import stack_batch_norm as norms
from sbnet_cupy.block_sparse.stack import stack_batch_norm_grad as gradients
from sbnet_cupy.core import launch as kernels
from sbnet_cupy.core.arrays import compute_dtype
from support import stack_cases
from support.assertions import assert_close, assert_same
from support.exhaustive import thinned_pairs
from support.fused_on_host import RESIDENT
from support.host_memory import Memory
from support.strategies import BFLOAT16

DTYPES = [np.dtype("f2"), BFLOAT16, np.dtype("f4"), np.dtype("f8")]
SIZES = [
    # channels, block, image, spare rows
    (8, (8, 8), (29, 20), 2), (3, (4, 2), (13, 9), 1), (72, (1, 1), (7, 5), 0),
    (40, (4, 4), (16, 24), 3), (64, (16, 16), (48, 48), 0),
]  # fmt: skip
ACTIVATIONS = [None, "relu", "silu", "gelu"]
TABLES = ["whole", "checked", "corrupt"]


@pytest.fixture(params=[84, 1], ids=["large", "tiny"])
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


def drawn(dtype, sizes, kind):
    """Return blocks, their table, and stacks of x, a residual and a gradient."""
    channels, block, size, spare = sizes
    rng = np.random.default_rng(3)
    shape = (2, *(-(-n // b) for n, b in zip(size, block, strict=True)))
    blocks = stack_cases.Blocks(rng.random(shape) < 0.7, block, size, spare)
    table = blocks.table()
    stacks = []
    for away in (5.0, 0.0, 0.0):
        images = blocks.images(table, channels, rng) + away
        stacks.append(blocks.stack(images.astype(dtype), table))
    if kind == "corrupt":
        table.active_block_indices[1] = 2, 0, 0
    return table, stacks, rng


def by_numpy(function, *arguments, **options):
    """Call with the NumPy bodies."""
    with pytest.MonkeyPatch.context() as back:
        for module in (norms, gradients):
            back.setattr(module, "is_cupy", lambda array: False)
        return function(*arguments, **options)


def check(dtype, sizes, kind, activation, parameters, launched, monkeypatch):
    """Compare the kernels with the NumPy bodies."""
    whole = kind == "whole" and all(n % b == 0 for n, b in zip(sizes[2], sizes[1], strict=True))
    described = norms.describe_norm
    for module in (norms, gradients):
        monkeypatch.setattr(
            module, "describe_norm", lambda x, table: described(x, table)._replace(whole=whole)
        )
    table, (x, residual, grad), rng = drawn(dtype, sizes, kind)
    residual = residual if activation != "gelu" else None
    wide, channels = compute_dtype(dtype), sizes[0]
    kept = np.dtype(parameters or wide)
    weight, bias, mean, variance = rng.uniform(0.5, 1.5, (4, channels)).astype(kept)
    if parameters is None:
        weight = bias = mean = variance = None
    running = [None if mean is None else [t.copy() for t in (mean, variance)] for _ in range(2)]
    options = {"residual": residual, "activation": activation, "eps": 1e-3, "momentum": 0.25}
    results = []
    for call, own in zip((by_numpy, lambda f, *a, **k: f(*a, **k)), running, strict=True):
        names = {} if own is None else dict(zip(("running_mean", "running_var"), own, strict=True))
        y = call(norms.stack_batch_norm, x, table, weight, bias, **options, **names)
        results.append(y)
    assert launched == ["stack_norm_moments", "stack_norm_finish", "stack_norm_apply"]
    (_, expected), (y, statistics) = results
    number = expected[-1]
    assert statistics[-1] == number
    pixels = norms.pixels_inside(x, table)
    values = np.where(pixels, x.astype(np.float64), 0)
    # A pixel's difference from another is rounded, then its square, and some sums of a thread.
    terms, rows = 64, expected[:-1].astype(np.float64).reshape(5, -1)
    largest = abs(values).max((0, 1, 2)) + 1
    relative = [largest, (2 * largest) ** 2]
    for row, size in enumerate(relative):
        assert_close(statistics[:-1].reshape(5, -1)[row], rows[row], terms=terms, dtype=wide,
                     magnitude=size)  # fmt: skip
    # What follows from them, of the kernel's own numbers.
    found = statistics[:-1].astype(np.float64).reshape(5, -1)
    scale = (1 if weight is None else weight.astype(np.float64)) / np.sqrt(found[1] + 1e-3)
    assert_close(found[3], scale, terms=8, dtype=wide, magnitude=scale)
    shift = (0 if bias is None else bias.astype(np.float64)) - found[0] * scale
    assert_close(found[4], shift, terms=8, dtype=wide, magnitude=abs(found[0] * scale) + 2)
    if mean is not None:
        after = [0.75 * mean.astype(np.float64) + 0.25 * found[0],
                 0.75 * variance.astype(np.float64) + 0.25 * found[1] * number / max(number - 1, 1)]
        for actual, value in zip(running[1], after, strict=True):
            assert_close(actual, value, terms=8, dtype=wide, magnitude=abs(value) + 1)
    t = norms.before_activation(x, statistics, residual)
    at = abs(np.where(pixels, t, 0)).astype(np.float64) + 1
    t = np.where(pixels, norms.apply_activation(t.copy(), activation), wide.type(0))
    if activation in (None, "relu"):
        assert_same(y, t.astype(dtype), signed_zero=False)
    else:
        assert_close(y, t.astype(np.float64), terms=32, dtype=wide, magnitude=at)
    # Gradients of the kernel's statistics.
    del options["eps"], options["momentum"]
    launched.clear()
    actual = gradients.stack_batch_norm_grad(grad, x, table, statistics, **options, dtype=kept)
    grad, x, options["residual"] = (
        t if t is None else t.astype(wide) for t in (grad, x, residual)
    )
    expected = by_numpy(gradients.stack_batch_norm_grad, grad, x, table, statistics, **options)
    assert launched == ["stack_norm_grad_sums", "stack_norm_grad_finish", "stack_norm_grad_apply"]
    g = abs(np.where(pixels, grad.astype(np.float64), 0)) * 2
    hat = (abs(values) + abs(found[0])) * found[2]
    sums, products = (s.sum((0, 1, 2)) for s in (g, g * hat))
    count = max(number, 1)
    bounds = [
        abs(found[3]) * (g + sums / count + hat * products / count), products, sums, g
    ]  # fmt: skip
    for name, value, like, size in zip(actual._fields, actual, expected, bounds, strict=True):
        if name == "residual" and activation in (None, "relu"):
            assert_same(value, like.astype(dtype), signed_zero=False)
        else:
            assert_close(value, like.astype(np.float64), terms=64, dtype=wide, magnitude=size)
        if value.ndim == 4:
            assert not np.where(pixels, 0, value.astype(np.float64)).any()


@pytest.mark.parametrize(
    "dtype, sizes, kind, activation",
    thinned_pairs(10, DTYPES, SIZES, TABLES, ACTIVATIONS),
    ids=str,
)
def test_norm_and_gradient(on_shim, monkeypatch, dtype, sizes, kind, activation):
    parameters = dtype if dtype.itemsize == 8 or activation == "silu" else np.float32
    parameters = None if activation == "gelu" and sizes[0] == 8 else parameters
    check(dtype, sizes, kind, activation, parameters, on_shim, monkeypatch)


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
