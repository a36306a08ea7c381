"""Points to sites and back by SparseConvNet's names; functions of lists of points."""

import importlib

import numpy as np
import pytest

import sbnet_cupy as sb


@pytest.fixture(scope="module")
def scn(torch):
    return importlib.import_module("sbnet_cupy.torch.scn")


COORDS = [[3, 1, 0], [0, 2, 1], [3, 1, 0], [1, 1, 0], [3, 1, 0], [0, 2, 1]]
VALUES = [[1.0], [2], [4], [8], [16], [32]]
PLACES = [[3, 1, 0], [0, 2, 1], [1, 1, 0]]  # in the order in which they are named


@pytest.mark.parametrize("mode, expected", [
    (1, [1, 2, 8]), (2, [16, 32, 8]), (3, [21, 34, 8]), (4, [7, 17, 8]),
])  # fmt: skip
def test_input_and_output_layer(torch, scn, device, mode, expected):
    features = torch.tensor(VALUES, device=device, requires_grad=True)
    x = scn.InputLayer(2, [4, 3], mode)([torch.tensor(COORDS), features, 3])
    assert x.get_spatial_locations().tolist() == PLACES and x.batch_size() == 3
    assert x.features.ravel().tolist() == expected
    back = scn.OutputLayer(2)(x)
    named = dict(zip(map(tuple, PLACES), expected, strict=True))
    taken = {1: [1, 1, 0, 1, 0, 0], 2: [0, 0, 0, 1, 1, 1]}.get(mode, [1] * len(COORDS))
    assert back.ravel().tolist() == [
        named[tuple(p)] * it for p, it in zip(COORDS, taken, strict=True)
    ]
    back.sum().backward()
    shares = {3: [3, 2, 3, 1, 3, 2], 4: [1] * 6} | dict.fromkeys((1, 2), taken)
    assert features.grad.ravel().tolist() == shares[mode]


def test_the_promise_of_mode_0_is_checked(torch, scn):
    layer = scn.InputLayer(2, 4, mode=0)
    with pytest.raises(ValueError, match="distinct"):
        layer([torch.tensor(COORDS), torch.tensor(VALUES)])
    x = layer([torch.tensor(PLACES), torch.tensor([[5.0], [6], [7]])])
    assert x.features.ravel().tolist() == [5, 6, 7]
    for size in (4, [4, 4], x.spatial_size, x.spatial_size.numpy()):
        assert x.get_spatial_locations(size).tolist() == PLACES
    one = layer([torch.tensor(PLACES)[:, :2], torch.tensor([[5.0], [6], [7]])])
    assert one.batch_size() == 1 and one.get_spatial_locations()[:, 2].tolist() == [0, 0, 0]
    pair = scn.InputLayerInput(torch.tensor(PLACES), torch.tensor([[5.0], [6], [7]]))
    assert layer(pair).features.tolist() == x.features.tolist() and len(pair) == 2


@pytest.mark.parametrize("mode, expected", [
    (1, [4, 8, 32]), (2, [1, 8, 2]), (3, [5, 8, 34]), (4, [2.5, 8, 17]),
])  # fmt: skip
def test_batched_layers(torch, scn, device, mode, expected):
    coords = torch.tensor([[[3, 1], [3, 1], [1, 1]], [[0, 2], [-1, -1], [0, 2]]])
    values = [[[1.0], [4], [8]], [[2], [99], [32]]]
    features = torch.tensor(values, device=device, requires_grad=True)
    x = scn.BLInputLayer(2, (4, 3), mode)([coords, features])
    assert x.get_spatial_locations().tolist() == [[3, 1, 0], [1, 1, 0], [0, 2, 1]]
    assert x.features.ravel().tolist() == expected
    back = scn.BLOutputLayer(2)(x)
    assert back.shape == (2, 3, 1) and back[1, 1].item() == 0
    a, b, c = expected
    taken = {1: [[0, a, b], [0, 0, c]], 2: [[a, 0, b], [c, 0, 0]]}
    assert back[..., 0].tolist() == taken.get(mode, [[a, a, b], [c, 0, c]])
    back.sum().backward()
    assert features.grad[1, 1].item() == 0
    with pytest.raises(ValueError, match="mode 0"):
        scn.BLInputLayer(2, 4, 0)([coords, features])


