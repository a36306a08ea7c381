"""graphed gives what a network at sites gives, of points of any number, in evaluation and training.

On a CPU it calls the network; "as on a GPU" what is around the CUDA graphs runs there too, and the
graphs call the network.
"""

import copy
import math
import random

import pytest

import sbnet_cupy as sb
from support import graphs_on_cpu
from support.torch_cases import on_device

SHAPE, SAMPLES = (18, 20), 2
RANGES = [(-1.0, 8.0), (0.0, 10.0)]


with_gradients = pytest.mark.filterwarnings(
    "ignore:Attempting to run cuBLAS, but there was no current CUDA",
    "ignore:The AccumulateGrad node's stream does not match",
)


@pytest.fixture(params=["cpu", "as on a GPU", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(torch, request, require):
    """The device of the points."""
    if request.param == "gpu":
        return on_device(require, torch, "cuda")
    return "cpu"


@pytest.fixture
def is_replayed(request):
    """Whether there are graphs, or stand-ins for them."""
    return request.node.callspec.params["device"] != "cpu"


@pytest.fixture
def graphed(torch, st, device, is_replayed, monkeypatch):
    """``graphed``, whose graphs on a CPU are stand-ins where the device says so."""
    if is_replayed and device == "cpu":
        from sbnet_cupy.torch.submanifold import graphs

        graphs_on_cpu.patch_calls(monkeypatch)
        monkeypatch.setattr(graphs._Run, "_replays", lambda run: True)
    return st.graphed


def drawn(torch, *shape):
    """Return weights of a convolution, as large as keeps features."""
    terms = torch.Size(shape[:-1]).numel()
    return torch.nn.Parameter(torch.randn(shape, dtype=torch.float64) / terms**0.5)


def unet(torch, st, end=None, **capacities):
    """Return a U-Net; its result is a row for each point, unless ``end(x, voxel)`` makes it."""

    class Level(torch.nn.Module):
        def __init__(self, channels):
            super().__init__()
            self.down = drawn(torch, 2, 2, channels, 6)
            self.up = drawn(torch, 2, 2, 6, channels)

        def forward(self, x):
            capacity = capacities.get("down")
            y = st.strided_conv(x, self.down, stride=2, activation="relu", capacity=capacity)
            return st.inverse_conv(y, self.up, onto=x)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.level = drawn(torch, 3, 3, 3, 4), Level(4)
            self.scale = torch.nn.Parameter(torch.randn(4, dtype=torch.float64))
            self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))
            self.register_buffer("variance", torch.ones(4, dtype=torch.float64))

        def forward(self, rows, values):
            x = st.coordinate_map(rows, spatial_shape=SHAPE, mode="mean", **capacities.get("x", {}))
            sites, voxel = x
            x = st.sparse_tensor(
                values, rows, spatial_shape=SHAPE, mode="mean", **capacities.get("x", {})
            )
            assert x.coordinates.capacity == sites.capacity
            x = st.submanifold_conv(x, self.first)
            x = st.masked_batch_norm(
                x, self.mean, self.variance, self.scale, training=self.training, activation="relu"
            )
            x = x.replace(x.features + self.level(x).features)
            return x.features[voxel] if end is None else end(x, voxel)

    torch.manual_seed(0)
    return Net()


def points(torch, n, seed, device="cpu", samples=SAMPLES):
    """Return rows of n points, of which some are at the same sites, and their features."""
    generator = torch.Generator().manual_seed(seed)
    low = [torch.randint(0, most, (n,), generator=generator) for most in (samples, *SHAPE)]
    values = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    return torch.stack(low, 1).to(device), values.to(device)


def assert_close(torch, found, expected):
    """Sums in float64 may be in another order."""
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_points_of_any_number(torch, st, graphed, device):
    net = unet(torch, st).to(device).eval()
    run, kept = graphed(net, [points(torch, 60, seed, device) for seed in (0, 1)]), []
    for n, seed in ((60, 2), (75, 3), (1, 4), (0, 5), (40, 6)):
        given = points(torch, n, seed, device)
        with torch.no_grad():
            expected = net(*given)
        found = run(*given)
        assert found.shape == (n, 4)
        assert_close(torch, found, expected)
        kept.append((found, found.clone()))
    assert all(torch.equal(*pair) for pair in kept)  # results are not written over
    assert run.check() is run


