"""What recordings of a network's calls were made of: has it changed?"""

import collections
import itertools
import operator
import types

import numpy as np
import torch

from .._dispatch_state import HOOKS
from .tensor import StackTensor

_KEPT_DICTS = ("_parameters", "_buffers", "_modules")
_MOST_ITEMS = 4096  # in what modules keep: with more, each call would take long to compare them
_NUMBERS = (int, float, bool, str, bytes)
_CONTAINERS = (list, dict, set, collections.deque, np.ndarray)
_CLOSED = (  # whose insides are not looked at
    *_NUMBERS, type(None), torch.Tensor, torch.nn.Module, type, types.ModuleType,
    types.FunctionType, types.BuiltinFunctionType,
)  # fmt: skip
_GIVEN = frozenset(vars(torch.nn.Module()))
_COMPARED = ("training", *_KEPT_DICTS)  # of those that are given
_version_of = torch.Tensor._version.__get__


class State:
    """What a graph or a tape was made of: the modules' attributes, also what is in lists, dicts,
    arrays and objects that they keep, and the versions of their tensors.

    Each call asks whether it still holds, so all that is compared is looked up without a loop of
    Python's: of attributes that PyTorch gives every module only those that a call may depend on.
    """

    def __init__(self, model):
        self.model, modules = model, list(model.modules())
        self.modules = [m for m in modules if all(name in vars(m) for name in _COMPARED)]
        self.attributes = [vars(module) for module in self.modules]
        self.dicts = [d[name] for d in self.attributes for name in _KEPT_DICTS]
        self.lengths = self._lengths()
        self.getters = [_getter(d) for d in self.attributes]
        self.filled = [d for d in self.dicts if d]
        self.held = list(self._values())  # alive, so that no other object has their identity
        self.tensors = [t for d in self.dicts for t in d.values() if isinstance(t, torch.Tensor)]
        loose = [t for d in self.attributes for t in d.values() if isinstance(t, torch.Tensor)]
        # An activation that a call has left there has no memory, and each call leaves another.
        self.tensors += [t for t in loose if not isinstance(t, StackTensor)]
        self.hooks = [d[name] for d in self.attributes for name in HOOKS]
        self.hooked = any(self.hooks)
        self.kept = list(_contents(v for module in self.modules for v in _own(module)))
        self.items = [_items(content) for content in self.kept]
        self.fit = not self.hooked and not any(t.is_inference() for t in self.tensors)
        self.fit = self.fit and sum(map(len, self.items)) <= _MOST_ITEMS
        if self.modules != modules:  # those of TorchScript keep what they are made of elsewhere
            self.fit = False
        self.versions = self._versions() if self.fit else None

    def _lengths(self):
        return list(map(len, itertools.chain(self.attributes, self.dicts)))

    def _values(self):
        own = map(operator.call, self.getters, self.attributes)
        return itertools.chain.from_iterable(itertools.chain(own, map(dict.values, self.filled)))

    def _versions(self):
        return list(map(torch.Tensor.data_ptr, self.tensors)), list(map(_version_of, self.tensors))

    def holds(self, model=None):
        """Whether nothing has changed; see :meth:`is_bound_alike` for ``model``."""
        same = self.is_bound_alike(model)
        return same and (not self.fit or self._versions() == self.versions)

    def is_bound_alike(self, model=None):
        """Whether all attributes are the same objects; numbers in tensors may have changed.

        A ``model`` that is given has to be the network that this is the state of.
        """
        if model is not None and model is not self.model:
            return False
        if self._lengths() != self.lengths or any(self.hooks) != self.hooked:
            return False
        try:
            if not all(map(operator.is_, self._values(), self.held)):
                return False
        except KeyError:  # an attribute is gone, and another there
            return False
        return all(map(_are_same, map(_items, self.kept), self.items))


def _getter(attributes):
    """Return what takes from a module's attributes all that a call may depend on, as a tuple."""
    return operator.itemgetter(*_COMPARED, *(name for name in attributes if name not in _GIVEN))


def _own(module):
    """Return the attributes that PyTorch does not give a module."""
    theirs = type(module).__module__.startswith("torch.nn.")  # whose private lists do not change
    given = (n for n in vars(module) if n not in _GIVEN and not (theirs and n.startswith("_")))
    return [vars(module)[name] for name in given]


def _contents(values):
    """Yield values whose insides may change while names stay bound to them, also inner ones."""
    left, seen, count = list(values), set(), 0
    while left and count <= _MOST_ITEMS:
        value = left.pop()
        if isinstance(value, _CLOSED) or id(value) in seen:
            continue
        seen.add(id(value))
        inner = _items(value)
        is_open = isinstance(value, _CONTAINERS) or hasattr(value, "__dict__") or inner
        if is_open and not isinstance(value, tuple):
            yield value
        left += [item for _, item in inner]
        count += len(inner)


def _items(value):
    """Return what a value holds, each with a name or None: attributes, also in slots, and items."""
    items = []
    if type(value) not in _CONTAINERS:
        state = object.__getstate__(value)  # of attributes, or a pair: of those in slots, too
        for names in state if isinstance(state, tuple) else (state,):
            items += (names or {}).items()
    if isinstance(value, dict):
        return [*items, *value.items()]
    if isinstance(value, np.ndarray):
        return [*items, (None, value.tobytes())]
    if isinstance(value, (*_CONTAINERS, tuple)):
        return [*items, *((None, item) for item in value)]
    return items


def _are_same(now, then):
    return len(now) == len(then) and all(
        j == k and (a is b or (type(a) in _NUMBERS and type(a) is type(b) and a == b))
        for (j, a), (k, b) in zip(now, then, strict=True)
    )
