"""fused_conv: loops = NumPy = CUDA, at every active pixel and at no other."""

import math
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import Library
from sbnet_cupy import PackedWeights, ShapeError, conv2d, fused_conv
from sbnet_cupy.block_sparse.conv import wide
from sbnet_cupy.block_sparse.conv.config import ConvConfig
from sbnet_cupy.block_sparse.stack.stack_conv_plan import candidates
from sbnet_cupy.core import operator
from support import conv_oracles as oracles
from support.assertions import assert_same, to_numpy
from support.exhaustive import thinned
from support.fused_cases import CASES, ORDER, SMOOTH, Case
from support.fused_on_streams import (
    check_capture_needs_packed_weights,
    check_current_stream,
    check_replays,
    check_the_same_bits,
)
from support.strategies import FLOATS


def check(case, y, expected, elsewhere, xp):
    """Bit by bit, but for the sign of 0; ``elsewhere`` is what inactive pixels hold."""
    expected = np.where(case.active()[..., None], expected, elsewhere).astype(case.type)
    assert_same(y, xp.writable(case.laid_out(expected)), allow_nan=True, signed_zero=False)


def runs(case, xp):
    """Whether there is such a call in the library; where not, it says so."""
    if xp.name == "cupy" and case.dtype == "float64" and min(case.shape):
        with pytest.raises(NotImplementedError, match="float64"):
            case.run(case.arrays(), xp.asarray)
        return False
    return True


@pytest.mark.parametrize("case", thinned(CASES, 5), ids=str)
def test_whole_numbers_are_exact(xp, case):
    """And every active pixel is written, no other: the result held NaN."""
    if not runs(case, xp):
        return
    expected = case.exact()
    check(case, case.run(case.arrays(), xp.asarray), expected, 0, xp)
    out = xp.writable(case.laid_out(np.full(case.shape, np.nan).astype(case.type)))
    y = case.run(case.arrays(), xp.asarray, out=out)
    assert y is out
    check(case, out, expected, np.nan, xp)


@pytest.mark.parametrize("case", thinned([c for c in CASES if min(c.shape)] + SMOOTH, 5), ids=str)
def test_other_numbers_within_the_bound(xp, case):
    """One rounding at the end, and the sums' own; see conv_oracles.py."""
    if not runs(case, xp):
        return
    y = to_numpy(case.run(case.arrays(whole=False), xp.asarray))
    active = case.active()[..., None]
    expected = oracles.Bounded(*(case.laid_out(np.where(active, a, 0)) for a in case.bounded()))
    oracles.assert_within(y, expected)


def _pairs(low, high):
    return st.tuples(st.integers(low, high), st.integers(low, high))


@given(
    case=st.builds(
        Case,
        image=st.tuples(st.sampled_from([1, 2, 0]), st.integers(0, 9), st.integers(0, 9),
                        st.sampled_from([1, 3, 8, 0])),
        kernel=_pairs(1, 4),
        channels=st.sampled_from([1, 3, 8]),
        strides=_pairs(1, 3),
        padding=st.sampled_from(["SAME", "VALID"]) | st.tuples(_pairs(0, 3), _pairs(0, 3)),
        bsize=_pairs(1, 12),
        dtype=st.sampled_from([dtype.name for dtype in FLOATS]),
        data_format=st.sampled_from(["NHWC", "NCHW"]),
        w_format=st.sampled_from(["HWIO", "OIHW"]),
        extras=st.sets(st.sampled_from(["scale", "bias", "residual"])).map(tuple),
        activation=st.sampled_from([None, "relu"]),
        table=st.sampled_from(["some", "all", "corrupt", "repeated"]),
        packed=st.booleans(),
        seed=st.integers(0, 2**32 - 1),
    )
)  # fmt: skip
def test_drawn_whole_numbers_are_exact(case):
    """On NumPy alone: a GPU would compile a kernel for nearly every one of them."""
    out = case.laid_out(np.full(case.shape, np.nan).astype(case.type))
    case.run(case.arrays(), np.array, out=out)
    expected = np.where(case.active()[..., None], case.exact(), np.nan).astype(case.type)
    assert_same(out, case.laid_out(expected), allow_nan=True, signed_zero=False)


