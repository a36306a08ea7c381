"""Features at sites on tensors: shared maps, autocast, torch.compile, bad calls, pickle."""

import pickle

import pytest

import sbnet_cupy as sb
from support.torch_site_cases import assert_close, made, values


def test_maps_are_shared_and_die_with_the_coordinates(torch, st):
    import gc
    import weakref

    x = made(torch, st)
    y = st.strided_conv(x, values(torch, 2, 2, 4, 4), stride=2)
    assert st.sparse_max_pool(x, 2).coordinates is y.coordinates
    window = st.kernel_map(x.coordinates, 3, onto=x.coordinates)
    assert st.kernel_map(x.coordinates, 3, onto=x.coordinates).rows is window.rows
    f = x.features.clone().requires_grad_()
    st.inverse_conv(y, values(torch, 2, 2, 4, 4), onto=x)
    st.submanifold_conv(x.replace(f), values(torch, 3, 3, 4, 4)).features.sum().backward()
    alive = [weakref.ref(t) for t in (window.rows, x.coordinates, y.coordinates, y.indices)]
    gc.disable()
    try:
        del x, y, window, f
        assert [ref() for ref in alive] == [None] * 4
    finally:
        gc.enable()


def test_a_map_is_found_once_and_later_looked_up(torch, st, monkeypatch):
    from sbnet_cupy.torch.submanifold import maps

    x, w = made(torch, st), values(torch, 3, 3, 4, 4)
    calls, find = [], maps.kernel_map_of
    monkeypatch.setattr(maps, "kernel_map_of", lambda *a, **o: calls.append(o) or find(*a, **o))
    first = [st.submanifold_conv(x, w, dilation=d) for d in (1, 2)]
    again = [st.submanifold_conv(x, w, dilation=d) for d in (1, 2)]
    assert len(calls) == 2
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one.features, other.features)
        assert other.coordinates is x.coordinates
    assert torch.equal(st.submanifold_conv(x, w, dilation=(1, 1)).features, first[0].features)
    with pytest.raises(sb.ShapeError, match="dilation must be a positive integer"):
        st.submanifold_conv(x, w, dilation=True)  # though True == 1
    x.coordinates.clear()
    assert torch.equal(st.submanifold_conv(x, w, dilation=2).features, first[1].features)
    assert len(calls) == 5


def test_autocast_casts_as_torch_does(torch, st, device):
    x = made(torch, st, device, dtype=torch.float32)
    w = values(torch, 3, 3, 4, 4, device=device, dtype=torch.float32).requires_grad_()
    with torch.autocast(device, dtype=torch.bfloat16):
        y = st.submanifold_conv(x, w, bias=torch.zeros(4, device=device))
    assert y.features.dtype is torch.bfloat16
    y.features.float().sum().backward()
    assert w.grad.dtype is torch.float32


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which Dynamo asks tensors for
def test_compiled_with_breaks_and_whole(torch, st):
    torch._dynamo.reset()
    x = made(torch, st)
    w, w2 = values(torch, 3, 3, 4, 4), values(torch, 2, 2, 4, 4)

    def network(features, w, w2):
        y = st.submanifold_conv(x.replace(features.sin()), w, activation="relu")
        return st.strided_conv(y, w2, stride=2).features.cos()

    window = st.kernel_map(x.coordinates, 3, onto=x.coordinates)

    def whole(features, w, w2):
        return st.site_conv(features.sin(), w, window, activation="silu").cos() * w2.sum()

    for function, full in ((network, False), (whole, True)):
        compiled = torch.compile(function, backend="aot_eager", fullgraph=full)
        results = []
        for call in (function, compiled):
            leaves = [t.clone().requires_grad_() for t in (x.features, w, w2)]
            y = call(*leaves)
            y.square().sum().backward()
            results.append([y, *[leaf.grad for leaf in leaves]])
        for a, b in zip(*results, strict=True):
            assert_close(torch, a, b, 100)


