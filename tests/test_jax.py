"""The JAX adapter: the package's bits inside jit, exact gradients, vmap, and no trap sprung."""

import ctypes
import doctest
import functools
import importlib
import inspect
import itertools
import re
import subprocess
import sys
import types

import ml_dtypes
import numpy as np
import pytest
from assertions import assert_close, assert_same, to_numpy
from bad_calls import BAD, VALID, Spoiled
from conftest import _gpu_expected, require
from frameworks import Jax
from test_errors import spoil_id
from test_structure import doctests_of

import sbnet_cupy as sb
from sbnet_cupy import DeviceError, DTypeError, ShapeError
from sbnet_cupy.ops import sparse_scatter as scatter_op
from sbnet_cupy.ops._grid import Grid
from sbnet_cupy.ops.reduce_mask import _plan, scratch_slots

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 8, 9, 3)).astype(np.float32)
MASK = (RNG.random((2, 8, 9)) < 0.1).astype(np.float32)
COUNT = np.array([5], np.int32)
ROWS = np.array(  # in no order; one row names no image, one lies past the count
    [[1, 0, 1], [0, 0, 0], [7, 0, 0], [0, 1, 1], [1, 2, 2], [0, 1, 0]], np.int32
)
TWICE = np.array([[0, 1, 1], [1, 0, 0], [0, 1, 1], [0, 0, 0], [-1, -1, -1], [1, 1, 1]], np.int32)
PLAIN = {"bsize": (4, 3)}
OVERLAP = {"bsize": (4, 5), "boffset": (-1, -1), "bstride": (2, 3)}
OPTIONS = [
    PLAIN,
    OVERLAP,
    PLAIN | {"transpose": True},
    PLAIN | {"data_format": "NCHW"},
    OVERLAP | {"data_format": "NCHW", "transpose": True},
]


PLACES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if _gpu_expected() else [])]


@pytest.fixture(params=PLACES, scope="module")
def place(request, jax):
    """A device of JAX, and the library whose results must be the same there."""
    native = np if request.param == "cpu" else require("gpu")
    lib = Jax(jax, request.param, native)
    return types.SimpleNamespace(
        name=request.param, make=lib.make, address=lib.address, native=native.asarray
    )


@pytest.fixture(scope="module")
def sbj(jax):
    import sbnet_cupy.jax as sbj

    return sbj


def image(options, dtype=np.float32):
    """Return the image, in the layout of the options."""
    x = X if options.get("data_format") != "NCHW" else X.transpose(0, 3, 1, 2)
    x = 8 * x if np.dtype(dtype).kind in "iu" else x
    return np.ascontiguousarray(x).astype(dtype)


def stack(options, dtype=np.float32):
    """Return a stack of new values, in the layout of the options."""
    shape = sb.sparse_gather(image(options), COUNT, ROWS, **options).shape
    return (8 * np.random.default_rng(1).standard_normal(shape)).astype(dtype)


def same(actual, native):
    """Compare a JAX array with a NumPy or CuPy one, bit for bit."""
    assert_same(to_numpy(actual), to_numpy(native))


def compare(place, function, core, *arrays, wrap, **options):
    """The function of JAX arrays gives the bits that the package gives for native ones."""
    actual = wrap(functools.partial(function, **options))(*map(place.make, arrays))
    same(actual, core(*map(place.native, arrays), **options))


@pytest.fixture(params=["jit", "eager"])
def wrap(request, jax):
    return jax.jit if request.param == "jit" else lambda function: function


# -------------------------------------------------------------------------------------- results


@pytest.mark.parametrize("capacity", [0, 1, 20])
@pytest.mark.parametrize("options", [{}, {"tol": 0.2, "avgpool": True}], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.bool_, np.int8, BFLOAT16], ids=str)
def test_reduce_mask(sbj, place, wrap, dtype, options, capacity):
    grid = {"bsize": 3, "boffset": (-1, 0), "bstride": 2}

    def listed(module, mask):
        return module.reduce_mask(mask, (4, 4), capacity=capacity, **grid, **options)

    mask = MASK.astype(dtype)
    expected = listed(sb, place.native(mask))
    actual = wrap(functools.partial(listed, sbj))(place.make(mask))
    assert type(actual) is sb.ActiveBlocks and actual.grid == expected.grid
    assert actual.count() == expected.count() > 1
    for a, e in zip(actual, expected, strict=True):
        same(a, e)


