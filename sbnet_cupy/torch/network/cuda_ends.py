"""The CUDA kernels at the two ends of a network, on tensors: reading images, writing them.

Each function returns None where no kernel serves the call; then PyTorch's operations do.
"""

import math

import torch

from ...core.device import current_device
from .._graph_branch import after
from ..ops import sparse_gather, sparse_scatter
from . import casts, cuda
from .epilogue import finish

_PLANS = {}  # (device, sizes) -> what launches a kernel, or None
_MOST_CHANNELS = 8  # of images that a convolution reads itself
_MOST_BESIDE, _LEAST_BESIDE = 0.3, 1 << 24  # of an image filled beside: active share, bytes
_FILLING = 16  # thread blocks that fill it


def reads_image(image, weight, to, *, groups, mode, fill, **_):
    """Whether a convolution with these weights and options may read an image itself.

    Autocast converts both to the dtype ``to``, unless that is None.
    """
    dtype = casts.after(image.dtype, to)
    return (
        cuda.serves(image)
        and dtype == casts.after(weight.dtype, to)
        and has_few_channels(image, weight)
        and groups == 1
        and mode == "zeros"
        and not fill
        and cuda.convolves(dtype)
    )


def has_few_channels(image, weight):
    """Whether a convolution in one group has as few channels as its kernel for images takes."""
    return image.shape[1] == weight.shape[1] <= _MOST_CHANNELS


def conv(
    entry, block, size, weight, bias, stride, pads, dilation, residual, activation, scaled=None
):
    """Convolve the image of a call at its active blocks by one kernel, or return None.

    The result is ``activation(conv(x) + bias)``, a stack ``[M, Cout, b / s, b / s]``; ``scaled`` as
    for :func:`~.cuda.conv`.
    """
    image, table = entry.image, entry.table
    if residual is not None or cuda.records(image, weight, bias) or image.dtype != weight.dtype:
        return None
    kernel, channels_out = tuple(weight.shape[2:]), weight.shape[0]
    block_out, size_out = cuda.sizes_after(block, size, kernel, stride, pads, dilation)
    facts = (
        image.dtype, table.rows, table.batch, table.grid, block, block_out, size, size_out,
        image.shape[1], channels_out, kernel, stride, dilation,
        (pads[0], pads[2]), cuda.number_of(activation, scaled),
        tuple(image.stride(axis) for axis in (0, 2, 3, 1)), math.gcd(image.data_ptr(), 4),
        cuda.is_known(scaled) and cuda._is_packed(weight, bias, _PACKED), cuda._clears(table),
    )  # fmt: skip
    found = cuda.prepared(_PLANS, facts, image, _prepare_conv, *facts)
    if found is None:
        return None
    launch, pack = found
    y = cuda.new_stack(image, table.rows, block_out, channels_out)
    packed = cuda._packed(image, weight, bias, pack, _PACKED)
    behind = () if scaled is None else (scaled,)
    given = image, packed, table.counts, table.indices, table.places, y, *behind
    cuda.start(launch, *given, order=table.order, out=y)
    table.settled = True
    return finish(y, None, activation) if cuda.code_of(activation) is None else y


_PACKED = "_image_packed"  # where packed weights are kept beside a weight


def _prepare_conv(
    dtype, rows, images, grid, block, block_out, image, image_out, channels, channels_out, kernel,
    strides, dilation, pads, activation, steps, alignment, settled, clear_rows,
):  # fmt: skip
    """Return (launch, pack) for the current device, or None."""
    from ...block_sparse.stack.stack_image_conv2d import (
        ImageConv,
        missing_image_kernel,
        prepare_image_conv,
        prepare_image_pack,
    )

    conv = ImageConv(
        element=cuda._ELEMENTS[dtype], rows=rows, images=images, grid=grid, block=block,
        block_out=block_out, image=image, image_out=image_out, channels=channels,
        channels_out=channels_out, kernel=kernel, strides=strides, dilation=dilation, pads=pads,
        activation=activation, vectors_out=channels_out * dtype.itemsize % 16 == 0,
    )  # fmt: skip
    if missing_image_kernel(conv, steps, current_device()) is not None:
        return None
    launch = prepare_image_conv(conv, steps, settled, clear_rows, alignment=alignment)
    return launch, prepare_image_pack(conv, "OIHW")


def _moves(x):
    """Whether a tensor may be gathered and scattered by kernels: on a GPU, with no gradient."""
    return x.is_cuda and x.dtype in _MOVED and not cuda.records(x) and not cuda.is_tracing()


_MOVED = {
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool, torch.uint8,
    torch.int8, torch.int16, torch.int32, torch.int64,
}  # fmt: skip


