"""Kernels of the first call of a kind are compiled at once, and nothing else comes of that."""

import contextlib
import copy
import gc
import random
import sys
import threading
import types

import pytest

torch = pytest.importorskip("torch")

from sbnet_cupy.core.operator import clear_plans  # noqa: E402
from support import networks  # noqa: E402  (needs PyTorch)
from support.torch_cases import on_device  # noqa: E402

nn = torch.nn

SIZE, BLOCK = (72, 100), 8


class Joined(nn.Module):
    """A network of odd widths, whose results lie side by side, and with what its calls change."""

    def __init__(self, width=24):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width))
        self.left = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU())
        self.right = nn.Conv2d(width, width, 1)
        self.down = nn.Conv2d(2 * width, width, 3, 2, 1)
        self.norm, self.last = nn.BatchNorm2d(width), nn.Conv2d(width, 5, 1)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.calls = 0

    def forward(self, x):
        self.calls += self.training
        self.steps += 1
        x = self.first(x).relu()
        x = self.down(torch.cat([self.left(x), self.right(x)], 1))
        return self.last(self.norm(x).relu())


class Noise(nn.Module):
    """Scales by a random number, which is made of nothing that a rehearsal does not know."""

    def forward(self, x):
        return x * torch.rand((), device=x.device)


def parts(st, net=None):
    """Return a sparsified network, and what a rehearsal takes besides it."""
    from sbnet_cupy.torch.network.table import BlockTable, active_blocks

    sparse = st.sparsify(networks.random_statistics(net or Joined()), BLOCK)
    mask = torch.zeros(1, *SIZE)
    mask[:, 10:30, 20:60] = 1
    on = active_blocks(mask > 0, sparse.block_size)
    table = BlockTable.of_blocks(on, int(on.sum()), int(on.sum()), sparse.block_size, SIZE)
    return sparse, torch.randn(1, 3, *SIZE), table, 0.0


def rehearse(sparse, x, table, outside):
    """Rehearse the first call, on a CPU."""
    from sbnet_cupy.torch.network import rehearsal

    rehearsal.rehearse(lambda: rehearsal._calls(sparse, x, table, outside, True), x.device)


@pytest.fixture
def on_cpu(monkeypatch):
    """Let rehearsals be of a CPU, where there are no kernels; return those to be compiled."""
    from sbnet_cupy.torch.network import rehearsal

    found = []
    monkeypatch.setattr(rehearsal, "compile_kernels", found.append)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return found


class Notes(set):
    """Notes on disk, as a set of what they say."""

    def __call__(self, text):
        return types.SimpleNamespace(
            is_there=lambda: text in self, write=lambda: self.add(text), text=text
        )


@pytest.fixture
def rehearsed(monkeypatch):
    """Return (calls that are rehearsed, the notes on disk)."""
    from sbnet_cupy.torch.network import rehearsal

    done, notes = [], Notes()
    monkeypatch.setattr(rehearsal, "rehearse", lambda run, device, launched: done.append(device))
    monkeypatch.setattr(rehearsal, "Note", notes)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return done, notes


def test_the_first_call_of_a_kind_is_rehearsed(st, rehearsed, monkeypatch):
    """Once in all processes; of other shapes, dtypes, rows, modes and settings again."""
    from sbnet_cupy.torch.network import rehearsal

    done, notes = rehearsed
    sparse, x, table, _ = parts(st)
    sparse.eval()

    def before(x=x, times=2):
        for _ in range(times):
            sparse._rehearsals.before(sparse, x, table, 0.0)
        return len(done)

    with torch.no_grad():
        assert before() == 1
        assert before(x.half()) == 2 and before(torch.randn(1, 3, *SIZE[::-1])) == 3
    assert before() == 4  # gradients are recorded
    sparse.train()
    assert before() == 5
    table.rows += 1
    assert before() == 6
    with torch.backends.cudnn.flags(enabled=False):
        assert before() == 7
    assert len(notes) == 7
    sparse._rehearsals = type(sparse._rehearsals)()  # of another process
    assert before() == 7
    notes.clear()
    sparse._rehearsals = type(sparse._rehearsals)()
    sparse.replay = False
    assert before() == 7
    sparse.replay = "auto"
    with torch.utils._python_dispatch.TorchDispatchMode():
        assert before(times=1) == 7
    sparse._rehearsals = type(sparse._rehearsals)()
    torch.func.grad(lambda one: before(times=1) * one)(torch.ones(()))
    assert len(done) == 7
    sparse._rehearsals = type(sparse._rehearsals)()
    with monkeypatch.context() as patched:
        patched.setattr(rehearsal, "capturing_stream", lambda like: 55)
        assert before() == 7
    sparse._rehearsals = type(sparse._rehearsals)()
    sparse.model.first.register_forward_hook(lambda *given: None)
    assert before() == 7


