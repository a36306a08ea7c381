"""On a GPU a callback of the JAX adapter launches again what it launched on the same memory."""

import contextlib
import functools
import sys
import types

import numpy as np
import pytest

import host_cuda
import sbnet_cupy as sb
from sbnet_cupy.block_sparse.grid import Grid
from sbnet_cupy.core import launch as kernels
from sbnet_cupy.operators import OPERATORS
from support.adapter_cases import COUNT, ROWS, X, normal, same
from support.fused_on_host import AMPERE, CONV, UNIT
from support.host_memory import Memory
from support.kernels_on_host import device


class Buffer:
    """What XLA hands over, on a GPU that is not there: memory of NumPy under its name."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self):
        return self._array.__dlpack__()

    def __dlpack_device__(self):
        return 2, 0


def test_the_same_memory_gets_the_same_launches(jax, require, monkeypatch):
    """And other memory others; of so many places they are kept, and made again when needed."""
    require("cupy")
    from sbnet_cupy.jax import _callbacks

    entered, bodies, launched = [], [], []
    monkeypatch.setattr(
        _callbacks, "_entered", lambda *where: entered.append(where) or contextlib.nullcontext()
    )
    monkeypatch.setattr(_callbacks, "_MOST_PLACES", 2)

    def body(spec, results, scratch, x, nothing, y):
        assert nothing is None and spec == "options"
        bodies.append(spec)
        arrays = (*results, scratch, x, y)
        assert [a.shape for a in arrays] == [(3, 4), (64,), (3, 4), (48,)]
        for array in arrays:  # in place of kernels
            kernels.enqueue(launched.append, array.data.ptr)

    kind, byte = ((3, 4), np.dtype(np.float32)), np.dtype(np.uint8)
    kinds = (kind, ((64,), byte), kind, None, ((48,), byte))
    callback = _callbacks._callback(body, "options", kinds, 1, True)
    memory = np.zeros((4, 256), np.uint8)

    def call(*lines):
        out, scratch, x, y = (Buffer(memory[line]) for line in lines)
        callback(types.SimpleNamespace(stream=7), [out, scratch], x, None, y)
        assert launched == [memory[line].ctypes.data for line in lines]
        launched.clear()

    for lines, times in (((0, 1, 2, 3), 1), ((0, 1, 2, 3), 1), ((1, 0, 2, 3), 2),
                         ((0, 1, 2, 3), 2), ((3, 2, 1, 0), 3), ((0, 1, 2, 3), 4)):  # fmt: skip
        call(*lines)
        assert len(bodies) == times
    assert entered == [(7, 0)] * 6


def kernel(launched, number):
    """Return a launch that notes its number, its stream and the addresses of its arrays."""
    given = []
    parameters = types.SimpleNamespace(
        fill=lambda *addresses: given.append(list(addresses)),
        call_of=lambda extent: lambda stream, *_: launched.append((number, stream, given.pop())),
        stream=lambda device: types.SimpleNamespace(ptr=7), device=0, stem="a file",
        lock=contextlib.nullcontext(), scalars=(), table=None, error=RuntimeError,
    )  # fmt: skip
    return kernels._Launch(parameters, (1, 1, 1), ())


@pytest.fixture
def moving(jax, require, monkeypatch):
    """A callback that launches kernels on memory; gives lines of memory, it, and what it does."""
    require("cupy")
    from sbnet_cupy.jax import _callbacks

    monkeypatch.setattr(_callbacks, "_entered", lambda *where: contextlib.nullcontext())
    monkeypatch.setattr(_callbacks, "current_device", lambda: 0)
    bodies, launched = [], []
    first, second = kernel(launched, 1), kernel(launched, 2)

    def body(spec, results, scratch, x, nothing, y):
        bodies.append(spec)
        second_half = scratch[32:]
        first(x, None, second_half, results[0])
        second(kernels.Number(0.5), results[0], y[1:])
        if spec is not None:
            kernels.enqueue(spec)

    def callback_of(spec, alias=()):
        kind, byte = ((4, 16), np.dtype(np.uint8)), np.dtype(np.uint8)
        kinds = (kind, ((64,), byte), kind, None, kind)
        return _callbacks._callback(body, spec, kinds, 1, True, alias)

    memory = np.zeros(6 * 256 + 16, np.uint8)
    memory = memory[-memory.ctypes.data % 16 :]

    def call(callback, *starts):
        out, scratch, x, y = (Buffer(memory[s : s + 64]) for s in starts)
        callback(types.SimpleNamespace(stream=7), [out, scratch], x, None, y)
        out, scratch, x, y = (memory.ctypes.data + s for s in starts)
        half = kernels.Number(0.5).ptr
        expected = [(1, 7, [x, 0, scratch + 32, out]), (2, 7, [half, out, y + 16])]
        done = launched == expected
        launched.clear()
        return done

    return callback_of, call, bodies


def test_launches_move_to_other_memory(moving):
    """What depends on addresses is their alignment; and whether pieces of memory are one."""
    callback_of, call, bodies = moving
    callback = callback_of(None)
    for starts, times in (((0, 256, 512, 768), 1), ((256, 0, 1024, 512), 1), ((0, 16, 80, 768), 1),
                          ((8, 256, 512, 768), 2), ((264, 0, 1024, 512), 2), ((0, 64, 128, 192), 2),
                          ((0, 256, 512, 512), 2), ((0, 256, 512, 768), 2)):  # fmt: skip
        assert call(callback, *starts) and len(bodies) == times


def test_launches_stay_where_pieces_of_memory_are_one_or_more_is_done(moving):
    """Recorded there it is not known which of two arrays a launch read."""
    callback_of, call, bodies = moving
    done = []
    for options, starts in (
        ({"spec": None}, (0, 256, 512, 512)),
        ({"spec": None, "alias": ((0, 0),)}, (512, 256, 512, 768)),
        ({"spec": functools.partial(done.append, 1)}, (0, 256, 512, 768)),
    ):
        bodies.clear()
        callback = callback_of(**options)
        for again in range(2):
            assert call(callback, *starts) and len(bodies) == 1
            assert len(done) == (again + 1 if options["spec"] else 0)
        moved = tuple(start + 256 for start in starts)
        assert call(callback, *moved) and len(bodies) == 2


def test_a_launch_on_memory_of_others_stays(jax, monkeypatch):
    """And an array behind the end of all, or one that begins before them."""
    launch, array = kernel([], 0), np.zeros(64, np.uint8)
    start = array.ctypes.data
    at = lambda n: types.SimpleNamespace(data=types.SimpleNamespace(ptr=start + n))  # noqa: E731
    pieces = [(start + 16, 16), None, (start + 48, 16)]
    for inside, expected in ((16, (0, 0)), (31, (0, 15)), (48, (2, 0)), (63, (2, 15))):
        assert kernels.movable([(launch, (at(inside), None))], pieces) == [
            (launch, [expected, (None, 0)])
        ]
    for outside in (0, 15, 32, 47, 64):
        assert kernels.movable([(launch, (at(outside),))], pieces) is None
    assert kernels.movable([(print, ())], pieces) is None and kernels.movable([], pieces) == []
    assert kernels.movable([], [(start, 17), (start + 16, 1)]) is None


def test_what_failed_is_not_kept(jax, require, monkeypatch):
    require("cupy")
    from sbnet_cupy.jax import _callbacks

    monkeypatch.setattr(_callbacks, "_entered", lambda *where: contextlib.nullcontext())
    launched = []

    def body(spec, results, scratch):
        kernels.enqueue(launched.append, len(launched))
        if len(launched) == 1:
            raise RuntimeError("the message")

    callback = _callbacks._callback(body, None, (((8,), np.dtype(np.uint8)),), 1, False)
    out = Buffer(np.zeros(8, np.uint8))
    with pytest.raises(RuntimeError, match="the message"):
        callback(types.SimpleNamespace(stream=7), [out])
    for _ in range(2):
        callback(types.SimpleNamespace(stream=7), [out])
    assert launched == [0, 1, 1] and kernels._RECORDING.calls is None


def changing_calls():
    """Bodies, with options, results and what they read: all that a GPU's callback repeats."""
    from sbnet_cupy.jax import _masks
    from sbnet_cupy.jax._operation import compute

    rng = np.random.default_rng(5)
    plain, overlap = Grid((4, 3), (0, 0), (4, 3)), Grid((4, 5), (-1, -1), (2, 3))
    table, blocks = (COUNT, ROWS), {g: normal(6, *g.bsize, 3) for g in (plain, overlap)}
    mask = (rng.random(X.shape[:3]) < 0.1).astype(np.float32)
    counted = [np.zeros(1, np.int32), np.zeros((8, 3), np.int32)]
    yield "reduce_mask", _masks.fill, ((2, 3), *plain, 0.0, False, 8), counted, (mask,)
    key = (OPERATORS["sparse_gather"], (*overlap, False, "NHWC", "relu"), None)
    stack = [np.zeros_like(blocks[overlap])]
    yield "gather", compute, key, stack, (X, *table, None, None, None)
    for grid in (plain, overlap):
        options = (*grid, True, grid.overlaps, False, "NHWC")
        key = (OPERATORS["sparse_scatter"], options, 3)
        yield "scatter", compute, key, [X.copy()], (blocks[grid], *table, X, None)
    x, w = rng.integers(-2, 3, (2, 8, 9, 16)), rng.integers(-1, 2, (3, 3, 16, 8))
    x, w, bias = x.astype(np.float16), w.astype(np.float16), np.ones(8, np.float32)
    params = tuple(vars(sb.calc_block_params(x.shape, 5, 3)).values())
    options = (params, (1, 1), "SAME", "relu", "NHWC", "HWIO", None, "fused")
    base = np.zeros((2, 8, 9, 8), np.float16)
    given = (x, w, *table, None, bias, base, None)
    yield "fused_conv", compute, (OPERATORS["sparse_conv2d"], options, 6), [base.copy()], given
    weights = sb.BottleneckWeights.random(16, 8, dtype="float16")._arrays()
    weights = [*weights[:3], *(t.astype(np.float16) for t in weights[3:5]), *weights[5:]]
    params = sb.calc_block_params_res_block(x.shape, 5, [1, 3, 1])
    options = (tuple(vars(params).values()), (1, 1), None, "fused", False)
    key = (OPERATORS["sparse_res_block_bottleneck"], options, 13)
    yield "fused_bottleneck", compute, key, [x.copy()], (x, *weights, None, *table, x, None)


