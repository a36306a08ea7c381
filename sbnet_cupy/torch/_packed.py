"""Weights as the kernels of layers read them: packed once, and again when they have changed."""

import weakref
from functools import partial

import torch

from ._native import allocate, describe, native_stream, view


class Kept:
    """What was packed of some weights, and what they were like then.

    There is neither before the first call, nor after one of the weights was deleted.
    """

    def __init__(self, weights, forget):
        self._references = [weakref.ref(w, forget) for w in weights if w is not None]
        self.packed = self._seen = self.fields = None

    def renew(self, packed, weights):
        """Keep what was packed of the weights as they are now."""
        self.packed = packed
        self._seen = list(map(_state, weights))
        self.fields = describe(weights).fields

    def is_of(self, weights):
        """Whether the weights are as they were, and none has come to need a gradient."""
        return self._seen is not None and self._seen == list(map(_state, weights))

    def drop(self):
        """Release the memory."""
        self._references = ()
        self.packed = self._seen = self.fields = None


def known_fields(tensors, positions):
    """Return the fields of the specs of weights that are as they were when packed, by position."""
    weights = [tensors[i] for i in positions]
    ids = tuple(map(id, weights))
    for key, kept in list(_KEPT.get(ids[0], {}).items()):
        if key[2:] == ids and kept.is_of(weights):
            return dict(zip(positions, kept.fields, strict=True))
    return {}


def _state(w):
    """Return what shows a change of a weight, which may be None."""
    return w if w is None else (w.data_ptr(), w._version, w.shape, w.requires_grad)


_KEPT = {}  # id of the first weight -> {how, for which stream and weights: Kept}


def packed(plan, weights, stream):
    """Return the weights as the kernel of ``plan`` reads them: a tensor or a CuPy array of bytes.

    Weights that need no gradient are packed again only after a change: one of their memory or of
    autograd's version, as PyTorch's operations leave it. After any other write, call
    ``torch.autograd.graph.increment_version``. Those that need a gradient are packed at each call:
    what trains them need not leave a version, as PyTorch's fused optimizers do not; so nothing is
    kept that was packed before. Packed at each call are also all within a CUDA graph, which packs
    them at each replay.
    """
    capturing = torch.cuda.is_current_stream_capturing()
    if not capturing:
        kept = _KEPT.get(id(weights[0]), {}).get((plan.how, stream, *map(id, weights)))
        if kept is not None and kept.is_of(weights):
            return kept.packed
    given = [w for w in weights if w is not None]
    if any(w.requires_grad for w in given):
        forget(id(weights[0]))
        return _packed_now(plan, weights, stream)
    if capturing or any(w.is_inference() for w in given):  # the latter have no version
        return _packed_now(plan, weights, stream)
    kept = kept_of(plan, weights, stream)
    kept.renew(_pack(plan, weights, kept=True), weights)
    return kept.packed


def kept_of(plan, weights, stream):
    """Return what is, or will be, kept of weights as ``plan`` packs them.

    It belongs to one stream: it is written, read and freed in the stream's order.
    """
    key = (plan.how, stream, *map(id, weights))
    group = _KEPT.setdefault(id(weights[0]), {})
    kept = group.get(key)
    if kept is None:
        kept = group[key] = Kept(weights, partial(forget, id(weights[0])))
    return kept


def forget_learning(weights):
    """Drop all that is kept of any of these weights if one needs a gradient.

    It may then change without a new version, also in calls whose plan packs nothing.
    """
    learning = {id(w) for w in weights if w is not None and w.requires_grad}
    if learning:
        for first, group in list(_KEPT.items()):
            if any(not learning.isdisjoint(key[2:]) for key in group):
                forget(first)


def forget(first, reference=None):
    """Drop all that is kept under the id of a first weight; called too when a weight is deleted."""
    for kept in _KEPT.pop(first, {}).values():
        kept.drop()


def _packed_now(plan, weights, stream):
    """Pack for one call. Where the kernel can read the weights as they are, it is launched at once.

    It reads contiguous memory, and tables of float32.
    """
    pack = plan.pack
    for number, w in enumerate(weights):
        if w is not None and not (
            w.is_contiguous() and (number < pack.kernels or w.dtype is torch.float32)
        ):
            return _pack(plan, weights)
    memory = weights[0].new_empty((pack.nbytes,), dtype=torch.uint8)
    addresses = [0 if w is None else w.data_ptr() for w in weights]
    pack.launch.on(stream, (*addresses, memory.data_ptr()))
    return memory


def _pack(plan, weights, kept=False):
    """Pack into memory of torch's; what is kept beyond the call is CuPy's own, as scratch."""
    import cupy

    views = [None if w is None else view(w) for w in weights]
    allocator = cupy.get_default_memory_pool().malloc if kept else allocate
    with native_stream(weights[0].get_device()), cupy.cuda.using_allocator(allocator):
        return plan.pack(*views)
