"""Never wrong in silence: modules with arithmetic of their own, hooks, threads, what is refused."""

import copy
import functools
import io
import pickle
import threading
import weakref

import pytest

torch = pytest.importorskip("torch")

from sbnet_cupy import DTypeError, ShapeError  # noqa: E402  (needs PyTorch)
from support import networks  # noqa: E402  (needs PyTorch)
from support.networks import assert_near  # noqa: E402
from support.torch_autograd import Double, assert_near_steps, train_step  # noqa: E402

nn = torch.nn
F = torch.nn.functional
parametrizations = torch.nn.utils.parametrizations
prune = pytest.importorskip("torch.nn.utils.prune")
checkpoint = pytest.importorskip("torch.utils.checkpoint").checkpoint
FlopCounterMode = pytest.importorskip("torch.utils.flop_counter").FlopCounterMode

SIZE, BLOCK = (48, 64), 16


class StandardizedConv(nn.Conv2d):
    """timm's StdConv2d: weights are normalized in each call."""

    def forward(self, x):
        """Convolve with normalized weights."""
        weight = F.batch_norm(
            self.weight.reshape(1, self.out_channels, -1), None, None, training=True
        ).reshape_as(self.weight)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class SameConv(nn.Conv2d):
    """timm's Conv2dSame: TensorFlow's padding, from the size of the image."""

    def forward(self, x):
        """Pad as TensorFlow does, and convolve."""
        pads = []
        for size, k, s in zip(
            x.shape[:1:-1], self.kernel_size[::-1], self.stride[::-1], strict=True
        ):
            total = max((-(-size // s) - 1) * s + k - size, 0)
            pads += [total // 2, total - total // 2]
        return F.conv2d(F.pad(x, pads), self.weight, self.bias, self.stride)


class Doubled(nn.Conv2d):
    """A subclass whose arithmetic is its own in ``_conv_forward``."""

    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(2 * x, weight, bias)


def hooked():
    """Return a convolution with hooks before and after it."""
    conv = nn.Conv2d(4, 4, 3, padding=1)
    conv.register_forward_pre_hook(lambda module, args: (args[0] * 3,))
    conv.register_forward_hook(lambda module, args, out: out + args[0])
    return conv


def pruned():
    """Return a convolution of which half of the weights are 0."""
    conv = nn.Conv2d(4, 4, 3, padding=1)
    prune.random_unstructured(conv, "weight", 0.5)
    return conv


def lazy():
    """Return a convolution that has seen no input."""
    return nn.LazyConv2d(4, 3, padding=1)


CONVOLUTIONS = {
    "standardized": lambda: StandardizedConv(4, 4, 3, padding=1),
    "same": lambda: SameConv(4, 4, 3, 2),
    "doubled": lambda: Doubled(4, 4, 3, padding=1),
    "hooked": hooked,
    "weight norm": lambda: parametrizations.weight_norm(nn.Conv2d(4, 4, 3, padding=1)),
    "old weight norm": lambda: nn.utils.weight_norm(nn.Conv2d(4, 4, 3, padding=1)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Conv2d(4, 4, 3, padding=1)),
    "pruned": pruned,
    "lazy": lazy,
    "reflect": lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
    "circular": lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
}


def image(n=2, channels=3):
    """Return random images."""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(n, channels, *SIZE, dtype=torch.float64, generator=generator)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_convolutions_with_arithmetic_of_their_own(st, kind):
    """They run through it, on the stack, and again after their weights changed."""
    torch.manual_seed(0)
    dense = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), CONVOLUTIONS[kind](), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1),
    ).double()  # fmt: skip
    networks.random_statistics(dense).eval()
    x, sparse = image(), st.sparsify(dense, BLOCK)
    sparse.break_even = 2.0
    full = torch.ones(2, *SIZE)
    on, mask = networks.blocks((2, *SIZE), BLOCK, 0.5)
    with torch.no_grad():
        for _ in range(2):
            assert_near(sparse(x, full), dense(x))
            assert sparse.dense_layers == {}
            for parameter in dense.parameters():
                parameter.mul_(1.25)
        if kind != "hooked":  # whose sums the oracle zeroes in an order of its own
            assert_near(sparse(x, mask), networks.oracle(dense, x, on, BLOCK))


def test_two_threads_have_their_own_masks(st):
    dense = networks.network("unet").double()
    sparse = st.sparsify(dense, BLOCK)
    x, calls = image(), []
    for seed in range(2):
        _, mask = networks.blocks((2, *SIZE), BLOCK, 0.4, seed)
        with torch.no_grad():
            calls.append((mask, sparse(x, mask)))
    wrong = []

    def work(mask, expected):
        with torch.no_grad():
            wrong.extend(1 for _ in range(10) if not torch.equal(sparse(x, mask), expected))

    threads = [threading.Thread(target=work, args=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and calls[0][1].ne(calls[1][1]).any()


class Run(nn.Module):
    """A function after a convolution."""

    def __init__(self, run):
        super().__init__()
        self.conv, self.run = nn.Conv2d(3, 3, 3, padding=1), run

    def forward(self, x):
        """Return what the function makes."""
        return self.run(self.conv(x))


REFUSED = {
    "data_ptr": lambda x: x.data_ptr(),
    "out=": lambda x: torch.add(x, x, out=torch.empty(1)),
    "as_strided": lambda x: x.as_strided((1,), (1,)),
    "resize_": lambda x: x.resize_(3),
    "resize_as_": lambda x: nn.CrossMapLRN2d(3)(x),
    "as_subclass": lambda x: x.as_subclass(torch.Tensor),
    "retain_grad": lambda x: x.retain_grad(),
}


INSTEAD = {
    "retain_grad": ".* use register_hook or torch.autograd.grad",
    "resize_as_": ".* use torch.empty_like; nn.CrossMapLRN2d calls it",
    "as_subclass": " cannot be used on an activation",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_meaning_is_refused_by_name(st, name):
    sparse = st.sparsify(Run(REFUSED[name]), BLOCK)
    with pytest.raises(NotImplementedError, match=f"{name}{INSTEAD.get(name, '')}"):
        sparse(image(channels=3).float(), torch.ones(2, *SIZE))


def _script():
    """Return a function of TorchScript."""

    def double(x):
        return torch.relu(x) * 2

    return torch.jit.script(double)


def _cond(x):
    return torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x - 1, (x,))


BELOW = {
    "scripted": (_script, r"aten.relu.* use the Python function that was scripted .*PYTORCH_JIT=0"),
    "mapped": (lambda: torch.vmap(torch.relu), "aten.relu.* torch.vmap .* functions of whole"),
    "gradient": (
        lambda: torch.func.grad(lambda x: (x * x).sum()), "aten.mul.* or torch.autograd.grad",
    ),
    "cond": (lambda: _cond, "torch.cond .* use Python's if .* PyTorch says: "),
    "one graph": (
        lambda: torch.compile(lambda x: torch.relu(x) * 2, backend="eager", fullgraph=True),
        "functions that torch.compile .* no fullgraph=True",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", BELOW)
def test_what_reaches_activations_below_functions_is_refused(st, kind, grad):
    """With what to do, also where PyTorch's error says nothing of it."""
    make, message = BELOW[kind]
    sparse = st.sparsify(Run(make()), BLOCK)
    sparse.break_even = 2.0
    with torch.set_grad_enabled(grad), pytest.raises(NotImplementedError, match=message):
        sparse(image().float(), torch.ones(2, *SIZE))


@pytest.mark.parametrize("share", [0, 1], ids=["stack", "images"])
@pytest.mark.parametrize("trained", [False, True], ids=["evaluated", "trained"])
def test_an_image_that_the_network_does_not_take_is_named(st, trained, share):
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1)
    sparse = st.sparsify(nn.Sequential(*layers).train(trained), BLOCK)
    mask = torch.full((2, *SIZE), share)
    mask[:, :9, :9] = 1
    takes = "x must have the dtype of the network's weights, torch.float32, .*got torch.float64; "
    with torch.set_grad_enabled(trained):
        with pytest.raises(DTypeError, match=rf"{takes}use x.to\(torch.float32\)"):
            sparse(image(), mask)
        with pytest.raises(ShapeError, match=r"x must have shape \(N, 3, H, W\), .*got \(2, 5, "):
            sparse(image(channels=5).float(), mask)
        with pytest.raises(ShapeError, match=r"the size of x, got .* use x.permute\(0, 3, 1, 2\)"):
            sparse(image().float().permute(0, 2, 3, 1), mask)
        assert sparse(image().float(), mask).shape == (2, 4, *SIZE)
    failing = st.sparsify(Run(lambda x: x.reshape(7, -1)), BLOCK)
    with pytest.raises(RuntimeError, match="shape"):  # another error stays what it is
        failing(image().float(), mask)


def test_errors_for_which_an_image_is_not_to_blame(st):
    """Of other layers, of other classes, or of modules without weights to go by."""
    from sbnet_cupy.torch.network.misfits import misfit

    class Other(RuntimeError):
        """One that says what is wrong itself."""

    net, counts, x = nn.Conv2d(3, 4, 3), nn.Identity(), torch.ones(1, 3, 5, 5)
    counts.register_parameter("n", nn.Parameter(torch.arange(3), requires_grad=False))
    types, channels = "input type and bias type differ", "to have {} channels, but got {} channels"
    for model, image, error in (
        (net, x.half(), Other(types)), (net, x, Other(channels.format(4, 3))),
        (net, x.half(), RuntimeError("something else")), (net, x, RuntimeError(types)),
        (nn.ReLU(), x.half(), RuntimeError(types)), (counts, x.half(), RuntimeError(types)),
        (net, x, RuntimeError(channels.format(3, 4))), (net, x, RuntimeError("of 3 channels")),
    ):  # fmt: skip
        assert misfit(model, image, error) is None
    found = misfit(net, x.half(), RuntimeError(f"\n  {types}\nmore of it"))
    assert isinstance(found, DTypeError) and str(found).endswith(f"PyTorch says: {types}")
    found = misfit(net, x.half(), RuntimeError(channels.format(4, 3)))
    assert isinstance(found, ShapeError) and "pass 4 channels" in str(found)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.* is deprecated")
@torch.no_grad()
def test_a_module_of_torchscript_runs_at_each_call(st):
    """It keeps what it is made of where no change is seen, so no call is recorded."""
    dense = networks.network("resnet_basic")
    dense.append(torch.jit.trace(nn.Hardswish(), torch.ones(2, 3)))
    sparse, x, full = st.sparsify(dense, BLOCK), image().float(), torch.ones(2, *SIZE)
    for _ in range(3):
        assert_near(sparse(x, full), dense(x), "float32")


def test_gradients_that_would_be_lost_are_refused(st):
    sparse = st.sparsify(Run(lambda x: Double.apply(x) + 1), BLOCK)
    x, mask = image().float(), torch.ones(2, *SIZE)
    with torch.no_grad():
        assert_near(sparse(x, mask), 2 * sparse.model.conv(x) + 1, "float32")
    with pytest.raises(NotImplementedError, match="Double"):
        sparse(x, mask)


@pytest.mark.parametrize("place", ["layer", "network"])
@pytest.mark.parametrize("hook", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks_inside_a_network_are_refused(st, hook, place):
    """On what sparsify returns they see images, and those of parameters what they see anywhere."""
    dense = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())
    x, mask, seen = image().float(), torch.ones(2, *SIZE), []
    sparse = st.sparsify(copy.deepcopy(dense), BLOCK)
    getattr(sparse, hook)(lambda module, *grads: seen.append(grads[-1][0].shape))
    sparse.model[0].weight.register_hook(lambda grad: seen.append(grad.shape))
    sparse(x.requires_grad_(), mask).sum().backward()
    assert sorted(seen) == [(2, 4, *SIZE), (4, 3, 3, 3)]
    getattr(dense if place == "network" else dense[0], hook)(lambda *_: None)
    with pytest.raises(NotImplementedError, match=f"{hook}.* cannot be used .* on what sparsify"):
        st.sparsify(dense, BLOCK)(x, mask)


@pytest.mark.parametrize("break_even", [2.0, 0.0])
@pytest.mark.parametrize("factor", [None, 3.0])
def test_hooks_of_activations_see_images(st, factor, break_even):
    """What they return takes the gradient's place; copies that were put off have their own."""
    dense = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3, 2, 1)
    ).double()  # fmt: skip
    dense.eval()
    sparse = st.sparsify(copy.deepcopy(dense), BLOCK)
    sparse.break_even = break_even
    x, seen = image(), {}
    on, mask = networks.blocks((2, *SIZE), BLOCK, 0.4)
    zeroed = networks.ZeroedOutside(on, networks.stages_of(SIZE, BLOCK)).zeroed

    def watch(model, call):
        seen[model] = grads = {}

        def keep(grad, name):
            grads[name] = zeroed(grad)
            return None if factor is None else factor * grad

        def watch_result(module, inputs, result, name):
            result.register_hook(lambda grad: keep(grad, name))

        for name, module in model.named_children():
            module.register_forward_hook(functools.partial(watch_result, name=name))
        return train_step(model, x, call=call)

    actual = watch(sparse.model, lambda x: sparse(x, mask))
    expected = watch(dense, lambda x: networks.oracle(dense, x, on, BLOCK))
    assert_near_steps(actual, expected)
    assert list(seen[dense]) == list(seen[sparse.model]) == ["3", "2", "1", "0"]
    for name, grad in seen[dense].items():
        assert_near(seen[sparse.model][name], grad)


@pytest.mark.parametrize("break_even", [2.0, 0.0])
def test_gradients_of_activations_are_images(st, break_even):
    """Those that ``torch.autograd.grad`` takes, as for class activation maps."""
    dense = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 2, 3, 2, 1))
    dense = dense.double()
    sparse = st.sparsify(copy.deepcopy(dense), BLOCK)
    sparse.break_even = break_even
    on, mask = networks.blocks((2, *SIZE), BLOCK, 0.4)
    zeroed = networks.ZeroedOutside(on, networks.stages_of(SIZE, BLOCK)).zeroed

    def found(model, call):
        kept, x = [], image().requires_grad_()
        for module in model[:2]:
            module.register_forward_hook(lambda module, inputs, result: kept.append(result))
        y = call(x).square().sum()
        first = torch.autograd.grad(y, [*kept, x], create_graph=True)
        first = list(map(zeroed, first))
        second = torch.autograd.grad(first[1].square().sum(), model[0].weight)
        assert type(torch.autograd.grad(call(x).sum(), kept[-1])[0]) is torch.Tensor
        return [*first, *second]

    actual = found(sparse.model, lambda x: sparse(x, mask))
    expected = found(dense, lambda x: networks.oracle(dense, x, on, BLOCK))
    for one, exact in zip(actual, expected, strict=True):
        assert_near(one.detach(), exact.detach(), terms=1 << 17)


