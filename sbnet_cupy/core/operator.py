"""Operator: an operation declared once, for the core and for every adapter.

An operation stands in one file: its public function, its checks and shape rules, its NumPy body,
its CUDA launch. At the end of the file an :class:`Operator` says what these are called, so that an
adapter (PyTorch, JAX, TensorFlow) can drive the operation without the public function::

    GATHER = Operator(
        "sparse_gather",
        arrays=("x", "bin_counts", "active_block_indices", "out", "scale", "shift"),
        options=("bsize", "boffset", "bstride", "transpose", "data_format", "activation"),
        infer=_infer, plan=_plan, gradient=_gradient, linear=("x",),
    )

``arrays`` and ``options`` are names. A call is two tuples in the order of these names: arrays, or
their :class:`ArraySpec`, with None for what is not given; and options, as the caller spelled them.

- ``infer(specs, options)`` makes all checks of the public function and returns the specs of the
  results. It only compares sizes, so it works while a framework traces.
- ``plan(specs, options)`` makes the same checks and returns a :class:`Plan`: the specs of the
  results, and how to compute them. On a GPU it compiles the kernel and prepares its launch.
- ``gradient(ops, arrays, options, grad, wanted)`` returns ``{name: gradient}`` for the names in
  ``wanted``, made of the operations of a namespace ``ops`` (see ``block_sparse/compositions.py``).
  It is there for operations that are linear in the arrays named in ``linear``.

:meth:`Operator.plan_for` keeps plans, in one bounded cache for all operations, under the specs, the
options and the device. A warm call is a look-up::

    plan = GATHER.plan_for((x, counts, indices, out, scale, shift), options)
    plan.run(x, counts, indices, out, scale, shift)

The public functions do just this. An adapter whose tensors are no native arrays passes their specs
to :meth:`Operator.plan_of` and finds the same plans. On a GPU it may then launch the kernel itself,
on its own stream: ``plan.launch.on(stream, addresses)`` with the addresses of the arrays at the
positions ``plan.operands``, 0 for None. ``launch`` is None where a call needs more than that: then
it calls ``plan.run``.
"""

import marshal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .arrays import empty
from .spec import ArraySpec, SpecGroup, fields_of


@dataclass(eq=False, slots=True)
class Plan:
    """How to compute calls whose arrays have certain specs, with certain options.

    Parameters
    ----------
    results : tuple of ArraySpec
        What the call gives; None for a gradient that is not computed.
    run : function
        Takes all arrays of the operator in order, those that receive the results among them, and
        computes on the current device and stream. If no array of the operator receives results, it
        returns them.
    launch : object, optional
        The kernels that ``run`` launches, mostly one, with ``on(stream, addresses)``.
    operands : tuple of int
        Positions of the arrays that ``launch`` takes, in its order; None for a null pointer. The
        position after the last array is that of the memory of ``scratch`` bytes.
    scratch : int
        Bytes that ``run`` allocates with CuPy's current allocator, in
        :func:`~sbnet_cupy.core.arrays.whole_pieces`. They are not needed after the call.
    base : tuple of int, optional
        Positions of arrays: the first one that is given must be in the result before ``launch``,
        which writes only a part of it, or zeros if none is given. ``run`` sees to it by itself.
    weight : int
        How much of the cache the plan takes; most take 1.
    resized : function, optional
        Of the lengths of the operator's ``lengths``, in their order: the plan of a call that
        differs in these alone, or None where there is none of the same kind.
    by_kernels : bool
        Whether ``run`` only launches kernels of this package on a GPU, and allocates with CuPy's
        current allocator: then its launches can be repeated.
    """

    results: tuple
    run: Callable
    launch: Any = None
    operands: tuple = ()
    scratch: int = 0
    base: tuple | None = None
    weight: int = 1
    resized: Callable | None = None
    by_kernels: bool = False
    shape: tuple = field(init=False)  # of the first result
    strides: tuple = field(init=False)  # in elements

    def __post_init__(self):
        self.shape = self.results[0].shape if self.results and self.results[0] else ()
        strides, step = [], 1
        for n in reversed(self.shape):
            strides.append(step)
            step *= n or 1
        self.strides = tuple(reversed(strides))


