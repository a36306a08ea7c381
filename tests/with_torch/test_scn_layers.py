"""Layers by SparseConvNet's names: against dense layers, their sizes, parameters and errors."""

import copy
import importlib

import numpy as np
import pytest

import sbnet_cupy as sb

SIZE = (7, 9)


@pytest.fixture(scope="module")
def scn(torch):
    return importlib.import_module("sbnet_cupy.torch.scn")


def points(torch, device="cpu", channels=3, size=SIZE, seed=0, batch=2):
    """Return an InputLayer's coordinates, the sample last, and features."""
    rng = np.random.default_rng(seed)
    rows = rng.permutation(np.argwhere(rng.random((*size, batch)) < 0.4))
    features = torch.as_tensor(rng.standard_normal((len(rows), channels)), device=device)
    return torch.as_tensor(rows), features


def made(torch, scn, device="cpu", size=SIZE, **options):
    coords, features = points(torch, device, size=size, **options)
    return scn.InputLayer(len(size), size, 0)([coords, features, 2])


def dense(scn, x):
    return scn.SparseToDense(len(x.spatial_size), x.features.shape[1])(x)


def at_sites(torch, image, x):
    *position, n = x.get_spatial_locations().T
    return image.movedim(1, -1)[(n, *position)]


def oihw(module):
    """Return the weights of a layer as torch's convolutions have them, of one group."""
    (w,) = module.weight.detach().movedim(1, 0)
    return w.view(*module.filter_size.tolist(), *w.shape[1:]).permute(3, 2, 0, 1)


