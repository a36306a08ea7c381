"""Random numbers that a network draws or seeds on its way are those of an ordinary call."""

import random
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support import networks  # noqa: E402  (needs PyTorch)
from support.torch_cases import DEVICES, on_device  # noqa: E402

nn = torch.nn
SIZE, BLOCK = (40, 56), 8


def _seeded(device):
    torch.manual_seed(3)
    return torch.rand((), device=device)


FACTORS = {
    "drawn by Python": (lambda device: random.random(), "random numbers on the host"),
    "drawn by NumPy": (lambda device: np.random.rand(), "random numbers on the host"),
    "seeded": (_seeded, "sets the seed"),
    "drawn on the device": (lambda device: torch.rand((), device=device), None),
}


class Scaled(nn.Module):
    """Scales an activation by a random number."""

    def __init__(self, factor):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)
        self.name = factor

    def forward(self, x):
        """Draw, and scale."""
        return self.last(self.first(x) * FACTORS[self.name][0](x.device))


def seed_all(seed):
    """Seed all generators."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FACTORS)
@torch.no_grad()
def test_numbers_that_a_call_draws(st, require, name, device):
    """Calls that are recorded or captured draw and seed what others do."""
    device = torch.device(on_device(require, torch, device))
    seed_all(0)
    net = Scaled(name).to(device).eval()
    x, mask = torch.randn(2, 3, *SIZE, device=device), networks.blocks((2, *SIZE), BLOCK, 0.4, 0)[1]
    sparse, plain = st.sparsify(net, BLOCK), st.sparsify(net, BLOCK, replay=False)
    mask, found, said = mask.to(device), [], FACTORS[name][1]
    for each in (plain, sparse):
        results = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for seed in (1, 2, 2, 3, 4):
                seed_all(seed)
                results.append((each(x, mask), torch.rand(1), random.random(), np.random.rand()))
        found.append(results)
        told = [str(w.message) for w in caught if "cannot be replayed" in str(w.message)]
        is_captured = device.type == "cuda" and each is sparse
        assert [said in message for message in told] == [True] * (is_captured and bool(said))
    is_on_gpu = device.type == "cuda" and name == "drawn on the device"
    for (y, *drawn), (expected, *others) in zip(*found, strict=True):
        assert drawn == others
        assert is_on_gpu or torch.equal(y, expected)  # a graph draws numbers of its own
    assert len({float(y.sum()) for y, *_ in found[1]}) == (1 if name == "seeded" else 4)


@pytest.mark.parametrize("device", DEVICES)
def test_what_a_graph_would_not_draw(st, require, device):
    """An error says what; otherwise whether numbers are drawn, which is undone."""
    from sbnet_cupy.torch.network.generators import generator, host_generators, replayable

    device = torch.device(on_device(require, torch, device))
    states, of_host = (generator(device), torch.get_rng_state()), host_generators(device)
    for name, (draw, said) in FACTORS.items():
        if said is None:
            with replayable(device) as call:
                draw(device)
            assert call.draws
        else:
            with pytest.raises(RuntimeError, match=said), replayable(device):
                draw(device)
        assert torch.equal(generator(device), states[0]), name
        assert torch.equal(torch.get_rng_state(), states[1])
        assert host_generators(device) == of_host, name
    with replayable(device) as call:
        torch.ones(3, device=device).sum()
    assert not call.draws
