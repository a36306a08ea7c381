"""The CUDA kernels of channels: scaled, shifted and normalized on a stack, mixed in images."""

import math

import torch

from . import cuda, joins
from .epilogue import finish

_PLANS = {}  # (device, sizes, settled) -> what launches the kernel


def fits(x, table, *values):
    """Whether the kernel takes such values: one for each channel, or for each image and channel."""
    channels = x.shape[1]
    return (
        cuda.serves(x)
        and not table.whole
        and x.numel() > 0
        and table.weights is not None
        and len({t.dtype for t in values}) <= 1
        and all(t.dtype in (torch.float32, x.dtype) and t.device == x.device for t in values)
        and all(t.numel() in (channels, table.batch * channels) for t in values)
        and all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in values)
        and not cuda.records(*values)
    )


def affine(
    x, table, scale=None, shift=None, residual=None, activation=None, dtype=None, also=None,
    slopes=None,
):  # fmt: skip
    """Return ``activation(x * scale + shift + residual)``; x ``[M, C, h, w]``, where it fits.

    scale and shift have a value for each channel, or for each image and channel. All but x may be
    None. The residual and the result, of ``dtype``, may be float32 where x is not. With a dtype
    ``also`` it returns a pair: the result, and the result rounded to that. ``slopes``, float32, are
    those of a PReLU in place of an activation.
    """
    like, dtype = shift if scale is None else scale, dtype or x.dtype
    code, out_part_of, y = cuda.code_of(activation), None, None
    if dtype == x.dtype and like is slopes is also is None and cuda.may_pad(activation):
        given = (x,) if residual is None else (x, residual)
        y, (x, *added), out = joins.place_like(given, table, x.shape[2:], x.shape[1])
        residual = added[0] if added else None
    elif dtype == x.dtype:
        out = y = joins.place(x, table, x.shape[2:], x.shape[1])
    rows, part_of = cuda.rows_and_pitch(x)
    last, added_part_of = (None, None) if residual is None else cuda.rows_and_pitch(residual)
    m, h, w, channels = rows.shape
    if y is not None:
        out, out_part_of = cuda.rows_and_pitch(out)
    else:
        out = torch.empty_like(rows, dtype=dtype, memory_format=torch.contiguous_format)
        y = out.permute(0, 3, 1, 2)
    code = code if slopes is None else "prelu"
    both = also is not None and code is not None
    low = None
    if both:
        low = torch.empty_like(rows, dtype=also, memory_format=torch.contiguous_format)
    parts = part_of, added_part_of, out_part_of
    lie = *parts, _alignment((x, residual, y), parts, x.element_size()) if any(parts) else 16
    facts = (
        x.dtype, x.dtype if like is None else like.dtype,
        dtype if residual is None else residual.dtype, dtype, also if both else dtype, m,
        table.batch, (h, w), channels, like is not None and like.numel() > channels, code or 0,
    )  # fmt: skip
    facts += (*lie, table.settled)
    launch = cuda.prepared(_PLANS, facts, x, _prepare, *facts)
    given = rows, scale, shift, last, slopes, table.counts, table.indices, out, low
    cuda.start(launch, *given, order=table.order, out=(out, low))
    table.settled = True
    y = finish(y, None, activation) if code is None else y
    if also is None:
        return y
    return y, y.to(also) if low is None else low.permute(0, 3, 1, 2)


