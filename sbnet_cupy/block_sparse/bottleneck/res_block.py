"""The residual unit of ResNet, pre-activation, with a bottleneck: by one kernel, or on a stack."""

import functools
from dataclasses import replace

from ...core.arrays import array_function, empty, same_memory
from ...core.checks import check_array, check_result, check_written
from ...core.graph_memory import memory_of_graphs
from ...core.operator import Operator, Plan
from ...core.packed import PackedPlan
from ...core.sizes import output_size, pair
from ...core.spec import spec_of
from ...dense.conv2d import check_precision
from .. import native
from ..active_grid import check_active_grid
from ..background import background_of_pack, fill_background, is_aligned
from ..block_params import BlockParams, calc_block_params_res_block
from ..checks import (
    arrays_of_list,
    check_base,
    check_block_params,
    check_indices,
    check_method,
    cut_blocks,
    plain_params,
)
from ..compositions import residual_unit
from ..from_mask import find_blocks, is_mask, takes_blocks_from
from ..mask.reduce_mask import reduce_mask
from .fused_bottleneck import Unit, missing_kernel, plan_fused_bottleneck, require_kernel
from .weights import (
    WEIGHTS,
    BottleneckWeights,
    PackedBottleneck,
    arrays_of_unit,
    check_unit,
    plain_of,
    resolve_precision,
)

KERNELS = [1, 3, 1]


@array_function
def sparse_res_block_bottleneck(
    x,
    weights,
    indices,
    block_params=None,
    *,
    bsize=None,
    strides=(1, 1),
    w_project=None,
    base=None,
    out=None,
    precision=None,
    method="auto",
    capacity=None,
):
    """Apply a residual unit where the blocks of an image are active.

    ``y = x + conv3(a3(conv2(a2(conv1(a1(x))))))`` with ``a_i(t) = relu(t * scale_i + shift_i)`` and
    SAME padding of ``conv2``: inside active blocks exactly the dense unit, at image borders too,
    where zeros pad ``a2(...)``. Elsewhere y is x, or its projection, or ``base``.

    Parameters
    ----------
    x : array, shape (N, H, W, Cin)
        Images; float16, bfloat16, float32 or float64. C-contiguous; a NumPy array that is not is
        copied.
    weights : BottleneckWeights or PackedBottleneck
        Kernels of the dtype of ``x``; scales and shifts of any floating dtype. A
        :class:`PackedBottleneck` saves the fused method the work of laying them out, and brings its
        own ``precision``.
    indices : ActiveBlocks, (bin_counts, active_block_indices), or a mask
        What :func:`reduce_mask` returns for the grid of ``block_params``. Of a mask of shape
        (N, H, W), (N, H, W, 1) or (N, 1, H, W), or (H, W) for one image, the blocks are listed as
        by :meth:`ActiveBlocks.from_mask`: those with a mask pixel over 0 under their output pixels.
    block_params : BlockParams, optional
        ``calc_block_params_res_block(x.shape, block, [1, 3, 1], strides)``, where ``block`` is the
        size of an input block. Not needed with ``bsize``.
    bsize : int or (int, int), optional
        Size of a block in pixels of the result; takes the place of ``block_params``.
    strides : int or (int, int)
        Strides of ``conv2``, and of the projection.
    w_project : array, shape (1, 1, Cin, Cout), optional
        Makes the shortcut ``conv2d(x, w_project, strides)`` instead of ``x``; needed where the unit
        changes the size or the number of channels.
    base : array, shape (N, H', W', Cout), optional
        Values outside active blocks. Modified only when it is also ``out``.
    out : array, shape (N, H', W', Cout), optional
        Receives the result, and is returned. ``out=base`` works in place: outside active blocks
        nothing is touched. So does ``out=x`` where the shortcut is x, but not with the fused
        method, which reads the neighbours of a pixel from x while it writes.
    precision : None, "ieee" or "tf32"
        As for :func:`conv2d`.
    method : "auto", "gather" or "fused"
        "gather" gathers blocks, computes on the stack and scatters the results; "fused" is
        :func:`fused_bottleneck`, from image to image: strides 1, no projection, ``out`` not x.
        "auto" is "fused" for CuPy arrays that it has a kernel for (float32: with "tf32"), else
        "gather". "gather" takes the arrays of a PackedBottleneck as they are at the time.
    capacity : int, optional
        With a mask, the number of blocks to make room for, as for :func:`reduce_mask`. Without it
        the call waits for a GPU to tell that number.

    Returns
    -------
    y : array, shape (N, H', W', Cout)
        In the dtype, in the library and on the device of ``x``.

    Raises
    ------
    ShapeError
        If ``block_params`` does not belong to this unit, sizes do not fit together, or
        ``w_project`` is missing.
    DTypeError
        If dtypes differ or are not floating.
    NotImplementedError
        If ``method`` is "fused" and does not cover the call; the message says why.

    Source: He et al. 2016, arXiv:1603.05027, for the unit; Ren et al. 2018, arXiv:1801.02108,
    section 3.3, for its block-sparse form.

    Examples
    --------
    >>> import numpy as np
    >>> from sbnet_cupy import BottleneckWeights
    >>> x = np.ones((1, 32, 32, 16), np.float32)
    >>> mask = np.zeros((1, 32, 32), bool)
    >>> mask[0, 5, 5] = True
    >>> y = sparse_res_block_bottleneck(x, BottleneckWeights.random(16, 4), mask, bsize=8)
    >>> y.shape, bool((y != x).any()), bool((y[:, 8:] == x[:, 8:]).all())
    ((1, 32, 32, 16), True, True)
    """
    precision = resolve_precision(weights, precision)
    plain = arrays_of_unit(x, plain_of(weights))
    if takes_blocks_from(indices, bsize, capacity):
        given = (indices, block_params, bsize, capacity)
        indices, block_params = blocks_of_unit(x, plain_of(weights), strides, w_project, *given)
    bin_counts, active_block_indices = arrays_of_list(indices)
    in_place = out is not None and (out is x or same_memory(out, x))
    packed = isinstance(weights, PackedBottleneck)
    given = (x, *((weights.specs,) if packed else plain), w_project)
    arrays = (*given, bin_counts, active_block_indices, base, out)
    params = plain_params(block_params, calc_block_params_res_block)
    plan = RES_BLOCK.plan_for(arrays, (params, strides, precision, method, in_place))
    check_active_grid(indices, x.shape[0], block_params.bcount)
    if out is None:
        out = empty(plan.shape, x.dtype, x)
    else:
        x_is_read = w_project is not None or not in_place
        base_is_read = base is not None and not same_memory(out, base)
        read = (w_project, bin_counts, active_block_indices)
        read += (x if x_is_read else None, base if base_is_read else None)
        check_written(out, _READ, (*read, *plain))
    first = weights if packed else plain[0]
    plan.run(x, first, *plain[1:], w_project, bin_counts, active_block_indices, base, out)
    return out


