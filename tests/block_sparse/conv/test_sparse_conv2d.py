"""sparse_conv2d and mask_conv2d: the dense value on active blocks, the base elsewhere."""

import sys

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from conftest import Library
from sbnet_cupy import PackedWeights, ShapeError, calc_block_params, reduce_mask
from sbnet_cupy.block_sparse.conv.mask_conv2d import mask_conv2d
from sbnet_cupy.block_sparse.conv.sparse_conv2d import sparse_conv2d
from sbnet_cupy.core.operator import clear_plans
from sbnet_cupy.dense.activation import ACTIVATIONS
from support import conv_oracles as oracles
from support.assertions import assert_same, to_numpy
from support.conv_cases import ORDER, pairs
from support.sparse_conv_cases import Case, cases
from support.strategies import FLOATS, MASK_DTYPES

METHODS = st.sampled_from(["auto", "gather", "fused"])


def method_on(xp, method):
    """On a GPU each drawn case would compile a kernel; test_fused_conv.py has fixed ones."""
    return "gather" if xp.name == "cupy" else method


@given(case=cases(), based=st.booleans(), method=METHODS)
@example(case=Case(strides=(2, 2), padding="VALID", density=1.0), based=True, method="auto")
@example(case=Case(strides=(2, 2), padding="VALID", density=1.0), based=False, method="fused")
def test_dense_where_active_and_base_elsewhere(xp, case, based, method):
    """The base is NaN: no inactive pixel is written, and every active one is."""
    x, w = case.data()
    dense = oracles.conv2d(x, w, case.strides, case.padding)
    active = oracles.active_outputs(dense.shape[:3], case.indices()[2], case.params.bsize_out)
    elsewhere = np.full(dense.shape, np.nan if based else 0)
    order = ORDER[case.data_format]
    base = xp.asarray(elsewhere.astype(case.dtype).transpose(order)) if based else None
    y = case.run(xp, x, w, base=base, method=method_on(xp, method))
    expected = np.where(active[..., None], dense, elsewhere).astype(case.dtype)
    assert_same(y, xp.writable(expected.transpose(order)), allow_nan=based, signed_zero=False)
    if based:
        assert_same(base, xp.writable(elsewhere.astype(case.dtype).transpose(order)),
                    allow_nan=True)  # fmt: skip
    if case.density == 1:
        assert active.all()


@given(
    case=cases(), activation=st.sampled_from(ACTIVATIONS), biased=st.booleans(), method=METHODS
)
def test_bias_and_activation(xp, case, activation, biased, method):
    x, w = case.data(whole=False)
    bias = np.random.default_rng(case.seed).standard_normal(case.channels).astype(np.float32)
    bias = bias if biased else None
    epsilon = oracles.epsilon_of_sums(case.dtype)
    z = oracles.bounded_conv2d(oracles.exact(x), w, case.strides, case.padding, epsilon=epsilon)
    z = oracles.bounded_affine(z, None, bias, activation, epsilon=epsilon)
    z = oracles.bounded_round(z, case.dtype)
    shape = z.value.shape[:3]
    active = oracles.active_outputs(shape, case.indices()[2], case.params.bsize_out)[..., None]
    expected = oracles.Bounded(*(np.where(active, a, 0).transpose(ORDER[case.data_format])
                                 for a in z))  # fmt: skip
    bias = None if bias is None else xp.asarray(bias)
    y = case.run(xp, x, w, bias=bias, activation=activation, method=method_on(xp, method))
    oracles.assert_within(to_numpy(y), expected)


@pytest.mark.parametrize("capacity", [None, 0, 1, 100])
@pytest.mark.parametrize("pixels", [[], [(0, 0)], [(0, 0), (8, 10), (4, 4)]])
def test_from_a_mask(xp, pixels, capacity):
    """With room for more blocks than are active, for fewer, and for none."""
    case = Case(image=(1, 9, 11, 3))
    mask = np.zeros((1, 9, 11), bool)
    for h, w in pixels:
        mask[0, h, w] = True
    params = case.params
    grid = {"bsize": params.bsize, "boffset": params.boffset, "bstride": params.bstride}
    active = reduce_mask(xp.asarray(mask), params.bcount, **grid, capacity=capacity)
    x, w = case.data()
    y = sparse_conv2d(xp.asarray(x), xp.asarray(w), active, params)
    dense = oracles.conv2d(x, w)
    rows = to_numpy(active.active_block_indices)
    written = oracles.active_outputs(dense.shape[:3], rows, params.bsize_out)
    assert_same(y, xp.writable((dense * written[..., None]).astype(np.float32)), signed_zero=False)
    if capacity is None:
        reached = oracles.max_pool(mask, (3, 3), (1, 1), "SAME")
        assert written[reached > 0].all()  # every output that a set pixel reaches


