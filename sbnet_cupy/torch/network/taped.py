"""Calls like earlier ones on a CPU: recorded once, and run again from the tape."""

import collections
import threading
from types import ModuleType

import torch
from torch.utils._pytree import tree_map

from .ends import check_call, check_outside, finished
from .replay import State, settings, watched
from .tape import Changed, Tape

_LIMIT = 8  # tapes of a network
_SEEN = 64  # calls of which it is remembered how often they came
_MOST_ITEMS = 4096  # in what modules keep: with more, each call would take long to compare them
_NUMBERS = (int, float, bool, str)
_CONTAINERS = (list, tuple, dict, set, collections.OrderedDict, collections.defaultdict)
_GIVEN = frozenset(vars(torch.nn.Module()))
_CHANGES = 3  # calls that change the network before none is recorded any more


class _State(State):
    """State that also holds what is in lists, dicts and plain objects that a module keeps."""

    def __init__(self, model):
        super().__init__(model)
        self.kept = list(_contents(v for d in self.attributes for v in _own(d)))
        self.items = [_items(content) for content in self.kept]
        self.fit = self.fit and sum(map(len, self.items)) <= _MOST_ITEMS

    def holds(self):
        """Whether nothing has changed."""
        return super().holds() and all(map(_are_same, map(_items, self.kept), self.items))


def _contents(values):
    """Yield the contents of values, and of what is in them, and so on, each once."""
    left, seen, count = list(values), set(), 0
    while left and count <= _MOST_ITEMS:
        content = _content(left.pop())
        if content is not None and id(content) not in seen:
            seen.add(id(content))
            yield content
            inner = [value for _, value in _items(content)]
            left += inner
            count += len(inner)


def _own(attributes):
    """Return the attributes that PyTorch does not give each module."""
    return [value for name, value in attributes.items() if name not in _GIVEN]


def _content(value):
    """Return the list, dict or set that may change while a name stays bound to it, or a tuple."""
    if type(value) in _CONTAINERS:
        return value
    if isinstance(value, torch.Tensor | torch.nn.Module | ModuleType) or callable(value):
        return None
    return getattr(value, "__dict__", None)


def _items(content):
    return list(content.items()) if isinstance(content, dict) else [(None, v) for v in content]


def _are_same(now, then):
    return len(now) == len(then) and all(
        j == k and (a is b or (type(a) in _NUMBERS and type(a) is type(b) and a == b))
        for (j, a), (k, b) in zip(now, then, strict=True)
    )


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
            return self._watched_call(sparse, state, x, mask, outside)
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
                self.state = _State(sparse.model)
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

    def _watched_call(self, sparse, state, x, mask, outside):
        """Run a call, and count it if it changed the network."""
        result = sparse._call(x, mask, outside=outside)
        self._holds(state)
        return result

    def _holds(self, state):
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
