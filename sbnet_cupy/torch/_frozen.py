"""Frozen: what a module makes of its weights before it computes, kept while it is evaluated."""

from ._dispatch_state import records_if_plain


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
        records = records_if_plain(given)
        if records:
            self._kept = None
        if self.training or records is not False or any(t.is_inference() for t in given):
            return make(*tensors)  # inference tensors have no version
        state = [(id(t), t.data_ptr(), t._version) for t in given], numbers
        if self._kept is None or self._kept[0] != state:
            held = [None if t is None else t.detach() for t in tensors]  # keeps the memory taken
            self._kept = state, held, make(*held)
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
