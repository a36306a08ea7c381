"""conv2d: loops = NumPy = CUDA, by both routes of the GPU, on drawn sizes, layouts and dtypes."""

import math
import sys
import tracemalloc
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from conftest import Library
from sbnet_cupy import DTypeError, ShapeError
from sbnet_cupy.core.arrays import namespace
from sbnet_cupy.core.spec import spec_of
from sbnet_cupy.dense import cudnn as dense_cudnn
from sbnet_cupy.dense import im2col
from sbnet_cupy.dense.activation import ACTIVATIONS, apply_activation, check_activation, erf
from sbnet_cupy.dense.conv2d import _conv2d_cuda, conv2d, resolve_problem
from support import conv_oracles as oracles
from support import fake_cuda_libraries as fake
from support.assertions import assert_same, to_numpy
from support.conv_cases import Case, cases
from support.fake_cudnn import fake_cudnn
from support.strategies import FLOATS


def check_exact(case, xp, convolve=conv2d):
    """The convolution of whole numbers equals the loops to the bit."""
    x, w = case.integers()
    expected = case.oracle(x, w).value.astype(case.dtype)
    y = convolve(*case.arrange(x, w, xp), **case.options)
    assert_same(y, xp.writable(expected), signed_zero=False)


@given(case=cases())
@example(case=Case(image=(1, 0, 0, 2), padding=((2, 2), (2, 2))))  # made of padding only
@example(case=Case(image=(1, 5, 5, 0)))  # a sum of no terms
@example(case=Case(image=(2, 4, 4, 3), kernel=(2, 2), strides=(2, 2)))
@example(case=Case(image=(17, 4, 4, 8), channels=8, dtype=np.dtype("f2")))  # batches 16 + 1
def test_whole_numbers_are_exact(xp, case):
    check_exact(case, xp)


@given(
    case=cases(),
    activation=st.sampled_from(ACTIVATIONS),
    scaled=st.booleans(),
    biased=st.booleans(),
)
def test_scale_bias_and_activation(xp, case, activation, scaled, biased):
    x, w = case.numbers()
    scale, bias = case.tables()
    scale, bias = scale if scaled else None, bias if biased else None
    y = conv2d(
        *case.arrange(x, w, xp),
        **case.options,
        scale=None if scale is None else xp.asarray(scale),
        bias=None if bias is None else xp.asarray(bias),
        activation=activation,
    )
    assert y.dtype == case.dtype
    oracles.assert_within(to_numpy(y), case.oracle(x, w, scale, bias, activation))


@given(case=cases(), limit=st.sampled_from([1, 300, 2000, 20000]))
@example(case=Case(image=(5, 3, 3, 2), padding="VALID"), limit=300)  # two images and a rest
def test_any_chunk_gives_the_same(xp, case, limit):
    with (
        mock.patch.object(im2col, "NUMPY_CHUNK_BYTES", limit),
        mock.patch.object(im2col, "CUPY_CHUNK_BYTES", limit),
    ):
        check_exact(case, xp, by_matrix_products)


def by_matrix_products(x, w, *, strides, padding, data_format, w_format, precision):
    """The route of the CPU, and of a GPU without cuDNN."""
    options = (strides, padding, None, data_format, w_format, precision)
    problem = resolve_problem(spec_of(x), spec_of(w), *options)
    xp = namespace(x)
    out = xp.full((len(x), *problem.out_shape), xp.nan, x.dtype)
    if out.size:
        im2col.convolve(x, w, out, None, None, problem)
    return out


@pytest.mark.gpu
@given(case=cases())
def test_cudnn_takes_all_but_float64(xp, case):
    """Else the fast route is not run, and nothing would tell."""
    if xp.name != "cupy" or not dense_cudnn.cudnn_available():
        pytest.skip("needs a GPU with cuDNN")
    x, w = case.arrange(*case.integers(), xp)
    problem = resolve_problem(spec_of(x), spec_of(w), activation=None, **case.options)
    assume(x.size and math.prod(problem.out_shape))
    out = xp.module.full((len(x), *problem.out_shape), xp.module.nan, x.dtype)
    left = dense_cudnn.convolve(x, w, out, None, None, problem)
    if case.dtype == np.float64:
        assert left == [slice(0, len(x))]
    else:  # a part may start where its address is not a multiple of 16 bytes
        assert all(x[part].data.ptr % 16 or out[part].data.ptr % 16 for part in left)


