"""Batch norms ahead of convolutions: folded, or one pass with their activation."""

import pytest

torch = pytest.importorskip("torch")


from sbnet_cupy.torch.network import plans  # noqa: E402  (needs PyTorch)
from support import networks  # noqa: E402
from support.networks import assert_near  # noqa: E402

nn, F = torch.nn, torch.nn.functional
SIZE, BLOCK = (61, 84), 16


@pytest.fixture
def passes(monkeypatch):
    """Return a list of the activation behind each batch norm that is a pass of its own."""
    found, run = [], plans.NormPlan.run

    def counted(plan):
        found.append(plan.activation)
        return run(plan)

    monkeypatch.setattr(plans.NormPlan, "run", counted)
    return found


def call(st, dense, break_even=2.0):
    """Run a network on random blocks, twice, and compare it with the oracle."""
    dense = networks.random_statistics(dense).double().eval()
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 3, *SIZE, dtype=torch.float64, generator=generator)
    on, mask = networks.blocks((2, *SIZE), BLOCK, 0.5)
    sparse = st.sparsify(dense, BLOCK)
    sparse.break_even = break_even
    expected = networks.oracle(dense, x, on, BLOCK)
    for _ in range(2):
        assert_near(sparse(x, mask), expected)
    return sparse, x, mask


class Flat(nn.Module):
    """A pre-activation unit: nobody holds what lies between its layers, nor do calls of modules."""

    def __init__(self, cin, cout, stride=1):
        super().__init__()
        sizes = ((cin, 4, 1, 1), (4, 4, 3, stride), (4, cout, 1, 1))
        self.body = nn.Sequential(*(m for one in sizes for m in networks.norm_conv(*one)))
        self.down = nn.Identity() if cin == cout else nn.Conv2d(cin, cout, 1, stride)

    def forward(self, x):
        return self.body(x) + self.down(x)


@torch.no_grad()
@pytest.mark.parametrize("break_even", [2.0, 0.0])
def test_only_the_first_norm_of_a_unit_is_a_pass(st, passes, break_even):
    """Those between two convolutions are part of the one ahead, their relu too."""
    call(st, nn.Sequential(nn.Conv2d(3, 8, 1), Flat(8, 8), Flat(8, 8), Flat(8, 12, 2)), break_even)
    assert passes == ["relu"] * 6  # in each call; the first unit's reads a convolution


@torch.no_grad()
def test_norm_of_an_image_and_its_uses(st, passes):
    """A norm that is added to, read twice, changed in place, or alone."""

    class Uses(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm2d(3)
            self.other = nn.BatchNorm2d(3, affine=False)
            self.conv = nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x):
            y = self.norm(x)
            z = F.silu(y)
            a = y + x
            b = self.conv(F.relu_(self.norm(self.other(x))))
            y += 1.0
            return y, z, a, b

    call(st, Uses())
    assert set(passes) == {None, "relu"}


@torch.no_grad()
@pytest.mark.parametrize("inplace", [False, True])
def test_a_convolution_that_two_read_runs_once(st, monkeypatch, inplace):
    """Also where what was made of it alone is gone: a norm between it and the activation."""
    runs, run = [], plans.Plan.run
    monkeypatch.setattr(plans.Plan, "run", lambda plan: runs.append(plan.kernel) or run(plan))

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.conv = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
            self.norm = nn.BatchNorm2d(4)

        def forward(self, x):
            x = self.stem(x)
            return self.conv(F.relu(self.norm(x), inplace)) + x

    call(st, Twice())
    assert runs == [(3, 3), (1, 1)] * 2


@torch.no_grad()
def test_changed_statistics_are_seen(st):
    last = nn.Conv2d(3, 4, 3, padding=1)
    dense = nn.Sequential(nn.MaxPool2d(2), nn.BatchNorm2d(3), nn.ReLU(), last)
    sparse, x, mask = call(st, dense)
    before = sparse(x, mask)
    dense[1].running_mean.add_(0.5)
    dense[1].weight.mul_(2.0)
    on = networks.blocks((2, *SIZE), BLOCK, 0.5)[0]
    assert_near(sparse(x, mask), networks.oracle(dense, x, on, BLOCK))
    assert not torch.allclose(before, sparse(x, mask))


def test_gradients_through_norms_in_evaluation(st):
    dense = networks.network("preactivation").double()
    sparse = st.sparsify(dense, BLOCK)
    sparse.break_even = 2.0
    x = torch.randn(1, 3, *SIZE, dtype=torch.float64, requires_grad=True)
    on, mask = networks.blocks((1, *SIZE), BLOCK, 0.5)
    ours = torch.autograd.grad(sparse(x, mask).sum(), [x, dense[1].norm.weight])
    theirs = torch.autograd.grad(
        networks.oracle(dense, x, on, BLOCK).sum(), [x, dense[1].norm.weight]
    )
    for a, b in zip(ours, theirs, strict=True):
        assert_near(a, b)


@pytest.mark.parametrize("break_even", [2.0, 0.0], ids=["one block", "one image"])
def test_gradients_through_a_group_norm_of_one_row(st, break_even):
    """Where a batch norm in evaluation follows, PyTorch asks for the strides of images."""
    torch.manual_seed(0)
    norms = nn.GroupNorm(2, 4), nn.BatchNorm2d(4)
    dense = networks.random_statistics(nn.Sequential(nn.Conv2d(3, 4, 1), *norms)).double().eval()
    sparse = st.sparsify(dense, BLOCK)
    sparse.break_even = break_even
    x = torch.randn(1, 3, *SIZE, dtype=torch.float64).to(memory_format=torch.channels_last)
    on = torch.zeros(1, 4, 6, dtype=torch.bool)
    on[0, 1, 2] = True
    mask = on.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)[:, : SIZE[0], : SIZE[1]]
    given = [x.requires_grad_(), *dense.parameters()]
    results = sparse(x, mask), networks.oracle(dense, x, on, BLOCK)
    for pair in zip(*(torch.autograd.grad(y.square().sum(), given) for y in results), strict=True):
        assert_near(*pair)


@torch.no_grad()
def test_a_norm_without_statistics_says_so(st):
    sparse = st.sparsify(nn.Sequential(nn.MaxPool2d(2), nn.BatchNorm2d(3)).eval(), BLOCK)

    def call(x):
        return F.batch_norm(x, None, None)

    sparse.model[1].forward = call
    with pytest.raises((ValueError, RuntimeError), match="running_mean"):
        sparse(torch.randn(1, 3, *SIZE), torch.ones(1, *SIZE))


@torch.no_grad()
@pytest.mark.parametrize("break_even", [2.0, 0.0])
def test_norms_without_running_statistics_take_those_of_active_pixels(st, break_even):
    """In evaluation, too: what the documentation names beside the zeroed network."""
    dense = nn.BatchNorm2d(3, track_running_stats=False).double().eval()
    x, mask = 1 + torch.randn(2, 3, *SIZE).double(), networks.blocks((2, *SIZE), BLOCK, 0.5)[1]
    sparse = st.sparsify(dense, BLOCK)
    sparse.break_even = break_even
    active = x.movedim(1, 0)[:, mask][None, :, :, None]
    expected = torch.zeros_like(x).movedim(1, -1)
    expected[mask] = dense(active)[0, :, :, 0].T
    for _ in range(3):
        assert_near(sparse(x, mask), expected.movedim(-1, 1))
