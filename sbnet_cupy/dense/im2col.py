"""Convolution as matrix products: patches of the image become rows of a matrix, a chunk at a time.

NHWC: ``columns[(n, p, q), (r, s, c)] @ weights[(r, s, c), k]``; NCHW: the transposed product.
It runs on NumPy (BLAS) and, if cuDNN is missing or does not support the call, on CuPy (cuBLAS).
"""

import numpy as np

from ..core.arrays import address, compute_dtype, dtype_name, is_cupy, namespace
from ..errors import DeviceError
from .activation import apply_affine

# Memory for the columns and products of one chunk, which has at least one output row.
NUMPY_CHUNK_BYTES = 4 << 20  # fits a core's cache: the product reads what the copy has just written
CUPY_CHUNK_BYTES = 128 << 20

# cublasGemmEx: element types, and types of the products and sums.
_CUBLAS_TYPE = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 14}
_COMPUTE_32F, _COMPUTE_64F, _COMPUTE_32F_FAST_TF32 = 68, 70, 77
_GEMM_DEFAULT = -1


def convolve(x, w, out, scale, shift, problem):
    """Write ``activation(conv(x, w) * scale + shift)`` to ``out``; see conv2d for the arguments."""
    total, on_gpu = compute_dtype(x.dtype), is_cupy(x)
    operand = x.dtype if on_gpu else total  # cuBLAS multiplies halves itself, BLAS does not
    weights = weight_matrix(w, problem).astype(operand, copy=False)
    scratch = Scratch(namespace(x))
    terms, channels = w.size // problem.channels_out, problem.channels_out
    row_bytes = problem.out_size[1] * (terms * operand.itemsize + channels * total.itemsize)
    limit = CUPY_CHUNK_BYTES if on_gpu else NUMPY_CHUNK_BYTES
    for part, rows in chunks(len(x), problem.out_size[0], row_bytes, limit):
        source = source_rows(x[part], rows, operand, problem, scratch)
        columns = columns_of(source, rows, problem, scratch)
        if problem.channels_last:
            target = out[part, rows]
            shape, axis = (len(columns), channels), 1
        else:
            target = out[part, :, rows].transpose(1, 0, 2, 3)
            shape, axis = (channels, columns.shape[1]), 0
        direct = target.dtype == total and target.flags.c_contiguous
        product = target.reshape(shape) if direct else scratch.array("product", shape, total)
        if problem.channels_last:
            multiply(columns, weights, product, problem.tf32)
        else:
            multiply(weights, columns, product, problem.tf32)
        apply_affine(product, scale, shift, problem.activation, axis)
        if not direct:
            target[...] = product.reshape(target.shape)


class Scratch:
    """Named buffers shared by the chunks; the first chunk is the largest."""

    def __init__(self, xp):
        self._xp = xp
        self._buffers = {}

    def array(self, name, shape, dtype):
        """Return uninitialised memory of this shape."""
        size = int(np.prod(shape))
        if name not in self._buffers:
            self._buffers[name] = self._xp.empty(size, dtype)
        return self._buffers[name][:size].reshape(shape)


