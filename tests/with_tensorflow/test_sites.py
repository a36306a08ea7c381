"""Features at sites in TensorFlow: the numbers of the package, and gradients."""

import copy
import functools
import gc
import sys
import weakref

import numpy as np
import pytest

import sbnet_cupy as sb
from sbnet_cupy import DTypeError
from support.adapter_cases import normal
from support.assertions import assert_close, assert_same

SHAPE, BATCH = (9, 8, 7), 3
GRID = {"spatial_shape": SHAPE, "batch_size": BATCH}


def listed(repeats=False):
    """Return rows of coordinates; with repeats several are the same."""
    rng = np.random.default_rng(5)
    rows = np.argwhere(rng.random((BATCH, *SHAPE)) < 0.06).astype(np.int32)
    chosen = rng.integers(0, len(rows), 2 * len(rows)) if repeats else rng.permutation(len(rows))
    return rows[chosen]


def kernel(*size, c=4, k=5):
    return normal(*size, c, k, dtype=np.float32) / 8


def convolved(module, make, name, w, channels=4, **options):
    """Return what a convolution of a module makes of arrays that ``make`` made."""
    rows = listed()
    x = module.sparse_tensor(make(normal(len(rows), channels)), make(rows), **GRID)
    return x, getattr(module, name)(x, make(w), **options)


@pytest.fixture
def make(tf):
    return tf.constant


CONVOLUTIONS = [
    ("submanifold_conv", (3, 3, 3), {}),
    ("submanifold_conv", (3, 1, 5), {"dilation": 2, "activation": "relu"}),
    ("strided_conv", (2, 2, 2), {"stride": 2}),
    ("strided_conv", (3, 3, 3), {"stride": 2, "padding": 1, "capacity": 500}),
    ("transposed_conv", (3, 3, 3), {"stride": 2, "padding": 1}),
]


@pytest.mark.parametrize(("name", "size", "options"), CONVOLUTIONS)
def test_convolutions(sbt, make, name, size, options):
    w = kernel(*size)
    _, y = convolved(sbt, make, name, w, **options)
    _, expected = convolved(sb, np.asarray, name, w, **options)
    for part in ("features", "indices"):
        assert_same(getattr(y, part).numpy(), getattr(expected, part))


@pytest.mark.parametrize("name", ["strided_conv", "sparse_max_pool"])
def test_the_way_back(sbt, make, name):
    """The sites of a result are known to have come from those of its argument."""
    results = []
    for module, give in ((sbt, make), (sb, make), (sb, np.asarray)):
        if name == "strided_conv":
            x, y = convolved(module, give, name, kernel(2, 2, 2), stride=2)
            back = module.inverse_conv(y, give(kernel(2, 2, 2, c=5, k=3)), onto=x)
        else:
            x, _ = convolved(module, give, "submanifold_conv", kernel(1, 1, 1))
            back = module.sparse_unpool(module.sparse_max_pool(x, 2), onto=x)
        assert back.coordinates is x.coordinates
        results.append(np.asarray(back.features))
    for found in results[:2]:
        assert_same(found, results[2])


def test_gradients_of_a_convolution(tf, sbt, make):
    """With everything that a convolution takes; those of the package."""
    rows, w = listed(), kernel(3, 3, 3)
    arrays = {"features": normal(len(rows), 4), "w": w, "scale": normal(5) + 2, "bias": normal(5),
              "residual": normal(len(rows), 5)}  # fmt: skip
    sites, _ = sb.coordinate_map(rows, **GRID)
    made = sb.kernel_map(sites, 3, onto=sites)
    inverse = sb.coordinate_map(rows, **GRID)[1]
    grad = normal(len(rows), 5)
    expected = sb.site_conv_grad(
        grad, arrays["features"], w, made, activation="silu",
        **{name: arrays[name] for name in ("scale", "bias", "residual")},
    )  # fmt: skip
    sites, found = sbt.coordinate_map(make(rows), **GRID)
    assert_same(found.numpy(), inverse)
    window = sbt.kernel_map(sites, 3, onto=sites)
    tensors = {name: tf.Variable(array) for name, array in arrays.items()}
    with tf.GradientTape() as tape:
        y = sbt.site_conv(kernel_map=window, activation="silu", **tensors)
    gradients = tape.gradient(y, list(tensors.values()), output_gradients=make(grad))
    for name, found in zip(tensors, gradients, strict=True):
        assert_same(found.numpy(), getattr(expected, name))


