"""What is written in place, where activations share memory otherwise than in the dense network.

A stack shares its memory where the dense network copies: ``contiguous`` of a view, padding that was
put off. Such a copy is made before anything is written. The other way round, a part of an image
that is no part of the stack is a copy, where the dense network has a view: once such a part was
written to, what it was taken from is not read again, and once that is written to, neither is the
part. Where it is not known whether the dense network copies, as for ``contiguous`` of what may be
channels_last, neither is read once the other was written to.
"""

import contextlib
import weakref

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .._dispatch_state import (
    has_function_transforms,
    innermost,
    memory_of,
    storage_of,
    without_function_transforms,
)
from . import joins
from .layout import pitch_of
from .trees import tree_leaves

_COPIES = ("reshape", "flatten", "contiguous")  # of images in another order of dimensions, maybe


def own(x):
    """Return what a StackTensor keeps, past PyTorch's hooks."""
    return object.__getattribute__(x, "__dict__")


class Part:
    """A part of an activation that was taken by a function of some name.

    It is a StackTensor with some ``memory``, or a tensor that is a view of ``image``. One ``sees``
    what is written to the activation, if it shares the memory of its stack. ``ranges`` are those
    of its indices in the image, or None.
    """

    def __init__(self, name, memory=None, image=None, sees=False, ranges=None):
        self.name, self.sees, self.is_written, self.ranges = name, sees, False, ranges
        self.memory = None if memory is None else weakref.ref(memory)
        if image is not None:
            self.storage, self.counter = StorageWeakRef(storage_of(image)), _counter(image)
            self.version = self.counter._version

    def check(self):
        """Raise if the part was written to."""
        if self.is_written or (self.memory is None and self.counter._version != self.version):
            raise NotImplementedError(
                f"what {self.name} took of an activation of a sparsified network was written to in "
                "place, which the activation does not see; write x[...] = y, or to a clone()"
            )

    def overlaps(self, other):
        """Whether both may have pixels in common, of which one does not see the other's."""
        is_gone = self.memory() is None if self.memory else self.storage.expired()
        if is_gone or self.ranges is None or other.ranges is None:
            return False
        both = zip(self.ranges, other.ranges, strict=True)
        return all(a[0] <= b[1] and b[0] <= a[1] for a, b in both)

    def age(self, given):
        """Note that the activation is about to be written to, by a function of some tensors.

        Nothing tells when a tensor is read, so none may be there that would become old; but for
        those that the function is given, as in x[0] = x[1].
        """
        if self.sees:
            return
        if self.memory is not None:
            memory = self.memory()
            for one in () if memory is None else memory.alike():
                one.is_old = self.name
        elif not self.storage.expired() and not any(map(self._is_of, given)):
            raise NotImplementedError(_OLD.format(self.name, "is still there"))

    def _is_of(self, tensor):
        return _is_strided(tensor) and StorageWeakRef(storage_of(tensor)) == self.storage


_OLD = (
    "what {} took of an activation of a sparsified network {} when the activation was written to "
    "in place, which it does not see; take it after that, or write to a clone()"
)


def _ranges(view, image):
    """Return the first and the last index of a view along each dimension of its image.

    All of a dimension, where the view has joined it with others.
    """
    first = last = view.storage_offset() - image.storage_offset()
    last += sum((n - 1) * step for n, step in zip(view.shape, view.stride(), strict=True))
    ranges = []
    for n, step in zip(image.shape, image.stride(), strict=True):
        low, high = first // step % n, last // step % n
        ranges.append((low, high) if low <= high else (0, n - 1))
    return ranges


def _counter(image):
    """Return a tensor that has the version of an image, and not its memory."""
    outside = without_function_transforms if has_function_transforms() else contextlib.nullcontext
    image = innermost(image)
    with torch.inference_mode(False), torch.no_grad(), outside():
        counter = image.detach()
        counter.data = image.new_empty(0)
    return counter


class Spent:
    """Stands for the value of a padded activation that was written to: only the result has it."""

    def __init__(self, name):
        self.name = name

    def __getattr__(self, attribute):
        raise NotImplementedError(
            f"{self.name} wrote in place to a padded activation of a sparsified network; use what "
            "it returns, or write to a clone()"
        )


