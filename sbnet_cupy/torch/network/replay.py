"""Automatic CUDA graphs: a call like an earlier one is captured once, and replayed from then on."""

import collections
import itertools
import operator
import threading
import warnings
from types import ModuleType

import torch

from .._dispatch_state import current_stream, is_watched
from . import graphs

_LIMIT = 4  # graphs of a network: each has memory for its activations
_SEEN = 64  # calls of which it is remembered how often they came
_CHANGES = 3  # calls that change the network before it is never replayed
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_KEPT_DICTS = ("_parameters", "_buffers", "_modules")
_MOST_ITEMS = 4096  # in what modules keep: with more, each call would take long to compare them
_NUMBERS = (int, float, bool, str)
_CONTAINERS = (list, dict, set, collections.OrderedDict, collections.defaultdict)
_GIVEN = frozenset(vars(torch.nn.Module()))


class Replays:
    """The CUDA graphs of a network's calls.

    A graph repeats what a call did on the device, not its Python code. So it is dropped when an
    attribute of a module was bound anew, or the memory or version of a parameter or buffer changed;
    and a network whose call changes its own attributes or buffers has none.
    """

    def __init__(self):
        self.lock = threading.RLock()
        self.changes = 0  # calls that changed the network's own attributes or buffers
        self.patience = 1  # calls alike before one is captured: doubled when graphs are lost
        self.unfit = False  # calls cannot be replayed, for good
        self.clear()

    def __reduce__(self):
        return Replays, ()

    def clear(self):
        """Drop all graphs."""
        with self.lock:
            self.graphs = collections.OrderedDict()
            self.calls = collections.OrderedDict()
            self.state = None

    def call(self, sparse, x, mask, outside):
        """Replay a call, or run it; capture it first if it came before."""
        with self.lock:
            if self.state is None or not self.state.holds():
                if self.graphs:
                    self._lose_patience()
                self.clear()
                self.state = State(sparse.model)
            state = self.state
            if state.fit:
                key = _key(sparse, x, mask, outside)
                replay = self.graphs.get(key) or self._new(sparse, key, x, mask, outside)
                if replay is not None:
                    self.graphs.move_to_end(key)
                    result = replay(x, mask)
                    kind, (count, capacity), total = sparse._last
                    count = count.clone() if isinstance(count, torch.Tensor) else count
                    sparse._last = kind, (count, capacity), total
                    return result
        result = sparse._call(x, mask, outside=outside)
        if state.fit and not state.holds():
            self.changes += 1
            self.unfit = self.unfit or self.changes >= _CHANGES
        return result

    def _new(self, sparse, key, x, mask, outside):
        """Capture a call that came before; return its replay, or None."""
        came = self.calls.pop(key, 0)
        self.calls[key] = came + 1
        if len(self.calls) > _SEEN:
            self.calls.popitem(last=False)
        if came < self.patience:
            return None
        last = sparse._last
        try:
            replay = graphs._captured(sparse, x, mask, outside)
        except Exception as error:
            self.unfit, sparse._last = True, last
            warnings.warn(
                f"a call cannot be replayed as a CUDA graph, {type(error).__name__}: {error}; "
                "calls are run one by one from now on, as with replay=False",
                RuntimeWarning,
                stacklevel=7,
            )
            return None
        if len(self.graphs) >= _LIMIT:
            self.graphs.popitem(last=False)
            self._lose_patience()
        self.graphs[key] = replay
        return replay

    def _lose_patience(self):
        self.patience = min(2 * self.patience, 1024)


def may_replay(sparse, x, mask, args, outside, kwargs):
    """Whether a call may be replayed: in evaluation, on a GPU, with nothing that looks on."""
    if not sparse.replay or sparse.training or torch.is_grad_enabled() or sparse.capacity is None:
        return False
    if sparse._replays.unfit or args or kwargs or isinstance(outside, torch.Tensor):
        return False
    if type(x) is not torch.Tensor or type(mask) is not torch.Tensor or not _on_gpu(x, mask):
        return False
    return x.dim() == 4 and x.numel() > 0 and not watched(x)


