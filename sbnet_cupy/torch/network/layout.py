"""The order of a stack in memory, which ``torch.vmap`` does not know of."""

import torch

from .._dispatch_state import has_forward_mode, has_function_transforms, is_mapped

VECTOR = 16  # bytes that kernels read and write at once


def channels_last(x):
    """Return a tensor in channels_last memory, or contiguous where ``torch.vmap`` may map it."""
    if _may_be_mapped(x):
        return x.contiguous()
    return x.contiguous(memory_format=torch.channels_last)


def _may_be_mapped(x):
    """Whether ``torch.vmap`` maps a tensor, or may map its forward-mode derivative alone."""
    return is_mapped(x) or (has_forward_mode() and has_function_transforms())


def is_channels_last(x):
    """Whether a tensor is known to lie in channels_last memory."""
    return not _may_be_mapped(x) and x.is_contiguous(memory_format=torch.channels_last)


def new_stack(like, rows, block, channels):
    """Return memory for a stack ``[M, C, *block]``: no view, so that it may be written in place."""
    shape = (rows, channels, *block)
    return torch.empty(
        shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last
    )


def pitch_of(x):
    """Return how many elements a pixel of a stack lies behind the one before; None of others.

    More than its channels, where it is some channels of another stack.
    """
    _, channels, height, width = x.shape
    pitch = x.stride(3) if width > 1 else x.stride(2) if height > 1 else x.stride(0)
    steps = height * width * pitch, 1, width * pitch, pitch
    each = zip(x.shape, x.stride(), steps, strict=True)
    return pitch if pitch >= channels and all(n == 1 or a == b for n, a, b in each) else None


def channels_of(whole, first, count):
    """Return channels of a stack: as no view, so that it may be written in place."""
    shape, at = (whole.shape[0], count, *whole.shape[2:]), whole.storage_offset() + first
    return whole.new_empty(0).set_(whole.untyped_storage(), at, shape, whole.stride())
