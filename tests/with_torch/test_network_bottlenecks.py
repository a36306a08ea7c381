"""Pre-activation networks on a GPU, whose units are one kernel each."""

import copy

import pytest

torch = pytest.importorskip("torch")

from support import networks  # noqa: E402  (needs PyTorch)
from support.torch_cases import on_device  # noqa: E402

nn = torch.nn
BLOCK, SIZE = 32, (173, 150)


class Unit(nn.Module):
    """A pre-activation bottleneck with a quarter of the channels between its layers."""

    def __init__(self, cin, cout, stride=1):
        super().__init__()
        quarter = cout // 4
        sizes = ((cin, quarter, 1, 1), (quarter, quarter, 3, stride), (quarter, cout, 1, 1))
        self.body = nn.Sequential(*(m for one in sizes for m in networks.norm_conv(*one)))
        self.down = None if cin == cout else nn.Conv2d(cin, cout, 1, stride, bias=False)

    def forward(self, x):
        return self.body(x) + (x if self.down is None else self.down(x))


def network():
    """Return units at blocks of 16, 8, 4 and 2 pixels: three with a projection, six without."""
    torch.manual_seed(2)
    layers = [nn.Conv2d(3, 32, 3, 2, 1), Unit(32, 32)]
    for cin, cout in ((32, 64), (64, 96), (96, 128)):
        layers += [Unit(cin, cout, 2), Unit(cout, cout)]
    return networks.random_statistics(nn.Sequential(*layers, Unit(128, 128), Unit(128, 128))).eval()


@pytest.fixture
def units(monkeypatch):
    """Return a list of the units that were one kernel."""
    from sbnet_cupy.torch.network import bottlenecks

    found, run = [], bottlenecks.run

    def counted(chain):
        y = run(chain)
        if y is not None:
            found.append(tuple(y.shape))
        return y

    monkeypatch.setattr(bottlenecks, "run", counted)
    return found


def relative_error(actual, expected):
    """Return the relative error of a result, which may be 0 altogether."""
    return ((actual.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def tolerance(dense, dtype):
    """Return a rounding for each convolution."""
    return sum(isinstance(m, nn.Conv2d) for m in dense.modules()) * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@torch.no_grad()
def test_preactivation_network(st, require, units, dtype):
    """All, some and no blocks; with room for more than are active; replayed with other masks."""
    on_device(require, torch, "cuda")
    dense = network().to("cuda", dtype)
    exact = copy.deepcopy(dense).double()
    x = torch.randn(2, 3, *SIZE, device="cuda").to(dtype)
    bound = tolerance(dense, dtype)
    masks = [
        tuple(t.to("cuda") for t in networks.blocks((2, *SIZE), BLOCK, share, seed))
        for seed, share in enumerate((1.0, 0.4, 0.1, 0.0))
    ]
    expected = [networks.oracle(exact, x.double(), on.double(), BLOCK) for on, _ in masks]
    for capacity in (None, 1.0):
        sparse = st.sparsify(dense, BLOCK, capacity=capacity, replay=False)
        sparse.break_even = 2.0
        for (_, mask), y in zip(masks, expected, strict=True):
            units.clear()
            assert relative_error(sparse(x, mask), y) <= bound
            assert len(units) == 6 or not mask.any()
    run = sparse.graphed(x, masks[1][1])
    for (_, mask), y in zip(masks, expected, strict=True):
        first = run(x, mask).clone()
        assert relative_error(first, y) <= bound
        assert torch.equal(run(x, mask), first)


@torch.no_grad()
def test_changed_weights_are_packed_again(st, require, units):
    on_device(require, torch, "cuda")
    dense = network().to("cuda", torch.float16)
    x = torch.randn(2, 3, *SIZE, device="cuda").half()
    on, mask = (t.to("cuda") for t in networks.blocks((2, *SIZE), BLOCK, 0.4))
    sparse = st.sparsify(dense, BLOCK)
    sparse.break_even = 2.0
    before = sparse(x, mask)
    dense[1].body[5].weight.mul_(-1.5)
    dense[-1].body[0].running_mean.add_(0.5)
    after = sparse(x, mask)
    expected = networks.oracle(copy.deepcopy(dense).double(), x.double(), on.double(), BLOCK)
    assert relative_error(after, expected) <= tolerance(dense, x.dtype)
    assert not torch.allclose(before, after)
    assert len(units) == 12
