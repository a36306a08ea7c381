"""SparseConvNet's hello world, against loops over sites that follow its published description.

Nothing here is recorded from SparseConvNet: the loops state its semantics (order of filter taps,
layout of parameters, sizes of outputs, maxima from 0 on) a second time.
"""

import importlib
import itertools

import numpy as np
import pytest

from support.hello_world import MESSAGES

EPS = 1e-4


@pytest.fixture(scope="module")
def scn(torch):
    return importlib.import_module("sbnet_cupy.torch.scn")


def hello_world(torch, scn):
    """Return its network in float64, with weights as a training would leave them, and its batch."""
    model = scn.Sequential().add(
        scn.SparseVggNet(2, 1, [["C", 8], ["C", 8], ["MP", 3, 2], ["C", 16], ["C", 16],
                                ["MP", 3, 2], ["C", 24], ["C", 24], ["MP", 3, 2]])
    ).add(
        scn.SubmanifoldConvolution(2, 24, 32, 3, False)
    ).add(
        scn.BatchNormReLU(32)
    ).add(
        scn.SparseToDense(2, 32)
    ).double()  # fmt: skip
    torch.manual_seed(5)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand_like(tensor) + 0.5)
            if tensor.ndim == 4:
                tensor.normal_(std=(9 * tensor.shape[2]) ** -0.5)
            elif name.endswith(("bias", "running_mean")):
                tensor.normal_(std=0.3)
    batch = scn.InputBatch(2, model.input_spatial_size(torch.LongTensor([10, 10])))
    for message in MESSAGES:
        batch.add_sample()
        for y, line in enumerate(message):
            for x, letter in enumerate(line):
                if letter == "X":
                    place = torch.LongTensor([y, x])
                    batch.set_location(place, torch.DoubleTensor([1 + y - x / 50]), 0)
    return model, batch


def convolve(sites, w):
    """Taps run over rows, then columns; weights are [taps, groups, planes in, planes out]."""
    taps = list(itertools.product((-1, 0, 1), repeat=2))
    assert w.shape[:2] == (len(taps), 1)
    return {
        (n, y, x): sum(
            sites[n, y + i, x + j] @ tap
            for (i, j), (tap,) in zip(taps, w, strict=True) if (n, y + i, x + j) in sites
        )
        for n, y, x in sites
    }  # fmt: skip


def normalize(sites, state, training):
    """By the statistics of all sites of the batch when it trains, and ReLU."""
    rows = np.array(list(sites.values()))
    mean, variance = rows.mean(0), rows.var(0)
    if not training:
        mean, variance = state["running_mean"], state["running_var"]
    scale = state["weight"] / np.sqrt(variance + EPS)
    return {
        site: np.maximum((row - mean) * scale + state["bias"], 0) for site, row in sites.items()
    }


def pool(sites, size):
    """Windows of 3 that begin every 2 cells; a maximum begins as 0."""
    out, size = {}, (size - 3) // 2 + 1
    for n, y, x in sites:
        for p, q in itertools.product(*(range((i - 1) // 2, i // 2 + 1) for i in (y, x))):
            if 0 <= p < size and 0 <= q < size:
                old = out.get((n, p, q), 0)
                out[n, p, q] = np.maximum(old, sites[n, y, x])
    return out, size


def run(state, sites, size, training):
    """Return the dense result of the network, by loops."""

    def part(prefix):
        return {
            name.removeprefix(prefix): a for name, a in state.items() if name.startswith(prefix)
        }

    for step in ("0.0", "0.2", None, "0.5", "0.7", None, "0.10", "0.12", None, "1"):
        if step is None:
            sites, size = pool(sites, size)
            continue
        head, _, last = step.rpartition(".")
        norm = f"{head}{'.' if head else ''}{int(last) + 1}."
        sites = normalize(convolve(sites, part(f"{step}.")["weight"]), part(norm), training)
    image = np.zeros((2, 32, size, size))
    for (n, y, x), row in sites.items():
        image[n, :, y, x] = row
    return image


@pytest.mark.parametrize("training", [True, False])
def test_hello_world_gives_the_numbers_of_loops(torch, scn, training):
    model, batch = hello_world(torch, scn)
    state = {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}
    places, features = batch.get_spatial_locations().tolist(), batch.features.numpy()
    sites = {(n, y, x): row for (y, x, n), row in zip(places, features, strict=True)}
    expected = run(state, sites, 87, training)
    output = model.train(training)(batch)
    assert output.shape == (2, 32, 10, 10) and (expected > 0).sum() > 100
    torch.testing.assert_close(output.detach().numpy(), expected, rtol=1e-9, atol=1e-9)