def test_what_is_noted_of_rehearsals(st, rehearsed, monkeypatch):
    """On disk the kind of a call, on whichever device of this kind; in memory a few of them."""
    from sbnet_cupy.torch.network import rehearsal

    monkeypatch.setattr(rehearsal, "_MOST", 2)
    sparse, x, table, _ = parts(st)
    with torch.no_grad():
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float32):
            sparse._rehearsals.before(sparse, x.to(dtype), table, 0.0)
            assert 1 <= len(sparse._rehearsals._seen) <= 2
    _, notes = rehearsed
    assert len(notes) == 3 and not any("cpu" in note for note in notes)


def test_the_first_call_in_evaluation_is_rehearsed_as_such(st, rehearsed, monkeypatch):
    from sbnet_cupy.torch.network import rehearsal

    first = []
    monkeypatch.setattr(rehearsal, "rehearse", lambda run, device, launched: run())
    monkeypatch.setattr(rehearsal, "_calls", lambda *given: first.append(given[-1]))
    sparse, x, table, _ = parts(st)
    for training, records in ((True, True), (True, False), (False, True), (False, False)):
        with torch.set_grad_enabled(records):
            sparse.train(training)._rehearsals.before(sparse, x, table, 0.0)
    with torch.no_grad():
        sparse._rehearsals.before(sparse, x.half(), table, 0.0)
    assert first == [True, True, True, True, False]


def test_a_module_that_does_not_print_is_rehearsed_in_each_process(st, rehearsed):
    class Silent(nn.Conv2d):
        def extra_repr(self):
            raise RuntimeError("not yet")

    done, notes = rehearsed
    sparse, x, table, _ = parts(st, nn.Sequential(Silent(3, 4, 3)))
    sparse._rehearsals.before(sparse, x, table, 0.0)
    assert len(done) == 1 and not notes


@pytest.mark.parametrize("training", [False, True])
def test_a_rehearsal_leaves_no_trace(st, on_cpu, monkeypatch, training):
    """Of the network, its buffers, gradients, attributes and random numbers."""
    from sbnet_cupy.torch.network import onednn

    sparse, *given = parts(st, nn.Sequential(Joined(), nn.Dropout(0.5), Noise()))
    sparse.train(training)
    before, hooked = (copy.deepcopy(sparse.state_dict()), torch.get_rng_state()), []
    for parameter in sparse.parameters():
        parameter.register_hook(hooked.append)
    ran, run = [], type(sparse)._run

    def count(self, table, x, args=(), kwargs=None, outside=0.0):
        ran.append(self)
        return run(self, table, x, args, kwargs, outside)

    monkeypatch.setattr(type(sparse), "_run", count)
    monkeypatch.setattr(onednn, "_AVAILABLE", False)  # whose weights have no meta tensors
    monkeypatch.setattr(onednn, "_MULTIPLIES", False)
    with torch.set_grad_enabled(training):
        rehearse(sparse, *given)
    assert len(ran) == (1 if training else 2) and sparse not in ran
    assert on_cpu == [{}]
    for name, value in sparse.state_dict().items():
        assert torch.equal(value, before[0][name]), name
    assert torch.equal(torch.get_rng_state(), before[1])
    assert sparse.model[0].calls == 0 and not sparse._weights.kept
    assert all(p.grad is None for p in sparse.parameters()) and not hooked


def test_a_rehearsal_calls_no_hooks_of_tensors(st, on_cpu):
    seen = []

    class Hooked(nn.Conv2d):
        def forward(self, x):
            y = super().forward(x)
            y.register_hook(seen.append)
            return y

    sparse, x, table, outside = parts(st, Hooked(3, 4, 3, padding=1))
    rehearse(sparse.train(), x, table, outside)
    assert on_cpu == [{}] and not seen