NUMBERS = [
    {"dtype": "float16"}, {"dtype": "bfloat16"}, {"precision": "tf32"}, {"precision": "ieee"},
]  # fmt: skip


@pytest.mark.parametrize("number", NUMBERS, ids=str)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("channels", [(24, 8), (5, 3)], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"strides": (2, 1), "kernel": (5, 2)}, {"kernel": (1, 1)}, {"data_format": "NCHW"}],
    ids=str,
)
def test_nan_reaches_exactly_the_windows_that_hold_it(xp, number, value, channels, options):
    """Not through zeros that fill up vectors, tiles or steps; inactive pixels are read too."""
    case = Case(image=(2, 19, 17, channels[0]), channels=channels[1], **number, **options)
    x, w, *rest = case.arrays()
    rng = np.random.default_rng(3)
    bad = rng.random(x.shape[:3]) < 0.02
    bad[0, 0, 0] = bad[1, -1, -1] = True
    x[bad, rng.integers(0, x.shape[3], bad.sum())] = value
    y = to_numpy(case.run((x, w, *rest), xp.asarray))
    y = y if case.data_format == "NHWC" else y.transpose(0, 2, 3, 1)
    reached = oracles.max_pool(bad.astype(float), case.kernel, case.strides, case.padding) > 0
    reached &= case.active()
    assert 0 < reached.sum() < case.active().sum()
    assert_same(~np.isfinite(y.astype(np.float64)).all(axis=-1), reached)
    assert_same(np.isfinite(y.astype(np.float64)).any(axis=-1), ~reached)


@pytest.mark.parametrize("number", NUMBERS, ids=str)
@pytest.mark.parametrize("bsize", [(1, 3), (8, 8), (16, 16), (64, 64)], ids=str)
def test_all_active_equals_dense(xp, number, bsize):
    case = Case(image=(2, 23, 18, 24), channels=24, bsize=bsize, table="all", **number)
    x, w, *_ = case.arrays()
    dense = conv2d(xp.asarray(x), xp.asarray(w), precision=case.precision)
    assert_same(case.run(case.arrays(), xp.asarray), dense, signed_zero=False)


@pytest.mark.parametrize("number", NUMBERS, ids=str)
@pytest.mark.parametrize("where", [(0, 0), (0, 2), (0, 3), (1, 0), (1, 1), (3, 0), (3, 3)], ids=str)
def test_one_block_at_each_border_and_corner(xp, number, where):
    """Windows reach over the image's edge, and tiles and blocks over the result's."""
    case = Case(image=(1, 14, 15, 16), channels=8, kernel=(5, 3), bsize=(4, 4), **number)
    x, w, *_ = case.arrays()
    y = np.full(case.shape, np.nan).astype(case.type)
    given = (xp.asarray(x), xp.asarray(w), xp.asarray(np.array([1], np.int32)))
    rows = np.array([(0, *where)], np.int32)
    y = fused_conv(*given, xp.asarray(rows), bsize=4, precision=case.precision, out=xp.writable(y))
    active = oracles.active_outputs(case.shape[:3], rows, (4, 4))[..., None]
    expected = np.where(active, case.exact(), np.nan).astype(case.type)
    assert_same(y, xp.writable(expected), allow_nan=True, signed_zero=False)


