"""Tape: what a call computed on a CPU, run again on other numbers without the network's own code.

A step is a function and its arguments: values of the call by their number, what the network holds
as it is. No step depends on how many blocks are active, so a tape serves all masks. What is on no
tape, a number read from a tensor for example, stops it, and calls run the network as before.
"""

import weakref

import torch
from torch.overrides import TorchFunctionMode

from .._dispatch_state import memory_of
from . import tensor as T
from .handlers import METADATA, OF_INTEGERS
from .surroundings import Surroundings
from .trees import tree_flatten, tree_leaves, tree_unflatten

_PLAIN = (
    int, float, bool, complex, str, type(None), slice, type(Ellipsis), torch.dtype, torch.device,
    torch.memory_format, torch.layout, torch.Size,
)  # fmt: skip


_INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}


class _Value(int):
    """The number of a value of the call, in place of the value."""


_TABLE, _IMAGE, _OUTSIDE = _Value(0), _Value(1), _Value(2)


class Changed(Exception):
    """A step has made a tensor of another shape than in the call that was recorded."""


class _Unknown(Exception):
    """An argument that no step has made, and that the network does not hold."""


class _Step:
    """One call of a function, and which values are not needed after it.

    ``shapes`` are those that its results must have, None where they go with the number of blocks.
    """

    def __init__(self, func, args, kwargs, out, shapes):
        self.func, self.args, self.kwargs, self.out, self.last = func, args, kwargs, out, ()
        self.shapes = shapes
        inner = [*(a for a in args if type(a) in (list, tuple, dict)), kwargs]
        self.nested = any(True for _ in _values(inner))

    def run(self, values):
        """Compute."""
        if self.nested:
            args, kwargs = _filled(self.args, values), _filled(self.kwargs, values)
        else:
            args = [values[a] if type(a) is _Value else a for a in self.args]
            kwargs = self.kwargs
        result = self.func(*args, **kwargs)
        if self.shapes is not None and _shapes(result) != self.shapes:
            raise Changed
        if type(self.out) is _Value:
            values[self.out] = result
        elif self.out is not None:
            for i, part in zip(self.out, result, strict=True):
                if i is not None:
                    values[i] = part
        for i in self.last:
            values[i] = None


