"""What follows a convolution: a sum and an activation, in place where nobody else sees it."""

import torch
from torch.nn import functional as F

# By name: as a new tensor, and in place.
ACTIVATIONS = {
    "relu": (F.relu, torch.relu_),
    "relu6": (F.relu6, lambda x: F.relu6(x, inplace=True)),
    "silu": (F.silu, lambda x: F.silu(x, inplace=True)),
    "gelu": (F.gelu, F.gelu),
    "hardswish": (F.hardswish, lambda x: F.hardswish(x, inplace=True)),
    "hardsigmoid": (F.hardsigmoid, lambda x: F.hardsigmoid(x, inplace=True)),
    "sigmoid": (torch.sigmoid, torch.sigmoid_),
    "tanh": (torch.tanh, torch.tanh_),
}


def finish(y, residual, activation):
    """Add a residual to a result that nobody else has, and apply an activation."""
    plain = not (torch.is_grad_enabled() and y.requires_grad)
    if residual is not None:
        y = y.add_(residual) if plain and residual.dtype == y.dtype else y + residual
    if activation is None:
        return y
    return ACTIVATIONS[activation][plain](y)
