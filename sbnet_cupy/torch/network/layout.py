"""The order of a stack in memory, which ``torch.vmap`` does not know of."""

import torch

from .._dispatch_state import is_mapped


def channels_last(x):
    """Return a tensor in channels_last memory, or contiguous where ``torch.vmap`` maps it."""
    if is_mapped(x):
        return x.contiguous()
    return x.contiguous(memory_format=torch.channels_last)


def is_channels_last(x):
    """Whether a tensor is known to lie in channels_last memory."""
    return not is_mapped(x) and x.is_contiguous(memory_format=torch.channels_last)