def run_fake(case, activation, scaled, biased):
    """Convolve through the code for CUDA and compare with the loops."""
    x, w = case.numbers()
    scale, bias = case.tables()
    scale, bias = scale if scaled else None, bias if biased else None
    options = case.options | {"activation": activation}
    arranged = case.arrange(x, w, Library("numpy", np))
    problem = resolve_problem(*map(spec_of, arranged), **options)
    out = np.full((len(x), *problem.out_shape), np.nan, case.dtype)
    if out.size:
        _conv2d_cuda(*arranged, scale, bias, out, problem=problem)
    oracles.assert_within(out, case.oracle(x, w, scale, bias, activation))


@given(
    case=cases(),
    activation=st.sampled_from(ACTIVATIONS),
    scaled=st.booleans(),
    biased=st.booleans(),
)
@example(case=Case(image=(17, 4, 4, 8), channels=8), activation="relu", scaled=True, biased=True)
def test_what_cudnn_is_told(case, activation, scaled, biased):
    with fake_cudnn() as cudnn:
        run_fake(case, activation, scaled, biased)
    for graph in cudnn.graphs:
        fused = len(graph.nodes) > 1
        assert graph.nodes[0] == "conv" and graph.dynamic == fused
        single = case.dtype == np.float32
        assert not (fused and single)  # what follows is applied in place, in float32 too
        exact = single and case.precision != "tf32"
        assert (fake.Note.TENSOR_CORE in graph.notes) == exact
        assert (fake.Note.DOWN_CONVERT_INPUTS in graph.notes) == single
        assert {fake.Note.NONDETERMINISTIC, fake.Note.WINOGRAD, fake.Note.FFT} <= {*graph.notes}
    assert case.dtype != np.float64 or not cudnn.graphs


@given(case=cases(), activation=st.sampled_from(ACTIVATIONS), biased=st.booleans())
def test_what_cudnn_declines_is_done_all_the_same(case, activation, biased):
    with fake_cudnn(supports=lambda graph: False) as cudnn:
        run_fake(case, activation, True, biased)
    assert not cudnn.executed


def test_fused_kernels_without_dynamic_shapes():
    case = Case(dtype=FLOATS[0], image=(2, 6, 7, 8), channels=8)
    with fake_cudnn(supports=lambda graph: not graph.dynamic) as cudnn:
        run_fake(case, "gelu", True, True)
    assert [g.nodes for g in cudnn.executed] == [["conv", "mul", "add", "gelu"]]


def test_graphs_and_compiled_kernels_are_kept():
    """A new batch of a known length plans nothing; a new length shares the compiled kernels."""
    with fake_cudnn() as cudnn:
        for batch in (16, 16, 32, 48, 16, 47):  # 47 = 44 + 3
            run_fake(Case(image=(batch, 3, 3, 8), dtype=FLOATS[0], channels=8), "relu", True, True)
        assert len(cudnn.executed) == 7 and len(cudnn.graphs) == 5
        assert len({id(graph.cache) for graph in cudnn.graphs}) == 1
        run_fake(Case(image=(16, 3, 3, 8), dtype=FLOATS[0], channels=8), "silu", True, True)
        assert len({id(graph.cache) for graph in cudnn.graphs}) == 2