def test_export_at_sites_that_were_found_outside(torch, st):
    x, w = made(torch, st), values(torch, 2, 2, 4, 4)

    class Network(torch.nn.Module):
        def __init__(self, finds):
            super().__init__()
            self.finds = finds

        def forward(self, features):
            """Convolve there and back."""
            at = x.replace(features)
            if self.finds:
                at = st.sparse_tensor(features, x.indices.clone(), spatial_shape=x.spatial_shape)
            return st.inverse_conv(st.strided_conv(at, w, stride=2), w, onto=at).features

    network = Network(False)
    exported = torch.export.export(network, (x.features,)).module()
    assert torch.equal(exported(2 * x.features), network(2 * x.features))
    words = r"must have data, got a .* torch.export .* finding sites does, outside"
    with pytest.raises(sb.DeviceError, match=words):
        torch.export.export(Network(True), (x.features,))


def test_sites_of_inference_mode_in_training(torch, st):
    """What they keep from a call in inference mode is saved for gradients later."""
    x = made(torch, st)
    w = values(torch, 2, 2, 4, 4).requires_grad_()

    def network(x):
        y = st.submanifold_conv(x, w)
        y = st.inverse_conv(st.strided_conv(y, w, stride=2), w, onto=y)
        return st.sparse_unpool(st.sparse_max_pool(y, 2), onto=y).features

    with torch.inference_mode():
        expected = network(x)
        inside = st.coordinate_map(x.indices.clone(), spatial_shape=x.spatial_shape)[0]
    y = network(x)
    y.sum().backward()
    assert torch.equal(y, expected) and w.grad.any()
    st.site_conv(x.features, w, st.kernel_map(inside, 2, onto=inside)).sum().backward()


def test_voxels_and_windows_compiled_without_a_warning(torch, st):
    """Warnings are errors here."""

    def pooled(points, values):
        x, voxel = st.voxelize(points, values, ranges=[(0, 8)] * 3, voxel_size=1)
        windows = st.sparse_unfold(x.features, st.kernel_map(x, 3, onto=x))
        return st.global_pool(x, "sum"), x.features[voxel], windows

    points, values = torch.arange(30.0).reshape(10, 3) % 7, torch.ones(10, 2)
    found = torch.compile(pooled, backend="eager")(points, values)
    assert all(map(torch.equal, found, pooled(points, values)))


def test_the_way_back_compiled(torch, st):
    """Dynamo traces how its map is made, and must find nothing there to warn of."""
    torch._dynamo.reset()
    x, w = made(torch, st), values(torch, 2, 2, 4, 4)

    def there_and_back(features):
        y = st.strided_conv(x.replace(features), w, stride=2)
        return st.inverse_conv(y, w, onto=x).features

    compiled = torch.compile(there_and_back, backend="eager")
    assert_close(torch, compiled(x.features), there_and_back(x.features), 100)


