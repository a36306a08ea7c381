"""Weights of a network that are packed once for a CUDA graph, and not in each replay."""

import contextlib
import threading

import torch

from ...dense.packed_weights import PackedWeights

_CALL = threading.local()  # the KeptWeights of the call that a thread makes


def kept_weights(w, scale, bias, precision):
    """Return the arguments of a convolution, with w packed if this call keeps it."""
    kept = getattr(_CALL, "weights", None)
    given = w, scale, bias, precision
    return given if kept is None or torch.compiler.is_compiling() else kept.packed(*given)


class KeptWeights:
    """Packed weights of a network, made in calls without gradients.

    Those that are parameters or buffers of the network: what else a call makes may be other numbers
    in the next one. Under autocast weights are converted in each call.
    """

    def __init__(self, net):
        tensors = (*net.parameters(), *net.buffers())
        self._own, self._packed = {id(tensor): tensor for tensor in tensors}, {}

    @contextlib.contextmanager
    def used(self):
        """Within this convolutions at sites take their weights from here."""
        before, _CALL.weights = getattr(_CALL, "weights", None), self
        try:
            yield
        finally:
            _CALL.weights = before

    def packed(self, w, scale, bias, precision):
        """Return the arguments of a convolution, with w packed if it is the network's."""
        given = [t for t in (w, scale, bias) if t is not None]
        if any(id(t) not in self._own for t in given) or torch.is_grad_enabled():
            return w, scale, bias, precision
        if torch.is_autocast_enabled(w.device.type):
            return w, scale, bias, precision
        key = id(w), id(scale), id(bias), precision
        if key not in self._packed:
            w, scale, bias = (None if t is None else t.detach() for t in (w, scale, bias))
            self._packed[key] = PackedWeights(w, scale=scale, bias=bias, precision=precision)
        return self._packed[key], None, None, None