@pytest.mark.parametrize("method", ["auto", "gather", "fused"])
@pytest.mark.parametrize("precision", [None, "ieee", "tf32"])
def test_methods_and_precisions(xp, method, precision):
    case = Case(density=1.0)
    x, w = case.data()
    y = case.run(xp, x, w, method=method, precision=precision)
    assert_same(y, xp.writable(oracles.conv2d(x, w).astype(np.float32)), signed_zero=False)


@pytest.mark.parametrize("method", ["auto", "gather", "fused"])
@pytest.mark.parametrize("data_format", ["NHWC", "NCHW"])
def test_out_and_base(xp, method, data_format):
    """``out`` receives everything; ``out=base`` keeps what is not active."""
    case = Case(data_format=data_format)
    x, w = case.data()
    dense = oracles.conv2d(x, w)
    active = oracles.active_outputs(dense.shape[:3], case.indices()[2], case.params.bsize_out)
    order, nan = ORDER[data_format], np.full(dense.shape, np.nan, np.float32)

    def expected(elsewhere):
        image = np.where(active[..., None], dense, elsewhere).astype(np.float32)
        return xp.writable(image.transpose(order))

    out = xp.writable(nan.transpose(order))
    assert case.run(xp, x, w, out=out, method=method) is out
    assert_same(out, expected(0), signed_zero=False)
    out = xp.writable(nan.transpose(order))
    base = xp.asarray(np.full(dense.shape, 7, np.float32).transpose(order))
    assert case.run(xp, x, w, base=base, out=out, method=method) is out
    assert_same(out, expected(7), signed_zero=False)
    assert (to_numpy(base) == 7).all()
    out = xp.writable(nan.transpose(order))
    assert case.run(xp, x, w, base=out, out=out, method=method) is out
    assert_same(out, expected(np.nan), allow_nan=True, signed_zero=False)


@pytest.mark.parametrize("method", ["auto", "gather", "fused"])
def test_packed_weights(xp, method):
    """With their own scale, bias, format and precision."""
    case = Case(w_format="OIHW", image=(2, 9, 11, 8), channels=8)
    x, w = case.data()
    scale, bias = np.full(8, 2, np.float32), np.arange(8, dtype=np.float32)
    tables = {"scale": xp.asarray(scale), "bias": xp.asarray(bias)}
    w = xp.asarray(w.transpose(ORDER["OIHW"]))
    weights = PackedWeights(w, **tables, w_format="OIHW", precision="tf32")
    indices = tuple(map(xp.asarray, case.indices()[:2]))
    dense = oracles.conv2d(*case.data()) * scale + bias
    active = oracles.active_outputs(dense.shape[:3], case.indices()[2], case.params.bsize_out)
    expected = xp.writable((dense * active[..., None]).astype(np.float32))
    for _ in range(2):
        y = sparse_conv2d(xp.asarray(x), weights, indices, case.params, method=method)
        assert_same(y, expected, signed_zero=False)
    with pytest.raises(ValueError, match="bias must be None"):
        sparse_conv2d(xp.asarray(x), weights, indices, case.params, bias=tables["bias"])


@pytest.mark.gpu
def test_auto_is_fused_where_there_is_a_kernel(require, monkeypatch):
    cupy = require("gpu")
    module, called = sys.modules["sbnet_cupy.block_sparse.conv.sparse_conv2d"], []
    plan_fused_conv = module.plan_fused_conv

    def count_plans(*args):
        called.append(1)
        return plan_fused_conv(*args)

    clear_plans()
    monkeypatch.setattr(module, "plan_fused_conv", count_plans)
    for dtype, count in ((np.float16, 1), (np.float64, 1), (np.float32, 2)):
        case = Case(dtype=np.dtype(dtype))
        case.run(Library("cupy", cupy), *case.data())
        assert len(called) == count


