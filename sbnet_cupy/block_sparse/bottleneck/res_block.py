"""The residual unit of ResNet, pre-activation, with a bottleneck: by one kernel, or on a stack."""

from typing import NamedTuple

from ...core.arrays import array_function, empty, is_cupy, same_memory
from ...core.checks import check_array, check_out
from ...core.copy_image import copy_image
from ...core.graph_memory import memory_of_graphs
from ...core.plans import Plans
from ...core.sizes import output_size, pair
from ...dense.conv2d import conv2d
from ..active_grid import check_active_grid
from ..block_params import calc_block_params_res_block
from ..checks import check_base, check_block_params, check_indices, check_method, split_indices
from ..conv.sparse_conv2d import call_key, stays_apart
from ..conv.stack_conv import stack_conv2d
from ..from_mask import find_blocks, is_mask, takes_blocks_from
from ..gather_scatter.sparse_gather import sparse_gather
from ..gather_scatter.sparse_scatter import sparse_scatter
from ..gather_scatter.zero_outside import zero_outside
from ..mask.reduce_mask import reduce_mask
from .fused_bottleneck import fused_bottleneck, missing_kernel, require_kernel
from .weights import BottleneckWeights, check_unit, plain_of, resolve_precision

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
        What :func:`reduce_mask` returns for the grid of ``block_params``. A mask of shape (N, H, W)
        or (N, H, W, 1), or (H, W) for one image, is listed as :meth:`ActiveBlocks.from_mask` does:
        a block is active where a pixel under its output pixels is greater than 0.
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
    if takes_blocks_from(indices, bsize, capacity):
        given = (indices, block_params, bsize, capacity)
        indices, block_params = blocks_of_unit(x, plain_of(weights), strides, w_project, *given)
    indices = split_indices(indices)
    given, weights = weights, plain_of(weights)
    arrays = weights._arrays() if isinstance(weights, BottleneckWeights) else (weights,)
    in_place = out is not None and is_cupy(x) and is_cupy(out) and same_memory(out, x)
    own = given is not weights, getattr(given, "precision", None), in_place
    inputs = (x, *arrays, w_project, *indices)
    key = call_key((*inputs, base, out), block_params, (strides, precision, method, own))
    plan = _PLANS.get(key)
    others = inputs[1:] if in_place and w_project is None else inputs
    if plan is None or not stays_apart(out, others, base):
        plan = _checked(x, given, indices, block_params, strides, w_project, base, out, precision,
                        method)  # fmt: skip
        _PLANS.keep(key, plan)
    check_active_grid(indices, x.shape[0], block_params.bcount)

    strides, precision, bsize = plan.strides, plan.precision, block_params.bsize_out
    if plan.fused:
        y = _background(x, base, out)
        return fused_bottleneck(x, given, *indices, bsize=bsize, precision=precision, out=y)
    with memory_of_graphs(x):
        residual = _residual(x, weights, indices, block_params, strides, precision)
        if base is not None:
            blocks = _shortcut_blocks(x, w_project, indices, block_params, strides, precision)
            out = shortcut = sparse_scatter(blocks, *indices, base, bsize=bsize, out=out)
        elif w_project is not None:
            out = shortcut = conv2d(x, w_project, strides=strides, precision=precision, out=out)
        else:
            shortcut = x
        return sparse_scatter(residual, *indices, shortcut, bsize=bsize, add=True, out=out)


_PLANS = Plans()  # calls that were checked


class _Plan(NamedTuple):
    """A checked call without its arrays."""

    strides: tuple[int, int]
    precision: str | None
    fused: bool  # by one kernel, or else on a stack


def _checked(x, given, indices, block_params, strides, w_project, base, out, precision, method):
    """Check all arguments; return what is to be done."""
    check_method(method)
    strides = pair(strides, "strides")
    weights = plain_of(given)
    precision = resolve_precision(given, precision)
    shape = check_sizes(x, weights, w_project, strides, block_params, base)
    check_indices(*indices, like=x)
    if out is not None:
        _check_out(out, shape, x, weights, w_project, indices, base)
    kernel_for = (x, weights, block_params.bsize_out, len(indices[1]), precision, out)
    uncovered = what_is_uncovered(strides, w_project, out is not None and same_memory(out, x))
    return _Plan(strides, precision, goes_fused(method, is_cupy(x), uncovered, kernel_for))


def blocks_of_unit(x, weights, strides, w_project, indices, block_params, bsize, capacity):
    """Return the list of blocks and the BlockParams of a call that gives a mask, or ``bsize``."""
    strides = pair(strides, "strides")
    check_unit(x, weights, w_project, strides)
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


def _background(x, base, out):
    """Return ``out``, or fresh memory, holding the base, or x."""
    if out is None:
        out = empty(x.shape, x.dtype, x)
    below = x if base is None else base
    if not same_memory(out, below):
        copy_image(below, out)
    return out


def _residual(x, weights, indices, block_params, strides, precision):
    """Return the stack ``conv3(a3(conv2(a2(conv1(a1(x))))))``, one value per output pixel."""
    blocks = sparse_gather(
        x,
        *indices,
        bsize=block_params.bsize,
        boffset=block_params.boffset,
        bstride=block_params.bstride,
        scale=weights.scale1,
        shift=weights.shift1,
        activation="relu",
    )
    count, options = indices[0], {"precision": precision, "activation": "relu"}
    second = {"scale": weights.scale2, "bias": weights.shift2}
    blocks = stack_conv2d(blocks, weights.w1, count, **second, **options)
    zero_outside(blocks, *indices, block_params, x.shape[1:3])  # the padding of conv2
    third = {"scale": weights.scale3, "bias": weights.shift3}
    blocks = stack_conv2d(blocks, weights.w2, count, strides=strides, **third, **options)
    return stack_conv2d(blocks, weights.w3, count, precision=precision)


def _shortcut_blocks(x, w_project, indices, block_params, strides, precision):
    """Return the stack of the shortcut's values, one per output pixel of the active blocks."""
    if w_project is None:
        return sparse_gather(x, *indices, bsize=block_params.bsize_out)
    blocks = sparse_gather(x, *indices, **shortcut_grid(block_params, strides))
    return stack_conv2d(blocks, w_project, indices[0], strides=strides, precision=precision)


def shortcut_grid(block_params, strides):
    """Return the blocks of x that the projection reads.

    SAME pads a 1x1 kernel with nothing: output p reads input p * stride.
    """
    axes = list(zip(block_params.bsize_out, strides, strict=True))
    return {
        "bsize": tuple((n - 1) * s + 1 for n, s in axes),
        "bstride": tuple(n * s for n, s in axes),
    }


def _check_out(out, shape, x, weights, w_project, indices, base):
    """Check ``out``: it may be base, or x where x is the shortcut, and overlap nothing else."""
    inputs = [("weights", array) for array in weights._arrays()]
    inputs.append(("w_project", w_project))
    inputs += zip(("bin_counts", "active_block_indices"), indices, strict=True)
    if w_project is not None or not same_memory(out, x):
        inputs.append(("x", x))
    if base is not None and not same_memory(out, base):
        inputs.append(("base", base))
    check_out(out, shape, x.dtype, x, inputs)
