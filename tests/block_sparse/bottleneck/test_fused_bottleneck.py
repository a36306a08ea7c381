"""fused_bottleneck: loops = NumPy = CUDA, at every active pixel and at no other."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbnet_cupy import BottleneckWeights, PackedBottleneck, ShapeError, fused_bottleneck
from support import conv_oracles as oracles
from support.assertions import assert_same, to_numpy
from support.exhaustive import thinned
from support.fused_on_streams import (
    check_capture_needs_packed_weights,
    check_current_stream,
    check_replays,
    check_the_same_bits,
)
from support.strategies import FLOATS
from support.unit_cases import CASES, NUMBERS, NUMPY_CASES, SPREADING, STAGES, Case, dense, kinds


def run(case, xp, arrays, **options):
    """Call it; skip what only GPUs of compute capability 9.0 have room or tensor cores for."""
    try:
        return case.run(arrays, xp.asarray, **options)
    except NotImplementedError as error:
        hopper = xp.name == "cupy" and xp.module.cuda.Device().compute_capability == "90"
        if xp.name == "cupy" and not hopper and re.search("this GPU", str(error)):
            pytest.skip(str(error))
        raise


def expect(case, expected, elsewhere):
    """What the result is: ``elsewhere`` is what inactive pixels hold."""
    return np.where(case.active()[..., None], expected, elsewhere).astype(case.type)


def check_whole_numbers(case, xp):
    """And every active pixel is written, no other: the result held NaN."""
    arrays, exact = case.arrays(), case.exact()
    y = run(case, xp, arrays)
    assert_same(y, xp.writable(expect(case, exact, arrays[0])), signed_zero=False)
    out = xp.writable(np.full(case.shape, np.nan).astype(case.type))
    assert run(case, xp, arrays, out=out) is out
    expected = xp.writable(expect(case, exact, np.nan))
    assert_same(out, expected, allow_nan=True, signed_zero=False)


def check_other_numbers(case, xp):
    arrays, active = case.arrays(whole=False), case.active()
    y = to_numpy(run(case, xp, arrays))
    assert_same(y[~active], arrays[0][~active])
    case.assert_within_bound(y)


@pytest.mark.parametrize("case", thinned(CASES, 5), ids=str)
def test_whole_numbers_are_exact(xp, case):
    check_whole_numbers(case, xp)


@pytest.mark.parametrize("case", thinned([c for c in CASES if min(c.shape)], 5), ids=str)
def test_other_numbers_within_the_bound(xp, case):
    """Three roundings to 16 bits or tf32, one at the end, and the sums' own; see unit_cases.py."""
    check_other_numbers(case, xp)


@pytest.mark.parametrize("case", thinned(NUMPY_CASES, 5), ids=str)
def test_what_has_no_kernel_runs_on_numpy(xp, case):
    if xp.name == "cupy":
        reason = case.dtype if case.dtype == "float64" else r"precision='tf32'|16-byte vectors"
        with pytest.raises(NotImplementedError, match=reason):
            case.run(case.arrays(), xp.asarray)
        return
    check_whole_numbers(case, xp)
    check_other_numbers(case, xp)


def test_the_bound_sees_one_channel_go_missing():
    case = Case(image=(1, 9, 9, 96), middle=24, table="all")
    x, w1, w2, w3, *tables = case.arrays(whole=False)
    w3[:, :, 5] = 0
    with pytest.raises(AssertionError, match="beyond the bound, by up to"):
        case.assert_within_bound(case.run((x, w1, w2, w3, *tables), np.array))


@given(
    case=st.builds(
        Case,
        image=st.tuples(st.sampled_from([1, 2, 0]), st.integers(0, 9), st.integers(0, 9),
                        st.sampled_from([1, 3, 8, 0])),
        middle=st.sampled_from([1, 3, 8]),
        bsize=st.tuples(st.integers(1, 12), st.integers(1, 12)),
        dtype=st.sampled_from([dtype.name for dtype in FLOATS]),
        tight=st.booleans(),
        table=st.sampled_from(["some", "all", "corrupt", "repeated"]),
        packed=st.booleans(),
        seed=st.integers(0, 2**32 - 1),
    )
)  # fmt: skip
def test_drawn_whole_numbers_are_exact(case):
    """On NumPy alone: a GPU would compile a kernel for nearly every one of them."""
    out = np.full(case.shape, np.nan).astype(case.type)
    case.run(case.arrays(), np.array, out=out)
    expected = expect(case, case.exact(), np.nan)
    assert_same(out, expected, allow_nan=True, signed_zero=False)