def test_unfolded_windows_and_their_gradient(tf, sbt, make):
    rows, features = listed(), normal(len(listed()), 4)
    sites = sb.coordinate_map(rows, **GRID)[0]
    window = sb.kernel_map(sites, 3, onto=sites)
    expected = sb.sparse_unfold(features, window, fill=2)
    grad = normal(*expected.shape)
    sites = sbt.coordinate_map(make(rows), **GRID)[0]
    given = tf.Variable(features)
    with tf.GradientTape() as tape:
        y = sbt.sparse_unfold(given, sbt.kernel_map(sites, 3, onto=sites), fill=2)
    assert_same(y.numpy(), expected)
    found = tape.gradient(y, given, output_gradients=make(grad))
    assert_same(found.numpy(), sb.sparse_unfold_grad(grad, features, window))
    with pytest.raises(DTypeError, match="kernel_map must be a KernelMap"):
        sbt.sparse_unfold(given, sites)


@pytest.mark.parametrize("mode", ["mean", "sum", "first", "last"])
def test_voxels_and_their_gradient(tf, sbt, make, mode):
    points = np.random.default_rng(5).uniform(-2, 3, (40, 3)).astype(np.float32)
    sample = np.random.default_rng(6).integers(-1, 3, 40)
    options = {"ranges": [(-1.0, 1.5), (0.0, 2.0)], "voxel_size": 0.5, "batch_size": 2}
    x, into = sb.voxelize(points, sample=sample, mode=mode, **options)
    given = tf.Variable(points)
    with tf.GradientTape() as tape:
        y, inverse = sbt.voxelize(make(points), given, sample=make(sample), mode=mode, **options)
        total = tf.reduce_sum(y.features)
    assert_same(y.features.numpy(), x.features)
    assert_same(y.indices.numpy(), x.indices)
    assert_same(inverse.numpy(), into)
    found = tape.gradient(total, given).numpy()
    share = np.zeros(40)
    for site in range(len(x.features)):
        its = np.flatnonzero(into == site)
        if mode in ("first", "last"):
            its = its[:1] if mode == "first" else its[-1:]
        share[its] = 1 / len(its) if mode == "mean" else 1
    assert_close(found, np.repeat(share[:, None], 3, axis=1), terms=3, dtype=np.float32)


POOLS = {
    "sparse_max_pool": {"kernel_size": 2},
    "sparse_avg_pool": {"kernel_size": 3, "stride": 2, "count": "active"},
    "global_pool": {"reduce": "mean"},
    "sparse_to_dense": {"data_format": "channels_first"},
}


@pytest.mark.parametrize("name", POOLS)
def test_pools_and_their_gradients(tf, sbt, make, name):
    rows, options = listed(), POOLS[name]
    values = normal(len(rows), 4)
    expected = sb.sparse_tensor(values, rows, **GRID)
    wanted = getattr(sb, name)(expected, **options)
    features = tf.Variable(values)
    with tf.GradientTape() as tape:
        y = getattr(sbt, name)(sbt.sparse_tensor(features, make(rows), **GRID), **options)
        y = y.features if isinstance(y, sb.SparseTensor) else y
    wanted = wanted.features if isinstance(wanted, sb.SparseTensor) else wanted
    assert_same(y.numpy(), wanted)
    grad = normal(*wanted.shape)
    found = tape.gradient(y, features, output_gradients=make(grad)).numpy()
    exact = getattr(sb, f"{name}_grad")(grad, expected, **options)
    _, inverse = sb.coordinate_map(rows, **GRID)
    assert_same(found, exact[inverse])