@pytest.mark.parametrize("batch, length", [(2, 0), (0, 3)])
def test_lists_of_no_points(torch, scn, batch, length):
    coords = torch.zeros(batch, length, 2, dtype=torch.int64)
    x = scn.BLInputLayer(2, 4)([coords, torch.ones(batch, length, 5)])
    assert x.features.shape == (0, 5) and x.batch_size() == batch
    assert scn.BLOutputLayer(2)(x).shape == (batch, length, 5)


@pytest.mark.parametrize("mode", [0, 3])
def test_no_points_at_all(torch, scn, device, mode):
    features = torch.zeros(0, 2, device=device, requires_grad=True)
    coords = torch.zeros(0, 3, dtype=torch.int64)
    x = scn.InputLayer(2, 7, mode)([coords, features, 2])
    net = scn.Sequential(
        scn.SubmanifoldConvolution(2, 2, 3, 3, True), scn.BatchNormReLU(3),
        scn.Convolution(2, 3, 3, 3, 2, False), scn.MaxPooling(2, 3, 1), scn.UnPooling(2, 3, 1),
        scn.Deconvolution(2, 3, 4, 3, 2, True),
    ).to(device)  # fmt: skip
    y = net(x)
    image = scn.SparseToDense(2, 4)(y)
    (image.sum() + scn.OutputLayer(2)(y).sum()).backward()
    assert image.shape == (2, 4, 7, 7) and not image.any()
    assert features.grad.shape == (0, 2)
    assert all(p.grad is not None and not p.grad.any() for p in net.parameters())


def test_dense_there_and_back(torch, scn, device):
    image = torch.randn(2, 3, 4, 5, device=device) * (torch.rand(2, 1, 4, 5, device=device) < 0.5)
    x = scn.DenseToSparse(2)(image)
    assert torch.equal(scn.SparseToDense(2, 3)(x), image)
    assert x.spatial_size.tolist() == [4, 5]


def test_input_batch(torch, scn):
    batch = scn.InputBatch(2, [4, 4])
    with pytest.raises(ValueError, match="add_sample"):
        batch.set_location(torch.tensor([1, 1]), torch.tensor([1.0]))
    batch.add_sample()
    batch.set_location(torch.tensor([1, 1]), torch.tensor([1.0]))
    batch.set_location(torch.tensor([3, 0]), torch.tensor([2.0]))
    batch.set_location(torch.tensor([1, 1]), torch.tensor([3.0]))
    batch.set_location(torch.tensor([3, 0]), torch.tensor([4.0]), overwrite=True)
    batch.add_sample()
    places = torch.tensor([[0, 0], [0, 1]])
    batch.set_locations(places, torch.tensor([[5.0], [6.0]]))
    batch.set_locations(torch.tensor([[1, 2, 3]]), torch.tensor([[7.0]]))
    grid = torch.zeros(2, 2, 1)
    grid[0, 1], grid[1, 1] = -0.5, 2.0
    batch.add_sample_from_tensor(grid, torch.tensor([0, 2]), threshold=0.4)
    batch.precompute_metadata(3)
    assert batch.features.ravel().tolist() == [1, 4, 5, 6, 7, -0.5, 2]
    assert batch.get_spatial_locations().tolist() == [
        [1, 1, 0], [3, 0, 0], [0, 0, 1], [0, 1, 1], [1, 2, 3], [0, 3, 4], [1, 3, 4]
    ]  # fmt: skip
    assert batch.batch_size() == 5
    y = scn.SubmanifoldConvolution(2, 1, 2, 3, False)(batch)
    assert scn.AddTable()([y, y]).features.shape == (7, 2)
    with pytest.raises(sb.ShapeError, match=r"positions inside \(4, 4\), got \[4, 0\] in row 0"):
        batch.set_location(torch.tensor([4, 0]), torch.tensor([1.0]))
    for sample in (-1, float("nan"), 2**31):
        there = torch.tensor([[1, 2, 0], [1, 2, sample]], dtype=torch.float64)
        with pytest.raises(sb.ShapeError, match=r"must have the sample, .* got \[1.* in row 1"):
            batch.set_locations(there, torch.ones(2, 1))
    with pytest.raises(sb.ShapeError, match=r"inside \(4, 4\), got \[nan, 0\.0\] in row 0"):
        batch.set_location(torch.tensor([float("nan"), 0]), torch.tensor([1.0]))
    with pytest.raises(sb.ShapeError, match="vectors must have 1 planes, as those before, got 2"):
        batch.set_location(torch.tensor([1, 2]), torch.tensor([1.0, 2.0]))
    with pytest.raises(sb.ShapeError, match="location must be a tensor of one axis, got list"):
        batch.set_location([1, 2], torch.tensor([1.0]))
    with pytest.raises(sb.DTypeError, match=r"locations must .*; convert it with torch.as_tensor"):
        batch.set_locations([[1, 2]], torch.tensor([[1.0]]))
    empty = scn.InputBatch(2, 4)
    empty.add_sample()
    assert len(empty.get_spatial_locations()) == 0 and empty.batch_size() == 1
    net = scn.Sequential(
        scn.MaxPooling(2, 2, 2), scn.SubmanifoldConvolution(2, 1, 3, 3, True),
        scn.BatchNormReLU(3), scn.SparseToDense(2, 3),
    )  # fmt: skip
    y = net(empty)
    y.sum().backward()
    assert y.shape == (1, 3, 2, 2) and not y.any() and not net[1].weight.grad.any()
    for layer in (scn.NetworkInNetwork(2, 3, True), scn.ShapeContext(2, 2), scn.ReLU()):
        assert len(layer(empty).features) == 0


