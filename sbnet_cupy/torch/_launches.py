"""CUDA calls that look like earlier ones: at once the launch that the core left, on addresses.

The core checks a call and prepares its launch once, for all calls alike (``core/plans.py``). Views
of tensors are needed to find it there, and they take longer than all the rest. Here it is found by
the tensors themselves, under a key of the same parts: device, shapes, dtypes, contiguity, alignment
and options, never contents. What this does not cover goes to the core, with its checks and words.
"""

import functools
import marshal

import torch

from ..core.copy_image import launch_of_copy
from ..core.plans import Plans
from ..core.workspace import workspace
from ._native import native_stream, raw_stream, view


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
    return (spelled, *map(signature, tensors), *kinds)


def signature(tensor):
    """Return what a launch depends on of a tensor, or None."""
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


@functools.cache
def _runtime():
    from cupy.cuda import runtime

    return runtime


def lay(out, base, new=False):
    """Fill ``out`` with the base, or 0; return False where they overlap, and leave it as it is.

    ``new`` memory overlaps nothing.
    """
    runtime, device = _runtime(), out.get_device()
    to, size, stream = out.data_ptr(), out.nbytes, raw_stream(device)
    if base is None:
        runtime.memsetAsync(to, 0, size, stream)
    elif base.data_ptr() != to:
        if not new and not apart(out, (base,)):
            return False
        source = base.data_ptr()
        launch = launch_of_copy(device, size, source | to)
        if launch is None:
            runtime.memcpyAsync(to, source, size, runtime.memcpyDeviceToDevice, stream)
        else:
            launch.on(stream, (source, to))
    return True
