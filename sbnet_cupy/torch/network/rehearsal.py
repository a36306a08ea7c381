"""Kernels of a call compiled at once: before the first call of a kind, the network rehearses it.

The kernels that a call needs depend on the sizes of its layers and on the number of rows. One by
one they take some 0.4 seconds each to compile, where they are not on disk yet, and a network has
dozens. A rehearsal launches none of them, and has PyTorch compute nothing of what they would have
written, so that nothing but the choice of kernels comes of it.
"""

import bisect
import contextlib
import copy
import weakref

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from ...core.compile_ahead import Note, compile_kernels
from ...core.rehearsal import Rehearsal, rehearsing
from ...core.torch_memory import capturing_stream
from .._dispatch_state import in_transform, is_watched
from .generators import forked
from .graphs import NoSynchronization
from .recordings import settings
from .state import State
from .table import BlockTable
from .training_graphs import NoTensorHooks, settings_of
from .trees import tree_leaves, tree_map

_MOST = 256  # kinds of calls that are remembered


class Rehearsals:
    """The kinds of calls that a network has made on a GPU."""

    def __init__(self):
        self._seen, self._has_evaluated = set(), False

    def before(self, sparse, x, table, outside):
        """Compile the kernels of a call that is about to be made, if it is the first of its kind.

        Not with ``replay=False``, with which the modules' code runs in calls alone, nor where hooks
        or modes would see it run, nor for networks that keep more than can be copied in no time.
        """
        if table.whole or not sparse.replay:
            return
        kind = (
            sparse._kind(x, False), x.device, table.rows, table.known_live, sparse.block_size,
            torch.is_grad_enabled(), *settings_of(sparse, x), *settings(),
        )  # fmt: skip
        if not is_first_of(kind, self._seen):
            return
        is_first = not self._has_evaluated
        if not (sparse.training or torch.is_grad_enabled()):
            self._has_evaluated = True
        rehearse_once(
            sparse.model, kind[:1] + kind[2:],  # of any device of this kind
            lambda: _calls(sparse, x, table, outside, is_first), x, lambda: State(sparse.model).fit,
        )  # fmt: skip


def is_first_of(kind, seen):
    """Whether a kind of calls is not among those that were seen; note it there."""
    if kind in seen:
        return False
    if len(seen) >= _MOST:
        seen.clear()
    seen.add(kind)
    return True


def rehearse_once(net, kind, run, like, may_copy, launched=()):
    """Rehearse ``run()``, calls of a copy of a network, unless calls of this kind were before.

    It is on the device of the tensor ``like``, and as :func:`rehearse` does it. Nothing is done
    where modes would see it, or calls of a copy could have an effect on anything else: where other
    processes take part, or not ``may_copy()``.
    """
    if any(isinstance(m, DistributedDataParallel) for m in net.modules()):
        return
    if is_watched() or in_transform() or capturing_stream(like) is not None:
        return
    with torch.cuda.device(like.device):
        note = _note_of(net, kind)
        if (note is None or not note.is_there()) and may_copy():
            rehearse(run, like.device, launched)
            if note is not None:
                note.write()


def _note_of(net, kind):
    """Return the note on disk of a kind of calls; None of modules that do not print."""
    try:
        return Note(f"{net} {kind}")
    except Exception:
        return None


def rehearse(run, device, launched=()):
    """Find out which kernels ``run()`` would launch on a device; compile those not on disk.

    Kernels of the files ``launched`` are launched with what is known, and the host may wait for
    what they write. Where the rehearsal fails, what it has not come to is compiled in the call
    itself, which raises what there is to raise.
    """
    uncomputed = Uncomputed(launched)
    waiting = contextlib.nullcontext() if launched else NoSynchronization()
    with (
        contextlib.suppress(Exception), torch.cuda.device(device), forked(device),
        rehearsing(uncomputed), NoTensorHooks(), uncomputed, waiting,
    ):  # fmt: skip
        run()
    with contextlib.suppress(Exception), torch.cuda.device(device):
        compile_kernels(uncomputed.kernels)  # one that does not compile may not be needed


