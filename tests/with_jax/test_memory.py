"""The JAX adapter's memory: no byte is copied, scratch is enough, a call is compiled once."""

import functools
import itertools
import sys

import numpy as np
import pytest

import sbnet_cupy as sb
from sbnet_cupy.block_sparse.gather_scatter import overlap
from sbnet_cupy.block_sparse.grid import Grid, resolve_layout
from sbnet_cupy.block_sparse.mask.config import configure_mask, scratch_slots
from sbnet_cupy.core.operator import Operator
from support.adapter_cases import (
    BFLOAT16,
    COUNT,
    MASK,
    OPTIONS,
    OVERLAP,
    PLAIN,
    ROWS,
    X,
    image,
    same,
    stack,
)


def test_no_byte_is_copied(sbj, place, jax, monkeypatch):
    """What our code reads and writes is the memory of the caller's arrays and of the results."""
    seen, plan_for = {}, Operator.plan_for

    def watched(operator, arrays, options):
        seen[operator.name] = [None if array is None else pointer(array) for array in arrays]
        return plan_for(operator, arrays, options)

    def pointer(array):
        return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr

    monkeypatch.setattr(Operator, "plan_for", watched)
    sys.modules["sbnet_cupy.jax._callbacks"]._callback.cache_clear()  # launches of earlier tests
    x, count, rows = map(place.make, (X, COUNT, ROWS))
    blocks = jax.jit(functools.partial(sbj.sparse_gather, **PLAIN))(x, count, rows)
    blocks.block_until_ready()
    assert seen["sparse_gather"] == [*map(place.address, (x, count, rows, blocks)), None, None]

    scatter = functools.partial(sbj.sparse_scatter, **PLAIN)
    kept = jax.jit(scatter)(blocks, count, rows, x).block_until_ready()
    assert place.address(kept) not in (place.address(x), place.address(blocks))
    same(x, X)
    x = jax.jit(jax.numpy.copy)(x)  # XLA's own memory, and not maybe NumPy's, which it never reuses
    donated = place.address(x)
    y = jax.jit(scatter, donate_argnums=3)(blocks, count, rows, x).block_until_ready()
    assert seen["sparse_scatter"] == [*map(place.address, (blocks, count, rows, y, y))]
    assert place.address(y) == donated and x.is_deleted()


def test_inputs_are_read_only_and_their_address_is_known(jax, sbj):
    from sbnet_cupy.jax import _callbacks

    found = {}

    def body(spec, results, scratch, x):
        found["writeable"] = [results[0].flags.writeable, x.flags.writeable, scratch.size]
        results[0][...] = x

    def address(buffer):
        found["address"] = _address(buffer), np.asarray(buffer).ctypes.data
        return np.asarray(buffer)

    _address = _callbacks.address
    with jax.default_device(jax.devices("cpu")[0]):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_callbacks, "_numpy_view", address)
            half = jax.ShapeDtypeStruct((3,), BFLOAT16)
            _callbacks.call(lambda *_: None, 0, [half], ())[0].block_until_ready()
        single = jax.ShapeDtypeStruct((3,), np.float32)
        (y,) = _callbacks.call(body, 0, [single], (jax.numpy.ones(3),), scratch=7)
    assert (y == 1).all() and found["writeable"] == [True, False, 7]
    assert found["address"][0] == found["address"][1]


def test_scratch_is_enough_for_any_gpu():
    """As many slots as the widest launch needs, whatever the multiprocessors and the alignment."""
    for sm_count in (1, 20, 132, 192):
        for side in (1, 7, 100, 2000):
            shape, blocks, grid = (1, side, side), (1, side, side), Grid((1, 1), (0, 0), (1, 1))
            for word, average in itertools.product((1, 4, 16), (False, True)):
                sizes = (shape, 1, word, blocks, grid, average)
                config = configure_mask(*sizes, sm_count, clusters=False)
                assert 1 + config.thread_blocks <= scratch_slots(shape, blocks, grid, average)


def test_scratch_is_enough_for_overlapping_blocks(monkeypatch):
    """What the GPU body allocates is what XLA is asked for."""
    launched = []
    monkeypatch.setattr(overlap.kernels, "launch", lambda *a, **_: launched.append(a[5]))
    for options in OPTIONS:
        grid = Grid(*(options.get(name, zero) for name, zero in
                      (("bsize", None), ("boffset", (0, 0)), ("bstride", options["bsize"]))))
        x, blocks = image(options), stack(options)
        layout = (options.get("data_format", "NHWC"), options.get("transpose", False))
        layout = resolve_layout(x, *layout)
        fixed = {"layout": layout, "grid": grid, "add": True}
        overlap.scatter_overlap_cuda(blocks, COUNT, ROWS, x, **fixed)
        heads, links = launched[-1][3:5]
        assert (heads.nbytes, links.nbytes) == overlap.scratch_sizes(len(ROWS), layout, grid)


def test_the_cuda_kernels_inside_jit(sbj, jax, require):
    """What a GPU would run, the kernels with our scratch, run on the CPU: the bits of NumPy."""
    require("g++")
    import host_cuda
    from support.host_memory import Memory
    from support.kernels_on_host import device

    def chain(module, x, mask):
        active = module.reduce_mask(mask, (4, 4), capacity=20, **OVERLAP)
        blocks = module.sparse_gather(x, *active, activation="relu", **OVERLAP)
        y = module.sparse_scatter(blocks, *active, x, **OVERLAP)
        y = module.sparse_scatter(blocks, *active, y, add=True, atomic=True, **OVERLAP)
        return module.sparse_scatter(blocks, *active, y, bsize=(4, 5))

    expected = chain(sb, X, MASK)
    jitted = jax.jit(functools.partial(chain, sbj))
    x, mask = jax.device_put((X, MASK), jax.devices("cpu")[0])
    with device(lambda *call: host_cuda.launch(*call), 132, Memory()) as (_, launched):
        for _ in range(2):
            same(jitted(x, mask).block_until_ready(), expected)
    kernels = [kernel.partition("_")[0] for _, kernel, _ in launched]
    assert kernels == ["reduce", "gather", *["scatter"] * 5] * 2  # overlap: link and apply


def test_the_same_call_is_compiled_once(sbj, jax):
    """Callbacks and traces are kept by their options, also outside jit."""
    from sbnet_cupy.jax._namespace import GATHER

    x, count, rows = jax.numpy.asarray(X), jax.numpy.asarray(COUNT), jax.numpy.asarray(ROWS)
    for bsize in (5, (5, 5), [1, 5, 5, 1]):
        sbj.sparse_gather(x, count, rows, bsize=bsize)
        made = GATHER.function.cache_info().misses
        sbj.sparse_gather(x, count, rows, bsize=bsize)
        assert GATHER.function.cache_info().misses == made
    options = ((5, 5), (0, 0), (5, 5), False, "NHWC", None)
    assert GATHER.function(options)._cache_size() == 1
