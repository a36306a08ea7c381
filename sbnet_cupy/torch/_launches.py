"""CUDA calls that look like earlier ones: at once the launch that the core left, on addresses.

The core checks a call and prepares its launch once, for all calls alike (``ops/_plans.py``). Views
of tensors are needed to find it there, and they take longer than all the rest. Here it is found by
the tensors themselves, under a key of the same parts: device, shapes, dtypes, contiguity, alignment
and options, never contents. What this does not cover goes to the core, with its checks and words.
"""

import marshal
import weakref
from functools import partial

import torch

from ..ops._plans import Plans
from ..ops._workspace import workspace
from ._native import compute, native_stream, raw_stream, view


class Launches:
    """The launches of one operator.

    ``launch_of(*views, options=)`` gives what an earlier call of the core on such arrays left, or
    None.
    """

    def __init__(self, launch_of):
        self._launch_of, self._kept = launch_of, Plans()

    def find(self, tensors, options, weights=()):
        """Return the launch kept for tensors like these on the current device; none is falsy.

        The kernel takes the memory of ``tensors``; ``weights`` are packed for it.
        """
        first = tensors[0]
        if not first.is_cuda or first.get_device() != torch.cuda.current_device():
            return None
        return self._kept.get(_key((*tensors, *weights), options))

    def keep(self, tensors, options, weights=()):
        """Keep the launch that the core has left for these tensors, or that it left none."""
        if not tensors[0].is_cuda:
            return
        key = _key((*tensors, *weights), options)
        if self._kept.get(key) is None:
            launch = False
            if all(t is None or t.is_contiguous() for t in tensors):
                views = [None if t is None else view(t) for t in (*tensors, *weights)]
                launch = self._launch_of(*views, options=options) or False
            self._kept.keep(key, launch)


def _key(tensors, options):
    """Return the key of a call; None where options cannot be spelled out."""
    try:
        spelled = marshal.dumps(options, 2)
    except ValueError:
        return None
    return (tensors[0].get_device(), *map(_signature, tensors), spelled)


def _signature(tensor):
    if tensor is None:
        return None
    return tensor.shape, tensor.dtype, tensor.is_contiguous(), tensor.data_ptr() & 15


def run(kernel, *tensors):
    """Launch on the addresses of tensors, on torch's current stream of the first one's device."""
    stream = raw_stream(tensors[0].get_device())
    kernel.on(stream, [0 if t is None else t.data_ptr() for t in tensors])


def run_with_workspace(launch, *tensors):
    """Launch reduce_mask, whose last array is the workspace of torch's current stream."""
    import cupy

    device = tensors[0].get_device()
    with native_stream(device):
        scratch = workspace(cupy, launch.slots)
    addresses = [t.data_ptr() for t in tensors]
    launch.run.on(raw_stream(device), [*addresses, scratch.data.ptr])


def apart(out, tensors):
    """Whether ``out`` surely shares no memory with contiguous ``tensors``."""
    start = out.data_ptr()
    end = start + out.nbytes
    for tensor in tensors:
        if tensor is not None:
            low = tensor.data_ptr()
            if low < end and start < low + tensor.nbytes:
                return False
    return True


_PACKED = {}  # what was packed, how, for which stream -> (weak references, state, packed)


def packed(launch, *weights):
    """Return the weights as the kernel of ``launch`` reads them.

    Those that need no gradient are packed again only after a change: what an optimizer trains is
    packed at each call. A change is one of memory or of autograd's version, as every operation of
    PyTorch leaves it; raw writes must call ``torch.autograd.graph.increment_version``. What is
    packed lives as long as the weights do, on the stream that it was packed on. Within a CUDA graph
    it is packed in the graph, for the weights of each replay.
    """
    given = [w for w in weights if w is not None]
    if torch.cuda.is_current_stream_capturing() or any(
        w.requires_grad or w.is_inference() for w in given
    ):
        return compute(launch.pack, weights[0], *weights)
    key = (type(launch), launch.how, raw_stream(given[0].get_device()), *map(id, weights))
    state = [(w.data_ptr(), w._version) for w in given]
    held = _PACKED.get(key)
    if held is None or held[1] != state:
        made = compute(launch.pack, weights[0], *weights)
        drop = partial(_drop, key)
        held = _PACKED[key] = [weakref.ref(w, drop) for w in given], state, made
    return held[2]


def _drop(key, reference):
    """Forget what was packed of a tensor that is gone."""
    _PACKED.pop(key, None)