SPREAD_IN = [Case(image=(2, 19, 17, cin), middle=cmid, expected=expected, **number)
             for number in NUMBERS for expected in (0, 10**6)
             for cin, cmid in ((96, 24), (24, 20), (40, 3), (64, 64))]  # fmt: skip


@pytest.mark.parametrize("case", thinned(SPREAD_IN, 5), ids=str)
@pytest.mark.parametrize(("value", "signs"), SPREADING, ids=str)
def test_nan_and_infinities_spread_as_in_the_dense_unit(xp, case, value, signs):
    """Not through channels that fill up vectors or planes; relu keeps NaN and cuts -inf off."""
    arrays = case.spoiled(value, signs)
    y = to_numpy(run(case, xp, arrays)).astype(np.float64)
    x = arrays[0].astype(np.float64)
    expected = np.where(case.active()[..., None], dense(*arrays), x)
    finite = np.isfinite(expected)
    assert 0.1 < finite.mean() < 1
    assert_same(kinds(y), kinds(expected))


@pytest.mark.parametrize("number", NUMBERS, ids=str)
@pytest.mark.parametrize("bsize", [(1, 3), (8, 8), (16, 16), (64, 64)], ids=str)
def test_all_active_equals_dense(xp, number, bsize):
    """Whatever the blocks, the bits are those of one block as large as the image."""
    case = Case(image=(2, 23, 18, 48), middle=24, bsize=bsize, table="all", expected=10**6,
                **number)  # fmt: skip
    arrays = case.arrays()
    y = run(case, xp, arrays)
    assert_same(y, run(replace(case, bsize=(23, 18)), xp, arrays))
    assert_same(y, xp.writable(case.exact().astype(case.type)), signed_zero=False)


@pytest.mark.parametrize("number", NUMBERS, ids=str)
@pytest.mark.parametrize("where", [(0, 0), (0, 2), (0, 3), (1, 0), (1, 1), (3, 0), (3, 3)], ids=str)
@pytest.mark.parametrize("expected", [0, 10**6])
def test_one_block_at_each_border_and_corner(xp, number, where, expected):
    """The rim reaches over the image's edge, where zeros pad a2(...) and not x."""
    case = Case(image=(1, 14, 15, 48), middle=24, bsize=(4, 4), table="empty", **number)
    arrays = case.arrays()
    x, *weights = map(xp.asarray, arrays)
    rows = np.array([(0, *where)], np.int32)
    out = xp.writable(np.full(case.shape, np.nan).astype(case.type))
    try:
        fused_bottleneck(
            x, BottleneckWeights(*weights), xp.asarray(np.array([1], np.int32)), xp.asarray(rows),
            bsize=4, precision=case.precision, expected=expected, out=out,
        )  # fmt: skip
    except NotImplementedError:
        run(case, xp, arrays)  # skips or raises
        raise
    active = oracles.active_outputs(case.shape[:3], rows, (4, 4))[..., None]
    exact = np.where(active, case.exact(), np.nan).astype(case.type)
    assert_same(out, xp.writable(exact), allow_nan=True, signed_zero=False)


def test_borders_differ_from_padding_the_image():
    """The cases are tests of borders: unlike a2 of zeros, zeros change the result."""
    case = Case(image=(1, 8, 8, 24), middle=16, table="all")
    x, *weights = case.arrays()
    padded = dense(np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0))), *weights)[:, 1:-1, 1:-1]
    assert (padded != case.exact())[:, 0].any()
    assert_same(padded[:, 1:-1, 1:-1], case.exact()[:, 1:-1, 1:-1])


def test_few_and_many_agree(xp):
    for number in NUMBERS:
        case = Case(image=(1, 40, 40, 96), middle=24, bsize=(8, 8), **number)
        few, many = (run(replace(case, expected=e), xp, case.arrays()) for e in (0, 10**6))
        assert_same(few, many, signed_zero=False)


