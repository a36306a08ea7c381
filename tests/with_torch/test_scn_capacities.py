"""SparseConvNet's layers with capacities: the same results, fixed shapes, nothing that waits."""

import copy

import pytest

import sbnet_cupy as sb
from support.scn_networks import points, unet


@pytest.fixture(scope="module")
def scn(torch):
    import sbnet_cupy.torch.scn as scn

    return scn


@pytest.fixture(scope="module")
def watch(torch):
    """A mode that raises at operations that wait for a GPU, and lists all results' shapes."""
    from torch.utils._python_dispatch import TorchDispatchMode

    waiting = ("_local_scalar_dense", "nonzero.default", "masked_select", "_unique", "is_nonzero")

    class Watch(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.shapes = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if any(name in str(func) for name in waiting):
                raise AssertionError(f"{func} waits for the device")
            result = func(*args, **(kwargs or {}))
            self.shapes.append((str(func), tuple(getattr(result, "shape", ()))))
            return result

    return Watch


def test_results_and_gradients_are_those_without(torch, scn):
    net, given = unet(torch, scn), points(torch, 60, 1)
    exact, state = {}, copy.deepcopy(net.state_dict())
    for fixed in (False, True):
        if fixed:
            scn.set_capacities(net, [points(torch, 60, seed) for seed in range(4)], slack=0.5)
            assert all(m.capacity for m in net.modules() if hasattr(m, "capacity"))
        for training in (False, True):
            net.load_state_dict(state)  # training moves the running statistics
            features = given[1].clone().requires_grad_()
            net.train(training).zero_grad()
            y = net([given[0], features, given[2]])
            (y * torch.arange(y.numel()).view(y.shape).cos()).sum().backward()
            found = [y.detach(), features.grad, *(p.grad.clone() for p in net.parameters())]
            known = exact.setdefault(training, found)
            for one, other in zip(found, known, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_nothing_waits_and_shapes_stay(torch, scn, watch):
    net = scn.set_capacities(unet(torch, scn), [points(torch, 60, 1)], slack=1).eval()
    shapes = []
    with torch.no_grad():
        net(points(torch, 60, 1))  # packs the weights
    for n in (1, 7):
        given = points(torch, 60, 1, size=n)  # fewer distinct sites
        with torch.no_grad(), watch() as seen:
            net(given)
        shapes.append(seen.shapes)
    assert shapes[0] == shapes[1] and len(shapes[0]) > 100
    with pytest.raises(AssertionError, match="waits"), watch():
        unet(torch, scn)(points(torch, 60, 1))


def test_rows_past_the_count_do_not_leak(torch, scn):
    given = points(torch, 40, 2)
    layers = (scn.SubmanifoldConvolution(2, 3, 4, 3, True), scn.BatchNormReLU(4),
              scn.MaxPooling(2, 3, 2), scn.Convolution(2, 4, 5, 2, 2, True),
              scn.SparseToDense(2, 5))  # fmt: skip
    net = scn.Sequential(scn.InputLayer(2, 17, mode=3), *layers).double()
    expected = net(given)
    scn.set_capacities(net, [given], slack=1)
    for layer in net:
        given = layer(given)
        if isinstance(given, scn.SparseConvNetTensor):
            past = given.coordinates.indices[:, :1] < 0
            assert past.any()
            given = given.replace(torch.where(past, torch.nan, given.features))
    torch.testing.assert_close(given, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["Sparsify", "SparsifyFCS"])
def test_sites_that_are_kept(torch, scn, kind):
    torch.manual_seed(1)
    choose = scn.Sparsify(2, 3) if kind == "Sparsify" else scn.SparsifyFCS(2)
    net = scn.Sequential(scn.InputLayer(2, 17, mode=3), choose).double()
    given = points(torch, 40, 3)
    expected = net(given)
    scn.set_capacities(net, [given])
    net[0].capacity += 5
    found, n = net(given), len(expected.features)
    assert 0 < n < len(found.features) and found.coordinates.number() == n
    assert torch.equal(found.coordinates.indices[:n], expected.coordinates.indices)
    assert torch.equal(found.features[:n], expected.features)
    assert (found.coordinates.indices[n:] == -1).all() and not found.features[n:].any()
    choose.capacity = n - 1
    with pytest.raises(sb.CapacityError, match="capacity must be at least"):
        net(given).metadata.check()


def test_dense_grids_and_full_convolutions(torch, scn):
    image = (torch.rand(2, 3, 8, 8, dtype=torch.float64) - 0.9).clamp(min=0)
    net = scn.Sequential(
        scn.DenseToSparse(2), scn.FullConvolution(2, 3, 4, 2, 2, True), scn.AveragePooling(2, 2, 2),
        scn.SparseToDense(2, 4),
    ).double()  # fmt: skip
    expected = net(image)
    scn.set_capacities(net, [image], slack=0.3)
    assert net[1].capacity > net[0].capacity > 0
    torch.testing.assert_close(net(image), expected, rtol=1e-9, atol=1e-9)


def test_the_largest_of_all_inputs_counts(torch, scn):
    """In evaluation, and whatever the capacities were before."""
    seen = []

    class Note(torch.nn.Module):
        def forward(self, x):
            seen.append((self.training, torch.is_grad_enabled()))
            return x

    net = scn.Sequential(scn.InputLayer(2, 17, mode=3, capacity=7), Note(), scn.MaxPooling(2, 3, 2))
    few, many = points(torch, 9, 0), points(torch, 60, 1)
    for inputs in ([few, many], [many, few]):
        scn.set_capacities(net, inputs, slack=0)
        assert net[0].capacity == len(torch.unique(many[0], dim=0))
        assert net(many).metadata.check()
    assert seen[:2] == [(False, False)] * 2 and net.training


def test_too_small_a_capacity_shows(torch, scn):
    given = points(torch, 40, 2)
    layer = scn.InputLayer(2, 17, mode=3, capacity=5)
    x = layer(given)
    assert x.features.shape == (5, 3) and (x.metadata.inverse >= 0).sum() < 40
    assert not scn.OutputLayer(2)(x)[x.metadata.inverse < 0].any()
    with pytest.raises(sb.CapacityError, match="got 5 for"):
        x.metadata.check()
    layer.capacity = 40
    assert layer(given).metadata.check()


@pytest.mark.parametrize("last", ["FullConvolution", "SparsifyFCS", "append_tensors", "move"])
def test_too_small_a_capacity_shows_in_a_new_metadata(torch, scn, last):
    """Of any list before, also of those that other windows made for the same spatial size."""
    given = points(torch, 40, 2)
    small = scn.Sequential(scn.MaxPooling(2, 3, 2, capacity=2), scn.UnPooling(2, 3, 2))
    other = scn.Sequential(scn.MaxPooling(2, 10, 1), scn.UnPooling(2, 10, 1))
    tables = scn.ConcatTable().add(small).add(other)
    net = scn.Sequential(scn.InputLayer(2, 17, mode=3), tables, scn.AddTable()).double()

    def end():
        x = net(given)
        if last == "append_tensors":
            return scn.append_tensors([x, x])
        if last == "move":
            x.metadata._move("cpu")
            return x
        more = (3, 4, 2, 2, True) if last == "FullConvolution" else ()
        return getattr(scn, last)(2, *more).double()(x)

    with pytest.raises(sb.CapacityError, match="got 2 for"):
        end().metadata.check()
    small[0].capacity = 60
    metadata = end().metadata
    assert metadata.check() is metadata


def test_bad_arguments(torch, scn):
    given = points(torch, 40, 2)
    with pytest.raises(ValueError, match="no batch_size; give the number of samples"):
        scn.InputLayer(2, 17, capacity=5)(given[:2])
    for make in (
        lambda c: scn.InputLayer(2, 17, capacity=c), lambda c: scn.MaxPooling(2, 3, 2, capacity=c),
        lambda c: scn.Convolution(2, 3, 4, 3, 2, True, capacity=c), lambda c: scn.Sparsify(
            2, 3, capacity=c), lambda c: scn.DenseToSparse(2, capacity=c),
        lambda c: scn.FullConvolution(2, 3, 4, 3, 2, True, capacity=c),
    ):  # fmt: skip
        with pytest.raises(sb.ShapeError, match="capacity must be a non-negative integer"):
            make(-1)
    net = scn.Sequential(scn.InputLayer(2, 17, mode=3, capacity=7)).train()
    with pytest.raises(ValueError, match="inputs must not be empty"):
        scn.set_capacities(net, [])
    with pytest.raises(sb.DTypeError, match=r"inputs must hold lists .* pass one input as"):
        scn.set_capacities(scn.Sequential(net), given)
    for slack in (-0.1, float("inf")):
        with pytest.raises(sb.ShapeError, match="slack must not be negative or infinite"):
            scn.set_capacities(net, [given], slack=slack)
    assert net[0].capacity == 7 and net.training


def test_only_layers_of_the_package_get_one(torch, scn):
    """Another module may have an attribute of this name, which means something else."""

    class Head(torch.nn.Linear):
        capacity = 5

        def forward(self, features):
            return super().forward(features) * self.capacity

    net = torch.nn.Sequential(scn.InputLayer(2, 17), scn.OutputLayer(2), Head(3, 2))
    given = points(torch, 40, 2)
    given = [given[0], torch.ones(len(given[0]), 3), given[2]]
    expected = net(given)
    scn.set_capacities(net, [given])
    assert net[0].capacity and net[2].capacity == 5
    torch.testing.assert_close(net(given), expected)
    assert scn.graphed(net, [given])(given).shape == expected.shape