def test_gradients_at_an_edge_of_the_graph(st):
    conv, found = nn.Conv2d(3, 4, 3, padding=1), []
    edge = torch.autograd.graph.get_gradient_edge(conv.weight)

    def run(x):
        y = conv(x)
        for inputs in (conv.weight, edge):
            found.extend(torch.autograd.grad(y, inputs, torch.ones_like(y), retain_graph=True))
        return y

    st.sparsify(Run(run), BLOCK)(image().float(), torch.ones(2, *SIZE))
    assert found[0].any() and torch.equal(*found)


def test_operations_of_a_training_step_are_counted(st):
    """PyTorch's counter puts hooks on activations."""
    dense = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    sparse, x, counts = st.sparsify(dense, BLOCK), image().float(), []
    sparse.break_even = 2.0
    for model, call in ((dense, (x,)), (sparse, (x, torch.ones(2, *SIZE)))):
        with FlopCounterMode(display=False) as counter:
            model(*call).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[1] >= counts[0] > 0  # the last blocks extend beyond the image


def test_no_hook_is_put_on_an_activation_of_another_call(st):
    kept = []

    def run(x):
        kept.append(x)
        return kept[0].register_hook(print) and x

    sparse = st.sparsify(Run(run), BLOCK)
    call = image().float(), torch.ones(2, *SIZE)
    sparse(*call)
    with pytest.raises(NotImplementedError, match=r"register_hook .* of an earlier call"):
        sparse(*call)