def close(torch, a, b):
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [3, 2, (1, 3)])
def test_submanifold_convolution(torch, scn, device, size):
    x = made(torch, scn, device)
    layer = scn.SubmanifoldConvolution(2, 3, 5, size, True).to(device).double()
    torch.nn.init.normal_(layer.bias)
    k = layer.filter_size.tolist()
    pads = [p for n in k[::-1] for p in (n // 2, (n - 1) - n // 2)]
    image = torch.nn.functional.pad(dense(scn, x), pads)
    expected = torch.nn.functional.conv2d(image, oihw(layer), layer.bias)
    y = layer(x)
    close(torch, y.features, at_sites(torch, expected, x))
    assert y.coordinates is x.coordinates
    assert torch.equal(y.get_spatial_locations(), points(torch)[0])  # in the order of the points


@pytest.mark.parametrize("groups", [1, 3])
def test_groups_are_parts_of_the_planes(torch, scn, groups):
    x = made(torch, scn)
    layer = scn.SubmanifoldConvolution(2, 3, 6, 3, False, groups).double()
    assert layer.weight.shape == (9, groups, 3 // groups, 6 // groups) and layer.bias is None
    parts = []
    for g in range(groups):
        one = scn.SubmanifoldConvolution(2, 3 // groups, 6 // groups, 3, False).double()
        one.weight.data = layer.weight.data[:, g : g + 1]
        parts.append(one(x.replace(x.features[:, g * (3 // groups) : (g + 1) * (3 // groups)])))
    close(torch, layer(x).features, scn.JoinTable()(parts).features)


def test_convolution_and_back(torch, scn, device):
    x = made(torch, scn, device)
    down = scn.Convolution(2, 3, 4, (3, 3), 2, False).to(device).double()
    up = scn.Deconvolution(2, 4, 3, 3, 2, False).to(device).double()
    y = down(x)
    expected = torch.nn.functional.conv2d(dense(scn, x), oihw(down), stride=2)
    close(torch, y.features, at_sites(torch, expected, y))
    ones = x.replace(torch.ones_like(x.features[:, :1]))
    met = torch.nn.functional.max_pool2d(dense(scn, ones), 3, 2)[:, 0]
    n, *position = met.nonzero().T.cpu()
    expected = torch.unique(torch.stack([*position, n], 1), dim=0)
    assert torch.equal(torch.unique(y.get_spatial_locations(), dim=0), expected)
    assert y.spatial_size.tolist() == [3, 4] and down.input_spatial_size(y.spatial_size).eq(
        x.spatial_size).all()  # fmt: skip
    z = up(y)
    weight = oihw(up).transpose(0, 1)
    image = torch.nn.functional.conv_transpose2d(dense(scn, y), weight, stride=2)
    close(torch, z.features, at_sites(torch, image, x))
    assert z.coordinates is x.coordinates and z.spatial_size.tolist() == list(SIZE)
    full = scn.FullConvolution(2, 4, 3, 3, 2, False).to(device).double()
    full.load_state_dict(up.state_dict())
    grown = full(y)
    close(torch, dense(scn, grown), image)
    assert grown.metadata is not y.metadata
    assert scn.TransposeConvolution is scn.FullConvolution


def test_pooling(torch, scn, device):
    x = made(torch, scn, device, channels=4)
    ours, pool = scn.MaxPooling(2, 3, 2), torch.nn.functional.max_pool2d
    y = ours(x)
    close(torch, y.features, at_sites(torch, pool(dense(scn, x), 3, 2).clamp(min=0), y))
    dropped = scn.MaxPooling(2, 3, 2, nFeaturesToDrop=1)(x)
    assert torch.equal(dropped.features, y.features[:, 1:])
    mean = scn.AveragePooling(2, 3, 2)(x)
    average = torch.nn.functional.avg_pool2d(dense(scn, x), 3, 2)
    close(torch, mean.features, at_sites(torch, average, mean))
    back = scn.UnPooling(2, 3, 2, 1)(mean)
    ones = torch.ones(3, 1, 3, 3, dtype=torch.float64, device=device)
    image = torch.nn.functional.conv_transpose2d(
        dense(scn, mean)[:, 1:], ones, stride=2, groups=3
    )
    close(torch, back.features, at_sites(torch, image, x))


def test_the_gradient_of_a_maximum_goes_to_all_equal_values(torch, scn):
    coords = torch.tensor([[0], [1], [2]])
    features = torch.tensor([[2.0, -1, 0], [2, -1, -1], [1, -1, -2]], requires_grad=True)
    x = scn.InputLayer(1, 3)([coords, features])
    y = scn.MaxPooling(1, 3, 1)(x)
    assert y.features.tolist() == [[2, 0, 0]]
    y.features.sum().backward()
    assert features.grad.tolist() == [[1, 0, 1], [1, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize("leakiness", [0, 0.333, 1])
def test_batch_norm(torch, scn, device, leakiness):
    x = made(torch, scn, device)
    ours = scn.BatchNormalization(3, leakiness=leakiness).to(device).double()
    theirs = torch.nn.BatchNorm1d(3, eps=1e-4, momentum=0.01, device=device, dtype=torch.float64)
    torch.nn.init.uniform_(ours.weight)
    theirs.load_state_dict(ours.state_dict(), strict=False)

    def leaky(z):
        return torch.where(z > 0, z, leakiness * z)

    close(torch, ours(x).features, leaky(theirs(x.features)))
    for name in ("running_mean", "running_var"):
        close(torch, getattr(ours, name), getattr(theirs, name))
    ours.eval(), theirs.eval()
    close(torch, ours(x).features, leaky(theirs(x.features)))
    assert set(ours.state_dict()) == {"weight", "bias", "running_mean", "running_var"}


NORMS = {
    "BatchNormalization": {}, "BatchNormReLU": {}, "BatchNormLeakyReLU": {"leakiness": 0.25},
}  # fmt: skip


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("groups", [1, 2])
def test_a_batch_norm_is_part_of_the_convolution_before_it(torch, scn, device, name, groups):
    """In evaluation without gradients, where no hook sees it; and it follows what changes."""
    net = scn.Sequential(
        scn.SubmanifoldConvolution(2, 4, 6, 3, True, groups), getattr(scn, name)(6, **NORMS[name]),
        scn.Convolution(2, 6, 4, 3, 2, False, groups), getattr(scn, name)(4, **NORMS[name]),
        scn.Deconvolution(2, 4, 2, 3, 2, False), getattr(scn, name)(2, **NORMS[name]),
    ).double().to(device)  # fmt: skip
    x, called = made(torch, scn, device, channels=4), []
    for p in net.parameters():
        torch.nn.init.uniform_(p, -1, 1)
    for norm in net[1::2]:
        norm.running_mean.uniform_(-1, 1), norm.running_var.uniform_(0.5, 2)

    def check(net, folded=True):
        called.clear()
        expected = net(x)  # records gradients: layer by layer
        before = len(called)
        with torch.no_grad():
            y = net(x)
        close(torch, y.features, expected.features.detach())
        assert y.spatial_size.tolist() == expected.spatial_size.tolist()
        assert before == 3 and len(called) == before + (0 if folded else 3)

    kind, forward = type(net[1]), type(net[1]).forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "forward", lambda norm, x: called.append(norm) or forward(norm, x))
        check(net.eval())
        with torch.no_grad():
            net[0].weight.mul_(2)
            net[1].running_var.add_(1)
            net[2].weight.data = net[2].weight.data * 3
        check(net)
        net.load_state_dict({k: v * 0.5 for k, v in net.state_dict().items()})
        check(net)
        check(copy.deepcopy(net))
        net[0].weight.data.zero_()  # unseen, but train() forgets everything
        check(net.train().eval())
        handle = net[3].register_forward_hook(lambda *_: None)
        with torch.no_grad():
            called.clear()
            net(x)
            assert called == [net[3]]
        handle.remove()
        net[1].train(), net[3].train(), net[5].train()
        check(net, folded=False)


@pytest.mark.parametrize("kind", ["parametrized", "pruned"])
def test_weights_that_are_new_at_each_call_are_not_kept(torch, scn, device, kind):
    """A convolution kept those of each call in evaluation, until it had no memory."""
    layer = scn.SubmanifoldConvolution(2, 3, 4, 3, True).double().to(device).eval()
    if kind == "parametrized":
        layer = torch.nn.utils.parametrizations.weight_norm(layer)
        learnt = layer.parametrizations.weight.original0
    else:
        prune = importlib.import_module("torch.nn.utils.prune")
        layer = prune.random_unstructured(layer, "weight", 0.5)
        learnt = layer.weight_orig
    x = made(torch, scn, device)
    for _ in range(2):
        expected = layer(x).features.detach()  # records gradients: nothing is packed
        with torch.no_grad():
            for _ in range(2):
                close(torch, layer(x).features, expected)
            learnt.mul_(1.5)
        assert not layer._packed.kept


def test_pointwise_layers(torch, scn, device):
    x = made(torch, scn, device)
    f = torch.nn.functional
    for layer, function in (
        (scn.ReLU(), f.relu), (scn.Tanh(), torch.tanh), (scn.Sigmoid(), torch.sigmoid),
        (scn.ELU(), f.elu), (scn.SELU(), f.selu),
        (scn.LeakyReLU(0.2), lambda z: f.leaky_relu(z, 0.2)),
        (scn.SparseGroupNorm(1, 3).double().to(device), lambda z: f.group_norm(z, 1)),
    ):  # fmt: skip
        close(torch, layer(x).features, function(x.features))
        assert layer.input_spatial_size(5) == 5
    linear = scn.NetworkInNetwork(3, 4, True).double().to(device)
    close(torch, linear(x).features, x.features @ linear.weight + linear.bias)
    mean = scn.MeanOnlyBNLeakyReLU(3, leakiness=0.5).double().to(device)
    centred = x.features - x.features.mean(0)
    close(torch, mean(x).features, f.leaky_relu(centred, 0.5))
    close(torch, mean.running_mean, 0.01 * x.features.mean(0))
    elu = scn.BatchNormELU(3).double().to(device)
    assert elu(x).features.min() > -1


def test_the_mean_of_16_bit_numbers_is_finite(torch, scn):
    points = torch.arange(10_000)[:, None], torch.full((10_000, 1), 10.0).half()
    x = scn.InputLayer(1, 10_000, 0)(points)
    layer = scn.MeanOnlyBNLeakyReLU(1, momentum=0)
    for y in (layer(x), layer.eval()(x)):
        assert y.features.dtype == torch.float16 and not y.features.any()
    assert layer.running_mean.tolist() == [10]


def test_sites_of_one_spatial_size_by_different_windows(torch, scn):
    """Each has its own maps to smaller sizes and back."""

    def pooled(x, *window):
        return scn.MaxPooling(2, *window)(x)

    def made():
        points = torch.tensor([[0, 0, 0], [5, 5, 0], [8, 8, 0]]), torch.tensor([[1.0], [2], [4]])
        return scn.InputLayer(2, 9, 0)(points)

    x, windows, dense = made(), ((3, 2), (6, 1)), scn.SparseToDense(2, 1)
    ones, alone = [pooled(x, *its) for its in windows], [pooled(made(), *its) for its in windows]
    smaller = [pooled(one, 2, 2) for one in ones]
    for found, one in zip(smaller, alone, strict=True):
        expected = pooled(one, 2, 2)
        assert torch.equal(dense(found), dense(expected))
        back, other = (scn.UnPooling(2, 2, 2)(y) for y in (found, expected))
        assert torch.equal(dense(back), dense(other))


def test_a_size_of_several_lists_of_sites_tells_none(torch, scn):
    x = scn.InputLayer(2, 8)([torch.tensor([[7, 7], [0, 0]]), torch.ones(2, 1)])
    first = scn.MaxPooling(2, 2, 2)(x)

    def rebuilt():
        return scn.SparseConvNetTensor(first.features, x.metadata, first.spatial_size)

    assert rebuilt().coordinates is first.coordinates
    assert scn.MaxPooling(2, 2, 2)(x).coordinates is first.coordinates
    second = scn.MaxPooling(2, 5, 1)(x)
    for unknown in (lambda: rebuilt().coordinates, lambda: x.get_spatial_locations([4, 4])):
        with pytest.raises(ValueError, match=r"one list of sites, got \(4, 4\), .* x.replace"):
            unknown()
    assert first.replace(first.features).get_spatial_locations().tolist() == [[0, 0, 0], [3, 3, 0]]
    assert len(second.get_spatial_locations()) == 2 and len(x.get_spatial_locations()) == 2
    assert first.metadata.check() is x.metadata


def test_sites_that_moved_are_made_again(torch, scn, device):
    x = scn.InputLayer(2, 8)([torch.tensor([[7, 7], [0, 0]]), torch.ones(2, 1)])
    before = scn.MaxPooling(2, 2, 2)(x)
    again = scn.MaxPooling(2, 2, 2)(x.to(device))
    assert before.to(device).coordinates.indices.equal(again.coordinates.indices)
    assert x.metadata.coordinates((4, 4)).indices.equal(again.coordinates.indices)


@pytest.mark.parametrize("size, stride", [(SIZE, 1), ((1, 1), 2)])
def test_windows_of_one_cell_keep_the_sites(torch, scn, device, size, stride):
    coords, features = points(torch, device, size=size, batch=9)
    x = scn.InputLayer(2, size, 0)([coords, features, 9])
    inner = scn.Convolution(2, 3, 3, 1, stride, False), scn.FullConvolution(2, 3, 3, 1, stride, 0)
    outer = scn.Deconvolution(2, 3, 3, 1, stride, False), scn.UnPooling(2, 1, stride)
    pools = scn.MaxPooling(2, 1, stride, capacity=1), scn.AveragePooling(2, 1, stride)
    random = scn.RandomizedStrideMaxPooling(2, 1, stride)  # random where the stride is at least 2
    for layer in (*inner, *outer, *pools, *[random] * (stride > 1)):
        layer = layer.to(device).double()
        y, expected = layer(x), x.features
        if hasattr(layer, "weight"):
            expected = expected @ layer.weight[0, 0]
        elif layer in (*pools[:1], random):
            expected = expected.relu()
        close(torch, y.features, expected)
        assert y.coordinates is x.coordinates and y.spatial_size.tolist() == list(size)
        close(torch, scn.AddTable()([x, y]).features, x.features + expected)
        assert x.metadata.coordinates(size) is x.coordinates
        assert y.metadata.coordinates(size) is x.coordinates
        if y.metadata is x.metadata:
            close(torch, scn.OutputLayer(2)(y), expected)
    back = scn.UnPooling(2, 1, stride)(pools[1](x))
    close(torch, back.features, x.features)


def test_dropout_scales_in_evaluation(torch, scn, device):
    x = made(torch, scn, device)
    x = x.replace(torch.ones_like(x.features))
    torch.manual_seed(0)
    for layer in (scn.Dropout(0.25), scn.BatchwiseDropout(0.25)):
        kept = torch.stack([layer(x).features for _ in range(200)])
        assert set(kept.unique().tolist()) == {0.0, 1.0}
        assert abs(kept.mean().item() - 0.75) < 0.1
        one_mask = (kept == kept[:, :1]).all().item()
        assert one_mask == isinstance(layer, scn.BatchwiseDropout)
        assert layer.eval()(x).features.unique().tolist() == [0.75]


def test_containers(torch, scn):
    x = made(torch, scn)
    layers = scn.Sequential().add(scn.Identity()).add(scn.Convolution(2, 3, 3, 3, 2, True))
    assert list(layers.state_dict()) == ["1.weight", "1.bias"]
    for size in (torch.tensor([3, 4]), [3, 4], (3, 4)):
        assert layers.input_spatial_size(size).tolist() == list(SIZE)
    both = scn.ConcatTable().add(scn.Identity()).add(scn.ReLU())
    close(torch, scn.AddTable()(both(x)).features, x.features + x.features.relu())
    assert scn.JoinTable()(both(x)).features.shape[1] == 6
    n = len(x.features)
    for table in (scn.AddTable(), scn.JoinTable()):
        words = rf"at the same sites, got 2 lists of sites, {n} on \(7, 9\), {n} on \(7, 9\); begin"
        with pytest.raises(ValueError, match=words):
            table([x, x, made(torch, scn)])


def test_checkpointed_layers_have_the_same_gradients(torch, scn):
    coords, features = points(torch)
    layers = [scn.SubmanifoldConvolution(2, 3, 3, 3, True), scn.Convolution(2, 3, 4, 3, 2, False)]
    found = []
    for container in (scn.Sequential, scn.CheckpointedSequential):
        net, leaf = container(*layers).double(), features.clone().requires_grad_()
        net.zero_grad()
        y = net(scn.InputLayer(2, SIZE, 0)([coords, leaf]))
        y.features.square().sum().backward()
        found.append([y.features, leaf.grad, *[p.grad.clone() for p in net.parameters()]])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("whole", [False, True], ids=["of sites", "from points on"])
def test_running_statistics_of_what_is_computed_again_are_updated_once(torch, scn, whole):
    coords, features = points(torch)
    found = []
    for container in (scn.Sequential, scn.CheckpointedSequential):
        layers = [
            scn.SubmanifoldConvolution(2, 3, 3, 3, True), scn.BatchNormReLU(3, momentum=0.5),
            scn.MeanOnlyBNLeakyReLU(3, momentum=0.5),
        ]  # fmt: skip
        torch.manual_seed(0)
        torch.nn.init.normal_(layers[0].weight)
        first = scn.InputLayer(2, SIZE, 0)
        net = container(first, *layers) if whole else scn.Sequential(first, container(*layers))
        net.double()
        for _ in range(2):
            y = net([coords, features])
            y.features.square().sum().backward(retain_graph=True)
            y.features.sum().backward()
        parts = [*net.parameters()]
        found.append([y.features, *net.buffers(), *[p.grad for p in parts if p.grad is not None]])
    assert len(found[0]) == 9 and all(map(torch.equal, *found))


def test_gradients(torch, scn):
    coords, features = points(torch, size=(5, 3), channels=2)
    layers = scn.Sequential(
        scn.SubmanifoldConvolution(2, 2, 2, 3, True), scn.BatchNormLeakyReLU(2),
        scn.ConcatTable(scn.Identity(), scn.Sequential(
            scn.Convolution(2, 2, 4, 3, 2, True, 2), scn.AveragePooling(2, (2, 1), 1),
            scn.UnPooling(2, (2, 1), 1), scn.Deconvolution(2, 4, 2, 3, 2, True))),
        scn.JoinTable(), scn.OutputLayer(2),
    ).double()  # fmt: skip
    names = [name for name, _ in layers.named_parameters()]
    parameters = [p.detach().requires_grad_() for p in layers.parameters()]
    inputs = [features.requires_grad_(), *parameters]

    def function(features, *parameters):
        x = scn.InputLayer(2, (5, 3), 4)([coords, features])
        return torch.func.functional_call(layers, dict(zip(names, parameters, strict=True)), (x,))

    assert torch.autograd.gradcheck(function, inputs)


def test_random_strides(torch, scn):
    size = (13, 13)
    x = made(torch, scn, size=size)
    layer = scn.RandomizedStrideConvolution(2, 3, 4, 3, 2, False).double()
    still = scn.Convolution(2, 3, 4, 3, 2, False).double()
    still.load_state_dict(layer.state_dict())
    layer.generator = torch.Generator().manual_seed(3)
    layer.eval()
    assert torch.equal(layer(x).features, still(made(torch, scn, size=size)).features)
    x = made(torch, scn, size=size)
    layer.train()
    y = layer(x)
    assert y.spatial_size.tolist() == [6, 6]
    image, w = dense(scn, x), oihw(layer)
    from sbnet_cupy.torch.scn.lattices import window_starts

    generator = torch.Generator().manual_seed(3)
    starts = [window_starts(13, 3, 2, generator) for _ in range(2)]
    assert all(s[0] == 0 and s[-1] == 10 and set(s.diff().tolist()) == {1, 2, 3} for s in starts)
    expected = image.new_zeros(2, 4, 6, 6)
    for i, a in enumerate(starts[0].tolist()):
        for j, b in enumerate(starts[1].tolist()):
            expected[:, :, i, j] = (image[:, None, :, a : a + 3, b : b + 3] * w).sum((2, 3, 4))
    close(torch, dense(scn, y), expected)
    back = scn.Deconvolution(2, 4, 3, 3, 2, False).double()(y)
    assert back.coordinates is x.coordinates
    pooled = scn.RandomizedStrideMaxPooling(2, 3, 2)
    pooled.generator = torch.Generator().manual_seed(3)
    largest = pooled(made(torch, scn, size=size))
    assert torch.equal(largest.get_spatial_locations(), y.get_spatial_locations())
    assert torch.equal(pooled(x).get_spatial_locations(), y.get_spatial_locations())


@pytest.mark.parametrize("kind", ["convolution", "pooling"])
@pytest.mark.parametrize("capacity", [100, 20])
def test_random_strides_with_a_capacity(torch, scn, device, kind, capacity):
    """The first sites and their values are those without one; the rest is empty or dropped."""

    def run(rows):
        coords, features = points(torch, device, size=(13, 13))
        features.requires_grad_()
        net = scn.InputLayer(2, (13, 13), 0, capacity=None if rows is None else 200)
        x = net([coords, features, 2])
        if kind == "convolution":
            layer = scn.RandomizedStrideConvolution(2, 3, 4, 3, 2, False, capacity=rows)
            torch.nn.init.constant_(layer.weight, 0.5)
        else:
            layer = scn.RandomizedStrideMaxPooling(2, 3, 2, capacity=rows)
        layer.generator = torch.Generator().manual_seed(3)
        y = layer.to(device).double()(x)
        held = torch.arange(len(y.features), device=device) < y.coordinates.count
        (gradient,) = torch.autograd.grad(y.features[:20].square().sum(), features)
        return layer, y, y.features[held].detach(), gradient

    _, free, values, gradient = run(None)
    sites = len(free.features)
    assert 20 < sites < 100 and sites == free.coordinates.number()
    layer, y, found, found_gradient = run(capacity)
    assert y.features.shape[0] == y.coordinates.capacity == capacity
    assert y.coordinates.number() == sites
    close(torch, found, values[:capacity])
    close(torch, found_gradient, gradient)
    places = y.coordinates.indices
    assert torch.equal(places[:sites], free.coordinates.indices[:capacity])
    assert (places[sites:] == -1).all() and not y.features[sites:].any()
    if capacity < sites:
        with pytest.raises(sb.CapacityError, match=f"got 20 for {sites} sites"):
            y.metadata.check()
    else:
        assert y.metadata.check() is y.metadata
        layer.eval()
        assert layer(made(torch, scn, device, size=(13, 13))).features.shape[0] == capacity
    back = scn.Deconvolution(2, y.features.shape[1], 3, 3, 2, False).double().to(device)(y)
    assert back.features.shape == (200, 3)


def test_random_strides_with_a_capacity_ask_for_no_number(torch, scn):
    """Their sites are not listed by operations whose results have as many rows as there are."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.add(function.overloadpacket.__name__)
            return function(*args, **(kwargs or {}))

    names, x = set(), made(torch, scn, size=(13, 13))
    with Names():
        scn.RandomizedStrideMaxPooling(2, 3, 2, capacity=100)(x)
    assert "index_copy" in names
    assert names.isdisjoint({"nonzero", "masked_select", "unique_dim"})


def test_permutohedral_lattice(torch, scn):
    from sbnet_cupy.torch.scn.lattices import permutohedral_offsets

    for d in range(1, 6):
        basis, inverse = scn.permutohedral_basis(d)
        torch.testing.assert_close(basis @ inverse, torch.eye(d))
        offsets = torch.tensor(permutohedral_offsets(d), dtype=torch.float32)
        assert len(offsets) == d * d + d + 1 and not offsets[0].any()
        lengths = (offsets @ basis).norm(dim=1)
        torch.testing.assert_close(lengths, (offsets != 0).any(1).float(), rtol=0, atol=1e-5)
    x = made(torch, scn, size=(4, 4, 4))
    layer = scn.PermutohedralSubmanifoldConvolution(3, 3, 2, True).double()
    found = layer(x).features
    place = {tuple(p): i for i, p in enumerate(x.get_spatial_locations().tolist())}
    for p, i in place.items():
        total = layer.bias.detach().clone()
        for tap, offset in enumerate(permutohedral_offsets(3)):
            q = (*[a + b for a, b in zip(p, offset, strict=False)], p[-1])
            if q in place:
                total += x.features[place[q]] @ layer.weight.detach()[tap, 0]
        close(torch, found[i].detach(), total)


def test_shape_contexts(torch, scn):
    x = made(torch, scn, size=(6, 6))
    context = scn.ShapeContext(2, 3)
    assert {n: tuple(v.shape) for n, v in context.state_dict().items()} == {"weight": (9, 3, 27)}
    convolution = scn.SubmanifoldConvolution(2, 3, 27, 3, False).double()
    convolution.weight.data = context.weight.double()[:, None]
    assert torch.equal(context(x).features, convolution(x).features)
    x = x.replace(x.features[:, :1])
    for layers in (1, 2):
        net = scn.MultiscaleShapeContext(2, 1, layers).double()
        assert net(x).features.shape[1] == 9 * layers
        net = scn.MultiscaleShapeContext(2, 1, layers, shape_context_size=(3, 1)).double()
        assert net(x).features.shape[1] == 3 * layers


@pytest.mark.parametrize("activation", [None, "sigmoid", "fakeGradHardSigmoid"])
def test_sparsify(torch, scn, device, activation):
    x = made(torch, scn, device)
    kept = scn.SparsifyFCS(2)(x)
    assert torch.equal(kept.features, x.features[x.features[:, 0] > 0])
    layer = scn.Sparsify(2, 3, activation).double().to(device)
    leaf = x.features.clone().requires_grad_()
    y = layer(x.replace(leaf))
    assert 0 < len(y.features) < len(leaf)
    (y.features.sum() + y.mask.sum()).backward()
    assert all(p.grad.any() for p in layer.parameters())
    scn.SubmanifoldConvolution(2, 3, 3, 3, False).double().to(device)(y)
    active = (y.mask > layer.threshold).cpu()
    assert torch.equal(y.get_spatial_locations(), x.get_spatial_locations()[active])


def test_old_checkpoints_of_three_dimensional_weights_load(torch, scn):
    layer = scn.SubmanifoldConvolution(2, 3, 4, 3, False)
    old = {"weight": torch.randn(9, 3, 4)}
    layer.load_state_dict(old)
    assert torch.equal(layer.weight[:, 0], old["weight"])


@pytest.mark.parametrize("call, error, words", [
    (lambda scn, x: scn.Convolution(2, 3, 4, 2, 2, False)(x), sb.ShapeError, "spatial_size must"),
    (lambda scn, x: scn.MaxPooling(2, 9, 2)(x), sb.ShapeError, "spatial_size must"),
    (lambda scn, x: scn.Deconvolution(2, 3, 4, 3, 2, False)(x), ValueError, "there was none"),
    (lambda scn, x: scn.UnPooling(2, 3, 2)(x), ValueError, "there was none"),
    (lambda scn, x: scn.SubmanifoldConvolution(2, 4, 4, 3, False)(x), sb.ShapeError, "4 planes"),
    (lambda scn, x: scn.SubmanifoldConvolution(2, 4, 4, 3, False, 3), sb.ShapeError, "groups"),
    (lambda scn, x: scn.SubmanifoldConvolution(2, 0, 4, 3, False), sb.ShapeError, "nIn and nOut"),
    (lambda scn, x: scn.Convolution(3, 3, 4, 3, 2, False)(x), sb.ShapeError, "input must have the"),
    (lambda scn, x: scn.SubmanifoldConvolution(3, 3, 4, 3, False)(x), sb.ShapeError,
     "the 3 dimensions of the layer, got spatial size"),
    (lambda scn, x: scn.SparseToDense(3, 3)(x), sb.ShapeError, "the 3 dimensions of the layer"),
    (lambda scn, x: scn.DenseToSparse(3)(dense(scn, x)), sb.ShapeError, "the 3 dimensions of the"),
    (lambda scn, x: scn.ShapeContext(2, 4)(x), sb.ShapeError, "4 planes"),
    (lambda scn, x: scn.SubmanifoldConvolution(0, 3, 4, 3, False), sb.ShapeError, "dimension must"),
    (lambda scn, x: scn.SubmanifoldConvolution(2, "a", 4, 3, False), sb.ShapeError, "nIn and nOut"),
    (lambda scn, x: scn.NetworkInNetwork(0, 4, False), sb.ShapeError, "nIn must be a positive"),
    (lambda scn, x: scn.BatchNormReLU(0), sb.ShapeError, "nPlanes must be a positive"),
    *[(lambda scn, x, norm=norm, option=option: getattr(scn, norm)(3, **{option: None}),
       sb.DTypeError, f"{option} must be a number, got None") for norm, option in [
           ("BatchNormalization", "momentum"), ("BatchNormalization", "eps"),
           ("BatchNormalization", "leakiness"), ("BatchNormReLU", "momentum"),
           ("BatchNormLeakyReLU", "momentum"), ("BatchNormELU", "momentum"),
           ("MeanOnlyBNLeakyReLU", "momentum"), ("MeanOnlyBNLeakyReLU", "leakiness")]],
    (lambda scn, x: scn.BatchNormalization(3, momentum=1.5), ValueError, "momentum must be a sh"),
    (lambda scn, x: scn.Dropout(2), ValueError, "p must be a probability from 0 to 1, got 2"),
    (lambda scn, x: scn.Dropout("a"), sb.DTypeError, "p must be a number"),
    (lambda scn, x: scn.JoinTable()([]), ValueError, "input must hold at least one"),
    (lambda scn, x: scn.AddTable()(()), ValueError, "input must hold at least one"),
    (lambda scn, x: scn.JoinTable()(x), sb.DTypeError, "input must be a list of"),
    (lambda scn, x: scn.AddTable()([x, x.features]), sb.DTypeError, "input must hold Sparse"),
    (lambda scn, x: scn.AddTable()([x, x.replace(x.features[:, :2])]), sb.ShapeError,
     r"as many planes, got \[2, 3\]"),
    (lambda scn, x: scn.append_tensors([]), ValueError, "tensors must hold at least one"),
    (lambda scn, x: scn.append_tensors([x, x.replace(x.features[:, :2])]), sb.ShapeError,
     r"as many planes, got \[3, 2\]"),
    (lambda scn, x: scn.compare_sparse(x, x.features), sb.DTypeError, "x and y must hold Sparse"),
    (lambda scn, x: scn.compare_sparse(x, x.replace(x.features[:, :2])), sb.ShapeError,
     "y must have 3 planes, got 2"),
    (lambda scn, x: scn.compare_sparse(x, scn.MaxPooling(2, 1, 2)(x)), sb.ShapeError,
     "one spatial size"),
    (lambda scn, x: scn.ReLU()(scn.SparseConvNetTensor()), ValueError, "must have features and"),
    (lambda scn, x: scn.MaxPooling(2, 3, 2)(scn.SparseConvNetTensor(x.features)), ValueError,
     "must have features and metadata"),
    (lambda scn, x: scn.InputLayer(2, 9)([x.features]), sb.DTypeError, "input must be a list"),
    (lambda scn, x: scn.InputLayer(2, 9)(None), sb.DTypeError, "input must be a list .*NoneType"),
    (lambda scn, x: scn.InputLayer(2, 9)([[[1, 2]], x.features]), sb.DTypeError, "coords must be"),
    (lambda scn, x: scn.BLInputLayer(2, 9)([x.features, x]), sb.DTypeError, "features must be a"),
    (lambda scn, x: scn.batch_location_tensors([]), ValueError, "location_tensors must hold"),
    (lambda scn, x: scn.prepare_BLInput([]), ValueError, "batch must hold at least one sample"),
    (lambda scn, x: scn.UNet(2, 1, []), sb.ShapeError, "nPlanes must list"),
    (lambda scn, x: scn.FullyConvolutionalNet(2, 1, 8), sb.ShapeError, "nPlanes must list"),
    (lambda scn, x: scn.UNet(2, 1, [8, 8], downsample=2), sb.ShapeError, "downsample must be"),
    (lambda scn, x: scn.SparseVggNet(2, 3, [[]]), ValueError, "layers must be 'MP'"),
    (lambda scn, x: scn.SparseResNet(2, 3, [("basic", 8, 1)]), ValueError, "layers must be"),
    (lambda scn, x: scn.MaxPooling(1, 3, 2)(x), sb.ShapeError, "the 1 dimensions of the layer"),
    (lambda scn, x: scn.Deconvolution(3, 3, 4, 3, 2, False)(x), sb.ShapeError, "3 dimensions"),
    (lambda scn, x: scn.UnPooling(3, 3, 2)(x), sb.ShapeError, "3 dimensions of the layer"),
    (lambda scn, x: scn.SubmanifoldConvolution(2, 4, 4, (3,), False), sb.ShapeError,
     "filter_size must be an integer or 2 of them"),
    (lambda scn, x: scn.SubmanifoldConvolution(2, 3, 4, 0, False), sb.ShapeError, "filter_size"),
    (lambda scn, x: scn.Convolution(2, 3, 4, 2, 0, False), sb.ShapeError, "filter_stride must"),
    (lambda scn, x: scn.ShapeContext(2, 3, -1), sb.ShapeError, "filter_size must be positive"),
    (lambda scn, x: scn.MaxPooling(2, 0, 2), sb.ShapeError, "pool_size must be positive, got 0"),
    (lambda scn, x: scn.UnPooling(2, 2, [1, 0]), sb.ShapeError, "pool_stride must be positive"),
    (lambda scn, x: scn.AveragePooling(2, 3, 2, 4)(x), sb.ShapeError, "from 0 to 3 planes, got 4"),
    (lambda scn, x: scn.MaxPooling(2, 3, 2, -1)(x), sb.ShapeError, "nFeaturesToDrop must be"),
    (lambda scn, x: scn.NetworkInNetwork(2, 4, False)(x), sb.ShapeError, "2 planes"),
    *[(lambda scn, x, layer=layer: layer(scn)(x), sb.DTypeError,
       "dtype of the layer's weight, torch.float32, got torch.float64") for layer in (
           lambda scn: scn.NetworkInNetwork(3, 4, False),
           lambda scn: scn.SubmanifoldConvolution(2, 3, 4, 3, True),
           lambda scn: scn.Convolution(2, 3, 4, 3, 2, False).eval())],
    (lambda scn, x: scn.SubmanifoldConvolution(2, 3, 4, 3, False).to("meta")(x), sb.DeviceError,
     "input must be on the device of the layer's weight, meta, got cpu"),
    (lambda scn, x: scn.MeanOnlyBNLeakyReLU(1).eval()(x), sb.ShapeError, "1 planes"),
    (lambda scn, x: scn.BatchNormReLU(2)(x), sb.ShapeError, "2 planes"),
    (lambda scn, x: scn.SparseToDense(2, 2)(x), sb.ShapeError, "2 planes"),
    (lambda scn, x: scn.RandomizedStrideMaxPooling(2, 3, 1)(x), sb.ShapeError, "at least 2"),
    (lambda scn, x: x.get_spatial_locations((5, 5)), sb.ShapeError, "went through"),
    (lambda scn, x: scn.Sparsify(2, 3, "relu"), ValueError, "activation must"),
    *[(lambda scn, x, n=n: scn.ShapeContext(2, n), sb.ShapeError,
       f"nIn must be a positive integer, got {n}") for n in (0, 2.0)],
    *[(lambda scn, x, n=n: scn.MultiscaleShapeContext(2, 3, n), sb.ShapeError,
       f"n_layers must be a positive integer, got {n}") for n in (0, 1.5)],
    (lambda scn, x: scn.permutohedral_basis(0), sb.ShapeError, "dimension must be a positive"),
    (lambda scn, x: scn.PermutohedralSubmanifoldConvolution(0, 3, 4, False), sb.ShapeError,
     "dimension must be a positive integer, got 0"),
    (lambda scn, x: scn.LeakyReLU("a"), sb.DTypeError, "leak must be a number, got 'a'"),
])  # fmt: skip
def test_bad_calls(torch, scn, call, error, words):
    with pytest.raises(error, match=words):
        call(scn, made(torch, scn))


def layers(scn):
    """Return one layer of each kind that takes a SparseConvNetTensor of 3 planes."""
    window, size = (2, 3, 4, 3, 2, False), (2, 3, 2)
    same = scn.SubmanifoldConvolution(2, 3, 4, 3, False)
    return [
        same, scn.ValidConvolution(2, 3, 4, 3, False), scn.Convolution(*window),
        scn.Deconvolution(*window), scn.FullConvolution(*window),
        scn.RandomizedStrideConvolution(*window), scn.RandomizedStrideMaxPooling(*size),
        scn.PermutohedralSubmanifoldConvolution(2, 3, 4, True), scn.NetworkInNetwork(3, 4, True),
        scn.MaxPooling(*size), scn.AveragePooling(*size), scn.UnPooling(*size),
        scn.BatchNormalization(3), scn.BatchNormReLU(3), scn.BatchNormLeakyReLU(3),
        scn.BatchNormELU(3), scn.MeanOnlyBNLeakyReLU(3), scn.SparseGroupNorm(1, 3), scn.Tanh(),
        scn.Sigmoid(), scn.ReLU(), scn.LeakyReLU(), scn.ELU(), scn.SELU(), scn.Dropout(),
        scn.BatchwiseDropout(), scn.Sparsify(2, 3), scn.SparsifyFCS(2), scn.AddCoords(),
        scn.ShapeContext(2, 3), scn.MultiscaleShapeContext(2, 3), scn.OutputLayer(2),
        scn.BLOutputLayer(2), scn.SparseToDense(2, 3), scn.Sequential(same),
        scn.CheckpointedSequential(same), scn.ConcatTable().add(same),
        scn.UNet(2, 1, [3, 4], downsample=[3, 2]),
    ]  # fmt: skip


@pytest.mark.parametrize("training", [True, False])
def test_layers_refuse_what_is_no_tensor_of_sites(torch, scn, training):
    x = made(torch, scn)
    for layer in layers(scn):
        for value in (x.features, [x, x], None, x.sparse):
            with pytest.raises(sb.DTypeError, match="input must be a SparseConvNetTensor, got"):
                layer.train(training)(value)


def test_samples_without_points_are_a_list_without_rows(torch, scn):
    found = scn.batch_location_tensors([torch.zeros(0, 2).long(), torch.zeros(0, 2).long()])
    assert found.shape == (0, 3) and found.dtype == torch.int64


def test_every_public_name_has_a_docstring(scn):
    for name in scn.__all__:
        assert getattr(scn, name).__doc__, name


def network(scn):
    return scn.Sequential(
        scn.InputLayer(2, SIZE, 0), scn.SubmanifoldConvolution(2, 3, 4, 3, True),
        scn.UNet(2, 1, [4, 6], residual_blocks=True, downsample=[3, 2]), scn.OutputLayer(2),
    )  # fmt: skip


def test_sizes_are_on_the_cpu_whatever_the_default_device(torch, scn):
    """As in torch.device("meta"), where networks are made before their parameters are loaded."""
    expected, given = network(scn).double().eval(), points(torch)
    with torch.device("meta"):
        net = network(scn)
        wide, batch = scn.FullConvolution(2, 3, 4, 3, 2, True), scn.InputBatch(2, SIZE)
        moved = scn.RandomizedStrideConvolution(2, 3, 4, 3, 2, True), scn.MaxPooling(2, 3, 2)
        batch.add_sample()
        batch.set_locations(given[0][:2, :2], given[1][:2], True)
        assert batch.features.shape == (2, 3)
        x = scn.InputLayer(2, SIZE, 0)([*given, 2])
        assert scn.append_tensors([x, x]).batch_size() == 4
        assert not scn.compare_sparse(x, x)
        back = scn.UnPooling(2, 3, 2)(moved[1](x))
        assert not scn.DenseToSparse(2)(dense(scn, back)).spatial_size.is_meta
    assert net[1].weight.is_meta
    net.load_state_dict(expected.state_dict(), assign=True)
    for layer in (wide, moved[0]):
        layer.to_empty(device="cpu").double()
    with torch.device("meta"):
        close(torch, net.eval()(given), expected(given))
        assert wide(x).spatial_size.tolist() == [15, 19]
        assert moved[0](x).spatial_size.tolist() == [3, 4]
        assert moved[0].input_spatial_size([3, 4]).tolist() == [7, 9]
