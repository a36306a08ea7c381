"""Gradients of convolutions at sites: by differences, and as transposes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sbnet_cupy as sb
from support import site_cases
from support.assertions import assert_close, assert_same, to_numpy
from support.strategies import FLOATS

NAMES = ("features", "w", "scale", "bias", "residual")


def problem(rng, xp, transposed=False, groups=1, spare=0):
    """Return a kernel map of either direction, and the arguments of a convolution over it."""
    rows = np.argwhere(rng.random((2, 5, 4)) < 0.5).astype(np.int32)
    capacity = {"capacity": len(rows) + spare} if spare else {}
    options = {"spatial_shape": (5, 4), "batch_size": 2}
    sites, _ = sb.coordinate_map(xp.asarray(rows), **options, **capacity)
    window = sb.kernel_map(sites, (3, 2), stride=2, padding=1)
    window = window.transposed() if transposed else window
    n, m, c, k = window.source.capacity, window.target.capacity, 2 * groups, 3 * groups
    shapes = {
        "features": (n, c), "w": (3, 2, c // groups, k), "scale": k, "bias": k, "residual": (m, k),
    }  # fmt: skip
    return window, {name: rng.standard_normal(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_by_differences(xp, body, transposed, groups, activation):
    rng = np.random.default_rng(0)
    window, arrays = problem(rng, xp, transposed, groups, spare=2)
    options = {"groups": groups, "activation": activation}
    grad = rng.standard_normal(arrays["residual"].shape)

    def loss(**changed):
        given = {name: xp.asarray(value) for name, value in (arrays | changed).items()}
        y = sb.site_conv(given.pop("features"), given.pop("w"), window, **given, **options)
        return (to_numpy(y) * grad)[to_numpy(window.target.valid())].sum()

    given = {name: xp.asarray(value) for name, value in arrays.items()}
    call = (given.pop("features"), given.pop("w"), window)
    poisoned = np.where(to_numpy(window.target.valid())[:, None], grad, np.nan)
    found = sb.site_conv_grad(xp.asarray(poisoned), *call, **given, **options)
    step = 1e-6  # halves the digits of float64: what is left is about 1e-10, and the curvature
    for name in NAMES:
        way = rng.standard_normal(arrays[name].shape)
        ahead = loss(**{name: arrays[name] + step * way})
        behind = loss(**{name: arrays[name] - step * way})
        slope = (to_numpy(getattr(found, name)) * way).sum()
        assert abs((ahead - behind) / (2 * step) - slope) < 1e-6 * max(1, abs(slope)), name


@given(data=st.data())
def test_the_gradient_of_features_is_the_transpose(xp, body, data):
    """<y, A x> = <A' y, x>, and the same for the weights."""
    sites = data.draw(site_cases.sites(dimensions=(1, 2, 3)))
    kernel, stride, padding, dilation = data.draw(site_cases.windows(sites.dimensions))
    rng = data.draw(site_cases.generators())
    x = sites.tensor(sites.features(rng, 2), xp.asarray)
    options = {"stride": stride, "padding": padding, "dilation": dilation}
    window = sb.kernel_map(x.coordinates, kernel, **options)
    w = rng.standard_normal((*kernel, 2, 3))
    y = sb.site_conv(x.features, xp.asarray(w), window)
    grad = rng.standard_normal(y.shape)
    count = window.target.number()
    grad[count:] = np.nan
    found = sb.site_conv_grad(xp.asarray(grad), x.features, xp.asarray(w), window)
    features = to_numpy(x.features)[: len(sites.indices)]
    through_y = (to_numpy(y) * grad)[:count].sum()
    size = (abs(to_numpy(y)) * abs(grad))[:count].sum() * 100 + 1
    dx = to_numpy(found.features)
    assert not dx[len(sites.indices) :].any()
    pairs = [(dx[: len(sites.indices)] * features).sum(), (to_numpy(found.w) * w).sum()]
    for pair in pairs:
        terms = 8 * (y.size + dx.size + w.size)
        assert_close(np.array(pair), np.array(through_y), terms=terms, dtype=np.float64,
                     magnitude=size)  # fmt: skip


def test_only_what_is_wanted(xp):
    window, arrays = problem(np.random.default_rng(1), xp)
    given = {name: xp.asarray(value) for name, value in arrays.items()}
    grad = given["residual"]
    call = (given.pop("features"), given.pop("w"), window)
    found = sb.site_conv_grad(grad, *call, **given, wanted=("w", "bias"))
    assert [name for name in NAMES if getattr(found, name) is not None] == ["w", "bias"]
    found = sb.site_conv_grad(grad, *call)
    assert [name for name in NAMES if getattr(found, name) is not None] == ["features", "w"]


