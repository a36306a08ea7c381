"""Training with ``replay=True``: calls like earlier ones are replayed, and give what calls give."""

import copy
import gc
import random
import threading
import warnings
import weakref

import pytest

torch = pytest.importorskip("torch")


from support import graphs_on_cpu, networks  # noqa: E402  (needs PyTorch)
from support.torch_cases import on_device  # noqa: E402

nn = torch.nn

SIZE, BLOCK = (61, 84), 16


@pytest.fixture(params=["as on a GPU", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(st, request, require, monkeypatch):
    """The device of the images, where graphs are what the parameter says."""
    if request.param == "gpu":
        return on_device(require, torch, "cuda")
    from sbnet_cupy.torch.network import cuda, replay

    graphs_on_cpu.patch(monkeypatch)
    monkeypatch.setattr(replay, "on_gpu", lambda x, mask: True)
    monkeypatch.setattr(cuda, "list_blocks", graphs_on_cpu.list_blocks)
    return "cpu"


@pytest.fixture
def log(st, monkeypatch):
    """What was captured and replayed."""
    from sbnet_cupy.torch.network.training_graphs import Graphs

    done = []
    for name in ("_capture", "replay", "_gradients_again"):
        function = getattr(Graphs, name)

        def logged(self, *args, _name=name, _function=function):
            done.append(_name.strip("_"))
            return _function(self, *args)

        monkeypatch.setattr(Graphs, name, logged)
    return done


@pytest.fixture(autouse=True)
def without_warning(st, device, log):
    """No call fails to be captured but where a test says so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "a call cannot be replayed")
        yield


def told(log):
    """Return what was done since the last time."""
    names = list(log)
    log.clear()
    return names


def images(device, seed=0):
    """Return an image and a mask; the masks of all seeds have as many blocks."""
    x = networks.image(size=SIZE, dtype=torch.float32).to(device)
    mask = networks.blocks((2, *SIZE), BLOCK, 0.4)[1].contiguous().to(device)
    return x * (1 + seed) + seed, mask if seed % 2 == 0 else mask.flip(0)


def pair(st, device, name="resnet_basic", **options):
    """Return a network that replays, and its twin that does not, in training."""
    dense = networks.network(name).to(device) if isinstance(name, str) else name.to(device)
    sparse = st.sparsify(dense, BLOCK, replay=True, **options).train()
    return sparse, st.sparsify(copy.deepcopy(dense), BLOCK, replay=False, **options).train()


def near(found, expected, same_bits=True):
    """Assert that numbers are the same; on a GPU, where kernels may be others, up to TF32.

    There the stack of a replay has more rows. Kernels that are chosen by it sum in another order,
    and some gradients, as that of a bias ahead of a batch norm, are nothing but what is rounded.
    """
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None and a.is_cuda:
            torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3 * float(b.abs().max()) + 1e-6)
        elif a is not None and same_bits:
            assert torch.equal(a, b)
        elif a is not None:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.abs().max()))


def numbers(sparse, y):
    """Return the result, gradients and running statistics."""
    return [y.detach(), *(p.grad for p in sparse.parameters()), *sparse.buffers()]


USUAL = "resnet_basic", "fcn", "efficientnet"
OTHERS = [name for name in networks.FAMILIES if name not in (*USUAL, "csp")]  # csp: another size


@pytest.mark.parametrize("capacity", [None, 0.7])
@pytest.mark.parametrize(
    "name", [*USUAL, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in OTHERS)]
)
def test_steps_are_those_of_calls(st, device, log, name, capacity):
    sparse, plain = pair(st, device, name, capacity=capacity)
    optimizers = [torch.optim.SGD(net.parameters(), 1e-3) for net in (sparse, plain)]
    kept = []
    for step in range(5):
        x, mask = images(device, step)
        results = []
        for net, optimizer in zip((sparse, plain), optimizers, strict=True):
            torch.manual_seed(step)
            y = net(x, mask)
            leaf, *others = (t for t in torch.utils._pytree.tree_leaves(y) if t.requires_grad)
            optimizer.zero_grad()
            sum(t.square().mean() for t in (leaf, *others)).backward()
            results.append(numbers(net, leaf))
        near(*results)
        optimizers[0].step()
        with torch.no_grad():
            for a, b in zip(plain.parameters(), sparse.parameters(), strict=True):
                a.copy_(b)
        kept.append([(t, t.clone()) for t in results[0][:1]])
        assert 0 < sparse.computed()[next(iter(sparse.computed()))] <= 1
    assert told(log) == ["capture", *4 * ["replay"]]
    assert all(torch.equal(*both) for step in kept for both in step)  # nothing is written over
    sparse.eval(), plain.eval()
    with torch.no_grad():
        found, expected = (torch.utils._pytree.tree_leaves(net(x, mask)) for net in (sparse, plain))
    near(found, expected)


def test_results_without_a_gradient(st, device, log):
    """What they alone depend on has none, as in a call: no optimizer touches it."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = small(), nn.Conv2d(4, 2, 1)

        def forward(self, x):
            """Return two results."""
            y = self.first(x)
            return y, self.second(y)

    sparse, plain = pair(st, device, Two())
    for step in range(5):
        found = []
        for net in (sparse, plain):
            net.zero_grad()
            y = net(*images(device, step))
            (y[0].square().mean() + (y[1].square().mean() if step < 2 else 0)).backward()
            found.append(numbers(net, y[0]))
        near(*found)
    assert sparse.model.second.weight.grad is None
    assert told(log) == ["capture", "replay", "replay", "gradients_again"]


def test_only_true_replays_in_training(st, device, log):
    sparse, _ = pair(st, device, "fcn")
    for how in ("auto", False):
        sparse.replay = how
        for _ in range(4):
            sparse(*images(device))["out"].sum().backward()
    assert told(log) == []


def small():
    """Return a small network in training."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1)
    )


def warm(sparse, device, times=3):
    """Run steps until there is a graph."""
    for _ in range(times):
        sparse(*images(device)).sum().backward()
    sparse.zero_grad()


def test_calls_run_while_gradients_are_awaited(st, device, log):
    """Two calls before the gradients of both, as of pairs of images."""
    sparse, plain = pair(st, device, small())
    warm(sparse, device), warm(plain, device)
    told(log)
    for _ in range(2):
        found = []
        for net in (sparse, plain):
            one, two = net(*images(device, 1)), net(*images(device, 2))
            (one * two).square().mean().backward()
            found.append(numbers(net, two))
        near(*found)
        assert told(log) == ["replay"]
    sparse(*images(device))  # nobody keeps the result
    sparse(*images(device))
    assert told(log) == 2 * ["replay"]
    with torch.no_grad():
        sparse(*images(device))
    assert told(log) == []


@pytest.mark.parametrize("dropout", [False, True])
def test_gradients_twice_and_of_gradients(st, device, log, dropout):
    """The call runs again for them, draws the same numbers, and leaves statistics alone."""
    net = small()
    if dropout:
        net.append(nn.Dropout(0.5))
    sparse, plain = pair(st, device, net)
    warm(sparse, device), warm(plain, device)
    told(log)
    found = []
    for net in (sparse, plain):
        x, mask = images(device)
        x.requires_grad_()
        found.append([])
        for step in range(4):
            torch.manual_seed(step)
            y = net(x, mask)
            loss = y.square().mean()
            weight = next(net.parameters())
            (first,) = torch.autograd.grad(loss, weight, retain_graph=True)
            (again,) = torch.autograd.grad(loss, weight, retain_graph=True)
            grads = torch.autograd.grad(loss, [x, weight], create_graph=True)
            penalty = sum(g.square().sum() for g in grads)
            (second,) = torch.autograd.grad(penalty, weight)
            found[-1] += [y, first, again, *grads, second]
            del y, loss, grads, penalty
        found[-1] += list(net.buffers())
    # Gradients of gradients come in another order, and are added up in it.
    near(*([t.detach() for t in each] for each in found), same_bits=False)
    assert told(log)[-4:] == ["replay", *3 * ["gradients_again"]]


def test_dropout_draws_at_each_replay(st, device, log):
    sparse, _ = pair(st, device, small().append(nn.Dropout(0.5)))
    warm(sparse, device)
    told(log)
    torch.manual_seed(0)
    x, mask = images(device)
    one, two = (sparse(x, mask).detach() for _ in range(2))
    torch.manual_seed(0)
    again = sparse(x, mask).detach()
    assert told(log) == 3 * ["replay"]
    assert torch.equal(one, again) and not torch.equal(one == 0, two == 0)


def test_weights_that_change_before_the_gradients_are_refused(st, device, log):
    sparse, _ = pair(st, device, small())
    warm(sparse, device)
    y = sparse(*images(device))
    with torch.no_grad():
        next(sparse.parameters()).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    del y
    gc.collect()  # an error and the frames it has gone through may hold each other, and the result
    x, mask = images(device)
    y = sparse(x, mask)
    y.sum().backward(retain_graph=True)
    x.zero_()
    with pytest.raises(RuntimeError, match="its image or mask was changed in place"):
        y.sum().backward()


def test_a_network_in_evaluation_since_then_is_not_run_again(st, device, log):
    """Its gradients would be those of other statistics."""
    sparse, _ = pair(st, device, small())
    warm(sparse, device)
    y = sparse(*images(device))
    y.sum().backward(retain_graph=True)
    sparse.eval()
    with pytest.raises(RuntimeError, match="has changed since"):
        y.sum().backward(retain_graph=True)
    sparse.train()
    y.sum().backward()
    assert told(log)[-1] == "gradients_again"


def test_hooks_of_saved_tensors_run_at_each_call(st, device, log):
    """As those that keep activations on the host."""
    sparse, plain = pair(st, device, small())
    for step in range(4):
        for net in (sparse, plain):
            with torch.autograd.graph.save_on_cpu():
                y = net(*images(device, step))
            y.square().mean().backward()
    near(numbers(sparse, y), numbers(plain, y))
    assert told(log) == []
    warm(sparse, device)
    y = sparse(*images(device))
    with torch.autograd.graph.save_on_cpu():  # around the gradients alone
        y.sum().backward()
    assert told(log)[-1] == "replay" and next(sparse.parameters()).grad is not None


@pytest.mark.parametrize("cached", [True, False])
def test_autocast(st, device, log, cached):
    sparse, plain = pair(st, device, small())
    for step in range(4):
        found = []
        for net in (sparse, plain):
            net.zero_grad()
            with torch.autocast(device, torch.bfloat16, cache_enabled=cached):
                y = net(*images(device, step % 2))
            y.float().square().mean().backward()
            found.append(numbers(net, y))
        for a, b in zip(*found, strict=True):
            assert (a.double() - b.double()).norm() <= 4 * 2**-8 * b.double().norm()
    assert told(log) == ["capture", *3 * ["replay"]]
    sparse(*images(device)).sum().backward()  # without autocast: another call
    assert told(log) == []


def _froze(dense):
    dense[0].weight.requires_grad_(False)


def _set(dense):
    dense[1].momentum = 0.5


def _in_evaluation(dense):
    dense[1].eval()


def _replaced(dense):
    torch.manual_seed(1)
    dense[3] = nn.Conv2d(8, 4, 1).to(dense[0].weight.device)


@pytest.mark.parametrize("change", [_froze, _set, _in_evaluation, _replaced])
def test_a_change_of_the_network_makes_graphs_anew(st, device, log, change):
    sparse, plain = pair(st, device, small())
    warm(sparse, device), warm(plain, device)
    told(log)
    for net in (sparse, plain):
        change(net.model)
    for _ in range(4):
        found = []
        for net in (sparse, plain):
            net.zero_grad()
            y = net(*images(device))
            y.square().mean().backward()
            found.append(numbers(net, y))
        near(*found)
    assert told(log) == ["capture", "replay", "replay"]


class Watching(nn.Module):
    """A layer that hangs a hook on its result."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        """Compute."""
        y = self.layer(x)
        y.register_hook(lambda grad: None)
        return y


class Choosing(nn.Module):
    """A layer that is left out by a number that the host draws."""

    def __init__(self, draw):
        super().__init__()
        self.layer, self.draw = nn.Conv2d(4, 4, 1), draw

    def forward(self, x):
        """Compute, or not."""
        return self.layer(x) if self.draw() < 0.5 else x


class Reading(nn.Module):
    """A layer for which the host waits."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        """Compute by a number that is read."""
        return self.layer(x) * self.layer.weight.detach().abs().max().item()


def _random():
    return random.random()


def _torch_random():
    return float(torch.rand(1, device="cpu"))


CANNOT = {
    "drawn by Python": (lambda: Choosing(_random), "random numbers on the host"),
    "drawn by PyTorch": (lambda: Choosing(_torch_random), "random numbers on the host"),
    "hook": (Watching, "the network calls register_hook"),
    "read": (Reading, "waits for the device"),
}


@pytest.mark.parametrize("kind", CANNOT)
def test_what_cannot_be_captured_is_called_each_time(st, device, log, kind, request):
    layer, why = CANNOT[kind]
    if kind in ("read", "drawn by PyTorch") and device == "cpu":
        pytest.skip("a CPU is the host, and not waited for")
    sparse, _ = pair(st, device, small().append(layer()))
    sparse(*images(device)).sum().backward()
    with pytest.warns(RuntimeWarning, match=f"a call cannot be replayed.*{why}"):
        sparse(*images(device)).sum().backward()
    assert sparse(*images(device)).requires_grad
    assert told(log) == []


def test_hooks_of_modules_run_at_each_call(st, device, log):
    sparse, _ = pair(st, device, small())
    warm(sparse, device)
    told(log)
    calls = []
    sparse.register_full_backward_hook(lambda *_: calls.append("all"))
    handle = sparse.model[0].register_forward_hook(lambda *_: calls.append("first"))
    x, mask = images(device)
    x.requires_grad_()
    for _ in range(3):
        sparse(x, mask).sum().backward()
    assert told(log) == [] and calls == 3 * ["first", "all"]
    handle.remove()
    for _ in range(3):
        sparse(x, mask).sum().backward()
    assert told(log) == ["capture", "replay"]  # one call later, as a graph was lost
    assert calls == [*3 * ["first", "all"], *3 * ["all"]]


def test_hooks_of_parameters_run_at_each_step(st, device, log):
    sparse, plain = pair(st, device, small())
    seen = {sparse: [], plain: []}
    for net in (sparse, plain):
        next(net.parameters()).register_hook(lambda grad, net=net: seen[net].append(grad.clone()))
        warm(net, device, 4)
    near(seen[sparse], seen[plain])
    assert len(seen[sparse]) == 4 and told(log) == ["capture", *3 * ["replay"]]


def test_gradients_add_up_and_copies_have_graphs_of_their_own(st, device, log):
    sparse, plain = pair(st, device, small())
    for net in (sparse, plain):
        for step in range(4):
            net(*images(device, step)).square().mean().backward()
    near(numbers(sparse, torch.zeros(1)), numbers(plain, torch.zeros(1)))
    told(log)
    twin = copy.deepcopy(sparse)
    warm(twin, device, 1)
    assert told(log) == []
    sparse.to(torch.float64)
    sparse(images(device)[0].double(), images(device)[1]).sum().backward()
    assert told(log) == []


def test_distributed_data_parallel(st, device, log, tmp_path):
    """Gradients pass through the hooks that add them up over processes."""
    distributed = torch.distributed
    if not distributed.is_available():
        pytest.skip("needs torch.distributed")
    sparse, plain = pair(st, device, small())
    store, backend = f"file://{tmp_path}/store", "gloo" if device == "cpu" else "nccl"
    distributed.init_process_group(backend, init_method=store, rank=0, world_size=1)
    try:
        call = nn.parallel.DistributedDataParallel(sparse)
        for step in range(4):
            for run in (call, plain):
                run(*images(device, step)).square().mean().backward()
        del call, run  # must be gone before the process group is, which may hang otherwise
    finally:
        distributed.destroy_process_group()
    near(numbers(sparse, torch.zeros(1)), numbers(plain, torch.zeros(1)))
    assert told(log) == ["capture", *3 * ["replay"]]


def test_other_threads_allocate_during_a_capture(st, device, log):
    """As those of a DataLoader that pin memory."""
    if device == "cpu":
        pytest.skip("there is no capture on a CPU")
    sparse, _ = pair(st, device, small())
    end, failed = threading.Event(), []

    def load():
        try:
            n = 1 << 16
            while not end.is_set():
                n = n + 4096 if n < 1 << 26 else 1 << 16
                torch.empty(n, dtype=torch.uint8).pin_memory().to(device, non_blocking=True)
                torch.cuda.current_stream().synchronize()
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=load)
    thread.start()
    try:
        for seed in (0, 1):  # two graphs: the second has another size
            x, mask = images(device)
            warm_up = [sparse(x[: 2 - seed], mask[: 2 - seed]).sum().backward() for _ in range(3)]
            assert warm_up == 3 * [None]
    finally:
        end.set()
        thread.join()
    assert not failed and told(log) == 2 * ["capture", "replay", "replay"]


def test_memory_is_freed_with_the_graphs(st, device, log):
    sparse, _ = pair(st, device, small())
    warm(sparse, device)
    told(log)
    sparse.replay = "auto"
    sparse.replay = True
    warm(sparse, device)
    assert told(log) == ["capture", "replay", "replay"]


def test_graphs_are_dropped_with_their_network(st, device, log):
    """At once, also where a result is left, whose gradients are those of its graph."""
    sparse, _ = pair(st, device)
    x, mask = images(device)
    for _ in range(3):
        sparse(x, mask).sum().backward()
    assert "replay" in told(log)
    left = sparse(x, mask).sum()
    (run,) = sparse._training_replays.kept.values()
    graphs, network = weakref.ref(run.graphs), weakref.ref(sparse)
    parameters = list(sparse.parameters())
    for p in parameters:
        p.grad = None
    gc.disable()
    try:
        del sparse, run
        assert network() is None and graphs() is not None
        left.backward()
        assert all(p.grad is not None for p in parameters)
        del left
        assert graphs() is None
    finally:
        gc.enable()


def test_gradients_are_copied_as_they_lie(torch):
    """Small ones by one kernel: values, strides and alignment are those of copies one by one."""
    from sbnet_cupy.torch.network.together import Together

    generator = torch.Generator().manual_seed(0)

    def drawn(*shape, dtype=torch.float32):
        return torch.randn(shape, generator=generator).to(dtype)

    last = drawn(4, 3, 5, 2).contiguous(memory_format=torch.channels_last)
    tensors = [
        drawn(5), None, drawn(8, 4), last, drawn(3, 3).t(), drawn(6, dtype=torch.float16),
        drawn(2, 8, dtype=torch.float16), drawn(1, 1).expand(4, 4), drawn(600, 600), drawn(0, 3),
        drawn(2, 6)[:, :4], drawn(7, dtype=torch.float64), drawn(16),
    ]  # fmt: skip
    kept = Together(tensors)
    assert [x.numel() for x in kept.joined] == [5 + 32 + 120 + 0 + 16, 6 + 16]
    first, second = kept.copies(), kept.copies()
    for tensor, one, other in zip(tensors, first, second, strict=True):
        if tensor is None:
            assert one is None and other is None
            continue
        assert torch.equal(one, tensor) and one.dtype == tensor.dtype
        if tensor.is_contiguous() or tensor is last:
            assert one.stride() == tensor.stride()
        if tensor.nbytes % 16 == 0:
            assert one.data_ptr() % 16 == 0
        if tensor.numel():
            assert len({x.data_ptr() for x in (tensor, one, other)}) == 3
    for tensor in tensors:
        if tensor is not None and tensor.numel() == 5:
            tensor.fill_(7)
    kept.joined[0].copy_(kept.join()[0])
    assert kept.copies()[0].eq(7).all() and not first[0].eq(7).any()
