"""sparse_scatter_grad: from the gradient of an image to those of its blocks and its base."""

from typing import Any, NamedTuple

from ...core.arrays import array_function, empty, namespace
from ...core.checks import check_flag, check_float
from ...core.copy_image import copy_image
from ...core.operator import Operator, Plan
from ..checks import check_image, check_indices
from ..grid import resolve_grid, resolve_layout
from .coverage import last_writers
from .sparse_gather import plan_gather


class ScatterGradients(NamedTuple):
    """Gradients of the arguments of :func:`sparse_scatter`."""

    blocks: Any
    x: Any


@array_function
def sparse_scatter_grad(
    grad_y,
    bin_counts,
    active_block_indices,
    *,
    bsize,
    boffset=(0, 0),
    bstride=None,
    add=False,
    transpose=False,
    data_format="NHWC",
):
    """Compute the gradients of sparse_scatter from the gradient of its result.

    With ``add``, the blocks' gradient is ``sparse_gather`` of ``grad_y``, and that of ``x`` is
    ``grad_y``. Without, each pixel of ``grad_y`` goes to what the scatter left there: to ``x``
    where no block lies, else to the block, and where blocks overlap to that of the later row. The
    others get 0, and so do blocks' pixels outside the image, rows at or past ``bin_counts`` and
    rows whose ``n`` is not an image of the batch.

    Nothing is computed with, only moved: every bit of ``grad_y`` arrives. The function is linear
    and the transpose of :func:`sparse_scatter` as a function of ``blocks`` and ``x``: its own
    gradient with respect to ``grad_y`` is ``sparse_scatter`` of the two gradients, with the same
    options (and ``atomic=True``).

    Parameters
    ----------
    grad_y : array, shape (N, H, W, C), or (N, C, H, W) with ``data_format="NCHW"``
        Gradient of the result of ``sparse_scatter``: float16, bfloat16, float32 or float64.
        C-contiguous; a NumPy array that is not is copied.
    bin_counts : int32 array, shape (1,)
        As it was given to ``sparse_scatter``.
    active_block_indices : int32 array, shape (M, 3)
        As it was given to ``sparse_scatter``; a row may be listed twice.
    bsize, boffset, bstride, add, transpose, data_format
        As for :func:`sparse_scatter`.

    Returns
    -------
    gradients : ScatterGradients(blocks, x)
        ``blocks`` is fresh, of shape (M, bsize[0], bsize[1], C) or (M, C, bsize[0], bsize[1]).
        ``x`` is ``grad_y`` itself with ``add``, not a copy; else fresh.

    Raises
    ------
    ShapeError
        If a size is wrong or an array is not contiguous.
    DTypeError
        If ``grad_y`` is not of a floating dtype.
    DeviceError
        If arrays belong to different libraries or devices.

    Source: the transpose of the scatter of Ren et al. 2018, arXiv:1801.02108, section 3.2.

    Examples
    --------
    >>> import numpy as np
    >>> counts, indices = np.array([1], np.int32), np.array([[0, 0, 1]], np.int32)
    >>> grad_y = np.arange(1.0, 9.0).reshape(1, 2, 4, 1)
    >>> blocks, x = sparse_scatter_grad(grad_y, counts, indices, bsize=2)
    >>> blocks[0, :, :, 0]
    array([[3., 4.],
           [7., 8.]])
    >>> x[0, :, :, 0]
    array([[1., 2., 0., 0.],
           [5., 6., 0., 0.]])
    """
    arrays = (grad_y, bin_counts, active_block_indices)
    options = (bsize, boffset, bstride, add, transpose, data_format)
    return SCATTER_GRAD.plan_for(arrays, options).run(*arrays)


def _resolve(specs, options):
    """Check all arguments; return the spec of the blocks' gradient, the layout and the grid."""
    grad_y, bin_counts, active_block_indices = specs
    bsize, boffset, bstride, add, transpose, data_format = options
    grid = resolve_grid(bsize, boffset, bstride)
    check_flag("add", add)
    check_image("grad_y", grad_y)
    check_float("grad_y", grad_y.dtype)
    check_indices(bin_counts, active_block_indices, like=grad_y)
    layout = resolve_layout(grad_y, data_format, transpose)
    shape = layout.blocks_shape(active_block_indices.shape[0], grid.bsize)
    return grad_y.new(shape), layout, grid


def _infer(specs, options):
    """Check all arguments; return the specs of the gradients of the blocks and of x."""
    blocks, *_ = _resolve(specs, options)
    return blocks, specs[0].new(specs[0].shape)


def _plan(specs, options):
    """Check all arguments; return the plan of the call."""
    blocks, layout, grid = _resolve(specs, options)
    add = options[3]
    gather = plan_gather((specs[0], None, None, None, None, None), blocks, layout, grid, None)

    def run(grad_y, *indices):
        dblocks = empty(blocks.shape, grad_y.dtype, grad_y)
        gather.run(grad_y, *indices, dblocks, None, None)
        if add:
            return ScatterGradients(dblocks, grad_y)
        xp = namespace(grad_y)
        covered, stays = last_writers(*indices, layout, grid)
        xp.copyto(dblocks, 0.0, where=~stays)
        dx = copy_image(grad_y)
        xp.copyto(dx, 0.0, where=covered)
        return ScatterGradients(dblocks, dx)

    return Plan((blocks, specs[0].new(specs[0].shape)), run)


SCATTER_GRAD = Operator(
    "sparse_scatter_grad",
    arrays=("grad_y", "bin_counts", "active_block_indices"),
    options=("bsize", "boffset", "bstride", "add", "transpose", "data_format"),
    infer=_infer,
    plan=_plan,
    results=(),
)