def test_gradients_of_a_rehearsal(st, monkeypatch):
    """Of the image if it has one, and of all parameters that results depend on."""
    from sbnet_cupy.torch.network import rehearsal

    sparse, x, table, outside = parts(st)
    seen = []

    def run(self, table, x, outside):
        seen.append(
            (x.requires_grad, table.occupied, table.model is self.model is not sparse.model)
        )
        first, *_ = self.parameters()
        first.register_hook(lambda grad: seen.append(tuple(grad.shape)))
        return {"y": [x.sum() * first.sum()], "other": 3, "constant": torch.ones(1)}

    monkeypatch.setattr(type(sparse), "_run", run)
    weight, *_ = sparse.parameters()
    for has_gradient in (True, False):
        rehearsal._calls(sparse, x.requires_grad_(has_gradient), table, outside, True)
        assert seen == [(has_gradient, True, True), tuple(weight.shape)]
        seen.clear()
    assert x.grad is None and weight.grad is None


def test_what_a_rehearsal_shares_with_the_network(st):
    """Only what its calls do not write to, and nothing that may have hooks."""
    from sbnet_cupy.torch.network import rehearsal

    sparse, *_ = parts(st)

    def shares(is_first=False):
        twin = rehearsal._twin(sparse, is_first)
        assert twin._joins is sparse._joins and twin._weights is not sparse._weights
        kinds = [its.parameters for its in (twin, sparse)], [its.buffers for its in (twin, sparse)]
        same = [{a is b for a, b in zip(one(), other(), strict=True)} for one, other in kinds]
        assert all(len(found) == 1 for found in same)
        return [found.pop() for found in same]

    assert shares() == [False, False]
    with torch.no_grad():
        assert shares() == [True, False]  # in training
        sparse.eval()
        assert shares(is_first=True) == [True, False]
        assert shares() == [True, True]
        sparse._replays.changes = 1
        assert shares() == [True, False]


def test_what_is_kept_of_weights_is_read_and_not_written(st):
    """A rehearsal packs weights into memory that holds nothing."""
    sparse, x, *_ = parts(st)
    with torch.no_grad():
        sparse.eval()(x, torch.ones(1, *SIZE))
    assert sparse._weights.kept
    kept = next(iter(sparse._weights.kept.values()))[2]
    kept[0]._stack_packed = "packed by a call"
    twin = sparse._weights.copied()
    assert list(twin.kept) == list(sparse._weights.kept)
    alike = next(iter(twin.kept.values()))[2]
    assert alike[0]._stack_packed == "packed by a call" and alike[0].is_kept
    assert alike[0].data_ptr() == kept[0].data_ptr() and alike[1:] == kept[1:]
    alike[0]._stack_packed = "packed by a rehearsal"
    twin.kept.clear()
    assert kept[0]._stack_packed == "packed by a call" and sparse._weights.kept


def test_what_kernels_would_write_is_not_computed_with(st):
    """Indices made of it could stop the device; what is made of numbers alone is there."""
    from sbnet_cupy.torch.network.rehearsal import Uncomputed

    functional, table = nn.functional, torch.arange(16.0).view(4, 4)
    with Uncomputed():
        x = torch.empty(2, 8, 6, 6)
        known = [torch.arange(5.0), torch.ones(5)[torch.arange(5)], torch.empty(5)]
        known[2].copy_(known[0])
        total = torch.ones(4)
        made = [
            x + 1, x.sum(), torch.empty_like(x) + 1, x.new_empty(7) + 1,
            torch.cat([x, x], 1).half()[:, 3:], *x.max(1), x.chunk(2, 1)[0],
            table.index_select(0, torch.empty(3, dtype=torch.int64) - 7),  # which would raise
            functional.binary_cross_entropy(x / 0 - 1, x), total.add_(x[0, 0, 0, :4]) * 2,
        ]  # fmt: skip
        result = torch.add(total, total, out=total)
        made.append(x.to("cpu", torch.float16, copy=True))
        last = x.to(memory_format=torch.channels_last) + 1
    assert all(not t.any() for t in made)
    assert [tuple(t.shape) for t in made] == [
        (2, 8, 6, 6), (), (2, 8, 6, 6), (7,), (2, 13, 6, 6), (2, 6, 6), (2, 6, 6), (2, 4, 6, 6),
        (3, 4), (), (4,), (2, 8, 6, 6),
    ]  # fmt: skip
    assert [made[4].dtype, made[6].dtype] == [torch.float16, torch.int64]
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert made[7].data_ptr() == x.data_ptr() and total.sum() == 4 and result is total
    assert known[1].sum() == 5 and torch.equal(known[0], known[2])


