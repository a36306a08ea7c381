"""The operators reduce_mask, sparse_gather and sparse_scatter: bodies, shapes, gradients.

Gather and scatter are linear, and each other's transposes: their gradients are made of themselves,
and can be differentiated again, any number of times.
"""

import torch

from ..block_sparse.active_blocks import ActiveBlocks
from ..block_sparse.gather_scatter.sparse_gather import launch_of_gather
from ..block_sparse.gather_scatter.sparse_gather import sparse_gather as core_gather
from ..block_sparse.gather_scatter.sparse_scatter import launch_of_scatter
from ..block_sparse.gather_scatter.sparse_scatter import sparse_scatter as core_scatter
from ..block_sparse.mask.reduce_mask import launch_of_mask
from ..block_sparse.mask.reduce_mask import reduce_mask as core_reduce_mask
from ._activation import activation_backward, wide
from ._calls import Calls, other_shape, pointers, room
from ._launches import Launches, apart, lay, run, scratch_of_stream
from ._native import check_contiguous, compute, raw_stream
from ._registry import register

_GRID = "int[] bsize, int[] boffset, int[] bstride"
_TABLE = "Tensor bin_counts, Tensor active_block_indices"
_GATHER = (
    f"Tensor x, {_TABLE}, {_GRID}, bool transpose, str data_format, Tensor? scale, Tensor? shift, "
    "str? activation"
)
_FLAGS = "bool add, bool atomic, bool transpose, str data_format"


# ------------------------------------------------------------------------------------ reduce_mask


_MASKS = Launches(launch_of_mask)
MASK_CALLS = Calls()


def mask_again(key, known, mask):
    """Do a call that is known."""
    launch, capacity, grid = known
    return ActiveBlocks(*_list_blocks(launch, mask, capacity, key[0]), grid)


def keep_mask(key, mask, options, grid):
    """Keep the launch of a call of the operator that found the blocks of such a grid."""
    launch = _MASKS.find((mask,), (list(options[0]), *options[1:]))
    MASK_CALLS.keep(key, launch, options[-1], grid)


def _list_blocks(launch, mask, capacity, stream):
    """Launch; return the count and the list. Without a capacity this waits for the count."""
    counts = mask.new_empty((1,), dtype=torch.int32)
    indices = mask.new_empty((launch.rows, 3), dtype=torch.int32)
    scratch = scratch_of_stream(mask, launch.slots).data.ptr if launch.slots else counts.data_ptr()
    launch.run.on(stream, (*pointers(mask, counts, indices), scratch))
    return counts, indices if capacity is not None else indices[: int(counts)]


def _reduce_mask(mask, block_count, bsize, boffset, bstride, tol, avgpool, capacity):
    options = (list(block_count), bsize, boffset, bstride, tol, avgpool, capacity)
    launch = _MASKS.find((mask,), options)
    if launch:
        return _list_blocks(launch, mask, capacity, raw_stream(mask.get_device()))
    result = compute(
        core_reduce_mask, mask, mask, options[0], bsize=bsize, boffset=boffset, bstride=bstride,
        tol=tol, avgpool=avgpool, capacity=capacity,
    )  # fmt: skip
    if capacity != 0 and all(block_count) and mask.numel():
        _MASKS.keep((mask,), options)
    return result


def _reduce_mask_fake(mask, block_count, bsize, boffset, bstride, tol, avgpool, capacity):
    rows = torch.library.get_ctx().new_dynamic_size() if capacity is None else capacity
    counts = mask.new_empty((1,), dtype=torch.int32)
    return counts, mask.new_empty((rows, 3), dtype=torch.int32)


REDUCE_MASK = register(
    f"reduce_mask(Tensor mask, SymInt[] block_count, {_GRID}, float tol, bool avgpool, "
    "SymInt? capacity) -> (Tensor, Tensor)",
    _reduce_mask,
    _reduce_mask_fake,
)


# ---------------------------------------------------------------------------------- sparse_gather


def channels_last(data_format, transpose):
    """Whether the blocks of an image hold their channels last."""
    return (data_format == "NHWC") != transpose


def blocks_shape(x, rows, bsize, transpose, data_format):
    """Shape of the stack that is gathered from an image."""
    channels = x.shape[3 if data_format == "NHWC" else 1]
    if channels_last(data_format, transpose):
        return (rows, *bsize, channels)
    return (rows, channels, *bsize)


_GATHERS = Launches(launch_of_gather)
GATHER_CALLS = Calls()


def gather_again(key, known, x, bin_counts, active_block_indices, out, scale, shift):
    """Do a call that is known; return its result, or None where it must go the whole way."""
    launch, shape, options, activation = known
    stream, records = key[:2]
    given = (x, bin_counts, active_block_indices)
    blocks = room(x, shape, out, (*given, scale, shift), records)
    if blocks is None:
        return None
    launch.on(stream, pointers(*given, blocks, scale, shift))
    if out is not None:
        torch.autograd.graph.increment_version(out)
    if records:
        return GATHER.recorded(*given, *options, scale, shift, activation, [blocks])
    return blocks


