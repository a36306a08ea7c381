"""Device scratch that kernels keep between launches: zero when new, never cleared again.

One workspace belongs to one stream, so that launches that could run at the same time never share
one. A launch that is being captured in a CUDA graph gets one of its own, because the graph may be
replayed on any stream.
"""

import numpy as np

_OF_STREAM = {}  # (device, stream) -> array of 8-byte slots
_CAPTURED = []  # workspaces of captured launches: a graph may be replayed as long as it likes


def workspace(xp, slots):
    """Return at least ``slots`` 8-byte slots for a launch on the current stream."""
    if xp is np:
        return np.zeros(slots, np.uint64)
    stream = xp.cuda.get_current_stream()
    if xp.cuda.runtime.streamIsCapturing(stream.ptr):
        _CAPTURED.append(xp.zeros(slots, np.uint64))
        return _CAPTURED[-1]
    key = (xp.cuda.runtime.getDevice(), stream.ptr)
    held = _OF_STREAM.get(key)
    if held is None or held.size < slots:
        held = _OF_STREAM[key] = xp.zeros(max(2048, 2 * slots), np.uint64)
    return held