class Memory:
    """What views of one another share; of ``twins`` it is not known whether they share it, too.

    ``parts`` were taken of it, or of these. It is itself the ``part`` of another, ``whole``.
    """

    def __init__(self, part=None, whole=None, parts=()):
        self.twins, self.spoiled_by, self.is_old = [], None, None
        self.part, self.whole, self.parts = part, whole, list(parts)

    def check(self):
        """Raise if a part or a twin was written to, or what this is a part of."""
        for part in self.parts:
            part.check()
        if self.is_old is not None:
            raise NotImplementedError(_OLD.format(self.is_old, "is read"))
        if self.spoiled_by is not None:
            raise NotImplementedError(
                f"what {self.spoiled_by} made of an activation of a sparsified network, or that "
                "activation, was written to in place, and then the other is read, which may be a "
                "copy: it depends on the memory format of the dense one; write to a clone()"
            )

    def alike(self):
        """Return this, its twins, theirs and so on, each with the name of what made it."""
        found, left = {self: None}, [self]
        while left:
            new = [pair for pair in left.pop().twins if pair[0] not in found]
            found.update(new)
            left += [twin for twin, _ in new]
        return found

    def note(self, part):
        """Note a part that was taken of this, and so of what this is a part of."""
        memory = self
        while memory is not None:
            for one in memory.alike():
                one.parts.append(part)
            memory = memory.whole

    def note_write(self, given):
        """Note that this is about to be written to, by a function of some tensors."""
        for part in self.parts:
            part.age(given)
        memory = self
        while memory.part is not None:
            memory.part.is_written, memory = True, memory.whole
        for twin, name in self.alike().items():
            twin.spoiled_by = name or twin.spoiled_by


def _memory(x):
    own(x)["_memory"] = own(x)["_memory"] or Memory()
    return own(x)["_memory"]


def note_twin(out, x, name):
    """Note that a function of some name made ``out``, a copy of x or x itself; return it."""
    memory = _memory(x)
    twin = own(out)["_memory"] = Memory(memory.part, memory.whole, memory.parts)
    twin.twins.append((memory, name))
    memory.twins.append((twin, name))
    return out


def is_copied(x, func, memory_format):
    """Whether a function copies x in the dense network; None where that is not known.

    ``func`` is one that returns a tensor itself if it has a memory format.
    """
    found = _asked(x, lambda dense: func(dense, memory_format=memory_format) is not dense)
    return found.pop() if len(found) == 1 else None


def _may_be_viewed(x, func, args, kwargs):
    """Whether a function whose first argument is x may return a view of it in the dense network."""
    if not args or args[0] is not x:
        return True

    def is_viewed(dense):
        result = func(dense, *args[1:], **kwargs)
        return StorageWeakRef(storage_of(result)) == StorageWeakRef(storage_of(dense))

    return _asked(x, is_viewed) != {False}


def _asked(x, question):
    """Return the answers for tensors as the dense one may be; none where that is not known.

    Views are taken of tensors without memory, that lie as what they are of lies or may lie.
    """
    shape, in_order, steps = _views(x)
    formats = [torch.contiguous_format]
    if not in_order:
        if len(shape) != 4:
            return set()
        formats.append(torch.channels_last)
    try:
        return {question(_dense(shape, lies, steps)) for lies in formats}
    except (RuntimeError, NotImplementedError):  # an index that is a tensor, for example
        return set()


def _views(x):
    """Return the shape of what x is a view of, whether its order is known, and the views of it."""
    return own(x)["_views"] or (own(x)["_shape"], own(x)["_in_order"], ())


def _dense(shape, lies, steps):
    """Return a tensor without memory that lies as the dense one does."""
    x = torch.empty(shape, device="meta", memory_format=lies)
    for step in steps:
        x = step(x)
    return x


def note_order(x, table):
    """Note that what is made of a tensor in the dense network may be channels_last, if it is."""
    if table.in_order and x.dim() == 4 and x.stride(1) < x.shape[2] * x.stride(2):
        table.in_order = False


def note_format(table, memory_format):
    """Note that something was converted to a memory format, in which more is made of it."""
    if memory_format is not torch.contiguous_format:
        table.in_order = False


def spend(x, name):
    """Note that a padded activation was written to, which its stack cannot show."""
    own(x)["_value"], own(x)["_plan"] = None, Spent(name)


def lend(x, table):
    """Note that a StackTensor shares memory with another, of which it is a copy."""
    own(x)["_is_lent"] = True
    table.lent.append(weakref.ref(x))
    return x


def settle(x, table):
    """Give a StackTensor memory of its own, if it is a copy that was not made."""
    if own(x)["_is_lent"]:
        own(x)["_value"], own(x)["_is_lent"] = table.compute(torch.clone, own(x)["_value"]), False


def about_to_write(x, table, *given):
    """Make the copies of x that were put off; note that a function of arguments writes to x."""
    for copy in _taken_out(table.lent, x, table):
        settle(copy, table)
    _forget_rests(x, table)
    if own(x)["_memory"] is not None:
        own(x)["_memory"].note_write(tree_leaves(given) if own(x)["_memory"].parts else ())
    if own(x)["_value"] is not None:
        joins.unpad(own(x)["_value"], table)


