"""Networks by SparseConvNet's names: its hello world, and the names in their state dicts."""

import importlib
import re

import pytest

from support.exhaustive import thinned
from support.hello_world import MESSAGES


@pytest.fixture(scope="module")
def scn(torch):
    return importlib.import_module("sbnet_cupy.torch.scn")


def test_hello_world(torch, scn, device):
    torch.manual_seed(0)
    model = scn.Sequential().add(
        scn.SparseVggNet(2, 1, [["C", 8], ["C", 8], ["MP", 3, 2], ["C", 16], ["C", 16],
                                ["MP", 3, 2], ["C", 24], ["C", 24], ["MP", 3, 2]])
    ).add(
        scn.SubmanifoldConvolution(2, 24, 32, 3, False)
    ).add(
        scn.BatchNormReLU(32)
    ).add(
        scn.SparseToDense(2, 32)
    ).to(device)  # fmt: skip
    size = model.input_spatial_size(torch.LongTensor([10, 10]))
    assert size.tolist() == [87, 87]
    locations = [
        [y, x, batch] for batch, message in enumerate(MESSAGES)
        for y, line in enumerate(message) for x, c in enumerate(line) if c == "X"
    ]  # fmt: skip
    features = torch.ones(len(locations), 1, device=device)
    output = model(scn.InputLayer(2, size)([torch.LongTensor(locations), features]))
    assert output.shape == (2, 32, 10, 10) and output.any() and output.isfinite().all()
    samples = []
    for message in MESSAGES:
        places = [[y, x] for y, s in enumerate(message) for x, c in enumerate(s) if c == "X"]
        samples.append([torch.LongTensor(places), torch.ones(len(places), 1)])
    batch = scn.prepare_BLInput(samples)
    batch[1] = batch[1].to(device)
    again = model(scn.BLInputLayer(2, size)(batch))
    torch.testing.assert_close(again, output)
    output.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def names_of(model, skeleton):
    """Return the parameters of a state dict whose names end so."""
    return [name for name in model.state_dict() if name.endswith(skeleton)]


def test_names_of_a_vgg_net(scn):
    net = scn.SparseVggNet(2, 1, [["C", 4], "MP", ["C3/2", 6], "C3/2", ["C", 5, 3, 2]])
    kinds = [type(layer).__name__ for layer in net]
    assert kinds == [
        "SubmanifoldConvolution", "BatchNormReLU", "MaxPooling", "Convolution", "BatchNormReLU",
        "Convolution", "BatchNormReLU", "ConcatTable", "JoinTable", "BatchNormReLU",
    ]  # fmt: skip
    shapes = {n: tuple(p.shape) for n, p in net.state_dict().items() if n.endswith("weight")}
    assert shapes["0.weight"] == (9, 1, 1, 4) and shapes["3.weight"] == (9, 1, 4, 6)
    assert shapes["7.0.weight"] == (9, 1, 6, 5) and shapes["9.weight"] == (10,)
    branch = ["7.1.0", "7.1.1", "7.1.2", "7.1.3", "7.1.4"]
    assert [n[:-7] for n in shapes if n.startswith("7.1.")] == branch
    deep = [type(layer).__name__[0] for layer in net[7][2]]
    assert "".join(deep) == "CBSBCBSBDBSBD"


def test_names_of_a_residual_net(scn):
    net = scn.SparseResNet(3, 2, [["basic", 2, 2, 1], ["basic", 4, 1, 2], ["b", 6, 1, 1]])
    names = [name[:-7] for name in names_of(net, "weight")]
    assert names == [
        "0", "1.0.0", "1.0.1", "1.0.2",
        "3.0.0", "3.0.1", "3.0.2", "3.0.3",
        "5", "6.0.0", "6.0.1", "6.0.2", "6.1",
        "8", "9.0.0", "9.0.1", "9.0.2", "9.1",
        "11",
    ]  # fmt: skip
    assert net[6][1].weight.shape == (27, 1, 2, 4) and net[9][1].weight.shape == (4, 6)
    with pytest.raises(ValueError, match="basic"):
        scn.SparseResNet(3, 2, [["inception", 2, 2, 1]])


def test_names_of_a_unet(scn):
    net = scn.UNet(2, 1, [3, 5], residual_blocks=True, n_input_planes=2)
    names = [name[:-7] for name in names_of(net, "weight")]
    assert names == [
        "0.0", "0.1.0", "0.1.1", "0.1.2", "0.1.3",
        "2.1.0", "2.1.1", "2.1.2.0.1.0", "2.1.2.0.1.1", "2.1.2.0.1.2", "2.1.2.0.1.3", "2.1.3",
        "2.1.4",
        "4.0", "4.1.0", "4.1.1", "4.1.2", "4.1.3",
    ]  # fmt: skip
    plain = scn.UNet(2, 2, [3, 5])
    assert [n[:-7] for n in names_of(plain, "weight")] == [
        "0.0", "0.1", "1.0", "1.1", "2.1.0", "2.1.1", "2.1.2.0.0", "2.1.2.0.1", "2.1.2.1.0",
        "2.1.2.1.1", "2.1.3", "2.1.4", "4.0", "4.1", "5.0", "5.1",
    ]  # fmt: skip
    assert plain[4][1].weight.shape == (9, 1, 6, 3)


BUILDERS = [
    ("UNet", 2, (2, [4, 6, 8]), 4), ("UNet", 3, (1, [4, 6], True, [3, 2]), 4),
    ("FullyConvolutionalNet", 2, (1, [4, 6, 8]), 18),
    ("FullyConvolutionalNet", 1, (2, [4, 6], True), 10),
    ("FullConvolutionalNetIntegratedLinear", 2, (1, [4, 6], 5, True), 5),
    ("FullConvolutionalNetIntegratedLinear", 2, (1, [4, 6]), 4),
]  # fmt: skip


@pytest.mark.parametrize("case", thinned(BUILDERS, 2))
def test_networks_train(torch, scn, device, case):
    name, dimension, options, planes = case
    torch.manual_seed(1)
    net = getattr(scn, name)(dimension, *options)
    size = 8 if options[-1] != [3, 2] else 9
    coords = (torch.rand(size**dimension, dimension) * size).long()
    coords = torch.cat([coords, torch.arange(len(coords))[:, None] % 2], 1)
    features = torch.randn(len(coords), 4, device=device)
    layers = scn.Sequential(scn.InputLayer(dimension, size, 4), net, scn.OutputLayer(dimension))
    layers[1].to(device)
    y = layers([coords, features])
    assert y.shape == (len(coords), planes)
    y.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
    torch.manual_seed(1)
    other = getattr(scn, name)(dimension, *options).to(device)
    other.load_state_dict(net.state_dict())
    net.eval(), other.eval()
    assert torch.equal(layers([coords, features]), scn.Sequential(layers[0], other, layers[2])(
        [coords, features]))  # fmt: skip


def test_a_layer_that_is_not_known(scn):
    with pytest.raises(ValueError, match=re.escape("got ['D', 3]")):
        scn.SparseVggNet(2, 1, [["D", 3]])
