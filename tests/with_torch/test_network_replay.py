"""Calls that are replayed as CUDA graphs: which, until when, and with which result."""

import contextlib
import copy
import gc
import itertools
import pickle
import warnings
import weakref

import pytest

torch = pytest.importorskip("torch")


from support import graphs_on_cpu, networks  # noqa: E402  (needs PyTorch)

nn = torch.nn

SIZE, BLOCK = (61, 84), 16


def image(seed=7, n=2):
    """Return random images."""
    return torch.randn(n, 3, *SIZE, generator=torch.Generator().manual_seed(seed))


def masks(count=3):
    """Return masks of some blocks each."""
    return [networks.blocks((2, *SIZE), BLOCK, 0.4, seed)[1] for seed in range(count)]


@pytest.fixture
def captured(st, monkeypatch):
    """Take CPU tensors for those of a GPU; return what was captured and replayed."""
    from sbnet_cupy.torch.network import cuda, graphs, replay

    log = []

    def capture(sparse, x, mask, outside=None, room=None, memory=None):
        log.append(("capture", tuple(x.shape)))
        sparse._call(x, mask, outside=outside, room=room)

        def run(x, mask):
            log.append(("replay", tuple(x.shape)))
            return sparse._call(x, mask, outside=outside, room=room)

        return run

    monkeypatch.setattr(replay, "on_gpu", lambda x, mask: True)
    monkeypatch.setattr(graphs, "_captured", capture)
    monkeypatch.setattr(graphs, "new_memory", lambda device: object())
    monkeypatch.setattr(cuda, "list_blocks", graphs_on_cpu.list_blocks)
    return log


def steps(log):
    """Return what was done since the last time, by name."""
    names = [name for name, _ in log]
    log.clear()
    return names


def small():
    """Return a network without statistics of its own."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()).eval()


@torch.no_grad()
def test_the_second_call_alike_is_captured(st, captured):
    sparse = st.sparsify(small(), BLOCK, capacity=1.0)
    x, (mask, other, _) = image(), masks()
    first = sparse(x, mask)
    assert steps(captured) == []
    assert torch.equal(sparse(x, mask), first)
    assert steps(captured) == ["capture", "replay"]
    sparse(x, other)
    assert steps(captured) == ["replay"]
    for call in (
        lambda: sparse(x[:1], mask[:1]),
        lambda: sparse(x, mask.float()),
        lambda: sparse(x.to(memory_format=torch.channels_last), mask),
        lambda: sparse(x, mask, outside=1.0),
    ):
        call()
        assert steps(captured) == []
    assert not sparse.overflowed and 0 < sparse.computed()["0"] <= 1


@torch.no_grad()
def test_graphs_are_dropped_with_their_network(st, monkeypatch):
    """At once: a graph that is freed later, while another one is captured, spoils that."""
    from sbnet_cupy.torch.network import cuda, graphs, replay

    made = []

    class Graph:
        def replay(self):
            pass

    def capture(run, x, memory=None):
        graph = Graph()
        made.append(weakref.ref(graph))
        return graph, run()

    monkeypatch.setattr(replay, "on_gpu", lambda x, mask: True)
    monkeypatch.setattr(graphs, "capture", capture)
    monkeypatch.setattr(graphs, "new_memory", lambda device: object())
    monkeypatch.setattr(cuda, "list_blocks", graphs_on_cpu.list_blocks)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    sparse, x, mask = st.sparsify(small(), BLOCK, capacity=1.0), image(), masks(1)[0]
    first = sparse(x, mask)
    for _ in range(2):
        assert torch.equal(sparse(x, mask), first)
    assert [graph() is not None for graph in made] == [True]
    gc.disable()
    try:
        del sparse
        assert made[0]() is None
    finally:
        gc.enable()


@torch.no_grad()
def test_without_a_capacity_masks_of_about_as_many_blocks_share_a_graph(st, captured):
    sparse = st.sparsify(small(), BLOCK)
    eager = st.sparsify(sparse.model, BLOCK, replay=False)
    x, every = image(), [(n, i, j) for n in range(2) for i in range(4) for j in range(6)]

    def of(count):
        mask = torch.zeros(2, *SIZE, dtype=torch.bool)
        for n, i, j in every[:count]:
            mask[n, i * BLOCK, j * BLOCK] = True
        return mask

    done = []
    for count in (17, 18, 17, 19, 19, 0, 0, 48, 48):
        mask = of(count)
        assert torch.equal(sparse(x, mask), eager(x, mask))
        assert not sparse.overflowed and sparse.computed()["0"] == count / 48
        done.append(steps(captured))
    replayed = [["capture", "replay"], ["replay"]]
    assert done == [[], *replayed, [], replayed[0], [], [], [], []]  # the last are whole images


def test_the_table_of_a_call_on_a_gpu(st, captured, monkeypatch):
    """Its rows, and whether all are known to be blocks, by what is known of their number."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    sparse = st.sparsify(small(), BLOCK)

    def made(count, capacity=None, share=2.0, known=None):
        mask = torch.zeros(2, *SIZE, dtype=torch.bool)
        for n, i, j in [(n, i, j) for n in range(2) for i in range(4) for j in range(6)][:count]:
            mask[n, i * BLOCK, j * BLOCK] = True
        table, (counted, rows) = sparse._table_on_gpu(mask, SIZE, 48, known, capacity, share)
        return table.whole, table.known_live, counted if counted is None else int(counted), rows

    assert made(16) == (False, True, 16, 16)
    assert made(17) == (False, False, 17, 18)
    assert made(0)[::2] == (False, 0) and made(0)[3] == 0
    assert made(48) == (False, True, 48, 48)
    assert made(48, share=0.7) == (True, True, None, 48)
    assert made(40, share=0.7) == (True, False, None, 48)
    assert made(33, share=0.7) == (True, False, None, 48)  # its 36 rows are more than 33.6
    assert made(17, 18) == (False, False, 17, 18)
    assert made(17, 12) == (False, False, 17, 12)  # five are left out
    assert made(17, 18, known=17) == (False, False, 17, 18)
    assert made(17, 40, share=0.7) == (True, False, None, 48)


