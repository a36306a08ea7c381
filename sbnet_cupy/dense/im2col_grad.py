"""Gradients of a convolution as matrix products, a chunk of the batch at a time.

The patches of the images are the rows of a matrix ``columns``. Then ``dw = columns.T @ grad_y``,
and ``grad_y @ w.T`` is the gradient of the patches, which is added up where they were read. It runs
on NumPy (BLAS) and, if cuDNN is missing or does not support the call, on CuPy (cuBLAS). NCHW arrays
are viewed as NHWC.
"""

import numpy as np

from ..core.arrays import channels_last_view, compute_dtype, is_cupy, namespace
from . import im2col


def data_gradient(grad_y, w, dx, problem):
    """Write the gradient of the images to ``dx``."""
    if problem.kernel == problem.strides == (1, 1) and not any(map(any, problem.pads)):
        _pointwise_data_gradient(grad_y, w, dx, problem)
        return
    plan = _Plan(dx, grad_y, w, problem)
    weights = im2col.weight_matrix(w, plan.problem).astype(plan.operand, copy=False)
    (top, bottom), (left, right) = problem.pads
    _, height, width, channels = plan.x.shape
    padded_size = (height + top + bottom, width + left + right, channels)
    for part, rows in plan.chunks():
        grad = plan.grad_matrix(part, rows)
        product = plan.scratch.array("product", (len(grad), len(weights)), plan.total)
        im2col.multiply(grad, weights.T, product, problem.tf32)
        images = part.stop - part.start
        padded = plan.scratch.array("padded", (images, *padded_size), plan.total)
        if rows.start == 0:
            padded[...] = 0
        _add_windows(padded, product, rows, problem)
        if rows.stop == problem.out_size[0]:
            plan.x[part] = padded[:, top : top + height, left : left + width]


def weight_gradient(x, grad_y, dw, problem):
    """Add the gradient of the kernel to ``dw``, which is HWIO, in the dtype of ``dw``."""
    plan = _Plan(x, grad_y, dw, problem)
    product = namespace(x).empty((dw.size // dw.shape[3], dw.shape[3]), dw.dtype)
    for part, rows in plan.chunks():
        source = im2col.source_rows(plan.x[part], rows, plan.operand, plan.problem, plan.scratch)
        columns = im2col.columns_of(source, rows, plan.problem, plan.scratch)
        im2col.multiply(columns.T, plan.grad_matrix(part, rows), product, problem.tf32)
        dw += product.reshape(dw.shape)


class _Plan:
    """The arrays as NHWC, the dtypes to compute in, and how the batch is cut into chunks."""

    def __init__(self, x, grad_y, w, problem):
        self.x = channels_last_view(x, problem.channels_last)
        self.grad_y = channels_last_view(grad_y, problem.channels_last)
        self.problem = problem._replace(channels_last=True)
        self.total = compute_dtype(x.dtype)
        self.operand = x.dtype if is_cupy(x) else self.total  # BLAS does not multiply half floats
        self.scratch = im2col.Scratch(namespace(x))
        self._terms = w.size // problem.channels_out

    def chunks(self):
        """Yield slices (images, output rows)."""
        row = self._terms * self.total.itemsize + self.problem.channels_out * self.operand.itemsize
        limit = im2col.CUPY_CHUNK_BYTES if is_cupy(self.x) else im2col.NUMPY_CHUNK_BYTES
        rows, columns = self.problem.out_size
        return im2col.chunks(len(self.x), rows, columns * row, limit)

    def grad_matrix(self, part, rows):
        """Return the gradient of these output pixels, ``[(n, p, q), k]``."""
        grad = self.grad_y[part, rows]
        return grad.reshape(-1, grad.shape[3]).astype(self.operand, copy=False)


def _pointwise_data_gradient(grad_y, w, dx, problem):
    """Multiply each pixel's gradient by the transposed weights, which is also a convolution."""
    axes = [problem.w_format.index(letter) for letter in "OI"]
    channels = dx.shape[3 if problem.channels_last else 1]
    transposed = problem._replace(channels_out=channels, activation=None)
    im2col.convolve(grad_y, w.swapaxes(*axes), dx, None, None, transposed)


def _add_windows(padded, product, rows, problem):
    """Add the gradients of patches, ``[(n, p, q), (r, s, c)]``, to the padded images."""
    (step_h, step_w), columns = problem.strides, problem.out_size[1]
    count = rows.stop - rows.start
    product = product.reshape(len(padded), count, columns, *problem.kernel, padded.shape[3])
    for r, s in np.ndindex(problem.kernel):
        first = rows.start * step_h + r
        down = slice(first, first + (count - 1) * step_h + 1, step_h)
        across = slice(s, s + (columns - 1) * step_w + 1, step_w)
        padded[:, down, across] += product[..., r, s, :]
