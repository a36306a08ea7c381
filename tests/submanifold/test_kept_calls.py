"""Calls of submanifold_conv that are kept give what the first of their kind gave."""

import gc
import importlib
import weakref

import numpy as np
import pytest

import sbnet_cupy as sb
from sbnet_cupy.core.spec import fields_of
from sbnet_cupy.submanifold import kept_calls, site_conv_launch
from sbnet_cupy.submanifold.site_conv_instances import PipelinedPlan
from support import site_on_host
from support.assertions import assert_same
from support.kept_calls import note_kept

SIZE = 9
module = importlib.import_module("sbnet_cupy.submanifold.submanifold_conv")


@pytest.fixture(params=["host", pytest.param("gpu", marks=pytest.mark.gpu)])
def xp(request, require, monkeypatch):
    """NumPy, with the kernels on the host, or CuPy."""
    if request.param == "gpu":
        yield require("gpu")
        return
    monkeypatch.setattr(site_conv_launch, "current_device", lambda: site_on_host.AMPERE)
    with site_on_host.by_kernels():
        yield np


@pytest.fixture
def again(monkeypatch):
    """Whether each call was one that is kept."""
    return note_kept(module, "compute_by_plan", monkeypatch)


def draw(xp, dtype=np.float16, channels=16, seed=0):
    """Return a SparseTensor, other features and PackedWeights."""
    rng = np.random.default_rng(seed)
    cells = np.flatnonzero(rng.random(SIZE**3) < 0.2)
    rows = np.stack([np.zeros_like(cells), *np.unravel_index(cells, (SIZE,) * 3)], 1)
    sites, _ = sb.coordinate_map(
        xp.asarray(rows.astype(np.int32)), spatial_shape=(SIZE,) * 3, batch_size=1
    )
    one, other = rng.standard_normal((2, len(rows), channels)).astype(dtype)
    w = rng.standard_normal((3, 3, 3, channels, channels)).astype(dtype)
    x = sb.SparseTensor(xp.asarray(one), sites)
    return x, xp.asarray(other), sb.PackedWeights(xp.asarray(w))


def fresh(x, w, **options):
    """Return the features of a call by way of its map, which no kept call takes part in."""
    made = sb.kernel_map(x.coordinates, 3, onto=x.coordinates)
    return sb.site_conv(x.features, w, made, **options)


def test_another_call_gives_the_same(xp, again):
    """With other features, with a residual or without."""
    x, other, w = draw(xp)
    sb.submanifold_conv(x, w)  # no call is kept before there is a second one by the same weights
    del again[:]
    for features in (x.features, other, x.features):
        x = sb.SparseTensor(features, x.coordinates)
        for residual in (None, other, sb.SparseTensor(other, x.coordinates), None):
            y = sb.submanifold_conv(x, w, residual=residual, activation="relu")
            given = other if isinstance(residual, sb.SparseTensor) else residual
            assert_same(y.features, fresh(x, w, residual=given, activation="relu"))
            assert y.coordinates is x.coordinates
    assert again == [False] * 2 + [True] * 10


def test_calls_whose_thread_blocks_share_tiles(xp, again, monkeypatch):
    """Each has memory for the parts of tiles."""
    if xp is np:
        plan = PipelinedPlan((128, 64), (4, 1), 2, engine="TileMma", shared=True)
        monkeypatch.setattr(site_conv_launch, "plan_site_conv", lambda conv, device: plan)
    x, other, w = draw(xp, channels=64 if xp is np else 320)
    for features in (x.features, other, x.features, other):
        x = sb.SparseTensor(features, x.coordinates)
        y = sb.submanifold_conv(x, w, residual=other)
        assert xp is not np or site_on_host.LAUNCHED[-1] == "site_conv_sum"
        assert_same(y.features, fresh(x, w, residual=other))
    assert again == [False] * 2 + [True] * 2


def test_options_that_are_made_anew_bind_one_launch(xp, again):
    """Equal options that are other objects are computed each time, and keep nothing more."""
    x, _, w = draw(xp)
    for _ in range(2):
        first = sb.submanifold_conv(x, w, dilation=(1,) * 3).features
    for _ in range(3):
        assert_same(sb.submanifold_conv(x, w, dilation=tuple([1] * 3)).features, first)
    assert len(x.coordinates._kept["calls"][w]) == 1
    assert again == [False] * 5


def test_what_differs_is_another_call(xp, again):
    x, other, w = draw(xp)
    y = sb.submanifold_conv(x, w)
    shifted = xp.empty(other.size + 1, other.dtype)[1:].reshape(other.shape)
    shifted[...] = x.features
    others = [
        (x, {"dilation": 2}), (x, {"activation": "relu"}),
        (sb.SparseTensor(other.astype(np.float32), x.coordinates), None),
    ]  # fmt: skip
    if xp is not np:  # plans on a CPU do not ask for alignment
        others.append((sb.SparseTensor(shifted, x.coordinates), {}))
    for again_x, options in others:
        sb.submanifold_conv(x, w)
        del again[:]
        if options is None:
            with pytest.raises(sb.DTypeError, match="dtype of the features"):
                sb.submanifold_conv(again_x, w)
        else:
            sb.submanifold_conv(again_x, w, **options)
        assert again == [False]
    sb.submanifold_conv(x, w)
    for wrong in ({"groups": True}, {"groups": 1.0}):
        with pytest.raises(sb.ShapeError, match="groups"):
            sb.submanifold_conv(x, w, **wrong)
    with pytest.raises(ValueError, match="bias must be None"):
        sb.submanifold_conv(x, w, bias=xp.ones(16, np.float32))
    assert_same(sb.submanifold_conv(x, w).features, y.features)


