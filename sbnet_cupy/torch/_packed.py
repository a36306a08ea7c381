"""Weights as the kernels of layers read them: packed once, and again when they have changed."""

import weakref
from functools import partial

import torch

from ._native import allocate, native_stream, raw_stream, view


class Kept:
    """What was packed of some weights, and what they were like; None of both once one is gone."""

    def __init__(self, weights, forget):
        self._references = [weakref.ref(w, forget) for w in weights if w is not None]
        self.packed = self._seen = None

    def renew(self, packed, weights):
        """Keep what was packed of the weights as they are now."""
        self.packed = packed
        self._seen = [None if w is None else (w.data_ptr(), w._version, w.shape) for w in weights]

    def is_of(self, weights):
        """Whether the weights are as they were, and none has come to need a gradient."""
        if self._seen is None:
            return False
        for w, seen in zip(weights, self._seen, strict=True):
            if w is not None:
                place, version, shape = seen
                moved = w.data_ptr() != place or w.shape != shape
                if moved or w._version != version or w.requires_grad:
                    return False
        return True

    def drop(self):
        """Let go of the memory."""
        self._references = ()
        self.packed = self._seen = None


_KEPT = {}  # id of the first weight -> {how, for which stream and weights: Kept}


def packed(launch, *weights):
    """Return the weights as the kernel of ``launch`` reads them, a CuPy array.

    Weights that need no gradient are packed again only after a change: one of their memory or of
    autograd's version, as PyTorch's operations leave it. After any other write, call
    ``torch.autograd.graph.increment_version``. Those that need a gradient are packed at each call:
    what trains them need not leave a version, as PyTorch's fused optimizers do not; so nothing is
    kept that was packed before. Packed at each call are also all within a CUDA graph, which packs
    them at each replay.
    """
    if learn(weights):
        unkeep(weights)
        return _pack(launch, weights)
    changing = any(w is not None and w.is_inference() for w in weights)  # these have no version
    if changing or torch.cuda.is_current_stream_capturing():
        return _pack(launch, weights)
    kept = kept_of(launch, weights)
    if not kept.is_of(weights):
        kept.renew(_pack(launch, weights, kept=True), weights)
    return kept.packed


def kept_of(launch, weights):
    """Return what is, or will be, kept of weights as ``launch`` packs them.

    It is of one stream: it is written, read and given back in the stream's order.
    """
    first = weights[0]
    key = (type(launch), launch.how, raw_stream(first.get_device()), *map(id, weights))
    group = _KEPT.setdefault(id(first), {})
    kept = group.get(key)
    if kept is None:
        kept = group[key] = Kept(weights, partial(_forget, id(first)))
    return kept


def unkeep(weights):
    """Drop what is kept of weights that need gradients now: they may change and not show it."""
    _forget(id(weights[0]))


def learn(weights):
    """Whether some of the weights need a gradient."""
    return True in [w is not None and w.requires_grad for w in weights]


def _forget(first, reference=None):
    """Drop all that is kept under a first weight; called too when a tensor of it is gone."""
    for kept in _KEPT.pop(first, {}).values():
        kept.drop()


def _pack(launch, weights, kept=False):
    """Pack now, into memory of torch's; what is kept beyond the call is CuPy's own, as scratch."""
    import cupy

    views = [None if w is None else view(w) for w in weights]
    allocator = cupy.get_default_memory_pool().malloc if kept else allocate
    with native_stream(weights[0].get_device()), cupy.cuda.using_allocator(allocator):
        return launch.pack(*views)
