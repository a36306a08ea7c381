"""Convolution of the active blocks of an image: by one kernel, or gather, convolve, scatter."""

from dataclasses import replace
from typing import Any

import numpy as np

from ...core.arrays import array_function, empty, same_memory
from ...core.checks import check_array, check_result, check_written
from ...core.graph_memory import memory_of_graphs
from ...core.operator import Operator, Plan
from ...core.packed import PackedPlan
from ...core.spec import spec_of
from ...dense.conv2d import plan_conv2d, resolve_problem
from ...dense.packed_weights import PackedWeights, arrays_of_weights, check_weights
from ..active_grid import check_active_grid
from ..background import background_of_pack, fill_background, is_aligned
from ..block_params import BlockParams, calc_block_params
from ..checks import (
    arrays_of_list,
    check_base,
    check_block_params,
    check_indices,
    check_method,
    cut_blocks,
    plain_params,
)
from ..from_mask import find_blocks, is_mask, takes_blocks_from
from ..gather_scatter.sparse_gather import plan_gather
from ..gather_scatter.sparse_scatter import plan_scatter
from ..grid import Grid, resolve_layout
from ..mask.reduce_mask import reduce_mask
from .fused_conv import (
    Convolution,
    missing_kernel,
    plan_fused_conv,
    require_kernel,
    stack_problem,
)


@array_function
def sparse_conv2d(
    x,
    w,
    indices,
    block_params=None,
    *,
    bsize=None,
    strides=(1, 1),
    padding: Any = "SAME",
    bias=None,
    activation=None,
    base=None,
    data_format="NHWC",
    w_format="HWIO",
    precision=None,
    out=None,
    method="auto",
    capacity=None,
):
    """Convolve an image where its blocks are active.

    At every output pixel of an active block the value is that of ``conv2d(x, w, ...)``; elsewhere
    it is ``base``, or 0. Nothing waits for the device, also with more rows in ``indices`` than
    active blocks; but a mask without ``capacity`` on a GPU does, for the number of its blocks.

    Parameters
    ----------
    x : array, shape (N, H, W, C), or (N, C, H, W) with ``data_format="NCHW"``
        Images; float16, bfloat16, float32 or float64. C-contiguous; a NumPy array that is not is
        copied.
    w : array, shape (R, S, C, K), or (K, C, R, S) with ``w_format="OIHW"``, or PackedWeights
        Kernel, of the dtype of ``x``. A :class:`PackedWeights` saves the fused method the work of
        laying it out, and brings its own scale, bias, ``w_format`` and ``precision``.
    indices : ActiveBlocks, (bin_counts, active_block_indices), or a mask
        What :func:`reduce_mask` returns for the grid of ``block_params``. Of a mask of shape
        (N, H, W), (N, H, W, 1) or (N, 1, H, W), or (H, W) for one image, the blocks are listed as
        by :meth:`ActiveBlocks.from_mask`: those with a mask pixel over 0 under their output pixels.
    block_params : BlockParams, optional
        ``calc_block_params(x.shape, block, (R, S), strides, padding)``, where ``block`` is the size
        of an input block. Not needed with ``bsize``.
    bsize : int or (int, int), optional
        Size of a block in pixels of the result; takes the place of ``block_params``.
    strides, padding, bias, activation, data_format, w_format, precision
        As for :func:`conv2d`.
    base : array of the shape and dtype of the result, optional
        Values outside active blocks, for example the previous frame's result. Modified only when
        it is also ``out``.
    out : array of the shape and dtype of the result, optional
        Receives the result, and is returned. ``out=base`` works in place: outside active blocks
        nothing is touched.
    method : "auto", "gather" or "fused"
        "gather" gathers blocks, convolves the stack and scatters the results; "fused" is
        :func:`fused_conv`, from image to image; "auto" is "fused" for CuPy arrays that it has a
        kernel for, else "gather". "gather" takes the arrays of a PackedWeights as they are at the
        time.
    capacity : int, optional
        With a mask, the number of blocks to make room for, as for :func:`reduce_mask`.

    Returns
    -------
    y : array, shape (N, H', W', K), or (N, K, H', W')
        In the dtype, in the library and on the device of ``x``.

    Raises
    ------
    ShapeError
        If ``block_params`` does not belong to this convolution, or sizes do not fit together.
    DTypeError
        If dtypes differ or are not floating.
    NotImplementedError
        If ``method`` is "fused" and there is no such CUDA kernel; the message says why.

    Source: Ren et al. 2018, arXiv:1801.02108, section 3.

    Examples
    --------
    >>> import numpy as np
    >>> x, w = np.ones((1, 8, 8, 3), np.float32), np.ones((3, 3, 3, 5), np.float32)
    >>> mask = np.zeros((1, 8, 8), bool)
    >>> mask[0, 1, 1] = True
    >>> y = sparse_conv2d(x, w, mask, bsize=4)
    >>> y[0, :, :, 0]
    array([[12., 18., 18., 18.,  0.,  0.,  0.,  0.],
           [18., 27., 27., 27.,  0.,  0.,  0.,  0.],
           [18., 27., 27., 27.,  0.,  0.,  0.,  0.],
           [18., 27., 27., 27.,  0.,  0.,  0.,  0.],
           [ 0.,  0.,  0.,  0.,  0.,  0.,  0.,  0.],
           [ 0.,  0.,  0.,  0.,  0.,  0.,  0.,  0.],
           [ 0.,  0.,  0.,  0.,  0.,  0.,  0.,  0.],
           [ 0.,  0.,  0.,  0.,  0.,  0.,  0.,  0.]], dtype=float32)

    The same from a list of blocks, which several layers can share:

    >>> from sbnet_cupy import calc_block_params, reduce_mask
    >>> params = calc_block_params(x.shape, 6, w.shape)
    >>> grid = {"bsize": params.bsize, "boffset": params.boffset, "bstride": params.bstride}
    >>> active = reduce_mask(mask, params.bcount, **grid)
    >>> bool((sparse_conv2d(x, w, active, params) == y).all())
    True
    """
    w_array, scale, bias_array, w_format, precision = arrays_of_weights(
        w, None, bias, w_format, precision
    )
    if takes_blocks_from(indices, bsize, capacity):
        weights = map(spec_of, (w_array, scale, bias_array))
        options = (strides, padding, activation, data_format, w_format, precision)
        problem = _resolve_problem(spec_of(x), *weights, options)
        given = (indices, block_params, bsize, capacity)
        indices, block_params = blocks_of_problem(x, problem, *given)
    bin_counts, active_block_indices = arrays_of_list(indices)
    read = (x, w_array, bin_counts, active_block_indices, scale, bias_array)
    options = (
        plain_params(block_params, calc_block_params), strides, padding, activation, data_format,
        w_format, precision, method,
    )  # fmt: skip
    plan = SPARSE_CONV2D.plan_for((*read, base, out), options)
    check_active_grid(indices, x.shape[0], block_params.bcount)
    if out is None:
        out = empty(plan.shape, x.dtype, x)
    elif base is None or same_memory(out, base):
        check_written(out, _READ[:-1], read)
    else:
        check_written(out, _READ, (*read, base))
    plan.run(x, w, bin_counts, active_block_indices, scale, bias, base, out)
    return out


