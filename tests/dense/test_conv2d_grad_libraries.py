"""What conv2d_grad asks of cuDNN and cuBLAS; stand-ins compute what they are asked."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, given

from conftest import Library
from sbnet_cupy import conv2d_grad
from sbnet_cupy.dense import cudnn as dense_cudnn
from sbnet_cupy.dense import cudnn_grad, im2col
from support import fake_cuda_libraries as fake
from support.assertions import assert_same
from support.conv_cases import Case, cases
from support.conv_grad_cases import (
    check_exact,
    gradient_of,
    gradients_by_loops,
    output_shape,
    run,
    with_examples,
)
from support.fake_cudnn import fake_cudnn
from support.strategies import FLOATS

NUMPY = Library("numpy", np)


def run_fake(case):
    """Compute through the code for CUDA and compare with the loops, to the bit."""
    x, w = case.integers()
    grad = gradient_of(case, whole=True)
    with mock.patch.dict(conv2d_grad.__wrapped__.__globals__, is_cupy=lambda array: True):
        gradients = run(case, NUMPY, grad, x, w)
    for actual, expected in zip(gradients[:2], gradients_by_loops(case, grad, x, w), strict=True):
        assert_same(actual, expected.astype(case.dtype), signed_zero=False)


@with_examples
@given(case=cases())
def test_what_cudnn_is_told(case):
    with fake_cudnn() as cudnn:
        run_fake(case)
    single = case.dtype == np.float32
    for graph in cudnn.graphs:
        assert graph.nodes in (["dgrad"], ["wgrad"]) and not graph.dynamic
        exact = single and case.precision != "tf32"
        assert (fake.Note.TENSOR_CORE in graph.notes) == exact
        assert (fake.Note.DOWN_CONVERT_INPUTS in graph.notes) == single
        assert {fake.Note.NONDETERMINISTIC, fake.Note.WINOGRAD, fake.Note.FFT} <= {*graph.notes}
        assert graph.nodes == ["dgrad"] or graph.output.data_type is fake.DataType.FLOAT
    assert case.dtype != np.float64 or not cudnn.graphs


@with_examples
@given(case=cases())
def test_what_cudnn_declines_is_done_all_the_same(case):
    with fake_cudnn(supports=lambda graph: False) as cudnn:
        run_fake(case)
    assert not cudnn.executed


@given(case=cases())
def test_where_cudnn_sums_halves_to_halves_only(case):
    def supports(graph):
        return graph.output.data_type is graph.io_data_type

    with fake_cudnn(supports) as cudnn:
        run_fake(case)
    kinds = {graph.output.data_type for graph in cudnn.executed}
    assert kinds <= {graph.io_data_type for graph in cudnn.executed}


def test_graphs_are_kept():
    with fake_cudnn() as cudnn:
        for batch in (16, 16, 32, 48, 16, 47):  # 47 = 44 + 3
            run_fake(Case(image=(batch, 3, 3, 8), dtype=FLOATS[0], channels=8))
        assert len(cudnn.executed) == 14 and len(cudnn.graphs) == 10


@with_examples
@given(case=cases())
def test_what_cublas_is_told(case):
    cublas = fake.Cublas()
    with (
        fake_cudnn(supports=lambda graph: False),
        mock.patch.object(im2col, "_cublas_gemm", lambda: (cublas.gemm_ex, cublas.handle)),
        mock.patch.object(im2col, "is_cupy", lambda array: True),
        mock.patch("sbnet_cupy.dense.im2col_grad.is_cupy", lambda array: True),
    ):
        run_fake(case)
    tf32 = case.precision == "tf32" and case.dtype == np.float32
    compute_type = 70 if case.dtype == np.float64 else 77 if tf32 else 68
    assert cublas.compute_types <= {compute_type}


@pytest.mark.gpu
@given(case=cases())
def test_cudnn_takes_all_but_float64(xp, case):
    """Else the fast route is not run, and nothing would tell."""
    if xp.name != "cupy" or not dense_cudnn.cudnn_available():
        pytest.skip("needs a GPU with cuDNN")
    assume(case.dtype != np.float64 and np.prod(case.image) and np.prod(output_shape(case)))
    declined = []

    def recorded(key, arrays):
        taken = dense_cudnn.run(key, arrays)
        aligned = all(array.data.ptr % 16 == 0 for array in arrays.values())
        declined.extend([key] if aligned and not taken else [])
        return taken

    with mock.patch.object(cudnn_grad, "run", recorded):
        check_exact(case, xp)
    assert not [key for key in declined if key.result != dense_cudnn.W]
    assert not [key for key in declined if key.dtype == key.result_dtype]