def test_weights_are_packed_once_until_refreshed(xp):
    case = Case(image=(1, 16, 16, 32), middle=16, packed=True)
    (x, packed, *active), keywords = case.arguments(case.arrays(), xp.writable)
    first = fused_bottleneck(x, packed, *active, **keywords)
    assert_same(fused_bottleneck(x, packed, *active, **keywords), first)
    for array in packed.weights._arrays():
        array *= 2
    assert_same(fused_bottleneck(x, packed, *active, **keywords), first)
    packed.refresh()
    changed = fused_bottleneck(x, packed, *active, **keywords)
    assert_same(changed, fused_bottleneck(x, packed.weights, *active, **keywords))
    assert (to_numpy(changed) != to_numpy(first)).any()


def test_plain_weights_are_never_stale(xp):
    case = Case(image=(1, 16, 16, 32), middle=16, table="all")
    (x, weights, *active), keywords = case.arguments(case.arrays(), xp.writable)
    first = to_numpy(fused_bottleneck(x, weights, *active, **keywords))
    array = weights.w3
    array *= 2
    exact = 2 * (first.astype(np.float64) - to_numpy(x)) + to_numpy(x)
    second = to_numpy(fused_bottleneck(x, weights, *active, **keywords))
    assert_same(second, exact.astype(case.type), signed_zero=False)


@pytest.mark.parametrize("packed", [False, True])
def test_arrays_of_any_strides_and_tables_of_any_width(xp, packed):
    """Weights are copied where they are not contiguous; an image on a GPU is refused."""
    case = Case(image=(1, 16, 16, 32), middle=16, packed=packed)
    arrays = case.arrays()
    (x, weights, *active), keywords = case.arguments(arrays, xp.asarray)
    y = fused_bottleneck(x, weights, *active, **keywords)
    kernels = [xp.module.asfortranarray(xp.asarray(w)) for w in arrays[1:4]]
    for dtype in (np.float16, np.float32, np.float64):
        tables = [xp.module.repeat(xp.asarray(t.astype(dtype)), 2)[::2] for t in arrays[4:]]
        given = BottleneckWeights(*kernels, *tables)
        given = PackedBottleneck(given) if packed else given
        for _ in range(2):
            assert_same(fused_bottleneck(x, given, *active, **keywords), y, signed_zero=False)
    x = xp.module.asfortranarray(x)
    if xp.name == "cupy":
        with pytest.raises(ShapeError, match="contiguous"):
            fused_bottleneck(x, weights, *active, **keywords)
    else:
        assert_same(fused_bottleneck(x, weights, *active, **keywords), y)


def test_packed_weights_have_their_own_precision(xp):
    case = Case(image=(1, 16, 16, 16), dtype="float32", precision="tf32", packed=True)
    (x, packed, *active), keywords = case.arguments(case.arrays(), xp.asarray)
    y = run(case, xp, case.arrays())
    assert_same(fused_bottleneck(x, packed, *active, **keywords), y)
    assert_same(fused_bottleneck(x, packed, *active, **keywords, precision="tf32"), y)
    with pytest.raises(ValueError, match="precision must be 'tf32'"):
        fused_bottleneck(x, packed, *active, **keywords, precision="ieee")
    for bad in (None, packed, packed.weights._arrays()):
        with pytest.raises(TypeError, match="weights must be a BottleneckWeights"):
            PackedBottleneck(bad)
    with pytest.raises(ValueError, match="precision"):
        PackedBottleneck(packed.weights, precision="tf16")


