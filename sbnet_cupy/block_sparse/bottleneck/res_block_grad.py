"""Gradients of the residual unit, on the active blocks only."""

import functools
from typing import Any, NamedTuple

import numpy as np

from ...core.arrays import array_function, compute_dtype
from ...core.operator import Operator, Plan
from ...core.sizes import pair
from ...dense.activation import apply_affine
from ...dense.affine_grad import affine_grad
from ...dense.conv2d import check_precision, conv2d
from ...dense.conv2d_grad import check_grad, conv2d_grad
from ..active_grid import check_active_grid
from ..block_params import BlockParams, calc_block_params_res_block
from ..checks import arrays_of_list, check_indices, plain_params
from ..compositions import shortcut_grid
from ..conv.sparse_conv2d_grad import split_gradient
from ..from_mask import takes_blocks_from
from ..gather_scatter.sparse_gather import sparse_gather
from ..gather_scatter.sparse_gather_grad import sparse_gather_grad
from ..gather_scatter.zero_outside import zero_outside
from ..grid import inside_image
from .res_block import blocks_of_unit, check_sizes
from .weights import WEIGHTS, BottleneckWeights, arrays_of_unit


class BottleneckGradients(NamedTuple):
    """Gradients of the arguments of :func:`sparse_res_block_bottleneck`; None for those of None."""

    x: Any
    weights: BottleneckWeights
    w_project: Any = None
    base: Any = None


@array_function
def sparse_res_block_bottleneck_grad(
    grad_y,
    x,
    weights,
    indices,
    block_params=None,
    *,
    bsize=None,
    strides=(1, 1),
    w_project=None,
    base=None,
    precision=None,
    capacity=None,
):
    """Compute the gradients of sparse_res_block_bottleneck from the gradient of its result.

    The residual, ``conv3(a3(conv2(a2(conv1(a1(x))))))``, gets ``grad_y`` of the active blocks. The
    shortcut, x or its projection, gets all of it; with ``base`` that of the active blocks, and the
    base the rest. The intermediate values are computed again, each rounded to the dtype of ``x``.
    The derivative of relu at 0 is 0. Nothing waits for the device; same input, same bits.

    Parameters
    ----------
    grad_y : array, shape (N, H', W', Cout)
        Gradient of the result of :func:`sparse_res_block_bottleneck` with these arguments, in its
        dtype. C-contiguous; a NumPy array that is not is copied.
    x, weights, indices, block_params, bsize, strides, w_project, base, capacity
        As they were given to :func:`sparse_res_block_bottleneck`; ``indices`` lists a block once.
        With ``out=x`` or ``out=base`` the values from before the call.
    precision : None, "ieee" or "tf32"
        As for :func:`conv2d`.

    Returns
    -------
    gradients : BottleneckGradients(x, weights, w_project, base)
        Fresh arrays of the shapes and dtypes of the arguments, those of the weights in a
        BottleneckWeights; None for a ``w_project`` or ``base`` of None.

    Raises
    ------
    ShapeError
        If ``block_params`` does not belong to this unit, sizes do not fit together, or
        ``w_project`` is missing.
    DTypeError
        If dtypes differ or are not floating.

    Source: He et al. 2016, arXiv:1603.05027; Ren et al. 2018, arXiv:1801.02108, section 3.3.

    Examples
    --------
    >>> from sbnet_cupy import BottleneckWeights, calc_block_params_res_block, reduce_mask
    >>> x, weights = np.ones((1, 32, 32, 16), np.float32), BottleneckWeights.random(16, 4)
    >>> params = calc_block_params_res_block(x.shape, 10, [1, 3, 1])
    >>> grid = {"bsize": params.bsize, "boffset": params.boffset, "bstride": params.bstride}
    >>> active = reduce_mask(np.eye(32, dtype=bool)[None], params.bcount, **grid)
    >>> gradients = sparse_res_block_bottleneck_grad(np.ones_like(x), x, weights, active, params)
    >>> gradients.x.shape, gradients.weights.w2.shape, gradients.base
    ((1, 32, 32, 16), (3, 3, 4, 4), None)
    """
    plain = arrays_of_unit(x, weights)
    if takes_blocks_from(indices, bsize, capacity):
        given = (indices, block_params, bsize, capacity)
        indices, block_params = blocks_of_unit(x, weights, strides, w_project, *given)
    bin_counts, active_block_indices = arrays_of_list(indices)
    arrays = (grad_y, x, *plain, w_project, bin_counts, active_block_indices, base)
    params = plain_params(block_params, calc_block_params_res_block)
    plan = RES_BLOCK_GRAD.plan_for(arrays, (params, strides, precision))
    check_active_grid(indices, x.shape[0], block_params.bcount)
    return plan.run(*arrays)


