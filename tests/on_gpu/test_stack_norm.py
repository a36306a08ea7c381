"""The batch norm of a stack in training, and its gradient, on a GPU."""

import numpy as np
import pytest

import sbnet_cupy as sb
from sbnet_cupy.block_sparse.stack.stack_batch_norm import Normalized, stack_batch_norm
from sbnet_cupy.block_sparse.stack.stack_batch_norm_grad import stack_batch_norm_grad
from support.assertions import assert_same, to_numpy
from support.stack_norm_cases import DTYPES, check
from support.strategies import BFLOAT16

pytestmark = pytest.mark.gpu

SIZES = [
    # channels, block, image, spare rows
    (64, (16, 16), (250, 201), 5), (512, (2, 2), (61, 84), 0), (24, (4, 4), (100, 81), 3),
    (3, (8, 8), (64, 64), 0), (1030, (1, 1), (20, 31), 2),
]  # fmt: skip


def twice_on_gpu(function, arrays, options):
    """Call with CuPy arrays, twice; return the results, of the same bits."""
    import cupy

    results = []
    for _ in range(2):
        given = {
            name: cupy.asarray(v) if isinstance(v, np.ndarray) else v
            for name, v in options.items()
        }
        moved = [
            sb.BlockTable(*map(cupy.asarray, a._arrays()), a.block_size, a.image_size)
            if isinstance(a, sb.BlockTable) else a if a is None else cupy.asarray(a)
            for a in arrays
        ]  # fmt: skip
        found = [to_numpy(t) for t in function(*moved, **given)]
        results.append((found, given))
    (first, given), (second, _) = results
    for a, b in zip(first, second, strict=True):
        assert_same(a, b)
    for name in ("running_mean", "running_var"):
        if options.get(name) is not None:
            options[name][...] = to_numpy(given[name])
    return first


def norm(*arrays, **options):
    """Normalize on the GPU."""
    return Normalized(*twice_on_gpu(stack_batch_norm, arrays, options))


def gradient(*arrays, **options):
    """Differentiate on the GPU."""
    from sbnet_cupy.block_sparse.stack.stack_batch_norm_grad import NormGradients

    return NormGradients(*twice_on_gpu(stack_batch_norm_grad, arrays, options))


def by_numpy(function, *arrays, **options):
    """Call with NumPy arrays."""
    return function(*arrays, **options)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_and_gradient(require, dtype, activation, sizes):
    require("gpu")
    parameters = dtype if dtype.itemsize == 8 or activation == "silu" else np.float32
    parameters = None if activation == "gelu" and sizes[0] == 24 else parameters
    check(norm, gradient, by_numpy, dtype, sizes, activation, parameters)


def test_small_for_checkers(require):
    """What compute-sanitizer runs, which is slow."""
    require("gpu")
    sizes = (64, (4, 4), (16, 18), 1)
    check(norm, gradient, by_numpy, BFLOAT16, sizes, "relu", np.float32)