def test_what_kernels_were_to_be_launched_with_is_unknown(st, monkeypatch):
    """As what holds -1 where none has written."""
    from sbnet_cupy.torch.network.rehearsal import Uncomputed

    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    values, mode = torch.arange(3.0), Uncomputed()
    with mode:
        rows, others = torch.full((3,), -1), torch.arange(3)
        assert mode.skips(None, [0, 1, rows.data_ptr()])
        found = values.index_select(0, rows), values.index_select(0, others)
        freed = torch.full((3,), -1)
        address = freed.data_ptr()
        del freed
        assert mode.skips("any", [address])
    assert not found[0].any() and torch.equal(found[1], values)


def test_kernels_are_launched_with_what_is_known_or_empty(st, monkeypatch):
    """What they wrote is known for good; so PyTorch computes with it."""
    from sbnet_cupy.torch.network.rehearsal import Uncomputed

    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    mode = Uncomputed(launched=("lists",))
    with mode:
        points, sites, features, late = torch.arange(8), *(torch.empty(8) for _ in range(3))
        assert not mode.skips("lists", [points[2:].data_ptr(), 0, sites[4:].data_ptr()])
        assert mode.skips("products", [sites.data_ptr(), features[3:].data_ptr()])
        assert mode.skips("lists", [features.data_ptr(), late.data_ptr()])
        assert mode.skips(None, [late.data_ptr()])
        known = [points[1:] + 1, sites[1:] + 1]
        unknown = [features[1:] + 1, late[1:] + 1]
        features.fill_(2)
        known += [features[1:] + 1, torch.empty(8).zero_() + 1]
        assert not mode.skips("lists", [features.data_ptr()])
        sites.copy_(late)
        assert mode.skips("lists", [sites.data_ptr()])
        half = torch.empty(8)
        half[:4].copy_(points[:4])
        unknown.append(half + 1)
        assert not mode.skips("lists", [half.data_ptr()])
    assert all(t.all() for t in known) and not any(t.any() for t in unknown)


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("launches", [False, True])
def test_what_operators_of_this_package_return(st, is_known, launches):
    """It is known where they knew what they were given, and launched all kernels."""
    from sbnet_cupy.torch.network.rehearsal import Uncomputed

    mode, x = Uncomputed(("lists",)), torch.ones(3)
    if not is_known:
        mode._forget(x.untyped_storage())

    def operator(x, scale):
        assert mode.skips("lists" if launches else "products", []) is not launches
        return x * scale, None

    operator.namespace, operator.is_view = "sbnet_cupy", False
    operator._schema = types.SimpleNamespace(name="sbnet_cupy::operator")
    y, nothing = mode.__torch_dispatch__(operator, (), (x,), {"scale": 2})
    assert mode._is_unknown(y) is not (is_known and launches) and nothing is None


def test_memory_that_operators_allocate(st):
    """It holds zeros, and is known once a kernel that is launched has written it."""
    from sbnet_cupy.torch.network.rehearsal import Uncomputed

    mode, written, other = Uncomputed(("lists",)), torch.ones(4), torch.ones(4)
    for tensor in (written, other):
        mode.allocated(tensor)
        assert not tensor.any() and mode._is_unknown(tensor)
    assert not mode.skips("lists", [written.data_ptr()]) and not mode._is_unknown(written)
    assert mode.skips("products", [other.data_ptr()])
    assert mode.skips("lists", [other.data_ptr()]) and mode._is_unknown(other)


def test_memory_for_kernels_is_noted(st, monkeypatch):
    """That which CuPy gets of PyTorch, while a rehearsal lasts."""
    from sbnet_cupy.core import torch_memory
    from sbnet_cupy.core.rehearsal import Rehearsal, rehearsing

    noted, empty, rehearsal = [], torch.empty, Rehearsal()
    monkeypatch.setattr(rehearsal, "allocated", noted.append)
    cuda = types.SimpleNamespace(MemoryPointer=lambda memory, start: memory)
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(torch, "empty", lambda size, *, dtype, device: empty(size, dtype=dtype))
    monkeypatch.setattr(torch_memory, "_memory_class", lambda: lambda tensor: tensor)
    torch_memory.allocate(8)
    with rehearsing(rehearsal):
        memory = torch_memory.allocate(16)
    assert len(noted) == 1 and noted[0] is memory and memory.nbytes == 16


