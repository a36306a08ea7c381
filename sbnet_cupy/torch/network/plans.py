"""Plan: a convolution of a stack that waits for the batch norm, sum and activation after it."""

import copy

from . import ops
from .epilogue import finish


class Plan:
    """A convolution and what follows it: ``activation(norm(conv(x)) + residual)``.

    ``facts`` are those of the stack that it reads, ``options`` the keywords of ``ops.conv``.
    """

    def __init__(self, source, facts, weight, bias, options, dtype, row=None):
        self.source, self.facts, self.weight, self.bias = source, facts, weight, bias
        self.options, self.dtype, self.row = options, dtype, row
        self.norm = self.residual = self.activation = None
        self.shape = (0, weight.shape[0], 0, 0)

    @property
    def device(self):
        """The device of the result."""
        return self.source.device

    def then(self, **changes):
        """Return the plan with one more step."""
        plan = copy.copy(self)
        vars(plan).update(changes)
        return plan

    def run(self):
        """Compute."""
        table, block, size, _, _ = self.facts
        weight, bias = table.weights.folded(self.weight, self.bias, self.norm)
        call = (self.source, table, block, size, weight, bias)
        options = self.options | {"residual": self.residual, "activation": self.activation}
        if table.trace is None:
            return ops.conv(*call, **options)
        return table.trace.timed(self.row, ops.conv, *call, **options)

    @property
    def rest(self):
        """A function that returns what the result holds where the input is 0, for each channel."""
        weights = self.facts[0].weights
        weight, bias, norm, activation = self.weight, self.bias, self.norm, self.activation

        def make():
            constant = weights.folded(weight, bias, norm)[1]
            if constant is None:
                constant = weight.new_zeros(weight.shape[0])
            return finish(constant.clone(), None, activation)

        return make