def _on_gpu(x, mask):
    return x.is_cuda and mask.is_cuda and x.device == mask.device


def watched(x):
    """Whether something sees the single functions of a call, or changes them."""
    return (
        is_watched()
        or torch.is_autocast_enabled(x.device.type)
        or (x.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def _key(sparse, x, mask, outside):
    """Return all that a graph depends on besides the network's state and numbers in tensors."""
    outside = sparse.outside if outside is None else outside
    return (
        tuple(x.shape), x.stride(), x.dtype, x.device, tuple(mask.shape), mask.stride(), mask.dtype,
        current_stream(x.get_device()) if x.is_cuda else None, type(outside), outside,
        sparse.block_size, sparse.capacity, type(sparse.capacity), sparse.halo, sparse.break_even,
        *settings(),
    )  # fmt: skip


def settings():
    """Return the settings of PyTorch by which a call may choose how it computes."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    return (
        torch.is_inference_mode_enabled(), torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(), torch.backends.mkldnn.enabled,
        cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32, matmul.allow_tf32,
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
    )  # fmt: skip


class State:
    """What a graph or a tape was made of: the modules' attributes, also what is in lists, dicts and
    plain objects that they keep, and the versions of their tensors.
    """

    def __init__(self, model):
        self.modules = list(model.modules())
        self.attributes = [vars(module) for module in self.modules]
        self.dicts = [d[name] for d in self.attributes for name in _KEPT_DICTS]
        self.held = list(self._values())  # alive, so that no other object has their identity
        self.tensors = [t for d in self.dicts for t in d.values() if isinstance(t, torch.Tensor)]
        loose = [t for d in self.attributes for t in d.values() if isinstance(t, torch.Tensor)]
        self.tensors += loose
        self.hooks = [d[name] for d in self.attributes for name in _HOOKS]
        self.hooked = any(self.hooks)
        self.kept = list(_contents(v for module in self.modules for v in _own(module)))
        self.items = [_items(content) for content in self.kept]
        self.fit = not self.hooked and not any(t.is_inference() for t in self.tensors)
        self.fit = self.fit and sum(map(len, self.items)) <= _MOST_ITEMS
        self.versions = self._versions() if self.fit else None

    def _values(self):
        everything = itertools.chain(self.attributes, self.dicts)
        return itertools.chain.from_iterable(d.values() for d in everything)

    def _versions(self):
        return [(t.data_ptr(), t._version) for t in self.tensors]

    def holds(self):
        """Whether nothing has changed."""
        count = sum(map(len, self.attributes)) + sum(map(len, self.dicts))
        if count != len(self.held) or any(self.hooks) != self.hooked:
            return False
        if not all(map(operator.is_, self._values(), self.held)):
            return False
        if not all(map(_are_same, map(_items, self.kept), self.items)):
            return False
        return not self.fit or self._versions() == self.versions


def _own(module):
    """Return the attributes that PyTorch does not give a module."""
    theirs = type(module).__module__.startswith("torch.nn.")  # whose private lists do not change
    given = (n for n in vars(module) if n not in _GIVEN and not (theirs and n.startswith("_")))
    return [vars(module)[name] for name in given]


def _contents(values):
    """Yield what may change in values while names stay bound to them, and in what they hold."""
    left, seen, count = list(values), set(), 0
    while left and count <= _MOST_ITEMS:
        value = left.pop()
        content = value if type(value) is tuple else _content(value)
        if content is None or id(content) in seen:
            continue
        seen.add(id(content))
        if type(value) is not tuple:
            yield content
        inner = [item for _, item in _items(content)]
        left += inner
        count += len(inner)


def _content(value):
    """Return the list, dict or set that a value is or keeps its attributes in, or None."""
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