def test_memory_that_is_gone_is_not_found(st):
    from sbnet_cupy.torch.network.rehearsal import _Memory

    memory, owner = _Memory(), torch.empty(64, dtype=torch.uint8)
    whole, start = owner.untyped_storage(), owner.data_ptr()
    memory.add(whole)
    memory.add(whole)
    assert memory.at(start) is whole is memory.at(start + 63)
    assert memory.at(start + 64) is None is memory.at(start - 1)
    del whole, owner
    assert memory.at(start + 3) is None and not memory._starts


def test_what_is_not_known_does_not_come_to_the_host(st):
    """The host would read zeros for numbers, and make arrays of as many rows."""
    from sbnet_cupy.torch.network.rehearsal import Uncomputed, _kept_on

    with Uncomputed(), pytest.raises(RuntimeError, match="meta"):
        torch.empty(1).item()
    with Uncomputed(), pytest.raises(RuntimeError, match="moved from meta to cpu"):
        torch.ones(3).copy_(torch.empty(3, device="meta"))
    assert _kept_on(torch.device("cuda", 1), None) == torch.device("cuda", 1)
    assert _kept_on(torch.device("cuda", 1), "cuda:0") == torch.device("cuda", 0)
    with pytest.raises(RuntimeError, match="moved from cuda:1 to cpu"):
        _kept_on(torch.device("cuda", 1), "cpu")


@pytest.mark.parametrize("why", ["a hook", "what changes unseen", "other processes"])
def test_what_a_copy_could_change_is_not_rehearsed(st, rehearsed, why):
    done, notes = rehearsed
    sparse, x, table, _ = parts(st)
    if why == "a hook":
        sparse.model.first.register_forward_hook(lambda *given: None)
    elif why == "what changes unseen":
        sparse.model.draws = random.Random(0)
    else:
        sparse.model.last.__class__ = type("Last", (nn.parallel.DistributedDataParallel,), {})
    sparse._rehearsals.before(sparse, x, table, 0.0)
    assert not done and not notes


@pytest.mark.parametrize("fails", ["a call", "a copy"])
def test_a_rehearsal_that_fails_is_left(st, on_cpu, monkeypatch, fails):
    sparse, *given = parts(st)
    if fails == "a call":
        monkeypatch.setattr(type(sparse), "_run", lambda *given, **named: 1 / 0)
    else:
        monkeypatch.setattr(type(sparse), "__deepcopy__", lambda *given: 1 / 0)
    rehearse(sparse, *given)
    assert on_cpu == [{}]


@pytest.fixture
def cold(tmp_path, monkeypatch):
    """No kernel is loaded or on disk; gives the names of threads, one for each that compiles."""
    from sbnet_cupy.core import compile as compiling
    from sbnet_cupy.core import launch

    names, compile_cubin = [], compiling.compile_cubin

    def noted(*arguments):
        names.append((threading.current_thread().name, arguments[:2]))
        return compile_cubin(*arguments)

    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    compiling._cache_dir.cache_clear()
    monkeypatch.setattr(compiling, "compile_cubin", noted)
    monkeypatch.setattr(launch, "_LOADED", {})
    monkeypatch.setattr(launch, "_PARAMETERS", {})
    clear_plans()  # and all else that keeps a launch
    cached = type(compiling._cache_dir)
    for kept in gc.get_objects():
        if type(kept) is cached and str(kept.__module__).startswith("sbnet_cupy."):
            kept.cache_clear()
    yield names
    compiling._cache_dir.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("width", [24, 40])
def test_first_calls_compile_at_once_what_they_launch(st, require, cold, training, width):
    """The same bits as without, and nothing is left for later calls of the kind."""
    device = on_device(require, torch, "cuda")
    torch.manual_seed(width)
    net = networks.random_statistics(Joined(width)).to(device).train(training)
    x = torch.randn(2, 3, *SIZE, device=device)
    masks = [torch.rand(2, 9, 13, device=device) < share for share in (0.1, 0.1, 0.4)]
    masks = [m.repeat_interleave(8, 1).repeat_interleave(8, 2)[:, :, :100] for m in masks]
    found, compiled = [], []
    for replay in ("auto", False):
        sparse = st.sparsify(copy.deepcopy(net), BLOCK, replay=replay)
        for mask in masks:
            before = len(cold)
            with torch.set_grad_enabled(training), torch.autocast("cuda", torch.bfloat16):
                y = sparse(x, mask)
            found.append([y.detach()])
            if training:
                grads = torch.autograd.grad(y.float().square().mean(), list(sparse.parameters()))
                found[-1] += grads
            found[-1] += [b.clone() for b in sparse.buffers()]
            compiled.append(cold[before:])
        assert sparse.model.calls == (3 if training else 0)
    for got, expected in zip(found[:3], found[3:], strict=True):
        assert all(map(torch.equal, got, expected))
    alone = [[what for by, what in each if "ThreadPool" not in by] for each in compiled]
    assert len(compiled[0]) > 4 and len(alone[0]) <= 2  # the list of blocks is made before
    assert not any(alone[1:3]) and not compiled[1]