def test_whole_grids(tf, sbt, make):
    x = np.where(normal(2, 6, 5, 3) > 1, 1, 0).astype(np.float32)
    expected = sb.dense_to_sparse(x)
    grid = tf.Variable(x)
    with tf.GradientTape() as tape:
        found = sbt.dense_to_sparse(grid)
        total = tf.reduce_sum(found.features * 2)
    assert_same(found.features.numpy(), expected.features)
    assert_same(found.indices.numpy(), expected.indices)
    grad = sb.dense_to_sparse_grad(np.full_like(expected.features, 2), expected)
    assert_same(tape.gradient(total, grid).numpy(), grad)


@pytest.mark.parametrize("mode", ["first", "last", "sum", "mean"])
def test_rows_of_one_site(tf, sbt, make, mode):
    """Each row gets its share of the gradient of its site."""
    rows = listed(repeats=True)
    values, capacity = normal(len(rows), 2), len(rows)
    options = {**GRID, "mode": mode, "capacity": capacity}
    expected = sb.sparse_tensor(values, rows, **options)
    inverse = sb.coordinate_map(rows, **options)[1]
    grad = normal(capacity, 2)
    features = tf.Variable(values)
    with tf.GradientTape() as tape:
        y = sbt.sparse_tensor(features, make(rows), **options).features
    assert_same(y.numpy(), expected.features)
    found = tape.gradient(y, features, output_gradients=make(grad)).numpy()
    wanted = np.zeros_like(values)
    for site in range(expected.coordinates.number()):
        its = np.flatnonzero(inverse == site)
        if mode in ("first", "last"):
            wanted[its[0 if mode == "first" else -1]] = grad[site]
        else:
            wanted[its] = grad[site] / np.float32(len(its) if mode == "mean" else 1)
    assert_same(found, wanted)


@pytest.mark.parametrize(("dtype", "rows"), [("float16", 65_520), ("bfloat16", 385)])
@pytest.mark.parametrize("name", ["sparse_tensor", "voxelize"])
def test_means_of_more_rows_than_a_half_float_counts(tf, sbt, name, dtype, rows):
    """Their gradient is divided in float32, by the count itself, and rounded once."""
    features = tf.Variable(tf.ones((rows, 1), dtype))
    with tf.GradientTape() as tape:
        if name == "sparse_tensor":
            indices = tf.zeros((rows, 2), tf.int32)
            y = sbt.sparse_tensor(features, indices, spatial_shape=4, mode="mean").features
        else:
            points = tf.zeros((rows, 1))
            y = sbt.voxelize(points, features, ranges=[(0, 1)], voxel_size=1)[0].features
    found = tape.gradient(y, features, output_gradients=tf.constant([[1000]], dtype))
    share = tf.cast(tf.constant(np.float32(1000) / np.float32(rows)), dtype)
    assert_same(found.numpy(), np.full((rows, 1), share.numpy()))


def test_a_network_learns(tf, sbt, make):
    """Strided, inverse and submanifold convolutions together; the loss falls."""
    rows = make(listed())
    small = kernel(2, 2, 2, c=5)
    weights = [tf.Variable(w) for w in (kernel(3, 3, 3), small, small)]
    features, target = make(normal(len(rows), 4)), make(normal(len(rows), 5))
    losses = []
    for _ in range(5):
        with tf.GradientTape() as tape:
            x = sbt.sparse_tensor(features, rows, **GRID)
            y = sbt.submanifold_conv(x, weights[0], activation="relu")
            z = sbt.strided_conv(y, weights[1], stride=2, activation="relu")
            z = sbt.inverse_conv(z, weights[2], onto=y, residual=y)
            loss = tf.reduce_mean((z.features - target) ** 2)
        losses.append(float(loss))
        for w, grad in zip(weights, tape.gradient(loss, weights), strict=True):
            w.assign_sub(0.5 * grad)
    assert losses == sorted(losses, reverse=True)
    assert len(set(losses)) == len(losses)


