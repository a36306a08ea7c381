"""Lists of sites in JAX: the package's rows, maps and whole grids, inside jit."""

import doctest
import functools
import importlib

import numpy as np
import pytest

import sbnet_cupy as sb
from support.adapter_cases import normal
from support.assertions import assert_close, assert_same, to_numpy
from support.exhaustive import thinned_product
from support.jax_site_cases import BATCH, SHAPE, SPARE, listed, same_sites, tensors

MODULES = ("sites", "submanifold", "site_pool", "stack_pool", "voxelize")


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(sbj, name):
    module = importlib.import_module(f"sbnet_cupy.jax.{name}")
    runner, examples = doctest.DocTestRunner(), 0
    for test in doctest.DocTestFinder(exclude_empty=True).find(module, globs=vars(sbj).copy()):
        examples += len(test.examples)
        runner.run(test)
    assert examples and not runner.summarize().failed


@pytest.mark.parametrize(
    ("mode", "order"),
    [("first", "leaf"), ("last", "raster"), ("sum", "raster"), ("mean", "leaf")],
)
def test_sites_and_their_features(sbj, place, jax, mode, order):
    rows = listed(1, repeats=True)
    features = normal(len(rows), 4)
    grid = {"spatial_shape": SHAPE, "batch_size": BATCH, "mode": mode, "order": order}
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
    made = sbj.kernel_map(short, 2, stride=2, capacity=count).target
    for later in (made, short.select(short.valid(), capacity=count)[0]):
        with pytest.raises(sb.CapacityError, match="got less for a list"):
            later.check()


@pytest.mark.parametrize("mode", ["unique", "last", "sum", "mean"])
def test_gradients_without_room_for_sites_are_0(sbj, place, jax, mode):
    rows, features = place.make(listed(1)), place.make(normal(len(listed(1)), 2))

    def loss(features):
        grid = {"spatial_shape": SHAPE, "batch_size": BATCH, "mode": mode}
        x = sbj.sparse_tensor(features, rows, **grid, capacity=0)
        assert x.features.shape == (0, 2)
        return x.features.sum()

    for gradient in (jax.grad(loss), jax.jit(jax.grad(loss))):
        found = to_numpy(gradient(features))
        assert found.shape == features.shape and not found.any()


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
    with pytest.raises(ValueError, match="order must be 'leaf'"):
        make(place.make(rows), order="Morton")
    features = place.make(np.ones((3, 2), np.float32))
    with pytest.raises(sb.ShapeError, match="features must have a row for each of the 4 rows"):
        sbj.sparse_tensor(features, place.make(rows), spatial_shape=10, batch_size=1)


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
    short = jax.jit(functools.partial(find, sbj, capacity=max(count - 1, 0)))(x.coordinates)
    assert short.target.overflowed != submanifold