class AtSites(nn.Module):
    """Voxels of points, on two levels, with a sum; a row for each point."""

    def __init__(self, width):
        super().__init__()
        self.first, self.down, self.up = (
            nn.Parameter(torch.randn(3, 3, 3, *channels) / 8)
            for channels in ((4, width), (width, 2 * width), (2 * width, width))
        )
        self.norm = nn.BatchNorm1d(width)

    def forward(self, points, values):
        from sbnet_cupy import torch as st

        x, voxel = st.voxelize(points, values, ranges=3 * [(0, 8)], voxel_size=0.25)
        x = st.submanifold_conv(x, self.first, activation="relu")
        y = st.strided_conv(x, self.down, stride=2, padding=1, activation="relu")
        y = st.inverse_conv(y, self.up, onto=x)
        x = x.replace(x.features + y.features)
        norm = self.norm.running_mean, self.norm.running_var, self.norm.weight, self.norm.bias
        return st.masked_batch_norm(x, *norm, self.training).features[voxel]


def layers_at_sites(scn, width):
    """Return a network of SparseConvNet's layers, with a norm, on points."""
    plain = scn.Sequential(
        scn.InputLayer(3, 33, mode=4),
        scn.SubmanifoldConvolution(3, 4, width, 3, False),
        scn.BatchNormReLU(width),
        scn.Convolution(3, width, 2 * width, 3, 2, False),
        scn.Deconvolution(3, 2 * width, width, 3, 2, False),
    )
    return scn.Sequential(plain, scn.OutputLayer(3))


def at_sites(device, layers, training):
    """Return a network, and 3000 points with their values."""
    from sbnet_cupy.torch import scn

    torch.manual_seed(training)
    net = layers_at_sites(scn, 24) if layers else AtSites(24)
    points = torch.rand(3000, 3, device=device) * (33 if layers else 8)
    values = torch.randn(3000, 4, device=device).half()
    net = net.to(device).half().train(training)
    return net, points.long() if layers else points, values


@pytest.mark.gpu
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("layers", [False, True])
def test_graphs_at_sites_compile_at_once(st, require, cold, training, layers):
    """All but those that list sites, by whose numbers the others are chosen."""
    from sbnet_cupy.torch import scn

    net, points, values = at_sites(on_device(require, torch, "cuda"), layers, training)
    found = []
    for again in (False, True):  # nothing is rehearsed again
        if layers:
            y = scn.graphed(net, [[points, values]])([points[:2800], values[:2800]])
        else:
            y = st.graphed(net, [(points, values)])(points[:2800], values[:2800])
        found.append([y])
        if training:
            grads = torch.autograd.grad(y, list(net.parameters()), torch.cos(y.detach()))
            found[-1] += grads
        assert not (again and cold)
        alone = {what[0] for by, what in cold if "ThreadPool" not in by}
        assert again or (len(cold) > 12 and alone == {"submanifold/coordinate_map"})
        cold.clear()
    assert all(map(torch.equal, *found))


@pytest.mark.gpu
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("layers", [False, True])
def test_eager_calls_at_sites_compile_at_once(st, require, cold, training, layers):
    """A Sequential before its first call by itself, other networks where they are told to."""
    net, *given = at_sites(on_device(require, torch, "cuda"), layers, training)
    given = [given] if layers else given
    before = copy.deepcopy(net.state_dict())
    with torch.set_grad_enabled(training):
        if not layers:
            assert st.compile_ahead(net, *given) is net and cold
            assert all(map(torch.equal, net.state_dict().values(), before.values()))
            cold_before = len(cold)
        y = net(*given)
        if training:
            torch.autograd.grad(y, list(net.parameters()), torch.cos(y.detach()))
    assert layers or len(cold) == cold_before
    alone = {what[0] for by, what in cold if "ThreadPool" not in by}
    assert len(cold) > 8 and alone == {"submanifold/coordinate_map"}


