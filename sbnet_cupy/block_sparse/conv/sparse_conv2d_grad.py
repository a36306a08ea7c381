"""Gradients of sparse_conv2d: gather, differentiate the convolution of the stack, add up."""

from typing import Any, NamedTuple

from ...core.arrays import array_function
from ...core.operator import Operator, Plan
from ...core.spec import spec_of
from ...dense.conv2d import check_per_channel, resolve_problem
from ...dense.conv2d_grad import check_grad, check_wanted, convolution_gradients
from .. import native
from ..active_grid import check_active_grid
from ..block_params import BlockParams, calc_block_params
from ..checks import (
    arrays_of_list,
    check_base,
    check_block_params,
    check_indices,
    plain_params,
)
from ..compositions import zero_unread
from ..from_mask import takes_blocks_from
from ..gather_scatter.sparse_gather import sparse_gather
from ..gather_scatter.sparse_gather_grad import sparse_gather_grad
from ..gather_scatter.sparse_scatter_grad import sparse_scatter_grad
from .fused_conv import stack_problem
from .sparse_conv2d import blocks_of_problem


class SparseConvGradients(NamedTuple):
    """Gradients of the arguments of :func:`sparse_conv2d`; None for what was None or not wanted."""

    x: Any = None
    w: Any = None
    bias: Any = None
    base: Any = None


@array_function
def sparse_conv2d_grad(
    grad_y,
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
    wanted=("x", "w", "bias", "base"),
    capacity=None,
):
    """Compute the gradients of sparse_conv2d from the gradient of its result.

    Only pixels of active blocks contribute to those of ``x``, ``w`` and ``bias``, which are the
    dense convolution's for a ``grad_y`` that is 0 elsewhere; the rest of ``grad_y`` is the gradient
    of ``base``. Where the halos of blocks overlap, ``dx`` is added up row after row in the dtype of
    ``x``. With ``activation`` the convolution is computed again. Nothing waits for the device; same
    input, same bits.

    Parameters
    ----------
    grad_y : array, shape (N, H', W', K), or (N, K, H', W') with ``data_format="NCHW"``
        Gradient of the result of :func:`sparse_conv2d` with these arguments, in its dtype.
        C-contiguous; a NumPy array that is not is copied.
    x, w, indices, block_params, bsize, capacity
        As they were given to :func:`sparse_conv2d`; ``indices`` lists a block once.
    strides, padding, bias, activation, data_format, w_format, precision
        As for :func:`sparse_conv2d`.
    base : array, optional
        As it was given to :func:`sparse_conv2d`; its presence asks for its gradient.
    wanted : tuple of "x", "w", "bias" and "base"
        The gradients to compute; the others are None.

    Returns
    -------
    gradients : SparseConvGradients(x, w, bias, base)
        Fresh arrays of the shapes and dtypes of the arguments; None for a ``bias`` or ``base`` of
        None.

    Raises
    ------
    ShapeError
        If ``block_params`` does not belong to this convolution, or sizes do not fit together.
    DTypeError
        If dtypes differ or are not floating.
    ValueError
        If ``wanted`` or an option is none of those above.

    Source: Ren et al. 2018, arXiv:1801.02108, section 3.

    Examples
    --------
    >>> import numpy as np
    >>> from sbnet_cupy import calc_block_params, reduce_mask
    >>> x, w = np.ones((1, 6, 6, 1)), np.ones((3, 3, 1, 1))
    >>> mask = np.zeros((1, 6, 6), bool)
    >>> mask[0, 0, 0] = True
    >>> params = calc_block_params(x.shape, 5, w.shape)
    >>> grid = {"bsize": params.bsize, "boffset": params.boffset, "bstride": params.bstride}
    >>> active = reduce_mask(mask, params.bcount, **grid)
    >>> gradients = sparse_conv2d_grad(np.ones((1, 6, 6, 1)), x, w, active, params)
    >>> gradients.x[0, :, :, 0]
    array([[4., 6., 4., 2., 0., 0.],
           [6., 9., 6., 3., 0., 0.],
           [4., 6., 4., 2., 0., 0.],
           [2., 3., 2., 1., 0., 0.],
           [0., 0., 0., 0., 0., 0.],
           [0., 0., 0., 0., 0., 0.]])
    >>> gradients.w[:, :, 0, 0]
    array([[4., 6., 6.],
           [6., 9., 9.],
           [6., 9., 9.]])
    """
    if takes_blocks_from(indices, bsize, capacity):
        options = (strides, padding, activation, data_format, w_format, precision)
        problem = resolve_problem(spec_of(x), spec_of(w), *options)
        given = (indices, block_params, bsize, capacity)
        indices, block_params = blocks_of_problem(x, problem, *given)
    bin_counts, active_block_indices = arrays_of_list(indices)
    arrays = (grad_y, x, w, bin_counts, active_block_indices, bias, base)
    options = (
        plain_params(block_params, calc_block_params), strides, padding, activation, data_format,
        w_format, precision, wanted,
    )  # fmt: skip
    plan = SPARSE_CONV2D_GRAD.plan_for(arrays, options)
    check_active_grid(indices, x.shape[0], block_params.bcount)
    return plan.run(*arrays)