def test_reduce_mask_counts_where_shapes_may_depend_on_data(sbj, place):
    active = sbj.reduce_mask(place.make(MASK[..., None]), (2, 3), bsize=4)
    same(active.active_block_indices, sb.reduce_mask(MASK, (2, 3), bsize=4).active_block_indices)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16, np.bool_, "c8"], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_sparse_gather(sbj, place, wrap, options, dtype):
    arrays = image(options, dtype), COUNT, ROWS
    compare(place, sbj.sparse_gather, sb.sparse_gather, *arrays, wrap=wrap, **options)


@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu"])
@pytest.mark.parametrize("options", OPTIONS[1:4], ids=str)
def test_fused_sparse_gather(sbj, place, jax, options, activation):
    x, scale, shift = image(options, BFLOAT16), X[0, 0, 0].astype(BFLOAT16), X[0, 0, 1]
    function = jax.jit(functools.partial(sbj.sparse_gather, activation=activation, **options))
    actual = function(*map(place.make, (x, COUNT, ROWS)), scale=place.make(scale),
                      shift=place.make(shift))  # fmt: skip
    options = options | {"scale": place.native(scale), "shift": place.native(shift)}
    native = map(place.native, (x, COUNT, ROWS))
    same(actual, sb.sparse_gather(*native, activation=activation, **options))


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16, np.int8], ids=str)
@pytest.mark.parametrize("rows", [ROWS, TWICE], ids=["once", "twice"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_sparse_scatter(sbj, place, wrap, options, rows, dtype, add):
    arrays = stack(options, dtype), COUNT, rows, image(options, dtype)
    options = options | {"add": add, "atomic": rows is TWICE or (add and "bstride" in options)}
    compare(place, sbj.sparse_scatter, sb.sparse_scatter, *arrays, wrap=wrap, **options)


def test_nothing_to_do(sbj, place, wrap):
    """XLA calls nobody for an empty result, and an empty argument changes nothing."""
    empty = place.make(np.zeros((0, 3), np.int32)), place.make(np.zeros((0, 4, 4, 3), np.float32))
    x, count = place.make(X), place.make(COUNT)
    assert wrap(functools.partial(sbj.sparse_gather, bsize=4))(x, count, empty[0]).shape == (
        0, 4, 4, 3,
    )  # fmt: skip
    scatter = wrap(functools.partial(sbj.sparse_scatter, bsize=4))
    same(scatter(empty[1], count, empty[0], x), X)
    flat = place.make(np.zeros((2, 0, 9, 3), np.float32))
    blocks = wrap(functools.partial(sbj.sparse_gather, bsize=2))(flat, count, place.make(ROWS))
    same(blocks, np.zeros((6, 2, 2, 3), np.float32))
    active = sbj.reduce_mask(flat[..., 0], (2, 2), bsize=4, capacity=3)
    assert active.count() == 0 and (active.active_block_indices == -1).all()
    assert sbj.reduce_mask(x[..., 0], (0, 2), bsize=4, capacity=3).count() == 0


def test_sixty_four_bits_under_x64(sbj, place, jax):
    with jax.enable_x64(True):
        for dtype in (np.float64, np.int64, np.complex128):
            x = image(PLAIN, dtype)
            blocks = jax.jit(functools.partial(sbj.sparse_gather, **PLAIN))
            got = blocks(*map(place.make, (x, COUNT, ROWS)))
            same(got, sb.sparse_gather(*map(place.native, (x, COUNT, ROWS)), **PLAIN))
            active = sbj.reduce_mask(place.make(MASK.astype(np.float64)), 2, bsize=4, capacity=4)
            assert {str(array.dtype) for array in active} == {"int32"}


# --------------------------------------------------------------------------------------- memory


def test_no_byte_is_copied(sbj, place, jax, monkeypatch):
    """What our code reads and writes is the memory of the caller's arrays and of the results."""
    seen = {}

    def watch(module, name):
        original = getattr(module, name)

        def watched(*arrays, out, **options):
            seen[name] = [*map(pointer, arrays), pointer(out)]
            return original(*arrays, out=out, **options)

        monkeypatch.setattr(module, name, watched)

    def pointer(array):
        return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr

    watch(sys.modules["sbnet_cupy.jax._operations"], "core_gather")
    watch(sys.modules["sbnet_cupy.jax._operations"], "core_scatter")
    x, count, rows = map(place.make, (X, COUNT, ROWS))
    blocks = jax.jit(functools.partial(sbj.sparse_gather, **PLAIN))(x, count, rows)
    blocks.block_until_ready()
    assert seen["core_gather"] == [*map(place.address, (x, count, rows, blocks))]

    scatter = functools.partial(sbj.sparse_scatter, **PLAIN)
    kept = jax.jit(scatter)(blocks, count, rows, x).block_until_ready()
    assert place.address(kept) not in (place.address(x), place.address(blocks))
    same(x, X)
    x = jax.jit(jax.numpy.copy)(x)  # XLA's own memory, and not maybe NumPy's, which it never reuses
    donated = place.address(x)
    y = jax.jit(scatter, donate_argnums=3)(blocks, count, rows, x).block_until_ready()
    assert seen["core_scatter"] == [*map(place.address, (blocks, count, rows, y, y))]
    assert place.address(y) == donated and x.is_deleted()


def test_inputs_are_read_only_and_their_address_is_known(jax, sbj):
    from sbnet_cupy.jax import _callbacks

    found = {}

    def body(spec, results, scratch, x):
        found["writeable"] = [results[0].flags.writeable, x.flags.writeable, scratch.size]
        results[0][...] = x

    def address(buffer):
        found["address"] = _address(buffer), np.asarray(buffer).ctypes.data
        return np.asarray(buffer)

    _address = _callbacks.address
    with jax.default_device(jax.devices("cpu")[0]):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_callbacks, "_numpy_view", address)
            half = jax.ShapeDtypeStruct((3,), BFLOAT16)
            _callbacks.call(lambda *_: None, 0, [half], ())[0].block_until_ready()
        single = jax.ShapeDtypeStruct((3,), np.float32)
        (y,) = _callbacks.call(body, 0, [single], (jax.numpy.ones(3),), scratch=7)
    assert (y == 1).all() and found["writeable"] == [True, False, 7]
    assert found["address"][0] == found["address"][1]


def test_scratch_is_enough_for_any_gpu():
    """As many slots as the widest launch needs, whatever the multiprocessors and the alignment."""
    for sm_count in (1, 20, 132, 192):
        for side in (1, 7, 100, 2000):
            shape, blocks, grid = (1, side, side), (1, side, side), Grid((1, 1), (0, 0), (1, 1))
            for word, average in itertools.product((1, 4, 16), (False, True)):
                plan = _plan(shape, 1, word, blocks, grid, average, sm_count, clusters=False)
                assert 1 + plan.thread_blocks <= scratch_slots(shape, blocks, grid, average)


def test_scratch_is_enough_for_overlapping_blocks(monkeypatch):
    """What the GPU body allocates is what XLA is asked for."""
    launched = []
    monkeypatch.setattr(scatter_op._kernels, "launch", lambda *a, **_: launched.append(a[5]))
    for options in OPTIONS:
        grid = Grid(*(options.get(name, zero) for name, zero in
                      (("bsize", None), ("boffset", (0, 0)), ("bstride", options["bsize"]))))
        x, blocks = image(options), stack(options)
        layout = (options.get("data_format", "NHWC"), options.get("transpose", False))
        layout = scatter_op.resolve_layout(x, *layout)
        scatter_op._scatter_overlap_cuda(blocks, COUNT, ROWS, x, layout, grid, True)
        heads, links = launched[-1][3:5]
        assert (heads.nbytes, links.nbytes) == scatter_op.scratch_sizes(len(ROWS), layout, grid)


def test_the_cuda_kernels_inside_jit(sbj, jax, require):
    """What a GPU would run, the kernels with our scratch, run on the CPU: the bits of NumPy."""
    require("g++")
    import host_cuda
    from test_cuda_on_host import Memory, device

    def chain(module, x, mask):
        active = module.reduce_mask(mask, (4, 4), capacity=20, **OVERLAP)
        blocks = module.sparse_gather(x, *active, activation="relu", **OVERLAP)
        y = module.sparse_scatter(blocks, *active, x, **OVERLAP)
        y = module.sparse_scatter(blocks, *active, y, add=True, atomic=True, **OVERLAP)
        return module.sparse_scatter(blocks, *active, y, bsize=(4, 5))

    expected = chain(sb, X, MASK)
    jitted = jax.jit(functools.partial(chain, sbj))
    x, mask = jax.device_put((X, MASK), jax.devices("cpu")[0])
    with device(lambda *call: host_cuda.launch(*call), 132, Memory()) as (_, launched):
        for _ in range(2):
            same(jitted(x, mask).block_until_ready(), expected)
    kernels = [kernel.partition("_")[0] for _, kernel, _ in launched]
    assert kernels == ["reduce", "gather", *["scatter"] * 5] * 2  # overlap: link and apply


def test_the_same_call_is_compiled_once(sbj, jax):
    """Callbacks and traces are kept by their options, also outside jit."""
    from sbnet_cupy.jax import _operations as operations

    x, count, rows = jax.numpy.asarray(X), jax.numpy.asarray(COUNT), jax.numpy.asarray(ROWS)
    for bsize in (5, (5, 5), [1, 5, 5, 1]):
        sbj.sparse_gather(x, count, rows, bsize=bsize)
        made = operations._mapped_gather.cache_info().misses
        sbj.sparse_gather(x, count, rows, bsize=bsize)
        assert operations._mapped_gather.cache_info().misses == made
    spec = operations.GatherSpec(Grid((5, 5), (0, 0), (5, 5)), False, "NHWC")
    assert operations.gather_op(spec)._cache_size() == 1


# ------------------------------------------------------------------------------------ gradients


@pytest.fixture
def check_grads(jax):
    """Compare gradients of first and second order with central differences, in float64."""
    from jax.test_util import check_grads

    def check(function, arguments, order=2):  # it passes NumPy arrays too: jit takes them
        check_grads(jax.jit(function), arguments, order, modes=["rev"])

    with jax.enable_x64(True):
        yield check


def doubles(place, *arrays):
    return tuple(place.make(array.astype(np.float64)) for array in arrays)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradient_of_gather(sbj, place, check_grads, options):
    table = place.make(COUNT), place.make(ROWS)
    (x,) = doubles(place, image(options))
    check_grads(lambda x: sbj.sparse_gather(x, *table, **options), (x,))


@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu"])
@pytest.mark.parametrize("options", OPTIONS[1:4], ids=str)
def test_gradient_of_fused_gather(sbj, place, check_grads, options, activation):
    table = place.make(COUNT), place.make(ROWS)

    def gather(x, scale, shift):
        fused = {"scale": scale, "shift": shift, "activation": activation}
        return sbj.sparse_gather(x, *table, **fused, **options)

    check_grads(gather, doubles(place, image(options), X[0, 0, 0], X[0, 0, 1]))


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("rows", [ROWS, TWICE], ids=["once", "twice"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradient_of_scatter(sbj, place, check_grads, options, rows, add):
    table = place.make(COUNT), place.make(rows)

    def scatter(blocks, x):
        return sbj.sparse_scatter(blocks, *table, x, add=add, atomic=True, **options)

    check_grads(scatter, doubles(place, stack(options), image(options)))


def test_gradients_pass_by_what_has_none(sbj, place, jax):
    """A whole-number image and a mask have no gradient, and hinder nobody else's."""
    numbers, count, rows = map(place.make, (X.astype(np.int32), COUNT, ROWS))

    def loss(scale):
        active = sbj.reduce_mask(scale * place.make(MASK), (2, 2), bsize=4, capacity=8)
        blocks = sbj.sparse_gather(numbers, count, rows, bsize=4)
        y = sbj.sparse_scatter(blocks, count, rows, numbers, bsize=4)
        return scale * (blocks.sum() + y.sum()) + active.bin_counts.sum()

    expected = sb.sparse_gather(X.astype(np.int32), COUNT, ROWS, bsize=4).sum()
    expected += X.astype(np.int32).sum()
    assert float(jax.grad(loss)(2.0)) == expected
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda x: sbj.sparse_gather(x, count, rows, bsize=4), (X,), (X,))


def test_gradients_through_scan_and_checkpoint(sbj, place, jax):
    """Frames one after the other, recomputed for the gradient: the sum of each frame's own."""
    frames, masks = np.stack([X, X[::-1]]), np.stack([MASK, MASK[::-1]])
    w = place.make(RNG.standard_normal((3, 3, 3, 2)).astype(np.float32))
    params, _ = layer()
    grid = {"bsize": params.bsize, "boffset": params.boffset, "bstride": params.bstride}

    @jax.checkpoint
    def frame(w, x, mask):
        active = sbj.reduce_mask(mask, params.bcount, capacity=30, **grid)
        return (sbj.sparse_conv2d(x, w, active, params) ** 2).sum()

    def film(w):
        step = lambda total, both: (total + frame(w, *both), None)  # noqa: E731
        return jax.lax.scan(step, 0.0, (place.make(frames), place.make(masks)))[0]

    actual = jax.jit(jax.grad(film))(w)
    parts = [jax.grad(frame)(w, *map(place.make, both)) for both in zip(frames, masks, strict=True)]
    wide = [to_numpy(part).astype(np.float64) for part in parts]
    size = sum(map(np.abs, wide)).max() * np.sqrt(X.size)  # of what cancels in a part
    assert_close(to_numpy(actual), sum(wide), terms=200, dtype=np.float32, magnitude=size)


# ----------------------------------------------------------------------------------------- vmap

MANY = RNG.standard_normal((4, *X.shape)).astype(np.float32)
COUNTS = np.array([[5], [0], [2], [6]], np.int32)
TABLES = np.stack([ROWS, TWICE, TWICE[::-1], ROWS])


def vmap_compare(place, jax, function, in_axes, *arrays, jit=True):
    """A mapped call gives the bits of one call after the other."""
    arrays = [place.make(array) for array in arrays]
    mapped = jax.vmap(function, in_axes)
    actual = (jax.jit(mapped) if jit else mapped)(*arrays)
    single = jax.jit(function)
    for i in range(len(MANY)):
        own = [a if axis is None else a.take(i, axis) for a, axis in zip(arrays, in_axes)]  # noqa: B905
        each = jax.tree_util.tree_map(lambda result, i=i: result[i], actual)
        jax.tree_util.tree_map(same, each, jax.tree_util.tree_map(to_numpy, single(*own)))


@pytest.mark.parametrize("in_axes", [(0, None, None), (None, 0, 0), (0, 0, None), (0, None, 0)])
@pytest.mark.parametrize("options", [OVERLAP, PLAIN | {"data_format": "NCHW"}], ids=str)
def test_vmap_of_gather(sbj, place, jax, in_axes, options):
    arrays = (
        many if axis == 0 else one
        for axis, many, one in zip(in_axes, (MANY, COUNTS, TABLES), (X, COUNT, ROWS), strict=True)
    )
    gather = functools.partial(sbj.sparse_gather, **options)
    vmap_compare(place, jax, gather, in_axes, *arrays)


@pytest.mark.parametrize("in_axes", [(0, None, None, None), (None, 0, 0, None), (None, None, 0, 0)])
@pytest.mark.parametrize("options", [{}, {"add": True}], ids=str)
def test_vmap_of_scatter(sbj, place, jax, in_axes, options):
    one = stack(OVERLAP), COUNT, ROWS, X
    many = np.stack([one[0] * k for k in range(4)]), COUNTS, TABLES, MANY
    arrays = (m if axis == 0 else o for axis, m, o in zip(in_axes, many, one, strict=True))
    scatter = functools.partial(sbj.sparse_scatter, atomic=True, **OVERLAP, **options)
    vmap_compare(place, jax, scatter, in_axes, *arrays)


def test_vmap_of_the_rest(sbj, place, jax):
    """Tables that are mapped themselves, masks, gradients, a second vmap and other axes."""
    table = place.make(COUNT), place.make(ROWS)

    def fused(x, scale):
        return sbj.sparse_gather(x, *table, bsize=4, scale=scale, activation="silu")

    scales = np.ascontiguousarray(MANY[:, 0, 0, 0])
    vmap_compare(place, jax, fused, (0, 0), MANY, scales)
    vmap_compare(place, jax, fused, (None, 0), X, scales)
    vmap_compare(place, jax, fused, (3, None), np.moveaxis(MANY, 0, 3).copy(), scales[0])

    def listed(mask):
        return tuple(sbj.reduce_mask(mask, (2, 3), bsize=4, tol=1, capacity=5))

    vmap_compare(place, jax, listed, (0,), MANY[..., 0], jit=False)

    def gradient(x, count):
        return jax.grad(lambda x: (sbj.sparse_gather(x, count, table[1], **OVERLAP) ** 2).sum())(x)

    vmap_compare(place, jax, gradient, (0, 0), MANY, COUNTS)
    twice = jax.vmap(jax.vmap(lambda x: sbj.sparse_gather(x, *table, bsize=4)))
    actual = twice(place.make(MANY.reshape(2, 2, *X.shape)))
    expected = np.stack([sb.sparse_gather(x, COUNT, ROWS, bsize=4) for x in MANY])
    same(actual, expected.reshape(2, 2, *expected.shape[1:]))


# --------------------------------------------------------------------------------------- layers


def layer(strides=1, ksize=3, bottleneck=False):
    """Return block parameters and the active blocks of the mask, for an image like X."""
    if bottleneck:
        params = sb.calc_block_params_res_block(X.shape, 3 + 2 * strides, [1, 3, 1], strides)
    else:
        params = sb.calc_block_params(X.shape, 3 + 2 * strides, ksize, strides)
    grid = {"bsize": params.bsize, "boffset": params.boffset, "bstride": params.bstride}
    return params, sb.reduce_mask(MASK, params.bcount, capacity=30, **grid)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"strides": 2, "activation": "gelu"},
        {"data_format": "NCHW", "w_format": "OIHW", "activation": "relu"},
        {"base": True},
    ],
    ids=str,
)
def test_sparse_conv2d(sbj, place, jax, options, dtype):
    params, active = layer(options.get("strides", 1))
    x = image(options, dtype)
    w = RNG.standard_normal((3, 3, 3, 4)).astype(dtype)
    if "w_format" in options:
        w = np.ascontiguousarray(w.transpose(3, 2, 0, 1))
    arrays = {"bias": RNG.standard_normal(4).astype(np.float32)}
    if "base" in options:
        arrays["base"] = RNG.standard_normal((*X.shape[:3], 4)).astype(dtype)
    options = {k: v for k, v in options.items() if k != "base"}
    wide = {k: v.astype(np.float64) for k, v in arrays.items()}
    given = x.astype(np.float64), w.astype(np.float64)
    expected = sb.sparse_conv2d(*given, active, params, **options, **wide)
    size = sb.sparse_conv2d(*map(np.abs, given), active, params, **options, **abs_of(wide))
    function = jax.jit(functools.partial(sbj.sparse_conv2d, **options))
    pair = tuple(map(place.make, active))
    arrays = {name: place.make(value) for name, value in arrays.items()}
    actual = function(place.make(x), place.make(w), pair, params, **arrays)
    # 27 products and the bias; no activation has a slope above 1.13. XLA rounds halves on a GPU.
    sums = {"terms": 32, "dtype": np.float32}
    if place.name == "cuda" and np.dtype(dtype).itemsize == 2:
        sums = {"terms": 1, "dtype": dtype}
    assert_close(to_numpy(actual), expected, magnitude=1.2 * size + 1, **sums)


