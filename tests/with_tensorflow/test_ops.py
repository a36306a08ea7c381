"""reduce_mask, sparse_gather, sparse_scatter for TensorFlow: the package's bits; no abort."""

import functools

import numpy as np
import pytest

import sbnet_cupy as sb
from sbnet_cupy.core.operator import Operator
from support.adapter_cases import (
    BFLOAT16,
    COUNT,
    MASK,
    OPTIONS,
    PLAIN,
    ROWS,
    TWICE,
    X,
    image,
    same,
    stack,
)
from support.frameworks import TensorFlow

DTYPES = [np.float32, np.float16, BFLOAT16, np.float64]


@pytest.mark.parametrize("capacity", [None, 0, 1, 20])
@pytest.mark.parametrize("dtype", [np.float32, np.bool_, BFLOAT16, np.float64], ids=str)
def test_reduce_mask(sbt, call_tensors, dtype, capacity):
    grid = {"bsize": 3, "boffset": (-1, 0), "bstride": 2, "tol": 0.2, "avgpool": True}
    shapes = []

    def listed(mask):
        active = sbt.reduce_mask(mask, (4, 4), capacity=capacity, **grid)
        shapes.append(active.active_block_indices.shape.as_list())
        return active

    expected = sb.reduce_mask(MASK.astype(dtype), (4, 4), capacity=capacity, **grid)
    first = call_tensors(listed)(MASK[:, None].astype(dtype))  # channels first
    for f, e in zip(first, expected, strict=True):
        same(f, e)
    actual = call_tensors(listed)(MASK.astype(dtype))  # out of a graph too
    assert type(actual) is sb.ActiveBlocks and actual.grid[1:] == (4, 4)
    for a, e in zip(actual, expected, strict=True):
        same(a, e)
    assert shapes[0][1] == 3 and shapes[0][0] in (capacity, len(expected[1]))


@pytest.mark.parametrize("dtype", [*DTYPES, np.int8, "c8"], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_sparse_gather(sbt, call_tensors, options, dtype):
    shapes = []

    def gather(*arrays):
        blocks = sbt.sparse_gather(*arrays, **options)
        shapes.append(blocks.shape.as_list())
        return blocks

    arrays = image(options, dtype), COUNT, ROWS
    expected = sb.sparse_gather(*arrays, **options)
    same(call_tensors(gather)(*arrays), expected)
    assert shapes[0] == [6 if call_tensors.static else None, *expected.shape[1:]]


@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu"])
@pytest.mark.parametrize("options", OPTIONS[1:4], ids=str)
def test_fused_sparse_gather(sbt, call_tensors, options, activation):
    def gather(module, x, counts, rows, scale, shift):
        fused = {"scale": scale, "shift": shift, "activation": activation}
        return module.sparse_gather(x, counts, rows, **fused, **options)

    scale, shift = X[0, 0, 0].astype(BFLOAT16), X[0, 0, 1]
    arrays = image(options, BFLOAT16), COUNT, ROWS, scale, shift
    same(call_tensors(functools.partial(gather, sbt))(*arrays), gather(sb, *arrays))


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [ROWS, TWICE], ids=["once", "twice"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_sparse_scatter(sbt, call_tensors, options, rows, dtype, add):
    options = options | {"add": add, "atomic": True}
    arrays = stack(options_of_gather(options), dtype), COUNT, rows, image(options, dtype)
    actual = call_tensors(functools.partial(sbt.sparse_scatter, **options))(*arrays)
    same(actual, sb.sparse_scatter(*arrays, **options))


def options_of_gather(options):
    return {name: value for name, value in options.items() if name not in ("add", "atomic")}


def test_variables_are_read_and_not_written(tf, sbt):
    x = tf.Variable(X)
    table = tf.constant(COUNT), tf.constant(ROWS)
    blocks = sbt.sparse_gather(x, *table, **PLAIN)
    same(blocks, sb.sparse_gather(X, COUNT, ROWS, **PLAIN))
    sbt.sparse_scatter(blocks * 2, *table, x, **PLAIN)
    same(x.read_value(), X)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("dtype", [*DTYPES, np.int8], ids=str)
def test_no_byte_is_copied(tf, sbt, monkeypatch, dtype, graph):
    """What our code reads and writes is the memory of the caller's tensors and of the results."""
    seen, core, lib = {}, Operator.__call__, TensorFlow(tf)

    def watched(operator, arrays, options):
        blocks = core(operator, arrays, options)
        seen.update(x=arrays[0].ctypes.data, blocks=blocks.ctypes.data)
        return blocks

    monkeypatch.setattr(Operator, "__call__", watched)
    x, count, rows = map(tf.constant, (image(PLAIN, dtype), COUNT, ROWS))
    gather = functools.partial(sbt.sparse_gather, **PLAIN)
    blocks = (tf.function(gather) if graph else gather)(x, count, rows)
    assert seen == {"x": lib.address(x), "blocks": lib.address(blocks)}


def test_results_with_strides_become_tensors(tf):
    """Wherever their memory is: TensorFlow takes it over only where it is aligned."""
    from sbnet_cupy.core.libraries import TensorFlow

    whole = np.zeros(64, np.float32)
    start = -whole.ctypes.data % 64 // 4
    for first in (start, start + 1):
        piece = whole[first : first + 24]
        piece[:] = np.arange(24)
        for array in (piece.reshape(2, 3, 4), piece.reshape(2, 3, 4).T, piece[::2], piece[3]):
            array = np.asarray(array)
            np.testing.assert_array_equal(TensorFlow().leave(array, None).numpy(), array)


@pytest.mark.parametrize("graph", [False, True])
def test_memory_that_is_not_aligned_is_taken(tf, sbt, graph):
    """TensorFlow aborts when it is given such memory; in and out of here it never is."""
    whole = np.zeros(X.size + 64, np.float32)
    start = (-whole.ctypes.data % 64) // 4 + 1
    whole[start : start + X.size] = X.reshape(-1)
    x = tf.convert_to_tensor(whole[start : start + X.size].reshape(X.shape))
    piece = tf.constant(np.concatenate([X, X]))[1:3]  # a slice of a tensor's memory
    for value in (x, piece):
        gather = functools.partial(sbt.sparse_gather, bsize=1)
        for rows in (ROWS, ROWS[:1], ROWS[:0]):
            table = tf.constant(COUNT), tf.constant(rows)
            actual = (tf.function(gather) if graph else gather)(value, *table)
            same(actual, sb.sparse_gather(value.numpy(), COUNT, rows, bsize=1))
