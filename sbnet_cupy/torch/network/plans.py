"""Plan: a convolution of a stack that waits for the batch norm, sum and activation after it."""

from dataclasses import dataclass, replace

import torch

from . import ops


@dataclass(frozen=True)
class Plan:
    """A convolution and what follows it: ``activation(norm(conv(x)) + residual)``.

    ``facts`` are those of the stack that it reads, ``options`` the keywords of ``ops.conv``.
    """

    source: torch.Tensor
    facts: tuple
    weight: torch.Tensor
    bias: torch.Tensor
    options: dict
    dtype: torch.dtype
    channels: int
    name: str = ""
    norm: tuple = None
    residual: torch.Tensor = None
    activation: str = None

    @property
    def shape(self):
        """The shape of the result, but for images and pixels."""
        return (0, self.channels, 0, 0)

    @property
    def device(self):
        """The device of the result."""
        return self.source.device

    def then(self, **changes):
        """Return the plan with one more step."""
        return replace(self, **changes)

    def run(self):
        """Compute."""
        table, block, size, _, _ = self.facts
        weight, bias = table.weights.folded(self.weight, self.bias, self.norm)
        call = (self.source, table, block, size, weight, bias)
        options = self.options | {"residual": self.residual, "activation": self.activation}
        if table.trace is None:
            return ops.conv(*call, **options)
        return table.trace.timed(self.name, ops.conv, *call, **options)

    @property
    def rest(self):
        """A function that returns what the result holds where the input is 0, for each channel."""
        weights = self.facts[0].weights
        weight, bias, norm, activation = self.weight, self.bias, self.norm, self.activation

        def make():
            constant = weights.folded(weight, bias, norm)[1]
            if constant is None:
                constant = weight.new_zeros(weight.shape[0])
            return ops.finish(constant.clone(), None, activation)

        return make