def abs_of(arrays):
    return {name: np.abs(value) for name, value in arrays.items()}


@pytest.mark.parametrize("options", [{}, {"strides": 2}, {"base": True}], ids=str)
def test_sparse_res_block_bottleneck(sbj, place, jax, options):
    strides = options.get("strides", 1)
    params, active = layer(strides, bottleneck=True)
    weights = sb.BottleneckWeights.random(3, 4, 3 if not options else 5, dtype="float64")
    arrays = {}
    if options:
        arrays["w_project"] = RNG.standard_normal((1, 1, 3, 5))
    if "base" in options:
        arrays["base"] = RNG.standard_normal((*X.shape[:3], 5))
    with jax.enable_x64(True):
        expected = sb.sparse_res_block_bottleneck(
            X.astype(np.float64), weights, active, params, strides=strides, **arrays
        )
        actual = jax.jit(functools.partial(sbj.sparse_res_block_bottleneck, strides=strides))(
            place.make(X.astype(np.float64)),
            weights._map_arrays(place.make),
            active._map_arrays(place.make),
            params,
            **{name: place.make(value) for name, value in arrays.items()},
        )
    # Three sums of at most 36 products, each of which may enlarge the error of the one before.
    bound = 200 * np.finfo(np.float64).eps * np.abs(expected).max() * 36
    np.testing.assert_allclose(to_numpy(actual), expected, rtol=0, atol=bound)


