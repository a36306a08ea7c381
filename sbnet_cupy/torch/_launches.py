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
from ._native import allocate, native_stream, raw_stream, view
from ._registry import is_plain, thread_is_plain


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
        return self._kept.get(_key(tensors, options, weights))

    def keep(self, tensors, options, weights=()):
        """Keep the launch that the core has left for these tensors, or that it left none."""
        if not tensors[0].is_cuda:
            return
        key = _key(tensors, options, weights)
        if self._kept.get(key) is None:
            launch = False
            if all(t is None or t.is_contiguous() for t in tensors):
                views = [None if t is None else view(t) for t in (*tensors, *weights)]
                launch = self._launch_of(*views, options=options) or False
            self._kept.keep(key, launch)


def _key(tensors, options, weights):
    """Return the key of a call; None where options cannot be spelled out."""
    try:
        spelled = marshal.dumps(options, 2)
    except ValueError:
        return None
    kinds = [None if w is None else (w.shape, w.dtype, w.get_device()) for w in weights]
    return (spelled, *map(_signature, tensors), *kinds)


def _signature(tensor):
    if tensor is None:
        return None
    contiguous, alignment = tensor.is_contiguous(), tensor.data_ptr() & 15
    return tensor.shape, tensor.dtype, tensor.get_device(), contiguous, alignment


def run(kernel, *arrays):
    """Launch on tensors, or CuPy arrays, on torch's current stream of the first one's device."""
    stream = raw_stream(arrays[0].get_device())
    kernel.on(stream, [_address(array) for array in arrays])


def _address(array):
    if array is None:
        return 0
    return array.data_ptr() if isinstance(array, torch.Tensor) else array.data.ptr


def scratch_of_stream(like, slots):
    """Return the workspace of torch's current stream, a CuPy array."""
    import cupy

    with native_stream(like.get_device()):
        return workspace(cupy, slots)


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


def lay(out, base):
    """Fill ``out`` with the base, or 0; return False where they overlap, and leave it as it is."""
    from cupy.cuda import runtime

    to, size, stream = out.data_ptr(), out.nbytes, raw_stream(out.get_device())
    if base is None:
        runtime.memsetAsync(to, 0, size, stream)
    elif base.data_ptr() != to:
        if not apart(out, (base,)):
            return False
        runtime.memcpyAsync(to, base.data_ptr(), size, runtime.memcpyDeviceToDevice, stream)
    return True


class Calls:
    """Calls of one layer that pass the same weights and otherwise the like of an earlier call.

    They are done at once, with nothing checked, resolved or packed again: those on a GPU for which
    the dispatcher has nothing to do, that record no gradient and are not captured.
    """

    def __init__(self):
        self._kept = Plans()  # key -> launch, shape of the result, where the weights are packed

    def __call__(self, key, x, weights, counts, indices, base, out, *more):
        """Do a call; return its result, or None if there was none like it.

        ``more`` is what the kernel takes between the weights and the list of blocks: null pointers.
        """
        found = self._find(key, weights)
        if found is None:
            return None
        launch, shape, packed = found
        given = out is not None
        if not given:  # empty_like takes the calling thread half as long
            out = torch.empty_like(x) if shape == x.shape else x.new_empty(shape)
        elif not apart(out, (x, counts, indices, *weights)):
            return None
        if not lay(out, base):
            return None
        active = counts.data_ptr(), indices.data_ptr()
        launch.run.on(key[1], (x.data_ptr(), packed.data.ptr, *more, *active, out.data_ptr()))
        if given:
            torch.autograd.graph.increment_version(out)
        return out

    @staticmethod
    def key(tensors, weights, options):
        """Return the key of a call with ``tensors``, an image first, or None if it is not plain."""
        x = tensors[0]
        if not thread_is_plain() or not is_plain(x) or not x.is_cuda:
            return None
        device, learns = x.get_device(), torch.is_grad_enabled()
        if (
            device != torch.cuda.current_device()
            or torch.is_autocast_enabled("cuda")
            or torch.cuda.is_current_stream_capturing()
        ):
            return None
        for t in tensors:
            if t is not None and ((learns and t.requires_grad) or not (t is x or is_plain(t))):
                return None
        try:
            spelled = marshal.dumps(options, 2)
        except ValueError:
            return None
        return (spelled, raw_stream(device), *map(_signature, tensors), *map(id, weights))

    def _find(self, key, weights):
        """Return the launch, the shape of the result and the packed weights, if all are kept."""
        kept = self._kept.get(key)
        if kept is None:
            return None
        launch, shape, place = kept
        held = _PACKED.get(place)
        # What is packed of these very tensors was packed of plain ones.
        if held is None or held[1] != _state(weights):
            return None
        return launch, shape, held[2]

    def keep(self, key, launch, result, weights):
        """Keep the launch of a call with such a result."""
        if key is not None and launch:
            self._kept.keep(key, (launch, result.shape, _place(launch, weights)))


_PACKED = {}  # how, for which stream and tensors -> (weak references, state, what was packed)


def packed(launch, *weights):
    """Return the weights as the kernel of ``launch`` reads them, a CuPy array.

    Weights that need no gradient are packed again only after a change: one of their memory or of
    autograd's version, as PyTorch's operations leave it. After any other write, call
    ``torch.autograd.graph.increment_version``. Those that need a gradient are packed at each call:
    what trains them need not leave a version, as PyTorch's fused optimizers do not. So are all
    within a CUDA graph, which packs them at each replay.
    """
    state = None if torch.cuda.is_current_stream_capturing() else _state(weights)
    if state is None:
        return _pack(launch, weights)
    key = _place(launch, weights)
    held = _PACKED.get(key)
    if held is None or held[1] != state:
        forget = partial(_forget, key)
        references = [weakref.ref(w, forget) for w in weights if w is not None]
        held = _PACKED[key] = references, state, _pack(launch, weights, kept=True)
    return held[2]


def _place(launch, weights):
    """Return where these tensors are kept as ``launch`` packs them.

    What is kept is of one stream: it is written, read and given back in the stream's order.
    """
    return (type(launch), launch.how, raw_stream(weights[0].get_device()), *map(id, weights))


def _state(weights):
    """Return what tells that tensors have changed; None where nothing does."""
    state = []
    for w in weights:
        if w is not None:
            if w.requires_grad or w.is_inference():
                return None
            state += (w.data_ptr(), w._version, w.shape)
    return state


def _forget(key, reference):
    """Drop what was packed of a tensor that is gone."""
    _PACKED.pop(key, None)


def _pack(launch, weights, kept=False):
    """Pack now, into memory of torch's; what is kept beyond the call is CuPy's own, as scratch."""
    import cupy

    views = [None if w is None else view(w) for w in weights]
    allocator = cupy.get_default_memory_pool().malloc if kept else allocate
    with native_stream(weights[0].get_device()), cupy.cuda.using_allocator(allocator):
        return launch.pack(*views)
