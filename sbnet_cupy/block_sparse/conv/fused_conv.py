"""fused_conv: a convolution at the active blocks, from image to image."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ...core import launch as kernels
from ...core.arrays import array_function, dtype_name, empty, vector_bytes, zeros
from ...core.byte_order import check_byte_orders
from ...core.checks import check_array, check_contiguous, check_result, check_written
from ...core.compile import cpp_name
from ...core.device import current_device
from ...core.operator import Operator, Plan
from ...core.packed import PackedPlan
from ...dense.activation import ACTIVATIONS, apply_activation
from ...dense.conv2d import Problem, resolve_problem
from ...dense.im2col import convolve
from ...dense.packed_weights import (
    PackedWeights,
    arrays_of_weights,
    check_weights,
    plain_weights,
)
from ...errors import DTypeError
from ..checks import LARGEST, MOST_BLOCKS, check_indices, cut_blocks, resolve_expected
from ..corners import CHUNK_BYTES
from ..gather_scatter.sparse_gather import gather_numpy
from ..gather_scatter.sparse_scatter import scatter_numpy
from ..grid import Grid, Layout, resolve_grid
from .config import Case, configure_conv, expected_blocks, tiles_of_block
from .weights import prepare_pack
from .wide import as_stack_conv, is_for_wide, plan_wide


@array_function
def fused_conv(
    x,
    w,
    bin_counts,
    active_block_indices,
    *,
    bsize,
    strides=(1, 1),
    padding: Any = "SAME",
    scale=None,
    bias=None,
    residual=None,
    activation=None,
    data_format="NHWC",
    w_format="HWIO",
    precision=None,
    expected=None,
    out=None,
):
    """Convolve an image at the active blocks of its result, with no block stack in between.

    ``y[n, p, q, k] = activation(scale[k] * sum x[n, p * sh - top + r, q * sw - left + s, c] *
    w[r, s, c, k] + bias[k] + residual[n, p, q, k])``, the sum over r, s and c, at every pixel
    ``(p, q)`` of the active blocks; elsewhere 0, or what was in ``out``. Block ``(n, hi, wi)`` has
    the pixels from ``(bsize[0] * hi, bsize[1] * wi)`` on. All is in float32 (float64 for float64)
    and rounded once.

    Parameters
    ----------
    x : array, shape (N, H, W, C), or (N, C, H, W) with ``data_format="NCHW"``
        Images; float16, bfloat16, float32 or float64 (not on a GPU). C-contiguous; a NumPy array
        that is not is copied.
    w : array, shape (R, S, C, K), or (K, C, R, S) with ``w_format="OIHW"``, or PackedWeights
        Kernel, of the dtype of ``x``. An array is laid out anew at each call, a
        :class:`PackedWeights` once.
    bin_counts : int32 array, shape (1,)
        Number of active blocks, as :func:`reduce_mask` returns it.
    active_block_indices : int32 array, shape (M, 3)
        Rows ``(n, hi, wi)``, as :func:`reduce_mask` returns them. Rows at or past ``bin_counts``
        and rows of no block of the result are passed over.
    bsize : int or (int, int)
        Size of a block, in pixels of the result: ``BlockParams.bsize_out``.
    strides, padding, activation, data_format
        As for :func:`conv2d`.
    scale, bias : float array, shape (K,), optional
        Factor and offset per output channel; None where ``w`` is a PackedWeights, which has its
        own.
    residual : array of the shape and dtype of the result, optional
        Added before the activation. Read at active pixels only.
    w_format, precision
        As for :func:`conv2d`; those of a PackedWeights hold without being given again.
    expected : int, optional
        About how many blocks will be active; M by default. On a GPU it chooses between a kernel
        for few and one for many. Results differ by rounding at most.
    out : array of the shape and dtype of the result, optional
        Only its active pixels are written, and it is returned. It must share no memory with the
        other arrays.

    Returns
    -------
    y : array, shape (N, P, Q, K), or (N, K, P, Q)
        In the dtype, in the library and on the device of ``x``.

    Raises
    ------
    ShapeError
        If sizes do not fit together, or an array is not contiguous.
    DTypeError
        If ``x`` is not of a floating dtype, or ``w`` or ``residual`` is of another one.
    NotImplementedError
        If there is no CUDA kernel for a call on CuPy arrays; the message says why.

    Source: Chetlur et al. 2014, arXiv:1410.0759, for the implicit matrix product; Ren et al. 2018,
    arXiv:1801.02108, for the list of blocks. Kernel: cuda_src/block_sparse/conv/fused_conv.cu

    Examples
    --------
    >>> import numpy as np
    >>> x, w = np.ones((1, 6, 6, 1), np.float32), np.ones((3, 3, 1, 1), np.float32)
    >>> counts, indices = np.array([1], np.int32), np.array([[0, 0, 1]], np.int32)
    >>> fused_conv(x, w, counts, indices, bsize=3)[0, :, :, 0]
    array([[0., 0., 0., 6., 6., 4.],
           [0., 0., 0., 9., 9., 6.],
           [0., 0., 0., 9., 9., 6.],
           [0., 0., 0., 0., 0., 0.],
           [0., 0., 0., 0., 0., 0.],
           [0., 0., 0., 0., 0., 0.]], dtype=float32)
    """
    w_array, scale_array, bias_array, w_format, precision = arrays_of_weights(
        w, scale, bias, w_format, precision
    )
    read = (
        x, w_array, bin_counts, active_block_indices, scale_array, bias_array, residual
    )  # fmt: skip
    options = (bsize, strides, padding, activation, data_format, w_format, precision, expected)
    plan = FUSED_CONV.plan_for((*read, out), options)
    if out is None:
        out = zeros(plan.shape, x.dtype, x)
    else:
        check_written(out, _READ, read)
    plan.run(x, w, bin_counts, active_block_indices, scale, bias, residual, out)
    return out


_READ = ("x", "w", "bin_counts", "active_block_indices", "scale", "bias", "residual")


class Convolution(NamedTuple):
    """A checked convolution at active blocks, without its arrays."""

    problem: Problem
    bsize: tuple[int, int]  # no larger than the result
    rows: int  # that are expected to be active


def _resolve(specs, options):
    """Check all arguments; return the spec of the result and the Convolution."""
    x, w, bin_counts, active_block_indices, scale, bias, residual, out = specs
    bsize, *convolution, expected = options
    *_, w_format, precision = convolution
    check_weights(w, scale, bias, w_format, precision)
    problem = resolve_problem(x, w, *convolution)
    check_indices(bin_counts, active_block_indices, like=x)
    bsize = cut_blocks(resolve_grid(bsize, (0, 0), None).bsize, problem.out_size)
    result = x.new((x.shape[0], *problem.out_shape))
    if residual is not None:
        check_array("residual", residual, shape=result.shape, like=x)
        if residual.dtype != x.dtype:
            check_byte_orders({"x": x, "residual": residual})
            raise DTypeError(
                f"residual must have the dtype of x, {x.dtype}, got {residual.dtype}; convert it"
            )
        check_contiguous("residual", residual)
    rows = resolve_expected(expected, active_block_indices)
    check_result(out, result)
    return result, Convolution(problem, bsize, rows)


def _infer(specs, options):
    """Check all arguments; return the spec of the result."""
    return _resolve(specs, options)[:1]


def _plan(specs, options):
    """Check all arguments; return the plan of the call."""
    return plan_fused_conv(specs, *_resolve(specs, options))


def plan_fused_conv(specs, result, convolution, background=False):
    """Return the plan of a checked call. What it runs takes a PackedWeights, too, in place of w.

    ``background`` has weights packed by a kernel that can write what lies below the result.
    """
    x, w, _, active_block_indices, scale, bias, residual, out = specs
    if not result.size:
        return Plan((result,), _nothing_convolved)
    if x.on_gpu:
        rows, weights = active_block_indices.shape[0], (w, scale, bias)
        outs = out or result, result, background
        return _plan_cuda(x, weights, rows, residual, outs, convolution)
    stack = _plan_stack(x, convolution)
    return Plan((result,), functools.partial(_fused_conv_numpy, stack=stack))


def _nothing_convolved(*arrays):
    """Write a result with no elements."""


class _Stack(NamedTuple):
    """How the NumPy body reads, convolves and writes some rows of the list."""

    gather: Callable
    gather_residual: Callable
    scatter: Callable
    problem: Problem
    w_format: str
    activation: str | None
    bsize: tuple[int, int]  # of a block that is read
    bsize_out: tuple[int, int]


def _plan_stack(x, convolution):
    """Plan the copies and the convolution of the stack, which is NHWC whatever the image is."""
    problem, bsize, _ = convolution
    axes = list(zip(bsize, problem.kernel, problem.strides, strict=True))
    grid = Grid(
        bsize=tuple((b - 1) * s + k for b, k, s in axes),
        boffset=tuple(-before for before, _ in problem.pads),
        bstride=tuple(b * s for b, _, s in axes),
    )
    last, images = problem.channels_last, x.shape[0]
    (height, width), channels = (x.shape[1:3], x.shape[3]) if last else (x.shape[2:], x.shape[1])
    image = Layout(images, height, width, channels, last, True)
    result = Layout(images, *problem.out_size, problem.channels_out, last, True)
    written = Grid(bsize, (0, 0), bsize)
    return _Stack(
        functools.partial(gather_numpy, layout=image, grid=grid, activation=None),
        functools.partial(gather_numpy, layout=result, grid=written, activation=None),
        functools.partial(scatter_numpy, layout=result, grid=written, add=False, overlap=False),
        stack_problem(problem, bsize)._replace(w_format="HWIO", activation=None),
        problem.w_format,
        problem.activation,
        grid.bsize,
        bsize,
    )


def stack_problem(problem, bsize_out):
    """Return the convolution of a stack whose blocks give ``bsize_out`` pixels: with no padding."""
    return problem._replace(pads=((0, 0), (0, 0)), out_size=tuple(bsize_out), channels_last=True)


def _fused_conv_numpy(
    x, w, bin_counts, active_block_indices, scale, bias, residual, out, *, stack
):
    """Gather, convolve in float32 or float64, scatter; some rows of the list at a time."""
    if isinstance(w, PackedWeights):
        w, scale, bias = w.plain()
    else:
        w, scale, bias = plain_weights(w, scale, bias, w_format=stack.w_format)
    channels, channels_out = w.shape[2:]
    count = min(max(int(bin_counts[0]), 0), len(active_block_indices))
    elements = max(math.prod(stack.bsize) * channels, math.prod(stack.bsize_out) * channels_out)
    step = max(1, CHUNK_BYTES // (elements * w.itemsize))
    for start in range(0, count, step):
        rows = active_block_indices[start : min(start + step, count)]
        active = np.array([len(rows)], np.int32), rows
        read = empty((len(rows), *stack.bsize, channels), x.dtype, x)
        blocks = empty((len(rows), *stack.bsize_out, channels_out), w.dtype, x)
        with np.errstate(all="ignore"):  # infinities come with no warning, as on a GPU
            if x.size:
                stack.gather(x, *active, read, None, None)
            else:
                read[...] = 0
            read = read.astype(w.dtype, copy=False)
            convolve(read, w, blocks, scale, bias, stack.problem)
            if residual is not None:
                shown = empty(blocks.shape, x.dtype, x)
                stack.gather_residual(residual, *active, shown, None, None)
                blocks += shown
            if stack.activation is not None:
                blocks = apply_activation(blocks, stack.activation)
            blocks = blocks.astype(x.dtype, copy=False)
        stack.scatter(blocks, *active, None, out)


def missing_kernel(x, problem, bsize, rows):
    """Return for what there is no CUDA kernel; None where there is one for the spec ``x``."""
    if not x.shape[0] or 0 in problem.out_size:
        return None  # nor is one needed
    name, device = dtype_name(x.dtype), current_device()
    if name == "float64" or (name == "bfloat16" and not device.tensor_floats):
        return f"{name} on this GPU"
    if not x.size:
        return f"empty images, x {x.shape}"
    sizes = (*x.shape, *problem.out_shape, *problem.kernel, *problem.strides)
    if max(*sizes, *problem.pads[0], *problem.pads[1]) > LARGEST:
        return f"sizes above 2**30, such as those of x {x.shape} with padding {problem.pads}"
    case, bsize = _case(x, problem, device), cut_blocks(bsize, problem.out_size)
    config = _configuration(case, x, problem, bsize, rows)
    if config is None:
        return f"a window of {problem.kernel} pixels: it does not fit this GPU's shared memory"
    if max(tiles_of_block(bsize, config.tile), config.slices(case)) > MOST_BLOCKS:
        return f"blocks as large as {bsize} with {problem.channels_out} output channels"
    return None


def require_kernel(x, problem, bsize, rows):
    """Raise NotImplementedError, saying why, where there is no CUDA kernel for ``x``."""
    missing = missing_kernel(x, problem, bsize, rows)
    if missing is not None:
        raise NotImplementedError(
            f"fused_conv has no CUDA kernel for {missing}; use sparse_conv2d with method='gather'"
        )


def _configuration(case, x, problem, bsize, rows):
    """Return the instance for about so many active rows; whether vectors are whole changes none."""
    return configure_conv(case, rows, bsize, _output_pixels(x, problem), current_device())


def _output_pixels(x, problem):
    """Return the number of pixels of all results."""
    return x.shape[0] * math.prod(problem.out_size)


def _case(x, problem, device, vectors_in=False, vectors_out=False):
    """Describe the convolution to the planner; without tensor cores for tf32 it is IEEE."""
    tf32 = problem.tf32 and device.tensor_floats
    return Case(
        element=cpp_name(x.dtype, "x"),
        element_bytes=x.dtype.itemsize,
        ieee=dtype_name(x.dtype) == "float32" and not tf32,
        channels=x.shape[3 if problem.channels_last else 1],
        channels_out=problem.channels_out,
        kernel=problem.kernel,
        strides=problem.strides,
        vectors_in=vectors_in,
        vectors_out=vectors_out,
        activation=ACTIVATIONS.index(problem.activation),
    )


def _plan_cuda(x, weights, rows, residual, outs, convolution):
    """Prepare one launch over the rows of the list; see fused_conv.cu."""
    (out, result, background), (problem, bsize, expected) = outs, convolution
    require_kernel(x, problem, bsize, expected)

    def whole_vectors(channels, *specs):
        multiples = (channels * x.dtype.itemsize, *(s.alignment for s in specs if s is not None))
        return problem.channels_last and vector_bytes(*multiples) == 16

    channels = x.shape[3 if problem.channels_last else 1]
    vectors = whole_vectors(channels, x), whole_vectors(problem.channels_out, out, residual)
    case, device = _case(x, problem, current_device(), *vectors), current_device()
    config = _configuration(case, x, problem, bsize, expected)
    if problem.channels_last:
        likely = expected_blocks(expected, bsize, _output_pixels(x, problem))
        conv = as_stack_conv(case, x.shape, problem, rows, bsize, likely)
        if is_for_wide(case, config, conv, device):
            return plan_wide(conv, weights, problem.w_format, result, background, device)
    blocks = tuple(-(-n // b) for n, b in zip(problem.out_size, bsize, strict=True))
    image_hw = x.shape[1:3] if problem.channels_last else x.shape[2:]
    sizes = (rows, x.shape[0], channels, *image_hw, problem.channels_out, *problem.out_size)
    (top, _), (left, _) = problem.pads
    launch = kernels.prepare(
        "block_sparse/conv/fused_conv",
        "fused_conv",
        config.template(case),
        (rows, config.slices(case), tiles_of_block(bsize, config.tile)),
        config.threads,
        6,
        (*sizes, *bsize, *blocks, top, left, config.chunks, int(problem.channels_last)),
        shared=config.shared_bytes(case),
        persistent=True,
        dependent=True,
    )
    image_bytes = result.nbytes if background else 0
    pack = prepare_pack(case, config, problem.w_format, weights, image_bytes)
    how = (*config.pack_template(case), config.chunks, problem.w_format)

    def run(x, w, bin_counts, active_block_indices, scale, bias, residual, out, below=None):
        if isinstance(w, PackedWeights):
            packed = w.packed(how, pack)
        else:
            packed = pack(w, scale, bias, background=below)
        launch(x, packed, residual, bin_counts, active_block_indices, out)

    return PackedPlan(
        (result,),
        run,
        launch,
        operands=(0, 8, 6, 2, 3, 7),
        scratch=pack.scratch(*weights),
        base=(),
        pack=pack,
        how=how,
        weights=(1, 4, 5),
        background=background,
    )


FUSED_CONV = Operator(
    "fused_conv",
    arrays=(*_READ, "out"),
    options=(
        "bsize", "strides", "padding", "activation", "data_format", "w_format", "precision",
        "expected",
    ),
    infer=_infer,
    plan=_plan,
)  # fmt: skip
