"""Batch norm over sites in JAX: its formula and gradients, inside jit, grad and vmap."""

import functools

import numpy as np
import pytest

import sbnet_cupy as sb
from support.adapter_cases import BFLOAT16, check_examples, normal
from support.assertions import assert_same, to_numpy
from support.exhaustive import thinned_pairs
from support.site_norm_cases import (
    CHANNELS,
    EPS,
    GRID,
    MOMENTUM,
    NAMES,
    ROWS,
    SITES,
    SPARE,
    assert_near,
    batch_norm,
    features_of,
    tables_of,
)

OPTIONS = {"momentum": MOMENTUM, "eps": EPS}


def sparse(sbj, make, features, rows=ROWS):
    """Return features, given for rows to spare too, at the sites."""
    first = sbj.sparse_tensor(make(features[: len(rows)]), make(rows), **GRID)
    return first.replace(make(features))


def test_examples_run(sbj):
    check_examples("sbnet_cupy.jax.norms")


@pytest.mark.parametrize(
    ("dtype", "training", "activation"),
    thinned_pairs(8, ["f2", BFLOAT16, "f4", "f8"], [True, False], [None, "relu", "silu", "gelu"]),
)
def test_formula_and_gradients(sbj, place, jax, dtype, training, activation):
    """Rows past the count hold NaN."""
    wide = "f8" if dtype == "f8" else "f4"
    features, tables = features_of(dtype), tables_of(wide)
    grad = np.round(4 * normal(SITES + SPARE, CHANNELS, seed=3))
    with jax.enable_x64(dtype == "f8"):
        x = sparse(sbj, place.make, features)
        run = functools.partial(
            sbj.masked_batch_norm, training=training, activation=activation, **OPTIONS
        )

        @jax.jit
        def both(features, running, learnt):
            def loss(features, learnt):
                y, *new = run(x.replace(features), *running, *learnt)
                return (y.features.astype(wide) * grad).sum(), (y, new)

            gradients, results = jax.grad(loss, argnums=(0, 1), has_aux=True)(features, learnt)
            return *results, (gradients[0], *gradients[1])

        given = [place.make(tables[name]) for name in NAMES]
        y, running, gradients = both(x.features, given[:2], given[2:])
    wanted = batch_norm(features, tables, training, activation, grad)
    assert y.features.dtype == np.dtype(dtype)
    assert not to_numpy(y.features)[SITES:].any()
    assert_near(y.features[:SITES], wanted[0], wide)
    for found, expected in zip(running, wanted[1], strict=True):
        assert_near(found, expected, wide)
    assert not to_numpy(gradients[0])[SITES:].any()
    gradients = (gradients[0][:SITES], *gradients[1:])
    for found, expected in zip(gradients, wanted[2], strict=True):
        assert_near(found, expected, wide)


@pytest.mark.parametrize("training", [True, False])
def test_gradients_of_gradients(sbj, jax, training):
    """With respect to running statistics too, in evaluation; and in forward mode."""
    from jax.test_util import check_grads

    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        x = sparse(sbj, jax.numpy.asarray, features_of("f8"))
        tables = [jax.numpy.asarray(table) for table in tables_of("f8").values()]

        @jax.jit
        def smooth(features, *tables):
            padded = x.features.at[:SITES].set(features)
            call = {"training": training, "activation": "silu", **OPTIONS}
            return sbj.masked_batch_norm(x.replace(padded), *tables, **call)[0].features

        check_grads(smooth, (x.features[:SITES], *tables), 2)


def test_statistics_have_no_gradient(sbj, place, jax):
    x = sparse(sbj, place.make, features_of("f4"))

    def total(features, running):
        _, *new = sbj.masked_batch_norm(x.replace(features), *running, training=True)
        return sum(table.sum() for table in new)

    tables = [place.make(table) for table in tables_of().values()][:2]
    for found in jax.tree.leaves(jax.grad(total, argnums=(0, 1))(x.features, tables)):
        assert not to_numpy(found).any()


def test_evaluation_leaves_running_statistics(sbj, place):
    x = sparse(sbj, place.make, features_of("f4"))
    tables = {name: place.make(table) for name, table in tables_of().items()}
    _, mean, variance = sbj.masked_batch_norm(x, **tables)
    assert mean is tables["running_mean"] and variance is tables["running_var"]


def test_without_running_statistics(sbj, place):
    """Those of the sites are taken, in evaluation too."""
    features = features_of("f4")
    x = sparse(sbj, place.make, features)
    tables = tables_of() | {"weight": np.ones(CHANNELS), "bias": np.zeros(CHANNELS)}
    expected, _ = batch_norm(features, tables, True, None)
    for training in (False, True):
        y, *none = sbj.masked_batch_norm(x, eps=EPS, training=training)
        assert none == [None, None]
        assert_near(y.features[:SITES], expected, "f4")


@pytest.mark.parametrize("dtype", ["f2", BFLOAT16, "f4"])
def test_dtype_of_running_statistics(sbj, place, dtype):
    """They keep it; the share is taken in float32."""
    features, tables = features_of("f4"), tables_of(dtype)
    x = sparse(sbj, place.make, features)
    given = map(place.make, tables.values())
    _, *found = sbj.masked_batch_norm(x, *given, training=True, **OPTIONS)
    for table, expected in zip(found, batch_norm(features, tables, True, None)[1], strict=True):
        assert table.dtype == np.dtype(dtype)
        assert_near(table, expected, "f4")


