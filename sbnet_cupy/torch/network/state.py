"""What recordings of a network's calls were made of: has it changed?"""

import collections
import enum
import functools
import itertools
import logging
import numbers
import operator
import threading
import types

import numpy as np
import torch

from .._dispatch_state import HOOKS
from .tensor import StackTensor

KEPT_DICTS = ("_parameters", "_buffers", "_modules")
_MOST_ITEMS = 4096  # in what modules keep: with more, each call would take long to compare them
_BYTES_OF_AN_ITEM = 16  # of an array, which are compared in the time of an item
_NUMBERS = (int, float, bool, str, bytes)
_CONTAINERS = (list, dict, set, collections.deque, np.ndarray)
_FIXED = (tuple, frozenset)  # whose items may change alone
_METHODS = (types.MethodType, types.BuiltinFunctionType)
_SHOWN = (
    *_CONTAINERS, *_FIXED, *_METHODS, types.FunctionType, functools.partial, types.SimpleNamespace,
)  # fmt: skip
_CLOSED = (  # which hold nothing that changes, or whose insides are not looked at
    *_NUMBERS, type(None), numbers.Number, enum.Enum, range, slice, np.dtype, np.generic, np.ufunc,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
    types.ModuleType, logging.Logger, type(threading.Lock()), type(threading.RLock()),
)  # fmt: skip
_CAN_CHANGE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that Python code has made, most often
_GIVEN = frozenset(vars(torch.nn.Module()))
_COMPARED = ("training", *KEPT_DICTS)  # of those that are given
_version_of = torch.Tensor._version.__get__


class State:
    """What a graph or a tape was made of: the modules' attributes, also what is in lists, dicts,
    arrays and objects that they keep, and what variables functions hold; attributes of the classes
    of modules and objects, but for PyTorch's own; and the versions of their tensors.

    Each call asks whether it still holds, so all that is compared is looked up without a loop of
    Python's: of attributes that PyTorch gives every module only those that a call may depend on.
    A network is not ``fit`` for graphs and tapes where that is not all: where modules have hooks,
    keep more than can be compared in a short time, or objects that change where Python does not
    see it, as generators of random numbers do.

    With ``tensors=False`` parameters and buffers may become others. Of items that modules keep no
    more than ``most`` are compared.
    """

    hooks_of = HOOKS

    def __init__(self, model, tensors=True, most=_MOST_ITEMS):
        self.model, modules = model, list(model.modules())
        self.kept, inner, more, classes, is_all = _contents(modules, most)
        self.classes = list(map(vars, classes))
        modules += more
        self.modules = [m for m in modules if all(name in vars(m) for name in _COMPARED)]
        self.attributes = [vars(module) for module in self.modules]
        self.dicts = [d[name] for d in self.attributes for name in KEPT_DICTS]
        self.lengths = self._lengths()
        self.getters = [_getter(d) for d in self.attributes]
        compared = KEPT_DICTS if tensors else ("_modules",)
        self.filled = [d[name] for d in self.attributes for name in compared if d[name]]
        self.held = list(self._values())  # alive, so that no other object has their identity
        self.tensors = [t for d in self.dicts for t in d.values() if isinstance(t, torch.Tensor)]
        loose = [t for d in self.attributes for t in d.values() if isinstance(t, torch.Tensor)]
        # An activation that a call has left there has no memory, and each call leaves another.
        self.tensors += [t for t in (*loose, *inner) if not isinstance(t, StackTensor)]
        self.hooks = [d[name] for d in self.attributes for name in self.hooks_of]
        self.hooked = any(self.hooks)
        self.device = None  # of the network, once it was checked
        self.items = [_items(content) for content in self.kept]
        self.fit = is_all and not self.hooked
        if self.modules != modules:  # those of TorchScript keep what they are made of elsewhere
            self.fit = False
        try:
            self.versions = self._versions()
        except (RuntimeError, ValueError):  # no pointer: sparse or lazy; no version: of inference
            self.fit, self.versions = False, None

    def _lengths(self):
        return list(map(len, itertools.chain(self.attributes, self.dicts, self.classes)))

    def _values(self):
        own = map(operator.call, self.getters, self.attributes)
        kept = map(dict.values, self.filled), map(types.MappingProxyType.values, self.classes)
        return itertools.chain.from_iterable(itertools.chain(own, *kept))

    def _versions(self):
        return list(map(torch.Tensor.data_ptr, self.tensors)), list(map(_version_of, self.tensors))

    def holds(self, model=None):
        """Whether nothing has changed that can be seen; see :meth:`looks_alike`."""
        if not self.looks_alike(model):
            return False
        return self.versions is None or self._versions() == self.versions

    def looks_alike(self, model=None):
        """Whether all attributes are the same; numbers in tensors may have changed.

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


def _contents(modules, most):
    """Look through what modules keep.

    Returns
    -------
    values, tensors, modules, classes : lists
        Values whose insides may change while names stay bound to them, also inner ones, the
        tensors and modules that PyTorch does not know of, and the classes of all.
    is_all : bool
        Whether these are all, and there is not more than is compared in a short time.
    """
    left = [value for module in modules for value in (type(module), *_own(module))]
    of_classes = []  # of them alone, which libraries keep much in that no call changes
    seen, count, is_all = set(map(id, modules)), 0, True
    values, tensors, more, classes = [], [], [], []
    while left or of_classes:
        value, owned = (left.pop(), True) if left else (of_classes.pop(), False)
        if id(value) in seen or _is_closed(value):
            continue
        seen.add(id(value))
        if isinstance(value, type):
            new = [c for c in value.__mro__ if c not in classes and not _is_given(c)]
            classes += new
            count += sum(len(vars(c)) for c in new)
            of_classes += [inner for c in new for inner in _own_of_class(c)]
        elif isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, torch.nn.Module):
            new = [m for m in value.modules() if m is value or id(m) not in seen]
            seen.update(map(id, new))
            more += new
            left += [inner for module in new for inner in (type(module), *_own(module))]
        elif not _shows(value) or count + _size(value) > most:
            is_all = is_all and not owned
        else:
            count += _size(value)
            if not isinstance(value, _FIXED):
                values.append(value)
            inner = [item for _, item in _items(value)]
            if owned:
                left += [type(value), *inner]
            else:
                of_classes += inner
    return values, tensors, more, classes, is_all and count <= most


def _is_closed(value):
    """Whether nothing that a value holds is looked at."""
    if isinstance(value, types.FunctionType):
        return not value.__closure__ or _is_torchs(value)
    return isinstance(value, _CLOSED)


def _is_torchs(value):
    return str(value.__module__).partition(".")[0] == "torch"


def _is_given(cls):
    """Whether a class is one of PyTorch's, or of those to which nothing can be assigned."""
    return not cls.__flags__ & _CAN_CHANGE or _is_torchs(cls)