def test_an_input_batch_keeps_no_view_of_a_buffer(torch, scn):
    batch, place, vector = scn.InputBatch(2, 8), torch.zeros(2).long(), torch.zeros(1)
    batch.add_sample()
    for n in range(3):
        place[:], vector[:] = n, n + 1
        batch.set_location(place, vector)
    assert batch.features.ravel().tolist() == [1, 2, 3]
    assert batch.get_spatial_locations().tolist() == [[0, 0, 0], [1, 1, 0], [2, 2, 0]]


def some(torch, scn, seed, size=(5, 4), batch=2):
    rng = np.random.default_rng(seed)
    rows = np.argwhere(rng.random((*size, batch)) < 0.5)
    features = torch.as_tensor(rng.standard_normal((len(rows), 3)))
    return scn.InputLayer(2, size, 0)([torch.as_tensor(rows), features, batch])


def test_append_compare_and_coordinates(torch, scn):
    x, y = some(torch, scn, 0), some(torch, scn, 1)
    both = scn.append_tensors([x, y])
    dense = scn.SparseToDense(2, 3)
    assert torch.equal(dense(both), torch.cat([dense(x), dense(y)]))
    scn.SubmanifoldConvolution(2, 3, 2, 3, False).double()(both)
    sites = ((dense(x) != 0) | (dense(y) != 0)).any(1).sum()
    expected = (dense(x) - dense(y)).square().sum() / sites
    torch.testing.assert_close(scn.compare_sparse(x, y), expected)
    placed = scn.AddCoords()(x).features[:, 3:]
    position = x.get_spatial_locations()[:, :2].double()
    torch.testing.assert_close(placed, position / torch.tensor([2.0, 1.5]) - 1)


def test_functions_of_tensors_with_spare_rows(torch, scn):
    """Rows that hold no site are appended last, and compared with nothing."""
    layer = scn.InputLayer(1, 9, capacity=4)
    x = layer([torch.tensor([[1, 0], [5, 0]]), torch.tensor([[1.0], [2]]), 1])
    y = layer([torch.tensor([[2, 0], [7, 0], [0, 1]]), torch.tensor([[3.0], [4], [5]]), 2])
    both, dense = scn.append_tensors([x, y]), scn.SparseToDense(1, 1)
    assert torch.equal(dense(both), torch.cat([dense(x), dense(y)]))
    rows = both.coordinates.indices.tolist()
    assert rows == [[0, 1], [0, 5], [1, 2], [1, 7], [2, 0], *[[-1, -1]] * 3]
    assert both.metadata.check() and both.coordinates.number() == 5
    assert scn.compare_sparse(x, y).item() == (1 + 4 + 9 + 16 + 25) / 5
    none = layer([torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 1), 1])
    assert scn.compare_sparse(none, none).item() == 0
    full = layer([torch.arange(5)[:, None], torch.ones(5, 1)])
    with pytest.raises(sb.CapacityError, match="at least the number of sites"):
        scn.append_tensors([full, x]).metadata.check()  # which has room to spare