_READ = ("x", "w", "bin_counts", "active_block_indices", "scale", "bias", "base")


def _resolve(specs, options):
    """Check all arguments; return the spec of the result, the Problem and the BlockParams."""
    x, w, bin_counts, active_block_indices, scale, bias, base, out = specs
    block_params, *convolution, method = options
    check_method(method)
    problem = _resolve_problem(x, w, scale, bias, convolution)
    image_hw = x.shape[1:3] if problem.channels_last else x.shape[2:]
    calculated = (image_hw, problem.kernel, problem.strides, convolution[1])
    block_params = BlockParams(*block_params)
    check_block_params(block_params, calc_block_params, *calculated)
    result = x.new((x.shape[0], *problem.out_shape))
    check_base(base, result.shape, x)
    check_indices(bin_counts, active_block_indices, like=x)
    check_result(out, result)
    return result, problem, block_params


def _resolve_problem(x, w, scale, bias, options):
    """Check the image and the weights; return the Problem."""
    problem = resolve_problem(x, w, *options)
    check_weights(w, scale, bias, *options[-2:])
    return problem


def blocks_of_problem(x, problem, indices, block_params, bsize, capacity):
    """Return the list of blocks and the BlockParams of a call that gives a mask, or ``bsize``."""
    if is_mask(indices):
        check_array("indices", indices, kinds="biuf", like=x)
    image_hw = x.shape[1:3] if problem.channels_last else x.shape[2:]
    convolution = ((x.shape[0], *image_hw), problem.kernel, problem.strides, problem.pads)
    return find_blocks(indices, block_params, bsize, capacity, convolution, reduce_mask)