def test_the_grid_of_a_tensor_has_a_gradient(tf, sbt, make):
    """By the method, which is the package's, as by the function."""
    features = tf.Variable(normal(len(listed()), 4))
    with tf.GradientTape() as tape:
        y = sbt.sparse_tensor(features, make(listed()), **GRID).dense(data_format="channels_first")
    grad = normal(*y.shape)
    found = tape.gradient(y, features, output_gradients=make(grad)).numpy()
    assert_same(found, np.stack([grad[n, :, *place] for n, *place in listed()]))


def test_second_derivatives_are_refused(tf, sbt, make):
    x, w = tf.Variable(normal(len(listed()), 4)), tf.Variable(kernel(3, 3, 3))
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            made = sbt.sparse_tensor(x, make(listed()), **GRID)
            y = tf.reduce_sum(sbt.submanifold_conv(made, w).features ** 2)
        grad = inner.gradient(y, w)
        total = tf.reduce_sum(grad**2)
    with pytest.raises(NotImplementedError, match="differentiable once"):
        outer.gradient(total, w)


def test_gradients_in_graphs_are_refused_by_name(tf, sbt, make):
    """As tape.jacobian records them by default."""
    w = tf.Variable(kernel(1, 1, 1, c=1, k=2))
    rows = listed()[:2]
    x = sbt.sparse_tensor(make(normal(2, 1, dtype=np.float32)), make(rows), **GRID)
    with tf.GradientTape(persistent=True) as tape:
        y = sbt.submanifold_conv(x, w).features
    with pytest.raises(DTypeError, match=r"must be computed eagerly.* experimental_use_pfor=False"):
        tape.jacobian(y, w)
    found = tape.jacobian(y, w, experimental_use_pfor=False).numpy()[:, :, 0, 0, 0, 0]
    expected = x.features.numpy()[:, :, None] * np.eye(2, dtype=np.float32)
    assert_same(found, expected, signed_zero=False)


def test_the_samples_of_points_are_a_variable(tf, sbt, make):
    points, grid = make(normal(9, 2)), {"ranges": [(-3, 3), (-3, 3)], "voxel_size": 2}
    sample = make(np.arange(9, dtype=np.int32) % 2)
    x, inverse = sbt.voxelize(points, sample=tf.Variable(sample), **grid)
    y, expected = sbt.voxelize(points, sample=sample, **grid)
    assert_same(x.indices.numpy(), y.indices.numpy())
    assert_same(inverse.numpy(), expected.numpy())


def test_graphs_are_refused(tf, sbt, make):
    """The number of sites is data, which a graph has not."""
    rows = make(listed())
    x = sbt.sparse_tensor(make(normal(len(listed()), 4)), rows, **GRID)
    w = make(kernel(3, 3, 3))
    calls = [
        functools.partial(sbt.coordinate_map, rows, **GRID),
        functools.partial(sbt.submanifold_conv, x, w),
        functools.partial(sbt.global_pool, x),
    ]
    for call in calls:
        with pytest.raises(DTypeError, match=r"outside of tf\.function"):
            tf.function(call, autograph=False)()


def test_what_is_no_tensor(sbt, make):
    rows = listed()
    with pytest.raises(DTypeError, match="features must be a TensorFlow tensor, got list"):
        sbt.sparse_tensor([[1.0]], make(rows[:1]), **GRID)
    with pytest.raises(DTypeError, match="kernel_map must be a KernelMap"):
        sbt.site_conv(make(normal(3, 4)), make(kernel(3)), 7)
    with pytest.raises(DTypeError, match="x must be a SparseTensor"):
        sbt.global_pool(make(rows))