@pytest.mark.parametrize("call, error, words", [
    (lambda torch, st, x, w: st.submanifold_conv(x, w.float()), sb.DTypeError, "w must have the"),
    (lambda torch, st, x, w: st.submanifold_conv(x.features, w), sb.DTypeError, "x must be a Sp"),
    (lambda torch, st, x, w: st.submanifold_conv(x, w[0]), sb.ShapeError, "w must have shape"),
    (lambda torch, st, x, w: st.submanifold_conv(x, w, groups=3), sb.ShapeError, "groups must"),
    (lambda torch, st, x, w: st.strided_conv(x, w, stride=0), sb.ShapeError, "stride must"),
    (lambda torch, st, x, w: st.submanifold_conv(x, w.numpy()), sb.DTypeError, "w must be a torch"),
    (lambda torch, st, x, w: st.submanifold_conv(x, w, activation="tanh"), ValueError, "activ"),
    (lambda torch, st, x, w: st.submanifold_conv(x, w, activation=torch.relu), ValueError, "activ"),
    (lambda torch, st, x, w: st.submanifold_conv(x, w, precision=w.dtype), ValueError, "precision"),
    (lambda torch, st, x, w: st.submanifold_conv(x, w, groups=w[0]), sb.ShapeError, "groups must"),
    (lambda torch, st, x, w: st.sparse_max_pool(x, 0), sb.ShapeError, "kernel_size must"),
    (lambda torch, st, x, w: st.sparse_max_pool(x, 2, ties="none"), ValueError, "ties must"),
    (lambda torch, st, x, w: st.global_pool(x, "min"), ValueError, "reduce must"),
    (lambda torch, st, x, w: st.sparse_unpool(x, onto=x), ValueError, "there was none"),
    (lambda torch, st, x, w: st.sparse_tensor(x.features, x.indices[:2]), sb.ShapeError, "a row"),
    (lambda torch, st, x, w: st.sparse_tensor(x.features, x.indices.float()), sb.DTypeError, "int"),
    (lambda torch, st, x, w: st.coordinate_map(x.indices, spatial_shape=2), sb.ShapeError, "insid"),
    (lambda torch, st, x, w: st.coordinate_map(x.indices, capacity=2**40), sb.ShapeError, "2.*31"),
    (lambda torch, st, x, w: st.sparse_to_dense(x, spatial_shape=2**30), sb.ShapeError, "2.*60"),
    (lambda torch, st, x, w: st.transposed_conv(x, w, stride=2**30), sb.ShapeError, "stride and"),
    (lambda torch, st, x, w: st.coordinate_map(x.indices.repeat(2, 1)), ValueError, "distinct"),
    (lambda torch, st, x, w: st.kernel_map(x.indices, 3), sb.DTypeError, "coordinates must be"),
    (lambda torch, st, x, w: st.kernel_map(x, 3, onto=w), sb.DTypeError, "onto must be a Co"),
    (lambda torch, st, x, w: st.sparse_max_pool(x, 2, onto=w), sb.DTypeError, "onto must be a Co"),
    (lambda torch, st, x, w: st.masked_batch_norm(x, torch.zeros(4)), ValueError, "together"),
    (lambda torch, st, x, w: st.site_conv(x.features, w, None), sb.DTypeError, "kernel_map must"),
    (lambda torch, st, x, w: st.sparse_unfold(x.features, x), sb.DTypeError, "kernel_map must"),
    (lambda torch, st, x, w: st.sparse_unfold(x.features[1:], st.kernel_map(
        x.coordinates, 3, onto=x.coordinates)), sb.ShapeError, "features must have the"),
    (lambda torch, st, x, w: st.voxelize(x.features, x.features[1:], ranges=[(0, 4)], voxel_size=1),
     sb.ShapeError, "features must have a row for each"),
    (lambda torch, st, x, w: st.voxelize(x.indices, ranges=[(0, 4)], voxel_size=1), sb.DTypeError,
     "features must be float16"),
    (lambda torch, st, x, w: st.voxelize(x.features, ranges=[(0, 4)], voxel_size=0), ValueError,
     "voxel_size must be"),
    (lambda torch, st, x, w: st.voxelize(x.features, ranges=[(0, 4)], voxel_size=1, sample=w),
     sb.ShapeError, "sample must have shape"),
    (lambda torch, st, x, w: st.masked_batch_norm(x, w), sb.ShapeError, "running_mean must"),
    (lambda torch, st, x, w: st.masked_batch_norm(x.replace(x.features.int())), sb.DTypeError,
     "features must be float16"),
    (lambda torch, st, x, w: st.coordinate_map(None), sb.DTypeError, "indices must be .* got None"),
    (lambda torch, st, x, w: st.sparse_tensor(x.features, None), sb.DTypeError, "indices must be"),
    (lambda torch, st, x, w: st.submanifold_conv(x, None), sb.DTypeError, "w must be a torch.T"),
    (lambda torch, st, x, w: st.dense_to_sparse(None), sb.DTypeError, "x must be a torch.Tensor"),
    (lambda torch, st, x, w: st.voxelize(None, ranges=[(0, 1)], voxel_size=1), sb.DTypeError,
     "points must be a torch.Tensor, got None"),
    (lambda torch, st, x, w: st.sparse_unfold(None, st.kernel_map(x, 3)), sb.DTypeError, "feature"),
    (lambda torch, st, x, w: st.sparse_conv2d(None, w, torch.ones(1, 8, 8), bsize=4),
     sb.DTypeError, "x must be a torch.Tensor, got None"),
])  # fmt: skip
def test_bad_calls(torch, st, call, error, words):
    x = made(torch, st)
    with pytest.raises(error, match=words):
        call(torch, st, x, values(torch, 3, 3, 4, 4))


