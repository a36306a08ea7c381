"""Batch norms in training by kernels: statistics at once, the rest with what follows.

Here the NumPy bodies stand for the kernels. What PyTorch's operations give is what is expected.
"""

import copy
import functools

import pytest

torch = pytest.importorskip("torch")
checkpoint = pytest.importorskip("torch.utils.checkpoint").checkpoint


from support import networks  # noqa: E402  (needs PyTorch)
from support.exhaustive import thinned_pairs  # noqa: E402
from support.networks import image  # noqa: E402
from support.torch_autograd import (  # noqa: E402
    Double,
    assert_near_steps,
    check_second_derivatives,
    train_step,
)

nn = torch.nn
F = torch.nn.functional
SIZE, BLOCK = (61, 84), 16


def check(st, request, dense, capacity=None, mask=None):
    """Train a network with and without kernels; return what was asked of them."""
    mask = networks.blocks((2, *SIZE), BLOCK, 0.4)[1] if mask is None else mask
    results = []
    for kernels in (False, True):
        names = request.getfixturevalue("norms_asked") if kernels else []
        sparse = st.sparsify(copy.deepcopy(dense), BLOCK, capacity=capacity)
        sparse.break_even = 2.0
        step = functools.partial(train_step, sparse, image(), mask, function=torch.sin)
        results.append([step() for _ in range(2)])
    for actual, expected in zip(*reversed(results), strict=True):
        assert_near_steps(actual, expected)
    return names


NAMES = [n for n in networks.FAMILIES if n != "csp"]


@pytest.mark.parametrize("name, capacity", thinned_pairs(4, NAMES, [None, 0.8]))
def test_networks_train(st, request, name, capacity):
    check(st, request, networks.network(name).double().train(), capacity)


class Uses(nn.Module):
    """A norm after a convolution, and what a function makes of it and of the convolution."""

    def __init__(self, function, norm):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3, padding=1, bias=False)  # a bias has no gradient but rounding
        self.norm, self.function = norm, function

    def forward(self, x):
        """Return what the function makes."""
        x = self.conv(x)
        return self.function(x, self.norm(x))


def twice_in_place(x, y):
    z = y * 2
    F.relu_(y)
    return y + z


def activation_in_place_of_a_copy(x, y):
    z = F.relu(y)
    y.relu_()
    return y + z


def without_gradients(x, y):
    with torch.no_grad():
        z = F.relu(y) + x
    return y + z


def sum_then_written(x, y):
    added = x.sin()
    z = F.relu(y + added)
    added.add_(1)
    return z + added


def asks(x, y):
    assert y.requires_grad and y.grad_fn is not None and not y.is_leaf
    return F.relu(y)


# What is computed while the norm itself is still at hand, as an argument here, takes no part in it.
USES = {  # and (activation, whether there is a sum) of each time that a stack is normalized
    "alone": (lambda x, y: y, [(None, False)]),
    "relu": (lambda x, y: F.relu(y), [("relu", False)]),
    "in place": (lambda x, y: F.relu_(y), [("relu", False)]),
    "silu": (lambda x, y: F.silu(y), [("silu", False)]),
    "gelu": (lambda x, y: F.gelu(y), [("gelu", False)]),
    "another gelu": (lambda x, y: F.gelu(y, approximate="tanh"), [(None, False)]),
    "sum": (lambda x, y: y + x, [(None, True)]),
    "sum in place": (lambda x, y: F.relu_(y.add_(x)), [("relu", True)]),
    "sum before": (lambda x, y: F.relu(x + y), [("relu", True)]),
    "silu of a sum": (lambda x, y: F.silu(x + y), [(None, False)]),
    "sum with itself": (lambda x, y: y + y, [(None, False)]),
    "used twice": (lambda x, y: F.relu(y) * y, [(None, False)]),
    "used twice, in place": (twice_in_place, [(None, False)]),
    "in place, used before": (activation_in_place_of_a_copy, [(None, False)]),
    "not used": (lambda x, y: x, []),
    "detached": (lambda x, y: F.relu(y).detach() + x, [(None, False)]),
    "without gradients": (without_gradients, [(None, False)]),
    "a summand that is written": (sum_then_written, [(None, False)]),
    "what it is asked": (asks, [(None, False)]),
    "image": (lambda x, y: torch.fft.fft2(y).real, [(None, False)]),
    "max pooling": (lambda x, y: F.max_pool2d(F.relu(y), 2), [(None, False)]),
}


