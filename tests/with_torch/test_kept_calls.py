"""Convolutions at sites by packed weights that are kept give what the first of their kind gave.

On the CPU their kernels run on the host shim.
"""

import gc
import weakref

import numpy as np
import pytest

import sbnet_cupy as sb
from sbnet_cupy.submanifold import site_conv_launch
from sbnet_cupy.submanifold.site_conv_instances import PipelinedPlan
from support import site_on_host
from support.kept_calls import note_kept
from support.torch_cases import internal, on_device

SIZE = 9
convs, state = internal("submanifold.convs"), internal("_dispatch_state")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, require, torch, state, monkeypatch):
    """The CPU, with the kernels on the host, or a GPU."""
    if request.param == "cuda":
        yield on_device(require, torch, "cuda")
        return
    require("g++")
    monkeypatch.setattr(site_conv_launch, "current_device", lambda: site_on_host.AMPERE)
    monkeypatch.setattr(state, "current_stream", lambda device: 7)
    with site_on_host.by_kernels():
        yield request.param


@pytest.fixture
def again(convs, monkeypatch):
    """Whether each call was one that is kept."""
    return note_kept(convs, "call", monkeypatch)


def draw(torch, st, device, dtype=None, channels=16):
    """Return a SparseTensor, other features and PackedWeights."""
    rng = np.random.default_rng(0)
    rows = np.argwhere(rng.random((1, SIZE, SIZE, SIZE)) < 0.2).astype(np.int32)
    sites, _ = st.coordinate_map(
        torch.from_numpy(rows).to(device), spatial_shape=(SIZE,) * 3, batch_size=1
    )

    def drawn(*shape):
        values = torch.from_numpy(rng.standard_normal(shape, np.float32))
        return values.to(device, dtype or torch.float16)

    one, other = drawn(len(rows), channels), drawn(len(rows), channels)
    w = sb.PackedWeights(drawn(3, 3, 3, channels, channels), bias=drawn(channels).float())
    return sb.SparseTensor(one, sites), other, w


def fresh(st, x, w, **options):
    """Return the features of a call of weights that are packed anew, which nothing is kept of."""
    return st.submanifold_conv(x, sb.PackedWeights(w.w, bias=w.bias), **options).features


def test_another_call_gives_the_same(torch, st, device, again):
    """With other features, with a residual or without."""
    x, other, w = draw(torch, st, device)
    st.submanifold_conv(x, w)  # no call is kept before there is a second one by the same weights
    del again[:]
    for features in (x.features, other, x.features):
        x = x.replace(features)
        for residual in (None, other.flip(0), x.replace(other.flip(0)), None):
            y = st.submanifold_conv(x, w, residual=residual, activation="relu")
            assert y.coordinates is x.coordinates
            known = again.pop()
            expected = fresh(st, x, w, residual=residual, activation="relu")
            assert not again.pop() and torch.equal(y.features, expected)
            again.append(known)
    assert again == [False] * 2 + [True] * 10


@pytest.fixture
def shared(torch, st, device, monkeypatch):
    """What draw returns, where thread blocks share tiles."""
    if device == "cpu":
        plan = PipelinedPlan((128, 64), (4, 1), 2, engine="TileMma", shared=True)
        monkeypatch.setattr(site_conv_launch, "plan_site_conv", lambda conv, device: plan)
    return draw(torch, st, device, channels=64 if device == "cpu" else 320)


def test_thread_blocks_of_calls_share_tiles(torch, st, device, again, shared):
    """Each call has memory for the parts of tiles."""
    (x, other, w), known = shared, []
    for features in (x.features, other) * 2:
        x = x.replace(features)
        y = st.submanifold_conv(x, w, residual=other.flip(0)).features
        known.append(again[-1])
        assert device != "cpu" or site_on_host.LAUNCHED[-1] == "site_conv_sum"
        assert torch.equal(y, fresh(st, x, w, residual=other.flip(0)))
    assert known == [False] * 2 + [True] * 2