def test_corrupt_rows_are_dropped(xp):
    case = Case(image=(1, 9, 11, 3), density=1.0)
    x, w = case.data()
    worst = np.iinfo(np.int32)
    table = [[0, 0, 0], [5, 0, 0], [-1, 0, 0], [0, 99, 0], [0, worst.max, worst.max]]
    table += [[0, worst.min, 1], [0, 1, 1]]
    indices = xp.asarray(np.array([7], np.int32)), xp.asarray(np.array(table, np.int32))
    y = sparse_conv2d(xp.asarray(x), xp.asarray(w), indices, case.params)
    dense = oracles.conv2d(x, w)
    rows = [(0, 0, 0), (0, 1, 1)]
    written = oracles.active_outputs(dense.shape[:3], rows, case.params.bsize_out)
    assert_same(y, xp.writable((dense * written[..., None]).astype(np.float32)), signed_zero=False)


def test_block_params_must_belong_to_the_convolution(xp):
    case = Case()
    x, w = map(xp.asarray, case.data())
    indices = tuple(map(xp.asarray, case.indices()[:2]))
    others = (
        calc_block_params((9, 20), case.params.bsize, 3),  # another image
        calc_block_params((9, 11), case.params.bsize, 5),  # another kernel
        calc_block_params((9, 11), case.params.bsize, 3, padding="VALID"),
        calc_block_params((9, 11), (7, 7), 3, strides=2),
        calc_block_params((9, 11), (2, 2), 1),  # smaller than the kernel
    )
    for params in others:
        with pytest.raises(ShapeError, match="block_params"):
            sparse_conv2d(x, w, indices, params)


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_other_libraries(require, library):
    module = require(library)
    asarray = module.asarray if library == "torch" else module.numpy.asarray
    case = Case()
    x, w = case.data()
    indices = case.indices()[:2]
    base = np.ones((2, 9, 11, 5), np.float32)
    y = sparse_conv2d(
        asarray(x), asarray(w), tuple(map(asarray, indices)), case.params, base=asarray(base)
    )
    assert type(y).__module__.startswith(library)
    assert_same(np.asarray(y), sparse_conv2d(x, w, indices, case.params, base=base))


@given(
    size=pairs(0, 7),
    kernel=pairs(1, 4),
    strides=pairs(1, 3),
    padding=st.sampled_from(["SAME", "VALID", ((3, 0), (1, 3))]),
    dtype=st.sampled_from(FLOATS),
    mask_dtype=st.sampled_from(MASK_DTYPES),
    channel=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_mask_conv2d(xp, size, kernel, strides, padding, dtype, mask_dtype, channel, seed):
    rng = np.random.default_rng(seed)
    x = rng.integers(-3, 4, (2, *size, 2)).astype(dtype)
    w = rng.integers(-1, 2, (*kernel, 2, 3)).astype(dtype)
    low = 0 if mask_dtype.kind in "bu" else -2
    mask = (rng.integers(low, 3, (2, *size)) * (rng.random((2, *size)) < 0.4)).astype(mask_dtype)
    pooled = oracles.max_pool(mask.astype(np.float64), kernel, strides, padding)
    expected = oracles.conv2d(x, w, strides, padding) * pooled[..., None]
    given = mask[..., None] if channel else mask
    y = mask_conv2d(xp.asarray(x), xp.asarray(w), xp.asarray(given), strides, padding)
    assert_same(y, xp.writable(expected.astype(dtype)), signed_zero=False)


def test_sparse_equals_masked_where_the_mask_reaches(xp):
    """Where the pooled mask is 1, block-sparse and masked dense convolution agree."""
    rng = np.random.default_rng(0)
    case = Case(image=(1, 20, 24, 3))
    x, w = map(xp.asarray, case.data())
    mask = xp.asarray(rng.random((1, 20, 24)) < 0.02)
    params = case.params
    grid = {"bsize": params.bsize, "boffset": params.boffset, "bstride": params.bstride}
    y = to_numpy(sparse_conv2d(x, w, reduce_mask(mask, params.bcount, **grid), params))
    masked = to_numpy(mask_conv2d(x, w, mask, 1, "SAME"))
    reached = oracles.max_pool(to_numpy(mask), (3, 3), (1, 1), "SAME") > 0
    assert 0 < reached.sum() < reached.size
    assert_same(y[reached], masked[reached], signed_zero=False)
    assert (masked[~reached] == 0).all()