def test_weights_are_packed_once_until_refreshed(xp):
    case = Case(image=(1, 16, 16, 8), channels=8, dtype="float16", packed=True,
                extras=("scale", "bias"))  # fmt: skip
    (x, weights, *active), keywords = case.arguments(case.arrays(), xp.writable)
    first = fused_conv(x, weights, *active, **keywords)
    assert_same(fused_conv(x, weights, *active, **keywords), first)
    for array in (weights.w, weights.scale, weights.bias):
        array *= 2
    assert_same(fused_conv(x, weights, *active, **keywords), first)
    weights.refresh()
    changed = fused_conv(x, weights, *active, **keywords)
    tables = {"scale": weights.scale, "bias": weights.bias}
    assert_same(changed, fused_conv(x, weights.w, *active, **keywords, **tables))
    assert (to_numpy(changed) != to_numpy(first)).any()


def test_plain_weights_are_never_stale(xp):
    case = Case(image=(1, 16, 16, 8), channels=8, table="all")
    (x, w, *active), keywords = case.arguments(case.arrays(), xp.writable)
    first = to_numpy(fused_conv(x, w, *active, **keywords))
    w *= 2
    assert_same(to_numpy(fused_conv(x, w, *active, **keywords)), 2 * first)


def test_kernel_of_any_strides(xp):
    """A kernel is copied where it is not contiguous; an image on a GPU is refused."""
    case = Case(image=(1, 16, 16, 8), channels=8)
    (x, w, *active), keywords = case.arguments(case.arrays(), xp.asarray)
    y = fused_conv(x, w, *active, **keywords)
    fortran = xp.module.asfortranarray(w)
    for _ in range(2):
        assert_same(fused_conv(x, fortran, *active, **keywords), y)
    weights = PackedWeights(fortran)
    assert_same(fused_conv(x, weights, *active, **keywords | {"precision": None}), y)
    x = xp.module.asfortranarray(x)
    if xp.name == "cupy":
        with pytest.raises(ShapeError, match="contiguous"):
            fused_conv(x, w, *active, **keywords)
    else:
        assert_same(fused_conv(x, w, *active, **keywords), y)


def test_packed_weights_have_their_own_options(xp):
    case = Case(image=(1, 16, 16, 8), channels=8, packed=True, w_format="OIHW", precision="tf32")
    (x, weights, *active), keywords = case.arguments(case.arrays(), xp.asarray)
    y = fused_conv(x, weights, *active, **keywords)
    same = fused_conv(x, weights, *active, **keywords, w_format="OIHW", precision="tf32")
    assert_same(same, y)
    with pytest.raises(ValueError, match="precision must be 'tf32'"):
        fused_conv(x, weights, *active, **keywords, precision="ieee")
    plain = PackedWeights(xp.asarray(case.arrays()[1]))
    with pytest.raises(ValueError, match="w_format must be 'HWIO'"):
        fused_conv(x, plain, *active, **keywords, w_format="OIHW")
    for name in ("scale", "bias"):
        with pytest.raises(ValueError, match=f"{name} must be None"):
            fused_conv(x, plain, *active, **keywords, **{name: xp.asarray(np.ones(8, np.float32))})


def test_out_may_share_memory_with_nothing(xp):
    case = Case(image=(1, 12, 12, 8), channels=8, extras=("residual", "bias"))
    (x, w, *active), keywords = case.arguments(case.arrays(), xp.writable)
    for name, out in (("x", x), ("residual", keywords["residual"])):
        with pytest.raises(ShapeError, match=rf"\bout\b.*\b{name}\b"):
            fused_conv(x, w, *active, **keywords, out=out)


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_other_libraries(require, library):
    module = require(library)
    asarray = module.asarray if library == "torch" else module.numpy.asarray
    case = Case(image=(1, 12, 12, 8), channels=8, extras=("residual", "bias"), packed=True)
    expected = case.run(case.arrays(), np.array)
    positional, keywords = case.arguments(case.arrays(), asarray)
    for _ in range(2):
        y = fused_conv(*positional, **keywords)
        assert type(y).__module__.startswith(library)
        assert_same(np.asarray(y), expected)
    if library == "torch":
        positional[1].w.mul_(2)
        assert_same(fused_conv(*positional, **keywords).numpy(), expected)
        positional[1].refresh()
        twice = replace(case, packed=False).run(
            [a if i != 1 else 2 * a for i, a in enumerate(case.arrays())], np.array
        )
        assert_same(fused_conv(*positional, **keywords).numpy(), twice)


