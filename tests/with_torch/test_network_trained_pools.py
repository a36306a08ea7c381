"""Max pooling of stacks in training by kernels that tell which pixels they chose.

Here array operations stand for the kernels. What PyTorch's operations give is what is expected.
"""

import contextlib
import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")


import sbnet_cupy as sb  # noqa: E402
from sbnet_cupy.block_sparse.stack.neighbours import Places  # noqa: E402
from sbnet_cupy.block_sparse.stack.pooling import resolve_pool, spread, tap_slices  # noqa: E402
from sbnet_cupy.block_sparse.stack.stack_max_pool import largest  # noqa: E402
from support import networks  # noqa: E402
from support.networks import assert_near  # noqa: E402

nn = torch.nn
SIZE, BLOCK = (61, 84), 16


@pytest.fixture
def chosen(st, monkeypatch):
    """Serve pooling in training by array operations; return how often gradients were asked for."""
    from sbnet_cupy.torch.network import cuda, cuda_pool

    asked = []

    def prepare(dtype, rows, images, grid, channels, block, size, out_block, kernel, stride,
                dilation, pads, out_size):  # fmt: skip
        def window_of(x, counts, indices, places):
            table = sb.BlockTable(*(t.numpy() for t in (counts, indices, places)), block, size)
            padding = (pads[:2], pads[2:])
            return table, resolve_pool(x, table, kernel, stride, padding, dilation, True)

        def forward(x, counts, indices, places, out, choice):
            x, out = x.permute(0, 2, 3, 1).numpy(), out.permute(0, 2, 3, 1)
            table, window = window_of(x, counts, indices, places)
            halo, y = largest(x, Places.of(table), window)
            waiting, taps = np.ones(y.shape, bool), np.zeros(y.shape, np.uint8)
            lines = [(a, b) for a in tap_slices(window, 0) for b in tap_slices(window, 1)]
            for number, (a, b) in enumerate(lines):
                here = waiting & (halo[:, a, b] == y)
                taps[here], waiting[here] = number, False
            out.zero_()
            out[: len(y)] = torch.from_numpy(y)
            choice[: len(y)] = torch.from_numpy(taps)

        def gradient(grad, choice, counts, indices, places, dx):
            asked.append(out_size)
            grad, dx = (t.permute(0, 2, 3, 1) for t in (grad, dx))
            x = np.zeros(dx.shape, grad.numpy().dtype)
            table, window = window_of(x, counts, indices, places)
            after = sb.BlockTable(*(t.numpy() for t in (counts, indices, places)), out_block,
                                  out_size)  # fmt: skip
            grad = np.where(sb.stack_pixel_mask(after)[..., None], grad.numpy(), 0)
            halo, _ = largest(x, Places.of(table), window)
            total, count = np.zeros(halo.shape), len(halo)
            lines = [(a, b) for a in tap_slices(window, 0) for b in tap_slices(window, 1)]
            for number, (a, b) in enumerate(lines):
                total[:, a, b] += np.where(choice.numpy()[:count] == number, grad[:count], 0)
            dx.copy_(torch.from_numpy(spread(total, x, table, window)))

        return forward, gradient

    def chooses(x, table, window):
        return not (table.whole or table.static) and cuda_pool._is_plain(window)

    monkeypatch.setattr(cuda, "_at_home", lambda x: contextlib.nullcontext(-1))
    monkeypatch.setattr(cuda, "start", lambda launch, *tensors: launch(*tensors))
    monkeypatch.setattr(cuda_pool, "chooses", chooses)
    monkeypatch.setattr(cuda_pool, "_prepare_choice", prepare)
    monkeypatch.setattr(cuda_pool, "_PLANS", {})
    return asked


def derivatives(sparse, mask, twice):
    """Return the result of a network and its gradients, or their gradients too."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(2, 3, *SIZE, dtype=torch.float64, generator=generator).requires_grad_()
    y, weights = sparse(x, mask), list(sparse.parameters())
    first = torch.autograd.grad(y.sin().sum(), [x, *weights], create_graph=twice)
    if not twice:
        return [y.detach(), *first]
    return torch.autograd.grad(sum(g.square().sum() for g in first), [x, *weights])


@pytest.mark.parametrize("window", [(3, 2, 1), (2, 2, 0), (3, 1, 1), ((2, 4), (1, 2), (0, 1))])
@pytest.mark.parametrize("twice", [False, True])
def test_gradients_of_a_pool(st, request, window, twice):
    torch.manual_seed(0)
    dense = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(*window), nn.ReLU(), nn.Conv2d(4, 2, 1)
    ).double()
    _, mask = networks.blocks((2, *SIZE), BLOCK, 0.5)
    found = []
    for kernels in (False, True):
        asked = request.getfixturevalue("chosen") if kernels else None
        sparse = st.sparsify(copy.deepcopy(dense), BLOCK, capacity=0.8)
        sparse.break_even = 2.0
        found.append(derivatives(sparse, mask, twice))
    assert asked
    for expected, actual in zip(*found, strict=True):
        assert_near(actual, expected, terms=1 << 17)
