"""reduce_mask, sparse_gather and sparse_scatter on tensors."""

import functools
import marshal

import torch

from ..block_sparse.active_blocks import ActiveBlocks
from ..block_sparse.grid import resolve_grid
from ..core.sizes import pair
from ..errors import DTypeError, ShapeError
from ._copies import (
    GATHER,
    GATHER_CALLS,
    GATHER_INTO,
    MASK_CALLS,
    REDUCE_MASK,
    SCATTER,
    SCATTER_CALLS,
    SCATTER_INTO,
    blocks_shape,
    gather_again,
    keep_gather,
    keep_mask,
    keep_scatter,
    mask_again,
    scatter_again,
)
from ._native import check_contiguous, check_tensors
from ._registry import records_gradients


def reduce_mask(
    mask,
    block_count,
    *,
    bsize,
    boffset=(0, 0),
    bstride=None,
    tol=0.0,
    avgpool=False,
    capacity=None,
):
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
    given = (block_count, bsize, boffset, bstride, tol, avgpool, capacity)
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        mask = mask[None]
    key, known = MASK_CALLS.find((mask,), given)
    if known is not None:
        return mask_again(key, known, mask)
    check_tensors(mask=mask)
    sizes = _grid(bsize, boffset, bstride)
    block_count = pair(block_count, "block_count", minimum=0)
    if mask.dim() not in (3, 4):
        raise ShapeError(f"mask must have 3 or 4 dimensions, got shape {tuple(mask.shape)}")
    options = (block_count, *sizes, tol, avgpool, capacity)
    counts, indices = REDUCE_MASK(mask.detach(), *options)
    grid = (mask.shape[0], *block_count)
    if key is not None:
        keep_mask(key, mask, options, grid)
    return ActiveBlocks(counts, indices, grid)


def sparse_gather(
    x,
    bin_counts,
    active_block_indices,
    *,
    bsize,
    boffset=(0, 0),
    bstride=None,
    transpose=False,
    data_format="NHWC",
    scale=None,
    shift=None,
    activation=None,
    out=None,
):
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
    given = (bsize, boffset, bstride, transpose, data_format, activation)
    key, known = GATHER_CALLS.find(tensors, given)
    if known is not None:
        blocks = gather_again(key, known, *tensors)
        if blocks is not None:
            return blocks
    check_tensors(
        x=x, bin_counts=bin_counts, active_block_indices=active_block_indices, scale=scale,
        shift=shift, out=out,
    )  # fmt: skip
    grid = _grid(bsize, boffset, bstride)
    _check_4d("x", x, data_format)
    arguments = (
        x, bin_counts, active_block_indices, *grid, bool(transpose), data_format, scale, shift,
        activation,
    )  # fmt: skip
    if out is not None:
        rows = active_block_indices.shape[0]
        check_out(out, blocks_shape(x, rows, grid.bsize, bool(transpose), data_format), x)
    blocks = call(GATHER, GATHER_INTO, arguments, (x, scale, shift), out)
    if key is not None:
        keep_gather(key, arguments, blocks)
    return blocks


def sparse_scatter(
    blocks,
    bin_counts,
    active_block_indices,
    x,
    *,
    bsize,
    boffset=(0, 0),
    bstride=None,
    add=False,
    atomic=False,
    transpose=False,
    data_format="NHWC",
    out=None,
):
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
    in_place = out is x
    given = (bsize, boffset, bstride, add, atomic, transpose, data_format, in_place)
    tensors = (x, bin_counts, active_block_indices, blocks, None if in_place else out)
    key, known = SCATTER_CALLS.find(tensors, given)
    if known is not None:
        y = scatter_again(key, known, *tensors[:4], out)
        if y is not None:
            return y
    check_tensors(
        blocks=blocks, bin_counts=bin_counts, active_block_indices=active_block_indices, x=x,
        out=out,
    )  # fmt: skip
    grid = _grid(bsize, boffset, bstride)
    _check_4d("x", x, data_format)
    if torch.is_autocast_enabled(x.device.type) and blocks.dtype != x.dtype:
        widest = x.dtype if in_place else torch.promote_types(blocks.dtype, x.dtype)
        blocks, x = blocks.to(widest), x.to(widest)
    listed = (blocks, bin_counts, active_block_indices)
    flags = (*grid, bool(add), bool(atomic), bool(transpose), data_format)
    if out is not None:
        check_out(out, x.shape, x)
    if out is None:
        y = SCATTER(*listed, x, *flags)
    elif records_gradients(blocks, x, out):
        y = out.copy_(SCATTER(*listed, x, *flags))
    else:
        if not in_place:
            out.copy_(x)
        y = _write(SCATTER_INTO, out, *listed, out, *flags)
    if key is not None:
        keep_scatter(key, (*listed, x, *flags), y)
    return y


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


def call(operator, into, arguments, learning, out):
    """Call an operator, or the one that writes ``out``; return the result.

    ``learning`` are the arguments for which it has gradients.
    """
    if out is None:
        return operator(*arguments)
    if records_gradients(*learning, out):
        return out.copy_(operator(*arguments))
    return _write(into, out, *arguments, out)


def _write(operator, out, *arguments):
    """Call an operator that writes ``out``, and tell autograd that it did; return ``out``."""
    operator(*arguments)
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version(out)
    return out


def check_out(out, shape, x):
    """Raise unless ``out`` can receive a result of this shape and the dtype of ``x``."""
    if tuple(out.shape) != tuple(shape):
        raise ShapeError(f"out must have shape {tuple(shape)}, got {tuple(out.shape)}")
    if out.dtype != x.dtype:
        raise DTypeError(f"out must have dtype {x.dtype}, got {out.dtype}")
    check_contiguous("out", out)


def _grid(bsize, boffset, bstride):
    """Check and resolve the three arguments; what was spelled so before is remembered."""
    if not torch.compiler.is_compiling():
        try:
            return _spelled_grid(marshal.dumps((bsize, boffset, bstride), 2))
        except ValueError:  # not spelled in plain numbers
            pass
    return resolve_grid(bsize, boffset, bstride)


@functools.lru_cache(1024)
def _spelled_grid(spelled):
    return resolve_grid(*marshal.loads(spelled))


def _check_4d(name, x, data_format):
    """Check what the shapes of results are computed from; the rest is checked with the arrays."""
    if x.dim() != 4:
        raise ShapeError(f"{name} must have 4 dimensions, got shape {tuple(x.shape)}")
    if data_format not in ("NHWC", "NCHW"):
        raise ValueError(f"data_format must be 'NHWC' or 'NCHW', got {data_format!r}")
