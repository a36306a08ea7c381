"""Device scratch that kernels keep between launches: zeroed when allocated, never cleared again.

Each stream has its own workspace, so launches that could run at the same time never share one. A
launch that is captured in a CUDA graph gets its own for good, because the graph may be replayed at
any time on any stream. A workspace outlives the call, so it is allocated by CuPy's own allocator,
whatever allocator is current.
"""

import threading

import numpy as np

_LOCK = threading.Lock()  # so that no two graphs get the same piece of the slab
_SLAB_SLOTS = 1 << 17  # 1 MiB, zeroed at the first launch on a device
_OF_STREAM = {}  # (device, stream) -> array of 8-byte slots
_SLAB = {}  # device -> zeroed array; captured launches take pieces of it for good
_TAKEN = {}  # device -> number of slots of the slab that are taken
_KEPT = []  # memory of graphs that were captured when the slab was full; never freed


def workspace(xp, slots):
    """Return at least ``slots`` 8-byte slots for a launch on the current stream."""
    if xp is np:
        return np.zeros(slots, np.uint64)
    device = xp.cuda.runtime.getDevice()
    stream = xp.cuda.get_current_stream(device).ptr
    if xp.cuda.runtime.streamIsCapturing(stream):
        with _LOCK:
            return _captured(xp, device, slots)
    held = _OF_STREAM.get((device, stream))
    if held is None or held.size < slots:
        with _LOCK:
            if device not in _SLAB:
                _SLAB[device], _TAKEN[device] = _zeros(xp, _SLAB_SLOTS), 0
            held = _OF_STREAM[device, stream] = _zeros(xp, max(2048, 2 * slots))
    return held


def release():
    """Free all scratch. The device must be idle, and no captured graph may be replayed again."""
    for kept in (_OF_STREAM, _SLAB, _TAKEN, _KEPT):
        kept.clear()


def _captured(xp, device, slots):
    """Take a piece of the slab, or if it is full, new memory that the graph itself clears."""
    taken = _TAKEN.get(device, _SLAB_SLOTS)
    if taken + slots > _SLAB_SLOTS:
        _KEPT.append(_zeros(xp, slots))
        return _KEPT[-1]
    _TAKEN[device] = taken + -(-slots // 32) * 32
    return _SLAB[device][taken : taken + slots]


def _zeros(xp, slots):
    """Allocate zeroed slots with CuPy's own allocator."""
    with xp.cuda.using_allocator():
        return xp.zeros(slots, np.uint64)