def on_gpu(monkeypatch):
    """Let eager calls at sites be taken for calls on a GPU."""
    from sbnet_cupy.torch.submanifold import ahead

    monkeypatch.setattr(ahead, "_on_gpu", lambda net, tensors: next(iter(tensors), None))
    return ahead


def test_the_first_eager_call_of_a_kind_at_sites_is_rehearsed(st, rehearsed, monkeypatch):
    """Of another size, dtype and mode, with gradients; not where it could have an effect."""
    from sbnet_cupy.torch import scn

    on_gpu(monkeypatch)
    done, notes = rehearsed
    net = layers_at_sites(scn, 4).eval()
    inner = []
    net[0][1].register_forward_hook(lambda *given: inner.append(len(done)))
    points, values = torch.randint(0, 33, (40, 3)), torch.randn(40, 4)
    with torch.no_grad():
        net([points, values])
        assert not done and inner == [0]  # a hook would see it
        net[0][1]._forward_hooks.clear()
        plain = layers_at_sites(scn, 4).eval()

        def calls(rows=40, dtype=torch.float32):
            plain([points[:rows], values[:rows].to(dtype)])
            return len(done)

        plain.add(scn.Sequential(Noise()))
        assert calls() == 1  # of the part with the InputLayer: nobody knows what Noise does
        plain = layers_at_sites(scn, 4).eval()
        assert calls() == 2  # of the whole, too
        assert calls() == calls(39) == 2 and calls(20) == 4
        plain.double()
        assert calls(dtype=torch.float64) == 6
        plain.float()
    assert calls() == 8
    plain.train()
    assert calls() == 10
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert calls(10) == 10 and len(notes) == 10


def test_networks_at_sites_are_compiled_ahead_when_told(st, rehearsed, monkeypatch):
    """For these very sizes; an error says what cannot be."""
    points, values = torch.rand(40, 3) * 8, torch.randn(40, 4)
    net = AtSites(4).eval()
    done, _ = rehearsed
    assert st.compile_ahead(net, points, values) is net and not done  # nothing to compile
    ahead = on_gpu(monkeypatch)
    for rows, count in ((40, 1), (40, 1), (39, 2)):
        assert st.compile_ahead(net, points[:rows], values[:rows]) is net and len(done) == count
    with pytest.raises(TypeError, match="got function; put the function"):
        st.compile_ahead(on_gpu, points)
    net.norm.register_forward_hook(lambda *given: None)
    with pytest.raises(RuntimeError, match="net must have no hooks"):
        st.compile_ahead(net, points, values)
    assert len(done) == 2 and not ahead._SEEN.get(net)


@pytest.mark.parametrize("training", [False, True])
def test_a_rehearsal_of_an_eager_call_at_sites_leaves_no_trace(st, on_cpu, monkeypatch, training):
    """Of the network, its buffers, gradients, hooks of tensors and what it is called with."""
    from sbnet_cupy.torch.network import rehearsal

    on_gpu(monkeypatch)
    monkeypatch.setattr(rehearsal, "Note", Notes())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    net, called, seen = AtSites(4).train(training), [], []
    monkeypatch.setattr(rehearsal, "compile_kernels", lambda kernels: called.append(kernels))
    forward = AtSites.forward

    def counted(self, points, values):
        y = forward(self, points, values.mul_(2))
        seen.append((self, y.requires_grad))
        return y

    monkeypatch.setattr(AtSites, "forward", counted)
    points, values = torch.rand(40, 3) * 8, torch.randn(40, 4)
    before = copy.deepcopy(net.state_dict()), values.clone(), torch.get_rng_state()
    for parameter in net.parameters():
        parameter.register_hook(lambda grad: seen.append(grad))
    with torch.set_grad_enabled(training):
        st.compile_ahead(net, points, values)
    assert len(called) == 1 and len(seen) == 1
    assert seen[0][0] is not net and seen[0][1] is training
    assert torch.equal(values, before[1]) and torch.equal(torch.get_rng_state(), before[2])
    assert all(map(torch.equal, net.state_dict().values(), before[0].values()))
    assert all(p.grad is None for p in net.parameters())