def widen(x, table, reach):
    """Note that what was written to a StackTensor looks so far around; all that share it do then.

    It counts where a table keeps what was made: where the reach of a network is measured.
    """
    written = own(x)["_value"]
    for other in (ref() for ref in table.made or ()):
        value = None if other is None else own(other)["_value"]
        if other is x or (value is not None and _share(value, written)):
            *rest, before = own(other)["_facts"]
            further = table.coarser(own(x)["_facts"][1], rest[1])
            own(other)["_facts"] = (*rest, max(before, reach + further))


def note_rest(x, table, rest):
    """Note what returns what a StackTensor holds where the input is 0, or None; return it."""
    own(x)["_rest"] = rest
    if rest is not None:
        table.rests.append(weakref.ref(x))
    return x


def _forget_rests(x, table):
    """Forget what StackTensors hold where the input is 0 that share the memory of one."""
    for other in _taken_out(table.rests, x, table):
        own(other)["_rest"] = None


def _taken_out(refs, x, table):
    """Take out of a list of weak references the StackTensors that a write to x may change."""
    written, found, left = own(x)["_value"], [], []
    for ref in refs:
        other = ref()
        if other is None:
            continue
        value = own(other)["_value"]
        unknown = table.static or written is None or value is None
        if other is x or unknown or _share(value, written):
            found.append(other)
        else:
            left.append(ref)
    refs[:] = left
    return found


def viewed(x, table, func, value, *args, **kwargs):
    """Return what a function that views makes of the stack of x, ``value``."""
    result = table.compute(func, value, *args, **kwargs)
    if own(x)["_is_lent"] and (table.static or _share(result, value)):
        settle(x, table)
        result = table.compute(func, own(x)["_value"], *args, **kwargs)
    return result


def inherit(out, x, view):
    """Return a view of an activation, ``view(image)`` of its image: of a part it is one, too."""
    own(out)["_memory"] = _memory(x)
    return _note_view(out, x, view)


def _note_view(out, x, view):
    shape, in_order, steps = _views(x)
    own(out)["_views"] = shape, in_order, (*steps, view)
    return out


def note_part(out, x, name, view=None, ranges=None):
    """Note that a StackTensor is a part of another that is not the same part of the stack.

    With a ``view`` of the image it is one of the stack, too. ``ranges`` are those of a Part.
    """
    memory = own(out)["_memory"] = Memory(whole=_memory(x))
    memory.part = Part(name, memory, sees=view is not None, ranges=ranges)
    _note(x, memory.part)
    return _note_view(out, x, view or _unknown)


def _note(x, part):
    memory, table = _memory(x), own(x)["_facts"][0]
    table.overlapping += [(other, part) for other in memory.parts if other.overlaps(part)]
    memory.note(part)


def _unknown(x):
    raise NotImplementedError("no view that can be taken of a tensor without memory")


def note_parts(name, call, images, result, taken):
    """Note of StackTensors that a function's result views their images: triples of both.

    The function and its arguments are ``call``, and ``taken`` is the result with StackTensors in
    place of images that were gathered again.
    """
    for x, image, in_order in images:
        if _share(own(x)["_value"], image):  # of a full mask: what is written is seen
            continue
        if name in _COPIES and not in_order and not _may_be_viewed(x, *call):
            continue
        for plain, leaf in zip(tree_leaves(result), tree_leaves(taken), strict=True):
            if _is_strided(plain) and _share(plain, image):
                ranges = _ranges(plain, image)
                if leaf is not plain:
                    note_part(leaf, x, name, ranges=ranges)
                elif not image.is_inference():  # of a call like one that was found to be right
                    _note(x, Part(name, image=image, ranges=ranges))


def check_overlapping(table):
    """Raise if a part was written to of which another holds pixels: it did not see that."""
    for pair in table.overlapping:
        for part in pair:
            part.check()


def versioned(image):
    """Return a copy of an image in inference mode of which it shows that it was written to."""
    with torch.inference_mode(False):
        return image.clone()


def _is_strided(x):
    return isinstance(x, torch.Tensor) and x.layout == torch.strided and x.numel() > 0


def _share(result, value):
    """Whether a tensor, or one of several, has memory in common with another."""
    memory = memory_of(value)
    return any(memory_of(t) == memory and not _are_beside(t, value) for t in tree_leaves(result))


def _are_beside(a, b):
    """Whether two stacks are different channels of the same one."""
    if not a.dim() == b.dim() == 4 or a.stride() != b.stride() or a.shape[0] == 1:
        return False
    pitch = pitch_of(a)
    if pitch is None:
        return False
    first, other = (t.storage_offset() % pitch for t in (a, b))
    return first + a.shape[1] <= other or other + b.shape[1] <= first
