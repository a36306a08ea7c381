"""stack_conv2d is the convolution of the rows below the count, whatever the others hold."""

import math

import numpy as np
import pytest

from sbnet_cupy.block_sparse.conv import stack_conv
from sbnet_cupy.block_sparse.conv.stack_conv import stack_conv2d
from sbnet_cupy.dense.conv2d import conv2d
from support import conv_oracles as oracles
from support.assertions import assert_same, to_numpy
from support.strategies import FLOATS

COUNT = 5


def arrays(dtype, rows, size, channels, kernel):
    """A stack, of which rows past COUNT are NaN, a kernel, a count, scale and bias."""
    rng = np.random.default_rng(3)
    blocks = rng.standard_normal((rows, *size, channels[0])).astype(dtype)
    blocks[COUNT:] = np.nan
    w = rng.standard_normal((*kernel, *channels)) / math.sqrt(math.prod(kernel) * channels[0])
    tables = rng.uniform(0.5, 1.5, (2, channels[1])).astype(np.float32)
    return blocks, w.astype(dtype), np.array([COUNT], np.int32), *tables


@pytest.mark.parametrize("precision", [None, "tf32"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "size, channels, kernel, strides",
    [((18, 18), (24, 24), (3, 3), (1, 1)), ((7, 9), (5, 3), (1, 1), (1, 1)),
     ((9, 8), (32, 16), (3, 3), (2, 2)), ((1, 1), (8, 64), (1, 1), (1, 1))],
)  # fmt: skip
def test_equals_the_convolution(xp, dtype, size, channels, kernel, strides, precision):
    blocks, w, count, scale, bias = arrays(dtype, 7, size, channels, kernel)
    epsilon = oracles.epsilon_of_sums(dtype, tf32=precision == "tf32")
    plain = oracles.bounded_conv2d(
        oracles.exact(blocks[:COUNT]), w, strides, "VALID", epsilon=epsilon
    )
    options = {"strides": strides, "precision": precision}
    given = [xp.asarray(array) for array in (blocks, w, count)]
    found = to_numpy(stack_conv2d(*given, **options)[:COUNT])
    oracles.assert_within(found, oracles.bounded_round(plain, dtype))

    tables = {"scale": xp.asarray(scale), "bias": xp.asarray(bias)}
    found = to_numpy(stack_conv2d(*given, **tables, activation="relu", **options)[:COUNT])
    mapped = oracles.bounded_affine(plain, scale, bias, "relu", epsilon=epsilon)
    oracles.assert_within(found, oracles.bounded_round(mapped, dtype))


def test_on_numpy_it_is_conv2d():
    blocks, w, count, scale, bias = arrays(np.float32, COUNT, (6, 7), (4, 3), (3, 3))
    found = stack_conv2d(blocks, w, count, scale=scale, bias=bias)
    assert_same(found, conv2d(blocks, w, padding="VALID", scale=scale, bias=bias))


@pytest.mark.gpu
def test_the_list_of_blocks_grows_and_is_kept(require):
    """Stacks of more rows, on several streams and in a graph that is replayed."""
    cupy = require("cupy")
    require("gpu")
    w = cupy.ones((1, 1, 8, 8), np.float16)
    stack_conv._NUMBERS.clear()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    results, given = [], []
    for rows in (3, 300, 200, 1000):
        blocks = cupy.full((rows, 2, 2, 8), 0.5, np.float16)
        count = cupy.array([rows], np.int32)
        given.append((blocks, count))  # other streams read them
        cupy.cuda.Device().synchronize()
        for stream in streams:
            with stream:
                results.append(stack_conv2d(blocks, w, count))
    cupy.cuda.Device().synchronize()
    assert all(bool((result == 4).all()) for result in results)
    assert len(stack_conv._NUMBERS[0]) == 1024
    with streams[0]:
        streams[0].begin_capture()
        result = stack_conv2d(blocks, w, count)
        graph = streams[0].end_capture()
        result.fill(0)
        blocks.fill(0.25)
        graph.launch(streams[0])
        streams[0].synchronize()
    assert bool((result == 2).all())