def test_reentrant_checkpoints_are_refused(st):
    inner = nn.Conv2d(3, 4, 3, padding=1)
    x, mask = image().float(), torch.ones(2, *SIZE)
    for reentrant in (False, True):
        dense = Run(lambda x, how=reentrant: checkpoint(inner, x, use_reentrant=how))
        if reentrant:
            with pytest.raises(NotImplementedError, match="pass use_reentrant=False to checkpoint"):
                st.sparsify(dense, BLOCK)(x, mask)
        else:
            st.sparsify(dense, BLOCK)(x, mask).sum().backward()


@pytest.mark.parametrize("break_even", [2.0, 0.0])
@pytest.mark.parametrize("outer", ["inside", "outside"])
def test_checkpoints_in_checkpoints(st, outer, break_even):
    def again(function, *given):
        return checkpoint(function, *given, use_reentrant=False)

    class Net(nn.Module):
        how = staticmethod(again)

        def __init__(self):
            super().__init__()
            self.first, self.conv = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, padding=1)

        def part(self, x):
            return self.how(self.unit, x) + x.mean((2, 3), keepdim=True)

        def unit(self, x):
            return torch.tanh(self.conv(x)) * x.sigmoid()

        def forward(self, x):
            x = F.pad(self.first(x), (1, 1, 1, 1))[:, :, 1:-1, 1:-1]
            return self.how(self.part, x) if outer == "inside" else self.part(x)

    sparse = st.sparsify(Net().double().train(), BLOCK)
    sparse.break_even = break_even
    mask, found = networks.blocks((2, *SIZE), BLOCK, 0.5)[1], []
    for how in (again, lambda function, *given: function(*given)):
        sparse.zero_grad()
        sparse.model.how, x = how, image().requires_grad_()
        y = how(sparse, x, mask) if outer == "outside" else sparse(x, mask)
        y.sin().sum().backward()
        found.append([y, x.grad, *(p.grad.clone() for p in sparse.parameters())])
    assert_near(*found)


