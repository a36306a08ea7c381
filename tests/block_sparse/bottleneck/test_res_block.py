"""sparse_res_block_bottleneck: the dense unit on active blocks, at every border, and no more."""

import sys

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from conftest import Library
from sbnet_cupy import DTypeError, ShapeError, calc_block_params_res_block
from sbnet_cupy.block_sparse.bottleneck.res_block import sparse_res_block_bottleneck
from sbnet_cupy.block_sparse.bottleneck.weights import BottleneckWeights
from sbnet_cupy.core.operator import clear_plans
from support import conv_oracles as oracles
from support import unit_cases
from support.assertions import assert_same, to_numpy
from support.res_block_cases import ALL, NAMES, Case, cases
from support.strategies import FLOATS


def select(active, inside, outside):
    """Take values and bounds from one where active, from the other elsewhere."""
    pairs = zip(inside, outside, strict=True)
    return oracles.Bounded(*(np.where(active[..., None], a, b) for a, b in pairs))


METHODS = st.sampled_from(["auto", "gather", "fused"])


def method_for(xp, case, method):
    """What the fused method does not cover is gathered.

    On a GPU each drawn case would compile a kernel; test_fused_bottleneck.py has fixed ones.
    """
    return "gather" if xp.name == "cupy" or (method == "fused" and case.projects) else method


@given(case=cases(), method=METHODS)
@example(case=ALL, method="auto")
@example(case=ALL, method="fused")
@example(case=Case(image=(1, 2, 2, 4), density=1.0), method="auto")  # every pixel at a border
@example(case=Case(image=(1, 2, 2, 4), density=1.0), method="fused")
@example(case=Case(strides=(2, 2), channels=5, density=1.0), method="auto")
def test_dense_where_active_and_shortcut_elsewhere(xp, case, method):
    x, weights, project = case.data()
    unit, shortcut, active = case.oracle(x, weights, project)
    y = to_numpy(case.run(xp, x, weights, project, method=method_for(xp, case, method)))
    assert y.dtype == case.dtype
    oracles.assert_within(y, select(active, unit, shortcut))
    if project is None:
        assert_same(y[~active], x[~active])
    if case.density == 1:
        assert active.all()


@given(case=cases(), method=METHODS)
def test_base_elsewhere(xp, case, method):
    """The base is NaN: no inactive pixel is written, and every active one is."""
    x, weights, project = case.data()
    unit, _, active = case.oracle(x, weights, project)
    base = np.full(unit.value.shape, np.nan, case.dtype)
    given = xp.asarray(base)
    method = method_for(xp, case, method)
    y = to_numpy(case.run(xp, x, weights, project, base=given, method=method))
    oracles.assert_within(y[active], oracles.Bounded(*(a[active] for a in unit)))
    assert_same(y[~active], base[~active], allow_nan=True)
    assert_same(given, xp.writable(base), allow_nan=True)


@given(case=cases(), over=st.sampled_from(["fresh", "x", "base", "base and x"]), method=METHODS)
@example(case=ALL, over="x", method="auto")
@example(case=ALL, over="base", method="fused")
def test_out(xp, case, over, method):
    """The result is the same where out is x itself, the base itself, or fresh memory."""
    x, weights, project = case.data()
    if project is not None and "x" in over:
        over = "base" if "base" in over else "fresh"
    image = xp.writable(x)
    base = None
    if "base" in over:
        shape = case.oracle(x, weights, project)[0].value.shape
        base = xp.writable(np.full(shape, 2, case.dtype))
    method = method_for(xp, case, "gather" if "x" in over and method == "fused" else method)
    options = {"base": base, "method": method, "given": True}
    expected = case.run(xp, image, weights, project, **options)
    if over == "fresh":
        out = xp.writable(np.full(expected.shape, np.nan, case.dtype))
    else:
        out = base if over == "base" else image
    y = case.run(xp, image, weights, project, out=out, **options)
    assert y is out
    assert_same(out, expected)
    if out is not image:
        assert_same(image, xp.writable(x))