@pytest.mark.parametrize("call", range(6))
def test_the_launches_done_again_do_the_whole_work(jax, require, call):
    """On other numbers in the same memory; no part of the work is left out of what is recorded."""
    require("g++")
    name, body, spec, results, given = list(changing_calls())[call]
    ops = {"fused_conv": CONV, "fused_bottleneck": UNIT}
    if name in ops:
        shim = ops[name].device(host_cuda.launch, AMPERE, 4, Memory())
    else:
        shim = device(lambda *launch: host_cuda.launch(*launch), 132, Memory())
    given = [None if array is None else array.copy() for array in given]
    first = [array.copy() for array in results]
    with contextlib.ExitStack() as stack:
        stack.enter_context(shim)
        prepare = kernels.prepare

        def recordable(*arguments, **options):
            return functools.partial(kernels.enqueue, prepare(*arguments, **options))

        stack.enter_context(pytest.MonkeyPatch.context()).setattr(kernels, "prepare", recordable)
        scratch = np.zeros(1 << 16, np.uint8) if name == "reduce_mask" else None

        def fresh():
            for array, content in zip(results, first, strict=True):
                array[...] = content

        with kernels.recorded() as calls:
            body(spec, results, scratch, *given)
        old = [array.copy() for array in results]
        for array in given:  # other numbers; the indices stay, and say another count
            if array is not None and array.dtype != np.int32:
                array[...] = array[::-1].copy() if len(array) > 1 else -array
            elif array is not None and array.shape == (1,):
                array -= 1
        fresh()
        for function, arguments in calls:
            function(*arguments)
        again = [array.copy() for array in results]
        fresh()
        body(spec, results, scratch, *given)
    assert any((a != o).any() for a, o in zip(again, old, strict=True))
    for a, expected in zip(again, results, strict=True):
        same(a, expected)