@with_gradients
def test_training(torch, st, graphed, device, is_replayed):
    """Gradients of features and parameters, and running statistics."""
    net = unet(torch, st).to(device).train()
    plain = copy.deepcopy(net)
    rows, values = points(torch, 60, 0, device)
    before = copy.deepcopy(net.state_dict())
    run = graphed(net, [(rows, values.requires_grad_())])
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert net.training
    for n, seed in ((60, 1), (70, 2), (25, 3)):
        rows, values = points(torch, n, seed, device)
        results = []
        for call, its in ((run, net), (plain, plain)):
            own = values.clone().requires_grad_()
            its.zero_grad()
            y = call(rows, own)
            assert y.shape == (n, 4)
            (y * torch.arange(4, device=device).cos()).square().sum().backward()
            grads = [p.grad.clone() for p in its.parameters()]
            results.append([y.detach(), own.grad, *grads, *(b.clone() for b in its.buffers())])
        for found, expected in zip(*results, strict=True):
            assert_close(torch, found, expected)
    if is_replayed:
        with pytest.raises(RuntimeError, match="must be computed before the next call"):
            first = run(rows, values.requires_grad_())
            run(rows, values)
            first.sum().backward()
    with pytest.raises(RuntimeError, match="whether a tensor requires a gradient"):
        run(*points(torch, 10, 0, device))
    net.eval()
    with pytest.raises(RuntimeError, match="training, autocast"):
        run(rows, values)


def test_results_of_sites(torch, st, graphed, device, is_replayed):
    """Two SparseTensors on the same sites, a coarser one, a grid, and sums of samples."""

    def end(x, voxel):
        down = st.sparse_max_pool(x, 2)
        rest = st.sparse_to_dense(x), [st.global_pool(x), st.global_pool(x, "mean")]
        return {"x": x, "again": x.replace(-x.features), "sites": down.coordinates, "rest": rest}

    net = unet(torch, st, end).to(device).eval()
    run = graphed(net, [points(torch, 60, 0, device)])
    for n in (60, 9, 2):
        given = points(torch, n, n, device)
        given[0][0, 0] = 1  # of the second sample
        with torch.no_grad():
            expected = net(*given)
        found = run(*given)
        assert found["x"].coordinates is found["again"].coordinates
        sites, number = found["x"].coordinates, expected["x"].coordinates.capacity
        assert sites.check() is sites
        assert sites.number() == number
        assert (sites.capacity > number) == is_replayed
        assert found["sites"].check().number() == expected["sites"].number()
        assert (sites.spatial_shape, sites.batch_size) == (SHAPE, SAMPLES)
        assert torch.equal(sites.valid(), torch.arange(sites.capacity, device=device) < number)
        for name in ("x", "again"):
            assert torch.equal(found[name].indices[:number], expected[name].indices)
            assert_close(torch, found[name].features[:number], expected[name].features)
            assert not found[name].features[number:].any()
        for one, other in zip(
            *(torch.utils._pytree.tree_leaves(y["rest"]) for y in (found, expected)), strict=True
        ):
            assert_close(torch, one, other)
    if is_replayed:  # what follows leaves out rows that hold no site
        w = drawn(torch, 3, 3, 4, 2).to(device)
        y, exact = (st.submanifold_conv(x["x"], w) for x in (found, expected))
        assert_close(torch, y.features[:number], exact.features)


def test_sites_that_are_selected(torch, st, graphed, device):
    """As a head does that goes on with the largest features."""

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = drawn(torch, 3, 3, 3, 4)

        def forward(self, rows, values):
            x = st.sparse_tensor(values, rows, spatial_shape=SHAPE, mode="mean")
            sites, taken = x.coordinates.select(x.features[:, 0] > 0)
            features = torch.where((taken >= 0)[:, None], x.features[taken.clamp(min=0)], 0)
            return st.sparse_to_dense(st.submanifold_conv(sb.SparseTensor(features, sites), self.w))

    torch.manual_seed(0)
    net = Net().to(device).eval()
    run = graphed(net, [points(torch, 60, 0, device)], slack=1)
    for n in (60, 11):
        given = points(torch, n, n, device)
        given[0][0, 0] = 1  # of the second sample
        with torch.no_grad():
            assert_close(torch, run(*given), net(*given))
    run.check()


