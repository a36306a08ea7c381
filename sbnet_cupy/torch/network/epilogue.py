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
_LEAKY = "leaky_relu "  # and a slope
_FIRST = "first "  # and an activation, which comes before the sum with a residual


def finish(y, residual, activation):
    """Add a residual to a result that nobody else has, and apply an activation, in their order."""
    before, after = in_turn(activation)
    y = _activated(y, before)
    if residual is not None:
        plain = not (torch.is_grad_enabled() and y.requires_grad)
        y = y.add_(residual) if plain and residual.dtype == y.dtype else y + residual
    return _activated(y, after)


def scaled_last(y, scaled):
    """Return a result by which channels are scaled and shifted last, rounded once.

    ``scaled`` is a table of :meth:`~.weights.Weights.behind`.
    """
    scale, shift = scaled[:, : y.shape[1], None, None]
    return torch.addcmul(shift, y.to(scaled.dtype), scale).to(y.dtype)


def _activated(y, activation):
    if activation is None:
        return y
    plain = not (torch.is_grad_enabled() and y.requires_grad)
    slope = slope_of(activation)
    if slope is not None:
        return F.leaky_relu(y, slope, inplace=plain)
    return ACTIVATIONS[activation][plain](y)


def before_sum(activation):
    """Return the name of an activation that comes before the sum with a residual."""
    return _FIRST + activation


def in_turn(activation):
    """Return the activations before and after the sum with a residual by the name of both."""
    if activation is None or not activation.startswith(_FIRST):
        return None, activation
    return activation.removeprefix(_FIRST), None


def leaky_relu(slope):
    """Return the name of a leaky relu: an activation of this slope below 0."""
    return f"{_LEAKY}{float(slope)!r}"


def slope_of(activation):
    """Return the slope of a leaky relu by its name; None of other activations."""
    is_leaky = activation is not None and activation.startswith(_LEAKY)
    return float(activation.removeprefix(_LEAKY)) if is_leaky else None
