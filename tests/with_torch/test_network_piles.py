"""Images that torch.stack puts along a new first dimension, and what reduces it."""

import types

import pytest

torch = pytest.importorskip("torch")

from support import networks  # noqa: E402  (needs PyTorch)
from support.networks import assert_near  # noqa: E402

nn, F = torch.nn, torch.nn.functional
SIZE, BLOCK = (61, 84), 16


class Levels(nn.Module):
    """Three maps of one size that are stacked, what is made of the stack, and a convolution."""

    def __init__(self, made):
        super().__init__()
        torch.manual_seed(0)
        self.made = made
        self.levels = nn.ModuleList(nn.Conv2d(3, 6, k, 2, k // 2) for k in (1, 3, 5))
        self.last = nn.Conv2d(6, 4, 3, padding=1)

    def forward(self, x):
        """Return the convolution of what is made."""
        return self.last(self.made(*(level(x) for level in self.levels)))


def written(a, b, c):
    """Return a sum of maps that are written to after they were stacked."""
    pile = torch.stack([a, b, c])
    a.mul_(3.0)
    b.neg_()
    return pile.sum(0) + a + b


def written_and_read(a, b, c):
    """Return a product of a sum and of a number that was read from whole images."""
    pile = torch.stack([a, b, c])
    return pile.sum(0) * pile.flatten()[0].abs().clamp(max=1.0)


def of_two_calls(a, b, c):
    """Return a sum of what is stacked twice."""
    return torch.stack([torch.stack((a, b)).sum(0), c]).amax(0)


REDUCTIONS = {
    "sum": lambda *maps: torch.stack(maps).sum(dim=0),
    "sum of a tuple": lambda *maps: torch.sum(torch.stack(maps, 0), (0,)),
    "mean": lambda *maps: torch.stack(maps, -5).mean(-5),
    "mean in float64": lambda *maps: torch.stack(maps).mean(0, dtype=torch.float64).to(maps[0]),
    "prod": lambda *maps: torch.stack(maps).prod(0),
    "amax": lambda *maps: torch.stack(maps).amax(0),
    "amin": lambda *maps: torch.amin(torch.stack(maps), dim=[0]),
    "max": lambda *maps: torch.stack(maps).max(0).values,
    "min and where": lambda *maps: torch.stack(maps).min(dim=0)[0],
    "twice": of_two_calls,
    "written": written,
}


@pytest.mark.parametrize("share", [0.0, 2.0], ids=["whole", "blocks"])
@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_stay_on_the_stack(st, name, batch, share):
    """Without gradients, also of calls that are run again, and with them."""
    dense = Levels(REDUCTIONS[name]).double().eval()
    x = networks.image(batch, SIZE)
    sparse = st.sparsify(dense, BLOCK)
    sparse.break_even = share
    for seed in range(3):
        on, mask = networks.blocks((batch, *SIZE), BLOCK, 0.5, seed)
        with torch.no_grad():
            assert_near(sparse(x, mask), networks.oracle(dense, x, on, BLOCK))
    assert not sparse.dense_layers
    gradients = []
    for result in (sparse(x, mask), networks.oracle(dense, x, on, BLOCK)):
        gradients.append(torch.autograd.grad(result.square().sum(), list(dense.parameters())))
    assert_near(*gradients)


OTHERS = {
    "one of them": lambda *maps: torch.stack(maps)[1],
    "an iteration": lambda *maps: sum(torch.stack(maps)),
    "kept dimension": lambda *maps: torch.stack(maps).sum(0, keepdim=True)[0],
    "a product": lambda *maps: (torch.stack(maps) * 2.0).sum(0),
    "a product in place": lambda *maps: torch.stack(maps).mul_(2.0).sum(0),
    "beside a map": lambda *maps: (maps[0] + torch.stack(maps)).sum(0),
    "with whole images": written_and_read,
}


@pytest.mark.parametrize("name", OTHERS)
@torch.no_grad()
def test_all_else_takes_whole_images(st, name):
    """What leaves the stack is named, and is what the dense network makes of zeros outside."""
    dense = Levels(OTHERS[name])
    dense.last = nn.Conv2d(6, 4, 1, bias=False)
    dense = dense.double().eval()
    x = networks.image(1, SIZE)
    sparse = st.sparsify(dense, BLOCK)
    sparse.break_even = 2.0
    on, mask = networks.blocks((1, *SIZE), BLOCK, 0.5)
    for _ in range(2):
        assert_near(sparse(x, mask), networks.oracle(dense, x, on, BLOCK))
    assert "stack" in sparse.table()


@pytest.mark.parametrize("kind", [dict, types.SimpleNamespace])
@torch.no_grad()
def test_stacks_are_returned_as_images(st, kind):
    """In a container, and in an object."""
    dense = Levels(lambda *maps: kind(all=torch.stack(maps), first=maps[0])).double().eval()
    dense.last = nn.Identity()
    x = networks.image(2, SIZE)
    on, mask = networks.blocks((2, *SIZE), BLOCK, 0.5)
    result, expected = st.sparsify(dense, BLOCK)(x, mask), networks.oracle(dense, x, on, BLOCK)
    if kind is not dict:
        result, expected = vars(result), vars(expected)
    assert type(result["all"]) is torch.Tensor and result["all"].shape[:2] == (3, 2)
    assert torch.equal(result["all"][0], result["first"])
    assert_near(result["first"], expected["first"])


@torch.no_grad()
def test_stacks_that_a_network_keeps_are_images_in_the_next_call(st):
    kept = []

    def made(*maps):
        kept.append(torch.stack(maps))
        return sum(pile.sum(0) for pile in kept)

    dense = Levels(made).double().eval()
    dense.last = nn.Identity()
    x, mask = networks.image(2, SIZE), torch.ones(2, *SIZE, dtype=torch.bool)
    sparse = st.sparsify(dense, BLOCK, replay=False)
    sparse.break_even = 2.0
    first = sparse(x, mask)
    assert_near(sparse(x, mask), 2 * first)


PADDED = {
    "stack": lambda *maps: torch.stack([F.pad(m, (1, 1, 1, 1)) for m in maps], 1).sum(1),
    "stack of unlike": lambda a, b, _: torch.stack(
        [F.pad(a, (1, 1, 1, 1)), F.pad(b, (1, 1, 1, 1), value=1.0)], 2
    ).sum(2),
    "first dimension": lambda *maps: torch.stack([F.pad(m, (1, 1, 1, 1)) for m in maps]).sum(0),
    "cat": lambda a, b, c: torch.cat([F.pad(m, (1, 1, 1, 1)) for m in (a, b, c)], 1)[:, 3:9],
    "by name": lambda a, b, _: torch.add(
        input=F.pad(a, (1, 1, 1, 1)), other=F.pad(b, (1, 1, 1, 1))
    ),
}


@pytest.mark.parametrize("name", PADDED)
@torch.no_grad()
def test_lists_and_names_of_padded_maps(st, name):
    """A padding that was put off is made where it is not known, wherever a map is given."""
    dense = Levels(PADDED[name]).double().eval()
    x = networks.image(2, SIZE)
    mask = torch.ones(2, *SIZE, dtype=torch.bool)
    sparse = st.sparsify(dense, BLOCK)
    sparse.break_even = 2.0
    assert_near(sparse(x, mask), dense(x))