def test_fewer_points_at_more_sites(torch, st, graphed, device):
    """The first half of the points, with which the network is checked, has more sites selected."""

    class Net(torch.nn.Module):
        def forward(self, rows, values):
            x = st.sparse_tensor(values, rows, spatial_shape=SHAPE, mode="sum")
            sites, taken = x.coordinates.select(x.features[:, 0] < 2)
            features = torch.where((taken >= 0)[:, None], x.features[taken.clamp(min=0)], 0)
            return st.global_pool(sb.SparseTensor(features, sites))

    rows, values = points(torch, 40, 0, device)
    few = rows[:3], values[:3]
    both = torch.cat([rows.unique(dim=0)] * 2), torch.ones_like(values).repeat(2, 1)
    both = both[0], both[1][: len(both[0])]
    net = Net()
    for inputs in ([both], [few, both]):
        run = graphed(net, inputs, slack=0)
        for given in (both, few):
            with torch.no_grad():
                found, expected = run(*given), net(*given)
            assert_close(torch, found[: len(expected)], expected)
        run.check()


def test_norms_where_the_first_input_is_small(torch, st, graphed, device, is_replayed):
    """The largest one is what shows that a norm counts rows without a point."""

    def end(x, voxel):
        return (x.features - x.features.mean(0))[voxel]

    if is_replayed:
        net = unet(torch, st, end).to(device).eval()
        inputs = [points(torch, n, 0, device) for n in (0, 60)]
        with pytest.raises(ValueError, match="reduce over points outside"):
            graphed(net, inputs, slack=0)


def clouds(torch, st):
    """Return a network of points in metres, which are features, too."""

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.w = torch.nn.Linear(4, 5).double(), drawn(torch, 3, 3, 5, 2)
            self.shift, self.large = torch.nn.Parameter(torch.zeros(2).double()), 1

        def forward(self, points, sample):
            grid = {"ranges": RANGES, "voxel_size": 0.5, "mode": "mean"}
            x, voxel = st.voxelize(points, self.linear(points), sample=sample, **grid)
            return st.submanifold_conv(x, self.w).features[voxel] + self.large * self.shift

    torch.manual_seed(0)
    return Net()