def test_refreshed_weights_are_used(xp, again):
    x, _, w = draw(xp)
    for _ in range(2):
        sb.submanifold_conv(x, w)
    w.w *= 2
    w.refresh()
    assert_same(sb.submanifold_conv(x, w).features, fresh(x, w))
    assert again == [False, False, True]


def test_weights_and_sites_are_freed(xp):
    """A kept call holds neither the PackedWeights nor the coordinates."""
    x, _, w = draw(xp)
    _, _, others = draw(xp, seed=1)
    for weights in (w, others, w):
        for _ in range(2):
            sb.submanifold_conv(x, weights)
    known = weakref.ref(others)
    del others, weights
    assert known() is None
    known = weakref.ref(x.coordinates)
    gc.disable()
    try:
        del x
        assert known() is None
    finally:
        gc.enable()


def test_arrays_that_must_not_be_taken_raise_as_at_first(xp, again, torch):
    """A residual of other sites, of another size or of another library, and features of another."""
    x, other, w = draw(xp)
    for residual in (None, None, other):
        sb.submanifold_conv(x, w, residual=residual)
    elsewhere, foreign = draw(xp, seed=1)[0], torch.zeros(other.shape, dtype=torch.float16)
    with pytest.raises(sb.ShapeError, match="residual must be on the coordinates"):
        sb.submanifold_conv(x, w, residual=elsewhere)
    with pytest.raises(sb.ShapeError, match="residual must have shape"):
        sb.submanifold_conv(x, w, residual=other[:-1])
    with pytest.raises(sb.DeviceError, match="residual is torch on cpu"):
        sb.submanifold_conv(x, w, residual=foreign)
    with pytest.raises(sb.DeviceError, match="x is torch on cpu"):
        sb.submanifold_conv(sb.SparseTensor(foreign, x.coordinates), w)
    assert not any(again)


def test_an_array_that_is_not_contiguous_is_no_kept_call(xp, again):
    """NumPy's are copied, as before; others raise."""
    x, _, w = draw(xp)
    for _ in range(2):
        y = sb.submanifold_conv(x, w)
    strided = sb.SparseTensor(xp.repeat(x.features, 2, 1)[:, ::2], x.coordinates)
    if xp is np:
        assert_same(sb.submanifold_conv(strided, w).features, y.features)
    else:
        with pytest.raises(sb.ShapeError, match="contiguous"):
            sb.submanifold_conv(strided, w)
    out = xp.empty_like(x.features)
    assert sb.submanifold_conv(x, w, out=out).features is out
    assert_same(out, y.features)
    assert again[0] is False and again[-1] is False


def test_a_kept_call_is_none_on_another_device(xp, again):
    """The door first makes the device of its arrays the current one."""
    x, _, w = draw(xp)
    for _ in range(2):
        y = sb.submanifold_conv(x, w)
    (call,) = calls = x.coordinates._kept["calls"][w]
    elsewhere = call._replace(device=lambda: 7)
    calls[:] = [elsewhere]
    assert_same(sb.submanifold_conv(x, w).features, y.features)
    assert calls == [elsewhere]
    calls[:] = [call]
    assert_same(sb.submanifold_conv(x, w).features, y.features)
    assert again == [False, False, False, True]


def test_results_on_cupy_are_made_where_calls_are(require, monkeypatch):
    """Of CuPy arrays that lie in host memory: there is no GPU."""
    cupy = require("cupy")
    monkeypatch.setattr(cupy.cuda.runtime, "getDevice", lambda: 3)
    memory = np.zeros(64, np.float16)
    held = cupy.cuda.UnownedMemory(memory.ctypes.data, memory.nbytes, memory, 3)
    pointer = cupy.cuda.MemoryPointer(held, 0)
    like = cupy.ndarray((4, 2), np.float16, pointer)
    device, result = kept_calls._around(like, (4, 8))
    with cupy.cuda.using_allocator(lambda nbytes: pointer):
        made = result()
    assert (type(made), made.shape, made.dtype) == (cupy.ndarray, (4, 8), np.float16)
    assert device() == fields_of(like)[2] == 3


@pytest.mark.gpu
def test_a_graph_of_kept_calls_replays(require, again):
    """What a capture makes is not kept: calls after it give what they gave before."""
    cupy = require("gpu")
    x, other, w = draw(cupy)
    for _ in range(2):
        y = sb.submanifold_conv(x, w).features
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        captured = sb.submanifold_conv(x, w).features
        dilated = sb.submanifold_conv(x, w, dilation=2).features
        graph = stream.end_capture()
        graph.launch()
        assert_same(captured, y)
        x.features[...] = other
        graph.launch()
        stream.synchronize()
    expected = fresh(x, w)
    assert_same(captured, expected)
    assert again == [False, False, True, False]
    wide = sb.submanifold_conv(x, w, dilation=2).features
    assert_same(dilated, wide)
    assert_same(sb.submanifold_conv(x, w, dilation=2).features, wide)
    assert_same(sb.submanifold_conv(x, w).features, expected)


def test_float64_is_computed_each_time(xp, again):
    """Its kernel takes weights as they are: there is no launch to keep."""
    x, _, w = draw(xp, np.float64, 8)
    y = [sb.submanifold_conv(x, w).features for _ in range(3)]
    assert_same(y[2], y[0])
    assert again == [False] * 3
