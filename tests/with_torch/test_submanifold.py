"""Features at sites on tensors: against dense convolutions, differentiated, compiled."""

import copy
import functools
import gc
import pickle

import numpy as np
import pytest

import sbnet_cupy as sb
from support import assertions
from support.exhaustive import thinned_pairs
from support.torch_site_cases import (
    SHAPE,
    assert_close,
    at_sites,
    image_of,
    made,
    oihw,
    sites_of,
    values,
)


@pytest.mark.parametrize("kernel, dilation, groups", [(3, 1, 1), (2, 1, 2), ((3, 5), (2, 1), 1)])
def test_submanifold_conv_is_a_dense_one_read_at_the_sites(
    torch, st, device, kernel, dilation, groups
):
    x = made(torch, st, device)
    pair = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    step = dilation if isinstance(dilation, tuple) else (dilation, dilation)
    w = values(torch, *pair, 4 // groups, 6, device=device)
    bias = values(torch, 6, device=device, seed=3)
    y = st.submanifold_conv(x, w, dilation=dilation, groups=groups, bias=bias, activation="silu")
    pads = [p for k, d in zip(pair[::-1], step[::-1], strict=True)
            for p in (k // 2 * d, (k - 1 - k // 2) * d)]  # fmt: skip
    padded = torch.nn.functional.pad(image_of(st, x), pads)
    dense = torch.nn.functional.conv2d(padded, oihw(w), bias, dilation=step, groups=groups)
    assert_close(torch, y.features, torch.nn.functional.silu(at_sites(dense, x)))
    assert y.coordinates is x.coordinates


@pytest.mark.parametrize("kernel, stride, padding", [(2, 2, 0), (3, 2, 1), (3, 1, 0)])
def test_strided_conv_has_every_site_whose_window_meets_one(
    torch, st, device, kernel, stride, padding
):
    x = made(torch, st, device)
    w = values(torch, kernel, kernel, 4, 5, device=device)
    y = st.strided_conv(x, w, stride=stride, padding=padding)
    options = {"stride": stride, "padding": padding}
    assert_close(torch, y.features, at_sites(
        torch.nn.functional.conv2d(image_of(st, x), oihw(w), **options), y))  # fmt: skip
    active = image_of(st, x.replace(torch.ones_like(x.features[:, :1])))
    met = torch.nn.functional.max_pool2d(active, kernel, **options)
    assert torch.equal(met[:, 0].nonzero().int(), torch.unique(y.indices, dim=0))
    assert y.spatial_shape == tuple(met.shape[2:])


def test_transposed_and_inverse_conv_are_transposes(torch, st, device):
    x = made(torch, st, device)
    w = values(torch, 3, 3, 4, 5, device=device)
    y = st.transposed_conv(x, w, stride=2, padding=1)
    weight = w.movedim(-1, 0).movedim(-1, 0)
    dense = torch.nn.functional.conv_transpose2d(image_of(st, x), weight, stride=2, padding=1)
    assert_close(torch, y.features, at_sites(dense, y))
    assert y.spatial_shape == tuple(dense.shape[2:])
    down = st.strided_conv(x, w, stride=2, padding=1)
    v = values(torch, *down.features.shape, device=device, seed=9)
    up = st.inverse_conv(down.replace(v), w.transpose(-1, -2).contiguous(), onto=x)
    assert_close(torch, (down.features * v).sum(), (x.features * up.features).sum(), 100)
    assert up.coordinates is x.coordinates
    with pytest.raises(ValueError, match="there was none"):
        st.inverse_conv(y, w.transpose(-1, -2).contiguous(), onto=x)


def test_an_inverse_of_what_another_module_made_says_so(torch, st, device):
    """The core and the adapter do not know of each other's convolutions and poolings."""
    x = made(torch, st, device)
    for there, here in ((sb, st), (st, sb)):
        down = there.strided_conv(x, values(torch, 2, 2, 4, 5, device=device), stride=2)
        with pytest.raises(ValueError, match="function of the same module"):
            here.inverse_conv(down, values(torch, 2, 2, 5, 4, device=device), onto=x)
        with pytest.raises(ValueError, match="function of the same module"):
            here.sparse_unpool(there.sparse_max_pool(x, 2), onto=x)


NAMES = ["submanifold", "strided", "inverse", "transposed", "site"]


def conv_of(st, x, name):
    """Return a convolution as a function of features, weights, bias, scale and residual."""
    if name == "submanifold":
        return lambda x, w, **more: st.submanifold_conv(x, w, **more).features
    if name == "strided":
        return lambda x, w, **more: st.strided_conv(x, w, stride=2, padding=1, **more).features
    if name == "transposed":
        return lambda x, w, **more: st.transposed_conv(x, w, stride=2, **more).features
    window = st.kernel_map(x.coordinates, 3, onto=x.coordinates)
    return lambda x, w, **more: st.site_conv(x.features, w, window, **more)


@pytest.mark.parametrize(
    ("name", "activation", "groups"),
    thinned_pairs(6, NAMES, [None, "relu", "silu", "gelu"], [1, 2]),
)
def test_gradients_and_their_gradients(torch, st, name, activation, groups):
    x = made(torch, st, shape=(4, 3), spatial_shape=(4, 3), channels=2)
    if name == "inverse":
        fine = x
        x = st.strided_conv(x, values(torch, 3, 3, 2, 2), stride=2, padding=1)

        def conv(x, w, **more):
            return st.inverse_conv(x, w, onto=fine, **more).features
    else:
        conv = conv_of(st, x, name)
    w = values(torch, 3, 3, 2 // groups, 2, seed=2)
    shape = conv(x, w, groups=groups).shape
    bias, scale = values(torch, 2, seed=3), values(torch, 2, seed=4)
    residual = values(torch, *shape, seed=5)
    coordinates = x.coordinates

    def function(features, w, bias, scale, residual):
        given = {"bias": bias, "scale": scale, "residual": residual}
        x = sb.SparseTensor(features, coordinates)
        return conv(x, w, groups=groups, activation=activation, **given)

    inputs = [t.clone().requires_grad_() for t in (x.features, w, bias, scale, residual)]
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs, atol=1e-4)


def pools(st, x):
    pooled = st.sparse_max_pool(x, 2)
    return {
        "max": lambda f: st.sparse_max_pool(x.replace(f), 3, stride=2, padding=1).features,
        "max floor": lambda f: st.sparse_max_pool(x.replace(f), 2, floor=0.1).features,
        "max all": lambda f: st.sparse_max_pool(x.replace(f), 3, stride=1, ties="all").features,
        "average": lambda f: st.sparse_avg_pool(x.replace(f), 3, stride=2, padding=1).features,
        "active": lambda f: st.sparse_avg_pool(x.replace(f), 2, count="active").features,
        "unpool": lambda f: st.sparse_unpool(
            pooled.replace(f[: pooled.coordinates.capacity]), onto=x).features,
        "global max": lambda f: st.global_pool(x.replace(f)),
        "global mean": lambda f: st.global_pool(x.replace(f), "mean"),
        "global sum": lambda f: st.global_pool(x.replace(f), "sum"),
        "dense": lambda f: st.sparse_to_dense(x.replace(f), fill=2.0),
        "unfold": lambda f: st.sparse_unfold(
            f, st.kernel_map(x.coordinates, 3, onto=x.coordinates), fill=3.0),
        "unfold windows": lambda f: st.sparse_unfold(f, st.kernel_map(x.coordinates, 2, stride=2)),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["max", "max floor", "max all", "average", "active", "unpool",
                                  "global max", "global mean", "global sum", "dense", "unfold",
                                  "unfold windows"])  # fmt: skip
def test_pools_are_those_of_the_core_and_differentiable(torch, st, device, name):
    x = made(torch, st, device, shape=(4, 4), spatial_shape=(4, 4), channels=2, seed=4)
    function = pools(st, x)[name]
    arrays = (tensor.cpu().numpy() for tensor in (x.features, x.indices))
    plain = sb.sparse_tensor(*arrays, spatial_shape=(4, 4))
    expected = pools(sb, plain)[name](plain.features)
    found = function(x.features).cpu().numpy()
    if device == "cuda" and name in ("global mean", "global sum"):  # in another order
        terms, size = len(plain.features) + 1, abs(plain.features).sum()
        assertions.assert_close(found, expected, terms=terms, dtype=np.float64, magnitude=size)
    else:
        assert np.array_equal(found, expected)
    features = x.features.clone().requires_grad_()
    assert torch.autograd.gradcheck(function, features)
    assert torch.autograd.gradgradcheck(function, features)


def points_of(seed, count=60):
    """Return points in and around a grid, with options that put them in voxels."""
    rng = np.random.default_rng(seed)
    points = rng.uniform(-2, 3, (count, 3)).astype(np.float32)
    points[:2, 0] = np.nan, np.inf
    options = {"ranges": [(-1.0, 1.5), (0.0, 2.0)], "voxel_size": (0.5, 1.0), "batch_size": 2}
    return points, rng.integers(-1, 3, count), options


@pytest.mark.parametrize("mode", ["mean", "sum", "first", "last"])
@pytest.mark.parametrize("room", [{}, {"capacity": 40}, {"capacity": 5}, {"order": "raster"}])
def test_voxels_are_those_of_the_core_and_differentiable(torch, st, device, mode, room):
    points, sample, options = points_of(1)
    given = [torch.from_numpy(array).to(device) for array in (points, sample)]
    x, inverse = st.voxelize(given[0], sample=given[1], mode=mode, **room, **options)
    y, expected = sb.voxelize(points, sample=sample, mode=mode, **room, **options)
    pairs = (x.indices, y.indices), (inverse, expected), (x.coordinates.count, y.coordinates.count)
    for found, wanted in pairs:
        assert np.array_equal(found.cpu().numpy(), wanted)
    if mode in ("sum", "mean") and device == "cuda":
        np.testing.assert_allclose(x.features.cpu().numpy(), y.features, rtol=1e-6, atol=1e-6)
    else:
        assert np.array_equal(x.features.cpu().numpy(), y.features)
    features = values(torch, len(points), 2, seed=3).to(device).requires_grad_()

    def function(features):
        call = functools.partial(st.voxelize, given[0], features, sample=given[1], mode=mode)
        return call(**room, **options)[0].features

    assert torch.autograd.gradcheck(function, features)
    assert torch.autograd.gradgradcheck(function, features)


def test_gradients_of_gradients_outlive_the_sites(torch, st):
    """Only the gradient is kept: the map and its table are freed."""
    rows = torch.tensor([[0, 0], [0, 1], [0, 5]])
    features = torch.tensor([[1.0], [2], [3]], requires_grad=True)

    grad_y = torch.ones(2, 1, requires_grad=True)

    def gradient():
        y = st.sparse_avg_pool(st.sparse_tensor(features, rows, spatial_shape=8), 2).features
        return torch.autograd.grad(y, features, grad_y, create_graph=True)[0]

    grad = gradient()
    gc.collect()
    (twice,) = torch.autograd.grad(grad.sum(), grad_y)
    assert grad.ravel().tolist() == [0.5, 0.5, 0.5] and twice.ravel().tolist() == [1, 0.5]


def test_ties_go_to_the_first_or_to_all(torch, st, device):
    rows = torch.tensor([[0, 0], [0, 1], [0, 5]], device=device)
    for ties, expected in (("first", [1.0, 0, 1]), ("all", [1.0, 1, 1])):
        ones = torch.ones(3, 1, device=device, requires_grad=True)
        x = st.sparse_tensor(ones, rows, spatial_shape=8)
        st.sparse_max_pool(x, 2, ties=ties).features.sum().backward()
        assert ones.grad.ravel().tolist() == expected


@pytest.mark.parametrize("mode", ["unique", "first", "last", "sum", "mean"])
def test_sparse_tensor_has_the_core_s_bits_and_a_gradient(torch, st, device, mode):
    rows = sites_of(torch, device)
    if mode != "unique":
        rows = torch.cat([rows, rows[::2], rows[::3]])
    features = values(torch, len(rows), 3, device=device, dtype=torch.float32)
    x = st.sparse_tensor(features, rows, spatial_shape=SHAPE, mode=mode)
    y = sb.sparse_tensor(features.cpu().numpy(), rows.cpu().numpy(), spatial_shape=SHAPE, mode=mode)
    assert np.array_equal(x.indices.cpu().numpy(), y.indices)
    if mode in ("sum", "mean") and device == "cuda":
        np.testing.assert_allclose(x.features.cpu().numpy(), y.features, rtol=1e-6, atol=1e-6)
    else:
        assert np.array_equal(x.features.cpu().numpy(), y.features)
    if device == "cpu":
        wide = features[:40].double().requires_grad_()

        def function(features):
            return st.sparse_tensor(features, rows[:40], spatial_shape=SHAPE, mode=mode).features

        assert torch.autograd.gradcheck(function, wide)
        assert torch.autograd.gradgradcheck(function, wide)


@pytest.mark.parametrize("data_format", ["channels_last", "channels_first"])
def test_dense_grids_go_there_and_back(torch, st, device, data_format):
    x = made(torch, st, device)
    image = st.sparse_to_dense(x, data_format=data_format).requires_grad_()
    leaf = x.features.detach().requires_grad_()
    x.replace(leaf).dense(data_format=data_format).sum().backward()
    assert torch.equal(leaf.grad, torch.ones_like(leaf))
    found = st.dense_to_sparse(image, data_format=data_format)
    back = st.sparse_to_dense(found, data_format=data_format)
    assert torch.equal(back, image)
    assert torch.equal(found.indices.long(), torch.unique(x.indices.long(), dim=0))
    back.sum().backward()
    assert torch.equal(image.grad, (image != 0).to(image.dtype))
    if device == "cpu":
        assert torch.autograd.gradcheck(
            lambda v: st.dense_to_sparse(v, mask=torch.ones(1, 2, 2)).features,
            values(torch, 1, 2, 2, 2).requires_grad_(),
        )


@pytest.mark.parametrize("capacity", [None, 40, 3])
def test_selected_sites(torch, st, device, capacity):
    """They go on as others do; a mask may be numbers, with gradients."""
    x = made(torch, st, device)
    w = values(torch, 3, 3, 4, 5, device=device)
    mask = x.features[:, 0] > 0
    wanted = mask.nonzero()[:, 0][:capacity]
    numbers = torch.where(mask, x.features[:, 0], 0).requires_grad_()
    for given in (mask, numbers):
        sites, rows = x.coordinates.select(given, capacity=capacity)
        assert torch.equal(rows[: len(wanted)].long(), wanted)
        assert torch.equal(sites.indices[: len(wanted)], x.indices[wanted])
        assert not (rows[len(wanted) :] >= 0).any()
    assert sites.number() == int(mask.sum())
    if capacity == 3:
        with pytest.raises(sb.CapacityError, match="got 3 for"):
            sites.check()
        return
    features = torch.where((rows >= 0)[:, None], x.features[rows.clamp(min=0)], 0)
    y = st.submanifold_conv(sb.SparseTensor(features, sites), w)
    alone = st.sparse_tensor(x.features[wanted], x.indices[wanted], spatial_shape=x.spatial_shape)
    found = y.features[: len(wanted)]
    order = [alone.indices.tolist().index(row) for row in sites.indices[: len(wanted)].tolist()]
    assert_close(torch, found, st.submanifold_conv(alone, w).features[order])
    with pytest.raises(sb.ShapeError, match="mask must have shape"):
        x.coordinates.select(mask[1:])
    with pytest.raises(sb.DTypeError, match="may be indices of rows; pass mask != 0"):
        x.coordinates.select(mask.int())
    with pytest.raises(sb.DeviceError, match="all arrays must belong to one library"):
        x.coordinates.select(mask.cpu().numpy())


def test_sites_of_another_library_are_refused(torch):
    """A mask may be a tensor beside NumPy arrays; rows of coordinates may not."""
    features, rows = np.ones((2, 3), np.float32), torch.tensor([[0, 1, 2], [0, 3, 3]])
    with pytest.raises(sb.DeviceError, match="indices is torch"):
        sb.sparse_tensor(features, rows, spatial_shape=(4, 4))


def test_rows_past_the_count_never_leak(torch, st, device):
    rows = sites_of(torch, device)
    n = len(rows)
    features = values(torch, n, 4, device=device)
    exact = st.sparse_tensor(features, rows, spatial_shape=SHAPE, batch_size=2)
    x = st.sparse_tensor(features, rows, spatial_shape=SHAPE, batch_size=2, capacity=n + 5)
    spoiled = x.features.clone()
    spoiled[n:] = float("nan")
    w, w2 = values(torch, 3, 3, 4, 4, device=device), values(torch, 2, 2, 4, 4, device=device)
    bn = torch.nn.BatchNorm1d(4, device=device, dtype=torch.float64)

    def network(x, w, w2, capacity):
        x = st.submanifold_conv(x, w, activation="silu")
        x = st.masked_batch_norm(x, None, None, bn.weight, bn.bias)
        x = x.replace(torch.where(x.features != 0, x.features, torch.nan)) if capacity else x
        y = st.strided_conv(x, w2, stride=2, capacity=capacity)
        y = st.sparse_max_pool(y, 2, capacity=capacity)
        return st.global_pool(y, "mean"), st.sparse_to_dense(y)

    gradients = []
    for given, values_, capacity in ((exact, exact.features, None), (x, spoiled, 40)):
        leaves = [t.clone().requires_grad_() for t in (values_, w, w2)]
        pooled, dense = network(given.replace(leaves[0]), *leaves[1:], capacity)
        (pooled.square().sum() + dense.square().sum()).backward()
        gradients.append([pooled, dense, leaves[0].grad[:n], leaves[1].grad, leaves[2].grad])
        assert not leaves[0].grad[n:].any()
    for a, b in zip(*gradients, strict=True):
        assert_close(torch, a, b, 100)


@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu"])
def test_a_residual_is_not_read_past_the_count(torch, st, device, activation):
    """A NaN there made the gradients of bias and scale NaN, with an activation other than relu."""
    rows, results = sites_of(torch, device), []
    n = len(rows)
    features = values(torch, n, 4, device=device)
    w, *tables = values(torch, 3, 3, 4, 4, device=device), *values(torch, 2, 4, device=device)
    for capacity in (None, n + 5):
        how = {"spatial_shape": SHAPE, "batch_size": 2, "capacity": capacity}
        x = st.sparse_tensor(features, rows, **how)
        spoiled = x.features.clone()
        spoiled[n:] = torch.nan
        given = [t.clone().requires_grad_() for t in (spoiled, w, *tables, spoiled)]
        options = dict(zip(("bias", "scale", "residual"), given[2:], strict=True))
        y = st.submanifold_conv(x.replace(given[0]), given[1], activation=activation, **options)
        first = torch.autograd.grad(y.features.sin().sum(), given, create_graph=True)
        second = torch.autograd.grad(first[2].square().sum(), given[1:5], retain_graph=True)
        found = [y.features, *first, *second]
        results.append([t[:n] if len(t) == len(spoiled) else t for t in found])
        assert not any(t[n:].any() for t in (y.features, first[0], first[-1]))
    for exact, mine in zip(*results, strict=True):
        assert_close(torch, mine, exact, 100)


@pytest.mark.parametrize("capacity", [None, 0, 3])
def test_no_sites_at_all(torch, st, device, capacity):
    rows = torch.zeros(0, 3, dtype=torch.int64, device=device)
    features = torch.zeros(0, 4, device=device, requires_grad=True)
    for mode in ("unique", "mean"):
        x = st.sparse_tensor(
            features, rows, spatial_shape=SHAPE, batch_size=2, mode=mode, capacity=capacity
        )
        w = torch.ones(2, 2, 4, 4, device=device, requires_grad=True)
        y = st.submanifold_conv(x, w, activation="gelu")
        y = st.masked_batch_norm(y, training=True)
        z = st.strided_conv(y, w, stride=2)
        z = st.inverse_conv(z, w, onto=y)
        z = st.sparse_unpool(st.sparse_max_pool(z, 2), onto=z)
        z = st.sparse_avg_pool(st.transposed_conv(z, w, stride=2), 2)
        total = st.sparse_to_dense(z).sum() + st.global_pool(z).sum()
        total = total + st.global_pool(z, "mean").sum()
        total.backward()
        assert total.item() == 0 and not w.grad.any() and features.grad.shape == (0, 4)


def test_an_empty_sample(torch, st, device):
    x = st.sparse_tensor(
        torch.ones(1, 1, device=device), torch.tensor([[1, 2]], device=device), spatial_shape=4,
        batch_size=3,
    )  # fmt: skip
    assert st.global_pool(x).ravel().tolist() == [0, 1, 0]
    assert st.sparse_to_dense(x)[..., 0].sum(1).tolist() == [0, 1, 0]


def test_batch_norm_is_torch_s(torch, st, device):
    x = made(torch, st, device, dtype=torch.float32)
    mine, theirs = (torch.nn.BatchNorm1d(4, device=device) for _ in range(2))
    for module in (mine, theirs):
        torch.nn.init.constant_(module.weight, 1.5)
        torch.nn.init.constant_(module.bias, -0.5)
    for _ in range(2):
        found = st.masked_batch_norm(
            x, mine.running_mean, mine.running_var, mine.weight, mine.bias, training=True
        )
        torch.testing.assert_close(found.features, theirs(x.features))
    torch.testing.assert_close(mine.running_mean, theirs.running_mean)
    torch.testing.assert_close(mine.running_var, theirs.running_var)
    theirs.eval()
    tables = (mine.running_mean, mine.running_var, mine.weight, mine.bias)
    found = st.masked_batch_norm(x, *tables)
    torch.testing.assert_close(found.features, theirs(x.features))


@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_batch_norm_by_kernels(torch, st, request, training, activation):
    """Here the NumPy bodies stand for the kernels. Rows past the count hold NaN."""
    rng = torch.Generator().manual_seed(0)
    values = torch.randn(9, 4, dtype=torch.float64, generator=rng)
    values[7:] = torch.nan
    rows = torch.tensor([[0, i * i % 11] for i in range(7)])
    results, asked = [], []
    for kernels in (False, True):
        asked = request.getfixturevalue("norms_asked") if kernels else asked
        tables = [torch.linspace(0.5, 1.5, 4, dtype=torch.float64) for _ in range(4)]
        features = values[:7].clone().requires_grad_(training)
        x = st.sparse_tensor(features, rows, spatial_shape=11, capacity=9)
        padded = torch.cat([x.features[:7], values[7:]])
        learnt = [t.requires_grad_() for t in tables[2:]] if training else tables[2:]
        call = dict(training=training, momentum=0.25, activation=activation)
        y = st.masked_batch_norm(x.replace(padded), *tables[:2], *learnt, **call)
        found = [y.features, *tables[:2]]
        if training:
            given = [features, *learnt]
            first = torch.autograd.grad(y.features.sin().sum(), given, create_graph=True)
            again = torch.autograd.grad(first[0].square().sum(), given, retain_graph=True)
            found += [*first, *again]
            y = st.masked_batch_norm(x.replace(padded), None, None, *learnt, activation=activation)
            found += torch.autograd.grad(y.features.sin().sum(), given)  # as gradients are taken
        results.append(found)
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
    names = ["statistics", "gradient", "running"]
    assert [name in asked for name in names] == [training, training, not training]
    assert (activation, False) in asked
    with pytest.raises(ValueError, match="activation must be None, 'relu'"):
        st.masked_batch_norm(x, activation="relu6")
    for name, value in (("weight", [1.0]), ("running_mean", "a"), ("eps", None), ("momentum", "a")):
        with pytest.raises(sb.DTypeError, match=f"{name} must be a"):
            st.masked_batch_norm(x, **{name: value})


def test_sites_may_be_those_of_a_sparse_tensor(torch, st, device):
    x = made(torch, st, device)
    w = values(torch, 3, 3, 4, 5, device=device)
    window = st.kernel_map(x, 3, onto=x)
    assert window.source is window.target is x.coordinates
    assert torch.equal(window.rows, st.kernel_map(x.coordinates, 3, onto=x.coordinates).rows)
    for onto in (x, x.coordinates):
        y = st.strided_conv(x, w, stride=2, padding=1, onto=onto)
        assert y.coordinates is x.coordinates
    pooled = st.sparse_avg_pool(x, 3, padding=1, onto=x)
    assert pooled.coordinates is x.coordinates
    with pytest.raises(sb.DTypeError, match="coordinates must be a CoordinateMap"):
        st.kernel_map(x.features, 3)


def test_numbers_that_are_none(torch, st, device):
    x = made(torch, st, device)
    window = st.kernel_map(x, 3, onto=x)
    for value in ("a", None, 1j, [1.0]):
        with pytest.raises(sb.DTypeError, match="fill must be a number"):
            st.sparse_to_dense(x, fill=value)
        with pytest.raises(sb.DTypeError, match="fill must be a number"):
            st.sparse_unfold(x.features, window, fill=value)
        with pytest.raises(sb.DTypeError, match="tol must be a number"):
            st.dense_to_sparse(x.dense(), tol=value)
    with pytest.raises(sb.DTypeError, match="floor must be a number"):
        st.sparse_max_pool(x, 2, floor="a")
    with pytest.raises(ValueError, match="floor must not be NaN"):
        st.sparse_max_pool(x, 2, floor=float("nan"))
    half = x.replace(x.features.half())
    assert half.dense(fill=-1e9).min() == st.sparse_unfold(half.features, window, fill=-1e9).min()
    assert half.dense(fill=-1e9).min() == -torch.inf
    filled = half.dense(fill=torch.tensor(3.0))
    assert filled.dtype == torch.half and torch.equal(filled, half.dense(fill=3))


def test_copies_of_maps_that_were_used_keep_nothing(torch, st, device):
    """What is kept holds addresses in the memory of the original."""
    x = made(torch, st, device)
    w = values(torch, 3, 3, 4, 4, device=device).requires_grad_()
    y = st.strided_conv(x, w, stride=2, padding=1, activation="relu")
    up = st.inverse_conv(y, w, onto=x)
    up.features.sum().backward()
    window = st.kernel_map(x, 3, stride=2, padding=1)
    assert window.rows.kept_of_map
    expected = st.site_conv(x.features.detach(), w.detach(), window)
    for twin in (copy.deepcopy(window), pickle.loads(pickle.dumps(window))):
        assert not getattr(twin.rows, "kept_of_map", {}) and torch.equal(twin.rows, window.rows)
        assert torch.equal(st.site_conv(x.features.detach(), w.detach(), twin), expected)
    back = pickle.loads(pickle.dumps(window.transposed()))
    assert torch.equal(back.rows, window.transposed().rows)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_rows_of_no_sample_take_no_gradient(st, torch, reduce):
    """As in a list of sites that was made by hand: they are in no result."""
    rows, count = torch.tensor([[0, 1], [7, 1], [-3, 2]]).int(), torch.tensor([3]).int()
    features = torch.ones(3, 1, requires_grad=True)
    x = sb.SparseTensor(features, sb.CoordinateMap(rows, count, (4,), 1))
    y = st.global_pool(x, reduce)
    y.sum().backward()
    assert y.tolist() == [[1]] and features.grad.tolist() == [[1], [0], [0]]


def test_sites_made_of_a_list_with_too_few_rows_say_so(st, torch):
    rows = torch.tensor([[0, 1], [0, 2], [0, 5]])
    options = {"spatial_shape": 8, "batch_size": 1, "capacity": 2}
    x = st.sparse_tensor(torch.ones(3, 1), rows, **options)
    y = st.strided_conv(x, torch.ones(2, 1, 1), stride=2, capacity=4)
    with pytest.raises(sb.CapacityError, match="got 2 for 3 sites of a list"):
        y.coordinates.check()


def test_the_shape_may_be_a_tensor(torch, st, device):
    rows, features = torch.tensor([[0, 3, 1], [0, 0, 2]], device=device), torch.ones(2, 1)
    features = features.to(device)
    for shape in (torch.LongTensor([4, 5]), torch.tensor([4, 5], dtype=torch.int32)):
        for given in (shape, shape.numpy()):
            sites, _ = st.coordinate_map(rows, spatial_shape=given)
            assert sites.spatial_shape == (4, 5)
            assert set(map(type, sites.spatial_shape)) == {int}
            x = st.sparse_tensor(features, rows, spatial_shape=given)
            assert st.sparse_to_dense(x, spatial_shape=given + 1).shape == (1, 5, 6, 1)
    for bad in (torch.ones(2), torch.LongTensor([4]), torch.LongTensor([[4, 5]])):
        with pytest.raises(sb.ShapeError, match="spatial_shape must be a non-negative"):
            st.coordinate_map(rows, spatial_shape=bad)


def test_tensors_on_another_device_are_named_as_they_were_given(torch, st):
    rows, w = torch.tensor([[0, 1], [0, 2], [0, 5]]), torch.ones(3, 1, 2)
    x, far = st.sparse_tensor(torch.ones(3, 1), rows, spatial_shape=8), torch.ones(2, device="meta")
    made = st.kernel_map(x, 3, onto=x)
    words = r"on one device: features is on cpu, {} is on meta; use \.to\(device\)"
    for call in (
        lambda **options: st.submanifold_conv(x, **options),
        lambda **options: st.strided_conv(x, stride=2, **options),
        lambda **options: st.site_conv(x.features, kernel_map=made, **options),
    ):
        with pytest.raises(sb.DeviceError, match=words.format("w")):
            call(w=w.to("meta"))
        with pytest.raises(sb.DeviceError, match=words.format("bias")):
            call(w=w, bias=far)


@pytest.mark.parametrize("dtype, fill", [("int64", -1), ("int64", 2**53 + 1), ("uint8", 255)])
def test_whole_grids_of_labels(torch, st, device, dtype, fill):
    labels = torch.tensor([[3], [1]], dtype=getattr(torch, dtype), device=device)
    sites, _ = st.coordinate_map(torch.tensor([[0, 1], [0, 2]], device=device), spatial_shape=4)
    dense = st.sparse_to_dense(sb.SparseTensor(labels, sites), fill=fill)
    assert dense.dtype == labels.dtype and dense.flatten().tolist() == [fill, 3, 1, fill]
    with pytest.raises(sb.DTypeError, match=f"fill must be an integer that {dtype} holds"):
        st.sparse_to_dense(sb.SparseTensor(labels, sites), fill=0.5)
