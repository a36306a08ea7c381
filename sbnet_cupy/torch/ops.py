"""reduce_mask, sparse_gather and sparse_scatter on tensors."""

import torch

from ..block_sparse.active_blocks import ActiveBlocks
from ..block_sparse.from_mask import images_of_mask
from ..block_sparse.gather_scatter import sparse_gather as gathering
from ..block_sparse.gather_scatter import sparse_scatter as scattering
from ..block_sparse.mask import reduce_mask as listing
from ..core.documentation import documented_as
from ..core.sizes import pair
from . import _dispatch_state as state
from ._call import call
from ._namespace import GATHER, SCATTER
from ._operation import Operation

_MASK = Operation(listing.REDUCE_MASK)


@documented_as(listing.reduce_mask, "tensor")
def reduce_mask(
    mask, block_count, *, bsize, boffset=(0, 0), bstride=None, tol=0.0, avgpool=False,
    capacity=None,
):  # fmt: skip
    """List the blocks of a grid where the mask is set: :func:`sbnet_cupy.reduce_mask` on a tensor.

    Has no gradient. Without ``capacity`` the number of rows is data: on a GPU the call waits for
    it, and ``torch.compile(fullgraph=True)`` needs ``torch._dynamo.config.
    capture_dynamic_output_shape_ops = True``. With ``capacity`` neither is so. Where ``torch.vmap``
    maps the mask it is the number of all blocks, unless it is given.

    Examples
    --------
    >>> active = reduce_mask(torch.eye(4)[None], (2, 2), bsize=2)
    >>> active.active_block_indices
    tensor([[0, 0, 0],
            [0, 1, 1]], dtype=torch.int32)
    """
    mask = images_of_mask(mask)
    if capacity is None and isinstance(mask, torch.Tensor) and _is_mapped(mask):
        rows, columns = pair(block_count, "block_count", minimum=0)
        capacity = mask.shape[0] * rows * columns
    options = (block_count, bsize, boffset, bstride, tol, avgpool, capacity)
    active = call(_MASK, (mask,), options)
    return ActiveBlocks(*active, (mask.shape[0], *pair(block_count, "block_count", minimum=0)))


def _is_mapped(mask):
    """Whether torch.vmap maps a mask, each with a number of active blocks of its own."""
    return not torch.compiler.is_compiling() and state.is_mapped(mask)


@documented_as(gathering.sparse_gather, "tensor")
def sparse_gather(
    x, bin_counts, active_block_indices, *, bsize, boffset=(0, 0), bstride=None, transpose=False,
    data_format="NHWC", scale=None, shift=None, activation=None, out=None,
):  # fmt: skip
    """Copy the active blocks of an image into a stack: :func:`sbnet_cupy.sparse_gather` on tensors.

    Differentiable, twice and more, with respect to ``x``, ``scale`` and ``shift``. The gradient of
    ``x`` adds up, in the dtype of ``x``, what was read more than once. Where gradients are recorded
    ``out`` is written by a copy. For an NCHW tensor in channels_last memory pass
    ``x.permute(0, 2, 3, 1)``, which is contiguous.

    Examples
    --------
    >>> x = torch.ones(1, 4, 4, 2, requires_grad=True)
    >>> active = reduce_mask(torch.eye(4)[None], (2, 2), bsize=2)
    >>> sparse_gather(x, *active, bsize=2).sum().backward()
    >>> x.grad[0, :, :, 0]
    tensor([[1., 1., 0., 0.],
            [1., 1., 0., 0.],
            [0., 0., 1., 1.],
            [0., 0., 1., 1.]])
    """
    tensors = (x, bin_counts, active_block_indices, out, scale, shift)
    options = (bsize, boffset, bstride, transpose, data_format, activation)
    return call(GATHER, tensors, options)


@documented_as(scattering.sparse_scatter, "tensor")
def sparse_scatter(
    blocks, bin_counts, active_block_indices, x, *, bsize, boffset=(0, 0), bstride=None, add=False,
    atomic=False, transpose=False, data_format="NHWC", out=None,
):  # fmt: skip
    """Write blocks over an image, or add them to it: :func:`sbnet_cupy.sparse_scatter` on tensors.

    Differentiable, twice and more, with respect to ``blocks`` and ``x``. Where blocks overlap and
    overwrite each other, the gradient goes to the later row, whose value is seen. Under
    ``torch.autocast`` both are brought to the wider of their dtypes, as ``torch.cat`` does. Where
    gradients are recorded ``out`` is written by a copy.

    Examples
    --------
    >>> blocks, x = torch.ones(2, 2, 2, 1), torch.zeros(1, 4, 4, 1)
    >>> active = reduce_mask(torch.eye(4)[None], (2, 2), bsize=2)
    >>> sparse_scatter(blocks, *active, x, bsize=2)[0, :, :, 0]
    tensor([[1., 1., 0., 0.],
            [1., 1., 0., 0.],
            [0., 0., 1., 1.],
            [0., 0., 1., 1.]])
    """
    if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
        blocks, x = _widest(blocks, x, out)
    options = (bsize, boffset, bstride, add, atomic, transpose, data_format)
    return call(SCATTER, (blocks, bin_counts, active_block_indices, x, out), options)


def _widest(blocks, x, out):
    """Return blocks and x, under autocast in the wider dtype of both, unless x is written."""
    tensors = (blocks, x)
    if not all(
        isinstance(t, torch.Tensor) and torch.is_autocast_enabled(t.device.type) for t in tensors
    ):
        return tensors
    widest = x.dtype if out is x else torch.promote_types(blocks.dtype, x.dtype)
    return blocks.to(widest), x.to(widest)


@documented_as(scattering.sparse_scatter_var, "tensor")
def sparse_scatter_var(blocks, bin_counts, active_block_indices, x, **options):
    """Scatter in place: :func:`sparse_scatter` with ``out=x``, under the original's name.

    Examples
    --------
    >>> x, one = torch.zeros(1, 2, 2, 1), torch.ones(1, dtype=torch.int32)
    >>> sparse_scatter_var(torch.ones(1, 1, 1, 1), one, one.new_zeros(1, 3), x, bsize=1) is x
    True
    """
    return sparse_scatter(blocks, bin_counts, active_block_indices, x, out=x, **options)
