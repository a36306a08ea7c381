"""On a GPU: work goes to the caller's stream, and every op replays in a CUDA graph on new data."""

import threading

import numpy as np
import pytest

from sbnet_cupy import (
    calc_block_params,
    reduce_mask,
    sparse_conv2d,
    sparse_gather,
    sparse_scatter,
    sparse_scatter_var,
)
from sbnet_cupy.dense.cudnn import cudnn_available
from support import oracles
from support.assertions import assert_same

pytestmark = pytest.mark.gpu

GRID = {"bsize": (6, 5), "boffset": (-1, -1), "bstride": (4, 3)}
BCOUNT = (8, 11)
CAPACITY = 40


def data(seed):
    """A mask of a few pixels and an image, another for every seed."""
    rng = np.random.default_rng(seed)
    mask = rng.random((2, 32, 33)) < 0.004 * (1 + seed % 3)
    return mask, rng.standard_normal((2, 32, 33, 8)).astype(np.float32)


def expected(mask, x):
    count, rows = oracles.reduce_mask(mask, BCOUNT, **GRID, capacity=CAPACITY)
    table = (np.array([count], np.int32), rows)
    blocks = oracles.sparse_gather(x, *table, **GRID, transpose=True)
    added = oracles.sparse_scatter(blocks, *table, x, **GRID, transpose=True, add=True)
    return *table, blocks, added, oracles.sparse_scatter(blocks, *table, np.zeros_like(x), **GRID,
                                                         transpose=True)  # fmt: skip


def chain(mask, x, base):
    """Every op, nothing of which may wait for the host."""
    active = reduce_mask(mask, BCOUNT, **GRID, capacity=CAPACITY)
    blocks = sparse_gather(x, *active, **GRID, transpose=True)
    added = sparse_scatter(blocks, *active, x, **GRID, transpose=True, add=True, atomic=True)
    base[...] = 0
    written = sparse_scatter_var(blocks, *active, base, **GRID, transpose=True)
    return *active, blocks, added, written


def check(cupy, results, mask, x):
    for result, wanted in zip(results, expected(mask, x), strict=True):
        assert_same(result, cupy.asarray(wanted))


def test_every_op_is_captured_and_replays_on_new_data(cupy):
    mask, x = map(cupy.asarray, data(0))
    base = cupy.empty_like(x)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        chain(mask, x, base)  # compile, and fill the memory pool
        stream.begin_capture()
        results = chain(mask, x, base)
        graph = stream.end_capture()
    for seed in range(5):
        for array, new in zip((mask, x), data(seed), strict=True):
            array.set(new)
        cupy.cuda.runtime.deviceSynchronize()
        for _ in range(3):  # the same bits again on the same data
            graph.launch(stream)
            stream.synchronize()
            check(cupy, results, *data(seed))


def test_two_graphs_at_the_same_time_do_not_disturb_each_other(cupy):
    graphs = []
    for seed in (0, 1):
        mask, x = map(cupy.asarray, data(seed))
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            base = cupy.empty_like(x)
            chain(mask, x, base)
            stream.begin_capture()
            results = chain(mask, x, base)
            graphs.append((stream, stream.end_capture(), results, (mask, x, base)))
    cupy.cuda.runtime.deviceSynchronize()
    for _ in range(50):
        for stream, graph, *_ in graphs:
            graph.launch(stream)
    cupy.cuda.runtime.deviceSynchronize()
    for seed, (_, _, results, _) in enumerate(graphs):
        check(cupy, results, *data(seed))


def test_many_streams_at_the_same_time(cupy):
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(6)]
    inputs = [tuple(map(cupy.asarray, data(seed))) for seed in range(6)]
    cupy.cuda.runtime.deviceSynchronize()
    kept = []
    for _ in range(20):
        for stream, (mask, x) in zip(streams, inputs, strict=True):
            with stream:
                kept.append(chain(mask, x, cupy.empty_like(x)))
    cupy.cuda.runtime.deviceSynchronize()
    for i, results in enumerate(kept):
        check(cupy, results, *data(i % 6))


def test_work_follows_the_current_stream(cupy):
    """The input is late on a side stream: read on any other, it would still be zeros."""
    stream = cupy.cuda.Stream(non_blocking=True)
    x = cupy.zeros((2, 512, 512, 64), np.float32)
    rows, count = cupy.asarray([[0, 1, 1], [1, 0, 0]], np.int32), cupy.asarray([2], np.int32)
    slow = cupy.random.random((4096, 4096), np.float32)
    for value in range(1, 11):
        cupy.cuda.runtime.deviceSynchronize()
        with stream:
            for _ in range(3):
                slow = cupy.tanh(slow @ slow)
            x.fill(value)
            blocks = sparse_gather(x, count, rows, bsize=32)
            assert float(blocks.sum()) == value * 2 * 32 * 32 * 64


def test_a_thread_that_never_used_cuda_can_launch(cupy):
    """As the threads of autograd engines: nothing but the launch makes the context theirs."""
    x = cupy.arange(64, dtype=np.float32).reshape(1, 8, 8, 1)
    active = cupy.ones(1, np.int32), cupy.zeros((1, 3), np.int32)
    out, expected = (sparse_gather(x, *active, bsize=4) for _ in range(2))
    out.fill(0)
    cupy.cuda.Device().synchronize()
    thread = threading.Thread(target=lambda: sparse_gather(x, *active, bsize=4, out=out))
    thread.start()
    thread.join()
    assert_same(out, expected)


@pytest.mark.parametrize("method", ["gather", "auto"])
def test_what_a_captured_layer_allocates_is_not_given_out_again(cupy, method):
    """A replay would overwrite it; and what others write there would spoil the replay."""
    rng = np.random.default_rng(3)
    x = cupy.asarray(rng.standard_normal((1, 40, 40, 16)), np.float32)
    w = cupy.asarray(rng.standard_normal((3, 3, 16, 16)), np.float32)
    params = calc_block_params(x.shape, 10, (3, 3))
    active = reduce_mask(cupy.ones((1, 40, 40), bool), params.bcount, bsize=params.bsize_out)
    expected, y = (sparse_conv2d(x, w, active, params, method=method) for _ in range(2))
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.runtime.deviceSynchronize()
    if method == "gather" and not cudnn_available():
        with stream:
            stream.begin_capture()
            with pytest.raises(NotImplementedError, match=r"graph cannot hold .*\[cudnn\]"):
                sparse_conv2d(x, w, active, params, method=method, out=y)
            stream.end_capture()
        return
    with stream:
        stream.begin_capture()
        sparse_conv2d(x, w, active, params, method=method, out=y)
        graph = stream.end_capture()
        others = [cupy.full(size, 7, np.float32) for size in (6400, 12800, 25600, 40000) * 8]
        for _ in range(3):
            y.fill(0)
            graph.launch(stream)
            stream.synchronize()
            assert_same(y, expected)
            assert all(bool((other == 7).all()) for other in others)