# ------------------------------------------------------------------------------------- on a GPU


@pytest.fixture(scope="module")
def cupy(require):
    return require("gpu")


def _four_warps():
    """Rows of (image channels, output channels, options, planes, slice, tile, depth, stages)."""
    relu = {"extras": ("scale", "bias", "residual"), "activation": "relu"}
    rows = [
        ("float16", None, 24, 24, {}, 3, 24, (8, 16), 1, 2),  # the last unit alone
        ("float16", None, 48, 48, relu, 6, 48, (8, 8), 3, 1),  # four warps for each third of K
        ("float16", None, 40, 72, {"strides": (2, 1)}, 2, 24, (8, 8), 1, 2),  # chunks
        ("float16", None, 8, 9, {"kernel": (1, 1)}, 1, 16, (8, 16), 1, 1),  # one unit
        ("bfloat16", None, 64, 64, relu, 8, 64, (8, 8), 2, 2),
        ("bfloat16", None, 20, 96, {"data_format": "NCHW"}, 3, 96, (8, 16), 1, 1),
        ("bfloat16", None, 17, 30, {"kernel": (5, 5), "strides": (1, 2)}, 4, 32, (8, 8), 1, 1),
        ("float32", "tf32", 24, 24, relu, 6, 24, (8, 16), 1, 1),
        ("float32", "tf32", 12, 8, {"kernel": (7, 7)}, 3, 8, (8, 8), 1, 1),
        ("float32", "tf32", 96, 96, {}, 4, 48, (8, 16), 1, 2),  # chunks
    ]
    for dtype, precision, c, k, options, planes, part, tile, depth, stages in rows:
        case = Case(image=(2, 21, 19, c), channels=k, dtype=dtype, precision=precision,
                    bsize=(16, 16), packed=True, **options)  # fmt: skip
        chunks = -(-c * case.type.itemsize // 16 // planes)
        warps = (math.prod(tile) // 16, 1, depth)
        yield case, ConvConfig(
            "WarpGroup", planes, part, tile, warps, stages, chunks == 1, chunks, 1, True
        )


FOUR_WARPS = list(_four_warps())


@pytest.fixture
def hopper(cupy, monkeypatch):
    """Make fused_conv take a plan, on a GPU that knows wgmma."""
    if cupy.cuda.Device().compute_capability != "90":
        pytest.skip("needs compute capability 9.0")

    def take(plan):
        op = sys.modules["sbnet_cupy.block_sparse.conv.fused_conv"]
        monkeypatch.setattr(op, "configure_conv", lambda *_: plan)
        monkeypatch.setattr(operator, "_PLANS", operator._Plans())
        return Library("cupy", cupy)

    return take


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "plan"), FOUR_WARPS, ids=str)
def test_four_warps_together(hopper, case, plan):
    """Planners seldom choose them for images as small as those above."""
    test_whole_numbers_are_exact(hopper(plan), case)
    test_other_numbers_within_the_bound(hopper(plan), case)


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "plan"), FOUR_WARPS, ids=str)
def test_nan_among_four_warps(hopper, case, plan):
    options = {"strides": case.strides, "kernel": case.kernel, "data_format": case.data_format}
    number = {"dtype": case.dtype, "precision": case.precision}
    channels = case.image[3], case.channels
    test_nan_reaches_exactly_the_windows_that_hold_it(
        hopper(plan), number, np.nan, channels, options
    )