def test_misaligned_images_are_not_given_to_cudnn():
    memory = np.ones(200, np.float16)[4:]
    memory = memory[-(memory.ctypes.data // 2) % 8 + 1 :]  # two bytes off
    x, w = memory[:128].reshape(1, 4, 4, 8), np.ones((1, 1, 8, 8), np.float16)
    out = np.zeros((1, 4, 4, 8), np.float16)
    assert x.ctypes.data % 16 == 2
    with fake_cudnn() as cudnn:
        problem = resolve_problem(spec_of(x), spec_of(w), **options_of(Case()))
        _conv2d_cuda(x, w, None, None, out, problem=problem)
    assert not cudnn.graphs and (out == 8).all()


def options_of(case):
    return case.options | {"activation": None}


def test_without_the_front_end_or_its_library():
    with fake_cudnn() as cudnn:
        cudnn.backend_version = mock.Mock(side_effect=RuntimeError("Unable to find symbol"))
        assert not dense_cudnn.cudnn_available()
        run_fake(Case(), "relu", True, True)
    with fake_cudnn(), mock.patch.dict(sys.modules, cudnn=None):
        assert not dense_cudnn.cudnn_available()


@given(case=cases(), limit=st.sampled_from([1, 2000, 1 << 27]))
def test_what_cublas_is_told(case, limit):
    cublas = fake.Cublas()
    with (
        mock.patch.object(im2col, "_cublas_gemm", lambda: (cublas.gemm_ex, cublas.handle)),
        mock.patch.object(im2col, "is_cupy", lambda array: True),
        mock.patch.object(im2col, "CUPY_CHUNK_BYTES", limit),
    ):
        check_exact(case, Library("numpy", np), by_matrix_products)
    tf32 = case.precision == "tf32" and case.dtype == np.float32
    compute_type = 70 if case.dtype == np.float64 else 77 if tf32 else 68
    assert cublas.compute_types <= {compute_type}


def test_what_a_graph_cannot_hold_is_refused():
    """CuPy refuses cuBLAS in captures, with an error that does not say what to do."""

    def gemm(*arguments):
        raise NotImplementedError("calling cuBLAS API during stream capture is unsupported")

    x = np.ones((1, 4, 4, 2), np.float32)
    w = np.ones((3, 3, 2, 2), np.float32)
    with (
        mock.patch.object(im2col, "_cublas_gemm", lambda: (gemm, None)),
        mock.patch.object(im2col, "is_cupy", lambda array: True),
        mock.patch.object(im2col, "address", lambda array: array.ctypes.data),
        pytest.raises(NotImplementedError, match=r"graph cannot hold .* sbnet-cupy\[cudnn\]"),
    ):
        by_matrix_products(
            x, w, strides=(1, 1), padding="SAME", data_format="NHWC", w_format="HWIO",
            precision=None,
        )  # fmt: skip


@given(batch=st.integers(0, 5000), most=st.integers(1, 6000))
def test_parts_cover_a_batch_with_few_lengths(batch, most):
    parts = dense_cudnn._parts(batch, most)
    assert [i for part in parts for i in range(batch)[part]] == list(range(batch))
    lengths = [part.stop - part.start for part in parts]
    assert all(0 < n <= most and n % (1 << max(n.bit_length() - 4, 0)) == 0 for n in lengths)
    if batch <= most:
        assert len(parts) <= 4


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_precision_changes_nothing_on_the_cpu(dtype):
    x, w = Case(dtype=dtype).numbers()
    assert_same(conv2d(x, w, precision="tf32"), conv2d(x, w, precision="ieee"))
    assert_same(conv2d(x, w, precision="tf32"), conv2d(x, w))


def test_float32_is_ieee_unless_tf32_is_asked_for(xp):
    """1 + 2**-12 is not a TF32 number: rounded, its square minus 1 is 0."""
    one = np.float32(1 + 2**-12)
    x, w = np.full((1, 16, 16, 32), one), np.zeros((3, 3, 32, 32), np.float32)
    w[1, 1] = np.eye(32, dtype=np.float32) * one
    for precision in (None, "ieee"):
        y = conv2d(xp.asarray(x), xp.asarray(w), precision=precision)
        assert_same(y, xp.writable(np.full_like(x, one * one)))


def test_halves_are_summed_in_float32(xp):
    """2048 + 1 is 2048 in float16: 4096 ones would stop there; and 60000 + 60000 is infinite."""
    x, w = np.ones((1, 8, 8, 512), np.float16), np.ones((2, 4, 512, 8), np.float16)
    y = conv2d(xp.asarray(x), xp.asarray(w), padding="VALID", strides=(2, 4))
    assert_same(y, xp.writable(np.full((1, 4, 2, 8), 4096, np.float16)))
    x, w = np.full((1, 1, 1, 8), 30000, np.float16), np.ones((1, 1, 8, 8), np.float16)
    w[:, :, 4:] = -1
    bias = xp.asarray(np.full(8, 70000, np.float32))  # beyond float16, until scale meets it
    scale = xp.asarray(np.full(8, 0.5, np.float32))
    y = conv2d(xp.asarray(x), xp.asarray(w), scale=scale, bias=bias - 35000)
    assert_same(y, xp.writable(np.full((1, 1, 1, 8), 35000, np.float16)))


def test_what_overflows_is_infinite_and_nan_stays(xp):
    for dtype in FLOATS:
        x = np.zeros((1, 1, 3, 8), dtype)
        x[0, 0, 1, 0], x[0, 0, 2, 0] = np.nan, np.inf
        w = np.zeros((1, 1, 8, 8), dtype)
        w[0, 0] = np.eye(8)
        for activation in (None, "relu"):
            y = to_numpy(conv2d(xp.asarray(x), xp.asarray(w), activation=activation))
            y = y.astype(np.float64)[0, 0]
            assert (y[0] == 0).all() and np.isnan(y[1, 0])
            assert y[2, 0] == np.inf or np.isnan(y[2, 0])  # sums 0 * inf, or does not
    big = np.full((1, 1, 1, 8), 60000, np.float16)
    y = conv2d(xp.asarray(big), xp.asarray(np.ones((1, 1, 8, 8), np.float16)))
    assert np.isinf(to_numpy(y)).all()


@given(case=cases(), activation=st.sampled_from(ACTIVATIONS))
def test_out_is_filled_and_returned(xp, case, activation):
    x, w = case.arrange(*case.numbers(), xp)
    bias = xp.asarray(case.tables()[1])
    options = case.options | {"bias": bias, "activation": activation}
    expected = conv2d(x, w, **options)
    out = xp.writable(np.full(expected.shape, np.nan, case.dtype))
    assert conv2d(x, w, **options, out=out) is out
    assert_same(out, expected)


def test_out_must_not_overlap_the_inputs(xp):
    memory = xp.writable(np.ones(64, np.float32))
    x, w = memory[:16].reshape(1, 2, 4, 2), memory[16:20].reshape(1, 1, 2, 2)
    for first, name in ((0, "x"), (8, "x"), (18, "w")):
        out = memory[first : first + 16].reshape(1, 2, 4, 2)
        with pytest.raises(ShapeError, match=rf"out must not share memory with {name}\b"):
            conv2d(x, w, out=out)
    out = memory[20:36].reshape(1, 2, 4, 2)
    assert conv2d(x, w, out=out) is out


def test_inputs_are_left_alone(xp):
    for dtype in FLOATS:
        case = Case(dtype=dtype)
        x, w = case.numbers()
        scale, bias = case.tables()
        given = [xp.writable(a) for a in (x, w, scale, bias)]
        for activation in ACTIVATIONS:
            conv2d(given[0], given[1], scale=given[2], bias=given[3], activation=activation)
        for after, before in zip(given, (x, w, scale, bias), strict=True):
            assert_same(after, xp.writable(before))


def test_the_image_must_be_contiguous_on_a_gpu(xp):
    x, w = xp.writable(np.ones((1, 4, 4, 2), np.float32)), xp.asarray(np.ones((1, 1, 2, 2), "f4"))
    for strided in (x[:, ::2], x[:, ::-1], x.transpose(0, 2, 1, 3)):
        if xp.name == "cupy":
            with pytest.raises(ShapeError, match="x must be C-contiguous"):
                conv2d(strided, w)
        else:
            assert_same(conv2d(strided, w), conv2d(np.ascontiguousarray(strided), w))
    turned = xp.writable(np.ones((2, 2, 1, 1), np.float32)).transpose(3, 2, 1, 0)
    assert_same(conv2d(x, turned), conv2d(x, w))  # the kernel is small, and copied


@pytest.mark.parametrize("dtype", ["f4", "f2"])
@pytest.mark.parametrize(
    ("data_format", "kernel"), [("NHWC", 3), ("NCHW", 3), ("NHWC", 1), ("NCHW", 1)]
)
def test_memory_is_bounded(data_format, kernel, dtype):
    """All columns of this image would take 9 times its own 16 MiB, its float32 copy 16 MiB."""
    shape = (1, 512, 512, 16) if data_format == "NHWC" else (1, 16, 512, 512)
    x, w = np.ones(shape, dtype), np.ones((kernel, kernel, 16, 16), dtype)
    out = np.empty_like(x)
    tracemalloc.start()
    try:
        conv2d(x, w, data_format=data_format, out=out, activation="silu")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # columns and products share one chunk; the padded rows and silu's temporaries are smaller
    assert peak < 3 * im2col.NUMPY_CHUNK_BYTES


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_other_libraries(require, library):
    module = require(library)
    case = Case()
    x, w = case.integers()
    asarray = module.asarray if library == "torch" else module.numpy.asarray
    y = conv2d(asarray(x), asarray(w), activation="relu")
    assert type(y).__module__.startswith(library)
    assert_same(np.asarray(y), conv2d(x, w, activation="relu"))


def test_dtypes_are_checked(xp):
    x = xp.asarray(np.ones((1, 4, 4, 2), np.int32))
    with pytest.raises(DTypeError, match="x must be float16, bfloat16, float32 or float64"):
        conv2d(x, xp.asarray(np.ones((1, 1, 2, 2), np.int32)))


def test_erf_is_right_to_the_last_bit_but_one():
    x = np.concatenate([np.linspace(-7, 7, 20001), [1e-310, 1e-20, 0.84375, 1.25, 1 / 0.35, 6]])
    expected = np.array([math.erf(v) for v in x])
    assert (abs(erf(x) - expected) <= np.spacing(abs(expected))).all()
    special = np.array([0.0, -0.0, np.inf, -np.inf])
    assert_same(erf(special), np.array([0.0, -0.0, 1.0, -1.0]))
    assert np.isnan(erf(np.array([np.nan]))).all()
    assert erf(x.astype(np.float32)).dtype == np.float32


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_activations(xp, name, dtype):
    x = np.concatenate([np.linspace(-30, 30, 2001), [-1e4, 1e4, -700.0, 0.0]]).astype(dtype)
    y = apply_activation(xp.writable(x), name)
    assert y.dtype == x.dtype
    with np.errstate(over="ignore"):
        wide = {None: x, "relu": np.maximum(x, 0), "silu": x / (1 + np.exp(-x.astype("f8")))}
    wide["gelu"] = [v * 0.5 * (1 + math.erf(v / math.sqrt(2))) for v in x.astype("f8")]
    error = 8 * np.finfo(dtype).eps * abs(x) + np.finfo(dtype).tiny
    oracles.assert_within(to_numpy(y), oracles.Bounded(np.asarray(wide[name], "f8"), error))


@pytest.mark.parametrize("name", ["RELU", "tanh", 3, ["relu"], b"relu", True])
def test_unknown_activation(name):
    with pytest.raises(ValueError, match="activation must be None, 'relu', 'silu' or 'gelu', got"):
        check_activation(name)


def test_arrange_lays_out_what_it_says(xp):
    """What Case.arrange does: NCHW and OIHW are transpositions of NHWC and HWIO."""
    case = replace(Case(), data_format="NCHW", w_format="OIHW")
    x, w = case.arrange(*case.integers(), xp)
    assert x.shape == (2, 3, 6, 7) and w.shape == (5, 3, 3, 3)