def test_thread_blocks_of_a_gradient_share_tiles(torch, st, device, shared):
    x, other, w = shared
    features, weights, grad = (t.round() for t in (x.features, w.w, other))
    features.requires_grad_()
    st.submanifold_conv(x.replace(features), weights).features.backward(grad)
    if device == "cpu":
        assert site_on_host.LAUNCHED.count("site_conv_sum") == 2
    backward = weights.flip(0, 1, 2).transpose(3, 4).contiguous()
    y = st.submanifold_conv(x.replace(grad), sb.PackedWeights(backward)).features
    assert torch.equal(features.grad, y)


def test_maps_that_are_made_anew_share_a_table(torch, st, device, again):
    """Of a stride, too, and with the map as an argument."""
    x, _, w = draw(torch, st, device)
    made = st.kernel_map(x.coordinates, 3, stride=2)
    for _ in range(2):
        y = st.site_conv(x.features, w, made)
    for _ in range(2):
        same = st.strided_conv(x, w, stride=2, onto=made.target)
        assert torch.equal(st.site_conv(x.features, w, made), y)
        assert torch.equal(same.features, y)
    back = [st.inverse_conv(same, w, onto=x).features for _ in range(3)]
    assert all(torch.equal(y, back[0]) for y in back)
    assert again == [False] * 2 + [False, True] * 2 + [False, False, True]


def test_what_differs_is_another_call(torch, st, device, again):
    x, other, w = draw(torch, st, device)
    y = st.submanifold_conv(x, w).features
    memory = other.new_empty(other.numel() + 1)[1:]
    shifted = memory.view(other.shape).copy_(x.features)
    wider = torch.cat([x.features, other], 1)[:, : other.shape[1]]
    learned = x.features.clone().requires_grad_()
    others = [(x, {"activation": "relu"}), (x, {"dilation": 2}), (x, {"residual": x.features})]
    unaligned = [] if device == "cpu" else [shifted]  # plans on a CPU do not ask for alignment
    others += [(x.replace(features), {}) for features in (*unaligned, wider, learned)]
    for other_x, options in others:
        st.submanifold_conv(x, w)
        del again[:]
        found = st.submanifold_conv(other_x, w, **options).features
        assert again == [False] and (options or torch.equal(found.detach(), y))
    found.float().sum().backward()
    assert learned.grad.abs().sum() > 0
    with torch.no_grad():
        assert torch.equal(st.submanifold_conv(x.replace(learned), w).features, y)
    for wrong in ({"groups": True}, {"groups": 1.0}):
        with pytest.raises(sb.ShapeError, match="groups"):
            st.submanifold_conv(x, w, **wrong)
    with pytest.raises(ValueError, match="bias must be None"):
        st.submanifold_conv(x, w, bias=w.bias)
    with pytest.raises(ValueError, match="precision must be None"):
        st.submanifold_conv(x, w, precision="tf32")
    with pytest.raises(sb.DTypeError, match="dtype of the features"):
        st.submanifold_conv(x.replace(x.features.float()), w)
    made = st.kernel_map(x.coordinates, 3, onto=x.coordinates)
    with pytest.raises(sb.DTypeError, match="must be a torch"):
        st.site_conv(x.features.cpu().numpy(), w, made)
    assert torch.equal(st.submanifold_conv(x, w).features, y) and again[-1]
    w.w.requires_grad_()
    with pytest.raises(sb.DTypeError, match="gets no gradients"):
        st.submanifold_conv(x, w)


def test_options_that_are_made_anew_keep_nothing_more(torch, st, device, again):
    x, _, w = draw(torch, st, device)
    made = st.kernel_map(x.coordinates, 3, onto=x.coordinates)
    for _ in range(2):
        first = st.submanifold_conv(x, w, activation="relu").features
    for _ in range(3):
        spelled = "".join(["re", "lu"])  # another object
        assert torch.equal(st.submanifold_conv(x, w, activation=spelled).features, first)
    assert [len(calls) for calls in made.rows.kept_of_map["calls"].values()] == [1]
    assert again == [False] * 5