_READ = ("w_project", "bin_counts", "active_block_indices", "x", "base")
_READ += ("weights",) * len(WEIGHTS)


def _resolve(specs, options):
    """Check all arguments; return the spec of the result, the BlockParams and the strides."""
    x, *weights, w_project, bin_counts, active_block_indices, base, out = specs
    block_params, strides, precision, method, _ = options
    check_method(method)
    strides = pair(strides, "strides")
    check_precision(precision)
    block_params = BlockParams(*block_params)
    weights = BottleneckWeights(*weights)
    shape = check_sizes(x, weights, w_project, strides, block_params, base)
    check_indices(bin_counts, active_block_indices, like=x)
    result = x.new(shape)
    check_result(out, result)
    return result, block_params, strides


def _infer(specs, options):
    """Check all arguments; return the spec of the result."""
    return _resolve(specs, options)[:1]


def _plan(specs, options):
    """Check all arguments; return the plan of the call, which holds those of its operations."""
    x, *weights, w_project, bin_counts, active_block_indices, base, out = specs
    result, block_params, strides = _resolve(specs, options)
    _, _, precision, method, in_place = options
    rows, weights = active_block_indices.shape[0], BottleneckWeights(*weights)
    kernel_for = (x, weights, block_params.bsize_out, rows, precision, out)
    uncovered = what_is_uncovered(strides, w_project, in_place)
    if goes_fused(method, x.on_gpu, uncovered, kernel_for):
        bsize = cut_blocks(block_params.bsize_out, x.shape[1:3])
        inner = (x, *specs[1:10], bin_counts, active_block_indices, out)
        unit = Unit(weights, bsize, rows, precision)
        background = is_aligned(base or x, out)
        return _plan_fused(plan_fused_bottleneck(inner, result, unit, background))
    fixed = {"block_params": block_params, "strides": strides, "precision": precision}
    below = (13, 0) if w_project is None else (13,)  # x itself is projected
    return Plan((result,), functools.partial(_gathered, **fixed), base=below)


