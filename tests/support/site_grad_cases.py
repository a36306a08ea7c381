"""Gradients of convolutions over kernel maps, for the kernels: NaN in rows that nobody may read."""

import numpy as np

import sbnet_cupy as sb
from support.assertions import assert_close, assert_same, to_numpy
from support.site_conv_cases import SiteConvCase, sb_dtype

NAMES = ("features", "w", "scale", "bias", "residual")


def gradients(
    case, asarray=np.asarray, seed=0, dtype=None, change=lambda array: array, by_result=False
):
    """Return the gradients of a case by name, computed in ``dtype`` of numbers of the case's.

    ``by_result`` passes the result of the convolution, too.
    """
    dtype = sb_dtype(case.dtype) if dtype is None else np.dtype(dtype)
    rows, shape, x, w, scale, bias, rng = case.arrays(seed)
    capacity = len(rows) + case.spare if case.spare else None
    x = change(x.astype(sb_dtype(case.dtype)).astype(dtype))
    x = sb.sparse_tensor(
        asarray(x), asarray(rows), spatial_shape=shape, batch_size=2, capacity=capacity
    )
    x.features[len(rows) :] = np.nan
    window = {
        "submanifold": {"onto": x.coordinates},
        "strided": {"stride": 2, "padding": 1},
        "transposed": {"stride": 2, "transposed": True},
    }[case.kind]
    made = sb.kernel_map(x.coordinates, case.kernel, **window)
    count = made.target.number()

    def rows_of_result():
        drawn = rng.integers(-3, 4, (made.target.capacity, case.channels_out)).astype(np.float64)
        drawn = drawn if case.whole else rng.standard_normal(drawn.shape)
        drawn = change(drawn.astype(sb_dtype(case.dtype)).astype(dtype))
        drawn[count:] = np.nan
        return asarray(drawn)

    given = {"scale": asarray(change(scale)), "bias": asarray(change(bias))} if case.tables else {}
    given |= {"residual": rows_of_result()} if case.residual else {}
    w = asarray(change(w.astype(sb_dtype(case.dtype)).astype(dtype)))
    given |= {
        "groups": case.groups, "activation": case.activation, "precision": case.precision
    }  # fmt: skip
    call = (x.features, w, made)
    y = sb.site_conv(*call, **given) if by_result else None
    found = sb.site_conv_grad(rows_of_result(), *call, **given, y=y)
    return {name: to_numpy(value) for name, value in found._asdict().items() if value is not None}


def assert_gradients(case, found, seed=0):
    """Compare with float64: bit for bit where only the last rounding is not exact, else by bounds.

    A case that is not of whole numbers has no activation: sums that are rounded before it is
    differentiated have no bound.
    """
    exact = gradients(case, seed=seed, dtype=np.float64)
    assert found.keys() == exact.keys()
    size = gradients(case, seed=seed, dtype=np.float64, change=abs) if not case.whole else None
    for name, value in found.items():
        if case.whole:
            assert_same(value, exact[name].astype(value.dtype))
            continue
        wide = np.float64 if case.dtype == "float64" else np.float32
        terms = int(np.prod(case.kernel)) * max(case.channels, case.channels_out, case.sites)
        assert_close(value, exact[name], terms=terms, dtype=wide, magnitude=size[name])


def draw_weight_gradient(dtype, sources, targets, taps, channels, channels_out, density=0.4):
    """Return whole numbers, and a table that reads some rows, the last of them NaN and not read."""
    rng = np.random.default_rng(0)
    x = rng.integers(-3, 4, (sources, channels)).astype(sb_dtype(dtype))
    dy = rng.integers(-3, 4, (targets, channels_out)).astype(sb_dtype(dtype))
    rows = rng.integers(0, sources - 1, (taps, targets)).astype(np.int32)
    rows[rng.random(rows.shape) >= density] = -1
    rows[:, -1], rows[taps - 1] = -1, -1
    x[-1], dy[-1] = np.nan, np.nan
    return x, dy, rows


def weight_gradient_by_taps(x, dy, rows):
    """Return the gradient of the weights in float64, tap by tap."""
    dw = np.zeros((len(rows), x.shape[1], dy.shape[1]))
    for tap, read in enumerate(rows):
        here = np.flatnonzero(read >= 0)
        dw[tap] = x[read[here]].astype(np.float64).T @ dy[here].astype(np.float64)
    return dw


CASES = [
    SiteConvCase(tables=False, residual=False, activation=None),
    SiteConvCase(
        "bfloat16", channels=40, channels_out=72, kernel=(3, 3, 3), spare=9, activation=None,
        residual=False,
    ),
    SiteConvCase("float32", channels=20, kernel=(3, 3, 3), precision="tf32", spare=5),
    SiteConvCase("float32", channels=5, channels_out=7, kernel=(2, 3), spare=3, activation=None),
    SiteConvCase("float64", channels=6, channels_out=4, groups=2, kernel=(5,)),
    SiteConvCase(channels=64, channels_out=128, kernel=(3, 3, 3), sites=300, tables=False),
    SiteConvCase(channels=3, channels_out=5, kernel=(2, 2, 2), kind="strided", tables=False),
    SiteConvCase(channels=17, channels_out=3, kernel=(3,), kind="strided", residual=False),
    SiteConvCase(
        "float32", channels=13, channels_out=33, kernel=(3, 3), precision="tf32", kind="transposed",
        residual=False,
    ),
    SiteConvCase("bfloat16", channels=12, channels_out=12, groups=12, kernel=(3, 3), spare=4),
    SiteConvCase(channels=16, channels_out=32, groups=4, kernel=(2, 1, 2, 1), kind="strided"),
    SiteConvCase(channels=130, channels_out=200, kernel=(1, 1), sites=64, tables=False),
    *(SiteConvCase(sites=sites, residual=False) for sites in (31, 32, 33, 1)),
    SiteConvCase("float32", sites=129, channels=8, channels_out=100, precision="tf32"),
    SiteConvCase(channels=8, channels_out=8, kernel=(7, 7, 7), sites=100, tables=False),
    SiteConvCase(channels=128, kernel=(2, 2), channels_out=16, sites=600, tables=False),
    SiteConvCase("float32", sites=700, channels=64, channels_out=64, kernel=(2, 2), tables=False),
    SiteConvCase(
        "float16", channels=24, kernel=(3, 3, 3), activation=None, whole=False, residual=False,
        tables=False,
    ),
    SiteConvCase(
        "bfloat16", channels=48, kernel=(3, 3), activation=None, whole=False, tables=False,
    ),
    SiteConvCase("float32", channels=24, kernel=(3, 3, 3), activation=None, whole=False),
    SiteConvCase("float64", channels=24, kernel=(3, 3, 3), activation=None, whole=False),
]  # fmt: skip