class Tape:
    """The steps of a call.

    Parameters
    ----------
    table : Table
        That of the call that is recorded.
    x : tensor
        The image.
    outside : number, "bias" or tensor
        What is wanted outside active blocks.
    held : iterable of tensors
        What the network holds: its parameters and buffers.

    Attributes
    ----------
    stopped : str or None
        Why the call cannot be run again.
    writes : bool
        Whether the image of the call, or what is wanted outside, is written.
    folds : bool
        Whether weights that are made in the call have a batch norm folded in, or are laid out, or
        are what a result holds where the input is 0.
    """

    def __init__(self, table, x, outside, held):
        self.table, self.stopped, self.steps = table, None, []
        self._numbers, self._count = {}, 3
        self.folds = self.writes = False
        self._held = {id(t): t for t in held}
        self._given = {memory_of(t) for t in (x, outside) if isinstance(t, torch.Tensor)}
        self._around = Surroundings()
        self._remember(x, _IMAGE)
        if isinstance(outside, torch.Tensor):
            self._remember(outside, _OUTSIDE)

    def stop(self, why):
        """Give up: the call has done something that is on no tape."""
        self.stopped = self.stopped or why

    def holds(self, tensors):
        """Whether all of some tensors are the network's; some may be None."""
        return all(t is None or id(t) in self._held for t in tensors)

    def keep(self, tensors):
        """Take tensors that were made of the network's alone for its own."""
        self._held.update((id(t), t) for t in tensors if t is not None)

    def note_weights(self, tensors):
        """Note if a result holds, where the input is 0, what is made of tensors of the call."""
        self.folds = self.folds or not self.holds(tensors)

    def keep_rest(self, constant):
        """Take what a convolution makes of zeros for the network's own, if its weights are."""
        if self.folds:
            self.stop("what a convolution makes of zeros, with weights that are made in the call")
        self.keep((constant,))

    def expect(self, value):
        """Stop unless a value is one that the tape knows."""
        if self._number(value) is None and id(value) not in self._held:
            self.stop("a value of which the tape does not know how it was made")

    def begin(self):
        """Note that a function is about to be computed, which may become a step."""
        if not self.stopped:
            self._around.before()

    def note(self, func, args, kwargs, result, shapes=None):
        """Add a step that was just computed; ``shapes`` are those that its results must have."""
        if self.stopped:
            return
        self._around.after()
        self.writes = self.writes or self._writes(func, args, kwargs)
        if getattr(func, "__self__", None) is self.table:
            func, args = func.__func__, (self.table, *args)
        try:
            if _is_local(func):
                raise _Unknown(f"{func.__qualname__}, which holds variables")
            args, kwargs = self._placed(tuple(args)), self._placed(kwargs)
            out = self._out(result)
        except _Unknown as error:
            return self.stop(f"{getattr(func, '__name__', func)}: {error}")
        self.steps.append(_Step(func, args, kwargs, out, shapes))

    def check_numbers(self, name, given, steps):
        """Stop if a function of stacks goes by numbers of tensors that are made in the call.

        As a size or a dimension does, which is a tensor. ``steps`` is how many there were before.
        """
        if self.stopped:
            return
        read = set(_values([[step.args, step.kwargs] for step in self.steps[steps:]]))
        for leaf in tree_leaves(given):
            if isinstance(leaf, slice):
                is_size = any(self._is_made(part) for part in _parts(leaf))
            else:
                is_integer = self._is_made(leaf) and leaf.dtype in _INTEGERS
                is_number = is_integer or (self._is_made(leaf) and leaf.dim() == 0)
                is_size = is_number and self._number(leaf) not in read
                is_size = is_size or (is_integer and name not in OF_INTEGERS)
            if is_size:
                return self.stop(f"{name}, which goes by the numbers of a tensor of the call")

    def _is_made(self, value):
        """Whether a value is a tensor that was made in the call, and no stack."""
        is_tensor = isinstance(value, torch.Tensor) and not isinstance(value, T.StackTensor)
        return is_tensor and self._number(value) is not None

    def note_image(self, func, args, kwargs, result):
        """Add a step whose results have the same shapes whichever blocks are active."""
        self.note(func, args, kwargs, result, _shapes(result))

    def finish(self, result):
        """Close the tape with what the call returns; return it, or None where it was stopped."""
        leaves, self._tree = tree_flatten(result)
        try:
            self._leaves = [self._placed(leaf) for leaf in leaves]
        except _Unknown as error:
            self.stop(f"the result: {error}")
        if not self.stopped:
            self._around.at_end()
        if self._around.changed_by is not None:
            self.stop(self._around.changed_by)
        if self.writes and any(step.shapes for step in self.steps):
            self.stop("it writes to its image, so that it cannot be given up on the way")
        if self.stopped:
            return None
        seen = set(_values(self._leaves))
        for step in reversed(self.steps):
            used = set(_values([step.args, step.kwargs, step.out])) - seen - {_TABLE}
            step.last = tuple(used)
            seen |= used
        self.table = self._numbers = self._held = self._around = None
        return self

    def run(self, table, x, outside):
        """Compute the call on another image and table; ``outside`` may be another tensor.

        Raises Changed where a shape depends on the numbers in a tensor, and the call has to be run
        as usual. Nothing was written by then that another run would find.
        """
        values = [None] * self._count
        values[:3] = table, x, outside
        for step in self.steps:
            step.run(values)
        return tree_unflatten(_filled(self._leaves, values), self._tree)

    def _remember(self, tensor, number):
        self._numbers[id(tensor)] = weakref.ref(tensor), number

    def _number(self, tensor):
        ref, number = self._numbers.get(id(tensor), (None, None))
        return number if ref is not None and ref() is tensor else None

    def _writes(self, func, args, kwargs):
        """Whether a step writes to memory of what the call was given."""
        targets = T.written(func, getattr(func, "__name__", ""), args, kwargs)
        if any(a is True for a in args):
            targets.append(args[0])
        tensors = [t for t in targets if isinstance(t, torch.Tensor)]
        return any(memory_of(t) in self._given for t in tensors)

    def _placed(self, value):
        """Return an argument with numbers in place of values of the call."""
        if isinstance(value, torch.Tensor):
            number = self._number(value)
            if number is None and id(value) not in self._held:
                raise _Unknown("a tensor that is no parameter, buffer or result of the call")
            return value if number is None else number
        if value is self.table:
            return _TABLE
        if type(value) in (list, tuple):
            kind = list if type(value) is list else tuple
            return kind(self._placed(v) for v in value)
        if type(value) is dict:
            return {k: self._placed(v) for k, v in value.items()}
        if type(value) is slice and any(isinstance(p, torch.Tensor) for p in _parts(value)):
            self._placed(_parts(value))
            if any(map(self._is_made, _parts(value))):
                raise _Unknown("a slice by a number of a tensor")
        if type(value) in _PLAIN:
            return value
        raise _Unknown(f"an argument of type {type(value).__name__}")

    def _out(self, result):
        """Give numbers to what a step returned."""
        if result is None:
            return None
        if isinstance(result, (tuple, list)):
            return [self._out(part) for part in result]
        if type(result) not in (torch.Tensor, torch.nn.Parameter):
            raise _Unknown(f"a result of type {type(result).__name__}")
        number = self._number(result)
        if number is None:
            if id(result) in self._held:  # a parameter that was written in place
                return None
            number = _Value(self._count)
            self._count += 1
            self._remember(result, number)
        return number