def _alignment(stacks, parts, itemsize):
    """Return bytes of x: as many elements as the addresses of parts are multiples of."""
    there = (t for t, part in zip(stacks, parts, strict=True) if part)
    return math.gcd(16, *(t.data_ptr() // t.element_size() * itemsize for t in there))


def _prepare(
    dtype, scale_dtype, residual_dtype, out_dtype, rounded_dtype, rows, images, block, channels,
    per_image, activation, part_of, added_part_of, out_part_of, alignment, settled,
):  # fmt: skip
    from ...block_sparse.stack.stack_affine import PRELU, StackAffine, prepare_stack_affine

    sizes = StackAffine(
        element=cuda._ELEMENTS[dtype], element_bytes=dtype.itemsize,
        scale_element=cuda._ELEMENTS[scale_dtype], residual_element=cuda._ELEMENTS[residual_dtype],
        out_element=cuda._ELEMENTS[out_dtype], rounded_element=cuda._ELEMENTS[rounded_dtype],
        rows=rows, images=images, block=block, channels=channels, per_image=per_image,
        activation=PRELU if activation == "prelu" else activation,
        part_of=part_of, added_part_of=added_part_of, out_part_of=out_part_of,
        alignment=alignment,
    )  # fmt: skip
    return prepare_stack_affine(sizes, settled)


def image_linear(x, weight, bias, activation, out):
    """Write ``activation(x @ weight.T + bias)`` to ``out``; channels are the second dimension."""
    facts = x.dtype, *x.shape[:2], weight.shape[0], cuda.code_of(activation)
    launch = cuda.prepared(_PLANS, facts, x, _prepare_linear, *facts)
    cuda.start(launch, x, weight, bias, out)


def _prepare_linear(dtype, images, channels, channels_out, activation):
    from ...block_sparse.stack.image_linear import ImageLinear, prepare_image_linear

    sizes = ImageLinear(
        element=cuda._ELEMENTS[dtype], element_bytes=dtype.itemsize, images=images,
        channels=channels, channels_out=channels_out, activation=activation,
        alignment=math.gcd(16, channels * dtype.itemsize),
    )  # fmt: skip
    return prepare_image_linear(sizes, settled=True)


def norms(x, table, shape, weight, bias, eps):
    """Whether the kernel of the layer norm serves a stack ``[M, h, w, C]`` and such weights."""
    given = [t for t in (weight, bias) if t is not None]
    return (
        x.dim() == 4
        and tuple(shape) == (x.shape[3],)
        and x.is_contiguous()
        and fits(x.permute(0, 3, 1, 2), table, *(given or [x[0, 0, 0]]))
        and _norm_sizes(x.dtype, x.dtype, x.dtype, *_sizes_of(x), eps).fits
    )


def layer_norm(x, table, weight, bias, eps, dtype=None):
    """Return the layer norm of the channels of a stack ``[M, h, w, C]``, where ``norms``.

    Weights, and the result, of ``dtype``, may be float32 where x is not.
    """
    given = [t for t in (weight, bias) if t is not None]
    held = all(isinstance(t, torch.nn.Parameter) for t in given)
    settled = table.settled and held  # others may be written by a kernel ahead
    dtypes = x.dtype, given[0].dtype if given else x.dtype, dtype or x.dtype
    out, facts = torch.empty_like(x, dtype=dtype), (*dtypes, *_sizes_of(x), eps, settled)
    key = "layer norm", facts
    launch = cuda.prepared(_PLANS, key, x, _prepare_layer_norm, *facts)
    cuda.start(launch, x, weight, bias, table.counts, out, order=table.order, out=out)
    table.settled = True
    return out


def _sizes_of(x):
    return x.shape[0], tuple(x.shape[1:3]), x.shape[3]


def _norm_sizes(dtype, scale_dtype, out_dtype, rows, block, channels, eps):
    from ...block_sparse.stack.stack_layer_norm import StackLayerNorm

    return StackLayerNorm(
        element=cuda._ELEMENTS[dtype], element_bytes=dtype.itemsize,
        scale_element=cuda._ELEMENTS[scale_dtype], out_element=cuda._ELEMENTS[out_dtype],
        rows=rows, block=block, channels=channels, eps=eps,
        alignment=math.gcd(16, channels * dtype.itemsize),
    )  # fmt: skip


def _prepare_layer_norm(dtype, scale_dtype, out_dtype, rows, block, channels, eps, settled):
    from ...block_sparse.stack.stack_layer_norm import prepare_stack_layer_norm

    sizes = _norm_sizes(dtype, scale_dtype, out_dtype, rows, block, channels, eps)
    return prepare_stack_layer_norm(sizes, settled)