def test_what_is_never_replayed(st, captured):
    x, (mask, _, _) = image(), masks()
    with torch.no_grad():
        for sparse in (
            st.sparsify(small(), BLOCK, capacity=1.0, replay=False),
            st.sparsify(small(), BLOCK, capacity=1.0).train(),
        ):
            for _ in range(3):
                sparse(x, mask)
        sparse = st.sparsify(small(), BLOCK, capacity=1.0)
        for _ in range(3):
            sparse(x, mask, outside=torch.zeros(2, 4, *SIZE))
            with torch.profiler.profile(acc_events=True):
                sparse(x, mask)
    for _ in range(3):
        sparse(x, mask)
    assert steps(captured) == []
    with pytest.raises(ValueError, match="replay must be"):
        st.sparsify(small(), replay="always")


@torch.no_grad()
def test_calls_under_autocast_have_graphs_of_their_own(st, captured):
    sparse = st.sparsify(small(), BLOCK, capacity=1.0)
    x, (mask, _, _) = image(), masks()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            for expected in ([], ["capture", "replay"], ["replay"]):
                assert sparse(x, mask).dtype == dtype and steps(captured) == expected
    sparse(x, mask)
    assert steps(captured) == ["replay"]


@torch.no_grad()
def test_hooks_run_at_each_call(st, captured):
    dense, seen = small(), []
    sparse = st.sparsify(dense, BLOCK, capacity=1.0)
    x, (mask, _, _) = image(), masks()
    for _ in range(3):
        sparse(x, mask)
    steps(captured)
    handle = dense[0].register_forward_hook(lambda *_: seen.append(1))
    for _ in range(3):
        sparse(x, mask)
    assert len(seen) == 3 and steps(captured) == []
    handle.remove()
    for _ in range(3):
        sparse(x, mask)
    assert "capture" in steps(captured) and len(seen) == 3


def _new_parameter(dense):
    dense[0].weight = nn.Parameter(dense[0].weight * 2)


def _new_state(dense):
    other = small()
    other[0].weight.data *= 2
    dense.load_state_dict(other.state_dict())


def _new_module(dense):
    dense[0] = nn.Conv2d(3, 4, 3, padding=1)


CHANGES = {
    "in place": lambda dense: dense[0].weight.mul_(2),
    "memory": lambda dense: setattr(dense[0].weight, "data", dense[0].weight * 2),
    "parameter": _new_parameter,
    "state": _new_state,
    "buffer": lambda dense: dense[1].running_var.add_(1),
    "module": _new_module,
    "added": lambda dense: dense.append(nn.Sigmoid()),
    "attribute": lambda dense: setattr(dense[1], "eps", 0.1),
    "training": lambda dense: dense[1].train(),
}