def test_gradients_of_the_layers(sbj, place, check_grads, jax):
    params, active = layer()
    active = active._map_arrays(place.make)
    w, bias, base = RNG.standard_normal((3, 3, 3, 2)), RNG.standard_normal(2), X[..., :2]

    def convolve(x, w, bias, base):
        options = {"bias": bias, "base": base, "activation": "silu"}
        return sbj.sparse_conv2d(x, w, active, params, **options)

    check_grads(convolve, doubles(place, X, w, bias, base))
    params, active = layer(bottleneck=True)
    active = active._map_arrays(place.make)
    weights = sb.BottleneckWeights.random(3, 2, dtype="float64")._map_arrays(place.make)

    def unit(x, weights):
        return sbj.sparse_res_block_bottleneck(x, weights, active, params)

    check_grads(unit, (*doubles(place, X), weights), order=1)
    gradient = jax.grad(lambda weights: unit(place.make(X.astype("f8")), weights).sum())(weights)
    assert type(gradient) is sb.BottleneckWeights and float(abs(gradient.w2).sum()) > 0


# ------------------------------------------------------------------------- documents and errors


@pytest.mark.parametrize("name", ["", ".ops", ".layers"])
def test_examples_run(sbj, name):
    runner = doctest.DocTestRunner()
    tests = list(doctests_of(importlib.import_module("sbnet_cupy.jax" + name)))
    for test in tests:
        runner.run(test)
    assert not runner.summarize().failed and sum(len(test.examples) for test in tests) >= 5


