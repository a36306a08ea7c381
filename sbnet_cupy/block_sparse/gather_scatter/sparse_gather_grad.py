"""sparse_gather_grad: from the gradient of a block stack to that of the image it was read from."""

from typing import Any, NamedTuple

import numpy as np

from ...core.arrays import array_function, empty
from ...core.byte_order import check_byte_orders
from ...core.checks import check_array, check_float
from ...core.operator import Operator, Plan
from ...dense.affine_grad import affine_grad
from ...errors import DTypeError
from ..checks import check_image, check_indices
from ..grid import resolve_grid, resolve_layout
from .coverage import pixels_read
from .sparse_gather import check_affine, plan_gather
from .sparse_scatter import plan_scatter


class GatherGradients(NamedTuple):
    """Gradients of the arguments of :func:`sparse_gather`; None for those that were None."""

    x: Any
    scale: Any = None
    shift: Any = None


@array_function
def sparse_gather_grad(
    grad_blocks,
    bin_counts,
    active_block_indices,
    x,
    *,
    bsize,
    boffset=(0, 0),
    bstride=None,
    transpose=False,
    data_format="NHWC",
    scale=None,
    shift=None,
    activation=None,
):
    """Compute the gradients of sparse_gather from the gradient of its blocks.

    Without ``scale``, ``shift`` and ``activation``, the blocks are added up where they were read:
    ``dx[n, h0 + i, w0 + j, c] += grad_blocks[b, i, j, c]``, row after row, in the dtype of ``x``.
    That is linear, and the transpose of :func:`sparse_gather`: its own gradient with respect to
    ``grad_blocks`` is ``sparse_gather`` of the gradient of ``dx``, with the same options.

    With them, ``g = grad_blocks * activation'(x * scale + shift)`` comes first: ``g * scale`` is
    added up in ``dx``, ``dscale = sum g * x`` and ``dshift = sum g`` over all pixels read, all of
    it in float32 (float64 for float64). The derivative of relu at 0 is 0.

    What the gather did not read contributes nothing: pixels outside the image, rows at or past
    ``bin_counts``, rows whose ``n`` is not an image of the batch. Where blocks overlap or a row is
    listed twice, all contribute. Same input, same bits.

    Parameters
    ----------
    grad_blocks : array, shape (M, bsize[0], bsize[1], C), or (M, C, bsize[0], bsize[1])
        Gradient of the blocks that ``sparse_gather`` gave with these options. C-contiguous; a NumPy
        array that is not is copied.
    bin_counts : int32 array, shape (1,)
        As it was given to ``sparse_gather``.
    active_block_indices : int32 array, shape (M, 3)
        As it was given to ``sparse_gather``.
    x : array, shape (N, H, W, C), or (N, C, H, W) with ``data_format="NCHW"``
        Image that was gathered: float16, bfloat16, float32 or float64, the dtype of
        ``grad_blocks``. Its values matter only with ``scale`` or ``activation``.
    bsize, boffset, bstride, transpose, data_format, scale, shift, activation
        As for :func:`sparse_gather`.

    Returns
    -------
    gradients : GatherGradients(x, scale, shift)
        Fresh arrays of the shapes and dtypes of ``x``, ``scale`` and ``shift``; None for a
        ``scale`` or ``shift`` of None.

    Raises
    ------
    ShapeError
        If a size is wrong or an array is not contiguous.
    DTypeError
        If ``x`` is not of a floating dtype, or ``grad_blocks`` is of another one.
    DeviceError
        If arrays belong to different libraries or devices.

    Source: the transpose of the gather of Ren et al. 2018, arXiv:1801.02108, section 3.2.

    Examples
    --------
    >>> import numpy as np
    >>> counts, indices = np.array([2], np.int32), np.array([[0, 0, 0], [0, 0, 1]], np.int32)
    >>> x, grad_blocks = np.zeros((1, 2, 3, 1)), np.ones((2, 2, 2, 1))
    >>> sparse_gather_grad(grad_blocks, counts, indices, x, bsize=2, bstride=(2, 1)).x[0, :, :, 0]
    array([[1., 2., 1.],
           [1., 2., 1.]])
    """
    arrays = (grad_blocks, bin_counts, active_block_indices, x, scale, shift)
    options = (bsize, boffset, bstride, transpose, data_format, activation)
    return GATHER_GRAD.plan_for(arrays, options).run(*arrays)


def _resolve(specs, options):
    """Check all arguments; return the layout and the grid."""
    grad_blocks, bin_counts, active_block_indices, x, scale, shift = specs
    bsize, boffset, bstride, transpose, data_format, activation = options
    grid = resolve_grid(bsize, boffset, bstride)
    check_image("x", x)
    check_float("x", x.dtype)
    check_image("grad_blocks", grad_blocks, like=x)
    check_indices(bin_counts, active_block_indices, like=x)
    layout = resolve_layout(x, data_format, transpose)
    check_affine(x, layout.C, scale, shift, activation)
    rows = active_block_indices.shape[0]
    check_array("grad_blocks", grad_blocks, shape=layout.blocks_shape(rows, grid.bsize))
    if grad_blocks.dtype != x.dtype:
        check_byte_orders({"x": x, "grad_blocks": grad_blocks})
        raise DTypeError(
            f"grad_blocks must have the dtype of x, {x.dtype}, got {grad_blocks.dtype}; convert it"
        )
    return layout, grid


def _infer(specs, options):
    """Check all arguments; return the specs of the gradients of x, scale and shift."""
    _resolve(specs, options)
    return tuple(spec and spec.new(spec.shape) for spec in specs[3:])


def _plan(specs, options):
    """Check all arguments; return the plan of the call."""
    layout, grid = _resolve(specs, options)
    *_, activation = options
    blocks, x = specs[0].new(specs[0].shape), specs[3].new(specs[3].shape)
    gather = plan_gather((specs[3], None, None, None, None, None), blocks, layout, grid, None)
    scatter = plan_scatter((blocks, None, specs[2], x, x), layout, grid, add=True, overlap=True)
    results = tuple(spec and spec.new(spec.shape) for spec in specs[3:])

    @np.errstate(all="ignore")  # what overflows is infinite, with no warning, as on a GPU
    def run(grad_blocks, bin_counts, active_block_indices, x, scale, shift):
        indices = (bin_counts, active_block_indices)
        dscale = dshift = None
        if scale is not None or shift is not None or activation is not None:
            read = None
            if scale is not None or activation is not None:
                read = empty(blocks.shape, x.dtype, x)
                gather.run(x, *indices, read, None, None)
            inside = pixels_read(*indices, layout, grid)
            tables, last = (scale, shift, activation), layout.blocks_channels_last
            grad_blocks, dscale, dshift = affine_grad(grad_blocks, read, *tables, last, inside)
        dx = empty(x.shape, x.dtype, x)
        dx[...] = 0
        scatter.run(grad_blocks, *indices, None, dx)
        return GatherGradients(dx, dscale, dshift)

    return Plan(results, run)


GATHER_GRAD = Operator(
    "sparse_gather_grad",
    arrays=("grad_blocks", "bin_counts", "active_block_indices", "x", "scale", "shift"),
    options=("bsize", "boffset", "bstride", "transpose", "data_format", "activation"),
    infer=_infer,
    plan=_plan,
    results=(),
)