def test_positions_on_an_axis_of_one_cell(torch, scn):
    x = scn.InputLayer(2, [1, 70_001])([torch.tensor([[0, 70_000]]), torch.ones(1, 1).half()])
    assert scn.AddCoords()(x).features.tolist() == [[1, 0, 1]]


@pytest.mark.parametrize("average, accumulate", [(True, False), (False, True), (False, False)])
def test_voxelize_pointcloud(torch, scn, average, accumulate):
    xyz = torch.tensor([[1, 2], [0, 5], [1, 2], [-1, 0]])
    rgb = torch.tensor([[1.0], [2], [4], [8]])
    points, values, inverse, counts = scn.voxelize_pointcloud(
        xyz, rgb, average, accumulate, return_inverse=True, return_counts=True
    )
    assert points.tolist() == [[-1, 0], [0, 5], [1, 2]]
    last = 2.5 if average else 5 if accumulate else 1
    assert values.ravel().tolist() == [8, 2, last]
    assert inverse.tolist() == [2, 1, 2, 0] and counts.tolist() == [1, 1, 2]
    assert len(scn.voxelize_pointcloud(xyz, rgb)) == 2


def test_lists_of_samples(torch, scn):
    one, two = torch.tensor([[1, 2], [3, 4]]), torch.tensor([[5, 6]])
    listed = scn.batch_location_tensors([one, two])
    assert listed.tolist() == [[1, 2, 0], [3, 4, 0], [5, 6, 1]]
    coords, features = scn.prepare_BLInput([(one, torch.ones(2, 1)), (two, torch.ones(1, 1))])
    assert coords.tolist() == [[[1, 2], [3, 4]], [[5, 6], [-1, -1]]]
    assert features.sum() == 3


def test_the_tensor(torch, scn):
    x = some(torch, scn, 0)
    assert "on a grid of (5, 4), batch of 2" in repr(x)
    leaf = x.replace(x.features.requires_grad_())
    assert leaf.requires_grad and not leaf.detach().requires_grad
    assert x.type() == "torch.DoubleTensor"
    assert x.detach().type(torch.float32).cpu().features.dtype is torch.float32
    assert x.sparse.coordinates is x.coordinates
    y = scn.SparseConvNetTensor(x.features, x.metadata, x.spatial_size)
    assert y.coordinates is x.coordinates


def test_sites_follow_features_to_a_device(torch, scn, device):
    x = some(torch, scn, 0)
    layers = scn.Sequential(
        scn.SubmanifoldConvolution(2, 3, 3, 3, False), scn.OutputLayer(2)
    ).double()
    expected = layers(x)
    found = layers.to(device)(x.to(device))
    torch.testing.assert_close(found.cpu(), expected)