def cloud(torch, n, seed, device):
    """Return n points in metres, all of them inside of the ranges, and their samples."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(n, 4, generator=generator, dtype=torch.float64)
    values[:, 0] = values[:, 0] * 8.9 - 1
    values[:, 1] *= 9.9
    sample = torch.randint(0, 3, (n,), generator=generator)
    return values.to(device), sample.to(device)


@with_gradients
def test_points_in_metres(torch, st, graphed, device, is_replayed):
    net = clouds(torch, st).to(device).eval()
    inputs = [cloud(torch, 90, seed, device) for seed in (0, 1)]
    run = graphed(net, inputs)
    for n in (90, 112, 3):
        given = cloud(torch, n, n, device)
        with torch.no_grad():
            assert_close(torch, run(*given), net(*given))
    run.check()
    net.train()
    if is_replayed:
        with pytest.raises(ValueError, match="must be finite where it is multiplied by weights"):
            graphed(net, inputs)  # NaN times the gradient 0
        net.large = 1e6
        with pytest.raises(ValueError, match="must be finite where it is multiplied by weights"):
            graphed(net, inputs)  # which is a small part of all
        net.large = 1
        with pytest.raises(ValueError, match=r"fill must be outside of the grid, .* got 68 that"):
            graphed(net, inputs, fill=0)  # inside of the ranges
    run = graphed(net, inputs, fill=[1e4, -1])
    given = cloud(torch, 50, 7, device)
    grads = []
    for call in (run, net):
        net.zero_grad()
        call(*given).square().sum().backward()
        grads.append([p.grad.clone() for p in net.parameters()])
    for found, expected in zip(*grads, strict=True):
        assert_close(torch, found, expected)


def test_what_counts_rows_that_are_no_points(torch, st, graphed, device, is_replayed):
    ends = [lambda x, v: x.features, lambda x, v: x.features[v].mean(0), lambda x, v: x.features.T]
    if is_replayed:
        for end in ends:
            with pytest.raises(ValueError, match="reduce over points outside"):
                graphed(unet(torch, st, end).to(device).eval(), [points(torch, 60, 0, device)])

        low = [lambda x, v: (st.sparse_to_dense(x, fill=-float("inf")), x.features.mean(0))]
        with pytest.raises(ValueError, match="reduce over points outside"):  # beside infinities
            graphed(unet(torch, st, *low).to(device).eval(), [points(torch, 60, 0, device)])

    class Normed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.w = torch.nn.BatchNorm1d(3).double(), drawn(torch, 3, 3, 3, 4)
            self.dropout = torch.nn.Dropout(0.3)

        def forward(self, rows, values):
            x = st.sparse_tensor(values, rows, spatial_shape=SHAPE, mode="mean")
            x = x.replace(self.dropout(self.norm(x.features)))
            return st.submanifold_conv(x, self.w)

    net = Normed().to(device)
    before = copy.deepcopy(net.state_dict())
    state = torch.get_rng_state()
    graphed(net.eval(), [points(torch, 60, 0, device)])  # whose statistics are those that ran
    if is_replayed:
        with pytest.raises(ValueError, match="use masked_batch_norm for norms over sites"):
            graphed(net.train(), [points(torch, 60, 0, device)])
        assert net.training and net.dropout.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


@with_gradients
def test_losses_in_training(torch, st, graphed, device):
    """A network that returns other things in training, of other lists of sites."""

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.down = drawn(torch, 3, 3, 3, 4), drawn(torch, 2, 2, 4, 4)

        def forward(self, rows, values, labels):
            x = st.sparse_tensor(values, rows, spatial_shape=SHAPE, mode="mean")
            voxel = st.coordinate_map(rows, spatial_shape=SHAPE, mode="mean")[1]
            y = torch.nn.functional.dropout(x.features, 0.0, self.training)
            x = st.submanifold_conv(x.replace(y), self.w)
            y = x.features[voxel]
            if not self.training:
                return y
            loss = torch.nn.functional.cross_entropy(y, labels, ignore_index=-1)
            return {"loss": loss, "size": st.strided_conv(x, self.down, stride=2).features.sum()}

    def given(n, seed):
        rows, values = points(torch, n, seed, device)
        return rows, values, rows.sum(1) % 4

    torch.manual_seed(0)
    net = Net().to(device)
    for training in (True, False):
        run = graphed(net.train(training), [given(60, 0)])
        for n in (60, 20):
            grads = []
            for call in (run, net):
                net.zero_grad()
                if training:
                    losses = call(*given(n, n))
                    (losses["loss"] + losses["size"]).backward()
                    grads.append([p.grad.clone() for p in net.parameters()])
                else:
                    with torch.no_grad():
                        grads.append([call(*given(n, n))])
            for found, expected in zip(*grads, strict=True):
                assert_close(torch, found, expected)
        run.check()


def test_results_without_gradients_in_training(torch, st, graphed, device):
    net = unet(torch, st, lambda x, voxel: x.features[voxel].detach()).to(device).train()
    given = points(torch, 60, 0, device)
    run, plain = graphed(net, [given]), copy.deepcopy(net)
    found = run(*given)
    assert not found.requires_grad
    assert_close(torch, found, plain(*given))


def test_to_make_a_graph_changes_nothing(torch, st, graphed, device, is_replayed):
    """Numbers that are drawn, and buffers that are written, in evaluation, too."""

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.w = torch.nn.BatchNorm1d(3).double(), drawn(torch, 3, 3, 3, 4)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, rows, values):
            self.calls.add_(1)
            values = values + torch.rand_like(values)
            x = st.sparse_tensor(values, rows, spatial_shape=SHAPE, mode="mean")
            return st.submanifold_conv(x.replace(self.norm(x.features)), self.w)

    net, given = Net().to(device), points(torch, 60, 0, device)
    for training in (True, False):
        state = torch.get_rng_state(), copy.deepcopy(net.state_dict())
        run = graphed(net.train(training), [given])
        assert torch.equal(torch.get_rng_state(), state[0])
        assert all(torch.equal(tensor, state[1][name]) for name, tensor in net.state_dict().items())
        calls = net.calls.item()
        for n in (1, 2, 3):
            run(*given)
            assert net.calls.item() == calls + n

    class Part(Net):
        def forward(self, rows, values):
            x = st.sparse_tensor(values, rows, spatial_shape=SHAPE, mode="mean")
            return st.submanifold_conv(x.replace(self.norm(x.features)), self.w)

    net = Part().to(device).eval()
    net.norm.train()
    if is_replayed:
        with pytest.raises(ValueError, match="use masked_batch_norm for norms over sites"):
            graphed(net, [given])
    assert net.norm.training and not net.training
    assert not net.norm.num_batches_tracked


@with_gradients
def test_buffers_that_calls_replace(torch, st, graphed, device, is_replayed):
    """Each call, or the first one alone, which keeps what it has computed."""

    class Net(torch.nn.Module):
        def __init__(self, each):
            super().__init__()
            self.w, self.each = drawn(torch, 3, 3, 3, 4), each
            self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))
            self.register_buffer("table", torch.empty(0))

        def forward(self, rows, values):
            x = st.sparse_tensor(values, rows, spatial_shape=SHAPE, mode="mean")
            if self.each:
                now = st.global_pool(x, "mean").detach().mean(0)
                self.mean = 0.999 * self.mean + 0.001 * now  # results differ by less than is told
            if not self.table.numel():
                self.table = torch.ones(4, device=values.device)
            y = st.submanifold_conv(x.replace(x.features - self.mean), self.w)
            return st.global_pool(y) * self.table

    given = points(torch, 60, 0, device)
    for training in (True, False):
        net = Net(False).to(device).train(training)
        assert_close(torch, graphed(net, [given])(*given), net(*given))
        net = Net(True).to(device).train(training)
        if is_replayed:
            with pytest.raises(RuntimeError, match=r"another tensor its buffer 'mean', .* copy_"):
                graphed(net, [given])


@pytest.mark.parametrize("training", [True, False])
def test_random_numbers_of_the_host(torch, st, graphed, device, is_replayed, training):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = drawn(torch, 3, 3, 3, 4)

        def forward(self, rows, values):
            x = st.sparse_tensor(values, rows, spatial_shape=SHAPE, mode="mean")
            return st.submanifold_conv(x.replace(x.features * random.random()), self.w)

    net = Net().to(device).train(training)
    if is_replayed:
        with pytest.raises(RuntimeError, match="draws random numbers on the host"):
            graphed(net, [points(torch, 60, 0, device)])


@with_gradients
def test_activations_that_are_computed_again(torch, st, graphed, device, is_replayed):
    """Of convolutions at sites that are there; not of those that make sites."""

    class Net(torch.nn.Module):
        def __init__(self, makes_sites):
            super().__init__()
            self.w, self.down = drawn(torch, 3, 3, 3, 4), drawn(torch, 2, 2, 4, 4)
            self.makes_sites = makes_sites

        def forward(self, rows, values):
            x = st.sparse_tensor(values, rows, spatial_shape=SHAPE, mode="mean")

            def block(features):
                y = st.submanifold_conv(x.replace(features), self.w, activation="relu")
                if self.makes_sites:
                    y = st.inverse_conv(st.strided_conv(y, self.down, stride=2), self.down, onto=y)
                return y.features

            y = torch.utils.checkpoint.checkpoint(block, x.features, use_reentrant=False)
            return st.global_pool(x.replace(y))

    torch.manual_seed(0)
    net, grads, given = Net(False).to(device).train(), [], points(torch, 60, 0, device)
    for call in (graphed(net, [given]), net):
        net.zero_grad()
        call(*points(torch, 40, 1, device)).square().sum().backward()
        grads.append(net.w.grad.clone())
    assert_close(torch, *grads)
    if is_replayed:
        with pytest.raises(RuntimeError, match=r"in what torch\.utils\.checkpoint computes again"):
            graphed(Net(True).to(device).train(), [given])


def test_a_graph_that_is_made_in_inference_mode(torch, st, graphed, device):
    net, given = unet(torch, st).to(device).eval(), points(torch, 60, 0, device)
    with torch.inference_mode():
        run = graphed(net, [tuple(tensor.clone() for tensor in given)])
        inside = run(*given)
    with torch.no_grad():
        assert_close(torch, run(*given), net(*given))
        assert_close(torch, inside, net(*given))
    assert run.check() is run


def test_results_that_cancel(torch, st, graphed, device):
    """The mean of what a norm over sites made is 0, up to rounding, and has no gradient."""

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = drawn(torch, 3, 3, 3, 4)

        def forward(self, rows, values):
            x = st.sparse_tensor(values, rows, spatial_shape=SHAPE, mode="mean")
            x = st.masked_batch_norm(st.submanifold_conv(x, self.w), training=True)
            return x, x.features.sum(0)

    torch.manual_seed(0)
    net = Net().to(device)
    for n in range(50, 60):
        given = points(torch, n, n, device)
        x, total = graphed(net.train(n % 2 == 0), [given])(*given)
        assert (total.abs() < 1e-12).all()
        assert x.features.square().sum() > 1


def test_a_part_whose_mode_has_changed(torch, st, graphed, device, is_replayed):
    """It is checked again: a norm by all rows would count those without a site."""

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(3).double()

        def forward(self, rows, values):
            x = st.sparse_tensor(values, rows, spatial_shape=SHAPE, mode="mean")
            return x.replace(self.norm(x.features))

    net, given = Net().to(device).eval(), points(torch, 60, 0, device)
    run = graphed(net, [given])
    run(*given)
    net.norm.train()
    if is_replayed:
        with pytest.raises(ValueError, match="use masked_batch_norm for norms over sites"):
            run(*given)
    net.norm.eval()
    with torch.no_grad():
        number = net(*given).features.shape[0]
        assert_close(torch, run(*given).features[:number], net(*given).features)


def test_a_network_that_has_changed(torch, st, graphed, device):
    net = unet(torch, st).to(device).eval()
    given = points(torch, 60, 0, device)
    run = graphed(net, [given])
    first = run(*given)
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(1.5)
        expected = net(*given)
    assert not torch.equal(first, expected)
    assert_close(torch, run(*given), expected)


def test_weights_are_packed_once(torch, st, device, request):
    """Those that the network keeps, where nothing converts them and no gradient is recorded."""
    if request.node.callspec.params["device"] == "as on a GPU":
        pytest.skip("there are no graphs")
    from sbnet_cupy.torch.submanifold.kept_weights import KeptWeights

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.bias = drawn(torch, 3, 3, 3, 4), drawn(torch, 4)
            self.register_buffer("scale", torch.rand(4, dtype=torch.float64))

        def forward(self, rows, values):
            x = st.sparse_tensor(values, rows, spatial_shape=SHAPE, mode="mean")
            both = {"bias": self.bias, "scale": self.scale}
            results = [
                st.submanifold_conv(x, self.w, **both, activation="relu", residual=values_of)
                for values_of in (None, x.features.sum(1, keepdim=True).expand(-1, 4).contiguous())
            ]
            results.append(st.submanifold_conv(x, self.w, precision="ieee"))
            results.append(st.submanifold_conv(x, self.w * 1))
            results.append(st.submanifold_conv(x, self.w, scale=self.scale + 0))
            return [y.features for y in results]

    torch.manual_seed(0)
    net, given = Net().to(device), points(torch, 60, 0, device)
    expected, weights = net(*given), KeptWeights(net)
    with weights.used():
        for found, exact in zip(net(*given), expected, strict=True):
            assert found.requires_grad
            assert torch.equal(found, exact)
        assert not weights._packed
        with torch.no_grad():
            for found, exact in zip(net(*given) + net(*given), expected * 2, strict=True):
                assert torch.equal(found, exact)
        assert len(weights._packed) == 2  # with scale and bias, and alone
    with torch.no_grad(), torch.autocast(device.split(":")[0], torch.bfloat16):
        expected, weights = net.float()(given[0], given[1].float()), KeptWeights(net)
        with weights.used():
            for found, exact in zip(net(given[0], given[1].float()), expected, strict=True):
                assert torch.equal(found, exact)
    assert not weights._packed


def test_what_is_dropped_shows(torch, st, graphed, device, is_replayed):
    net = unet(torch, st).to(device).eval()
    rows, values = points(torch, 60, 0, device)
    few = rows.clone()
    few[:, 1:] %= 3  # few sites
    run = graphed(net, [(few, values)], slack=0.1)
    if not is_replayed:
        assert run(rows, values).shape == (60, 4)
        return
    run(rows, values)
    if device != "cpu":
        torch.cuda.synchronize()
    with pytest.warns(RuntimeWarning, match="list 0 of sites had .* sites, with room for 20") as w:
        run(few, values)
    assert "layer 'level' had" in str(w[0].message)
    assert w[0].filename == __file__
    run(few, values)  # which warns no more
    with pytest.raises(sb.CapacityError, match="what there was no room for was dropped"):
        run.check()
    run(few, values)
    assert run.check() is run
    outside = few.clone()
    outside[3, 1], outside[5, 0], outside[6, 2] = SHAPE[0], SAMPLES, -1
    found = run(outside, values)
    if device != "cpu":
        torch.cuda.synchronize()
    with pytest.warns(RuntimeWarning, match="6 points lay outside"):  # of two lists
        run(few, values)
    with pytest.raises(sb.CapacityError, match="6 points lay outside"):
        run.check()
    kept = torch.tensor([k not in (3, 5, 6) for k in range(60)], device=device)
    with torch.no_grad():
        assert_close(torch, found[kept], net(outside[kept], values[kept]))


def test_more_samples_of_points_in_metres(torch, st, graphed, device, is_replayed):
    """Those past the samples of the inputs are dropped, which shows."""
    net = clouds(torch, st).to(device).eval()
    values, sample = cloud(torch, 60, 0, device)
    run = graphed(net, [(values, sample % 2)], slack=1)
    values[:5] = float("nan")  # which is dropped anyway
    run(values, sample % 2)
    run.check()
    run(values, sample.clamp(max=1) + (torch.arange(60, device=device) > 56) * 2)
    if is_replayed:
        with pytest.raises(sb.CapacityError, match="3 points lay outside of the grid or the sampl"):
            run.check()


def test_rows_without_a_point_outside_of_the_grid(torch, st, graphed, device, is_replayed):
    """They would be counted as points that were dropped."""

    class Net(torch.nn.Module):
        def forward(self, points, values):
            rows = torch.nn.functional.pad(points.floor().int(), (1, 0))
            return st.coordinate_map(rows, spatial_shape=SHAPE, mode="first")[1]

    rows, values = points(torch, 60, 0, device)
    given = rows[:, 1:] + 0.5, values
    if is_replayed:
        with pytest.raises(ValueError, match=r"fill must make the sample .* got 45 that are poin"):
            graphed(Net(), [given], fill=-5)


def test_sites_twice(torch, st, graphed, device, is_replayed):
    class Net(torch.nn.Module):
        def forward(self, rows, values):
            return st.sparse_tensor(values, rows, spatial_shape=SHAPE, batch_size=2)

    rows, values = points(torch, 1, 0, device)
    run = graphed(Net(), [(rows, values)], slack=5)
    if not is_replayed:
        return
    assert run(rows, values).coordinates.check().number() == 1
    found = run(rows.repeat(3, 1), values.repeat(3, 1))
    with pytest.raises(sb.CapacityError, match="listed twice"):
        run.check()
    with pytest.raises(ValueError, match="distinct"):
        found.coordinates.check()


def test_capacities_of_the_network(torch, st, graphed, device, is_replayed):
    """They stay as they are, and tell what they have no room for."""
    own = {"x": {"capacity": 50, "batch_size": 2}, "down": 30}
    net = unet(torch, st, lambda x, voxel: x, **own).to(device).eval()
    run = graphed(net, [points(torch, 30, 0, device)])
    assert run(*points(torch, 30, 1, device)).coordinates.capacity == 50
    run.check()
    if is_replayed:
        run = graphed(net, [points(torch, 60, 0, device)])
        run(*points(torch, 75, 1, device))
        with pytest.raises(sb.CapacityError, match=r"layer 'level' had .* with room for 30"):
            run.check()


def test_other_lists_in_each_call(torch, st, graphed, device, is_replayed):
    class Net(torch.nn.Module):
        def forward(self, rows, values):
            x = st.sparse_tensor(values, rows, spatial_shape=SHAPE, mode="mean")
            return st.sparse_max_pool(x, 2) if len(rows) > 40 else x

    inputs = [points(torch, n, 0, device) for n in (60, 30)]
    with pytest.raises(RuntimeError, match="as many lists of sites in each call, got 1 and 2"):
        graphed(Net(), inputs)
    if is_replayed:  # where rows without a point come to those of an input
        with pytest.raises(RuntimeError, match="in each call, got 2 and 1"):
            graphed(Net(), inputs[1:], slack=1)
    assert isinstance(st.sparse_tensor(inputs[0][1], inputs[0][0], mode="sum"), sb.SparseTensor)


def test_lists_of_dense_images(torch, st, graphed, device):
    """A tensor that is none of points, of sites that are found of features."""

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = drawn(torch, 3, 3, 1, 4)

        def forward(self, rows, image):
            x = st.dense_to_sparse(image)
            y = st.submanifold_conv(x, self.w)
            rows = torch.where(rows >= 0, rows, 0)
            return st.sparse_to_dense(y)[tuple(rows.long().unbind(1))]

    def images(seed, n):
        torch.manual_seed(seed)
        image = torch.relu(torch.randn(SAMPLES, *SHAPE, 1, dtype=torch.float64) - 1)
        return points(torch, n, seed, device)[0], image.to(device)

    net = Net().to(device).eval()
    inputs = [images(0, 30), images(1, 20)]
    run = graphed(net, inputs, slack=1)
    for n in (30, 4):
        with torch.no_grad():
            assert_close(torch, run(*images(n, n)), net(*images(n, n)))
    run.check()
    assert torch.equal(inputs[0][1], images(0, 30)[1])  # calls write to none of the inputs


def test_what_rows_without_a_point_hold(torch):
    from sbnet_cupy.torch.submanifold.graphs import _fill_of

    held = {"uint8": 255, "int8": -1, "int64": -1, "bool": 0, "float16": 0}
    assert {name: _fill_of(1, getattr(torch, name), None) for name in held} == held
    assert _fill_of(0, torch.int32, None) == -1 and math.isnan(_fill_of(0, torch.float32, None))


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int64", "bool", "float16"])
def test_tensors_of_points(torch, st, graphed, device, dtype):
    """Of dtypes that need not hold -1."""

    class Net(torch.nn.Module):
        def forward(self, rows, values, more):
            x = st.sparse_tensor(values, rows, spatial_shape=SHAPE, mode="mean")
            y = torch.where((more > 0)[:, None], values, 0.5)
            return x, st.sparse_tensor(y, rows, spatial_shape=SHAPE, mode="mean"), more

    def given(n, seed):
        rows, values = points(torch, n, seed, device)
        return rows, values, (rows[:, 1] % 2).to(getattr(torch, dtype))

    run = graphed(Net(), [given(60, 0)])
    found, expected = run(*given(30, 1)), Net()(*given(30, 1))
    number = expected[0].coordinates.number()
    for one, other in zip(found[:2], expected[:2], strict=True):
        assert_close(torch, one.features[:number], other.features)
    assert torch.equal(found[2], expected[2])
    if dtype != "float16":
        with pytest.raises(sb.DTypeError, match=rf"an integer that {dtype} holds, .* got 0\.5; "):
            graphed(Net(), [given(60, 0)], fill=(-1, 0, 0.5))


def test_bad_arguments(torch, st, graphed, device, is_replayed):
    net = unet(torch, st).to(device).eval()
    rows, values = points(torch, 60, 0, device)
    run = graphed(net, [(rows, values)])
    bad = [
        (sb.ShapeError, r"tensor 0 must have shape \(60, 3\)", (rows[:, :2], values)),
        (sb.ShapeError, r"tensor 0 must have shape \(60, 3\)", (rows.sum(), values)),
        (sb.ShapeError, r"tensor 1 must have shape \(60, 3\), a row for each", (rows, values[:9])),
        (sb.DTypeError, "tensor 1 must be torch.float64", (rows, values.float())),
        (sb.ShapeError, "at most 75, for which .* got 76", points(torch, 76, 0, device)),
        (sb.DeviceError, "tensor 1 must be on", (rows, values.to("meta"))),
        (sb.ShapeError, "must be called with 2 tensors, .* got 1", (rows,)),
        (sb.DTypeError, "tensor 0 must be a torch.Tensor, got list", (rows.tolist(), values)),
    ]  # fmt: skip
    for error, message, given in bad:
        with pytest.raises(error, match=message):
            run(*given)
    autocast = torch.autocast(torch.device(device).type, torch.bfloat16)
    with pytest.raises(RuntimeError, match="training, autocast"), autocast:
        run(rows, values)
    assert run(rows, values).shape == (60, 4)
    given = [(rows, values)]
    for error, message, arguments in (
        (ValueError, "inputs must not be empty", ([],)),
        (sb.DTypeError, "inputs must hold tensors, .* got NoneType", ([None],)),
        (sb.DTypeError, r"inputs must be a list .* got a Tensor; pass \[tensor\]", (given[0][0],)),
        (sb.DTypeError, "tensor 1 must be a torch.Tensor, got int", ([(rows, 3)],)),
        (sb.ShapeError, "tensor 0 must have a row for each point", ([torch.tensor(3)],)),
        (sb.ShapeError, "slack must not be negative", (given, -1)),
        (sb.DTypeError, "slack must be a number", (given, "a")),
        (sb.ShapeError, "one for each of the 2 tensors of an input, got 3", (given, 0.25, [0] * 3)),
        (sb.DTypeError, "fill must be a number", (given, 0.25, "a")),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            graphed(net, *arguments)
    with pytest.raises(TypeError, match=r"net must be a torch\.nn\.Module, got f"):
        graphed(lambda rows: rows, given)
    if is_replayed:
        wrong = unet(torch, st, lambda x, voxel: (x, "name")).to(device).eval()
        with pytest.raises(TypeError, match="got a str; return tensors and SparseTensors alone"):
            graphed(wrong, given)
        net.level.register_forward_hook(lambda *_: None)
        with pytest.raises(RuntimeError, match="forward hooks"):
            graphed(net, given)


@pytest.mark.gpu
def test_waiting_for_the_device(torch, st, require):
    device = on_device(require, torch, "cuda")
    net = unet(torch, st, lambda x, voxel: x.features[x.coordinates.valid()]).to(device).eval()
    with pytest.raises((RuntimeError, ValueError), match=r"waits for the device|reduce over"):
        st.graphed(net, [points(torch, 60, 0, device)])