def test_arguments_are_those_of_the_package(sbj):
    for name in sbj.__all__:
        known = inspect.signature(getattr(sb, name)).parameters
        taken = inspect.signature(getattr(sbj, name)).parameters
        assert [*taken] == [parameter for parameter in known if parameter != "out"]
        assert all(taken[parameter].default == known[parameter].default for parameter in taken)


ELSEWHERE = re.compile(r"object|'U1'|'S3'|M8|masked|'[if]8'|float64|asfortran|::|np.float32\(1\)")


def give(value):
    """Hand what a table of NumPy calls holds to JAX."""
    import jax.numpy as jnp

    if isinstance(value, np.ndarray):
        return jnp.asarray(value)
    if isinstance(value, tuple | list) and any(isinstance(v, np.ndarray) for v in value):
        return tuple(map(give, value))
    return value


def bad_calls():
    known = ("reduce_mask", "sparse_gather", "sparse_scatter", "sparse_conv2d",
             "sparse_res_block_bottleneck")  # fmt: skip
    for function, argument, value, error in BAD:
        told = f"{value!r} {getattr(value, 'dtype', '')}"
        if function in known and argument != "out" and not ELSEWHERE.search(told):
            yield function, argument, value, error


@pytest.mark.parametrize(("function", "argument", "value", "error"), [*bad_calls()], ids=spoil_id)
def test_bad_call(sbj, function, argument, value, error):
    """The errors are those of the package, and come while tracing."""
    arguments = {name: give(value) for name, value in VALID[function].items()}
    if "weights" in arguments:
        arguments["weights"] = sb.BottleneckWeights(*map(give, VALID[function]["weights"]))
    if isinstance(value, Spoiled):
        value = value.of(VALID[function].get(argument), np)
    arguments[argument] = give(value)
    with pytest.raises(error, match=rf"\b{argument}\b"):
        getattr(sbj, function)(**arguments)