def _twin(sparse, is_first):
    """Return a copy of a network.

    Its buffers are others, to which calls may write, and with gradients its parameters, which may
    have hooks. If calls in evaluation were made which have left the buffers alone, both have the
    same ones, and what was made of the weights.
    """
    is_known, shared = False, ()
    if not torch.is_grad_enabled():
        shared = sparse.parameters()
        is_known = not (is_first or sparse.training or sparse._replays.changes)
    if is_known:
        shared = (*shared, *sparse.buffers())
    twin = copy.deepcopy(sparse, {id(tensor): tensor for tensor in shared})
    twin._joins = sparse._joins
    if is_known:
        twin._weights = sparse._weights.copied()
    return twin


def _calls(sparse, x, table, outside, is_first):
    """Call a copy of a network as it is about to be called."""
    twin = _twin(sparse, is_first)
    own = torch.empty_like(x).requires_grad_(x.requires_grad)
    # The first call in evaluation learns which results lie side by side.
    for _ in range(2 if is_first and not torch.is_grad_enabled() else 1):
        _call(twin, own, table, outside)


def _call(twin, x, table, outside):
    """Call a network on the blocks of a table, and compute gradients if they are recorded."""
    own = BlockTable(
        table.counts, table.indices, table.places, table.block, table.size, table.known_live
    )
    own.model, own.occupied = twin.model, True
    differentiate(tree_leaves(twin._run(own, x, outside=outside)), (x, *twin.parameters()))


def differentiate(leaves, tensors):
    """Compute the gradients of the tensors among the leaves of a result, if they are recorded."""
    leaves = [y for y in leaves if isinstance(y, torch.Tensor) and y.requires_grad]
    wanted = [t for t in tensors if t.requires_grad]
    if leaves and wanted:
        grads = [torch.zeros_like(y) for y in leaves]
        with torch.autograd.set_multithreading_enabled(False):  # this thread rehearses
            torch.autograd.grad(leaves, wanted, grads, allow_unused=True)