def test_out_must_not_overlap(xp):
    x, weights, project = ALL.data()
    memory = xp.writable(np.concatenate([x.ravel(), x.ravel()]))
    image, base = memory[: x.size].reshape(x.shape), memory[x.size :].reshape(x.shape)
    for first in (4, x.size // 2):  # out overlaps both
        out = memory[first : first + x.size].reshape(x.shape)
        with pytest.raises(ShapeError, match=r"out must not share memory with x\b"):
            ALL.run(xp, image, weights, project, out=out, given=True)
        with pytest.raises(ShapeError, match=r"out must not share memory with base\b"):
            ALL.run(xp, xp.writable(x), weights, project, out=out, base=base, given=True)
    projected = Case(project=True, density=1.0)
    x, weights, project = projected.data()
    image = xp.writable(x)
    with pytest.raises(ShapeError, match=r"out must not share memory with x\b"):
        projected.run(xp, image, weights, project, out=image, given=True)


@pytest.mark.parametrize("method", ["auto", "gather", "fused"])
@pytest.mark.parametrize("number", unit_cases.NUMBERS, ids=str)
def test_methods_agree(xp, method, number):
    """Where each has a kernel: over x, base and out, with packed weights and their precision."""
    case = unit_cases.Case(image=(2, 19, 17, 32), middle=16, bsize=(8, 8), packed=True, **number)
    (image, packed, *indices), _ = case.arguments(case.arrays(), xp.asarray)
    params = calc_block_params_res_block(case.image, 10, [1, 3, 1])
    exact, active = case.exact(), case.active()

    def run(**options):
        return sparse_res_block_bottleneck(
            image, packed, tuple(indices), params, method=method, **options
        )

    def expect(y, elsewhere):
        whole = np.where(active[..., None], exact, elsewhere).astype(case.type)
        assert_same(y, xp.writable(whole), allow_nan=True, signed_zero=False)

    base = xp.asarray(np.full(case.shape, 7, case.type))
    for _ in range(2):
        expect(run(), case.arrays()[0])
        expect(run(base=base), 7)
    for options, elsewhere in (({}, case.arrays()[0]), ({"base": base}, 7), ("base", np.nan)):
        out = xp.writable(np.full(case.shape, np.nan, case.type))
        options = {"base": out} if options == "base" else options
        assert run(out=out, **options) is out
        expect(out, elsewhere)
    assert (to_numpy(base) == 7).all()
    with pytest.raises(ValueError, match="precision must be"):
        run(precision="ieee")


def test_what_the_fused_method_does_not_cover(xp):
    """It says so; "auto" gathers."""
    for case, reason in (
        (Case(project=True), "w_project must be None"),
        (Case(strides=(2, 1)), r"strides: they must be \(1, 1\), got \(2, 1\)"),
    ):
        arrays = case.data()
        with pytest.raises(NotImplementedError, match=reason):
            case.run(xp, *arrays, method="fused")
        assert_same(case.run(xp, *arrays), case.run(xp, *arrays, method="gather"))
    x, weights, project = ALL.data()
    image = xp.writable(x)
    with pytest.raises(NotImplementedError, match="in place of x"):
        ALL.run(xp, image, weights, project, out=image, given=True, method="fused")
    assert_same(image, xp.writable(x))


@pytest.mark.gpu
def test_auto_is_fused_where_there_is_a_kernel(require, monkeypatch):
    cupy = require("gpu")
    module, called = sys.modules["sbnet_cupy.block_sparse.bottleneck.res_block"], []
    plan_fused_bottleneck = module.plan_fused_bottleneck

    def count_plans(*args):
        called.append(1)
        return plan_fused_bottleneck(*args)

    clear_plans()
    monkeypatch.setattr(module, "plan_fused_bottleneck", count_plans)
    sizes = {"image": (2, 9, 9, 16), "channels": 16}
    for dtype, options, count in (
        (np.float16, {}, 1), (np.float64, {}, 1), (np.float32, {}, 1),
        (np.float32, {"precision": "tf32"}, 2), (np.float16, {"method": "gather"}, 2),
    ):  # fmt: skip
        case = Case(dtype=np.dtype(dtype), **sizes)
        case.run(Library("cupy", cupy), *case.data(), **options)
        assert len(called) == count
    case = Case(dtype=np.dtype(np.float16), **sizes, project=True)
    case.run(Library("cupy", cupy), *case.data())
    assert len(called) == 2
    for dtype, reason in ((np.float64, "float64"), (np.float32, "tf32")):
        case = Case(dtype=np.dtype(dtype), **sizes)
        with pytest.raises(NotImplementedError, match=reason):
            case.run(Library("cupy", cupy), *case.data(), method="fused")


def test_borders_differ_from_padding_the_image(xp):
    """The case is a test of borders: zeros in place of a2 of the padding do change the result."""
    x, weights, project = ALL.data()
    unit, _, _ = ALL.oracle(x, weights, project)
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    wrong, _ = oracles.residual_unit(
        padded, weights, dtype=ALL.dtype, epsilon=oracles.epsilon_of_sums(ALL.dtype)
    )
    difference = abs(wrong.value[:, 1:-1, 1:-1] - unit.value)
    border = np.ones(x.shape[1:3], bool)
    border[1:-1, 1:-1] = False
    assert difference[:, border].max() > 0.1
    assert difference[:, ~border].max() < 1e-6
    oracles.assert_within(to_numpy(ALL.run(xp, x, weights, project)), unit)


def test_rows_outside_the_image_are_dropped(xp):
    x, weights, _ = ALL.data()
    int32 = np.iinfo(np.int32)
    table = [[0, 0, 0], [0, 50, 50], [0, -9, 0], [7, 0, 0], [0, int32.max, int32.min], [1, 1, 1]]
    y = sparse_res_block_bottleneck(
        xp.asarray(x),
        BottleneckWeights(*map(xp.asarray, weights)),
        (xp.asarray(np.array([6], np.int32)), xp.asarray(np.array(table, np.int32))),
        ALL.params,
    )
    unit, shortcut, _ = ALL.oracle(x, weights, None)
    shape = x.shape[:3]
    active = oracles.active_outputs(shape, [(0, 0, 0), (1, 1, 1)], ALL.params.bsize_out)
    oracles.assert_within(to_numpy(y), select(active, unit, shortcut))


def test_scales_of_another_dtype(xp):
    """A float16 unit with float32 tables, and a float32 one with float16 tables."""
    for image, table in (("f2", "f4"), ("f4", "f2"), ("f8", "f4")):
        case = Case(dtype=np.dtype(image), density=1.0)
        x, weights, project = case.data()
        weights = weights[:3] + [t.astype(table) for t in weights[3:]]
        unit, _, _ = case.oracle(x, weights, project)
        oracles.assert_within(to_numpy(case.run(xp, x, weights, project)), unit)


def test_inputs_are_left_alone(xp):
    x, weights, _ = ALL.data()
    image = xp.writable(x)
    held = BottleneckWeights(*map(xp.writable, weights))
    indices = [xp.writable(a) for a in ALL.indices()[:2]]
    sparse_res_block_bottleneck(image, held, indices, ALL.params)
    assert_same(image, xp.writable(x))
    for after, before in zip(held._arrays(), weights, strict=True):
        assert_same(after, xp.writable(before))
    for after, before in zip(indices, ALL.indices()[:2], strict=True):
        assert_same(after, xp.writable(before))


def spoil(weights, name, value):
    arrays = dict(zip(NAMES, weights, strict=True))
    arrays[name] = value(arrays[name])
    return list(arrays.values())


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("w1", lambda w: w[0], ShapeError),
        ("w1", lambda w: w[:, :, :1].copy(), ShapeError),
        ("w1", lambda w: w.astype("f8"), DTypeError),
        ("w1", lambda w: None, DTypeError),
        ("w2", lambda w: w[:1].copy(), ShapeError),
        ("w2", lambda w: w.astype("f2"), DTypeError),
        ("w3", lambda w: w[:, :, :1].copy(), ShapeError),
        ("w3", lambda w: w.tolist(), DTypeError),
        ("scale1", lambda t: t[:1], ShapeError),
        ("shift2", lambda t: t.astype("i4"), DTypeError),
        ("shift3", lambda t: t[:, None], ShapeError),
    ],
)
def test_bad_weights(xp, name, value, error):
    x, weights, _ = ALL.data()
    weights = [
        xp.asarray(a) if isinstance(a, np.ndarray) else a for a in spoil(weights, name, value)
    ]
    with pytest.raises(error, match=rf"weights\.{name}\b"):
        sparse_res_block_bottleneck(
            xp.asarray(x),
            BottleneckWeights(*weights),
            tuple(map(xp.asarray, ALL.indices()[:2])),
            ALL.params,
        )