def chunks(batch, rows, row_bytes, limit):
    """Yield slices (images, output rows): several whole images, or some rows of one image."""
    step = max(1, limit // row_bytes)
    if step >= rows:
        images = step // rows
        for start in range(0, batch, images):
            yield slice(start, min(start + images, batch)), slice(0, rows)
        return
    for image in range(batch):
        for start in range(0, rows, step):
            yield slice(image, image + 1), slice(start, min(start + step, rows))


def weight_matrix(w, problem):
    """Return ``[R*S*C, K]``, or ``[K, C*R*S]`` for NCHW: axes in the order of the columns."""
    axes = problem.weight_axes("HWIO" if problem.channels_last else "OIHW")
    k = problem.channels_out
    return w.transpose(axes).reshape((-1, k) if problem.channels_last else (k, -1))


def source_rows(images, rows, operand, problem, scratch):
    """Return the input rows that the output rows need, as NHWC, padded with zeros.

    If no padding and no other dtype is needed, the result is a view.
    """
    (top, _), (left, _) = problem.pads
    step, kernel = problem.strides, problem.kernel
    first = rows.start * step[0] - top
    height = (rows.stop - 1 - rows.start) * step[0] + kernel[0]
    if not problem.channels_last:
        images = images.transpose(0, 2, 3, 1)
    if not any(map(any, problem.pads)) and images.dtype == operand:
        return images[:, first : first + height]
    n, image_height, image_width, c = images.shape
    width = (problem.out_size[1] - 1) * step[1] + kernel[1]
    if problem.channels_last:
        padded = scratch.array("padded", (n, height, width, c), operand)
    else:
        padded = scratch.array("padded", (n, c, height, width), operand).transpose(0, 2, 3, 1)
    padded[...] = 0
    low, high = max(first, 0), min(first + height, image_height)
    across = min(image_width, width - left)
    if high > low and across > 0:
        padded[:, low - first : high - first, left : left + across] = images[:, low:high, :across]
    return padded


def columns_of(source, rows, problem, scratch):
    """Return the matrix of patches: ``[(n, p, q), (r, s, c)]``, or its transpose for NCHW."""
    step, kernel = problem.strides, problem.kernel
    n, _, _, c = source.shape
    n_bytes, h_bytes, w_bytes, c_bytes = source.strides
    windows = namespace(source).lib.stride_tricks.as_strided(
        source,
        (n, rows.stop - rows.start, problem.out_size[1], *kernel, c),
        (n_bytes, h_bytes * step[0], w_bytes * step[1], h_bytes, w_bytes, c_bytes),
    )
    split = 3
    if not problem.channels_last:
        windows = windows.transpose(5, 3, 4, 0, 1, 2)
    shape = int(np.prod(windows.shape[:split])), int(np.prod(windows.shape[split:]))
    if kernel == (1, 1):
        return windows.reshape(shape)  # usually a view
    columns = scratch.array("columns", shape, source.dtype)
    columns.reshape(windows.shape)[...] = windows
    return columns


def multiply(a, b, out, tf32):
    """Write the matrix product ``a @ b``, computed in the dtype of ``out``."""
    if not a.size:
        out[...] = 0
    elif not is_cupy(a):
        np.matmul(a, b, out=out, dtype=out.dtype)
    else:
        _multiply_cublas(a, b, out, tf32)


def _multiply_cublas(a, b, out, tf32):
    """Multiply by cuBLAS.

    ``cupy.matmul`` would round half floats before the bias is added, and takes the choice of TF32
    from a setting of the whole process.
    """
    (m, k), n = a.shape, b.shape[1]
    a, a_op, a_step = _operand(a)
    b, b_op, b_step = _operand(b)
    one, zero = np.ones(1, out.dtype), np.zeros(1, out.dtype)
    if out.dtype == np.float64:
        compute = _COMPUTE_64F
    else:
        compute = _COMPUTE_32F_FAST_TF32 if tf32 and a.dtype == np.float32 else _COMPUTE_32F
    kind, out_kind = _CUBLAS_TYPE[dtype_name(a.dtype)], _CUBLAS_TYPE[dtype_name(out.dtype)]
    gemm, handle = _cublas_gemm()
    # cuBLAS is column-major: it sees a, b and out transposed, so the product is out' = b' a'.
    try:
        gemm(
            handle, b_op, a_op, n, m, k,
            one.ctypes.data, address(b), kind, b_step, address(a), kind, a_step,
            zero.ctypes.data, address(out), out_kind, n, compute, _GEMM_DEFAULT,
        )  # fmt: skip
    except NotImplementedError as error:  # CuPy calls no cuBLAS while the stream is captured
        raise NotImplementedError(
            "a CUDA graph cannot hold this convolution: it multiplies matrices by cuBLAS, which "
            "CuPy does not capture; pip install sbnet-cupy[cudnn], or use method='fused' if the "
            "layer has a method"
        ) from error


def _operand(matrix):
    """Return the matrix, whether cuBLAS must transpose it, and the stride of its rows in memory."""
    if matrix.flags.f_contiguous and not matrix.flags.c_contiguous:
        return matrix, 1, matrix.shape[0]
    return namespace(matrix).ascontiguousarray(matrix), 0, matrix.shape[1]  # usually no copy


def _cublas_gemm():
    """Return cublasGemmEx and the current device's handle, which uses CuPy's current stream."""
    import cupy

    try:
        from cupy.cuda import cublas
    except ImportError as error:
        raise DeviceError(
            "conv2d on a GPU needs cuDNN or cuBLAS; pip install sbnet-cupy[cudnn] or nvidia-cublas"
        ) from error
    return cublas.gemmEx, cupy.cuda.get_cublas_handle()