def _own_of_class(cls):
    """Return what a class holds that is data, and may change inside."""
    named = [v for name, v in vars(cls).items() if not name.startswith("__")]
    return [v for v in named if isinstance(v, type) or not hasattr(v, "__get__")]


def _size(value):
    """Return about how many items of a list take as long to compare as what a value holds."""
    if isinstance(value, np.ndarray):
        return value.size if value.dtype.hasobject else value.nbytes // _BYTES_OF_AN_ITEM
    return len(value) if isinstance(value, (*_CONTAINERS, *_FIXED)) else len(_items(value))


def _shows(value):
    """Whether attributes and items are all that a value holds: copies would need no more."""
    if isinstance(value, _SHOWN):
        return True
    kind = type(value)
    if kind.__eq__ is not object.__eq__ and _has_hash(value):  # by value: it does not change
        return True
    if (kind.__reduce__, kind.__reduce_ex__) != (object.__reduce__, object.__reduce_ex__):
        return False
    try:
        object.__reduce_ex__(value, 2)
    except Exception:  # it cannot be copied, or says itself how
        return False
    return True


def _has_hash(value):
    try:
        hash(value)
    except Exception:
        return False
    return True


def _items(value):
    """Return what a value holds, each with a name or None: attributes, also in slots, and items.

    Of a function these are the variables of others that it uses.
    """
    if isinstance(value, _METHODS):
        return [(None, value.__self__)]
    if isinstance(value, types.FunctionType):
        return [(None, _in_cell(cell)) for cell in value.__closure__ or ()]
    items = []
    if type(value) not in _CONTAINERS:
        state = object.__getstate__(value)  # of attributes, or a pair: of those in slots, too
        for names in state if isinstance(state, tuple) else (state,):
            items += (names or {}).items()
    if isinstance(value, dict):
        return [*items, *value.items()]
    if isinstance(value, np.ndarray):
        inside = value.flat if value.dtype.hasobject else [value.tobytes()]
        inside = (str(value.shape), value.dtype.str, *inside)
        return [*items, *((None, item) for item in inside)]
    if isinstance(value, functools.partial):
        inside = (value.func, value.args, value.keywords)
        return [*items, *((None, item) for item in inside)]
    if isinstance(value, (*_CONTAINERS, *_FIXED)):
        return [*items, *((None, item) for item in value)]
    return items


def _in_cell(cell):
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return None


def _are_same(now, then):
    return len(now) == len(then) and all(
        j == k and (a is b or (type(a) in _NUMBERS and type(a) is type(b) and a == b))
        for (j, a), (k, b) in zip(now, then, strict=True)
    )
