"""What is written in place, where activations share memory otherwise than in the dense network.

A stack shares its memory where the dense network copies: ``contiguous`` of a view, padding that was
put off. Such a copy is made before anything is written. The other way round, a part of an image
that is no part of the stack is a copy, where the dense network has a view: once such a part was
written to, what it was taken from is not read again. Where it is not known whether the dense
network copies, as for ``contiguous`` of what may be channels_last, neither is read once the other
was written to.
"""

import weakref

import torch
from torch.utils._pytree import tree_leaves

from .._dispatch_state import memory_of

_COPIES = ("reshape", "flatten", "contiguous")  # of images in another order of dimensions, maybe


def own(x):
    """Return what a StackTensor keeps, past PyTorch's hooks."""
    return object.__getattribute__(x, "__dict__")


class Part:
    """A part of an activation that was taken by a function of some name.

    ``image`` is what the part is a view of, or None where the part is a StackTensor, of which it is
    known when it is written to.
    """

    def __init__(self, name, image=None):
        self.name, self.image, self.is_written = name, image, False
        self.version = None if image is None else image._version

    def check(self):
        """Raise if the part was written to."""
        if self.is_written or (self.image is not None and self.image._version != self.version):
            raise NotImplementedError(
                f"what {self.name} took of an activation of a sparsified network was written to in "
                "place, which the activation does not see; write x[...] = y, or to a clone()"
            )


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
    """What views of one another share; of ``twins`` it is not known whether they share it, too."""

    def __init__(self):
        self.twins, self.spoiled_by = [], None

    def check(self):
        """Raise if a twin was written to."""
        if self.spoiled_by is not None:
            raise NotImplementedError(
                f"what {self.spoiled_by} made of an activation of a sparsified network, or that "
                "activation, was written to in place, and then the other is read, which may be a "
                "copy: it depends on the memory format of the dense one; write to a clone()"
            )

    def spoil_twins(self):
        """Note that this was written to."""
        left, seen = [self], {self}
        while left:
            for twin, name in left.pop().twins:
                if twin not in seen:
                    twin.spoiled_by = name
                    seen.add(twin)
                    left.append(twin)


def _memory(x):
    own(x)["_memory"] = own(x)["_memory"] or Memory()
    return own(x)["_memory"]


def note_twin(out, x, name):
    """Note that a function of some name made ``out``, a copy of x or x itself; return it."""
    own(out)["_memory"] = Memory()
    own(out)["_memory"].twins.append((_memory(x), name))
    _memory(x).twins.append((own(out)["_memory"], name))
    return out


def is_copied(x, func, memory_format):
    """Whether a function copies x in the dense network; None where that is not known.

    ``func`` is one that returns a tensor itself if it has a memory format. Views are taken of
    tensors without memory, that lie as what they are of lies or may lie.
    """
    shape, in_order, steps = _views(x)
    formats = [torch.contiguous_format]
    if not in_order:
        if len(shape) != 4:
            return None
        formats.append(torch.channels_last)
    try:
        found = {_copies(shape, f, steps, func, memory_format) for f in formats}
    except (RuntimeError, NotImplementedError):  # an index that is a tensor, for example
        return None
    return found.pop() if len(found) == 1 else None


def _views(x):
    """Return the shape of what x is a view of, whether its order is known, and the views of it."""
    return own(x)["_views"] or (own(x)["_shape"], own(x)["_in_order"], ())


def _copies(shape, lies, steps, func, memory_format):
    x = torch.empty(shape, device="meta", memory_format=lies)
    for step in steps:
        x = step(x)
    return func(x, memory_format=memory_format) is not x


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


def about_to_write(x, table):
    """Make the copies that were put off; note that a part is written to."""
    for ref in table.lent:
        copy = ref()
        if copy is not None:
            settle(copy, table)
    table.lent.clear()
    _forget_rests(x, table)
    if own(x)["_part"] is not None:
        own(x)["_part"].is_written = True
    if own(x)["_memory"] is not None:
        own(x)["_memory"].spoil_twins()


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
    written, others = own(x)["_value"], [ref() for ref in table.rests]
    table.rests.clear()
    for other in others:
        if other is None or own(other)["_rest"] is None:
            continue
        value = own(other)["_value"]
        unknown = table.static or written is None or value is None
        if other is x or unknown or _share(value, written):
            own(other)["_rest"] = None
        else:
            table.rests.append(weakref.ref(other))


def viewed(x, table, func, value, *args, **kwargs):
    """Return what a function that views makes of the stack of x, ``value``."""
    result = table.compute(func, value, *args, **kwargs)
    if own(x)["_is_lent"] and (table.static or _share(result, value)):
        settle(x, table)
        result = table.compute(func, own(x)["_value"], *args, **kwargs)
    return result


def inherit(out, x, view):
    """Return a view of an activation, ``view(image)`` of its image: of a part it is one, too."""
    own(out)["_part"], own(out)["_memory"] = own(x)["_part"], _memory(x)
    return _note_view(out, x, view)


def _note_view(out, x, view):
    shape, in_order, steps = _views(x)
    own(out)["_views"] = shape, in_order, (*steps, view)
    return out


def note_part(out, x, name, view=None):
    """Note that a StackTensor is a part of another that is not the same part of the stack."""
    own(out)["_part"] = Part(name)
    own(x)["_parts"] = [*own(x)["_parts"], own(out)["_part"]]
    return _note_view(out, x, view or _unknown)


def _unknown(x):
    raise NotImplementedError("no view that can be taken of a tensor without memory")


def note_parts(name, images, result, taken):
    """Note of StackTensors that a function's result views their images: pairs of both.

    ``taken`` is the result with StackTensors in place of images that were gathered again.
    """
    for x, image, in_order in images:
        if name in _COPIES and not in_order:
            continue
        if _share(own(x)["_value"], image):  # of a full mask: what is written is seen
            continue
        for plain, leaf in zip(tree_leaves(result), tree_leaves(taken), strict=True):
            if _is_strided(plain) and _share(plain, image):
                if leaf is not plain:
                    note_part(leaf, x, name)
                elif not image.is_inference():  # of a call like one that was found to be right
                    own(x)["_parts"] = [*own(x)["_parts"], Part(name, image)]


def versioned(image):
    """Return a copy of an image in inference mode of which it shows that it was written to."""
    with torch.inference_mode(False):
        return image.clone()


def _is_strided(x):
    return isinstance(x, torch.Tensor) and x.layout == torch.strided and x.numel() > 0


def _share(result, value):
    """Whether a tensor, or one of several, has the memory of another."""
    memory = memory_of(value)
    return any(memory_of(t) == memory for t in tree_leaves(result))