@pytest.mark.parametrize("kind", CHANGES)
@torch.no_grad()
def test_a_change_of_the_network_drops_its_graphs(st, captured, kind):
    dense = small()
    sparse = st.sparsify(dense, BLOCK, capacity=1.0)
    x, (mask, _, _) = image(), masks()
    for _ in range(2):
        before = sparse(x, mask)
    steps(captured)
    CHANGES[kind](dense)
    after = sparse(x, mask)
    assert steps(captured) == [] and not torch.equal(before, after)
    if kind != "training":
        sparse(x, mask)
        sparse(x, mask)
        assert steps(captured) == ["capture", "replay"]  # later: a graph was lost


def _moved(dense):
    dense[1].register_parameter("more", dense[0]._parameters.pop("bias"))


def _renamed(dense):
    dense[0].more = vars(dense[0]).pop("groups")


def _swapped(dense):
    vars(dense[0])["_parameters"] = dict(dense[0]._parameters)


STATES = CHANGES | {
    "nothing": lambda dense: None,
    "moved": _moved,  # as many parameters as before
    "renamed": _renamed,  # as many attributes
    "swapped": _swapped,
    "attribute added": lambda dense: setattr(dense[0], "more", 1),
    "in a list": lambda dense: dense[0].kept.append(1),
    "tensor in a list": lambda dense: dense[0].kept[0].mul_(2),
    "module in a list": lambda dense: dense[0].kept[1][0].weight.mul_(2),
    "option of a module in a list": lambda dense: setattr(dense[0].kept[1][1], "eps", 0.1),
    "hook": lambda dense: dense[0].register_forward_hook(lambda *_: None),
}


@pytest.mark.parametrize("kind", STATES)
@torch.no_grad()
def test_a_state_holds_until_something_changes(st, kind):
    from sbnet_cupy.torch.network.state import State

    dense = small()
    dense[0].kept = [torch.ones(3), small()]  # PyTorch does not know of either
    state = State(dense)
    assert state.fit and state.holds()
    STATES[kind](dense)
    assert state.holds() == (kind == "nothing")
    numbers = ("in place", "memory", "state", "buffer", "nothing")
    numbers += ("tensor in a list", "module in a list")
    assert state.looks_alike() == (kind in numbers)


@pytest.mark.parametrize("kind", STATES)
@torch.no_grad()
def test_a_state_that_does_not_see_all_sees_weights(kind):
    """A graph at sites is kept even so, and has to be captured again with other weights."""
    from sbnet_cupy.torch.network.state import State

    dense = small()
    dense[0].kept = [torch.ones(3), small()]
    dense.generator = torch.Generator()  # its numbers change where nobody sees it
    state = State(dense)
    assert not state.fit
    STATES[kind](dense)
    assert state.holds() == (kind == "nothing")


@torch.no_grad()
def test_a_network_that_keeps_a_tensor_without_a_pointer_is_called_each_time(st):
    dense, x, mask = small(), image(), masks()[0]
    dense.kept = torch.eye(3).to_sparse()
    sparse = st.sparsify(dense, BLOCK)
    expected = st.sparsify(dense, BLOCK, replay=False)(x, mask)
    for _ in range(3):
        assert torch.equal(sparse(x, mask), expected)


@torch.no_grad()
def test_training_and_moves_drop_graphs(st, captured):
    sparse = st.sparsify(small(), BLOCK, capacity=1.0)
    x, (mask, _, _) = image(), masks()
    for change in (lambda: sparse.train().eval(), sparse.float, lambda: sparse(x, mask).sum()):
        for _ in range(2):
            sparse(x, mask)
        assert sparse._replays.kept
        with torch.enable_grad():
            change()
        assert not sparse._replays.kept
    for twin in (copy.deepcopy(sparse), pickle.loads(pickle.dumps(sparse))):
        steps(captured)
        for _ in range(2):
            twin(x, mask)
        assert steps(captured) == ["capture", "replay"]