def test_a_network_that_is_sparse_is_refused(st):
    sparse = st.sparsify(nn.Conv2d(3, 4, 3), BLOCK)
    conv = st.nn.SparseConv2d(3, 4, 3, block_size=8)
    for model, word in (
        (sparse, "got a SparseModel that is sparse already; use the network that it holds, .model"),
        (nn.Sequential(nn.ReLU(), sparse), "'1' that is sparse already; use the network"),
        (nn.Sequential(conv), "got a SparseConv2d in '0' that is sparse already; use dense layers"),
    ):
        with pytest.raises(ValueError, match=word):
            st.sparsify(model)
    late = st.sparsify(nn.Sequential(nn.Identity()), BLOCK)
    late.model.append(Run(lambda x: sparse(x, torch.ones(2, *SIZE))))
    with pytest.raises(TypeError, match="got an activation of a sparsified network"):
        late(image().float(), torch.ones(2, *SIZE))


def test_weights_that_change_are_seen(st):
    """In place, by other memory, by statistics, by an optimizer, and by a state that is loaded."""
    dense = networks.network("resnet_basic").double()
    sparse = st.sparsify(dense, BLOCK)
    x, full = image(), torch.ones(2, *SIZE)

    def check():
        with torch.no_grad():
            assert_near(sparse(x, full), dense(x))

    check()
    with torch.no_grad():
        dense[0][0].weight.mul_(2)
    check()
    dense[0][0].weight.data = dense[0][0].weight.data * 3
    check()
    dense[0][1].running_var.add_(1)
    check()
    sparse.train()
    optimizer = torch.optim.SGD(sparse.parameters(), lr=0.1)
    sparse(x, full).sum().backward()
    optimizer.step()
    sparse.eval()
    check()
    dense.load_state_dict(networks.network("resnet_basic", seed=1).state_dict())
    check()


