"""scn.graphed gives what the network gives, of points of any number, in evaluation and training.

On a CPU it calls the network; "as on a GPU" what is around the CUDA graphs runs there too, and the
graphs call the network.
"""

import copy
import sys

import pytest

import sbnet_cupy as sb
from support import graphs_on_cpu
from support.scn_networks import SAMPLES, SIZE, points, unet
from support.torch_cases import on_device


@pytest.fixture(scope="module")
def scn(torch):
    import sbnet_cupy.torch.scn as scn

    return scn


@pytest.fixture(params=["cpu", "as on a GPU", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(torch, request, require, monkeypatch):
    """The device of the points, where graphs are what the parameter says."""
    if request.param == "gpu":
        return on_device(require, torch, "cuda")
    if request.param == "as on a GPU":
        fake(torch, monkeypatch)
    return "cpu"


def fake(torch, monkeypatch):
    """Let graphs on the CPU run what they have captured."""
    from sbnet_cupy.torch.scn import graphs

    def graphed(net, inputs, slack=0.25):
        return graphs._OfPoints(net, list(inputs), slack)

    graphs_on_cpu.patch_calls(monkeypatch)
    monkeypatch.setattr(sys.modules["sbnet_cupy.torch.scn"], "graphed", graphed)


def assert_close(torch, found, expected):
    """Sums in float64 may be in another order."""
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_points_of_any_number(torch, scn, device):
    net = unet(torch, scn, device).eval()
    run = scn.graphed(net, [points(torch, 60, seed, device) for seed in (0, 1)])
    assert all(m.capacity is None for m in net.modules() if hasattr(m, "capacity"))
    kept = []
    for n, seed in ((60, 2), (75, 3), (1, 4), (0, 5), (40, 6)):
        given = points(torch, n, seed, device)
        with torch.no_grad():
            expected = net(given)
        found = run(given)
        assert found.shape == (n, 5)
        assert_close(torch, found, expected)
        kept.append((found, found.clone()))
    assert all(torch.equal(*pair) for pair in kept)  # results are not written over
    run.check()


def test_more_samples_than_an_input_says(torch, scn, device):
    """They count, as in a call without a capacity."""
    net = unet(torch, scn, device).eval()
    given = points(torch, 40, 0, device)
    run = scn.graphed(net, [[*given[:2], 1]])
    with torch.no_grad():
        assert_close(torch, run(given), net(given))
    assert run.check() is run


def test_the_largest_of_all_inputs_counts(torch, scn, device):
    """There is room for a share more than its points, and for its samples in each call."""
    net = unet(torch, scn, device, scn.SparseToDense(2, 4)).eval()
    few, many = points(torch, 10, 0, device, samples=1), points(torch, 41, 1, device)
    run = scn.graphed(net, [few, many])
    room = [torch.cat([part, part[:11]]) for part in many[:2]]  # the same sites
    for given in (few, [*few[:2]], room):
        with torch.no_grad():
            assert_close(torch, run(given), net([*given[:2], SAMPLES]))
    with pytest.raises(sb.ShapeError, match="at most 52, for which there is room, got 53"):
        run(points(torch, 53, 3, device))


def test_one_sample_without_its_number(torch, scn, device):
    net = unet(torch, scn, device).eval()
    given = points(torch, 30, 0, device, samples=1)[:2]
    given[0] = given[0][:, :2]
    run = scn.graphed(net, [given], slack=0)
    for n in (30, 12):
        few = [given[0][:n], given[1][:n]]
        with torch.no_grad():
            assert_close(torch, run(few), net(few))


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA")
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
def test_training(torch, scn, device):
    """Gradients of features and parameters, and running statistics."""
    net = unet(torch, scn, device).train()
    plain = copy.deepcopy(net)
    inputs = points(torch, 60, 0, device)
    inputs[1].requires_grad_()
    before = copy.deepcopy(net.state_dict())
    run = scn.graphed(net, [inputs])
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert net.training and all(m.capacity is None for m in net.modules() if hasattr(m, "capacity"))
    for n, seed in ((60, 1), (70, 2), (25, 3)):
        given, results = points(torch, n, seed, device), []
        with torch.no_grad():  # as between epochs
            net.eval()(given)
            net.train()
        for call, its in ((run, net), (plain, plain)):
            features = given[1].clone().requires_grad_()
            its.zero_grad()
            y = call([given[0], features, SAMPLES])
            assert y.shape == (n, 5)
            (y * torch.arange(5, device=device).cos()).square().sum().backward()
            grads = [p.grad.clone() for p in its.parameters()]
            results.append([y.detach(), features.grad, *grads, *(b.clone() for b in its.buffers())])
        for found, expected in zip(*results, strict=True):
            assert_close(torch, found, expected)
    if device != "cpu":
        with pytest.raises(RuntimeError, match="must be computed before the next call"):
            first = run(inputs)
            run(inputs)
            first.sum().backward()
    with pytest.raises(RuntimeError, match="whether features requires a gradient"):
        run(points(torch, 10, 0, device))
    net.eval()
    with pytest.raises(RuntimeError, match="training, autocast"):
        run(inputs)


def test_dense_results_have_no_rows_of_points(torch, scn, device):
    net = unet(torch, scn, device, scn.SparseToDense(2, 4)).eval()
    run = scn.graphed(net, [points(torch, 60, 0, device)])
    for n in (60, 9):
        given = points(torch, n, n, device)
        with torch.no_grad():
            expected = net(given)
        assert run(given).shape == (SAMPLES, 4, SIZE, SIZE)
        assert_close(torch, run(given), expected)


def test_results_must_be_tensors(torch, scn, device, request):
    net = unet(torch, scn, device, scn.ReLU()).eval()
    if request.node.callspec.params["device"] == "cpu":
        run = scn.graphed(net, [points(torch, 60, 0)])
        assert isinstance(run(points(torch, 6, 0)), scn.SparseConvNetTensor)
        return
    with pytest.raises(TypeError, match="end the network with an OutputLayer"):
        scn.graphed(net, [points(torch, 60, 0, device)])


def test_results_that_count_rows_which_are_no_points(torch, scn, device, request):
    class Ends(torch.nn.Module):
        def __init__(self, end):
            super().__init__()
            self.net, self.end = unet(torch, scn, device), end

        def forward(self, points):
            return self.end(self.net(points))

    points_of = [points(torch, 60, 0, device)]
    sums = scn.graphed(Ends(lambda y: {"sum": y.sum(0), "rows": y}).eval(), points_of)
    found = sums(points(torch, 7, 1, device))
    torch.testing.assert_close(found["sum"], found["rows"].sum(0))
    assert found["rows"].shape == (7, 5)
    if request.node.callspec.params["device"] != "cpu":
        for end in (lambda y: y.mean(0), lambda y: y.flatten(), lambda y: y.T):
            with pytest.raises(ValueError, match="reduce over points outside"):
                scn.graphed(Ends(end).eval(), points_of)


def test_results_that_count_rows_which_are_no_sites(torch, scn, device, request):
    class Mean(torch.nn.Module):
        def forward(self, x):
            return x.features.mean(0)

    net = unet(torch, scn, device, Mean()).eval()
    if request.node.callspec.params["device"] != "cpu":
        with pytest.raises(ValueError, match="reduce over points outside"):
            scn.graphed(net, [points(torch, 60, 0, device)])


def test_layers_that_are_not_called(torch, scn, device):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.spare = unet(torch, scn, device), scn.MaxPooling(2, 3, 2)

        def forward(self, points):
            return self.net(points)

    net, given = Net().eval(), points(torch, 60, 0, device)
    run = scn.graphed(net, [given])
    with torch.no_grad():
        assert_close(torch, run(given), net(given))
    assert run.check() is run


def test_a_network_that_has_changed(torch, scn, device):
    net = unet(torch, scn, device).eval()
    given = points(torch, 60, 0, device)
    run = scn.graphed(net, [given])
    first = run(given)
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(1.5)
        expected = net(given)
    assert not torch.equal(first, expected)
    assert_close(torch, run(given), expected)
    net[1].weight = torch.nn.Parameter(net[1].weight.detach() * 2)
    with torch.no_grad():
        expected = net(given)
    assert_close(torch, run(given), expected)


def test_what_is_dropped_shows(torch, scn, device, request):
    net = unet(torch, scn, device).eval()
    small = points(torch, 60, 0, device, size=3)  # few sites
    run = scn.graphed(net, [small], slack=0.1)
    if request.node.callspec.params["device"] == "cpu":
        assert run(points(torch, 60, 0)).shape == (60, 5)
        return
    run(points(torch, 60, 1, device))  # many
    if device != "cpu":
        torch.cuda.synchronize()
    with pytest.warns(RuntimeWarning, match="layer '0' had .* sites, with room for 20"):
        run(small)
    with pytest.raises(sb.CapacityError, match="what there was no room for was dropped"):
        run.check()
    run(small)
    assert run.check() is run
    outside = [small[0].clone(), *small[1:]]
    outside[0][3, 1] = SIZE
    outside[0][5, 0] = -1
    run(outside)
    with pytest.raises(sb.CapacityError, match="2 points lay outside"):
        run.check()
    unknown = [small[0].double(), *small[1:]]
    unknown[0][3, 1] = unknown[0][5, -1] = float("nan")
    run(unknown)
    with pytest.raises(sb.CapacityError, match="2 points lay outside"):
        run.check()
    net = scn.Sequential(scn.InputLayer(2, SIZE, mode=0), scn.OutputLayer(2)).eval()
    one = points(torch, 1, 0, device)
    run = scn.graphed(net, [one], slack=5)
    run([one[0].repeat(3, 1), one[1].repeat(3, 1), SAMPLES])
    with pytest.raises(sb.CapacityError, match="listed twice"):
        run.check()


def test_bad_arguments(torch, scn, device, request):
    net = unet(torch, scn, device).eval()
    given = points(torch, 60, 0, device)
    run, many = scn.graphed(net, [given]), points(torch, 76, 0, device)
    bad = [
        (sb.ShapeError, r"coords must have shape \(N, 3\)", [given[0][:, :2], given[1]]),
        (sb.ShapeError, r"coords must have shape \(N, 3\)", [given[0][0], given[1]]),
        (sb.ShapeError, r"features must have shape \(60, 3\)", [given[0], given[1][:, :2]]),
        (sb.ShapeError, r"features must have shape \(60, 3\)", [given[0], given[1][:9]]),
        (sb.DTypeError, "features must be torch.float64", [given[0], given[1].float()]),
        (sb.ShapeError, "at most 75, for which there is room, got 76", many),
        (sb.ShapeError, "batch_size must be at most 2", [*given[:2], 3]),
        (sb.DeviceError, "features must be on", [given[0], given[1].to("meta")]),
        (sb.DTypeError, r"points must be a list \[coords, features\] or .*, got NoneType", None),
        (sb.DTypeError, r"points must be a list \[coords, features\] or .* 1 items", given[:1]),
        (sb.DTypeError, "points must be a list .*, got 4 items", [*given[:2], 1, None]),
        (sb.DTypeError, "coords must be a torch.*got list; convert", [given[0].tolist(), given[1]]),
    ]  # fmt: skip
    for error, message, inputs in bad:
        with pytest.raises(error, match=message):
            run(inputs)
    assert run(given).shape == (60, 5)
    with pytest.raises(ValueError, match="inputs must not be empty"):
        scn.graphed(net, [])
    for error, message, other in (
        (sb.ShapeError, r"coords must have shape \(N, 3\)", [given[0][:, :2], given[1]]),
        (sb.DTypeError, "features must be torch.float64", [given[0], given[1].float()]),
    ):
        with pytest.raises(error, match=message):
            scn.graphed(net, [given, other])
    with pytest.raises(sb.DTypeError, match=r"inputs must hold lists .* pass one input as"):
        scn.graphed(net, given)
    with pytest.raises(sb.ShapeError, match="slack must not be negative"):
        scn.graphed(net, [given], slack=-1)
    with pytest.raises(sb.DTypeError, match="slack must be a number"):
        scn.graphed(net, [given], slack="a")
    with pytest.raises(ValueError, match="net must have an InputLayer"):
        scn.graphed(torch.nn.Linear(3, 3), [given])
    if request.node.callspec.params["device"] != "cpu":
        layers = (scn.RandomizedStrideMaxPooling(2, 3, 2), scn.SparseToDense(2, 3))
        random = scn.Sequential(scn.InputLayer(2, SIZE, mode=4), *layers).to(device)
        assert scn.graphed(random.eval(), [given])(given).shape == (2, 3, 9, 9)
        with pytest.raises(RuntimeError, match="replays would not draw any, got 1;"):
            scn.graphed(random.train(), [given])
        net[1].register_forward_hook(lambda *_: None)
        with pytest.raises(RuntimeError, match="forward hooks"):
            scn.graphed(net, [given])