def test_sizes_and_offsets_are_numpy_arrays(tf, sbt, make):
    rows, offsets = listed(), np.array([[0, 0, 1], [0, -1, 0]])
    x = sbt.sparse_tensor(tf.ones((len(rows), 1)), make(rows), spatial_shape=np.array(SHAPE))
    assert x.spatial_shape == SHAPE
    expected = sb.kernel_map(sb.coordinate_map(rows, **GRID)[0], offsets=offsets)
    assert_same(sbt.kernel_map(x, offsets=offsets).rows.numpy(), expected.rows)


def test_sites_are_freed_when_they_go(make):
    """What is kept of them does not keep them."""
    gc.collect()
    gc.disable()
    try:
        x, y = convolved(sb, make, "strided_conv", kernel(2, 2, 2), stride=2)
        gone = [weakref.ref(each.coordinates) for each in (x, y)]
        assert all(reference() is not None for reference in gone)
        del x, y
        assert all(reference() is None for reference in gone)
    finally:
        gc.enable()


@pytest.mark.parametrize("how", ["clear", "copy", "own"])
def test_sites_that_keep_nothing_yet(sbt, make, how):
    """Calls over cleared sites, copies of them, and sites that a caller put together."""
    w = make(kernel(3, 3, 3, c=4, k=4))
    x, y = convolved(sb, make, "submanifold_conv", w)
    sites = x.coordinates
    if how == "clear":
        sites.clear()
    elif how == "copy":
        sites = copy.copy(sites)
    else:
        sites = sb.CoordinateMap(sites.indices, sites.count, *GRID.values())
    for module in (sb, sbt, sb):
        found = module.submanifold_conv(sb.SparseTensor(x.features, sites), w)
        assert_same(found.features.numpy(), y.features.numpy())
        assert found.coordinates is sites


def test_no_room_for_any_site(tf, sbt, make):
    features = tf.Variable(normal(5, 2))
    with tf.GradientTape() as tape:
        y = sbt.sparse_tensor(features, make(listed()[:5]), **GRID, capacity=0).features
    assert y.shape == (0, 2)
    assert_same(tape.gradient(y, features).numpy(), np.zeros((5, 2), np.float32))


def test_sites_are_found_once(tf, sbt, monkeypatch):
    """Also where the features' gradient is recorded."""
    found = []
    module = sys.modules["sbnet_cupy.submanifold.sparse_tensor"]
    reduce_rows = module.reduce_rows
    monkeypatch.setattr(module, "reduce_rows", lambda *a: found.append(a) or reduce_rows(*a))
    rows, features = tf.constant([[0, 1], [0, 4], [0, 1]]), tf.ones((3, 2))
    with tf.GradientTape() as tape:
        tape.watch(features)
        x = sbt.sparse_tensor(features, rows, spatial_shape=8, mode="mean")
    assert len(found) == 1
    assert tape.gradient(x.features, features).numpy().tolist() == [[0.5, 0.5], [1, 1], [0.5, 0.5]]


def test_a_relu_is_differentiated_by_its_result(tf, sbt, monkeypatch):
    """No product is computed again."""
    from sbnet_cupy.submanifold import site_conv_grad

    monkeypatch.setattr(site_conv_grad, "sums", None)
    rows = tf.constant([[0, 1], [0, 2], [0, 5]])
    x = sbt.sparse_tensor(tf.constant([[1.0], [-3.0], [2.0]]), rows, spatial_shape=8)
    w = tf.ones((3, 1, 1))
    with tf.GradientTape() as tape:
        tape.watch(w)
        y = sbt.submanifold_conv(x, w, activation="relu").features
    assert y.numpy().ravel().tolist() == [0, 0, 2]
    assert tape.gradient(y, w).numpy().ravel().tolist() == [0, 2, 0]