def keep_gather(key, arguments, blocks):
    """Keep the launch of a call of the operator that had this result."""
    *tensors, bsize, boffset, bstride, transpose, data_format, scale, shift, activation = arguments
    options = (bsize, boffset, bstride, transpose, data_format)
    launch = _GATHERS.find((*tensors, blocks, scale, shift), (*options, activation))
    GATHER_CALLS.keep(key, launch, other_shape(blocks, tensors[0]), options, activation)


def _gather_into(x, bin_counts, active_block_indices, bsize, boffset, bstride, transpose,
                 data_format, scale, shift, activation, out):  # fmt: skip
    check_contiguous("out", out)
    tensors = (x, bin_counts, active_block_indices, out, scale, shift)
    options = (bsize, boffset, bstride, transpose, data_format, activation)
    launch = _GATHERS.find(tensors, options)
    if launch and apart(out, (x, bin_counts, active_block_indices, scale, shift)):
        run(launch, *tensors)
        return
    compute(
        core_gather, x, x, bin_counts, active_block_indices, bsize=bsize, boffset=boffset,
        bstride=bstride, transpose=transpose, data_format=data_format, scale=scale, shift=shift,
        activation=activation, out=out, allocates=scale is not None,
    )  # fmt: skip
    _GATHERS.keep(tensors, options)


def _gather_fake(x, bin_counts, active_block_indices, bsize, boffset, bstride, transpose,
                 data_format, scale, shift, activation):  # fmt: skip
    rows = active_block_indices.shape[0]
    return x.new_empty(blocks_shape(x, rows, bsize, transpose, data_format))


def _gather(*arguments):
    out = _gather_fake(*arguments)
    _gather_into(*arguments, out)
    return out


def _gather_setup(ctx, inputs, output):
    x, *table, bsize, boffset, bstride, transpose, data_format, scale, shift, activation = inputs
    ctx.options = (bsize, boffset, bstride, transpose, data_format)
    ctx.activation, ctx.shape = activation, x.shape
    ctx.linear = scale is None and shift is None and activation is None
    ctx.save_for_backward(*table, *((None,) * 3 if ctx.linear else (x, scale, shift)))


def _gather_backward(ctx, grad):
    *table, x, scale, shift = ctx.saved_tensors
    grads = [None] * 11
    if not ctx.linear:
        grad, grads[8], grads[9] = _affine_backward(ctx, grad, table, x, scale, shift)
    if ctx.needs_input_grad[0]:
        bsize, boffset, bstride, transpose, data_format = ctx.options
        grads[0] = SCATTER(  # atomic: a gather may list a block twice
            grad, *table, grad.new_zeros(ctx.shape), bsize, boffset, bstride, True, True,
            transpose, data_format,
        )  # fmt: skip
    return tuple(grads)


def _affine_backward(ctx, grad, table, x, scale, shift):
    """Gradients of ``activation(t * scale + shift)`` for the stack t as it was read."""
    bsize, boffset, bstride, transpose, data_format = ctx.options
    t = wide(GATHER(x, *table, *ctx.options, None, None, None))
    last = channels_last(data_format, transpose)
    per_channel, pixels = ((-1,), (0, 1, 2)) if last else ((-1, 1, 1), (0, 2, 3))
    z = t
    if scale is not None:
        z = z * scale.to(t.dtype).view(per_channel)
    if shift is not None:
        z = z + shift.to(t.dtype).view(per_channel)
    inside = read_inside(x, table, bsize, boffset, bstride, data_format)
    grad = torch.where(inside if last else inside.permute(0, 3, 1, 2), wide(grad), 0)
    grad = activation_backward(grad, z, ctx.activation)
    for_scale = for_shift = None
    if ctx.needs_input_grad[8]:
        for_scale = (grad * t).sum(pixels).to(scale.dtype)
    if ctx.needs_input_grad[9]:
        for_shift = grad.sum(pixels).to(shift.dtype)
    if scale is not None:
        grad = grad * scale.to(t.dtype).view(per_channel)
    return grad.to(x.dtype), for_scale, for_shift


def read_inside(x, table, bsize, boffset, bstride, data_format="NHWC"):
    """Return bool ``[M, bh, bw, 1]``: which elements of a stack come from the image."""
    h, w = x.shape[1:3] if data_format == "NHWC" else x.shape[2:]
    ones = x.new_ones((x.shape[0], h, w, 1), dtype=torch.bool)
    return GATHER(ones, *table, bsize, boffset, bstride, False, "NHWC", None, None, None)


GATHER = register(
    f"sparse_gather({_GATHER}) -> Tensor",
    _gather,
    _gather_fake,
    backward=_gather_backward,
    setup_context=_gather_setup,
)
GATHER_INTO = register(
    f"sparse_gather_into({_GATHER}, Tensor(a!) out) -> ()", _gather_into, lambda *arguments: None
)