@pytest.mark.parametrize("use", USES)
def test_uses(st, request, use):
    """However the result is used; the sum and the activation are part of it where they can be."""
    function, expected = USES[use]
    dense = Uses(function, nn.BatchNorm2d(4)).double().train()
    with torch.no_grad():
        dense.norm.weight.uniform_(0.5, 1.5)
        dense.norm.bias.uniform_(-1, 1)
    names = check(st, request, dense)
    assert [n for n in names if isinstance(n, tuple)] == 2 * expected


NORMS = {
    "no parameters": lambda: nn.BatchNorm2d(4, affine=False),
    "no running statistics": lambda: nn.BatchNorm2d(4, track_running_stats=False),
    "cumulative": lambda: nn.BatchNorm2d(4, momentum=None),
    "frozen weight": lambda: nn.BatchNorm2d(4),
    "frozen": lambda: nn.BatchNorm2d(4),
    "evaluation": lambda: nn.BatchNorm2d(4).eval(),
}


@pytest.mark.parametrize("kind", NORMS)
def test_kinds_of_norms(st, request, kind):
    dense = Uses(lambda x, y: F.relu(y + x), NORMS[kind]()).double()
    if kind.startswith("frozen"):
        dense.norm.weight.requires_grad_(False)
    if kind == "frozen":
        dense.norm.bias.requires_grad_(False)
    if kind == "evaluation":
        networks.random_statistics(dense)
    names = check(st, request, dense)
    assert bool(names) == (kind != "evaluation")


@pytest.mark.parametrize("parts", [["conv"], ["norm"], ["conv", "norm"]])
def test_frozen_parts(st, request, parts):
    """Gradients of what needs them alone."""
    dense = Uses(lambda x, y: F.relu(y), nn.BatchNorm2d(4)).double().train()
    for part in parts:
        getattr(dense, part).requires_grad_(False)
    check(st, request, dense)


def test_an_empty_mask(st, norms_asked):
    sparse = st.sparsify(networks.network("resnet_basic").double().train(), BLOCK)
    before = {n: b.clone() for n, b in sparse.named_buffers() if "num_batches" not in n}
    sparse(image(), torch.zeros(2, *SIZE)).sum().backward()
    assert all(p.grad is None or not p.grad.isnan().any() for p in sparse.parameters())
    buffers = dict(sparse.named_buffers())
    assert all(torch.equal(buffers[name], value) for name, value in before.items())


@pytest.mark.parametrize("use", ["alone", "relu", "silu", "sum before"])
def test_second_derivatives(st, norms_asked, use):
    dense = Uses(USES[use][0], nn.BatchNorm2d(4)).double().train()
    check_second_derivatives(st, dense, image(), BLOCK, capacity=1.0)


def test_functions_of_ones_own_are_refused(st, norms_asked):
    dense = Uses(lambda x, y: F.relu(Double.apply(y)), nn.BatchNorm2d(4)).double().train()
    sparse = st.sparsify(dense, BLOCK)
    with pytest.raises(NotImplementedError, match="autograd function"):
        sparse(image(), networks.blocks((2, *SIZE), BLOCK, 0.4)[1])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("read", [1, 2])
def test_hooks_that_read_in_another_mode(st, request, mode, read):
    """A monitor reads the norm, or the activation, where no gradients are recorded."""
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(),
                          nn.Conv2d(4, 4, 3, padding=1)).double().train()  # fmt: skip
    mask = networks.blocks((2, *SIZE), BLOCK, 0.4)[1]
    results = []
    for watched in (False, True):
        request.getfixturevalue("norms_asked")
        model = copy.deepcopy(dense)
        if watched:
            def hook(module, given, out):
                with mode():
                    module.dead = float((out <= 0).double().mean())

            model[read].register_forward_hook(hook)
        sparse = st.sparsify(model, BLOCK)
        sparse.break_even = 2.0
        results.append(train_step(sparse, image(), mask, function=torch.sin))
    assert_near_steps(*results)


class Checkpointed(nn.Module):
    """Blocks whose activations are computed again in the backward pass, one or all of them."""

    def __init__(self, dense, again):
        super().__init__()
        self.blocks, self.again = dense, again

    def forward(self, x):
        """Run the blocks."""
        for i, block in enumerate(self.blocks):
            recomputes = self.again and i in self.again
            x = checkpoint(block, x, use_reentrant=False) if recomputes else block(x)
        return x