@pytest.mark.parametrize("how", [True, False])
@torch.no_grad()
def test_what_no_version_tells_of_is_seen_after_eval(st, how):
    """Weights and statistics that are written to through ``data`` and NumPy."""
    dense, x, full = networks.network("resnet_basic").double(), image(), torch.ones(2, *SIZE)
    sparse = st.sparsify(dense, BLOCK, replay=how)
    sparse.break_even = 2.0
    for _ in range(3):
        assert_near(sparse(x, full), dense(x))
    dense[0][0].weight.data.mul_(2)
    dense[0][1].running_mean.numpy()[:] += 1
    sparse.eval()
    for _ in range(3):
        assert_near(sparse(x, full), dense(x))


@pytest.mark.parametrize("how", [True, False])
@torch.no_grad()
def test_statistics_that_the_network_took_by_itself_are_seen(st, how):
    """Those that batch norms of the dense network took in training, as ``update_bn`` does."""
    dense, x, full = networks.network("resnet_basic").double(), image(), torch.ones(2, *SIZE)
    sparse = st.sparsify(dense, BLOCK, replay=how)
    sparse.break_even = 2.0
    for times in (2, 3):
        for _ in range(3):
            assert_near(sparse(x, full), dense(x))
        dense.train()(times * x + 1)
        dense.eval()
    assert_near(sparse(x, full), dense(x))