def test_projection_is_checked(xp):
    case = Case(channels=5)
    x, weights, project = case.data()
    for bad, error in (
        (None, ShapeError),
        (project[..., :4].copy(), ShapeError),
        (project[0], ShapeError),
        (project.astype("f8"), DTypeError),
    ):
        with pytest.raises(error, match="w_project"):
            case.run(xp, x, weights, bad)
    stride = Case(strides=(2, 1))
    x, weights, _ = stride.data()
    with pytest.raises(ShapeError, match=r"w_project.*\(2, 1\)"):
        stride.run(xp, x, weights, None)


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_other_libraries(require, library):
    module = require(library)
    asarray = module.asarray if library == "torch" else module.numpy.asarray
    x, weights, _ = ALL.data()
    indices = ALL.indices()[:2]
    y = sparse_res_block_bottleneck(
        asarray(x),
        BottleneckWeights(*map(asarray, weights)),
        tuple(map(asarray, indices)),
        ALL.params,
    )
    assert type(y).__module__.startswith(library)
    expected = sparse_res_block_bottleneck(x, BottleneckWeights(*weights), indices, ALL.params)
    assert_same(np.asarray(y), expected)


def test_in_place_through_the_door(require):
    """``out=x`` of a PyTorch tensor writes that very tensor."""
    torch = require("torch")
    x, weights, _ = ALL.data()
    indices = ALL.indices()[:2]
    expected = sparse_res_block_bottleneck(x, BottleneckWeights(*weights), indices, ALL.params)
    tensor = torch.from_numpy(x.copy())
    held = BottleneckWeights(*map(torch.from_numpy, weights))
    pair = tuple(map(torch.from_numpy, indices))
    y = sparse_res_block_bottleneck(tensor, held, pair, ALL.params, out=tensor)
    assert y is tensor
    assert_same(tensor.numpy(), expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_random_weights(xp, dtype):
    weights = BottleneckWeights.random(6, 2, 5, xp=xp.module, dtype=dtype, seed=3)
    shapes = [(1, 1, 6, 2), (3, 3, 2, 2), (1, 1, 2, 5), (6,), (6,), (2,), (2,), (2,), (2,)]
    wide = "float64" if dtype == "float64" else "float32"
    for name, array, shape in zip(NAMES, weights._arrays(), shapes, strict=True):
        assert array.shape == shape and type(array).__module__.startswith(xp.module.__name__)
        assert array.dtype.name == (dtype if name.startswith("w") else wide)
        other = BottleneckWeights.random(6, 2, 5, dtype=dtype, seed=3)
        assert_same(to_numpy(array), getattr(other, name))
    again = BottleneckWeights.random(6, 2, 5, dtype=dtype, seed=4)
    assert (to_numpy(weights.w2) != again.w2).any()
    assert BottleneckWeights.random(6, 2).w3.shape == (1, 1, 2, 6)


@pytest.mark.parametrize(
    ("name", "sizes", "options", "error"),
    [
        ("cin", (2.5, 3), {}, ShapeError),
        ("cmid", (4, "3"), {}, ShapeError),
        ("cmid", (4, True), {}, ShapeError),
        ("cout", (4, 3, -1), {}, ShapeError),
        ("seed", (4, 3), {"seed": -1}, ValueError),
        ("seed", (4, 3), {"seed": 0.5}, ValueError),
    ],
)
def test_random_weights_name_a_wrong_argument(name, sizes, options, error):
    with pytest.raises(error, match=f"^{name} must be a non-negative integer, got "):
        BottleneckWeights.random(*sizes, **options)


def test_random_weights_of_no_channels():
    assert BottleneckWeights.random(0, 3).w1.shape == (1, 1, 0, 3)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_folded_batch_norm(xp, dtype):
    """``(t - mean) / sqrt(variance + eps) * gamma + beta`` is ``t * scale + shift``."""
    rng = np.random.default_rng(0)
    _, weights, _ = Case().data()
    norms = [rng.uniform(0.5, 2, (4, c)).astype(dtype) for c in (4, 3, 3)]
    given = [tuple(xp.asarray(row) for row in norm) for norm in norms]
    kernels = [xp.asarray(w) for w in weights[:3]]
    folded = BottleneckWeights.from_batch_norm(*kernels, *given, eps=0.01)
    wide = np.dtype(np.float64 if dtype == np.float64 else np.float32)
    for i, norm in enumerate(norms, 1):
        gamma, beta, mean, variance = norm.astype(np.float64)
        scale = gamma / np.sqrt(variance + 0.01)
        for name, exact in (("scale", scale), ("shift", beta - mean * scale)):
            array = to_numpy(getattr(folded, f"{name}{i}"))
            assert array.dtype == wide
            # at most five roundings of numbers no larger than 16
            error = np.full(exact.shape, 5 * 16 * oracles.rounding(wide)[0])
            oracles.assert_within(array, oracles.Bounded(exact, error))
    assert folded.w1 is kernels[0]


def test_bad_batch_norm():
    norm = (np.ones(4, "f4"),) * 4
    w = BottleneckWeights.random(4, 4)
    with pytest.raises(TypeError, match=r"bn2 must be \(gamma, beta, mean, variance\)"):
        BottleneckWeights.from_batch_norm(w.w1, w.w2, w.w3, norm, norm[:3], norm)
    with pytest.raises(ShapeError, match="bn3 mean"):
        bad = (norm[0], norm[0], np.ones(3, "f4"), norm[0])
        BottleneckWeights.from_batch_norm(w.w1, w.w2, w.w3, norm, norm, bad)


def test_batch_norm_of_tensors(require):
    torch = require("torch")
    w = BottleneckWeights.random(4, 4)
    norm = tuple(torch.full((4,), v) for v in (2.0, 1.0, 3.0, 4.0))
    folded = BottleneckWeights.from_batch_norm(w.w1, w.w2, w.w3, norm, norm, norm, eps=0.0)
    assert isinstance(folded.scale2, torch.Tensor)
    assert folded.scale2.tolist() == [1.0] * 4 and folded.shift2.tolist() == [-2.0] * 4