def gather(image, table, block, hw):
    """Copy the active blocks of an image by one kernel, or return None.

    The image is ``[N, ...]`` with height and width at the dimensions ``hw``, the result the same
    with blocks; in memory its channels are last, unless the image has them nowhere else.
    """
    if not _moves(image) or not image.numel() or not table.rows:
        return None
    rest = [i for i in range(1, image.dim()) if i not in hw]
    order, plain = (0, *hw, *rest), image.dim() == 4 and hw == (2, 3) and image.is_contiguous()
    sizes = [image.shape[i] for i in rest]
    lists = (table.counts, table.indices)
    if plain and image.shape[1] > 1:
        blocks = sparse_gather(image, *lists, bsize=block, transpose=True, data_format="NCHW")
    else:
        rows = image.permute(order).reshape(image.shape[0], *(image.shape[i] for i in hw), -1)
        blocks = sparse_gather(rows, *lists, bsize=block)
    return blocks.view(-1, *block, *sizes).permute([order.index(i) for i in range(image.dim())])


def scatter(value, table, block, size, hw, outside=0.0):
    """Lay a stack out as an image by one kernel, or return None.

    ``outside`` is what lies where no block is active: a number, a tensor with a value for each
    channel ``[C, 1, 1]``, or an image like the result. The last two have the stack's dtype.
    """
    if not _moves(value) or not value.numel() or min(size) < 1:
        return None
    if not value.is_floating_point() and (isinstance(outside, torch.Tensor) or outside != 0):
        return None  # PyTorch's rules say of which dtype the result is
    rest = [i for i in range(1, value.dim()) if i not in hw]
    order, sizes = (0, *hw, *rest), [value.shape[i] for i in rest]
    back = [order.index(i) for i in range(value.dim())]
    rows = value.permute(order).contiguous()
    channels, kind, background = math.prod(sizes), "constant", None
    if isinstance(outside, torch.Tensor):
        if value.dim() != 4 or outside.dtype != value.dtype or cuda.records(outside):
            return None
        kind = "image" if outside.dim() == 4 else "channels"
        background = outside.permute(order) if kind == "image" else outside.reshape(-1)
        background, outside = background.contiguous(), 0.0
        if kind == "channels" and background.numel() != channels:
            return None
    shape = table.batch, *size, *sizes
    if kind == "constant":
        out = _filled_beside(table, shape, value.dtype, block, channels, outside)
        if out is not None:
            image, blocks = (t.view(*t.shape[:3], -1) for t in (out, rows))
            sparse_scatter(blocks, table.counts, table.indices, image, bsize=block, out=image)
            return out.permute(back)
    out = torch.empty(shape, dtype=value.dtype, device=value.device)
    facts = (
        value.dtype, table.rows, table.batch, table.grid, block, size, channels, kind, outside,
        math.gcd(16, rows.data_ptr(), background.data_ptr() if kind == "image" else 0),
    )  # fmt: skip
    launch = cuda.prepared(_PLANS, facts, value, _prepare_scatter, *facts)
    if launch is None:
        return None
    given = rows, table.counts, table.places, background, out
    cuda.start(launch, *given, order=table.order, out=out)
    return out.permute(back)


def _filled_beside(table, shape, dtype, block, channels, outside):
    """Return an image of one number, which a CUDA graph fills beside the layers, or None.

    A few thread blocks write it while products leave memory idle; more of them would take it from
    the layers. The blocks are written after them. Elsewhere, or where the image is small or much of
    it active, one kernel writes all of it in less time.
    """
    of_blocks = table.rows / math.prod(table.places.shape)
    nbytes = math.prod(shape) * dtype.itemsize
    if not table.deep or of_blocks > _MOST_BESIDE or nbytes < _LEAST_BESIDE:
        return None
    size = shape[1:3]
    facts = dtype, 0, table.batch, table.grid, block, size, channels, "constant", outside, 16, False
    with after(table.deep, table.device) as main:
        image = torch.empty(shape, dtype=dtype, device=table.device)
        launch = cuda.prepared(_PLANS, facts, image, _prepare_scatter, *facts)
        if launch is None:
            return None
        cuda.start(launch, image, None, None, None, image)  # no stack is read
    image.record_stream(main)
    return image


def _prepare_scatter(
    dtype, rows, images, grid, block, size, channels, kind, outside, alignment, blocks=True
):
    """Return the launch for the current device, or None."""
    from ...block_sparse.stack import stack_to_image

    fill = stack_to_image.ImageFill(
        rows, (images, *grid), block, size, channels, dtype.itemsize, alignment, kind, blocks
    )
    bits = torch.tensor([outside], dtype=dtype).view(torch.uint8).numpy().tobytes()
    bits = stack_to_image.constant_bits(bits)
    most = None if blocks else _FILLING
    return stack_to_image.prepare_stack_to_image(fill, bits, most)