def _is_local(func):
    """Whether a function may hold variables of a call: a lambda, or one made within another."""
    if not getattr(func, "__closure__", None) or (func.__module__ or "").startswith("torch."):
        return False
    return "<" in func.__qualname__


def _shapes(result):
    """Return the shapes of a step's results."""
    if isinstance(result, torch.Tensor):
        return result.shape
    return [_shapes(part) for part in result] if isinstance(result, (tuple, list)) else None


def _values(tree):
    """Yield the numbers of values in arguments."""
    if type(tree) is _Value:
        yield tree
    elif type(tree) in (list, tuple, dict):
        for part in tree.values() if type(tree) is dict else tree:
            yield from _values(part)


def _parts(value):
    return value.start, value.stop, value.step


def _filled(tree, values):
    """Return arguments with values in place of their numbers."""
    if type(tree) is _Value:
        return values[tree]
    if type(tree) in (list, tuple):
        return type(tree)(_filled(part, values) for part in tree)
    if type(tree) is dict:
        return {k: _filled(part, values) for k, part in tree.items()}
    return tree


class Recorder(TorchFunctionMode):
    """Puts on the tape what a network computes of tensors that are no stacks."""

    def __init__(self, tape):
        super().__init__()
        self.tape = tape

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Call a function, and note it."""
        kwargs = kwargs or {}
        self.tape.begin()
        steps = len(self.tape.steps)
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        if any(issubclass(kind, T.StackTensor) for kind in types):
            for leaf in tree_flatten(result)[0]:  # how a stack was made is on the tape
                if isinstance(leaf, torch.Tensor) and not isinstance(leaf, T.StackTensor):
                    self.tape.expect(leaf)
            self.tape.check_numbers(name, (args, kwargs), steps)
        elif isinstance(result, torch.Tensor) or not (name == "__get__" or name in METADATA):
            self.tape.note_image(func, args, kwargs, result)
        return result