def test_out_may_share_memory_with_nothing(xp):
    case = Case(image=(1, 12, 12, 16), packed=True)
    (x, packed, *active), keywords = case.arguments(case.arrays(), xp.writable)
    for _ in range(2):  # also where the call is known
        with pytest.raises(ShapeError, match=r"\bout\b.*\bx\b"):
            fused_bottleneck(x, packed, *active, **keywords, out=x)
        fused_bottleneck(x, packed, *active, **keywords)
    memory = xp.writable(np.zeros(2 * x.size, x.dtype))
    image, out = (memory[i : i + x.size].reshape(x.shape) for i in (0, x.size // 2))
    with pytest.raises(ShapeError, match=r"\bout\b.*\bx\b"):
        fused_bottleneck(image, packed, *active, **keywords, out=out)


def test_a_read_only_out_is_refused():
    case = Case(image=(1, 12, 12, 16))
    out = np.zeros(case.shape, case.type)
    out.flags.writeable = False
    with pytest.raises(ShapeError, match=r"\bout\b.*read-only"):
        case.run(case.arrays(), np.array, out=out)


def test_inputs_are_left_alone(xp):
    case = Case(image=(1, 12, 12, 16))
    arrays = case.arrays()
    (x, weights, *active), keywords = case.arguments(arrays, xp.writable)
    fused_bottleneck(x, weights, *active, **keywords)
    given = (*arrays, *case.indices())
    for after, before in zip((x, *weights._arrays(), *active), given, strict=True):
        assert_same(after, xp.writable(before))


@pytest.mark.parametrize("library", ["torch", "jax"])
@pytest.mark.parametrize("packed", [False, True])
def test_other_libraries(require, library, packed):
    module = require(library)
    asarray = module.asarray if library == "torch" else module.numpy.asarray
    case = Case(image=(1, 12, 12, 16), packed=packed)
    expected = case.run(case.arrays(), np.array)
    positional, keywords = case.arguments(case.arrays(), asarray)
    for _ in range(2):
        y = fused_bottleneck(*positional, **keywords)
        assert type(y).__module__.startswith(library)
        assert_same(np.asarray(y), expected)
    if library == "torch" and packed:
        positional[1].weights.w3.mul_(2)
        assert_same(fused_bottleneck(*positional, **keywords).numpy(), expected)
        positional[1].refresh()
        twice = [a if i != 3 else 2 * a for i, a in enumerate(case.arrays())]
        expected = replace(case, packed=False).run(twice, np.array)
        assert_same(fused_bottleneck(*positional, **keywords).numpy(), expected)


# ------------------------------------------------------------------------------------- on a GPU


@pytest.fixture(scope="module")
def cupy(require):
    return require("gpu")


@pytest.fixture(scope="module")
def hopper(cupy):
    if cupy.cuda.Device().compute_capability != "90":
        pytest.skip("needs compute capability 9.0: other GPUs have no room for all stages")
    return cupy


@pytest.mark.gpu
@pytest.mark.parametrize("number", NUMBERS, ids=str)
@pytest.mark.parametrize("stage", STAGES, ids=str)
@pytest.mark.parametrize("expected", [0, 10**6])
def test_the_same_bits_on_every_run(hopper, number, stage, expected):
    case = Case(image=(1, 100, 88, stage[0]), middle=stage[1], bsize=(8, 8), packed=True,
                expected=expected, **number)  # fmt: skip
    check_the_same_bits(hopper, fused_bottleneck, case)


@pytest.mark.gpu
@pytest.mark.parametrize("expected", [0, 10**6])
@pytest.mark.parametrize("stage", STAGES[::3], ids=str)  # without and with clusters
def test_graphs_replay_on_new_masks_and_refreshed_weights(hopper, stage, expected):
    case = Case(image=(1, 64, 64, stage[0]), middle=stage[1], bsize=(8, 8), packed=True,
                expected=expected)  # fmt: skip
    check_replays(
        hopper, fused_bottleneck, case, lambda packed: packed.weights,
        lambda packed: packed.weights.w3,
    )  # fmt: skip


@pytest.mark.gpu
def test_capture_needs_packed_weights(cupy):
    case = Case(image=(1, 32, 32, 32), packed=True)
    check_capture_needs_packed_weights(cupy, fused_bottleneck, case)


@pytest.mark.gpu
def test_work_follows_the_current_stream(cupy):
    case = Case(image=(2, 256, 256, 32), bsize=(16, 16), table="all", packed=True)
    check_current_stream(cupy, fused_bottleneck, case)


@pytest.mark.gpu
def test_what_has_no_kernel_says_why(cupy):
    for case, reason in (
        (Case(dtype="float64"), "float64"),
        (Case(dtype="float32"), "pass precision='tf32'"),
        (Case(image=(1, 8, 8, 12)), "12 channels of float16 .* 16-byte vectors"),
        (Case(image=(1, 8, 8, 512), middle=512), "do not fit this GPU's shared memory"),
    ):
        with pytest.raises(NotImplementedError, match=reason):
            case.run(case.arrays(), cupy.asarray)
    case = Case(image=(1, 8, 8, 16))
    (x, *rest), keywords = case.arguments(case.arrays(), cupy.asarray)
    shifted = cupy.zeros(x.size + 1, x.dtype)[1:].reshape(x.shape)
    with pytest.raises(NotImplementedError, match="aligned"):
        fused_bottleneck(shifted, *rest, **keywords)