# --------------------------------------------------------------------------------- sparse_scatter


_SCATTERS = Launches(launch_of_scatter)
SCATTER_CALLS = Calls()


def scatter_again(key, known, x, bin_counts, active_block_indices, blocks, out):
    """Do a call that is known; return its result, or None where it must go the whole way."""
    launch, options = known
    stream, records = key[:2]
    given = (bin_counts, active_block_indices, blocks)
    y = room(x, None, out, given, records)
    if y is None or not lay(y, x, new=out is None):
        return None
    launch.on(stream, pointers(y, *given))
    if out is not None:
        torch.autograd.graph.increment_version(out)
    if records:
        return SCATTER.recorded(blocks, *given[:2], x, *options, [y])
    return y


def keep_scatter(key, arguments, y):
    """Keep the launch of a call of the operator that had this result."""
    blocks, bin_counts, active_block_indices, x, *options = arguments
    alike = x.is_contiguous() and x.dtype == blocks.dtype
    tensors = (y, bin_counts, active_block_indices, blocks)
    SCATTER_CALLS.keep(key, alike and _SCATTERS.find(tensors, tuple(options)), options)


def _scatter_into(blocks, bin_counts, active_block_indices, x, bsize, boffset, bstride, add, atomic,
                  transpose, data_format):  # fmt: skip
    check_contiguous("out", x)
    tensors = (x, bin_counts, active_block_indices, blocks)
    options = (bsize, boffset, bstride, add, atomic, transpose, data_format)
    launch = _SCATTERS.find(tensors, options)
    if launch and apart(x, tensors[1:]):
        run(launch, *tensors)
        return
    compute(
        core_scatter, x, blocks, bin_counts, active_block_indices, x, bsize=bsize, boffset=boffset,
        bstride=bstride, add=add, atomic=atomic, transpose=transpose, data_format=data_format,
        out=x, allocates=atomic or overlaps(bsize, bstride),
    )  # fmt: skip
    _SCATTERS.keep(tensors, options)


def overlaps(bsize, bstride):
    """Whether neighbouring blocks share pixels."""
    return bstride[0] < bsize[0] or bstride[1] < bsize[1]


def _scatter(blocks, bin_counts, active_block_indices, x, *options):
    y = x.clone(memory_format=torch.contiguous_format)
    _scatter_into(blocks, bin_counts, active_block_indices, y, *options)
    return y


def _scatter_fake(blocks, bin_counts, active_block_indices, x, *options):
    return x.new_empty(x.shape)


def _scatter_setup(ctx, inputs, output):
    blocks, *table, _, bsize, boffset, bstride, add, atomic, transpose, data_format = inputs
    ctx.grid = (bsize, boffset, bstride)
    ctx.layout = (transpose, data_format)
    ctx.add, ctx.shape = add, blocks.shape
    ctx.shared = not add and (atomic or overlaps(bsize, bstride))
    ctx.save_for_backward(*table)


def _scatter_backward(ctx, grad):
    table = ctx.saved_tensors
    grads = [None] * 11
    if ctx.needs_input_grad[0]:
        grads[0] = GATHER(grad, *table, *ctx.grid, *ctx.layout, None, None, None)
        if ctx.shared:
            grads[0] = torch.where(_written_last(ctx, grad, table), grads[0], 0)
    if ctx.needs_input_grad[3]:
        grads[3] = grad
        if not ctx.add:
            zeros = grad.new_zeros(ctx.shape)
            grads[3] = SCATTER(zeros, *table, grad, *ctx.grid, False, ctx.shared, *ctx.layout)
    return tuple(grads)


def _written_last(ctx, image, table):
    """Return bool, like the stack with one channel: which elements of it the image shows."""
    transpose, data_format = ctx.layout
    n, h, w = image.shape[:3] if data_format == "NHWC" else (image.shape[0], *image.shape[2:])
    rows = torch.arange(ctx.shape[0], dtype=torch.int32, device=image.device)
    rows = rows.view(-1, 1, 1, 1).expand(-1, *ctx.grid[0], 1)
    nobody = torch.full((n, h, w, 1), -1, dtype=torch.int32, device=image.device)
    owner = SCATTER(rows, *table, nobody, *ctx.grid, False, True, False, "NHWC")
    last = GATHER(owner, *table, *ctx.grid, False, "NHWC", None, None, None) == rows
    return last if channels_last(data_format, transpose) else last.permute(0, 3, 1, 2)


SCATTER = register(
    f"sparse_scatter(Tensor blocks, {_TABLE}, Tensor x, {_GRID}, {_FLAGS}) -> Tensor",
    _scatter,
    _scatter_fake,
    backward=_scatter_backward,
    setup_context=_scatter_setup,
)
SCATTER_INTO = register(
    f"sparse_scatter_(Tensor blocks, {_TABLE}, Tensor(a!) x, {_GRID}, {_FLAGS}) -> ()",
    _scatter_into,
    lambda *arguments: None,
)