def _plan_fused(plan):
    """Return the plan of the layer from that of :func:`fused_bottleneck`."""
    if not isinstance(plan, PackedPlan):

        def run_on_cpu(x, *arrays):
            *weights, _, bin_counts, active_block_indices, base, out = arrays
            fill_background(x if base is None else base, out)
            plan.run(x, *weights, bin_counts, active_block_indices, out)

        return Plan(plan.results, run_on_cpu, base=(13, 0))

    def run(x, *arrays):
        *weights, _, bin_counts, active_block_indices, base, out = arrays
        below = background_of_pack(plan, weights[0], x if base is None else base, out)
        plan.run(x, *weights, bin_counts, active_block_indices, out, below=below)

    # of the layer: x, packed weights, bin_counts, active_block_indices, out
    return replace(plan, run=run, operands=(0, 15, 11, 12, 14), base=(13, 0))


def _gathered(x, w1, *arrays, block_params, strides, precision):
    """Compute on the stack of the active blocks."""
    *others, w_project, bin_counts, active_block_indices, base, out = arrays
    weights = plain_of(w1) if isinstance(w1, PackedBottleneck) else BottleneckWeights(w1, *others)
    indices = (bin_counts, active_block_indices)
    options = {"strides": strides, "precision": precision, "out": out}
    with memory_of_graphs(x):
        residual_unit(native, x, weights, w_project, indices, block_params, base, **options)


def blocks_of_unit(x, weights, strides, w_project, indices, block_params, bsize, capacity):
    """Return the list of blocks and the BlockParams of a call that gives a mask, or ``bsize``."""
    strides = pair(strides, "strides")
    if isinstance(weights, BottleneckWeights):
        weights = weights._map_arrays(spec_of)
    check_unit(spec_of(x), weights, spec_of(w_project), strides)
    if is_mask(indices):
        check_array("indices", indices, kinds="biuf", like=x)
    convolution = (x.shape[:3], (3, 3), strides, "SAME")
    return find_blocks(indices, block_params, bsize, capacity, convolution, reduce_mask)


def check_sizes(x, weights, w_project, strides, block_params, base):
    """Check what a unit and its gradient take alike; return the shape of the result."""
    cout = check_unit(x, weights, w_project, strides)
    image_hw = x.shape[1:3]
    calculated = (image_hw, KERNELS, strides, "SAME")
    check_block_params(block_params, calc_block_params_res_block, *calculated)
    shape = (x.shape[0], *output_size(image_hw, (3, 3), strides, "SAME"), cout)
    check_base(base, shape, x)
    return shape


def what_is_uncovered(strides, w_project, in_place=False):
    """Return what of a call fused_bottleneck does not cover, or None."""
    if strides != (1, 1):
        return f"strides: they must be (1, 1), got {strides}"
    if w_project is not None:
        return "projection: w_project must be None"
    if in_place:
        return "result in place of x: blocks read pixels of their neighbours from x"
    return None


def goes_fused(method, on_gpu, uncovered, kernel_for):
    """Whether a call goes to fused_bottleneck; raise NotImplementedError where it cannot and must.

    ``kernel_for`` says what kernel a GPU would need: x, weights, size and number of blocks...
    """
    if method == "fused":
        if uncovered is not None:
            raise NotImplementedError(f"method='fused' has no {uncovered}; use method='gather'")
        if on_gpu:
            require_kernel(*kernel_for)
        return True
    covered = method == "auto" and on_gpu and uncovered is None
    return covered and missing_kernel(*kernel_for) is None


RES_BLOCK = Operator(
    "sparse_res_block_bottleneck",
    arrays=("x", *WEIGHTS, "w_project", "bin_counts", "active_block_indices", "base", "out"),
    options=("block_params", "strides", "precision", "method", "in_place"),
    infer=_infer,
    plan=_plan,
)