def _infer(specs, options):
    """Check all arguments; return the spec of the result."""
    return _resolve(specs, options)[:1]


def _plan(specs, options):
    """Check all arguments; return the plan of the call, which holds those of its operations."""
    x, w, bin_counts, active_block_indices, scale, bias, base, out = specs
    result, problem, block_params = _resolve(specs, options)
    rows, method = active_block_indices.shape[0], options[-1]
    if goes_fused(method, x.on_gpu, (x, problem, block_params.bsize_out, rows)):
        bsize = cut_blocks(block_params.bsize_out, problem.out_size)
        inner = (x, w, bin_counts, active_block_indices, scale, bias, None, out)
        convolution = Convolution(problem, bsize, rows)
        return _plan_fused(plan_fused_conv(inner, result, convolution, is_aligned(base, out)))
    return _plan_gathered(x, rows, out or result, result, problem, block_params)


def _plan_fused(plan):
    """Return the plan of the layer from that of :func:`fused_conv`."""
    if not isinstance(plan, PackedPlan):

        def run_on_cpu(x, *arrays):
            *given, base, out = arrays
            fill_background(base, out)
            plan.run(x, *given, None, out)

        return Plan(plan.results, run_on_cpu, base=(6,))

    def run(x, w, bin_counts, active_block_indices, scale, bias, base, out):
        below = background_of_pack(plan, w, base, out)
        plan.run(x, w, bin_counts, active_block_indices, scale, bias, None, out, below)

    operands = tuple(None if place == 6 else place for place in plan.operands)  # no residual
    return replace(plan, run=run, operands=operands, base=(6,))


def _plan_gathered(x, rows, out, result, problem, block_params):
    """Plan to gather blocks, convolve the stack, and scatter the results over ``out``."""
    last = problem.channels_last
    image = resolve_layout(x, "NHWC" if last else "NCHW", not last)  # NHWC stacks
    shown = resolve_layout(result, "NHWC" if last else "NCHW", not last)
    grid = Grid(block_params.bsize, block_params.boffset, block_params.bstride)
    written = Grid(block_params.bsize_out, (0, 0), block_params.bsize_out)
    read = x.new(image.blocks_shape(rows, grid.bsize))
    made = x.new(shown.blocks_shape(rows, written.bsize))
    gather = plan_gather((x, None, None, read, None, None), read, image, grid, None)
    convolve = plan_conv2d(made, stack_problem(problem, written.bsize))
    table = x.new((rows, 3), np.int32)
    scatter = plan_scatter((made, None, table, result, out), shown, written, False, False)

    def run(x, w, bin_counts, active_block_indices, scale, bias, base, out):
        if isinstance(w, PackedWeights):
            w, scale, bias = w.w, w.scale, w.bias
        blocks = empty(read.shape, x.dtype, x)
        gather.run(x, bin_counts, active_block_indices, blocks, None, None)
        results = empty(made.shape, x.dtype, x)
        convolve.run(blocks, w, scale, bias, results)
        fill_background(base, out)  # after the image was read, which may be in the cache
        scatter.run(results, bin_counts, active_block_indices, None, out)

    if not x.on_gpu:
        return Plan((result,), run, base=(6,))

    def run_on_gpu(x, *arrays):
        with memory_of_graphs(x):
            run(x, *arrays)

    return Plan((result,), run_on_gpu, base=(6,))


def goes_fused(method, on_gpu, kernel_for):
    """Whether a call goes to fused_conv; raise NotImplementedError where it cannot and must.

    ``kernel_for`` says what kernel a GPU would need: x, its problem, size and number of blocks.
    """
    if method == "auto":
        return on_gpu and missing_kernel(*kernel_for) is None
    if method == "fused" and on_gpu:
        require_kernel(*kernel_for)
    return method == "fused"


SPARSE_CONV2D = Operator(
    "sparse_conv2d",
    arrays=(*_READ, "out"),
    options=(
        "block_params", "strides", "padding", "activation", "data_format", "w_format", "precision",
        "method",
    ),
    infer=_infer,
    plan=_plan,
)  # fmt: skip