def _resolve(specs, options):
    """Check all arguments; return the Problem and the BlockParams."""
    grad_y, x, w, bin_counts, active_block_indices, bias, base = specs
    block_params, *convolution, wanted = options
    problem = resolve_problem(x, w, *convolution)
    image_hw = x.shape[1:3] if problem.channels_last else x.shape[2:]
    calculated = (image_hw, problem.kernel, problem.strides, convolution[1])
    block_params = BlockParams(*block_params)
    check_block_params(block_params, calc_block_params, *calculated)
    shape = (x.shape[0], *problem.out_shape)
    check_per_channel(None, bias, problem.channels_out, like=x)
    check_base(base, shape, x)
    check_wanted(wanted, SparseConvGradients._fields)
    check_grad("grad_y", grad_y, shape, x)
    check_indices(bin_counts, active_block_indices, like=x)
    return problem, block_params


def _infer(specs, options):
    """Check all arguments; return the specs of the gradients, None for those not computed."""
    _resolve(specs, options)
    _, x, w, _, _, bias, base = specs
    given = (("x", x), ("w", w), ("bias", bias), ("base", base))
    return tuple(
        spec.new(spec.shape) if spec is not None and name in options[-1] else None
        for name, spec in given
    )


def _plan(specs, options):
    """Check all arguments; return the plan of the call."""
    problem, block_params = _resolve(specs, options)
    wanted = options[-1]
    image_hw = specs[1].shape[1:3] if problem.channels_last else specs[1].shape[2:]
    layout = {
        "data_format": "NHWC" if problem.channels_last else "NCHW",
        "transpose": not problem.channels_last,  # NHWC stacks
    }
    grid = {
        "bsize": block_params.bsize,
        "boffset": block_params.boffset,
        "bstride": block_params.bstride,
    }
    stack = stack_problem(problem, block_params.bsize_out)

    def run(grad_y, x, w, bin_counts, active_block_indices, bias, base):
        indices = (bin_counts, active_block_indices)
        base_wanted = base is not None and "base" in wanted
        grad_blocks, dbase = split_gradient(grad_y, indices, block_params, base_wanted, **layout)
        given = {"x": x, "w": w, "bias": bias}
        names = {name for name in given if given[name] is not None and name in wanted}
        blocks = sparse_gather(x, *indices, **grid, **layout)
        sizes = problem.strides, image_hw, problem.out_size
        blocks = zero_unread(native, blocks, indices, block_params, *sizes)
        gradients = convolution_gradients(
            grad_blocks, blocks, w, None, bias, problem=stack, wanted=names
        )
        dx = gradients.x
        if dx is not None:
            dx = sparse_gather_grad(dx, *indices, x, **grid, **layout).x
        return SparseConvGradients(dx, gradients.w, gradients.bias, dbase)

    return Plan(_infer(specs, options), run)


SPARSE_CONV2D_GRAD = Operator(
    "sparse_conv2d_grad",
    arrays=("grad_y", "x", "w", "bin_counts", "active_block_indices", "bias", "base"),
    options=(
        "block_params", "strides", "padding", "activation", "data_format", "w_format", "precision",
        "wanted",
    ),
    infer=_infer,
    plan=_plan,
    results=(),
)  # fmt: skip


def split_gradient(grad_y, indices, block_params, base_wanted, **layout):
    """Return the stack of the active blocks' gradients, and the gradient of what lies elsewhere.

    The latter is None unless wanted.
    """
    if base_wanted:
        return sparse_scatter_grad(grad_y, *indices, bsize=block_params.bsize_out, **layout)
    return sparse_gather(grad_y, *indices, bsize=block_params.bsize_out, **layout), None
