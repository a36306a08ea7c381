"""Automatic CUDA graphs: a call like an earlier one is captured once, and replayed from then on."""

import torch

from .._dispatch_state import current_stream
from . import graphs
from .ends import warn
from .recordings import Recordings, settings
from .training_graphs import settings_of


class Replays(Recordings):
    """The CUDA graphs of a network's calls."""

    limit = 8

    def clear(self):
        """Drop all graphs."""
        with self.lock:
            super().clear()
            # Of each stream: results are copied out before the stream's next replay begins.
            self.memory = {}

    def call(self, sparse, x, mask, outside):
        """Replay a call, or run it; capture it first if it came before."""
        room = failed = None
        with self.lock:
            state = self.state_of(sparse.model, x)
            if state.fit and sparse.capacity is None:
                room = sparse._room(x, mask)
            if state.fit and (room is None or room[1]):
                rows = None if room is None else (None, room[1])  # for other masks, too
                key = (*_key(sparse, x, mask, outside), rows)
                replay, due = self.find(state, key) if self._is_free(x) else (None, False)
                if due:
                    replay, failed = self._captured(sparse, x, mask, outside, rows)
                    if replay is not None:
                        self.keep(state, key, replay)
                if replay is not None:
                    result = replay(x, mask)
                    kind, (count, capacity), total = sparse._last
                    if room is not None:
                        count = room[0]
                    elif isinstance(count, torch.Tensor):
                        count = count.clone()
                    sparse._last = kind, (count, capacity), total
                    return result
        result = sparse._call(x, mask, outside=outside, room=room)
        if failed is not None:  # unlike the call itself
            self.unfit = True
            warn(
                f"a call cannot be replayed as a CUDA graph, {type(failed).__name__}: {failed}; "
                "calls are run one by one from now on, as with replay=False"
            )
        if state.fit:
            self.holds(state)
        return result

    def _captured(self, sparse, x, mask, outside, room):
        """Capture a call; return (its replay, None), or (None, why there is none)."""
        last, place = sparse._last, place_of(x)
        try:
            if place not in self.memory:
                self.memory[place] = self._new_memory(x.device)
            return self._capture(sparse, x, mask, outside, room, self.memory[place]), None
        except Exception as error:
            sparse._last = last
            return None, error

    def _new_memory(self, device):
        """Return memory that the graphs of a stream share."""
        return graphs.new_memory(device)

    def _capture(self, sparse, x, mask, outside, room, memory):
        """Capture a call; return what replays it."""
        return graphs._captured(sparse, x, mask, outside, room, memory)

    def _is_free(self, x):
        """Whether a call may write over the memory of the call before it on its stream."""
        return True


def may_replay(sparse, x, mask, outside):
    """Whether a call that may be recorded is replayed: on a GPU, with nothing that waits for it.

    Without a capacity the number of active blocks is read first, and a graph has room for it.
    """
    if sparse._replays.unfit or isinstance(outside, torch.Tensor):
        return False
    return on_gpu(x, mask)


def on_gpu(x, mask):
    """Whether a call is on a GPU."""
    return x.is_cuda and x.device == mask.device


def place_of(x):
    """Return the device and the stream of a call."""
    return x.device, current_stream(x.get_device()) if x.is_cuda else None


def _key(sparse, x, mask, outside):
    """Return all that a graph depends on besides the network's state and numbers in tensors."""
    outside = sparse.outside if outside is None else outside
    return (
        tuple(x.shape), x.stride(), x.dtype, *place_of(x),
        tuple(mask.shape), mask.stride(), mask.dtype, type(outside), outside,
        *settings_of(sparse, x),
        sparse.block_size, sparse.capacity, type(sparse.capacity), sparse.halo, sparse.break_even,
        *settings(),
    )  # fmt: skip