@pytest.mark.parametrize("given", [
    {"kernel_size": 1, "stride": 4, "onto": True}, {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": 2, "stride": 4, "transposed": True}, {"kernel_size": 2, "padding": 3},
], ids=str)  # fmt: skip
def test_places_past_32_bits_are_none(sbj, place, given):
    """And do not wrap around to where there are sites; new sites past all keys are flagged."""
    rows = np.array([[0, 0], [0, 2**30], [0, 2**30 + 1], [0, 2**31 - 1]], np.int32)
    made = []
    for core, asarray in ((sb, np.asarray), (sbj, place.make)):
        sites, _ = core.coordinate_map(asarray(rows), batch_size=1, capacity=6)
        options = given | ({"onto": sites} if "onto" in given else {"capacity": 9})
        made.append(core.kernel_map(sites, **options))
    expected, found = made
    assert_same(to_numpy(found.rows), expected.rows)
    for name in ("indices", "count", "status"):
        assert_same(*(to_numpy(getattr(one.target, name)) for one in (found, expected)))


def test_room_for_new_sites_of_far_taps(sbj, place):
    """There is room for one at each tap by default."""
    sites, _ = sbj.coordinate_map(place.make(np.array([[0, 900]], np.int32)), batch_size=1)
    made = sbj.kernel_map(sites, 3, stride=2, dilation=450).target
    assert_same(to_numpy(made.indices), np.array([[0, 0], [0, 225], [0, 450]], np.int32))
    made = sbj.kernel_map(sites, 3, stride=2, dilation=75).target
    assert_same(to_numpy(made.indices), np.array([[0, 375], [0, 450]], np.int32))


def test_maps_of_offsets(sbj, place, jax):
    exact, x = tensors(sbj, place)
    offsets = [(0, 0, 0), (-1, 2, 0), (0, 0, 3)]
    expected = sb.kernel_map(exact.coordinates, offsets=offsets)
    made = jax.jit(functools.partial(sbj.kernel_map, offsets=offsets))(x.coordinates)
    count = exact.coordinates.number()
    assert_same(to_numpy(made.rows)[:, :count], expected.rows)
    assert (to_numpy(made.rows)[:, count:] == -1).all() and made.kernel_size == (3,)
    with pytest.raises(ValueError, match="offsets must not be given with kernel_size"):
        sbj.kernel_map(x.coordinates, 3, offsets=offsets)
    with pytest.raises(ValueError, match="output_padding must be 0 unless"):
        sbj.kernel_map(x.coordinates, 3, output_padding=1)


@pytest.mark.parametrize("data_format", ["channels_last", "channels_first"])
def test_whole_grids_and_back(sbj, place, jax, data_format):
    exact, x = tensors(sbj, place)
    given = {"data_format": data_format}
    for shape in (None, (4, 9, 12)):
        options = given | {"spatial_shape": shape, "fill": -2.0}
        expected = sb.sparse_to_dense(exact, **options)
        found = jax.jit(functools.partial(sbj.sparse_to_dense, **options))(x)
        assert_same(to_numpy(found), expected)
        found = jax.jit(lambda x, options=options: x.dense(**options))(x)
        assert_same(to_numpy(found), expected)
    grid = sb.sparse_to_dense(exact, **given)
    for options in ({}, {"tol": 0.5}, {"mask": normal(BATCH, *SHAPE, seed=3) > 0.8}):
        expected = sb.dense_to_sparse(grid, **given, **options)
        count = expected.coordinates.number()
        mask = {name: place.make(value) for name, value in options.items() if name == "mask"}
        fixed = functools.partial(sbj.dense_to_sparse, **given, capacity=count + SPARE)
        fixed = functools.partial(fixed, **{k: v for k, v in options.items() if k != "mask"})
        found = jax.jit(fixed)(place.make(grid), **mask)
        same_sites(found.coordinates, expected.coordinates)
        assert_same(to_numpy(found.features)[:count], expected.features)
        assert not to_numpy(found.features)[count:].any()
        grad = normal(count + SPARE, 3, seed=6)
        loss = lambda x, grad=grad, f=fixed, m=mask: (f(x, **m).features * grad).sum()  # noqa: E731
        dx = jax.jit(jax.grad(loss))(place.make(grid))
        assert_same(to_numpy(dx), sb.dense_to_sparse_grad(grad[:count], expected, **given))
    assert sbj.dense_to_sparse(place.make(grid), **given).coordinates.capacity == grid.size // 3
    short = sbj.dense_to_sparse(place.make(grid), **given, capacity=3)
    assert short.coordinates.overflowed
    with pytest.raises(sb.ShapeError, match="mask"):
        sbj.dense_to_sparse(place.make(grid), mask=place.make(np.ones(3, bool)))
    with pytest.raises(ValueError, match="data_format"):
        sbj.sparse_to_dense(x, data_format="NCHW")


@pytest.mark.parametrize("capacity", [None, 7, 0])
def test_selected_sites(sbj, place, jax, capacity):
    """Those of the core, also where more are selected than there are rows for."""
    exact, x = tensors(sbj, place)
    chosen = np.arange(x.coordinates.capacity) % 3 == 1  # of rows that hold no site, too
    expected, wanted = exact.coordinates.select(chosen[: len(exact.features)])
    select = jax.jit(lambda sites, mask: sites.select(mask, capacity=capacity))
    found, rows = select(x.coordinates, place.make(chosen))
    n = min(expected.number(), found.capacity)
    assert found.capacity == (x.coordinates.capacity if capacity is None else capacity)
    assert found.number() == expected.number() and found.overflowed == (capacity is not None)
    for actual, whole in ((found.indices, expected.indices), (rows, wanted)):
        assert_same(to_numpy(actual)[:n], to_numpy(whole)[:n])
        assert (to_numpy(actual)[n:] == -1).all()
    w = place.make(normal(3, 3, 3, 3, 4))
    if capacity is None:
        y = jax.jit(sbj.submanifold_conv)(sb.SparseTensor(x.features[rows], found), w)
        features, weights = (a.astype(np.float64) for a in (exact.features[wanted], to_numpy(w)))
        whole, size = (
            sb.submanifold_conv(sb.SparseTensor(part(features), expected), part(weights)).features
            for part in (np.positive, np.abs)
        )
        assert_close(to_numpy(y.features)[:n], whole, terms=81, dtype="f4", magnitude=size)
    with pytest.raises(sb.ShapeError, match="mask must have shape"):
        x.coordinates.select(place.make(chosen[1:]))
    with pytest.raises(sb.DTypeError, match="may be indices of rows; pass mask != 0"):
        select(x.coordinates, place.make(chosen.astype(np.int32)))


def test_numbers_that_are_none(sbj, place, jax):
    _, x = tensors(sbj, place)
    window = sbj.kernel_map(x, 3, onto=x)
    for value in ("a", None, 1j, [1.0], place.make(np.ones(2))):
        with pytest.raises((sb.DTypeError, sb.ShapeError), match="fill must"):
            sbj.sparse_to_dense(x, fill=value)
        with pytest.raises((sb.DTypeError, sb.ShapeError), match="fill must"):
            sbj.sparse_unfold(x.features, window, fill=value)
        with pytest.raises((sb.DTypeError, sb.ShapeError), match="tol must"):
            sbj.dense_to_sparse(x.dense(), tol=value)
    with pytest.raises(sb.DTypeError, match="floor must be a number"):
        sbj.sparse_max_pool(x, 2, floor="a")
    with pytest.raises(ValueError, match="tol must not be NaN"):
        sbj.dense_to_sparse(x.dense(), tol=float("nan"))
    dense = jax.jit(lambda x, number: sbj.sparse_to_dense(x, fill=number))
    assert_same(dense(x, 2.0), sbj.sparse_to_dense(x, fill=2))
    listed = jax.jit(lambda image, number: sbj.dense_to_sparse(image, tol=number).features)
    assert_same(listed(x.dense(), 0.5), sbj.dense_to_sparse(x.dense(), tol=0.5).features)


def test_what_cannot_be_read_is_printed_all_the_same(sbj, place, jax):
    """Tracers, the stand-ins of tree.map, mapped lists and donated arrays."""
    _, x = tensors(sbj, place)
    window, n, channels = sbj.kernel_map(x, 3, onto=x), *x.features.shape
    for value in (x, x.coordinates, window):
        texts = []
        jax.jit(lambda value, texts=texts: texts.append(repr(value)))(value)
        makers = (lambda a: a.shape, lambda a: None, lambda a: a[None])
        texts += [repr(jax.tree.map(make, value)) for make in makers]
        assert all("not read" in text for text in texts), texts
        assert "not read" not in repr(value)
    mapped = jax.vmap(lambda features: x.replace(features))(x.features[None])
    assert repr(mapped).startswith(f"SparseTensor: features (1, {n}, {channels}), coordinates")
    blocks = sbj.reduce_mask(jax.numpy.ones((1, 4, 4)), (2, 2), bsize=2)
    for value in (x, x.coordinates, window, blocks):
        copy = jax.tree.map(lambda a: a + 0, value)
        for array in jax.tree.leaves(copy):
            array.delete()
        assert "not read" in repr(copy)


def test_valid_rows_inside_jit(sbj, place, jax):
    """So that a loss can leave out the rows past the count."""
    _, x = tensors(sbj, place)
    n = x.coordinates.number()
    expected = [True] * n + [False] * (x.coordinates.capacity - n)
    for function in (jax.jit, jax.vmap):
        sites = x.coordinates
        if function is jax.vmap:
            sites = jax.tree.map(lambda array: array[None], sites)
        valid = function(lambda sites: sites.valid())(sites)
        assert to_numpy(valid).ravel().tolist() == x.coordinates.valid().tolist() == expected


def test_a_fill_that_labels_cannot_hold(sbj, place):
    """It was wrapped around, in silence."""
    rows = place.make(np.array([[0, 1]], np.int32))
    sites, _ = sbj.coordinate_map(rows, spatial_shape=2, batch_size=1)
    x = sb.SparseTensor(place.make(np.ones((1, 1), np.uint8)), sites)
    with pytest.raises(sb.DTypeError, match="fill must be an integer that uint8 holds"):
        sbj.sparse_to_dense(x, fill=-1)
    assert to_numpy(sbj.sparse_to_dense(x, fill=255)).ravel().tolist() == [255, 1]


def test_sizes_that_are_symbols_are_refused_by_name(sbj, jax):
    """As in jax.export, which gives a function for arrays of any length."""
    export = pytest.importorskip("jax.export")
    (n,) = export.symbolic_shape("n")

    def array(*shape, dtype="float32"):
        return jax.ShapeDtypeStruct(shape, dtype)

    grid = {"spatial_shape": 4, "batch_size": 2}
    rows, voxels = array(n, 2, dtype="int32"), {"ranges": [(0, 4)], "voxel_size": 1}
    for name, call, given in [
        ("indices", lambda rows: sbj.coordinate_map(rows, **grid), [rows]),
        ("features", lambda f, rows: sbj.sparse_tensor(f, rows, **grid), [array(n, 3), rows]),
        ("points", lambda points: sbj.voxelize(points, **voxels), [array(n, 3)]),
        ("x", lambda x: sbj.dense_to_sparse(x, capacity=3), [array(n, 4, 2)]),
    ]:
        with pytest.raises(sb.ShapeError, match=f"^{name} must have sizes that are known while"):
            export.export(jax.jit(call))(*given)