@pytest.mark.parametrize("call, error, words", [
    (lambda torch, scn: scn.InputLayer(2, 4, 5), ValueError, "mode must"),
    (lambda torch, scn: scn.InputLayer(2, 4, 3.0), ValueError, "mode must"),
    (lambda torch, scn: scn.InputLayer(2, (4, 4, 4)), sb.ShapeError, "spatial_size must"),
    (lambda torch, scn: scn.InputLayer(2, -5, 3), sb.ShapeError, "spatial_size must .* got -5"),
    (lambda torch, scn: scn.BLInputLayer(2, (4, 2**31)), sb.ShapeError, "spatial_size must be"),
    (lambda torch, scn: scn.InputBatch(2, torch.tensor([4, -1])), sb.ShapeError, "spatial_size"),
    (lambda torch, scn: scn.OutputLayer(3)(some(torch, scn, 0)), sb.ShapeError,
     "the 3 dimensions of the layer, got spatial size"),
    *[(lambda torch, scn, layer=layer, more=more: getattr(scn, layer)(0, *more), sb.ShapeError,
       "dimension must be a positive integer, got 0") for layer, more in (
           ("OutputLayer", ()), ("BLOutputLayer", ()), ("DenseToSparse", ()),
           ("SparseToDense", (3,)))],
    (lambda torch, scn: scn.SparseToDense(2, 0), sb.ShapeError, "nPlanes must be a positive"),
    (lambda torch, scn: scn.InputLayer(2, 4)([torch.zeros(1, 4), torch.ones(1, 1)]),
     sb.ShapeError, "coords must"),
    (lambda torch, scn: scn.InputLayer(2, 4)([torch.tensor([[0, 4, 0]]), torch.ones(1, 1)]),
     sb.ShapeError, "inside"),
    (lambda torch, scn: scn.InputLayer(2, 4)([torch.tensor([[0, 1]]), torch.ones(1, 1), 2.5]),
     ValueError, r"batch_size a non-negative integer below 2\*\*31, got 2.5"),
    (lambda torch, scn: scn.InputLayer(2, 4)([torch.tensor([[0, 1]]), torch.ones(1, 1), -2]),
     ValueError, r"batch_size a non-negative integer below 2\*\*31, got -2"),
    (lambda torch, scn: scn.InputLayer(2, 4)([torch.tensor([[0, 1]]), torch.ones(1, 1), 1, 0]),
     sb.DTypeError, r"\[coords, features\] or \[coords, features, batch_size\], got 4 items"),
    (lambda torch, scn: scn.BLInputLayer(2, 4)([torch.zeros(1, 1, 2), torch.ones(1, 1, 1), 1]),
     sb.DTypeError, r"input must be a list \[coords, features\], got 3 items"),
    (lambda torch, scn: scn.InputLayer(2, 4)([torch.tensor([[0, 1]]), torch.ones(2, 1)]),
     sb.ShapeError, r"features must have shape \(1, C\), got \(2, 1\)"),
    (lambda torch, scn: scn.InputLayer(2, 2**31 - 1)([torch.zeros(1, 3), torch.ones(1, 1), 9]),
     sb.ShapeError, "spatial_size and the number of samples must fit keys of 63 bits, got .* 9,"),
    (lambda torch, scn: scn.InputLayer(2, 2**31 - 1, capacity=2)([
        torch.tensor([[0, 0, -1]]), torch.ones(1, 1), 9]),
     sb.ShapeError, "spatial_size and the number of samples must fit keys of 63 bits, got .* 9,"),
    (lambda torch, scn: scn.BLInputLayer(2, 4)([torch.zeros(1, 2, 2), torch.ones(1, 2)]),
     sb.ShapeError, r"features must have shape \(1, 2, C\), got \(1, 2\)"),
    (lambda torch, scn: scn.BLInputLayer(2, 4)([torch.zeros(1, 2, 3), torch.ones(1, 2, 1)]),
     sb.ShapeError, "coords must"),
    (lambda torch, scn: scn.BLInputLayer(2, 4)([torch.zeros(1, 2, 2), torch.ones(1, 3, 1)]),
     sb.ShapeError, "features must"),
    (lambda torch, scn: scn.OutputLayer(2)(scn.DenseToSparse(2)(torch.ones(1, 1, 2, 2))),
     ValueError, "InputLayer"),
    (lambda torch, scn: scn.OutputLayer(2)(scn.Convolution(2, 3, 3, 2, 2, False).double()(
        some(torch, scn, 0, (8, 8)))),
     sb.ShapeError, r"spatial size of the InputLayer, \(8, 8\), got \(4, 4\)"),
    (lambda torch, scn: scn.append_tensors([some(torch, scn, 0), some(torch, scn, 0, (4, 4))]),
     ValueError, "one spatial size"),
    *[(lambda torch, scn, rows=rows, mean=mean: scn.voxelize_pointcloud(
        torch.zeros(3, 2), torch.ones(rows, 1), mean),
       sb.ShapeError, f"rgb must have a row for each of the 3 of xyz, got {rows}")
      for rows in (2, 4) for mean in (True, False)],
    (lambda torch, scn: scn.voxelize_pointcloud(torch.zeros(3, 2), torch.ones(3)),
     sb.ShapeError, r"rgb must have two axes, \(n, columns\), got \(3,\)"),
    (lambda torch, scn: scn.prepare_BLInput([
        (torch.zeros(2, 2), torch.ones(2, 1)), (torch.zeros(2, 2), torch.ones(1, 1))]),
     sb.ShapeError, "features of sample 1 must have a row for each of the 2 of coords of sample 1"),
    (lambda torch, scn: scn.prepare_BLInput([(torch.zeros(2, 2), None)]),
     sb.DTypeError, r"features of sample 0 must be a torch\.Tensor, got None$"),
])  # fmt: skip
def test_bad_calls(torch, scn, call, error, words):
    with pytest.raises(error, match=words):
        call(torch, scn)


