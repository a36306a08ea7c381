"""Calls done at once, from a public function to the kernel, because they are like earlier ones.

Checking arguments, spelling options and asking the dispatcher take the calling thread longer than
most kernels run. A call that differs from an earlier one in no more than the contents of tensors
needs none of it. Here such calls are told; every other one goes the whole way.
"""

import marshal

import torch

from ..core.plans import Plans
from ._launches import apart, lay, signature
from ._native import raw_stream
from ._packed import kept_of, learn, unkeep
from ._registry import is_plain, thread_is_plain


class Calls:
    """What is known of the calls of one function, with tensors on the current GPU."""

    def __init__(self):
        self._kept = Plans()

    def find(self, tensors, options, weights=()):
        """Return ``(key, known)`` of a call with an image, or a mask, first among its tensors.

        The key is None where the call must go the whole way: compiled or traced, with anything but
        ordinary tensors, or with weights that are cast, or packed in a graph. It begins with the
        stream and whether gradients are recorded. ``known`` is what :meth:`keep` was told of a call
        with this key, or None.

        Options are told apart by value and type, tensors by shape, dtype, contiguity and alignment;
        weights by identity, unless the first needs a gradient: then they are packed at each call.
        """
        x, nothing = tensors[0], (None, None)
        if not thread_is_plain() or not isinstance(x, torch.Tensor) or not x.is_cuda:
            return nothing
        device, records, parts = x.get_device(), False, []
        if device != torch._C._cuda_getDevice():
            return nothing
        for t in tensors:
            if t is not None:
                if not is_plain(t):
                    return nothing
                records = records or t.requires_grad
            parts.append(signature(t))
        if weights:
            if torch.is_autocast_enabled("cuda") or torch.cuda.is_current_stream_capturing():
                return nothing
            if getattr(weights[0], "requires_grad", False):  # it may be no tensor
                if not all(w is None or is_plain(w) for w in weights):
                    return nothing
                parts += map(signature, weights)
                records = True
            else:
                parts += map(id, weights)
        try:
            spelled = marshal.dumps(options, 2)
        except ValueError:
            return nothing
        records = records and torch.is_grad_enabled()
        key = (raw_stream(device), records, spelled, *parts)
        known = self._kept.get(key)
        return nothing if known is False else (key, known)

    def keep(self, key, launch, *more):
        """Keep ``(launch, *more)`` for calls with a key of :meth:`find`, or that none was left."""
        self._kept.keep(key, (launch, *more) if launch else False)


def room(like, shape, out, inputs, records):
    """Return what receives a result: new memory, or ``out``.

    None where ``out`` must be written by a copy, because gradients are recorded, or where inputs
    share its memory. A ``shape`` of None is that of ``like``.
    """
    if out is None:  # empty_like takes the calling thread less time, new_empty less with a tuple
        return torch.empty_like(like) if shape is None else like.new_empty(shape)
    return None if records or not apart(out, inputs) else out


def other_shape(result, like):
    """Return the shape of a result as :func:`room` takes it."""
    return None if result.shape == like.shape else tuple(result.shape)


def pointers(*tensors):
    """Return the addresses of tensors; that of None is 0."""
    return [0 if t is None else t.data_ptr() for t in tensors]


class LayerCalls(Calls):
    """The calls of a layer, whose weights are packed for its kernel."""

    def again(self, key, known, x, weights, counts, indices, base, out, *more):
        """Do a call that is known; return its result, or None where it must go the whole way.

        ``more`` is what the kernel takes between the weights and the list of blocks: null pointers.
        """
        stream, records = key[:2]
        launch, shape, kept, _ = known
        # What is kept of these very tensors was packed of plain ones.
        if kept is not None and not kept.is_of(weights):
            return None
        y = room(x, shape, out, (x, counts, indices, *weights), records)
        if y is None or not lay(y, base, new=out is None):
            return None
        if kept is not None:
            packed = kept.packed.data.ptr
        else:
            unkeep(weights)
            memory = x.new_empty((launch.pack.nbytes,), dtype=torch.uint8)
            packed = memory.data_ptr()
            launch.pack.launch.on(stream, (*pointers(*weights), packed))
        active = counts.data_ptr(), indices.data_ptr()
        launch.run.on(stream, (x.data_ptr(), packed, *more, *active, y.data_ptr()))
        if out is not None:
            torch.autograd.graph.increment_version(out)
        return y

    def keep(self, key, launch, x, y, weights, options):
        """Keep the launch of a call with such a result, and the operator's options."""
        kept = None
        if launch and not learn(weights):
            kept = kept_of(launch, weights)
        elif launch and not (weights[0].requires_grad and _readable(weights, launch.pack.kernels)):
            launch = None
        super().keep(key, launch, other_shape(y, x), kept, options)


def _readable(weights, kernels):
    """Whether a kernel that packs can read weights where they are, and as they are."""
    return all(
        w is None or (w.is_contiguous() and (number < kernels or w.dtype is torch.float32))
        for number, w in enumerate(weights)
    )
