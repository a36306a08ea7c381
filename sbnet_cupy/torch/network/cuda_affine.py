"""The CUDA kernel that scales and shifts the channels of a stack, on tensors."""

import math

import torch

from . import cuda
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
        and len({t.dtype for t in values}) == 1
        and all(t.dtype in (torch.float32, x.dtype) and t.device == x.device for t in values)
        and all(t.numel() in (channels, table.batch * channels) for t in values)
        and all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in values)
        and not cuda.records(*values)
        and not torch.is_autocast_enabled(x.device.type)
    )


def affine(x, table, scale, shift=None, residual=None, activation=None):
    """Return ``activation(x * scale + shift + residual)``; x ``[M, C, h, w]``, where it fits.

    scale and shift have a value for each channel, or for each image and channel. The shift and the
    residual may be None.
    """
    rows, last = cuda._rows(x), None if residual is None else cuda._rows(residual)
    m, h, w, channels = rows.shape
    out = torch.empty_like(rows)
    facts = (
        x.dtype, scale.dtype, m, table.batch, (h, w), channels, scale.numel() > channels,
        cuda._CODES.get(activation, 0),
    )  # fmt: skip
    with cuda._at_home(x) as device:
        key = (device, facts, table.settled)
        if key not in _PLANS:
            _PLANS[key] = _prepare(*facts, table.settled)
        given = (rows, scale, shift, last, table.counts, table.indices, out)
        _PLANS[key](*(None if g is None else cuda._At(g) for g in given))
        table.settled = True
    y = out.permute(0, 3, 1, 2)
    return y if activation in cuda._CODES else finish(y, None, activation)


def _prepare(dtype, scale_dtype, rows, images, block, channels, per_image, activation, settled):
    from ...block_sparse.stack.stack_affine import StackAffine, prepare_stack_affine

    sizes = StackAffine(
        element=cuda._ELEMENTS[dtype], element_bytes=dtype.itemsize,
        scale_element=cuda._ELEMENTS[scale_dtype], rows=rows, images=images, block=block,
        channels=channels, per_image=per_image, activation=activation,
        alignment=math.gcd(16, channels * dtype.itemsize),
    )  # fmt: skip
    return prepare_stack_affine(sizes, settled)