@pytest.mark.parametrize("how", [True, False])
@torch.no_grad()
def test_what_is_made_of_a_call_is_not_kept(st, how):
    """Of a bias and a shift that each call computes; what was made of them was kept, all of it."""
    conv, norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
    last = prune.random_unstructured(nn.Conv2d(8, 8, 1), "bias", 0.5)

    def run(x):
        y = nn.functional.conv2d(x, conv.weight, conv.bias * 2, padding=1).relu()
        mean, variance = norm.running_mean, norm.running_var
        return last(nn.functional.batch_norm(y, mean, variance, norm.weight, norm.bias + 1))

    dense = Run(run)
    dense.layers = nn.ModuleList([conv, norm, last])
    dense.double().eval()
    sparse = st.sparsify(dense, BLOCK, replay=how)
    sparse.break_even = 2.0
    x, full, sizes = image(), torch.ones(2, *SIZE), []
    for _ in range(5):
        assert_near(sparse(x, full), dense(x))
        sizes.append(len(sparse._weights.kept))
    assert sizes[-1] == sizes[0]


@pytest.mark.parametrize("how", [True, False])
@torch.no_grad()
def test_weights_that_were_replaced_are_not_kept(st, how):
    """By others that are assigned, and for one call; what was made of each was kept."""
    dense, x, full = networks.network("resnet_basic").double(), image(), torch.ones(2, *SIZE)
    sparse, sizes = st.sparsify(dense, BLOCK, replay=how), []
    sparse.break_even = 2.0
    for factor in (1.0, 1.1, 1.2, 1.3, 1.4):
        state = {name: factor * t for name, t in dense.state_dict().items()}
        dense.load_state_dict(state, assign=True)
        assert_near(sparse(x, full), dense(x))
        sizes.append(len(sparse._weights.kept))
        buffers = {name: factor * t for name, t in dense.named_buffers()}
        inner = {f"model.{name}": t for name, t in buffers.items()}
        found = torch.func.functional_call(sparse, inner, (x, full))
        assert_near(found, torch.func.functional_call(dense, buffers, (x,)))
    assert sizes[-1] == sizes[0]