def operators(torch, st, device):
    """Yield (operator, arguments) for each of ours, gradients asked for where there are any."""
    x = made(torch, st, device)
    coordinates = x.coordinates
    window = st.kernel_map(coordinates, 3, onto=coordinates)
    rows, back, n = window.rows, window.transposed().rows, coordinates.capacity
    valid = coordinates.valid()
    f, y = x.features.requires_grad_(), values(torch, n, 4, device=device).requires_grad_()
    w, v = (values(torch, *s, device=device).requires_grad_() for s in ((3, 3, 4, 4), (4,)))
    ops = torch.ops.sbnet_cupy
    yield ops.site_conv, (f, rows, valid, w, v, v, y, (3, 3), n, 1, "gelu", None)
    yield ops.site_conv, (f, rows, None, w, None, None, None, (3, 3), n, 1, "relu", None)
    yield ops.site_weight_grad, (f, y, rows, 2, None)
    taps = values(torch, 9, 2, 4, device=device).requires_grad_()
    yield ops.site_features_grad, (y, taps, back, 2, False, None)
    yield ops.site_features_grad, (y, taps, rows, 2, True, None)
    yield ops.site_sum, (f, rows, valid, "active")
    yield ops.site_max, (f, rows, valid, 0.0, "first")
    top = ops.site_max(f, rows, valid, None, "first").detach()
    still = f.detach()
    yield ops.site_max_grad, (y, still, top, rows, back, "all")
    yield ops.site_max_tangent, (y, still, top, rows, "first")
    sample = x.indices[:, 0].contiguous()
    yield ops.sample_sum, (f, sample, 2, "sum")
    yield ops.sample_sum, (f, sample, 2, "mean")
    yield ops.sample_max, (f, sample, 2)
    yield ops.sample_argmax, (sample, still, 2)
    yield ops.transposed_rows, (rows, n)
    order = torch.arange(n, device=device)
    starts = torch.arange(n + 1, device=device)[None]
    yield ops.reduce_features, (f, order, order, starts, "mean")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # opcheck's own
def test_opcheck(torch, st, device):
    checked = set()
    for operator, arguments in operators(torch, st, device):
        results = torch.library.opcheck(operator.default, arguments)
        assert set(results.values()) == {"SUCCESS"}, (operator, results)
        checked.add(operator)
    assert len(checked) == 12


def test_sites_are_pickled(torch, st):
    """As a worker of a DataLoader sends them; what they keep stays behind."""
    x, w = made(torch, st), values(torch, 3, 3, 4, 6)
    expected = st.submanifold_conv(x, w).features, st.sparse_to_dense(x)
    st.sparse_max_pool(x, 2)
    same = pickle.loads(pickle.dumps(x))
    assert same.coordinates._kept == {}
    found = st.submanifold_conv(same, w).features, st.sparse_to_dense(same)
    assert all(map(torch.equal, found, expected))


def test_packed_weights_compute_with_what_was_packed(torch, st):
    """Without a kernel, too; and none that needs a gradient later is taken."""
    x = made(torch, st)
    w, bias = values(torch, 3, 3, 4, 6), values(torch, 6)
    weights = sb.PackedWeights(w, bias=bias)
    before = st.submanifold_conv(x, weights).features
    assert torch.equal(before, st.submanifold_conv(x, w, bias=bias).features)
    w *= 2
    assert torch.equal(st.submanifold_conv(x, weights).features, before)
    weights.refresh()
    assert torch.equal(
        st.submanifold_conv(x, weights).features, st.submanifold_conv(x, w, bias=bias).features
    )
    w.requires_grad_(True)
    with pytest.raises(sb.DTypeError, match="gets no gradients"):
        st.submanifold_conv(x, weights)


def test_derived_operands_live_until_the_launch(torch):
    """An order that nothing keeps is not freed before the kernel is launched."""
    from sbnet_cupy.torch.submanifold import operations

    class Order(list):
        pass

    class Plan:
        order, sort = False, staticmethod(lambda *arrays: Order())

    rows = torch.zeros(3, 2, dtype=torch.int32)
    operations.kept_with(rows)["capture"] = 7  # as if a graph had made it: not kept
    owner, addresses = operations._order_of(Plan, (torch.zeros(2, 4), rows))
    assert addresses == [] and type(owner) is Order
    assert operations.kept_with(rows) == {"capture": 7}