@torch.no_grad()
def test_few_graphs_are_kept(st, captured):
    sparse = st.sparsify(small(), BLOCK, capacity=1.0)
    mask, most = torch.ones(10, *SIZE), sparse._replays.limit
    for n in range(1, most + 2):
        for _ in range(2):
            sparse(image(n=n), mask[:n])
    kept = [key[0][0] for key in sparse._replays.kept]
    assert kept == list(range(2, most + 2))
    sparse(image(n=2), mask[:2])
    sparse(image(n=10), mask)
    steps(captured)
    sparse(image(n=10), mask)
    assert steps(captured) == []  # one was lost: it takes a call more
    sparse(image(n=10), mask)
    assert [key[0][0] for key in sparse._replays.kept] == [*range(4, most + 2), 2, 10]
    assert len(sparse._replays.memory) == 1  # all share it


class Counting(nn.Module):
    """A network that counts its calls."""

    def __init__(self):
        super().__init__()
        self.conv, self.count = nn.Conv2d(3, 4, 3, padding=1), 0
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        """Convolve, and count."""
        self.count = self.count + 1
        self.calls += 1
        return self.conv(x)


@torch.no_grad()
def test_a_network_that_changes_itself_is_called_each_time(st, captured):
    dense = Counting().eval()
    sparse = st.sparsify(dense, BLOCK, capacity=1.0)
    for _ in range(6):
        sparse(image(), masks()[0])
    assert dense.count == dense.calls == 6 and steps(captured) == []


@torch.no_grad()
def test_what_cannot_be_captured_is_called_each_time(st, captured, monkeypatch):
    from sbnet_cupy.torch.network import graphs

    def fail(*_):
        raise RuntimeError("the network waits for the device, in aten::nonzero")

    monkeypatch.setattr(graphs, "_captured", fail)
    sparse = st.sparsify(small(), BLOCK, capacity=1.0)
    x, (mask, _, _) = image(), masks()
    first = sparse(x, mask)
    with pytest.warns(RuntimeWarning, match="cannot be replayed as a CUDA graph, RuntimeError"):
        assert torch.equal(sparse(x, mask), first)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(sparse(x, mask), first)
    assert not sparse.overflowed


@torch.no_grad()
def test_calls_that_are_refused_do_not_end_replays(st, captured):
    """They are refused each time, and others are captured after them."""
    sparse = st.sparsify(nn.Sequential(*small(), nn.Conv2d(4, 4, 3, 3)).eval(), BLOCK, capacity=1.0)
    x, (mask, _, _) = image(), masks()
    for _ in range(4):
        with pytest.raises(ValueError, match=r"outside must be 0 .* left the stack in conv2d"):
            sparse(x, mask, outside=9.0)
    steps(captured)
    for _ in range(2):
        sparse(x, mask)
    assert steps(captured) == ["capture", "replay"]


@pytest.mark.parametrize("was_on", [True, False])
def test_no_cycles_are_collected_during_a_capture(was_on):
    """And they are again as before, also if the capture fails."""
    from sbnet_cupy.torch.network import graphs

    before = gc.isenabled()
    (gc.enable if was_on else gc.disable)()
    try:
        with pytest.raises(RuntimeError, match="capture"), graphs.no_collection():
            assert not gc.isenabled()
            raise RuntimeError("the capture failed")
        assert gc.isenabled() == was_on
    finally:
        (gc.enable if before else gc.disable)()


@pytest.fixture
def on_gpu(st):
    """Return a network on the GPU, the same without graphs, images and masks."""
    if not torch.cuda.is_available():
        pytest.skip("needs gpu")
    dense = networks.network("resnet_basic").cuda().half()
    pair = [st.sparsify(dense, BLOCK, capacity=0.6, replay=how) for how in ("auto", False)]
    return (
        *pair,
        [image(seed).cuda().half() for seed in range(3)],
        [mask.cuda() for mask in masks()],
    )


@pytest.mark.gpu
@torch.no_grad()
def test_replays_have_the_bits_of_calls(on_gpu):
    sparse, plain, images, some = on_gpu
    results = [sparse(x, mask) for _ in range(2) for x in images for mask in some]
    expected = [plain(x, mask) for x in images for mask in some]
    assert len(sparse._replays.kept) == 1
    assert all(torch.equal(a, b) for a, b in zip(results, 2 * expected, strict=True))
    assert sparse.computed() == plain.computed() and not sparse.overflowed
    full = torch.ones_like(some[0])
    sparse(images[0], full)
    assert sparse.overflowed
    sparse(images[0], some[0])
    assert not sparse.overflowed