@pytest.mark.parametrize("again", [(1,), (0, 1, 2)])
def test_checkpoints(st, norms_asked, again):
    torch.manual_seed(0)
    dense = nn.Sequential(*(
        nn.Sequential(nn.Conv2d(c, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        for c in (3, 4, 4)
    )).double().train()  # fmt: skip
    mask = networks.blocks((2, *SIZE), BLOCK, 0.4)[1]
    results = []
    for chosen in (None, again):
        sparse = st.sparsify(Checkpointed(copy.deepcopy(dense), chosen), BLOCK)
        sparse.break_even = 2.0
        results.append(train_step(sparse, image(), mask, function=torch.sin))
    assert_near_steps(*results)


def test_parameters_of_another_size_are_refused():
    """The kernels would read and write past them."""
    from types import SimpleNamespace

    from sbnet_cupy.torch.network import cuda_norm

    def stack(rows):
        return SimpleNamespace(is_cuda=True, dtype=torch.float16, shape=(rows, 64, 4, 4),
                               device=None, numel=lambda: rows * 64 * 16)  # fmt: skip

    def served(*shape, rows=5):
        tensor = SimpleNamespace(dtype=torch.float32, shape=shape, device=None,
                                 is_contiguous=lambda: True)  # fmt: skip
        table = SimpleNamespace(whole=False, static=False, batch=1, grid=(2, 3), kept={},
                                divides=lambda *_: 1)  # fmt: skip
        return cuda_norm.serves(stack(rows), table, (4, 4), (8, 12), [tensor] * 4)

    assert served(64) and not served(64, rows=2**26)  # 2**30 pixels, which they cannot count
    assert not served(32) and not served(64, 1) and not served(65)


@pytest.mark.parametrize("capacity", [None, 3])
@pytest.mark.parametrize("break_even", [2.0, 0.0])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_no_active_pixels_leave_running_statistics(st, momentum, break_even, capacity):
    """Nor are they counted as a batch, by which statistics without a momentum are weighed."""
    dense = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=momentum))
    sparse, masks = st.sparsify(dense.double().train(), BLOCK, capacity=capacity), []
    sparse.break_even = break_even
    for active in (0, 1, 0, 2, 0, 1):
        mask = torch.zeros(2, *SIZE, dtype=torch.bool)
        mask[:active, :5, :7] = True
        masks.append(mask)
    for mask in masks:
        before = {name: value.clone() for name, value in dense[1].state_dict().items()}
        sparse(image(), mask).sum().backward()
        for name, value in dense[1].state_dict().items():
            stays = not mask.any() or name in ("weight", "bias")
            assert torch.equal(value, before[name]) == stays
    twin = copy.deepcopy(dense)
    twin[1].reset_running_stats()
    again = st.sparsify(twin, BLOCK, capacity=capacity)
    for mask in masks:
        if mask.any():
            again(image(), mask)
    for name, value in twin[1].state_dict().items():
        assert torch.allclose(value, dense[1].state_dict()[name].to(value.dtype)), name


@pytest.mark.parametrize("again", [False, True])
def test_no_active_pixels_by_kernels(st, norms_asked, again):
    """Also where a checkpoint runs the norm again."""
    dense = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)).train()
    run = functools.partial(checkpoint, dense, use_reentrant=False) if again else dense
    sparse = st.sparsify(Function(dense, run), BLOCK, capacity=2)
    before = {name: value.clone() for name, value in dense[1].state_dict().items()}
    sparse(image().float(), torch.zeros(2, *SIZE)).sum().backward()
    assert norms_asked
    for name, value in dense[1].state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("break_even", [2.0, 0.0])
def test_one_active_pixel_has_no_variance(st, break_even):
    dense = nn.Sequential(nn.Conv2d(3, 4, BLOCK, BLOCK), nn.BatchNorm2d(4)).double().train()
    sparse, mask = st.sparsify(dense, BLOCK), torch.zeros(2, *SIZE)
    sparse.break_even = break_even
    mask[0, 3, 3] = 1
    y = sparse(image(), mask)
    y.sum().backward()
    assert torch.equal(y, torch.zeros_like(y))  # the bias
    assert (dense[1].running_var - 0.9).abs().max() < 1e-12
    assert dense[1].running_mean.all() and dense[1].num_batches_tracked == 1
    assert all(p.grad.isfinite().all() for p in dense.parameters())


class Function(nn.Module):
    """A function that runs a module."""

    def __init__(self, module, function):
        super().__init__()
        self.module, self.function = module, function

    def forward(self, x):
        """Return what the function makes."""
        return self.function(x)