def test_equal_points_in_mode_0(torch, scn):
    coords, features = torch.tensor([[1, 1], [2, 2], [1, 1]]), torch.ones(3, 1)
    words = r"coords must be distinct in mode 0, got \[1, 1\] in rows {}; use another mode$"
    with pytest.raises(ValueError, match=words.format("0 and 2")):
        scn.InputLayer(2, 4, 0)([coords, features])
    with pytest.raises(ValueError, match=words.format(r"\(0, 0\) and \(0, 2\)")):
        scn.BLInputLayer(2, 4, 0)([coords[None], features[None]])
    with pytest.raises(sb.ShapeError, match=r"positions inside \(2, 2\), got \[2, 2\] in row 1"):
        scn.InputLayer(2, 2, 0)([coords, features])


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("row, words", [
    ((1, 4, 0), r"positions inside \(5, 4\), got \[1.0, 4.0, 0.0\] in row 1; .* spatial_size$"),
    ((1, -1, 0), "in row 1; drop such rows, or shift positions so that none is negative$"),
    ((1, 2**40, 0), "got .* 1099511627776.0, 0.0.* in row 1; .* larger spatial_size$"),
    ((1, 1e30, 0), r"positions inside .*, got .* 1e\+30, 0.0.* in row 1"),
    ((NAN, 1, 0), r"positions inside .*, got \[nan, 1.0, 0.0\] in row 1; drop such rows$"),
    ((1, -INF, 0), r"positions inside .*, got \[1.0, -inf, 0.0\] in row 1; drop such rows$"),
    ((1, 1, NAN), r"the sample, .* in the last column, got \[1.0, 1.0, nan\] in row 1; drop such"),
    ((1, 1, INF), r"the sample, .*, got \[1.0, 1.0, inf\] in row 1; drop such rows$"),
    ((1, 1, -1), "the sample, from 0 on, .* in row 1; .* number the samples from 0 on$"),
])  # fmt: skip
@pytest.mark.parametrize("mode", [0, 3])
def test_points_outside_of_the_grid_are_told_as_they_came(torch, scn, device, row, words, mode):
    coords = torch.tensor([[0, 0, 0], row, [4, 3, 1]], dtype=torch.float64)
    features = torch.ones(3, 1, device=device)
    with pytest.raises(sb.ShapeError, match="^coords must have .*" + words):
        scn.InputLayer(2, (5, 4), mode)([coords, features])
    layer = scn.InputLayer(2, (5, 4), mode, capacity=4)
    x = layer([coords, features, 2])
    assert x.coordinates.number() == 2
    with pytest.raises(sb.CapacityError, match="outside were dropped"):
        x.metadata.check()


@pytest.mark.parametrize("row, got", [((NAN, 1), r"\[nan, 1.0\]"), ((2, 4), r"\[2.0, 4.0\]")])
def test_points_of_lists_outside_of_the_grid(torch, scn, device, row, got):
    """NaN is none of the negative numbers that stand for no point."""
    coords = torch.tensor([[[0.0, 0], [-1, -1]], [row, [1, 1]]])
    words = rf"coords must have positions inside \(5, 4\), got {got} in row \(1, 0\)"
    with pytest.raises(sb.ShapeError, match=words):
        scn.BLInputLayer(2, (5, 4))([coords, torch.ones(2, 2, 1, device=device)])


def test_the_input_size_of_a_network_from_points_to_points(torch, scn):
    net = scn.Sequential(
        scn.InputLayer(2, 11), scn.MaxPooling(2, 3, 2), scn.UnPooling(2, 3, 2), scn.OutputLayer(2)
    )
    assert net.input_spatial_size(torch.tensor([11, 7])).tolist() == [11, 7]
    pooled = scn.Sequential(scn.BLInputLayer(2, 11), net[1])
    assert pooled.input_spatial_size(torch.tensor([5, 3])).tolist() == [11, 7]
