"""fused_conv: a convolution at the active blocks, from image to image."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ...core import launch as kernels
from ...core.arrays import address, array_function, dtype_name, is_cupy, vector_bytes, zeros
from ...core.byte_order import check_byte_orders
from ...core.checks import apart, apart_from, check_apart, check_array, check_contiguous, check_out
from ...core.compile import cpp_name
from ...core.device import current_device
from ...core.plans import Plans
from ...dense.activation import ACTIVATIONS, apply_activation
from ...dense.conv2d import Problem, conv2d, resolve_problem
from ...errors import DTypeError
from ..checks import LARGEST, MOST_BLOCKS, check_indices, cut_blocks, resolve_expected
from ..corners import CHUNK_BYTES
from ..gather_scatter.sparse_gather import sparse_gather
from ..gather_scatter.sparse_scatter import sparse_scatter
from ..grid import resolve_grid
from .plan import Case, plan_for, tiles_of_block
from .weights import PackedWeights, prepare_pack, resolve_weights


@array_function
def fused_conv(
    x,
    w,
    bin_counts,
    active_block_indices,
    *,
    bsize,
    strides=(1, 1),
    padding="SAME",
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
    packed = isinstance(w, PackedWeights)
    inputs = (x, w.w if packed else w, bin_counts, active_block_indices, scale, bias, residual)
    plans, key = _PLANS, None
    if is_cupy(x):
        options = (bsize, strides, padding, activation, data_format, w_format, precision, expected)
        plans = w.launches if packed else _PLANS
        own = () if packed else inputs[1:2]  # what is packed has its own plans
        others = (x, bin_counts, active_block_indices, residual)
        key = plans.key((*others, out, scale, bias, *own), options)
    launch = plans.get(key)
    at_once = launch is not None and packed and out is not None
    if at_once and apart(out, others) and apart_from(out, w.extents):
        launch(*inputs, out)
        return out
    if launch is None:
        weights = resolve_weights(w, scale, bias, w_format, precision)
        call = _check(inputs, weights, bsize, strides, padding, activation, data_format, expected)
    shape = (launch or call).shape
    named = zip(_ARRAY_NAMES, inputs, strict=True)
    if out is None:
        out = zeros(shape, x.dtype, x)
    elif launch is None:
        check_out(out, shape, x.dtype, x, named)
    else:
        check_apart(out, named)
    if launch is not None:
        launch(*inputs, out)
    elif not out.size:
        pass  # no pixel to write
    elif is_cupy(x):
        launch = _fused_conv_cuda(x, active_block_indices, residual, out, weights, call, packed)
        plans.keep(key, launch)(*inputs, out)
    else:
        _fused_conv_numpy(x, bin_counts, active_block_indices, residual, out, weights, call)
    return out


_PLANS = Plans()


def launch_of_conv(x, bin_counts, active_block_indices, out, w, bias, options):
    """Return the launch that a call with plain weights left, or None.

    Its ``pack`` takes w, scale and bias; ``run`` takes x, what that packed, the residual,
    bin_counts, active_block_indices and out.
    """
    arrays = (x, bin_counts, active_block_indices, None, out, None, bias, w)
    return _PLANS.get(_PLANS.key(arrays, options))


_ARRAY_NAMES = ("x", "w", "bin_counts", "active_block_indices", "scale", "bias", "residual")


class _Call(NamedTuple):
    """A checked call without its arrays."""

    problem: Problem
    bsize: tuple[int, int]  # no larger than the result
    shape: tuple  # of the result
    rows: int  # that are expected to be active


def _check(inputs, weights, bsize, strides, padding, activation, data_format, expected):
    """Check all arguments but out; return them resolved."""
    x, w, bin_counts, active_block_indices, *_, residual = inputs
    options = (activation, data_format, weights.w_format, weights.precision)
    problem = resolve_problem(x, w, strides, padding, *options)
    check_indices(bin_counts, active_block_indices, like=x)
    bsize = cut_blocks(resolve_grid(bsize, (0, 0), None).bsize, problem.out_size)
    shape = (len(x), *problem.out_shape)
    if residual is not None:
        check_array("residual", residual, shape=shape, like=x)
        if residual.dtype != x.dtype:
            check_byte_orders({"x": x, "residual": residual})
            raise DTypeError(
                f"residual must have the dtype of x, {x.dtype}, got {residual.dtype}; use astype"
            )
        check_contiguous("residual", residual)
    return _Call(problem, bsize, shape, resolve_expected(expected, active_block_indices))


def _fused_conv_numpy(x, bin_counts, active_block_indices, residual, out, weights, call):
    """Gather, convolve in float32 or float64, scatter; some rows of the list at a time."""
    problem, bsize = call.problem, call.bsize
    w, scale, bias = weights.plain()
    axes = list(zip(bsize, problem.kernel, problem.strides, strict=True))
    grid = {
        "bsize": tuple((b - 1) * s + k for b, k, s in axes),
        "boffset": tuple(-before for before, _ in problem.pads),
        "bstride": tuple(b * s for b, _, s in axes),
    }
    last = problem.channels_last
    layout = {"data_format": "NHWC" if last else "NCHW", "transpose": not last}  # NHWC stacks
    convolution = {"strides": problem.strides, "padding": "VALID", "scale": scale, "bias": bias}
    count = min(max(int(bin_counts[0]), 0), len(active_block_indices))
    elements = max(math.prod(grid["bsize"]) * w.shape[2], math.prod(bsize) * w.shape[3])
    step = max(1, CHUNK_BYTES // (elements * w.itemsize))
    for start in range(0, count, step):
        rows = active_block_indices[start : min(start + step, count)]
        active = np.array([len(rows)], np.int32), rows
        blocks = sparse_gather(x, *active, **grid, **layout).astype(w.dtype, copy=False)
        blocks = conv2d(blocks, w, **convolution)
        with np.errstate(all="ignore"):  # infinities come with no warning, as on a GPU
            if residual is not None:
                blocks += sparse_gather(residual, *active, bsize=bsize, **layout)
            blocks = apply_activation(blocks, problem.activation).astype(x.dtype, copy=False)
        sparse_scatter(blocks, *active, out, bsize=bsize, **layout, out=out)


def missing_kernel(x, problem, bsize, rows):
    """Return for what there is no CUDA kernel; None where there is one for ``x``."""
    if not len(x) or 0 in problem.out_size:
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
    plan = _plan(case, x, problem, bsize, rows)
    if plan is None:
        return f"a window of {problem.kernel} pixels: it does not fit this GPU's shared memory"
    if max(tiles_of_block(bsize, plan.tile), plan.slices(case)) > MOST_BLOCKS:
        return f"blocks as large as {bsize} with {problem.channels_out} output channels"
    return None


def require_kernel(x, problem, bsize, rows):
    """Raise NotImplementedError, saying why, where there is no CUDA kernel for ``x``."""
    missing = missing_kernel(x, problem, bsize, rows)
    if missing is not None:
        raise NotImplementedError(
            f"fused_conv has no CUDA kernel for {missing}; use sparse_conv2d with method='gather'"
        )


def packed_bytes(x, problem, bsize, rows):
    """Return how many bytes the packed weights of a call take; 0 where there is no CUDA kernel."""
    if missing_kernel(x, problem, bsize, rows) is not None:
        return 0
    case, bsize = _case(x, problem, current_device()), cut_blocks(bsize, problem.out_size)
    return _plan(case, x, problem, bsize, rows).packed_bytes(case)


def _plan(case, x, problem, bsize, rows):
    """Return the plan for about so many active rows; whether vectors are whole changes none."""
    pixels = len(x) * math.prod(problem.out_size)
    return plan_for(case, rows, bsize, pixels, current_device())


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


class _Launch(NamedTuple):
    """A checked call: the shape of the result, where the weights are packed, and the kernel."""

    shape: tuple
    how: tuple  # weights are packed
    packed: Any  # array of bytes; None where weights are packed at each call
    pack: Callable
    run: Callable

    def __call__(self, x, w, bin_counts, active_block_indices, scale, bias, residual, out):
        packed = self.pack(w, scale, bias) if self.packed is None else self.packed
        self.run(x, packed, residual, bin_counts, active_block_indices, out)


def _fused_conv_cuda(x, active_block_indices, residual, out, weights, call, keep):
    """Prepare one launch over the rows of the list.

    See cuda_src/block_sparse/conv/fused_conv.cu.
    """
    problem, bsize = call.problem, call.bsize
    require_kernel(x, problem, bsize, call.rows)

    def whole_vectors(channels, *arrays):
        multiples = (channels * x.dtype.itemsize, *(address(a) for a in arrays if a is not None))
        return problem.channels_last and vector_bytes(*multiples) == 16

    channels = x.shape[3 if problem.channels_last else 1]
    vectors = whole_vectors(channels, x), whole_vectors(problem.channels_out, out, residual)
    device = current_device()
    case = _case(x, problem, device, *vectors)
    plan = _plan(case, x, problem, bsize, call.rows)
    rows = len(active_block_indices)
    blocks = tuple(-(-n // b) for n, b in zip(problem.out_size, bsize, strict=True))
    image_hw = x.shape[1:3] if problem.channels_last else x.shape[2:]
    sizes = (rows, len(x), channels, *image_hw, problem.channels_out, *problem.out_size)
    (top, _), (left, _) = problem.pads
    run = kernels.prepare(
        "block_sparse/conv/fused_conv",
        "fused_conv",
        plan.template(case),
        (rows, plan.slices(case), tiles_of_block(bsize, plan.tile)),
        plan.threads,
        6,
        (*sizes, *bsize, *blocks, top, left, plan.chunks, int(problem.channels_last)),
        shared=plan.shared_bytes(case),
        persistent=True,
        dependent=True,
    )
    pack, packed = prepare_pack(case, plan, weights.w_format), None
    how = (*plan.pack_template(case), plan.chunks, weights.w_format)
    if keep:
        packed = weights.packed(how, pack)
    return _Launch(call.shape, how, packed, pack, run)