@dataclass(eq=False, frozen=True, slots=True)
class Operator:
    """The declaration of an operation; see the head of this file.

    Parameters
    ----------
    name : str
        Name of the public function.
    arrays, options : tuple of str
        Names of the arguments, in the order in which everything here takes them. A single result
        has the dtype of the first array: PyTorch's adapter allocates it so.
    infer, plan : function
        Of specs and options: the specs of the results, and the :class:`Plan`.
    results : tuple of str
        Names of those arrays that receive the results; they may be None in a call. Empty for an
        operation that returns fresh arrays, as gradients do, or that writes its argument.
    gradient : function, optional
        Of a namespace, arrays, options, the gradient of the result and the wanted names.
    linear : tuple of str
        The arrays in which the operation is linear, with no other option than those that move data.
    lengths : dict
        The axis of some arrays whose length differs from call to call, such as a number of sites,
        and None for options that are such a length. Plans that say how they are ``resized`` are
        made of one another, in a fraction of the time.
    """

    name: str
    arrays: tuple
    options: tuple
    infer: Callable = field(repr=False)
    plan: Callable = field(repr=False)
    results: tuple = ("out",)
    gradient: Callable | None = field(default=None, repr=False)
    linear: tuple = ()
    lengths: dict = field(default_factory=dict, repr=False)
    _axes: tuple = field(init=False, repr=False)  # (place, axis) of arrays with such an axis
    _sizes: tuple = field(init=False, repr=False)  # places of options that are such a length

    def __post_init__(self):
        axes = [(place, self.lengths.get(name)) for place, name in enumerate(self.arrays)]
        sizes = [place for place, name in enumerate(self.options) if name in self.lengths]
        object.__setattr__(self, "_axes", tuple(pair for pair in axes if pair[1] is not None))
        object.__setattr__(self, "_sizes", tuple(sizes))

    def plan_for(self, arrays, options):
        """Return the plan of a call with NumPy or CuPy arrays, or specs, on the current device.

        A :class:`SpecGroup` stands for several arrays that follow each other.
        """
        try:
            key = (self.name, *map(fields_of, arrays), marshal.dumps(options, 2))
        except ValueError:  # an option that is no plain value
            return self.plan(_specs(map(fields_of, arrays), arrays), options)
        return _PLANS.get(key) or self._made(key, arrays, options)

    def plan_of(self, specs, options):
        """Return the plan of a call with arrays of these specs (or None) on the current device.

        Plain tuples of the fields of the specs will do.
        """
        try:
            key = (self.name, *specs, marshal.dumps(options, 2))
        except ValueError:
            return self.plan(_specs(specs, specs), options)
        return _PLANS.get(key) or self._made(key, specs, options)

    def find(self, specs, options):
        """Return the plan that is kept for such specs, or tuples equal to them, and options.

        None if there is none yet.
        """
        try:
            return _PLANS.get((self.name, *specs, marshal.dumps(options, 2)))
        except ValueError:
            return None

    def near(self, specs, options):
        """Return the plan that is kept, or one made of that of a call with other lengths; or None.

        Then a call like this one was checked before.
        """
        try:
            key = (self.name, *specs, marshal.dumps(options, 2))
        except ValueError:
            return None
        return _PLANS.get(key) or self._resized(key, options)

    def _resized(self, key, options):
        """Make and keep the plan of a call under a key, of that of one with other lengths; or None.

        The key is a name, specs, and the options.
        """
        if not self.lengths:
            return None
        kind, lengths = self._kind(key[1:-1], options)
        known = _PLANS.kinds.get(kind)
        found = None if known is None else known.resized(*lengths)
        return None if found is None else _keep(key, found)

    def _made(self, key, arrays, options):
        """Make the plan of a call and keep it under a key, with NumPy's numbers read as Python's.

        Other options that are no plain values are refused, or the plan is not kept: arrays are
        spelled as their bytes, which other arrays and numbers have, too.
        """
        if not is_plain(options):
            read = _without_numpy(options)
            if not is_plain(read):
                return self.plan(_specs(key[1:-1], arrays), options)
            key, options = (*key[:-1], marshal.dumps(read, 2)), read
            if key in _PLANS:
                return _PLANS[key]
        plan = self._resized(key, options)
        if plan is None:
            specs = key[1:-1]
            plan = _keep(key, self.plan(_specs(specs, arrays), options))
            if plan.resized is not None:
                kind, _ = self._kind(specs, options)
                if kind is not None:
                    _keep_kind(kind, plan)
        return plan

    def _kind(self, specs, options):
        """Return what calls that differ in lengths alone have in common, and the lengths.

        Lengths that are equal in one are so in all of them. None if one of them is 0, or no length.
        """
        axes = self._axes
        if SpecGroup in map(type, specs):
            specs, axes = self._ungrouped(specs)
        key, others, lengths = [self.name, *specs], list(options), []
        for place, axis in axes:
            spec = specs[place]
            if spec is None:
                continue
            if not isinstance(spec, tuple) or len(spec[0]) <= axis:
                return None, ()
            shape = spec[0]
            lengths.append(shape[axis])
            same = lengths.index(shape[axis])
            key[place + 1] = (same, *shape[:axis], *shape[axis + 1 :], *spec[1:])
        for place in self._sizes:
            if type(options[place]) is not int:
                return None, ()
            lengths.append(options[place])
            others[place] = lengths.index(options[place])
        try:
            key.append(marshal.dumps(others, 2))
        except ValueError:  # an option that is no plain value
            return None, ()
        return (None, ()) if 0 in lengths else (tuple(key), lengths)

    def _ungrouped(self, specs):
        """Return specs with groups whose arrays have such an axis taken apart, and the axes."""
        names, listed, axes = iter(self.arrays), [], []
        for spec in specs:
            grouped = type(spec) is SpecGroup
            own = [(next(names), member) for member in (spec.specs if grouped else (spec,))]
            if grouped and not any(name in self.lengths for name, _ in own):
                own = [(None, spec)]
            for name, member in own:
                if name in self.lengths:
                    axes.append((len(listed), self.lengths[name]))
                listed.append(member)
        return listed, axes

    def calls(self, given, options, make=False):
        """Return a list, kept with the plans, of what an adapter knows of calls.

        ``given`` says of each array what the adapter tells calls apart by. An empty tuple if there
        is no list, unless it is to be made: for options that are plain values, as those of a call
        whose plan is kept are.
        """
        try:
            key = (self.name, "calls", *given, marshal.dumps(options, 2))
        except ValueError:
            return ()
        found = _PLANS.get(key)
        if found is None and make:
            found = _keep(key, _Calls())
        return () if found is None else found.known

    def __call__(self, arrays, options):
        """Compute a call on native arrays, which are trusted to share no memory; return its result.

        Results that are None among ``arrays`` are allocated. Several results come as a tuple.
        """
        plan = self.plan_for(arrays, options)
        if not self.results:
            return plan.run(*arrays)
        given = list(arrays)
        places = [self.arrays.index(name) for name in self.results]
        for place, spec in zip(places, plan.results, strict=True):
            if given[place] is None:
                given[place] = empty(spec.shape, spec.dtype, given[0])
        plan.run(*given)
        found = tuple(given[place] for place in places)
        return found if len(found) > 1 else found[0]


