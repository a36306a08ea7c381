"""Features at sites in JAX: the package's sites and maps, results and gradients, inside jit."""

import doctest
import functools
import importlib

import numpy as np
import pytest

import sbnet_cupy as sb
from support.adapter_cases import normal, same
from support.assertions import assert_close, assert_same, to_numpy
from support.exhaustive import thinned, thinned_product

SHAPE, BATCH, SPARE = (9, 8, 7), 3, 5


MODULES = ("sites", "submanifold", "site_pool", "stack", "stack_pool")


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(sbj, name):
    module = importlib.import_module(f"sbnet_cupy.jax.{name}")
    runner, examples = doctest.DocTestRunner(), 0
    for test in doctest.DocTestFinder(exclude_empty=True).find(module, globs=vars(sbj).copy()):
        examples += len(test.examples)
        runner.run(test)
    assert examples and not runner.summarize().failed


def listed(seed=0, repeats=False):
    """Return rows of coordinates; with repeats several are the same."""
    rng = np.random.default_rng([4, seed])
    rows = np.argwhere(rng.random((BATCH, *SHAPE)) < 0.06)
    rows = rows[rows[:, 0] != 1]  # an empty sample
    chosen = rng.integers(0, len(rows), 2 * len(rows)) if repeats else rng.permutation(len(rows))
    return rows[chosen].astype(np.int32)


def tensors(sbj, place, channels=3, dtype=np.float32):
    """Return the same features at the same sites, exact and with rows to spare."""
    rows = listed()
    grid = {"spatial_shape": SHAPE, "batch_size": BATCH}
    features = normal(len(rows), channels, dtype=dtype)
    exact = sb.sparse_tensor(features, rows, **grid)
    make = functools.partial(sbj.sparse_tensor, **grid, capacity=len(rows) + SPARE)
    return exact, make(place.make(features), place.make(rows))


def same_sites(found, expected):
    """Assert that the first rows are those of the exact list, and the others none."""
    count = expected.number()
    assert found.number() == count
    assert_same(to_numpy(found.indices)[:count], to_numpy(expected.indices))
    assert (to_numpy(found.indices)[count:] == -1).all()
    assert (found.spatial_shape, found.batch_size) == (expected.spatial_shape, expected.batch_size)


@pytest.mark.parametrize("mode", ["first", "last", "sum", "mean"])
def test_sites_and_their_features(sbj, place, jax, mode):
    rows = listed(1, repeats=True)
    features = normal(len(rows), 4)
    grid = {"spatial_shape": SHAPE, "batch_size": BATCH, "mode": mode}
    expected = sb.sparse_tensor(features, rows, **grid)
    count = expected.coordinates.number()
    make = jax.jit(functools.partial(sbj.sparse_tensor, **grid, capacity=count + SPARE))
    x = make(place.make(features), place.make(rows))
    same_sites(x.coordinates, expected.coordinates)
    assert x.coordinates.check() is x.coordinates
    found = to_numpy(x.features)
    assert not found[count:].any()
    if mode in ("first", "last"):
        assert_same(found[:count], expected.features)
    else:
        most = np.bincount(to_numpy(sb.coordinate_map(rows, **grid)[1])).max()
        size = sb.sparse_tensor(abs(features), rows, **grid).features.astype(np.float64)
        wide = expected.features.astype(np.float64)
        # both sides are such sums
        assert_close(found[:count], wide, terms=2 * int(most), dtype="f4", magnitude=size)
    _, inverse = sbj.coordinate_map(place.make(rows), **grid)
    assert_same(to_numpy(inverse), sb.coordinate_map(rows, **grid)[1])
    short, inverse = sbj.coordinate_map(place.make(rows), **grid, capacity=count - 1)
    assert short.overflowed and int(to_numpy(inverse).min()) == -1
    with pytest.raises(sb.CapacityError, match="larger capacity"):
        short.check()


def test_what_does_not_belong_is_flagged(sbj, place):
    rows = np.array([[0, 1], [0, 5], [0, 1], [0, 9]], np.int32)
    make = functools.partial(sbj.coordinate_map, spatial_shape=8, batch_size=1)
    with pytest.raises(sb.CapacityError, match="inside a grid"):
        make(place.make(rows))[0].check()
    with pytest.raises(ValueError, match="distinct"):
        make(place.make(rows[:3]))[0].check()
    with pytest.raises(sb.ShapeError, match="indices"):
        make(place.make(rows[0]))
    with pytest.raises(sb.DeviceError, match="indices must be a JAX array"):
        make(rows)


