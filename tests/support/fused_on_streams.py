"""The fused ops on a GPU's streams and in its graphs: what holds for both alike.

``op`` is the function, ``case`` a call of it with packed weights.
"""

from dataclasses import replace

import numpy as np
import pytest

from support.assertions import assert_same


def check_the_same_bits(cupy, op, case):
    """On every run."""
    positional, keywords = case.arguments(case.arrays(whole=False), cupy.asarray)
    first = op(*positional, **keywords)
    for _ in range(100):
        assert_same(op(*positional, **keywords), first)


def check_replays(cupy, op, case, plain_of, kernel_of):
    """A graph follows new masks and refreshed weights.

    ``plain_of`` returns what was packed, ``kernel_of`` an array of it whose last axis is the
    result's channels.
    """
    (x, packed, counts, rows), keywords = case.arguments(case.arrays(), cupy.asarray)
    plain, kernel = plain_of(packed), kernel_of(packed)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.runtime.deviceSynchronize()
    with stream:
        op(x, packed, counts, rows, **keywords)
        op(x, plain, counts, rows, **keywords)
        stream.begin_capture()
        results = (
            op(x, packed, counts, rows, **keywords),
            op(x, plain, counts, rows, **keywords),  # packs in the graph
        )
        graph = stream.end_capture()
    rng = np.random.default_rng(0)
    for step in range(6):
        new = rng.permutation(rows.get())
        rows.set(new)
        counts.set(np.array([rng.integers(0, len(new))], np.int32))
        if step % 2:
            permuted = kernel.get()[..., rng.permutation(kernel.shape[-1])]
            kernel.set(np.ascontiguousarray(-permuted))
            packed.refresh()
        cupy.cuda.runtime.deviceSynchronize()
        expected = op(x.get(), _on_host(plain), counts.get(), rows.get(), **keywords)
        for _ in range(5):
            graph.launch(stream)
            stream.synchronize()
            for y in results:
                assert_same(y, cupy.asarray(expected), signed_zero=False)


def _on_host(weights):
    """A kernel, or BottleneckWeights, as NumPy arrays."""
    if hasattr(weights, "get"):
        return weights.get()
    return type(weights)(*(array.get() for array in weights._arrays()))


def check_capture_needs_packed_weights(cupy, op, case):
    """A capture that would have to pack them raises instead."""
    positional, keywords = case.arguments(case.arrays(), cupy.asarray)
    replace(case, packed=False).run(case.arrays(), cupy.asarray)  # compiles the kernels
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        with pytest.raises(RuntimeError, match="before a graph is captured"):
            op(*positional, **keywords)
        stream.end_capture()
    cupy.cuda.runtime.deviceSynchronize()


def check_current_stream(cupy, op, case):
    """The image is late on a side stream: read on any other, it would still be zeros."""
    (x, packed, *active), keywords = case.arguments(case.arrays(), cupy.asarray)
    ones = cupy.ones_like(x)
    expected = op(ones, packed, *active, **keywords)
    slow = cupy.random.random((4096, 4096), np.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    for _ in range(5):
        x.fill(0)
        cupy.cuda.runtime.deviceSynchronize()
        with stream:
            for _ in range(3):
                slow = cupy.tanh(slow @ slow)
            x[...] = ones
            assert_same(op(x, packed, *active, **keywords), expected)
