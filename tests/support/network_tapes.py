"""Networks that have a tape of a call, and what they are called with."""

import pytest

torch = pytest.importorskip("torch")

from support import networks  # noqa: E402  (needs PyTorch)

nn = torch.nn
tree_leaves = torch.utils._pytree.tree_leaves

SIZE, BLOCK = (61, 84), 16


def image(seed=7, n=2, **options):
    """Return random images."""
    return torch.randn(n, 3, *SIZE, generator=torch.Generator().manual_seed(seed), **options)


def masks(*shares, n=2):
    """Return masks with such shares of active blocks."""
    return [networks.blocks((n, *SIZE), BLOCK, share, i)[1] for i, share in enumerate(shares)]


def small():
    """Return a network without statistics of its own."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()).eval()


def taped(st, dense, *call, **options):
    """Return a sparse network that has a tape of such a call."""
    sparse = st.sparsify(dense, BLOCK, **options)
    for _ in range(2):
        sparse(*(call or (image(), masks(0.4)[0])))
    assert sparse._tapes.kept and not sparse._tapes.unfit
    return sparse


def same(actual, expected):
    """Whether two results are the same in every bit."""
    pairs = zip(tree_leaves(actual), tree_leaves(expected), strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


class Using(nn.Module):
    """A convolution, and a function of its result and of the network."""

    def __init__(self, func):
        super().__init__()
        self.conv, self.func, self.cache = nn.Conv2d(3, 4, 3, padding=1), func, []
        self.count = 0
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        """Convolve."""
        return self.func(self, self.conv(x))