@pytest.mark.parametrize(("capturing", "current"), [(0, 1), (0, 0), (1, 1)])
def test_the_stream_of_xla_is_entered(jax, monkeypatch, capturing, current):
    """Its object is made once; the device only where it is another, relaxed only in a capture."""
    from sbnet_cupy.jax import _callbacks

    said = []

    class Context:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            said.append(self.name)

        def __exit__(self, *error):
            said.append(f"end of {self.name}")

    def from_external(stream):
        said.append("made")
        return Context(f"stream {stream.__cuda_stream__()[1]}")

    runtime = types.SimpleNamespace(
        streamIsCapturing=lambda pointer: capturing, getDevice=lambda: current
    )
    stream = types.SimpleNamespace(from_external=from_external)
    cuda = types.SimpleNamespace(
        Device=lambda number: Context(f"device {number}"), Stream=stream, runtime=runtime
    )
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(_callbacks, "_STREAMS", {})
    monkeypatch.setattr(_callbacks, "_relaxed", lambda: Context("relaxed"))
    for _ in range(2):
        with _callbacks._entered(7, 1):
            said.append("body")
    outer = ["device 1"] if capturing or not current else []
    inner = ["relaxed"] if capturing else []
    entered = [*outer, "stream 7", *inner]
    whole = [*entered, "body", *(f"end of {name}" for name in reversed(entered))]
    assert said == ["device 1", "made", "end of device 1", *whole, *whole]