def test_mixed_libraries_are_refused(sbj, jax):
    x, count, rows = jax.numpy.asarray(X), jax.numpy.asarray(COUNT), jax.numpy.asarray(ROWS)
    with pytest.raises(DeviceError, match=r"^x must be a JAX array, got one of numpy.*asarray"):
        sbj.sparse_gather(X.astype(np.float64), count, rows, bsize=4)
    with pytest.raises(DeviceError, match=r"^bin_counts .*numpy"):
        jax.jit(lambda x: sbj.sparse_gather(x, COUNT, rows, bsize=4))(x)
    with pytest.raises(DeviceError, match=r"^weights\.w1 .*numpy"):
        weights = sb.BottleneckWeights.random(3, 4)
        sbj.sparse_res_block_bottleneck(x, weights, (count, rows), layer(bottleneck=True)[0])
    with pytest.raises(DTypeError, match=r"^x must have elements of whole bytes, got int4"):
        sbj.sparse_gather(x.astype("int4"), count, rows, bsize=4)
    with pytest.raises(DTypeError, match=r"^x must have elements of whole bytes, got key"):
        sbj.sparse_gather(jax.random.key(0), count, rows, bsize=4)
    with pytest.raises(TypeError, match="out"):
        sbj.sparse_gather(x, count, rows, bsize=4, out=x)


