"""cublasGemmEx and cuDNN's Python front end, played on the CPU from the pointers they are given.

They know nothing of the library under test: sizes, strides, paddings, element types and pointers
mean here what NVIDIA documents, so that a wrong one gives a wrong result on a machine without GPU.
"""

import ctypes
import enum
from types import SimpleNamespace

import ml_dtypes
import numpy as np

from support import conv_oracles as oracles

CUBLAS_DTYPES = {0: np.float32, 1: np.float64, 2: np.float16, 14: ml_dtypes.bfloat16}


def memory(pointer, count, dtype):
    """View ``count`` elements at an address."""
    dtype = np.dtype(dtype)
    return np.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(pointer), dtype)


class Cublas:
    """cublasGemmEx for row counts, leading dimensions and transposition."""

    handle = 77

    def __init__(self):
        self.compute_types = set()

    def gemm_ex(
        self, handle, transa, transb, m, n, k, alpha, a, a_type, lda, b, b_type, ldb,
        beta, c, c_type, ldc, compute_type, algo,
    ):  # fmt: skip
        """``C = alpha op(A) op(B) + beta C``, column-major: m x n, m x k and k x n."""
        assert (handle, algo) == (self.handle, -1) and {transa, transb} <= {0, 1}
        assert lda >= (k if transa else m) and ldb >= (n if transb else k) and ldc >= m
        self.compute_types.add(compute_type)
        compute = {68: np.float32, 77: np.float32, 70: np.float64}[compute_type]
        assert memory(alpha, 1, compute)[0] == 1 and memory(beta, 1, compute)[0] == 0
        left = self.operand(a, m, k, lda, CUBLAS_DTYPES[a_type], transa)
        right = self.operand(b, k, n, ldb, CUBLAS_DTYPES[b_type], transb)
        product = left.astype(compute) @ right.astype(compute)
        memory(c, ldc * n, CUBLAS_DTYPES[c_type]).reshape(n, ldc)[:, :m] = product.T

    @staticmethod
    def operand(pointer, rows, columns, leading, dtype, transposed):
        """View a matrix of ``rows`` x ``columns``, held column by column, or row by row."""
        if transposed:
            return memory(pointer, leading * rows, dtype).reshape(rows, leading)[:, :columns]
        return memory(pointer, leading * columns, dtype).reshape(columns, leading)[:, :rows].T


class GraphNotSupported(Exception):
    """What the front end raises where it has no kernel."""


DataType = enum.Enum("DataType", "HALF BFLOAT16 FLOAT")
Note = enum.Enum(
    "Note",
    "TENSOR_CORE DOWN_CONVERT_INPUTS REDUCED_PRECISION_REDUCTION FFT NONDETERMINISTIC WINOGRAD "
    "WINOGRAD_TILE_4x4 WINOGRAD_TILE_6x6 WINOGRAD_TILE_13x13 STRICT_NAN_PROP",
)
CUDNN_DTYPES = {
    DataType.HALF: np.float16,
    DataType.BFLOAT16: ml_dtypes.bfloat16,
    DataType.FLOAT: np.float32,
}


class Cudnn:
    """The module ``cudnn``: graphs of a convolution and pointwise nodes."""

    data_type = DataType
    numerical_note = Note
    heur_mode = SimpleNamespace(A="A", FALLBACK="FALLBACK")
    cudnnGraphNotSupportedError = GraphNotSupported

    def __init__(self, supports=lambda graph: True):
        self.supports = supports
        self.graphs = []
        self.executed = []
        self.stream = None

    def backend_version(self):
        return 91900

    def create_handle(self):
        return SimpleNamespace(name="handle")

    def create_kernel_cache(self):
        return SimpleNamespace(name="cache")

    def set_stream(self, handle, stream):
        self.stream = stream

    def pygraph(self, **options):
        self.graphs.append(Graph(self, **options))
        return self.graphs[-1]


class Tensor:
    """A tensor of a graph: sizes in the order NCHW, strides in elements."""

    def __init__(self, compute=None):
        self.compute = compute  # from the pointers, for the results of nodes

    def set_output(self, is_output):
        assert is_output
        return self

    def set_data_type(self, data_type):
        self.data_type = data_type
        return self

    def set_uid(self, uid):
        self.uid = uid
        return self

    def set_dim(self, dim):
        self.dim = dim
        return self

    def set_stride(self, stride):
        self.stride = stride
        return self

    def view(self, pointer):
        """View the memory at a pointer."""
        assert pointer % 16 == 0
        assert len(self.dim) == len(self.stride) == 4
        dtype = np.dtype(CUDNN_DTYPES[self.data_type])
        count = 1 + sum((n - 1) * step for n, step in zip(self.dim, self.stride, strict=True))
        flat = memory(pointer, count, dtype)
        steps = [step * dtype.itemsize for step in self.stride]
        return np.lib.stride_tricks.as_strided(flat, self.dim, steps)


