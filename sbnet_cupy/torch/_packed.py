"""Weights as the kernels of layers read them: packed once, and again when they have changed."""

import weakref
from functools import partial

import torch

from ._native import allocate, native_stream, raw_stream, view

PACKED = {}  # how, for which stream and tensors -> (weak references, state, what was packed)


def packed(launch, *weights):
    """Return the weights as the kernel of ``launch`` reads them, a CuPy array.

    Weights that need no gradient are packed again only after a change: one of their memory or of
    autograd's version, as PyTorch's operations leave it. After any other write, call
    ``torch.autograd.graph.increment_version``. Those that need a gradient are packed at each call:
    what trains them need not leave a version, as PyTorch's fused optimizers do not. So are all
    within a CUDA graph, which packs them at each replay.
    """
    given = [w for w in weights if w is not None]
    # Inference tensors have no version.
    changing = learn(given) or any(w.is_inference() for w in given)
    if changing or torch.cuda.is_current_stream_capturing():
        return _pack(launch, weights)
    key, now = place(launch, weights), state(weights)
    held = PACKED.get(key)
    if held is None or held[1] != now:
        forget = partial(_forget, key)
        references = [weakref.ref(w, forget) for w in given]
        held = PACKED[key] = references, now, _pack(launch, weights, kept=True)
    return held[2]


def place(launch, weights):
    """Return where these tensors are kept as ``launch`` packs them.

    What is kept is of one stream: it is written, read and given back in the stream's order.
    """
    return (type(launch), launch.how, raw_stream(weights[0].get_device()), *map(id, weights))


def learn(weights):
    """Whether some of the weights need a gradient."""
    return True in [w is not None and w.requires_grad for w in weights]


def state(weights):
    """Return what tells that weights have changed, or have come to need a gradient."""
    return [
        None if w is None else (w.data_ptr(), w._version, w.shape, w.requires_grad) for w in weights
    ]


def _forget(key, reference):
    """Drop what was packed of a tensor that is gone."""
    PACKED.pop(key, None)


def _pack(launch, weights, kept=False):
    """Pack now, into memory of torch's; what is kept beyond the call is CuPy's own, as scratch."""
    import cupy

    views = [None if w is None else view(w) for w in weights]
    allocator = cupy.get_default_memory_pool().malloc if kept else allocate
    with native_stream(weights[0].get_device()), cupy.cuda.using_allocator(allocator):
        return launch.pack(*views)
