"""Calls like earlier ones on a CPU: recorded once, and run again from the tape."""

import collections
import threading

import torch
from torch.utils._pytree import tree_map

from .ends import check_call, check_outside, finished
from .replay import State, settings, watched
from .tape import Changed, Tape

_LIMIT = 8  # tapes of a network
_SEEN = 64  # calls of which it is remembered how often they came
_CHANGES = 3  # calls that change the network before none is recorded any more


class Tapes:
    """The tapes of a network's calls.

    A tape is dropped when an attribute of a module was bound anew, or the memory or version of a
    parameter or buffer changed (:class:`~.replay.State`). Threads may run one tape at a time.
    """

    def __init__(self):
        self.lock = threading.Lock()
        self.unfit = False  # calls are not recorded, for good
        self.changes, self.patience = 0, 1
        self.clear()

    def __reduce__(self):
        return Tapes, ()

    def clear(self):
        """Drop all tapes."""
        with self.lock:
            self._clear()

    def _clear(self):
        self.tapes = collections.OrderedDict()
        self.calls = collections.OrderedDict()
        self.state = None

    def call(self, sparse, x, mask, outside):
        """Run a call from its tape, or as usual; record it if it came before."""
        state = self._state(sparse)
        if not state.fit:
            return sparse._call(x, mask, outside=outside)
        mask = check_call(x, mask)
        wanted = check_outside(sparse.outside if outside is None else outside)
        table, counted = sparse._table(x, mask)
        key = _key(sparse, x, table, wanted)
        tape, due = self._found(state, key)
        if sparse._is_compiled(table, x, (), {}) or (tape is None and not due):
            result = sparse._on_table(table, counted, x, wanted)
            self._holds(state)
            return result
        kind = sparse._kind(x, table.whole)
        if tape is not None:
            try:
                result = tape.run(table, x, wanted)
            except Changed:
                self.unfit = True
                return sparse._call(x, mask, outside=outside)
        else:
            result = self._recorded(sparse, state, key, table, x, wanted)
        return sparse._done(result, kind, counted, table)

    def _state(self, sparse):
        """Return what the tapes were made of; without them, if that has changed."""
        with self.lock:
            if self.state is None or not self.state.holds():
                if self.tapes:
                    self.patience = min(2 * self.patience, 1024)
                self._clear()
                self.state = State(sparse.model)
            return self.state

    def _found(self, state, key):
        """Return the tape of such a call or None, and whether one is due to be recorded."""
        with self.lock:
            if self.state is not state:  # another thread has seen a change
                return None, False
            if key in self.tapes:
                self.tapes.move_to_end(key)
                return self.tapes[key], False
            came = self.calls.pop(key, 0)
            self.calls[key] = came + 1
            if len(self.calls) > _SEEN:
                self.calls.popitem(last=False)
            return None, came >= self.patience

    def _holds(self, state):
        """Whether the network is as it was before a call; count the call if it is not."""
        holds = state.holds()
        if not holds:
            with self.lock:
                self.changes += 1
                self.unfit = self.unfit or self.changes >= _CHANGES
        return holds

    def _recorded(self, sparse, state, key, table, x, outside):
        """Run a call as usual, and keep its tape."""
        tape = table.tape = Tape(table, x, outside, state.tensors)
        y = sparse._result(table, x)
        result = tree_map(lambda out: finished(out, outside), y)
        done = tape.finish(result)
        table.tape = None
        if self._holds(state):
            with self.lock:
                if done is None:
                    self.unfit = True
                elif self.state is state:
                    self.tapes[key] = done
                    while len(self.tapes) > _LIMIT:
                        self.tapes.popitem(last=False)
                        self.patience = min(2 * self.patience, 1024)
        return result


def may_tape(sparse, x, mask, args, outside, kwargs):
    """Whether a call may run from a tape: in evaluation, on a CPU, with nothing that looks on."""
    if not sparse.replay or sparse.training or torch.is_grad_enabled() or sparse._tapes.unfit:
        return False
    if args or kwargs or type(x) is not torch.Tensor or type(mask) is not torch.Tensor:
        return False
    if outside is None:
        outside = sparse.outside
    if isinstance(outside, torch.Tensor) and (type(outside) is not torch.Tensor or outside is x):
        return False
    there = x.device.type == mask.device.type == "cpu"
    return there and x.dim() == 4 and x.numel() > 0 and not watched(x)


def _key(sparse, x, table, outside):
    """Return all that a tape depends on besides the network's state and numbers in tensors."""
    if isinstance(outside, torch.Tensor):
        outside = tuple(outside.shape), outside.dtype, outside.device
    return (
        tuple(x.shape), x.stride(), x.dtype, x.is_inference(), type(outside), outside,
        sparse.block_size, table.whole, table.known_live, settings(),
    )  # fmt: skip
