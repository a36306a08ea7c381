"""A mask in place of a list of blocks, and the block's size in place of its parameters.

Which blocks that makes active is told by loops over pixels; inside them the result is the dense
one, outside it is 0, the base or the shortcut. In every library.
"""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st_

import sbnet_cupy as sb
from sbnet_cupy import DeviceError, DTypeError, ShapeError
from sbnet_cupy.block_sparse.from_mask import as_batch
from support.adapter_cases import normal
from support.assertions import assert_close, assert_same, to_numpy

X = normal(2, 13, 17, 4, dtype=np.float64)
W = normal(3, 3, 4, 5, dtype=np.float64)
MASK = np.zeros(X.shape[:3], bool)
MASK[0, 3:6, 5:9] = MASK[1, 12, 16] = True
OPTIONS = [
    {"bsize": 4},
    {"bsize": (3, 5), "strides": 2, "padding": 1},
    {"bsize": 4, "strides": (1, 2), "padding": "same"},
    {"bsize": 16, "padding": "VALID"},
    {"bsize": (2, 3), "padding": "valid", "strides": 2},
    {"bsize": 1, "padding": (1, 0)},
]


def active_pixels(mask, out_hw, bsize, strides, shift):
    """Return bool ``[N, H', W']``: the output pixels of active blocks, by loops over the blocks."""
    active = np.zeros((len(mask), *out_hw), bool)
    (bh, bw), (sh, sw) = bsize, strides
    for n, h, w in np.ndindex(len(mask), -(-out_hw[0] // bh), -(-out_hw[1] // bw)):
        rows = [i for i in range(mask.shape[1]) if h * bh <= (i - shift[0]) // sh < (h + 1) * bh]
        columns = [j for j in range(mask.shape[2]) if w * bw <= (j - shift[1]) // sw < (w + 1) * bw]
        owned = [mask[n, i, j] for i in rows for j in columns]
        active[n, h * bh : (h + 1) * bh, w * bw : (w + 1) * bw] = any(owned)
    return active


def pair(value):
    return value if isinstance(value, tuple) else (value, value)


def expected_conv(options, base=0.0):
    """Return the dense convolution in active blocks, the base elsewhere."""
    dense_options = {k: v for k, v in options.items() if k != "bsize"}
    dense = sb.conv2d(X, W, **dense_options)
    strides, padding = pair(options.get("strides", 1)), options.get("padding", "SAME")
    # Without padding the result lacks a frame of the image, which is the middle of no window.
    cut = [str(padding).lower() == "valid"] * 2
    if isinstance(padding, tuple):
        cut = [not p for p in padding]
    shift = [(3 - s) // 2 if c else 0 for c, s in zip(cut, strides, strict=True)]
    active = active_pixels(MASK, dense.shape[1:3], pair(options["bsize"]), strides, shift)
    assert active.any() and (not active.all() or options["bsize"] == 16)
    return np.where(active[..., None], dense, base), active


def assert_conv(actual, options, base=0.0, dtype=np.float64):
    expected, _ = expected_conv(options, base)
    size = sb.conv2d(np.abs(X), np.abs(W), **{k: v for k, v in options.items() if k != "bsize"})
    assert_close(actual, expected, terms=W[..., 0].size, dtype=dtype, magnitude=size.max())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_sparse_conv2d(xp, options):
    x, w, mask = map(xp.asarray, (X, W, MASK))
    assert_conv(to_numpy(sb.sparse_conv2d(x, w, mask, **options)), options)


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.int64, np.float16, np.float32, np.float64])
def test_dtypes_and_shapes_of_masks(xp, dtype):
    x, w, mask = map(xp.asarray, (X, W, MASK.astype(dtype)))
    y = to_numpy(sb.sparse_conv2d(x, w, mask, bsize=4))
    assert_conv(y, OPTIONS[0])
    for other in (mask[..., None], mask[:, None]):
        assert_same(to_numpy(sb.sparse_conv2d(x, w, other, bsize=4)), y)
    one = to_numpy(sb.sparse_conv2d(x[:1], w, mask[0], bsize=4))
    assert_same(one, y[:1])


def test_capacity_base_and_list(xp):
    x, w, mask = map(xp.asarray, (X, W, MASK))
    base = normal(2, 13, 17, 5, dtype=np.float64)
    y = sb.sparse_conv2d(x, w, mask, bsize=4, base=xp.asarray(base), capacity=40)
    assert_conv(to_numpy(y), OPTIONS[0], base)
    active = sb.ActiveBlocks.from_mask(mask, bsize=4, ksize=3)
    base = xp.asarray(base)
    assert_same(sb.sparse_conv2d(x, w, active, bsize=4, base=base), y)
    params = sb.calc_block_params(X.shape, 6, 3)
    assert_same(sb.sparse_conv2d(x, w, mask, params, base=base), y)


@pytest.mark.parametrize("packed", [False, True])
def test_nchw_images_and_other_weights(xp, packed):
    x = xp.asarray(np.ascontiguousarray(X.transpose(0, 3, 1, 2)))
    w = xp.asarray(np.ascontiguousarray(W.transpose(3, 2, 0, 1)))
    options = {"w_format": "OIHW"}
    if packed:
        w, options = sb.PackedWeights(w, w_format="OIHW"), {}
    y = sb.sparse_conv2d(x, w, xp.asarray(MASK), bsize=4, data_format="NCHW", **options)
    assert_conv(to_numpy(y).transpose(0, 2, 3, 1), OPTIONS[0])


@given(
    size=st_.integers(1, 20), bsize=st_.integers(1, 6), kernel=st_.integers(1, 5),
    stride=st_.integers(1, 3), same=st_.booleans(), seed=st_.integers(0, 99),
)  # fmt: skip
def test_a_full_mask_gives_the_dense_result(size, bsize, kernel, stride, same, seed):
    """And with SAME padding no pixel of a mask is lost: each makes one block active."""
    rng = np.random.default_rng(seed)
    x, w = rng.standard_normal((1, size, 7, 2)), rng.standard_normal((kernel, 1, 2, 3))
    options = {"strides": (stride, 1), "padding": "SAME" if same else "VALID"}
    full = np.ones((1, size, 7), bool)
    y, dense = sb.sparse_conv2d(x, w, full, bsize=bsize, **options), sb.conv2d(x, w, **options)
    np.testing.assert_allclose(y, dense, rtol=0, atol=1e-12)
    if same:
        mask = np.zeros((1, size, 7), bool)
        mask[0, rng.integers(size), rng.integers(7)] = True
        geometry = {"ksize": (kernel, 1), **options}
        assert sb.ActiveBlocks.from_mask(mask, bsize=bsize, **geometry).count() == 1


def unit(dtype=np.float64, cout=4):
    return sb.BottleneckWeights.random(4, 4, cout, dtype=np.dtype(dtype).name)


@pytest.mark.parametrize("strides", [1, 2, (1, 2)], ids=str)
def test_unit(xp, strides):
    weights, project = unit(cout=5), normal(1, 1, 4, 5, dtype=np.float64)
    full = np.ones_like(MASK)
    options = {"w_project": project, "strides": strides, "bsize": (3, 4)}
    dense = sb.sparse_res_block_bottleneck(X, weights, full, **options)
    shortcut = sb.conv2d(X, project, strides=strides)
    active = active_pixels(MASK, dense.shape[1:3], (3, 4), pair(strides), (0, 0))
    expected = np.where(active[..., None], dense, shortcut)
    weights = weights._map_arrays(xp.asarray)
    options["w_project"] = xp.asarray(project)
    y = sb.sparse_res_block_bottleneck(xp.asarray(X), weights, xp.asarray(MASK), **options)
    assert_same(to_numpy(y), expected) if xp.name != "cupy" else np.testing.assert_allclose(
        to_numpy(y), expected, rtol=0, atol=1e-10 * np.abs(expected).max()
    )
    listed = sb.ActiveBlocks.from_mask(MASK, bsize=(3, 4), ksize=3, strides=strides)
    again = sb.sparse_res_block_bottleneck(
        xp.asarray(X), weights, listed._map_arrays(xp.asarray), **options
    )
    assert_same(to_numpy(again), to_numpy(y))


def test_gradients(xp):
    x, w, mask = map(xp.asarray, (X, W, MASK))
    grad_y = xp.asarray(normal(2, 13, 17, 5, dtype=np.float64))
    params = sb.calc_block_params(X.shape, 6, 3)
    active = sb.ActiveBlocks.from_mask(mask, bsize=4, ksize=3)
    expected = sb.sparse_conv2d_grad(grad_y, x, w, active, params)
    found = sb.sparse_conv2d_grad(grad_y, x, w, mask, bsize=4)
    for a, e in zip(found[:2], expected[:2], strict=True):
        assert_same(to_numpy(a), to_numpy(e))
    weights = unit()._map_arrays(xp.asarray)
    expected = sb.sparse_res_block_bottleneck_grad(x, x, weights, active, params)
    found = sb.sparse_res_block_bottleneck_grad(x, x, weights, mask, bsize=4)
    assert_same(to_numpy(found.x), to_numpy(expected.x))


# ------------------------------------------------------------------------------ the adapters


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_torch(torch, st, device, options):
    x, w, mask = (torch.from_numpy(a).to(device) for a in (X, W, MASK))
    w.requires_grad_()
    y = st.sparse_conv2d(x, w, mask, **options)
    assert_conv(to_numpy(y.detach()), options)
    assert_same(to_numpy(st.sparse_conv2d(x, w, mask, **options, capacity=500).detach()),
                to_numpy(y.detach()))  # fmt: skip
    y.sum().backward()
    assert w.grad.abs().sum() > 0
    nchw = st.sparse_conv2d(
        x.permute(0, 3, 1, 2).contiguous(), w, mask[:, None], data_format="NCHW", **options
    )
    assert_conv(to_numpy(nchw.detach()).transpose(0, 2, 3, 1), options)


def test_torch_unit(torch, st, device):
    tensor = lambda a: torch.from_numpy(np.array(a)).to(device)  # noqa: E731
    weights = unit()
    expected = sb.sparse_res_block_bottleneck(X, weights, MASK, bsize=4)
    given = tensor(X), weights._map_arrays(tensor)
    y = st.sparse_res_block_bottleneck(*given, tensor(MASK), bsize=4)
    np.testing.assert_allclose(to_numpy(y), expected, rtol=0, atol=1e-10 * np.abs(expected).max())
    one = st.sparse_res_block_bottleneck(given[0][:1], given[1], tensor(MASK[0]), bsize=4)
    assert_same(to_numpy(one), to_numpy(y[:1]))


def test_torch_compiled(torch, st):
    x, w, mask = map(torch.from_numpy, (X, W, MASK))

    @torch.compile(fullgraph=True, backend="eager")
    def convolve(x, w, mask):
        return st.sparse_conv2d(x, w, mask, bsize=4, capacity=20)

    assert_conv(to_numpy(convolve(x, w, mask)), OPTIONS[0])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("jitted", [False, True])
def test_jax(jax, sbj, options, jitted):
    x, w, mask = (jax.numpy.asarray(a, a.dtype if a.dtype == bool else "float32") for a in
                  (X, W, MASK))  # fmt: skip

    def convolve(x, w, mask):
        capacity = 400 if jitted else None
        return sbj.sparse_conv2d(x, w, mask, **options, capacity=capacity)

    y = (jax.jit(convolve) if jitted else convolve)(x, w, mask)
    assert_conv(to_numpy(y), options, dtype=np.float32)
    grad = jax.grad(lambda w: sbj.sparse_conv2d(x, w, mask, **options, capacity=400).sum())(w)
    assert np.abs(to_numpy(grad)).sum() > 0


def test_jax_unit(jax, sbj):
    weights = unit(np.float32)
    x = X.astype(np.float32)
    expected = sb.sparse_res_block_bottleneck(x, weights, MASK, bsize=4)
    given = jax.numpy.asarray(x), weights._map_arrays(jax.numpy.asarray)
    apply = jax.jit(lambda *a: sbj.sparse_res_block_bottleneck(*a, bsize=4, capacity=20))
    y = apply(*given, jax.numpy.asarray(MASK))
    # Three sums of at most 36 products, each of which may enlarge the error of the one before.
    bound = 200 * np.finfo(np.float32).eps * np.abs(expected).max() * 36
    np.testing.assert_allclose(to_numpy(y), expected, rtol=0, atol=bound)


def test_jax_says_that_jit_needs_a_capacity(jax, sbj):
    arrays = [jax.numpy.asarray(a) for a in (X, W, MASK)]
    with pytest.raises(ShapeError, match="capacity"):
        jax.jit(lambda *a: sbj.sparse_conv2d(*a, bsize=4))(*arrays)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_tensorflow(tf, sbt, call_tensors, options):
    convolve = call_tensors(lambda x, w, mask: sbt.sparse_conv2d(x, w, mask, **options))
    assert_conv(to_numpy(convolve(X, W, MASK)), options)


def test_tensorflow_unit(tf, sbt, call_tensors):
    weights = unit()
    expected = sb.sparse_res_block_bottleneck(X, weights, MASK, bsize=4)

    def apply(x, w1, mask):
        given = sb.BottleneckWeights(w1, *weights._map_arrays(tf.constant)._arrays()[1:])
        return sbt.sparse_res_block_bottleneck(x, given, mask, bsize=4, capacity=20)

    y = to_numpy(call_tensors(apply)(X, weights.w1, MASK))
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-10 * np.abs(expected).max())


def test_a_torch_mask_beside_native_images(xp, torch):
    """On the device of the image; elsewhere it is refused."""
    mask = torch.from_numpy(MASK)
    x, w = map(xp.asarray, (X, W))
    if xp.name == "cupy":
        with pytest.raises(DeviceError, match="indices is torch on cpu"):
            sb.sparse_conv2d(x, w, mask, bsize=4)
        if not torch.cuda.is_available():
            pytest.skip("needs a PyTorch that sees the GPU")
        mask = mask.to("cuda")
    y = sb.sparse_conv2d(x, w, mask, bsize=4)
    assert type(y) is type(x)
    assert_conv(to_numpy(y), OPTIONS[0])
    pooled = sb.mask_conv2d(x, w, mask.double())
    assert_same(to_numpy(pooled), to_numpy(sb.mask_conv2d(x, w, xp.asarray(MASK.astype(float)))))


# ------------------------------------------------------------------------------ what is refused


def test_masks_of_narrow_images():
    """An axis of one pixel is no channel, and three columns are no list of blocks."""
    for h, w in ((5, 1), (1, 5), (1, 1), (5, 6)):
        mask = np.arange(2 * h * w).reshape(2, h, w)
        for shape in ((2, h, w), (2, 1, h, w), (2, h, w, 1)):
            assert_same(as_batch("mask", mask.reshape(shape), (2, h, w)), mask)
            assert_same(as_batch("mask", mask.reshape(shape), (None, h, w)), mask)
    unknown = SimpleNamespace(shape=(None, 5, 6))  # as TensorFlow has them
    assert as_batch("mask", unknown, (2, 5, 6)) is unknown
    x, mask = X[:1, :, 4:7], MASK[0, :, 4:7]
    expected = sb.sparse_conv2d(x, W, mask[None], bsize=4)
    assert_same(sb.sparse_conv2d(x, W, mask, bsize=4), expected)


def refuses(error, match, **changes):
    arguments = {"x": X, "w": W, "indices": MASK, "bsize": 4} | changes
    with pytest.raises(error, match=match):
        sb.sparse_conv2d(**arguments)


def test_refusals():
    active = sb.ActiveBlocks.from_mask(MASK, bsize=4, ksize=3)
    params = sb.calc_block_params(X.shape, 6, 3)
    refuses(TypeError, "^bsize must be given with a mask", bsize=None)
    refuses(TypeError, "^bsize must be None where block_params is given", block_params=params)
    refuses(TypeError, "^block_params must be", bsize=None, block_params=(4, 4))
    refuses(TypeError, "^capacity must be None with a list", indices=active, capacity=4)
    by_params = {"indices": active, "bsize": None, "block_params": params}
    refuses(TypeError, "^capacity must be None with a list", **by_params, capacity=4)
    for neither in (None, 3, MASK.tolist() * 2):
        refuses(TypeError, "^indices must be a mask", indices=neither, capacity=4)
    refuses(TypeError, "^block_params must be", indices=active, bsize=None)
    refuses(ShapeError, "^bsize must be a positive integer or a pair of them, got 0$", bsize=0)
    refuses(ShapeError, "^capacity", capacity=-1)
    refuses(ShapeError, r"^indices.*\(2, 13, 17\).*got \(2, 13, 16\)$", indices=MASK[..., 1:])
    refuses(ShapeError, r"^indices.*got \(13, 17\)$", indices=MASK[0])
    refuses(ShapeError, "^indices", indices=MASK[:1])
    refuses(TypeError, "^indices must be", indices=np.ones(3, bool))
    rows = active.active_block_indices
    refuses(TypeError, "^indices must be .* give the pair$", indices=rows)
    refuses(TypeError, "^indices must be .* give the pair$", indices=rows, bsize=None,
            block_params=params)  # fmt: skip
    refuses(DTypeError, "^indices", indices=MASK.astype(complex))
    refuses(TypeError, "indices must be", indices=MASK.tolist())
    refuses(ShapeError, "^indices must list blocks .* with the same bsize", indices=active, bsize=3)


def test_refusals_of_adapters(torch, st, jax, sbj, tf, sbt):
    x, w = map(torch.from_numpy, (X, W))
    with pytest.raises(DTypeError, match=r"^indices must be a torch\.Tensor"):
        st.sparse_conv2d(x, w, MASK, bsize=4)
    x, w = map(jax.numpy.asarray, (X, W))
    with pytest.raises(DeviceError, match=r"^indices must be a JAX array"):
        sbj.sparse_conv2d(x, w, MASK, bsize=4)
    x, w = map(tf.constant, (X, W))
    with pytest.raises(DeviceError, match=r"^indices must be a TensorFlow tensor"):
        sbt.sparse_conv2d(x, w, MASK, bsize=4)