def test_calls_that_are_watched_are_not_kept_ones(torch, st, device, again):
    """Under autocast, in a profile, and where a mode sees operators."""
    from torch.utils._python_dispatch import TorchDispatchMode

    x, _, w = draw(torch, st, device)
    y = [st.submanifold_conv(x, w).features for _ in range(3)]
    assert torch.equal(y[0], y[2])
    with torch.autocast(device, torch.bfloat16):
        assert st.submanifold_conv(x, w).features.dtype is torch.bfloat16
    with torch.profiler.profile(acc_events=True) as profile:
        st.submanifold_conv(x, w)
    assert "sbnet_cupy::site_conv" in [event.name for event in profile.events()]
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Mode():
        st.submanifold_conv(x, w)
    assert "sbnet_cupy.site_conv.default" in seen
    assert again == [False, False, True, False, False, False]


def test_a_compiled_call_is_not_a_kept_one(torch, st, device):
    torch._dynamo.reset()
    x, _, w = draw(torch, st, device)
    made = st.kernel_map(x.coordinates, 3, onto=x.coordinates)

    def call(features):
        return st.site_conv(features * 2, w, made)

    expected = [call(x.features) for _ in range(2)]
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert all(torch.equal(compiled(x.features), y) for y in expected)


def test_refreshed_weights_are_used(torch, st, device, again):
    x, _, w = draw(torch, st, device)
    for _ in range(2):
        st.submanifold_conv(x, w)
    w.w.mul_(2)
    w.refresh()
    assert torch.equal(st.submanifold_conv(x, w).features, fresh(st, x, w))
    assert again == [False, False, True, False]


def test_results_are_apart(torch, st, device):
    x, _, w = draw(torch, st, device)
    y = [st.submanifold_conv(x, w).features for _ in range(4)]
    assert len({t.data_ptr() for t in y}) == 4 and not any(t.requires_grad for t in y)
    with torch.inference_mode():
        assert st.submanifold_conv(x, w).features.is_inference()


def test_weights_and_sites_are_freed(torch, st, device):
    """A kept call holds neither the PackedWeights nor the coordinates."""
    x, _, w = draw(torch, st, device)
    _, _, others = draw(torch, st, device)
    gc.disable()
    try:
        for weights in (w, others, w):
            for _ in range(3):
                st.submanifold_conv(x, weights)
        table = st.kernel_map(x.coordinates, 3, onto=x.coordinates).rows
        assert len(table.kept_of_map["calls"]) == 2
        known = weakref.ref(others)
        del others, weights
        assert known() is None and len(table.kept_of_map["calls"]) == 1
        known = [weakref.ref(x.coordinates), weakref.ref(table)]
        del x, table
        assert [ref() for ref in known] == [None, None]
    finally:
        gc.enable()


@pytest.mark.gpu
def test_a_graph_of_kept_calls_replays(torch, st, require, again):
    """What a capture makes is not kept: calls after it give what they gave before."""
    on_device(require, torch, "cuda")
    x, other, w = draw(torch, st, "cuda")
    for _ in range(2):
        y = st.submanifold_conv(x, w).features
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = st.submanifold_conv(x, w).features
        dilated = st.submanifold_conv(x, w, dilation=2).features
    graph.replay()
    assert torch.equal(captured, y)
    x.features.copy_(other)
    graph.replay()
    assert again == [False, False, True, False]
    expected = fresh(st, x, w)
    assert torch.equal(captured, expected)
    wide = st.submanifold_conv(x, w, dilation=2).features
    assert torch.equal(dilated, wide)
    assert torch.equal(st.submanifold_conv(x, w, dilation=2).features, wide)
    assert torch.equal(st.submanifold_conv(x, w).features, expected)
