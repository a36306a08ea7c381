"""Arrays of other libraries: the same kind comes back, no byte is copied, and no trap is sprung."""

import gc
import os
import subprocess
import sys
import textwrap

import ml_dtypes
import numpy as np
import pytest

import sbnet_cupy as sb
from sbnet_cupy import DeviceError, ShapeError
from sbnet_cupy.core.arrays import array_function, empty
from support.assertions import assert_same, to_numpy
from support.frameworks import FRAMEWORKS
from support.small_arrays import BLOCKS, COUNT, MASK, ROWS, X

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = ["f4", "f2", "f8", "i1", "u1", "i4", "i8", "?", "c8", BFLOAT16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


KERNEL = np.random.default_rng(2).standard_normal((3, 3, 3, 5)).astype(np.float32)
PARAMS = sb.calc_block_params((8, 8), 6, 3)

Y = np.random.default_rng(3).standard_normal((2, 8, 8, 5)).astype(np.float32)


def given(gradients):
    """The gradients that are not None."""
    return tuple(gradient for gradient in gradients if gradient is not None)


CALLS = {
    "reduce_mask": lambda a: tuple(sb.reduce_mask(a(MASK), (2, 2), bsize=4)),
    "reduce_mask capacity": lambda a: tuple(sb.reduce_mask(a(MASK), (2, 2), bsize=4, capacity=9)),
    "to_dense": lambda a: sb.reduce_mask(a(MASK), (2, 2), bsize=4).to_dense(),
    "gather": lambda a: sb.sparse_gather(a(X), a(COUNT), a(ROWS), bsize=4, transpose=True),
    "fused gather": lambda a: sb.sparse_gather(
        a(X), a(COUNT), a(ROWS), bsize=4, scale=a(X[0, 0, 0]), shift=a(X[0, 0, 1]),
        activation="relu",
    ),
    "scatter": lambda a: sb.sparse_scatter(a(BLOCKS), a(COUNT), a(ROWS), a(X), bsize=4),
    "scatter add": lambda a: sb.sparse_scatter(
        a(BLOCKS), a(COUNT), a(ROWS), a(X), bsize=4, bstride=2, add=True, atomic=True
    ),
    "conv2d": lambda a: sb.conv2d(a(X), a(KERNEL), bias=a(KERNEL[0, 0, 0])),
    "sparse_conv2d": lambda a: sb.sparse_conv2d(
        a(X), a(KERNEL), sb.reduce_mask(a(MASK), PARAMS.bcount, bsize=4), PARAMS
    ),
    "sparse_conv2d pair": lambda a: sb.sparse_conv2d(a(X), a(KERNEL), (a(COUNT), a(ROWS)), PARAMS),
    "gather grad": lambda a: given(
        sb.sparse_gather_grad(
            a(BLOCKS), a(COUNT), a(ROWS), a(X), bsize=4, scale=a(X[0, 0, 0]), activation="silu"
        )
    ),
    "scatter grad": lambda a: sb.sparse_scatter_grad(a(X), a(COUNT), a(ROWS), bsize=4, bstride=3),
    "conv2d grad": lambda a: given(
        sb.conv2d_grad(a(Y), a(X), a(KERNEL), bias=a(KERNEL[0, 0, 0]), wanted=("w", "bias"))
    ),
    "sparse_conv2d grad": lambda a: given(
        sb.sparse_conv2d_grad(
            a(Y), a(X), a(KERNEL), (a(COUNT), a(ROWS)), PARAMS, base=a(Y), activation="relu"
        )
    ),
    "mask_conv2d": lambda a: sb.mask_conv2d(a(X), a(KERNEL), a(MASK), (1, 1), "SAME"),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_every_function_returns_the_kind_it_was_given(lib, call):
    expected, actual = call(lib.native.array), call(lib.make)
    if not isinstance(expected, tuple):
        expected, actual = (expected,), (actual,)
    for e, a in zip(expected, actual, strict=True):
        assert_same(a, lib.make(to_numpy(e)))


def test_a_residual_unit_takes_its_weights_in_the_same_kind(lib):
    unit = sb.BottleneckWeights.random(3, 4, xp=np)
    given = unit._map_arrays(lib.make)
    params = sb.calc_block_params_res_block((8, 8), 6, [1, 3, 1])
    y = sb.sparse_res_block_bottleneck(
        lib.make(X), given, (lib.make(COUNT), lib.make(ROWS)), params
    )
    native = lib.native.array  # of the same device, whose sums round the same way
    expected = sb.sparse_res_block_bottleneck(
        native(X), unit._map_arrays(native), (native(COUNT), native(ROWS)), params
    )
    assert_same(y, lib.make(to_numpy(expected)))


def address(native):
    return native.ctypes.data if isinstance(native, np.ndarray) else native.data.ptr


@every_dtype
def test_no_byte_is_copied_on_the_way_in_or_out(lib, dtype):
    """What the function sees is the caller's memory; what the caller gets, the function's."""
    seen = {}

    @array_function
    def double(x):
        y = empty(x.shape, x.dtype, x)
        y[...] = x
        seen.update(x=x, y=y)
        return y

    values = np.arange(3000).reshape(30, 100).astype(dtype)
    given = lib.make(values)
    result = double(given)
    assert type(seen["x"]) is lib.native.ndarray and seen["x"].dtype == to_numpy(given).dtype
    assert address(seen["x"]) == lib.address(given)
    assert address(seen["y"]) == lib.address(result)
    assert_same(result, lib.make(values))


def test_results_outlive_everything_else(lib):
    """The memory of a result belongs to it, not to a buffer that Python has since reused."""
    call = CALLS["gather"]
    kept = [call(lib.make) for _ in range(20)]
    gc.collect()
    junk = [np.full(BLOCKS.shape, 7, np.float32) for _ in range(200)]
    expected = lib.make(call(np.array))
    for result in kept:
        assert_same(result, expected)
    assert junk


@every_dtype
def test_copies_take_every_dtype_that_the_library_has(lib, dtype):
    x, blocks = X.astype(dtype), BLOCKS.astype(dtype)
    given = lib.make(x)
    dtype = to_numpy(given).dtype  # JAX makes float64 float32
    x, blocks = x.astype(dtype), blocks.astype(dtype)
    table = lib.make(COUNT), lib.make(ROWS)
    assert_same(
        sb.sparse_gather(given, *table, bsize=4),
        lib.make(sb.sparse_gather(x, COUNT, ROWS, bsize=4)),
    )
    assert_same(
        sb.sparse_scatter(lib.make(blocks), *table, given, bsize=4),
        lib.make(sb.sparse_scatter(blocks, COUNT, ROWS, x, bsize=4)),
    )


def test_autograd_is_told_of_tensors_that_are_written(torch):
    """A tensor that is kept for a gradient and then written is found out, or it would be wrong."""
    x, rows = torch.zeros(1, 8, 8, 3), sb.reduce_mask(torch.ones(1, 8, 8), 2, bsize=4)
    factor = torch.ones(1, 8, 8, 3, requires_grad=True)
    product, blocks = (factor * x).sum(), torch.ones(4, 4, 4, 3)
    assert sb.sparse_scatter(blocks, *rows, x, bsize=4) is not x and x._version == 0
    with pytest.raises(sb.ShapeError, match=r"^blocks must have shape"):
        sb.sparse_scatter(blocks[1:], *rows, x, bsize=4, out=x)
    assert x._version == 0
    assert sb.sparse_scatter_var(blocks, *rows, x, bsize=4) is x and x._version == 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    assert sb.sparse_gather(x, *rows, bsize=4, out=blocks) is blocks and blocks._version == 1


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_bfloat16_is_computed_with(require, name):
    lib = FRAMEWORKS[name](require(name))
    x, blocks, scale = X.astype(BFLOAT16), BLOCKS.astype(BFLOAT16), X[0, 0, 0].astype(BFLOAT16)
    for call in (
        lambda a: sb.reduce_mask(a(x[..., :1]), (2, 2), bsize=4, tol=0.3).active_block_indices,
        lambda a: sb.reduce_mask(a(x[..., :1]), (2, 2), bsize=4, avgpool=True).to_dense(),
        lambda a: sb.sparse_gather(a(x), a(COUNT), a(ROWS), bsize=4, scale=a(scale)),
        lambda a: sb.sparse_scatter(a(blocks), a(COUNT), a(ROWS), a(x), bsize=4, add=True),
        lambda a: sb.conv2d(a(x), a(KERNEL.astype(BFLOAT16))),
    ):
        assert_same(call(lib.make), lib.make(call(np.array)))


def test_active_blocks_hold_and_count_arrays_of_the_same_kind(lib):
    active = sb.reduce_mask(lib.make(MASK), (2, 2), bsize=4, capacity=2)
    plain = sb.reduce_mask(MASK, (2, 2), bsize=4, capacity=2)
    assert active.count() == plain.count() and type(active.count()) is int
    assert active.density() == plain.density()
    assert bool(active.overflowed) == bool(plain.overflowed) and plain.overflowed
    with pytest.raises(sb.CapacityError, match="capacity"):
        active.check()


@pytest.mark.parametrize("shape", [(0, 8, 8, 3), (2, 0, 8, 3), (2, 8, 8, 0)], ids=str)
def test_empty_arrays(lib, shape):
    x = np.zeros(shape, np.float32)
    call = lambda a: sb.sparse_gather(a(x), a(COUNT), a(ROWS), bsize=4)  # noqa: E731
    assert_same(call(lib.make), lib.make(call(np.array)))
    none = np.zeros((0, 3), np.int32)
    call = lambda a: sb.sparse_gather(a(X), a(COUNT), a(none), bsize=4)  # noqa: E731
    assert_same(call(lib.make), lib.make(call(np.array)))
    active = sb.reduce_mask(lib.make(np.zeros((1, 4, 4), np.float32)), (2, 2), bsize=2)
    assert_same(active.active_block_indices, lib.make(none))


def test_an_array_without_axes_is_the_wrong_shape(lib):
    with pytest.raises(ShapeError, match=r"^x must have 4 dimensions"):
        sb.sparse_gather(lib.make(np.float32(1)), lib.make(COUNT), lib.make(ROWS), bsize=4)
    with pytest.raises(ShapeError, match="bin_counts"):
        sb.sparse_gather(lib.make(X), lib.make(np.int32(1)), lib.make(ROWS), bsize=4)


@pytest.mark.parametrize("position", range(4))
def test_libraries_do_not_mix(lib, position):
    arrays = [lib.make(a) for a in (BLOCKS, COUNT, ROWS, X)]
    arrays[position] = to_numpy(arrays[position])
    with pytest.raises(DeviceError, match=rf"numpy.*{lib.name}|{lib.name}.*numpy"):
        sb.sparse_scatter(*arrays, bsize=4)


def test_two_frameworks_do_not_mix(torch, jax):
    with pytest.raises(DeviceError, match=r"x is torch.*active_block_indices is jax"):
        sb.sparse_gather(
            torch.from_numpy(X.copy()), torch.from_numpy(COUNT.copy()), jax.numpy.asarray(ROWS),
            bsize=4,
        )  # fmt: skip


@pytest.mark.parametrize("name", ["jax", "tensorflow"])
def test_libraries_whose_arrays_are_never_written_take_no_out(require, name):
    lib = FRAMEWORKS[name](require(name))
    x, blocks = lib.make(X), lib.make(BLOCKS)
    table = lib.make(COUNT), lib.make(ROWS)
    for call in (
        lambda: sb.sparse_gather(x, *table, bsize=4, out=blocks),
        lambda: sb.sparse_scatter(blocks, *table, x, bsize=4, out=x),
        lambda: sb.sparse_scatter_var(blocks, *table, x, bsize=4),
    ):
        with pytest.raises(ShapeError, match="out must be writable"):
            call()
    assert_same(x, lib.make(X))
    assert_same(blocks, lib.make(BLOCKS))


class Foreign:
    """Some other library's array: nothing but DLPack."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_any_other_dlpack_object_is_read_and_numpy_comes_back():
    x, count, rows = (Foreign(a.copy()) for a in (X, COUNT, ROWS))
    y = sb.sparse_gather(x, count, rows, bsize=4)
    assert_same(y, sb.sparse_gather(X, COUNT, ROWS, bsize=4))
    strided = Foreign(np.repeat(X, 2, axis=-1)[..., ::2])
    with pytest.raises(ShapeError, match="x must be C-contiguous"):
        sb.sparse_gather(strided, count, rows, bsize=4)


def test_numpy_views_with_negative_strides_are_copied():
    for view in (X[::-1], X[..., ::-1], X[:, ::-1]):
        expected = sb.sparse_gather(view.copy(), COUNT, ROWS, bsize=4)
        assert_same(sb.sparse_gather(view, COUNT, ROWS, bsize=4), expected)
        foreign = map(Foreign, (view, COUNT.copy(), ROWS.copy()))
        with pytest.raises(ShapeError, match="x must be C-contiguous"):
            sb.sparse_gather(*foreign, bsize=4)


RISKY = {
    "torch": """
        import torch as lib
        whole = lib.arange(2 * 8 * 8 * 3 + 1, dtype=lib.float32)
        make = lib.from_numpy
        x = whole[1:].reshape(2, 8, 8, 3)           # contiguous, 4 bytes past a boundary
        assert x.data_ptr() % 16
        bytes_ = lib.zeros(2 * 8 * 8 * 3 + 3, dtype=lib.uint8)[3:].reshape(2, 8, 8, 3)
        mask = lib.ones(129)[1:].reshape(2, 8, 8)
        double = lib.zeros(2 * 8 * 8 * 3 + 1, dtype=lib.float64)[1:].reshape(2, 8, 8, 3)
    """,
    "jax": """
        import jax, jax.numpy as lib
        make = lib.asarray
        whole = np.arange(2 * 8 * 8 * 3 + 1, dtype=np.float32)
        x = jax.dlpack.from_dlpack(whole[1:].reshape(2, 8, 8, 3))
        bytes_ = lib.zeros(2 * 8 * 8 * 3 + 3, lib.uint8)[3:].reshape(2, 8, 8, 3)
        mask = lib.ones(129)[1:].reshape(2, 8, 8)
        double = lib.zeros((2, 8, 8, 3), lib.float16)
    """,
    "tensorflow": """
        import tensorflow as lib
        make = lib.constant
        whole = lib.range(2 * 8 * 8 * 3 + 1, dtype=lib.float32)
        x = lib.reshape(whole[1:], (2, 8, 8, 3))
        bytes_ = lib.reshape(lib.zeros(2 * 8 * 8 * 3 + 3, lib.uint8)[3:], (2, 8, 8, 3))
        mask = lib.reshape(lib.ones(129)[1:], (2, 8, 8))
        double = lib.reshape(lib.zeros(2 * 8 * 8 * 3 + 1, lib.float64)[1:], (2, 8, 8, 3))
    """,
}


@pytest.mark.parametrize("name", RISKY)
def test_misaligned_arrays_never_abort_the_process(require, name):
    """In a process of its own: TensorFlow aborts on memory it finds misaligned."""
    require(name)
    code = "import numpy as np, sbnet_cupy as sb\n" + textwrap.dedent(RISKY[name])
    code += textwrap.dedent("""
        rows, count = np.array([[0, 1, 1], [1, 0, 0]], np.int32), np.array([2], np.int32)
        table = make(count), make(rows)
        plain = np.arange(1, 2 * 8 * 8 * 3 + 1, dtype=np.float32).reshape(2, 8, 8, 3)
        blocks = sb.sparse_gather(x, *table, bsize=4)
        assert (np.asarray(blocks) == sb.sparse_gather(plain, count, rows, bsize=4)).all()
        odd = sb.sparse_gather(x, *table, bsize=(3, 1), boffset=(-1, -1))
        assert (np.asarray(sb.sparse_scatter(blocks, *table, x, bsize=4)) == plain).all()
        for other in (bytes_, double):
            stack = sb.sparse_gather(other, *table, bsize=4)
            sb.sparse_scatter(stack, *table, other, bsize=4, add=True)
        active = sb.reduce_mask(mask, (2, 2), bsize=4)
        for array in (active.bin_counts, active.active_block_indices, active.to_dense()):
            assert np.asarray(array).sum() > 0
        print("alive")
    """)
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},  # NumPy's memory is what is misaligned
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0 and run.stdout.strip() == "alive", run.stderr[-2000:]