@pytest.mark.parametrize("eps", [0.0, 1e-5])
@pytest.mark.parametrize("capacity", [0, SPARE])
def test_no_sites_at_all(sbj, place, jax, capacity, eps):
    """Rows of NaN alone: the result and gradients are 0, running statistics stay."""
    rows = place.make(np.zeros((0, 2), np.int32))
    features = place.make(np.zeros((0, CHANNELS), np.float32))
    x = sbj.sparse_tensor(features, rows, spatial_shape=8, batch_size=1, capacity=capacity)
    features = place.make(np.full((capacity, CHANNELS), np.nan, np.float32))
    tables = [place.make(table) for table in tables_of().values()]
    tables[0] = tables[0].at[0].set(np.inf)

    @jax.jit
    def both(features, *tables):
        def loss(features, *learnt):
            call = {"training": True, "eps": eps, "activation": "gelu"}
            y, *new = sbj.masked_batch_norm(x.replace(features), *tables[:2], *learnt, **call)
            return y.features.sum(), (y.features, new)

        return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(features, *tables[2:])

    gradients, (y, new) = both(features, *tables)
    for found in (y, *gradients):
        assert not to_numpy(found).any()
    for found, kept in zip(new, tables, strict=False):
        assert_same(to_numpy(found), to_numpy(kept))


def test_one_site(sbj, place):
    """Its variance is 0, the running one moves towards 0."""
    x = sparse(sbj, place.make, features_of("f4"), ROWS[:1])
    tables = tables_of()
    y, mean, variance = sbj.masked_batch_norm(
        x, *map(place.make, tables.values()), training=True, **OPTIONS
    )
    features = to_numpy(x.features)[0]
    assert_near(y.features[0], tables["bias"], "f4")
    assert_near(mean, 0.75 * tables["running_mean"] + 0.25 * features, "f4")
    assert_near(variance, 0.75 * tables["running_var"], "f4")


def test_mapped(sbj, place, jax):
    """Members with numbers of sites of their own, and the same running statistics."""
    values = np.stack([features_of("f4"), 3 * features_of("f4")])
    numbers = place.make(np.array([[SITES], [4]], np.int32))
    x = sparse(sbj, place.make, values[0])
    tables = [place.make(table) for table in tables_of().values()]

    def one(features, count):
        sites = x.coordinates
        sites = sb.CoordinateMap(sites.indices, count, sites.spatial_shape, sites.batch_size)
        padded = sb.SparseTensor(features, sites)
        y, *new = sbj.masked_batch_norm(padded, *tables, training=True, activation="relu")
        return y.features, *new

    given = place.make(values), numbers
    together = jax.jit(jax.vmap(one))(*given)
    for member in range(2):
        alone = one(*(array[member] for array in given))
        for found, expected in zip(together, alone, strict=True):
            assert_near(found[member], to_numpy(expected).astype("f8"), "f4")
    assert not to_numpy(together[0])[1, 4:].any()


def test_momentum_may_be_traced(sbj, place, jax):
    x = sparse(sbj, place.make, features_of("f4"))
    tables = [place.make(table) for table in tables_of().values()]

    @jax.jit
    def run(momentum):
        return sbj.masked_batch_norm(x, *tables, training=True, momentum=momentum)[1:]

    for share in (0.25, np.float32(0.25), place.make(np.float16(0.25))):
        expected = sbj.masked_batch_norm(x, *tables, training=True, momentum=share)[1:]
        for found, wanted in zip(run(share), expected, strict=True):
            assert_near(found, to_numpy(wanted).astype("f8"), "f4")


def test_what_it_refuses(sbj, place, jax):
    x = sparse(sbj, place.make, features_of("f4"))
    run = functools.partial(sbj.masked_batch_norm, x)
    three, four = (place.make(np.ones(n, np.float32)) for n in (3, 4))
    calls = [
        ((x.features,), {}, sb.DTypeError, "x must be a SparseTensor"),
        ((x.replace(x.features.astype(int)),), {}, sb.DTypeError, "features must be float16"),
        ((x.replace(features_of("f4")),), {}, sb.DeviceError, "features must be a JAX array"),
        ((x, four, three), {}, sb.ShapeError, r"running_mean must have shape \(3,\), got \(4,\)"),
        ((x,), {"weight": three[None]}, sb.ShapeError, r"weight must have shape \(3,\)"),
        ((x, three), {}, ValueError, "running_mean and running_var must be given together"),
        ((x,), {"bias": [1.0] * 3}, sb.DTypeError, "bias must be a JAX array, got list"),
        ((x,), {"bias": np.ones(3)}, sb.DeviceError, "bias must be a JAX array, got one of numpy"),
        ((x,), {"bias": three.astype(int)}, sb.DTypeError, "bias must have a float dtype"),
        ((x,), {"activation": "relu6"}, ValueError, "activation must be None, 'relu'"),
        ((x,), {"eps": None}, sb.DTypeError, "eps must be a number"),
        ((x,), {"eps": float("nan")}, ValueError, "eps must not be NaN"),
        ((x,), {"momentum": "a"}, sb.DTypeError, "momentum must be a number"),
        ((x,), {"momentum": float("nan")}, ValueError, "momentum must not be NaN"),
        ((x,), {"momentum": three}, sb.ShapeError, "momentum must have 0 dimensions"),
    ]
    for args, options, error, words in calls:
        with pytest.raises(error, match=words):
            sbj.masked_batch_norm(*args, **options)
    native = sb.sparse_tensor(features_of("f4")[:SITES], ROWS, **GRID)
    with pytest.raises(sb.DeviceError, match=r"coordinates\.indices must be a JAX array"):
        sbj.masked_batch_norm(sb.SparseTensor(x.features, native.coordinates))
    with pytest.raises(sb.DTypeError, match="training must be a bool that is known while JAX"):
        jax.jit(lambda training: run(training=training))(True)
    with pytest.raises(sb.DTypeError, match="eps must be a number that is known while"):
        jax.jit(lambda eps: run(eps=eps))(0.1)