@pytest.mark.parametrize("transform", ["jit", "vmap", "grad"])
def test_capacity_is_needed_while_tracing(sbj, jax, transform):
    def count(mask):
        return sbj.reduce_mask(mask, (2, 3), bsize=4).bin_counts.sum() + mask.sum()

    mask = MASK if transform != "vmap" else MANY[..., 0]
    with pytest.raises(ShapeError, match=r"^capacity must be given.* 12 has room"):
        getattr(jax, transform)(count)(mask)


def test_an_error_inside_a_callback_reaches_the_caller(sbj, jax, monkeypatch):
    def fail(*arrays, **options):
        raise RuntimeError("the message")

    monkeypatch.setattr(sys.modules["sbnet_cupy.jax._operations"], "core_gather", fail)
    table = jax.numpy.asarray(COUNT), jax.numpy.asarray(ROWS)
    with pytest.raises(jax.errors.JaxRuntimeError, match="the message"):
        sbj.sparse_gather(jax.numpy.asarray(X), *table, bsize=2).block_until_ready()


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("jax", "sbnet_cupy.jax needs JAX; pip install 'sbnet-cupy[jax]'"),
        ("jax.experimental.buffer_callback", "pip install -U 'jax"),
    ],
)
def test_without_jax_or_with_an_old_one(jax, missing, message):
    code = f"import sys; sys.modules[{missing!r}] = None; import sbnet_cupy.jax"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and message in done.stderr.splitlines()[-1]
    assert done.stderr.splitlines()[-1].startswith("ImportError")


def test_the_prototype_of_ctypes_is_left_alone(sbj):
    assert ctypes.pythonapi.PyCapsule_GetPointer is not sys.modules[
        "sbnet_cupy.jax._callbacks"
    ]._capsule_pointer