@pytest.mark.gpu
@torch.no_grad()
def test_without_a_capacity_graphs_of_all_sizes_share_memory(st, on_gpu):
    _, plain, images, _ = on_gpu
    sparse, eager = (st.sparsify(plain.model, BLOCK, replay=how) for how in ("auto", False))
    shares = (0.2, 0.35, 0.5, 0.65, 0.8, 1.0)
    some = [networks.blocks((2, *SIZE), BLOCK, share, 3)[1].cuda() for share in shares]
    for _ in range(3):
        for x in images:
            results = [sparse(x, mask) for mask in some]
            assert sparse.computed() == dict.fromkeys(sparse.computed(), 1.0)
            for mask, result in zip(some, results, strict=True):
                assert torch.equal(result, eager(x, mask))
    assert len(sparse._replays.kept) > 2 and len(sparse._replays.memory) == 1


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("how", ["auto", False])
def test_every_call_has_the_bits_of_the_first(st, on_gpu, how):
    """Also where it ends in products whose sums are long enough to show their order."""
    _, _, images, some = on_gpu
    layers = nn.Conv2d(3, 192, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    dense = nn.Sequential(*layers, nn.Linear(192, 999), nn.ReLU(), nn.Linear(999, 70))
    sparse = st.sparsify(dense.cuda().half().eval(), BLOCK, capacity=0.6, replay=how)
    results = [sparse(images[0], some[0]) for _ in range(4)]
    assert all(torch.equal(results[0], result) for result in results[1:])


@pytest.mark.gpu
@torch.no_grad()
def test_replays_see_new_weights(on_gpu):
    sparse, plain, images, some = on_gpu
    for _ in range(3):
        before = sparse(images[0], some[0])
    for change in (
        lambda: next(sparse.parameters()).mul_(2),
        lambda: sparse.load_state_dict(
            {name: value * 0.5 for name, value in sparse.state_dict().items()}
        ),
    ):
        change()
        for _ in range(5):
            after = sparse(images[0], some[0])
            assert torch.equal(after, plain(images[0], some[0]))
        assert not torch.equal(before, after) and sparse._replays.kept
        before = after


@pytest.mark.gpu
@torch.no_grad()
def test_a_network_that_waits_is_called_each_time(st, on_gpu):
    class Waiting(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, x):
            """Scale by a number that the host reads."""
            return self.conv(x) * (1 + self.conv.bias.abs().sum().item())

    _, _, images, some = on_gpu
    sparse = st.sparsify(Waiting().cuda().half().eval(), BLOCK, capacity=0.6)
    first = sparse(images[0], some[0])
    with pytest.warns(RuntimeWarning, match="waits for the device, in aten::_local_scalar_dense"):
        assert torch.equal(sparse(images[0], some[0]), first)
    stream = torch.cuda.current_stream()
    assert torch.equal(sparse(images[0], some[0]), first) and not sparse._replays.kept
    assert torch.cuda.current_stream() == stream


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("outside", [0.0, -2.5])
def test_images_of_results_are_filled_beside_layers(st, on_gpu, monkeypatch, outside):
    """Blocks are written after the layers, also where another mask had others active."""
    from sbnet_cupy.torch.network import cuda_ends

    fill, filled = cuda_ends._filled_beside, []
    monkeypatch.setattr(cuda_ends, "_LEAST_BESIDE", 0)
    monkeypatch.setattr(cuda_ends, "_MOST_BESIDE", 0.5)
    monkeypatch.setattr(
        cuda_ends, "_filled_beside", lambda *args: filled.append(fill(*args)) or filled[-1]
    )
    _, _, images, some = on_gpu
    channels = (3, 16, 32, 64)
    layers = [
        nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.ReLU())
        for a, b in itertools.pairwise(channels)
    ]
    dense = nn.Sequential(
        *layers, nn.Conv2d(64, 5, 3, padding=1), nn.Upsample(scale_factor=8, mode="bilinear")
    )
    dense.cuda().half().eval()
    sparse, plain = (
        st.sparsify(dense, BLOCK, capacity=0.5, replay=how, outside=outside)
        for how in ("auto", False)
    )
    x = torch.zeros(2, 3, 64, 96, device="cuda").half()
    for image, mask in [(image, mask) for mask in some for image in images] * 2:
        x[..., : SIZE[0], : SIZE[1]] = image
        y = torch.nn.functional.pad(mask, (0, 96 - SIZE[1], 0, 64 - SIZE[0]))
        assert torch.equal(sparse(x, y), plain(x, y))
    assert sparse._replays.kept
    assert any(image is not None for image in filled)
    assert any(image is None for image in filled)