@pytest.mark.parametrize("first", [0, 1])
@torch.no_grad()
def test_no_bias_stands_for_a_sum(st, first):
    """What a sum of convolutions holds elsewhere is not the bias of one of them."""

    class Sum(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = torch.nn.ModuleList(
                [torch.nn.Conv2d(3, 4, k, padding=k // 2) for k in (3, 1)]
            )

        def forward(self, x):
            """Add both, in one order or the other."""
            return self.convs[first](x) + self.convs[1 - first](x)

    sparse = st.sparsify(Sum().eval(), 16)
    x, mask = torch.randn(1, 3, 64, 64), torch.zeros(1, 64, 64, dtype=torch.bool)
    mask[:, :16, :16] = True
    for share in (0.0, 2.0):
        sparse.break_even = share
        with pytest.raises(ValueError, match="outside='bias' needs a network that returns"):
            sparse(x, mask, outside="bias")


@torch.no_grad()
def test_a_result_does_not_keep_what_was_convolved(st):
    """As networks that join all results of a stage would then keep twice as much."""
    from sbnet_cupy.torch.network import tensor as T

    class Joins(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)
            self.norm, self.kept = nn.BatchNorm2d(4), None

        def forward(self, x):
            """Return the result of the second convolution."""
            x = torch.relu(self.first(x))
            value = weakref.ref(T.value_of(x))
            x = self.norm(self.second(x))
            assert T.value_of(x) is not None
            self.kept = value()
            return x

    sparse = st.sparsify(Joins().eval(), 16, outside="bias", replay=False)
    sparse.break_even = 2.0
    x, mask = torch.randn(1, 3, 64, 64), torch.zeros(1, 64, 64, dtype=torch.bool)
    mask[0, :20] = True
    y = sparse(x, mask)
    assert sparse.model.kept is None
    outside = sparse.model.norm(sparse.model.second.bias[None, :, None, None])[0, :, 0, 0]
    assert torch.allclose(y[0, :, 63, 63], outside)


class Locals(nn.Module):
    """Reads its own variables by name."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x):
        """Return a sum."""
        variables = locals()
        y = torch.relu(self.conv(x))
        assert variables["x"] is x and variables["self"] is self
        return y + torch.relu(y)


@torch.no_grad()
def test_what_a_network_reads_of_its_variables_is_there(st):
    """Also in the first call, which looks at them for the names of modules."""
    dense, x = Locals().eval(), torch.randn(1, 3, 32, 32)
    sparse = st.sparsify(dense, 16)
    for _ in range(2):
        assert torch.allclose(sparse(x, torch.ones(1, 32, 32)), dense(x), atol=1e-5)


class Recurrent(nn.Module):
    """Keeps what it made of the image before."""

    def __init__(self, looks):
        super().__init__()
        self.conv, self.back = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.looks, self.kept = looks, None

    def forward(self, x):
        y = self.conv(x)
        if self.kept is not None:
            before = self.back(self.kept) if self.looks else self.kept
            y = torch.cat([before + y, y - before, self.kept], 1)[:, 2:6]
        self.kept = torch.tanh(y)
        return self.kept * 2


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("break_even", [2.0, 0.0])
@pytest.mark.parametrize("recorded", [False, True])
def test_what_is_kept_of_an_earlier_call_is_its_image(st, looks, break_even, recorded):
    """Whatever blocks are active in the later call; with gradients through both."""
    torch.manual_seed(0)
    dense = Recurrent(looks).double().eval()
    twin, sparse = copy.deepcopy(dense), st.sparsify(dense, BLOCK)
    sparse.break_even = break_even
    x = torch.randn(2, 3, 48, 64, dtype=torch.float64)
    with torch.set_grad_enabled(recorded):
        for seed in range(5):
            on, mask = networks.blocks((2, 48, 64), BLOCK, (0.3, 0.6)[seed % 2], seed)
            actual, expected = sparse(x + seed, mask), networks.oracle(twin, x + seed, on, BLOCK)
            assert_near(actual.detach(), expected.detach())
    if recorded:
        for y in (actual, expected):
            y.square().sum().backward()
        for a, e in zip(dense.parameters(), twin.parameters(), strict=True):
            if e.grad is not None:
                assert_near(a.grad, e.grad)
    assert ("dense: on the whole image" in sparse.profile(x, mask)) == looks


@torch.no_grad()
def test_what_a_call_leaves_behind_has_the_weights_of_the_call(st):
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU()).double().eval()
    kept = []
    dense[0].register_forward_hook(lambda module, args, y: kept.append(y))
    x = torch.randn(2, 3, 48, 64, dtype=torch.float64)
    on, mask = networks.blocks((2, 48, 64), BLOCK, 0.5)
    st.sparsify(dense, BLOCK)(x, mask)
    expected = networks.oracle(dense[0], x, on, BLOCK).mean((2, 3))
    dense[0].weight.mul_(2)
    assert_near(kept[0].mean((2, 3)), expected)


@torch.no_grad()
def test_what_is_kept_of_an_earlier_call_is_not_written_to(st):
    dense = Recurrent(looks=False).eval()
    sparse = st.sparsify(dense, BLOCK)
    x, mask = torch.randn(2, 3, 48, 64), networks.blocks((2, 48, 64), BLOCK, 0.5)[1]
    sparse(x, mask)
    dense.forward = lambda x: dense.kept.mul_(2)
    with pytest.raises(NotImplementedError, match="an earlier call"):
        sparse(x, mask)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "save": lambda value: _loaded(value),
}


def _loaded(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("break_even", [2.0, 0.0])
@torch.no_grad()
def test_a_copy_of_what_is_kept_is_its_image(st, how, break_even):
    """Of a network that keeps activations, and of what it keeps; both go on alike."""
    torch.manual_seed(0)
    dense = Recurrent(looks=True).double().eval()
    sparse = st.sparsify(dense, BLOCK)
    sparse.break_even = break_even
    x = torch.randn(2, 3, 48, 64, dtype=torch.float64)
    first, second = (networks.blocks((2, 48, 64), BLOCK, 0.5, seed)[1] for seed in range(2))
    sparse(x, first)
    twin, kept = COPIES[how]([sparse, dense.kept])
    assert type(kept) is type(twin.model.kept) is torch.Tensor
    assert torch.equal(kept, torch.from_numpy(dense.kept.numpy()))
    assert not kept.movedim(1, -1)[~first].any() and kept.shape == (2, 4, 48, 64)
    assert_near(twin(x, second), sparse(x, second))


@pytest.mark.parametrize("recorded", [False, True])
def test_exact_halos_of_a_network_that_keeps_activations(st, recorded):
    dense = Recurrent(looks=False).double().eval()
    sparse, x = st.sparsify(dense, BLOCK, halo="exact"), image()
    mask = torch.zeros(2, *SIZE)
    mask[:, 20, 20] = 1
    with torch.set_grad_enabled(recorded):
        for _ in range(3):
            y = sparse(x, mask)
    assert y[:, :, 20, 20].any() and not y[:, :, 0, 0].any()


def test_copies_that_cannot_be_made(st):
    x, mask = image(), torch.ones(2, *SIZE)
    dense = Recurrent(looks=False).double()
    st.sparsify(dense, BLOCK)(x, mask)
    with pytest.raises(RuntimeError, match="support the deepcopy protocol"):
        copy.deepcopy(dense.kept)  # as PyTorch's own tensors whose gradient is recorded
    for copied in (copy.copy, copy.deepcopy):
        with pytest.raises(NotImplementedError, match="while the network runs; use clone"):
            st.sparsify(Run(copied), BLOCK)(x.float(), mask)


@pytest.mark.parametrize("replay", ["auto", False])
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("moved", [0, 2])
def test_each_call_looks_where_the_network_is(st, replay, recorded, moved):
    """Also where a part of it was moved once calls run from a tape."""
    dense = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 1)).eval()
    x, mask = image().float(), torch.ones(2, *SIZE)
    with torch.set_grad_enabled(recorded):
        for calls in (0, 4):
            network = copy.deepcopy(dense)
            sparse = st.sparsify(network, BLOCK, replay=replay)
            for _ in range(calls):
                sparse(x, mask)
            network[moved].to("meta")
            for _ in range(3):
                with pytest.raises(RuntimeError, match=f"cpu, got {moved}.weight on meta; use .to"):
                    sparse(x, mask)
            network[moved].to_empty(device="cpu").load_state_dict(dense[moved].state_dict())
            assert_near(sparse(x, mask), dense(x), "float32")