def test_no_coordinate_wraps_around(sbj, jax):
    rows = np.array([[0, 1], [0, 2**32 + 1], [0, -(2**32) + 2]], np.int64)
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        sites, inverse = sbj.coordinate_map(jax.numpy.asarray(rows), spatial_shape=8, batch_size=1)
        assert sites.number() == 1 and to_numpy(inverse).tolist() == [0, -1, -1]
        with pytest.raises(sb.CapacityError, match="inside a grid"):
            sites.check()


WINDOWS = [
    {"kernel_size": 3},
    {"kernel_size": (2, 3, 1), "dilation": (2, 1, 1)},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": 2, "stride": (2, 1, 2)},
    {"kernel_size": 2, "stride": 2, "dilation": 2, "padding": (1, 0, 2)},
]


@pytest.mark.parametrize(("transposed", "window"), thinned_product(3, [False, True], WINDOWS))
def test_maps(sbj, place, jax, window, transposed):
    exact, x = tensors(sbj, place)
    submanifold = "stride" not in window and not transposed
    given = window | {"transposed": transposed}

    def find(core, sites, capacity=None):
        onto = sites if submanifold else None
        return core.kernel_map(sites, **given, onto=onto, capacity=capacity)

    expected = find(sb, exact.coordinates)
    made = jax.jit(functools.partial(find, sbj))(x.coordinates)
    same_sites(made.target, expected.target)
    count = expected.target.number()
    assert_same(to_numpy(made.rows)[:, :count], expected.rows)
    assert (to_numpy(made.rows)[:, count:] == -1).all()
    short = find(sbj, x.coordinates, max(count - 1, 0))
    assert short.target.overflowed != submanifold


CALLS = {
    "submanifold": ("submanifold_conv", {"dilation": (1, 2, 1)}, (3, 3, 3)),
    "grouped": ("submanifold_conv", {"groups": 3}, (3, 1, 2)),
    "strided": ("strided_conv", {"stride": 2, "padding": 1}, (3, 3, 3)),
    "transposed": ("transposed_conv", {"stride": (2, 1, 1)}, (2, 2, 1)),
}