def _resolve(specs, options):
    """Check all arguments; return the BlockParams and the strides."""
    grad_y, x, *weights, w_project, bin_counts, active_block_indices, base = specs
    block_params, strides, precision = options
    check_precision(precision)
    strides = pair(strides, "strides")
    block_params, weights = BlockParams(*block_params), BottleneckWeights(*weights)
    shape = check_sizes(x, weights, w_project, strides, block_params, base)
    check_grad("grad_y", grad_y, shape, x)
    check_indices(bin_counts, active_block_indices, like=x)
    return block_params, strides


def _infer(specs, options):
    """Check all arguments; return the specs of the gradients, None for arguments of None."""
    _resolve(specs, options)
    _, x, *weights, w_project, _, _, base = specs
    return tuple(spec and spec.new(spec.shape) for spec in (x, *weights, w_project, base))


def _plan(specs, options):
    """Check all arguments; return the plan of the call."""
    block_params, strides = _resolve(specs, options)
    fixed = {"block_params": block_params, "strides": strides, "precision": options[-1]}
    return Plan(_infer(specs, options), functools.partial(_gradients, **fixed))


@np.errstate(all="ignore")  # what overflows is infinite, with no warning, as on a GPU
def _gradients(grad_y, x, *arrays, block_params, strides, precision):
    """Return the gradients of a checked unit."""
    *weights, w_project, bin_counts, active_block_indices, base = arrays
    weights, indices = BottleneckWeights(*weights), (bin_counts, active_block_indices)
    grad, dbase = split_gradient(grad_y, indices, block_params, base is not None)
    options = (block_params, strides, precision)
    dx, dweights = _residual_grad(grad, x, weights, indices, *options)
    if base is not None:
        shortcut, dproject = _shortcut_blocks_grad(grad, x, w_project, indices, *options)
    elif w_project is not None:
        shortcut, dproject, *_ = conv2d_grad(
            grad_y, x, w_project, strides=strides, precision=precision
        )
    else:
        shortcut, dproject = grad_y, None
    wide = compute_dtype(x.dtype)
    dx[...] = dx.astype(wide, copy=False) + shortcut.astype(wide, copy=False)
    return BottleneckGradients(dx, dweights, dproject, dbase)


RES_BLOCK_GRAD = Operator(
    "sparse_res_block_bottleneck_grad",
    arrays=(
        "grad_y", "x", *WEIGHTS, "w_project", "bin_counts", "active_block_indices", "base",
    ),
    options=("block_params", "strides", "precision"),
    infer=_infer,
    plan=_plan,
    results=(),
)  # fmt: skip


def _residual_grad(grad, x, weights, indices, block_params, strides, precision):
    """Return the gradients of x and of the weights; ``grad`` is that of the residual's stack."""
    first = {
        "bsize": block_params.bsize,
        "boffset": block_params.boffset,
        "bstride": block_params.bstride,
        "scale": weights.scale1,
        "shift": weights.shift1,
        "activation": "relu",
    }
    valid = {"padding": "VALID", "precision": precision}
    second = (weights.scale2, weights.shift2)
    third = (weights.scale3, weights.shift3)
    inside = inside_image(indices[1], block_params, x.shape[1:3])[..., None]

    t1 = sparse_gather(x, *indices, **first)
    z1 = conv2d(t1, weights.w1, **valid)
    t2 = _activated(z1, *second)
    zero_outside(t2, *indices, block_params, x.shape[1:3])  # the padding of conv2
    z2 = conv2d(t2, weights.w2, strides=strides, **valid)
    t3 = _activated(z2, *third)

    grad, dw3, *_ = conv2d_grad(grad, t3, weights.w3, **valid)
    grad, dscale3, dshift3 = affine_grad(grad, z2, *third, "relu", True)
    grad, dw2, *_ = conv2d_grad(grad, t2, weights.w2, strides=strides, **valid)
    grad, dscale2, dshift2 = affine_grad(grad, z1, *second, "relu", True, inside)
    grad, dw1, *_ = conv2d_grad(grad, t1, weights.w1, **valid)
    dx, dscale1, dshift1 = sparse_gather_grad(grad, *indices, x, **first)
    tables = (dscale1, dshift1, dscale2, dshift2, dscale3, dshift3)
    return dx, BottleneckWeights(dw1, dw2, dw3, *tables)


def _activated(z, scale, shift):
    """Return ``relu(z * scale + shift)`` in the dtype of ``z``."""
    wide = z.astype(compute_dtype(z.dtype))
    return apply_affine(wide, scale, shift, "relu").astype(z.dtype, copy=False)


def _shortcut_blocks_grad(grad, x, w_project, indices, block_params, strides, precision):
    """Return the gradients of x and of the projection for the shortcut's stack."""
    if w_project is None:
        return sparse_gather_grad(grad, *indices, x, bsize=block_params.bsize_out).x, None
    names = ("bsize", "boffset", "bstride")
    grid = dict(zip(names, shortcut_grid(block_params, strides), strict=True))
    blocks = sparse_gather(x, *indices, **grid)
    options = {"strides": strides, "padding": "VALID", "precision": precision}
    dblocks, dproject, *_ = conv2d_grad(grad, blocks, w_project, **options)
    return sparse_gather_grad(dblocks, *indices, x, **grid).x, dproject