def test_the_result_tells_where_relu_passes(xp, body):
    rng = np.random.default_rng(3)
    window, arrays = problem(rng, xp, spare=2)
    del arrays["scale"]
    given = {name: xp.asarray(value) for name, value in arrays.items()} | {"activation": "relu"}
    call = (given.pop("features"), given.pop("w"), window)
    y, grad = (
        sb.site_conv(*call, **given),
        xp.asarray(rng.standard_normal(arrays["residual"].shape)),
    )
    expected = sb.site_conv_grad(grad, *call, **given)
    found = sb.site_conv_grad(grad, *call, **given, y=y)
    for name in set(NAMES) - {"scale"}:
        assert_same(getattr(found, name), getattr(expected, name))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("groups", [1, 2])
def test_every_dtype(xp, body, groups, dtype):
    """Against float64 with the same numbers."""
    window, arrays = problem(np.random.default_rng(2), xp, groups=groups, spare=1)
    arrays = {name: value.astype(dtype) for name, value in arrays.items()}
    found, exact, size = (
        sb.site_conv_grad(
            *(xp.asarray(change(arrays[name])) for name in ("residual", "features", "w")), window,
            groups=groups, bias=xp.asarray(change(arrays["bias"])),
        )
        for change in (
            lambda value: value,
            lambda value: value.astype(np.float64),
            lambda value: abs(value.astype(np.float64)),
        )
    )  # fmt: skip
    for name in ("features", "w", "bias"):
        actual, expected, most = (to_numpy(getattr(g, name)) for g in (found, exact, size))
        assert actual.dtype == dtype
        wide = np.float64 if np.dtype(dtype) == np.float64 else np.float32
        assert_close(actual, expected, terms=2 * window.rows.size, dtype=wide, magnitude=most)


def test_the_gradient_of_each_convolution(xp):
    """That of site_conv over its map, whether SparseTensors come or arrays."""
    rng = np.random.default_rng(5)
    rows = np.argwhere(rng.random((2, 7, 6)) < 0.4).astype(np.int32)

    def draw(*shape):
        return xp.asarray(rng.standard_normal(shape))

    x = sb.sparse_tensor(draw(len(rows), 2), xp.asarray(rows), spatial_shape=(7, 6), batch_size=2)
    three, two, back = draw(3, 3, 2, 4), draw(2, 2, 2, 4), draw(2, 2, 4, 2)
    fine, low = x.coordinates, sb.strided_conv(x, two, stride=2, capacity=60)
    cases = [  # name, x, w, options, and those of the kernel map
        ("submanifold_conv", x, three, {"dilation": 2}, {"onto": fine}),
        ("strided_conv", x, two, {"stride": 2, "capacity": 60}, {}),
        ("strided_conv", x, three, {"stride": 1, "padding": 1, "onto": fine}, {}),
        ("transposed_conv", x, two, {"stride": 2, "output_padding": 1}, {"transposed": True}),
        ("inverse_conv", low, back, {"onto": x}, {}),
    ]
    for name, source, w, options, more in cases:
        if name == "inverse_conv":
            window = sb.kernel_map(fine, 2, stride=2, capacity=60).transposed()
        else:
            window = sb.kernel_map(fine, w.shape[:2], **options, **more)
        function, gradients = getattr(sb, name), getattr(sb, f"{name}_grad")
        residual = draw(window.target.capacity, w.shape[-1])
        more = {"bias": draw(w.shape[-1]), "scale": draw(w.shape[-1]), "activation": "relu"}
        y = function(source, w, **options, residual=residual, **more)
        assert y.coordinates is window.target
        grad = y.replace(draw(*y.features.shape))
        expected = sb.site_conv_grad(
            grad.features, source.features, w, window, residual=residual, **more
        )
        found = gradients(grad, source, w, **options, residual=y.replace(residual), y=y, **more)
        alone = gradients(
            grad.features, source, w, **options, residual=residual, **more, wanted=("w", "residual")
        )
        for part in NAMES:
            assert_same(getattr(found, part), getattr(expected, part))
        assert alone.features is alone.scale is alone.bias is None
        assert_same(alone.w, expected.w)
        assert_same(alone.residual, expected.residual)
        with pytest.raises(sb.ShapeError, match="grad_y must be on the coordinates of the result"):
            gradients(sb.SparseTensor(grad.features, _others(y)), source, w, **options)


def _others(y):
    """Return the coordinates of ``y`` as another object."""
    coordinates = y.coordinates
    return sb.CoordinateMap(coordinates.indices, coordinates.count, y.spatial_shape, y.batch_size)
