"""Convolutions at sites in JAX: the package's results and gradients, inside jit."""

import functools

import numpy as np
import pytest

import sbnet_cupy as sb
from support.adapter_cases import normal, same
from support.assertions import assert_close, assert_same, to_numpy
from support.exhaustive import thinned_pairs
from support.jax_site_cases import BATCH, SHAPE, SPARE, listed, same_sites, tensors

CALLS = {
    "submanifold": ("submanifold_conv", {"dilation": (1, 2, 1)}, (3, 3, 3)),
    "grouped": ("submanifold_conv", {"groups": 3}, (3, 1, 2)),
    "strided": ("strided_conv", {"stride": 2, "padding": 1}, (3, 3, 3)),
    "transposed": ("transposed_conv", {"stride": (2, 1, 1), "output_padding": 1}, (2, 2, 1)),
}


@pytest.mark.parametrize(
    ("activation", "dtype", "name"),
    thinned_pairs(6, [None, "silu"], [np.float32, np.float16], list(CALLS)),
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
    given = place.make(w), place.make(bias)
    with_gradient = activation is None and dtype == np.float32
    v = normal(expected.coordinates.number() + SPARE, 6, seed=5)

    @jax.jit
    def both(features, w, bias):
        def linear(features, w, bias):
            y = run(x.replace(features), w, bias=bias)
            return (y.features[: len(v)] * v[: len(y.features)]).sum(), y

        if not with_gradient:
            return linear(features, w, bias)[1], None
        gradients, y = jax.grad(linear, argnums=(0, 1, 2), has_aux=True)(features, w, bias)
        return y, gradients

    y, _ = both(poisoned.features, *given)
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

    if not with_gradient:
        return
    dx, dw, dbias = both(x.features, *given)[1]
    window = {k: o for k, o in options.items() if k in ("stride", "padding", "dilation")}
    onto = exact.coordinates if name in ("submanifold", "grouped") else None
    made = sb.kernel_map(
        exact.coordinates, kernel, **window, onto=onto, transposed=name == "transposed",
        output_padding=options.get("output_padding", 0),
    )  # fmt: skip
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


def test_there_and_back(sbj, place, jax):
    """A strided convolution, its inverse with a residual, and the whole grid, in one function."""
    exact, x = tensors(sbj, place)
    w = [normal(2, 2, 2, 3, 4, seed=1), normal(2, 2, 2, 4, 3, seed=2)]
    down = sb.strided_conv(exact, w[0], stride=2)
    expected = sb.inverse_conv(down, w[1], onto=exact, residual=exact)

    @jax.jit
    def network(x, first, second):
        down = sbj.strided_conv(x, first, stride=2, capacity=200)
        up = sbj.inverse_conv(down, second, onto=x, residual=x)
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
        w = jax.numpy.asarray(0.3 * normal(3, 1, 2, 2, 2, dtype=np.float64))

        def smooth(features, w):
            grid = {"spatial_shape": SHAPE, "batch_size": BATCH}
            x = sbj.sparse_tensor(features, rows, **grid)
            return sbj.submanifold_conv(x, w, activation="silu").features

        check_grads(jax.jit(smooth), (features, w), 2, modes=["rev"])


def test_what_it_refuses(sbj, place, jax):
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
    down = jax.jit(functools.partial(sbj.strided_conv, stride=2))(x, w)
    with pytest.raises(ValueError, match=r"kernel size .*, got \(2, 2, 2\)"):
        sbj.inverse_conv(down, place.make(normal(2, 2, 2, 4, 3)), onto=x)
    with pytest.raises(ValueError, match="onto must be the sites"):
        sbj.inverse_conv(x, w, onto=x)


@pytest.mark.parametrize("stride", [1, 2])
def test_unfolded_windows_and_their_gradient(sbj, place, jax, stride):
    """Copies of rows, and of whole numbers exact sums."""
    exact, x = tensors(sbj, place)
    same = {"onto": exact.coordinates} if stride == 1 else {"capacity": 200}
    window = sb.kernel_map(exact.coordinates, 3, stride=stride, **same)
    expected = sb.sparse_unfold(exact.features, window, fill=2)
    grad = np.round(4 * normal(*expected.shape, seed=3))
    poisoned = place.make(np.pad(exact.features, ((0, SPARE), (0, 0)), constant_values=np.nan))

    @jax.jit
    def both(sites, features):
        given = {"onto": sites} if stride == 1 else {"capacity": 200}
        made = sbj.kernel_map(sites, 3, stride=stride, **given)

        def loss(features):
            y = sbj.sparse_unfold(features, made, fill=2)
            return (y[: len(grad)] * grad).sum(), y

        dx, y = jax.grad(loss, has_aux=True)(features)
        return y, dx

    y, dx = both(x.coordinates, poisoned)
    assert_same(to_numpy(y)[: len(expected)], expected)
    assert (to_numpy(y)[len(expected) :] == 2).all()
    wanted = sb.sparse_unfold_grad(grad, exact.features, window)
    assert_same(to_numpy(dx)[: len(wanted)], wanted)
    assert not to_numpy(dx)[len(wanted) :].any()


def test_rows_that_are_not_there_are_not_read(sbj, place, jax):
    """In a table that was made by hand."""
    _, x = tensors(sbj, place)
    w, table = normal(3, 3, 3, 3, 4, seed=1), sbj.kernel_map(x.coordinates, 3, onto=x.coordinates)
    clean = to_numpy(table.rows).copy()
    clean[::2, ::3] = -1
    corrupt = clean.copy()
    corrupt[::2, ::3] = np.resize([len(x.features), 2**31 - 1, -7], corrupt[::2, ::3].shape)

    @jax.jit
    def convolve(rows, w):
        made = sb.KernelMap(rows, x.coordinates, x.coordinates, (3, 3, 3))
        return sbj.site_conv(x.features, w, made)

    found, expected = (convolve(place.make(t), place.make(w)) for t in (corrupt, clean))
    assert_same(to_numpy(found), to_numpy(expected))


@pytest.mark.parametrize("activation", ["relu", "silu", "gelu"])
def test_a_residual_is_not_read_past_the_count(sbj, place, jax, activation):
    """A NaN there made the gradients of bias and scale NaN, with an activation other than relu."""
    exact, x = tensors(sbj, place)
    n = len(exact.features)
    w, *tables = (place.make(normal(*s, seed=1)) for s in ((3, 3, 3, 3, 3), (3,), (3,)))

    @jax.jit
    def gradients(features, residual, w, tables):
        def loss(residual, w, tables):
            options = dict(zip(("bias", "scale"), tables, strict=True))
            y = sbj.submanifold_conv(
                x.replace(features), w, **options, residual=residual, activation=activation
            )
            return (y.features**2).sum()

        return jax.grad(loss, argnums=(0, 1, 2))(residual, w, tables)

    spoiled = x.features.at[n:].set(np.nan)
    found = gradients(spoiled, spoiled, w, tables)
    expected = gradients(x.features, x.features, w, tables)
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert_same(to_numpy(one), to_numpy(other))
    assert not to_numpy(found[0])[n:].any()


@pytest.mark.parametrize("capacity", [None, 5])
def test_lists_without_rows(sbj, place, jax, capacity):
    """Nothing is read from them, whatever there is room for."""
    rows, features = (place.make(np.zeros((0, n), t)) for n, t in ((3, np.int32), (4, np.float32)))
    x = sbj.sparse_tensor(features, rows, spatial_shape=(6, 6), batch_size=2)
    w, back = (place.make(normal(2, 2, *planes, seed=1)) for planes in ((4, 3), (3, 2)))

    @jax.jit
    def loss(features, w):
        y = sbj.strided_conv(x.replace(features), w, stride=2, capacity=capacity)
        pooled = sbj.sparse_max_pool(x.replace(features), 2, capacity=capacity)
        z = sbj.inverse_conv(y, back, onto=x)
        total = y.features.sum() + pooled.features.sum() + z.features.sum()
        return total, (y, pooled, z)

    (dx, dw), made = jax.grad(loss, argnums=(0, 1), has_aux=True)(features, w)
    assert dx.shape == (0, 4)
    assert not to_numpy(dw).any()
    room = capacity or 0
    assert [y.features.shape for y in made] == [(room, 3), (room, 4), (0, 2)]
    assert not any(y.coordinates.number() or to_numpy(y.features).any() for y in made)
    chosen, places = x.coordinates.select(place.make(np.zeros(0, bool)), capacity=capacity)
    listed = sbj.dense_to_sparse(place.make(np.zeros((0, 6, 6, 1), "f4")), capacity=capacity)
    for found in (chosen.indices, listed.indices):
        assert_same(to_numpy(found), np.full((room, 3), -1, np.int32))
    assert (to_numpy(places) == -1).all()


def test_mapped_features(sbj, place, jax):
    _, x = tensors(sbj, place)
    w = place.make(normal(3, 3, 3, 3, 4, seed=1))
    several = place.make(normal(2, *x.features.shape, seed=3))

    @jax.jit
    def convolve(features, w):
        return sbj.submanifold_conv(x.replace(features), w).features

    found = jax.jit(jax.vmap(convolve, (0, None)))(several, w)
    for features, y in zip(several, found, strict=True):
        expected = to_numpy(convolve(features, w)).astype(np.float64)
        size = to_numpy(convolve(abs(features), abs(w)))
        # both sides are such sums
        assert_close(to_numpy(y), expected, terms=2 * 81, dtype="f4",
                     magnitude=size.astype(np.float64))  # fmt: skip


def test_sites_may_be_those_of_a_sparse_tensor(sbj, place):
    _, x = tensors(sbj, place)
    made = sbj.kernel_map(x, 3, onto=x)
    assert made.source is made.target is x.coordinates
    same_rows = sbj.kernel_map(x.coordinates, 3, onto=x.coordinates).rows
    assert_same(to_numpy(made.rows), to_numpy(same_rows))


def test_weights_that_are_missing(sbj, place):
    _, x = tensors(sbj, place)
    for convolve in (sbj.submanifold_conv, functools.partial(sbj.strided_conv, stride=2)):
        with pytest.raises(sb.DTypeError, match="w must be an array"):
            convolve(x, None)


@pytest.mark.parametrize("name", ["strided_conv", "sparse_max_pool", "sparse_avg_pool"])
def test_a_padding_of_none_onto_the_same_sites(sbj, place, name):
    exact, x = tensors(sbj, place)
    given = (normal(3, 3, 3, 3, 2, seed=1),) if name == "strided_conv" else (3,)
    expected = getattr(sb, name)(exact, *given, stride=1, padding=None, onto=exact)
    given = tuple(place.make(g) if isinstance(g, np.ndarray) else g for g in given)
    y = getattr(sbj, name)(x, *given, stride=1, padding=None, onto=x)
    found = to_numpy(y.features)[: len(expected.features)]
    assert_close(found, expected.features, terms=2 * 27 * 3, dtype=np.float32)