def is_plain(value):
    """Whether marshal spells a value otherwise than all others: a plain one, or a tuple of them."""
    if type(value) in (tuple, list):
        return all(map(is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def _without_numpy(value):
    """Return options with NumPy's integers and floats as Python's."""
    if type(value) in (tuple, list):
        return type(value)(map(_without_numpy, value))
    return value.item() if isinstance(value, np.integer | np.floating) else value


def _specs(fields, arrays):
    """Return the specs of arrays from their fields; what is no array stays for the checks."""
    specs = []
    for f, array in zip(fields, arrays, strict=True):
        if type(f) is SpecGroup:
            specs += f.specs
        else:
            specs.append(ArraySpec(*f) if type(f) is tuple else array)
    return tuple(specs)


class _Plans(dict):
    """Plans by their keys, and their total weight.

    ``kinds`` has a plan of each kind of calls that differ in lengths alone: others are made of it.
    A network has few kinds of calls, but inputs of many lengths, so they are kept apart.
    """

    def __init__(self):
        super().__init__()
        self.weight, self.kinds = 0, {}


# The plans of all operations, those that were kept first in front. When they are many the older
# half is dropped, and made again as needed. Options are told apart by type as well as by value,
# which is why they are spelled by marshal: 1, 1.0 and True are equal in Python but not as a size.
_PLANS = _Plans()
_MOST = 4096  # total weight
_LOCK = threading.RLock()  # of the weight; a look-up needs none
_MOST_KINDS = 1024


class _Calls:
    """What an adapter knows of some calls; see :meth:`Operator.calls`."""

    weight = 1

    def __init__(self):
        self.known = []


def _keep(key, plan):
    """Keep a plan under a key; return it."""
    with _LOCK:
        _drop(key)
        if _PLANS.weight + plan.weight > _MOST:
            while _PLANS and _PLANS.weight > _MOST // 2:
                _drop(next(iter(_PLANS)))
        _PLANS.weight += plan.weight
        _PLANS[key] = plan
    return plan


def _keep_kind(kind, plan):
    """Keep a plan of a kind; forget all that are kept where they are many."""
    with _LOCK:
        if len(_PLANS.kinds) >= _MOST_KINDS:
            _PLANS.kinds.clear()
        _PLANS.kinds[kind] = plan


def _drop(key):
    """Drop what is kept under a key, if anything is."""
    plan = _PLANS.pop(key, None)
    if plan is not None:
        _PLANS.weight -= plan.weight


def clear_plans():
    """Drop all plans."""
    with _LOCK:
        _PLANS.clear()
        _PLANS.weight = 0
        _PLANS.kinds.clear()
