"""Frozen: what a module makes of its weights before it computes, kept while it is evaluated."""

import torch

from . import _dispatch_state as state


class Frozen:
    """Base, beside ``torch.nn.Module``, of modules that keep what they make of their weights.

    It is kept in evaluation alone, where no gradient is recorded, and made again after a change of
    the weights: of tensors, their memory or their autograd version. Not all that trains weights
    shows there: PyTorch's fused optimizers do not. So a call that records gradients drops what is
    kept, and ``train()`` and ``eval()`` do, and moves and copies of the module.
    """

    _kept = None

    def frozen(self, make, tensors, numbers=()):
        """Return ``make(*tensors)``, or what it returned for the same tensors; some may be None."""
        given = [t for t in tensors if t is not None]
        if not state.thread_is_plain():
            return make(*tensors)
        records = torch.is_grad_enabled() and any(t.requires_grad for t in given)
        if records:
            self._kept = None
        if self.training or records or any(t.is_inference() for t in given):
            return make(*tensors)  # inference tensors have no version
        seen = [(id(t), t.data_ptr(), t._version) for t in given], numbers
        if self._kept is None or self._kept[0] != seen:
            if not all(map(state.is_plain, given)):
                return make(*tensors)
            held = [None if t is None else t.detach() for t in tensors]  # keeps the memory taken
            self._kept = seen, held, make(*held)
        return self._kept[2]

    def train(self, mode=True):
        """Set the module to training or evaluation."""
        self._kept = None
        return super().train(mode)

    def _apply(self, *args, **kwargs):
        self._kept = None
        return super()._apply(*args, **kwargs)

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "_kept"}