class Graph:
    """A graph whose steps must come in the documented order."""

    def __init__(
        self, cudnn, *, io_data_type, intermediate_data_type, compute_data_type, handle,
        kernel_cache=None, is_dynamic_shape_enabled=False,
    ):  # fmt: skip
        assert intermediate_data_type is compute_data_type is DataType.FLOAT
        assert handle.name == "handle"
        assert (kernel_cache is not None) == is_dynamic_shape_enabled
        self.cudnn, self.cache, self.dynamic = cudnn, kernel_cache, is_dynamic_shape_enabled
        self.io_data_type = io_data_type
        self.nodes, self.steps, self.notes = [], [], []

    def tensor(self, *, dim, stride, data_type, uid):
        tensor = Tensor().set_dim(dim).set_stride(stride).set_data_type(data_type).set_uid(uid)
        tensor.compute = lambda pointers: tensor.view(pointers[uid]).astype(np.float32)
        return tensor

    def conv_fprop(self, *, image, weight, pre_padding, post_padding, stride, dilation):
        assert dilation == [1, 1]
        padding = tuple(zip(pre_padding, post_padding, strict=True))

        def compute(pointers):
            x, w = image.compute(pointers), weight.compute(pointers)
            y = oracles.conv2d(x.transpose(0, 2, 3, 1), w.transpose(2, 3, 1, 0), stride, padding)
            return y.astype(np.float32).transpose(0, 3, 1, 2)

        return self._node("conv", compute)

    def conv_dgrad(self, *, loss, filter, pre_padding, post_padding, stride, dilation):
        assert dilation == [1, 1]
        padding = tuple(zip(pre_padding, post_padding, strict=True))

        def compute(pointers):
            grad, w = loss.compute(pointers), filter.compute(pointers)
            dx = oracles.data_gradient(
                grad.transpose(0, 2, 3, 1), w.transpose(2, 3, 1, 0), self.output.dim[2:],
                stride, padding,
            )  # fmt: skip
            return dx.astype(np.float32).transpose(0, 3, 1, 2)

        return self._node("dgrad", compute)

    def conv_wgrad(self, *, image, loss, pre_padding, post_padding, stride, dilation):
        assert dilation == [1, 1]
        padding = tuple(zip(pre_padding, post_padding, strict=True))

        def compute(pointers):
            x, grad = image.compute(pointers), loss.compute(pointers)
            dw = oracles.weight_gradient(
                grad.transpose(0, 2, 3, 1), x.transpose(0, 2, 3, 1), self.output.dim[2:],
                stride, padding,
            )  # fmt: skip
            return dw.astype(np.float32).transpose(3, 2, 0, 1)

        return self._node("wgrad", compute)

    def _node(self, name, compute):
        self.nodes.append(name)
        self.output = Tensor(compute)
        return self.output

    def mul(self, *, a, b):
        return self._node("mul", lambda p: a.compute(p) * b.compute(p))

    def add(self, *, a, b):
        return self._node("add", lambda p: a.compute(p) + b.compute(p))

    def relu(self, *, input):
        return self._pointwise("relu", input)

    def gelu(self, *, input):
        return self._pointwise("gelu", input)

    def swish(self, *, input, swish_beta):
        assert swish_beta == 1
        return self._pointwise("silu", input)

    def _pointwise(self, name, tensor):
        function = np.vectorize(oracles.ACTIVATIONS[name], otypes=[np.float32])
        return self._node(name, lambda pointers: function(tensor.compute(pointers)))

    def _step(self, name, *before):
        assert all(step in self.steps for step in before), (name, self.steps)
        self.steps.append(name)

    def validate(self):
        self._step("validate")

    def build_operation_graph(self):
        self._step("build_operation_graph", "validate")

    def create_execution_plans(self, modes):
        assert modes == ["A", "FALLBACK"]
        self._step("create_execution_plans", "build_operation_graph")

    def deselect_numeric_notes(self, notes):
        self._step("deselect_numeric_notes", "create_execution_plans")
        self.notes = notes

    def check_support(self):
        self._step("check_support", "create_execution_plans")
        if not self.cudnn.supports(self):
            raise GraphNotSupported("no kernel")

    def build_plans(self):
        self._step("build_plans", "check_support")

    def get_workspace_size(self):
        assert "build_plans" in self.steps
        return 128

    def execute(self, pointers, workspace, handle):
        assert workspace and handle.name == "handle" and self.cudnn.stream is not None
        y = self.output.view(pointers[self.output.uid])
        with np.errstate(over="ignore"):
            y[...] = self.output.compute(pointers).astype(y.dtype)
        self.cudnn.executed.append(self)