def _wide():
    """Cases of the kernel for many channels, each with some of the plans that fit it."""
    relu = {"extras": ("scale", "bias", "residual"), "activation": "relu"}
    rows = [
        ("float16", None, 136, 72, relu, (7, 5)),
        ("float16", None, 256, 128, {"kernel": (1, 1), "extras": ("bias",)}, (4, 4)),
        ("bfloat16", None, 512, 200, {"strides": (2, 1), **relu}, (3, 8)),
        ("float16", None, 128, 130, {"w_format": "OIHW"}, (16, 16)),
        ("float32", "tf32", 128, 64, {"padding": ((3, 0), (1, 4)), **relu}, (8, 8)),
    ]
    for dtype, precision, c, k, options, bsize in rows:
        yield Case(
            image=(2, 29, 26, c), channels=k, dtype=dtype, precision=precision, bsize=bsize,
            packed=True, **options,
        )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("case", list(_wide()), ids=str)
def test_many_channels_by_every_kind_of_plan(cupy, case, monkeypatch):
    """Each tile and each way to share K; of their other variants the first and the last."""
    chosen, numbers = {}, Library("cupy", cupy)

    def choose(conv, device):
        for plan in candidates(conv, device):
            kinds = chosen.setdefault((plan.tile, plan.warps, plan.split), [])
            kinds[1:] = [plan]
        return next(iter(chosen.values()))[0]

    monkeypatch.setattr(wide, "plan_stack_conv", choose)
    monkeypatch.setattr(operator, "_PLANS", operator._Plans())
    op = sys.modules["sbnet_cupy.block_sparse.conv.fused_conv"]
    monkeypatch.setattr(op, "is_for_wide", lambda *given: wide.missing_kernel(*given[2:]) is None)
    case.run(case.arrays(), numbers.asarray)
    if not chosen:
        pytest.skip("needs compute capability 9.0")
    expected = case.exact()
    for plan in (plan for plans in chosen.values() for plan in plans):
        monkeypatch.setattr(operator, "_PLANS", operator._Plans())
        monkeypatch.setattr(wide, "plan_stack_conv", lambda *conv, plan=plan: plan)
        out = numbers.writable(np.full(case.shape, np.nan).astype(case.type))
        check(case, case.run(case.arrays(), numbers.asarray, out=out), expected, np.nan, numbers)


@pytest.mark.gpu
@pytest.mark.parametrize("number", NUMBERS, ids=str)
@pytest.mark.parametrize("expected", [0, 10**6])
def test_the_same_bits_on_every_run(cupy, number, expected):
    case = Case(image=(1, 200, 350, 48), channels=48, bsize=(8, 8), packed=True, expected=expected,
                extras=("bias", "residual"), **number)  # fmt: skip
    check_the_same_bits(cupy, fused_conv, case)


@pytest.mark.gpu
def test_graphs_replay_on_new_masks_and_refreshed_weights(cupy):
    case = Case(image=(1, 64, 64, 24), channels=24, bsize=(8, 8), dtype="float16", packed=True)
    check_replays(cupy, fused_conv, case, lambda packed: packed.w, lambda packed: packed.w)


@pytest.mark.gpu
def test_capture_needs_packed_weights(cupy):
    case = Case(image=(1, 32, 32, 24), channels=24, packed=True)
    check_capture_needs_packed_weights(cupy, fused_conv, case)


@pytest.mark.gpu
def test_work_follows_the_current_stream(cupy):
    case = Case(image=(2, 256, 256, 32), channels=32, bsize=(16, 16), table="all", packed=True)
    check_current_stream(cupy, fused_conv, case)


@pytest.mark.gpu
def test_what_has_no_kernel_says_why(cupy):
    for case, reason in (
        (Case(dtype="float64"), "float64"),
        (Case(image=(1, 8, 8, 0)), "empty images"),
        (Case(kernel=(600, 600), padding=((600, 600), (600, 600))), "shared memory"),
    ):
        with pytest.raises(NotImplementedError, match=reason):
            case.run(case.arrays(), cupy.asarray)


def test_orders_are_those_of_the_options():
    assert set(ORDER) == {"NHWC", "NCHW", "HWIO", "OIHW"}