class Uncomputed(TorchDispatchMode, Rehearsal):
    """Has PyTorch compute nothing of what kernels would have written: results have any values.

    That is what was allocated and not written to, and all that kernels were to be launched with.
    What is made of numbers alone, such as indices that a function keeps for later calls, is
    computed. Nothing else is safe: an index may be one that stops the device, where it is not what
    it would be. Operators of this package are called, since they launch the kernels.

    Parameters
    ----------
    launched : sequence of str
        Files of kernels that are launched where all that they are given is known or empty. What
        they have written, no other kernels write to.
    """

    def __init__(self, launched=()):
        TorchDispatchMode.__init__(self)
        Rehearsal.__init__(self, launched)
        self._skipped = 0  # launches
        self._unknown = weakref.WeakSet()  # storages
        self._empty = weakref.WeakSet()  # those of them that nothing was to write to yet
        self._kept = weakref.WeakSet()  # what launched kernels were given
        self._memory = _Memory()

    def skips(self, stem, addresses):
        """Whether a kernel is not launched with tensors at some addresses, which are unknown then.

        Otherwise all are known from now on, as it writes what was empty.
        """
        given = [s for s in map(self._memory.at, addresses) if s is not None]
        given = [storage for storage in given if storage not in self._kept]
        launches = stem in self.launched and not any(
            storage in self._unknown and storage not in self._empty for storage in given
        )
        for storage in given:
            (self._know if launches else self._forget)(storage)
        if launches:
            self._kept.update(given)
        else:
            self._skipped += 1
        return not launches

    def allocated(self, tensor):
        """Note that memory was allocated, which gets zeros: no number of anything, where read."""
        storage = tensor.zero_().untyped_storage()
        self._unknown.add(storage)
        self._empty.add(storage)
        self._memory.add(storage)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run a function of PyTorch, or make what it would return."""
        kwargs = kwargs or {}
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        name = func._schema.name
        if name in _WRITING:
            result = self._written(func, args, kwargs, given)
        elif func.namespace == "sbnet_cupy":
            result = self._called(func, args, kwargs, given)
        elif func.is_view or name in _MOVING or not any(map(self._is_unknown, given)):
            result = func(*args, **kwargs)
            if name in _EMPTY:
                self.allocated(result)
        else:
            result = self._uncomputed(func, args, kwargs, given[0].device)
        for tensor in tree_leaves((given, result)):
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                self._memory.add(tensor.untyped_storage())
        return result

    def _called(self, func, args, kwargs, given):
        """Call an operator of this package, whose results are known if it knew and launched all."""
        before, is_known = self._skipped, not any(map(self._is_unknown, given))
        result = func(*args, **kwargs)
        if self._skipped > before or not is_known:
            for tensor in tree_leaves(result):
                if isinstance(tensor, torch.Tensor):
                    self._forget(tensor.untyped_storage())
        return result

    def _uncomputed(self, func, args, kwargs, device):
        """Return what a function would, with zeros; what it would write to is unknown."""
        meta = func(*tree_map(_to_meta, args), **tree_map(_to_meta, kwargs))
        device = _kept_on(device, kwargs.get("device"))
        named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        changed = [
            named[a.name] for a in func._schema.arguments
            if a.alias_info is not None and a.alias_info.is_write and named.get(a.name) is not None
        ]  # fmt: skip
        for tensor in changed:
            self._forget(tensor.untyped_storage())
        returned = iter(changed)
        kinds = [r.alias_info is not None for r in func._schema.returns]
        found = [
            next(returned) if is_changed else tree_map(lambda t: self._made(t, device), made)
            for is_changed, made in zip(kinds, meta if len(kinds) > 1 else [meta], strict=True)
        ]
        return tuple(found) if len(kinds) > 1 else found[0]

    def _written(self, func, args, kwargs, given):
        """Write to a tensor, which is known then if all that is written is."""
        into, *others = given
        unknown = [other for other in others if self._is_unknown(other)]
        for other in unknown:
            _kept_on(other.device, into.device)
        storage = into.untyped_storage()
        if unknown:
            self._forget(storage)
            return into
        if into.numel() * into.itemsize == storage.nbytes():  # all of it
            self._know(storage)
        return func(*args, **kwargs)

    def _made(self, meta, device):
        """Return zeros like a tensor without memory."""
        if not isinstance(meta, torch.Tensor):
            return meta
        made = torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device=device)
        self._unknown.add(made.zero_().untyped_storage())
        return made

    def _is_unknown(self, tensor):
        return tensor.untyped_storage() in self._unknown

    def _know(self, storage):
        self._unknown.discard(storage)
        self._empty.discard(storage)

    def _forget(self, storage):
        self._unknown.add(storage)
        self._empty.discard(storage)
        self._kept.discard(storage)


class _Memory:
    """Storages by their addresses; those that are gone are dropped."""

    def __init__(self):
        self._starts, self._storages = [], {}  # sorted addresses, and a reference for each

    def add(self, storage):
        """Note where a storage is."""
        start = storage.data_ptr()
        if start not in self._storages:
            bisect.insort(self._starts, start)
        self._storages[start] = weakref.ref(storage)

    def at(self, address):
        """Return the storage with a byte at an address; None if none is known of."""
        place = bisect.bisect_right(self._starts, address)
        while place:
            place -= 1
            start = self._starts[place]
            storage = self._storages[start]()
            if storage is not None:
                return storage if address < start + storage.nbytes() else None
            del self._starts[place], self._storages[start]
        return None


def _kept_on(device, other):
    """Return a device that what is not known is moved to; to the host, which waits, is an error."""
    other = torch.device(other or device)
    if other.type != device.type:
        raise RuntimeError(f"what is not known is moved from {device} to {other}")
    return other


def _to_meta(value):
    if isinstance(value, torch.device):
        return torch.device("meta")
    return value.to("meta") if isinstance(value, torch.Tensor) else value


_MOVING = {"aten::set_", "aten::resize_"}
_WRITING = {"aten::copy_", "aten::fill_", "aten::zero_"}
_EMPTY = {
    "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::empty_permuted",
    "aten::new_empty", "aten::new_empty_strided",
}  # fmt: skip
