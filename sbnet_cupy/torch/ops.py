"""reduce_mask, sparse_gather and sparse_scatter on tensors."""

import torch

from ..block_sparse.active_blocks import ActiveBlocks
from ..block_sparse.from_mask import batch_of_one
from ..block_sparse.mask.reduce_mask import REDUCE_MASK
from ..core.sizes import pair
from ._call import call
from ._namespace import GATHER, SCATTER
from ._operation import Operation

_MASK = Operation(REDUCE_MASK)


def reduce_mask(
    mask, block_count, *, bsize, boffset=(0, 0), bstride=None, tol=0.0, avgpool=False,
    capacity=None,
):  # fmt: skip
    """List the blocks of a grid where the mask is set: :func:`sbnet_cupy.reduce_mask` on a tensor.

    Has no gradient. Without ``capacity`` the number of rows is data: on a GPU the call waits for
    it, and ``torch.compile(fullgraph=True)`` needs ``torch._dynamo.config.
    capture_dynamic_output_shape_ops = True``. With ``capacity`` neither is so.

    Parameters
    ----------
    mask : tensor, shape (N, H, W) or (N, H, W, 1), or (H, W) for one image
        bool, any integer, or float16, bfloat16, float32, float64.
    block_count, bsize, boffset, bstride, tol, avgpool, capacity
        As for :func:`sbnet_cupy.reduce_mask`.

    Returns
    -------
    ActiveBlocks
        Unpacks as ``bin_counts, active_block_indices``: int32 tensors on the mask's device.

    Raises
    ------
    ShapeError, DTypeError, DeviceError
        As :func:`sbnet_cupy.reduce_mask`; DTypeError also for what is no tensor.

    Source: Ren et al. 2018, arXiv:1801.02108, section 3.1.

    Examples
    --------
    >>> active = reduce_mask(torch.eye(4)[None], (2, 2), bsize=2)
    >>> active.active_block_indices
    tensor([[0, 0, 0],
            [0, 1, 1]], dtype=torch.int32)
    """
    mask = batch_of_one(mask)
    options = (block_count, bsize, boffset, bstride, tol, avgpool, capacity)
    active = call(_MASK, (mask,), options)
    return ActiveBlocks(*active, (mask.shape[0], *pair(block_count, "block_count", minimum=0)))


def sparse_gather(
    x, bin_counts, active_block_indices, *, bsize, boffset=(0, 0), bstride=None, transpose=False,
    data_format="NHWC", scale=None, shift=None, activation=None, out=None,
):  # fmt: skip
    """Copy the active blocks of an image into a stack: :func:`sbnet_cupy.sparse_gather` on tensors.

    Differentiable, twice and more, with respect to ``x``, ``scale`` and ``shift``. The gradient of
    ``x`` adds up, in the dtype of ``x``, what was read more than once.

    Parameters
    ----------
    x : tensor, shape (N, H, W, C), or (N, C, H, W) with ``data_format="NCHW"``
        Image. One that is not contiguous is copied. For an NCHW tensor in channels_last memory pass
        ``x.permute(0, 2, 3, 1)``, which is contiguous.
    bin_counts, active_block_indices : int32 tensors
        As :func:`reduce_mask` returns them.
    bsize, boffset, bstride, transpose, data_format, scale, shift, activation
        As for :func:`sbnet_cupy.sparse_gather`.
    out : tensor, optional
        Receives the blocks; contiguous. Where gradients are recorded it is written by a copy.

    Returns
    -------
    blocks : tensor, shape (M, bsize[0], bsize[1], C), or (M, C, bsize[0], bsize[1])

    Raises
    ------
    ShapeError, DTypeError, DeviceError
        As :func:`sbnet_cupy.sparse_gather`; DTypeError also for what is no tensor.

    Source: Ren et al. 2018, arXiv:1801.02108, section 3.2.

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


def sparse_scatter(
    blocks, bin_counts, active_block_indices, x, *, bsize, boffset=(0, 0), bstride=None, add=False,
    atomic=False, transpose=False, data_format="NHWC", out=None,
):  # fmt: skip
    """Write blocks over an image, or add them to it: :func:`sbnet_cupy.sparse_scatter` on tensors.

    Differentiable, twice and more, with respect to ``blocks`` and ``x``. Where blocks overlap and
    overwrite each other, the gradient goes to the later row, whose value is seen. Under
    ``torch.autocast`` both are brought to the wider of their dtypes, as ``torch.cat`` does.

    Parameters
    ----------
    blocks, bin_counts, active_block_indices, x : tensors
        As for :func:`sbnet_cupy.sparse_scatter`. Those that are not contiguous are copied.
    bsize, boffset, bstride, add, atomic, transpose, data_format
        As for :func:`sbnet_cupy.sparse_scatter`.
    out : tensor, optional
        Receives the result, and is returned; contiguous. ``out=x`` works in place. Where gradients
        are recorded it is written by a copy.

    Returns
    -------
    y : tensor of the shape and dtype of ``x``

    Raises
    ------
    ShapeError, DTypeError, DeviceError
        As :func:`sbnet_cupy.sparse_scatter`; DTypeError also for what is no tensor.

    Source: Ren et al. 2018, arXiv:1801.02108, section 3.2.

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


def sparse_scatter_var(blocks, bin_counts, active_block_indices, x, **options):
    """Scatter in place: :func:`sparse_scatter` with ``out=x``, under the original's name.

    Parameters
    ----------
    blocks, bin_counts, active_block_indices, x, **options
        As for :func:`sparse_scatter`; ``x`` is written, and ``out`` may not be given.

    Returns
    -------
    x : tensor
        The very tensor that was passed.

    Raises
    ------
    ShapeError, DTypeError, DeviceError
        As :func:`sparse_scatter`.

    Source: Ren et al. 2018, arXiv:1801.02108, section 3.2.

    Examples
    --------
    >>> x, one = torch.zeros(1, 2, 2, 1), torch.ones(1, dtype=torch.int32)
    >>> sparse_scatter_var(torch.ones(1, 1, 1, 1), one, one.new_zeros(1, 3), x, bsize=1) is x
    True
    """
    return sparse_scatter(blocks, bin_counts, active_block_indices, x, out=x, **options)