@pytest.mark.parametrize(
    ("activation", "dtype", "name"),
    thinned_product(3, [None, "silu"], [np.float32, np.float16], CALLS),
)
def test_convolutions_and_their_gradients(sbj, place, jax, name, dtype, activation):
    exact, x = tensors(sbj, place, dtype=dtype)
    function, options, kernel = CALLS[name]
    groups = options.get("groups", 1)
    w, bias = normal(*kernel, 3 // groups, 6, seed=1, dtype=dtype), normal(6, seed=2)
    expected = getattr(sb, function)(exact, w, **options, bias=bias, activation=activation)
    count = expected.coordinates.number()
    poisoned = x.replace(x.features.at[len(exact.features) :].set(np.nan))
    run = functools.partial(getattr(sbj, function), **options, activation=activation)
    y = jax.jit(run)(poisoned, place.make(w), bias=place.make(bias))
    same_sites(y.coordinates, expected.coordinates)
    assert to_numpy(y.features).dtype == dtype
    assert not to_numpy(y.features)[count:].any()
    # Sums of float32 on both sides; an activation has a slope of at most 1.1, and an error of its
    # own of a few units of its argument.
    terms, wide = 4 * (w[..., 0].size + 8), expected.features.astype(np.float64)
    size = getattr(sb, function)(
        exact.replace(abs(exact.features).astype(np.float64)), abs(w).astype(np.float64), **options,
        bias=abs(bias).astype(np.float64),
    ).features  # fmt: skip
    rounding = dtype if dtype == np.float16 else "f4"
    terms = 1 if dtype == np.float16 else terms  # both are rounded to half floats once
    assert_close(to_numpy(y.features)[:count], wide, terms=terms, dtype=rounding, magnitude=size)

    if activation is not None or dtype == np.float16:
        return
    v = normal(*y.features.shape, seed=5)

    def linear(features, w, bias):
        return (run(x.replace(features), w, bias=bias).features * v).sum()

    given = x.features, place.make(w), place.make(bias)
    dx, dw, dbias = jax.jit(jax.grad(linear, argnums=(0, 1, 2)))(*given)
    window = {k: o for k, o in options.items() if k in ("stride", "padding", "dilation")}
    onto = exact.coordinates if name in ("submanifold", "grouped") else None
    made = sb.kernel_map(
        exact.coordinates, kernel, **window, onto=onto, transposed=name == "transposed"
    )
    tables = {"groups": groups, "bias": bias}
    call = v[:count], exact.features, w, made
    wanted = sb.site_conv_grad(*call, **tables)
    largest = sb.site_conv_grad(*(abs(a) if hasattr(a, "dtype") else a for a in call), **tables)
    rows = len(exact.features)
    taps = w[..., 0, :].size * 6
    pairs = [(dx[:rows], "features", taps), (dw, "w", count), (dbias, "bias", count)]
    for actual, field, number in pairs:
        size = getattr(largest, field).astype(np.float64)
        expected = getattr(wanted, field).astype(np.float64)
        assert_close(to_numpy(actual), expected, terms=2 * number, dtype="f4", magnitude=size)
    assert not to_numpy(dx)[rows:].any()


POOLS = {
    "max": ("sparse_max_pool", {}),
    "max, floor": ("sparse_max_pool", {"stride": 1, "floor": 0.25, "padding": 1}),
    "average": ("sparse_avg_pool", {}),
    "average of active": ("sparse_avg_pool", {"stride": (2, 1, 2), "count": "active"}),
    "largest of samples": ("global_pool", {"reduce": "max"}),
    "mean of samples": ("global_pool", {"reduce": "mean"}),
    "sum of samples": ("global_pool", {"reduce": "sum"}),
}


@pytest.mark.parametrize("name", thinned(list(POOLS), 2))
def test_pools_and_their_gradients(sbj, place, jax, name):
    """Whole numbers, of which many are equal: sums are exact."""
    exact, x = tensors(sbj, place)
    whole = np.round(2 * exact.features)
    exact = exact.replace(whole)
    features = place.make(np.pad(whole, ((0, SPARE), (0, 0)), constant_values=np.nan))
    function, options = POOLS[name]
    given = options if function == "global_pool" else options | {"kernel_size": (2, 3, 2)}
    expected = getattr(sb, function)(exact, **given)
    run = functools.partial(getattr(sbj, function), **given)
    found = jax.jit(run)(x.replace(features))
    if function != "global_pool":
        same_sites(found.coordinates, expected.coordinates)
        count = len(expected.features)
        assert not to_numpy(found.features)[count:].any()
        found, expected = found.features[:count], expected.features
    one_division = 0 if "max" in name or "sum" in name or "largest" in name else 1
    size = abs(expected).astype(np.float64)
    assert_close(to_numpy(found), expected.astype(np.float64), terms=one_division, dtype="f4",
                 magnitude=size)  # fmt: skip

    grad = np.round(4 * normal(*expected.shape, seed=7))

    def loss(features):
        y = run(x.replace(features))
        y = y if function == "global_pool" else y.features[: len(grad)]
        return (y * grad).sum()

    dx = to_numpy(jax.jit(jax.grad(loss))(features))
    wanted = getattr(sb, f"{function}_grad")(grad, exact, **given)
    largest = getattr(sb, f"{function}_grad")(abs(grad), exact, **given)
    rows = len(wanted)
    assert not dx[rows:].any()
    assert_close(dx[:rows], wanted.astype(np.float64), terms=2 * 12, dtype="f4",
                 magnitude=abs(largest).astype(np.float64))  # fmt: skip


def test_largest_values_that_are_no_numbers(sbj, place):
    """NaN is larger than any number, as in the core."""
    rows = np.array([[0, 0], [0, 1], [0, 4], [1, 2]], np.int32)
    features = np.array([[1.0, np.nan], [np.nan, 2], [3, -np.inf], [-np.inf, 0]], np.float32)
    grid = {"spatial_shape": 6, "batch_size": 2}
    expected = sb.sparse_tensor(features, rows, **grid)
    x = sbj.sparse_tensor(place.make(features), place.make(rows), **grid)
    for pool in ("sparse_max_pool", "global_pool"):
        options = {"kernel_size": 2, "capacity": 3} if pool == "sparse_max_pool" else {}
        y, wanted = getattr(sbj, pool)(x, **options), getattr(sb, pool)(expected, **options)
        if options:
            y, wanted = y.features, wanted.features
        assert_same(to_numpy(y), to_numpy(wanted), allow_nan=True)


def test_there_and_back(sbj, place, jax):
    """A strided convolution, its inverse with a residual, and the whole grid, in one function."""
    exact, x = tensors(sbj, place)
    w = [normal(2, 2, 2, 3, 4, seed=1), normal(2, 2, 2, 4, 3, seed=2)]
    down = sb.strided_conv(exact, w[0], stride=2)
    expected = sb.inverse_conv(down, w[1], onto=exact, residual=exact)

    @jax.jit
    def network(x, first, second):
        down = sbj.strided_conv(x, first, stride=2, capacity=200)
        up = sbj.inverse_conv(down, second, onto=x, stride=2, residual=x)
        return up, sbj.sparse_to_dense(up)

    up, dense = network(x, *map(place.make, w))
    size = sb.inverse_conv(
        sb.strided_conv(exact.replace(abs(exact.features)), abs(w[0]), stride=2), abs(w[1]),
        onto=exact, residual=abs(exact.features),
    ).features.astype(np.float64)  # fmt: skip
    count = len(exact.features)
    wide = expected.features.astype(np.float64)
    assert_close(to_numpy(up.features)[:count], wide, terms=2 * 24 * 33, dtype="f4", magnitude=size)
    assert not to_numpy(up.features)[count:].any()
    cells = tuple(exact.indices.T)
    same(to_numpy(dense)[cells], to_numpy(up.features)[:count])
    assert (to_numpy(dense) != 0).any(-1).sum() <= count


def test_gradients_of_gradients(sbj, jax):
    from jax.test_util import check_grads

    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        rows = jax.numpy.asarray(listed())
        features = jax.numpy.asarray(normal(len(rows), 2, dtype=np.float64))
        w = jax.numpy.asarray(0.3 * normal(3, 3, 3, 2, 2, dtype=np.float64))

        def smooth(features, w):
            grid = {"spatial_shape": SHAPE, "batch_size": BATCH}
            x = sbj.sparse_tensor(features, rows, **grid)
            return sbj.submanifold_conv(x, w, activation="silu").features

        check_grads(jax.jit(smooth), (features, w), 2, modes=["rev"])


def test_what_it_refuses(sbj, place):
    exact, x = tensors(sbj, place)
    w = place.make(normal(3, 3, 3, 3, 4))
    with pytest.raises(sb.DTypeError, match="x must be a SparseTensor"):
        sbj.submanifold_conv(x.features, w)
    with pytest.raises(sb.DeviceError, match=r"coordinates\.indices must be a JAX array"):
        sbj.submanifold_conv(exact, w)
    with pytest.raises(sb.ShapeError, match="w must have shape"):
        sbj.submanifold_conv(x, w[:, :, :, :2])
    with pytest.raises(sb.ShapeError, match="stride"):
        sbj.strided_conv(x, w, stride=0)
    with pytest.raises(sb.DTypeError, match="kernel_map must be a KernelMap"):
        sbj.site_conv(x.features, w, None)


def test_mapped_features(sbj, place, jax):
    _, x = tensors(sbj, place)
    w = place.make(normal(3, 3, 3, 3, 4, seed=1))
    several = place.make(normal(2, *x.features.shape, seed=3))

    def convolve(features):
        return sbj.submanifold_conv(x.replace(features), w).features

    found = jax.vmap(convolve)(several)
    for features, y in zip(several, found, strict=True):
        expected = to_numpy(convolve(features)).astype(np.float64)
        size = to_numpy(sbj.submanifold_conv(x.replace(abs(features)), abs(w)).features)
        # both sides are such sums
        assert_close(to_numpy(y), expected, terms=2 * 81, dtype="f4",
                     magnitude=size.astype(np.float64))  # fmt: skip
