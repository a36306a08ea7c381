"""Convolution of the active blocks of an image: by one kernel, or gather, convolve, scatter."""

from typing import NamedTuple

import numpy as np

from ...core.arrays import array_function, compute_dtype, empty, is_cupy, namespace, same_memory
from ...core.checks import apart, check_array, check_out
from ...core.copy_image import copy_image
from ...core.graph_memory import memory_of_graphs
from ...core.plans import Plans
from ...dense.conv2d import Problem, conv2d, resolve_problem
from ...errors import ShapeError
from ..active_grid import check_active_grid
from ..block_params import BlockParams, calc_block_params
from ..checks import check_base, check_block_params, check_indices, check_method, split_indices
from ..from_mask import batch_of_one, find_blocks, is_mask, takes_blocks_from
from ..gather_scatter.sparse_gather import sparse_gather
from ..gather_scatter.sparse_scatter import sparse_scatter
from ..mask.reduce_mask import reduce_mask
from .fused_conv import fused_conv, missing_kernel, require_kernel
from .weights import PackedWeights, resolve_weights


@array_function
def sparse_conv2d(
    x,
    w,
    indices,
    block_params=None,
    *,
    bsize=None,
    strides=(1, 1),
    padding="SAME",
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
        What :func:`reduce_mask` returns for the grid of ``block_params``. A mask of shape (N, H, W)
        or (N, H, W, 1), or (H, W) for one image, is listed as :meth:`ActiveBlocks.from_mask` does:
        a block is active where a pixel under its output pixels is greater than 0.
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
    if takes_blocks_from(indices, bsize, capacity):
        weights = resolve_weights(w, None, bias, w_format, precision)
        options = (activation, data_format, weights.w_format, weights.precision)
        problem = resolve_problem(x, weights.w, strides, padding, *options)
        given = (indices, block_params, bsize, capacity)
        indices, block_params = blocks_of_problem(x, problem, *given)
    indices = split_indices(indices)
    packed = isinstance(w, PackedWeights)
    inputs = (x, *(w._given() if packed else (w, None)), bias, *indices)
    options = (strides, padding, activation, data_format, w_format, precision, method)
    own = (w.w_format, w.precision) if packed else None
    key = call_key((*inputs, base, out), block_params, (options, own))
    plan = _PLANS.get(key)
    if plan is None or not stays_apart(out, inputs, base):
        plan = _checked(x, w, indices, block_params, bias, base, out, *options)
        _PLANS.keep(key, plan)
    check_active_grid(indices, plan.shape[0], block_params.bcount)

    y = _background(plan.shape, x, base, out)
    if not plan.fused:
        weights = resolve_weights(w, None, bias, w_format, precision)
        with memory_of_graphs(x):
            return _gathered(x, weights, indices, block_params, plan.problem, y)
    return fused_conv(
        x, w, *indices, bsize=block_params.bsize_out, strides=strides, padding=padding, bias=bias,
        activation=activation, data_format=data_format, w_format=w_format, precision=precision,
        out=y,
    )  # fmt: skip


_PLANS = Plans()  # calls that were checked


class _Plan(NamedTuple):
    """A checked call without its arrays."""

    problem: Problem
    shape: tuple  # of the result
    fused: bool  # by one kernel, or else on a stack


def _checked(x, w, indices, block_params, bias, base, out, strides, padding, activation,
             data_format, w_format, precision, method):  # fmt: skip
    """Check all arguments; return what is to be done."""
    check_method(method)
    weights = resolve_weights(w, None, bias, w_format, precision)
    options = (activation, data_format, weights.w_format, weights.precision)
    problem = resolve_problem(x, weights.w, strides, padding, *options)
    image_hw = x.shape[1:3] if problem.channels_last else x.shape[2:]
    calculated = (image_hw, problem.kernel, problem.strides, padding)
    check_block_params(block_params, calc_block_params, *calculated)
    shape = (x.shape[0], *problem.out_shape)
    check_base(base, shape, x)
    check_indices(*indices, like=x)
    if out is not None:
        _check_out(out, shape, x, weights, indices, base)
    kernel_for = (x, problem, block_params.bsize_out, len(indices[1]))
    return _Plan(problem, shape, goes_fused(method, is_cupy(x), kernel_for))


def blocks_of_problem(x, problem, indices, block_params, bsize, capacity):
    """Return the list of blocks and the BlockParams of a call that gives a mask, or ``bsize``."""
    if is_mask(indices):
        check_array("indices", indices, kinds="biuf", like=x)
    image_hw = x.shape[1:3] if problem.channels_last else x.shape[2:]
    convolution = ((x.shape[0], *image_hw), problem.kernel, problem.strides, problem.pads)
    return find_blocks(indices, block_params, bsize, capacity, convolution, reduce_mask)


def call_key(arrays, block_params, options):
    """Return the key of a layer's call with CuPy arrays, x first; None if there are none."""
    if not is_cupy(arrays[0]) or not isinstance(block_params, BlockParams):
        return None
    return Plans.key(arrays, (*vars(block_params).values(), options))


def stays_apart(out, inputs, base):
    """Whether ``out`` surely shares no memory with CuPy arrays; the base may be it."""
    if out is None:
        return True
    others = inputs if base is None or same_memory(out, base) else (*inputs, base)
    return apart(out, others)


def _background(shape, x, base, out):
    """Return ``out``, or fresh memory, holding the base, or 0."""
    if out is None:
        out = empty(shape, x.dtype, x)
    if base is None:
        out.fill(0)
    elif not same_memory(out, base):
        copy_image(base, out)
    return out


def _gathered(x, weights, indices, block_params, problem, y):
    """Gather blocks, convolve the stack, scatter the results over ``y``."""
    data_format = "NHWC" if problem.channels_last else "NCHW"
    layout = {"data_format": data_format, "transpose": not problem.channels_last}  # NHWC stacks
    blocks = sparse_gather(
        x,
        *indices,
        bsize=block_params.bsize,
        boffset=block_params.boffset,
        bstride=block_params.bstride,
        **layout,
    )
    blocks = conv2d(
        blocks, weights.w, strides=problem.strides, padding="VALID", scale=weights.scale,
        bias=weights.bias, activation=problem.activation, w_format=weights.w_format,
        precision=weights.precision,
    )  # fmt: skip
    return sparse_scatter(blocks, *indices, y, bsize=block_params.bsize_out, **layout, out=y)


@array_function
def mask_conv2d(x, w, mask, strides=(1, 1), padding="SAME", *, precision=None):
    """Convolve densely, then multiply by the mask pooled with the kernel's window.

    What a sparse convolution should compute where its mask is set, at the full price: a check, not
    the fast path. The pooled mask is the maximum over the window, with the strides and padding of
    the convolution; pixels outside the image are skipped, and a window wholly outside gives 0.

    Parameters
    ----------
    x : array, shape (N, H, W, C)
        Images; float16, bfloat16, float32 or float64.
    w : array, shape (R, S, C, K)
        Kernel, of the dtype of ``x``.
    mask : array, shape (N, H, W) or (N, H, W, 1), or (H, W) for one image
        bool, integer or float. The pooled value itself is the factor: 0 or 1 for a bool mask.
    strides : int or (int, int)
        Steps between output pixels.
    padding : "SAME", "VALID", int, (int, int) or ((top, bottom), (left, right))
        As for :func:`conv2d`.
    precision : None, "ieee" or "tf32"
        As for :func:`conv2d`.

    Returns
    -------
    y : array, shape (N, H', W', K)
        In the dtype, in the library and on the device of ``x``.

    Raises
    ------
    ShapeError
        If the sizes of ``mask`` and ``x`` differ.

    Source: Ren et al. 2018, arXiv:1801.02108; ``mask_conv2d`` of its reference implementation.

    Examples
    --------
    >>> import numpy as np
    >>> mask = np.eye(3, dtype=bool)[None]
    >>> y = mask_conv2d(np.ones((1, 3, 3, 2)), np.ones((1, 1, 2, 1)), mask, 1, "VALID")
    >>> y[0, :, :, 0]
    array([[2., 0., 0.],
           [0., 2., 0.],
           [0., 0., 2.]])
    """
    problem = resolve_problem(x, w, strides, padding, None, "NHWC", "HWIO", precision)
    mask = batch_of_one(mask)
    check_array("mask", mask, ndim=(3, 4), kinds="biuf", like=x)
    if mask.shape[:3] != x.shape[:3] or mask.shape[3:] not in ((), (1,)):
        n, h, width, _ = x.shape
        raise ShapeError(
            f"mask must have shape ({n}, {h}, {width}) or ({n}, {h}, {width}, 1), the size of x, "
            f"got {mask.shape}"
        )
    y = conv2d(x, w, strides=strides, padding=padding, precision=precision)
    pooled = _max_pool(mask.reshape(mask.shape[:3]).astype(compute_dtype(x.dtype)), problem)
    with np.errstate(all="ignore"):  # infinity times 0 is NaN, with no warning, as on a GPU
        y[...] = y.astype(pooled.dtype, copy=False) * pooled[..., None]
    return y


def _max_pool(mask, problem):
    """Pool a float mask ``[N, H, W]`` with the window, strides and padding of a convolution."""
    xp = namespace(mask)
    n, h, w = mask.shape
    (top, bottom), (left, right) = problem.pads
    padded = xp.full((n, h + top + bottom, w + left + right), -xp.inf, mask.dtype)
    padded[:, top : top + h, left : left + w] = mask
    pooled = xp.full((n, *problem.out_size), -xp.inf, mask.dtype)
    (step_h, step_w), (rows, columns) = problem.strides, problem.out_size
    for r, s in np.ndindex(problem.kernel):
        window = padded[:, r : r + rows * step_h : step_h, s : s + columns * step_w : step_w]
        xp.maximum(pooled, window[:, :rows, :columns], out=pooled)
    return xp.where(pooled == -xp.inf, mask.dtype.type(0), pooled)


def goes_fused(method, on_gpu, kernel_for):
    """Whether a call goes to fused_conv; raise NotImplementedError where it cannot and must.

    ``kernel_for`` says what kernel a GPU would need: x, its problem, size and number of blocks.
    """
    if method == "auto":
        return on_gpu and missing_kernel(*kernel_for) is None
    if method == "fused" and on_gpu:
        require_kernel(*kernel_for)
    return method == "fused"


def _check_out(out, shape, x, weights, indices, base):
    """Check ``out``: it may be base, and overlap nothing else."""
    inputs = [("x", x), ("w", weights.w), ("bias", weights.bias), ("scale", weights.scale)]
    inputs += zip(("bin_counts", "active_block_indices"), indices, strict=True)
    if base is not None and not same_memory(out, base):
        inputs.append(("base", base))
    check_out(out, shape, x.dtype, x, inputs)
