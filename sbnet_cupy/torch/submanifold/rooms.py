"""Room for the lists of sites that a network makes: calls are measured, others have that capacity.

A list without a capacity has as many rows as sites, which waits for a GPU. In a CUDA graph nothing
waits: there the lists of a call get capacities, in the order in which they are made.
"""

import contextlib
import math
import threading

import torch

from ...submanifold.distinct import DUPLICATE, OUTSIDE

_CALL = threading.local()  # the Rooms of the call that a thread makes


def room(capacity, batch_size=None):
    """Return the capacity and batch size that the next list of sites of a call is made with."""
    rooms = getattr(_CALL, "rooms", None)
    return (capacity, batch_size) if rooms is None else rooms.take(capacity, batch_size)


def note(coordinates, inverse=None, rows=None, sample=None):
    """Note a list of sites that was made, and at which of them points are: int32, -1 for none.

    Those of ``rows`` that are not of a negative sample should be at one, and no ``sample`` should
    be one that there is no room for.
    """
    rooms = getattr(_CALL, "rooms", None)
    if rooms is not None:
        rooms.note(coordinates, inverse, rows, sample)


class Rooms:
    """Room for each list of sites that calls of a network make.

    Parameters
    ----------
    net : Module
        Its modules name the lists that they make in their forward.
    slack : float
        Share of room beyond the most that a measured call needed.

    Attributes
    ----------
    most : list of int
        Sites of each list: the most of the measured calls.
    rows : sequence of int
        Rows that each list had in the last call with capacities.
    """

    def __init__(self, net, slack):
        self.net, self.slack, self.most, self.rows = net, slack, [], ()
        self._samples, self._names, self._running = [], [], []
        self._number = None  # of lists in each call, once it is known
        self._begin(None)

    def _begin(self, how, keeps=False):
        """Begin a call, which is ``how``: measured, alone, with capacities, or over if None."""
        self._how, self._keeps = how, keeps
        self._made, self._inverses, self._lost, self._twice = [], [], [], []

    @contextlib.contextmanager
    def measured(self):
        """Within this a call is measured."""
        hooks = []
        for name, module in self.net.named_modules():
            hooks.append(module.register_forward_pre_hook(self._entered(name)))
            hooks.append(module.register_forward_hook(self._left, always_call=True))
        try:
            with self._call("measured"):
                yield
        finally:
            for hook in hooks:
                hook.remove()
            self._running.clear()

    def alone(self):
        """Within this lists have the batch sizes of those that were measured, and no capacity."""
        return self._call("alone", keeps=True)

    def with_capacities(self, keeps=False):
        """Within this lists have the capacities that were measured, and some more.

        If it ``keeps`` the places of points, :meth:`placed` counts them.
        """
        return self._call("with capacities", keeps)

    @contextlib.contextmanager
    def _call(self, how, keeps=False):
        before, _CALL.rooms = getattr(_CALL, "rooms", None), self
        self._begin(how, keeps)
        try:
            yield
            self._check_number()
        finally:
            _CALL.rooms = before
            self._begin(None)

    def _check_number(self):
        """Raise unless this call has made as many lists as those before it."""
        made = len(self._made)
        if self._number is None:
            self._number = made
        elif made != self._number:
            raise RuntimeError(
                "the network must make as many lists of sites in each call, got "
                f"{made} and {self._number}; call it itself"
            )

    def _entered(self, name):
        def enter(module, inputs):
            self._running.append(name)

        return enter

    def _left(self, module, inputs, output):
        self._running.pop()

    def take(self, capacity, batch_size):
        """Return the capacity and batch size of the next list; those that are given, if any."""
        number = len(self._made)
        if self._how != "measured" and number < len(self.most):
            batch_size = self._samples[number] if batch_size is None else batch_size
            if self._how == "with capacities" and capacity is None:
                capacity = math.ceil(self.most[number] * (1 + self.slack))
        return capacity, batch_size

    def note(self, coordinates, inverse, rows, sample):
        """Note a list that was made; see :func:`note`."""
        number = len(self._made)
        self._made.append((coordinates.count, coordinates.capacity))
        if inverse is not None and self._keeps:
            self._inverses.append(inverse)
        if self._how == "measured":
            self._measure(number, coordinates)
        elif rows is not None or sample is not None:
            there = rows[:, 0] >= 0 if sample is None else sample >= coordinates.batch_size
            lost = ((inverse < 0) & there).sum(0, True, dtype=torch.int32)
            status = coordinates.status
            twice = status & DUPLICATE
            status.copy_(twice | (lost > 0).int() * OUTSIDE)
            self._lost.append(torch.where(coordinates.count > coordinates.capacity, 0, lost))
            self._twice.append(twice)

    def _measure(self, number, coordinates):
        if number == len(self.most):
            self.most.append(0)
            self._samples.append(coordinates.batch_size)
            self._names.append(self._running[-1] if self._running else "")
        self.most[number] = max(self.most[number], coordinates.number())
        samples = self._samples[number], coordinates.batch_size
        self._samples[number] = None if None in samples else max(samples)

    def seen(self, like):
        """Return what the call had, int32: the sites of each list, points lost, and twice."""
        self._check_number()
        none = torch.zeros(1, dtype=torch.int32, device=like.device)
        lost, twice = (torch.stack(x).sum(0, dtype=torch.int32) if x else none
                       for x in (self._lost, self._twice))  # fmt: skip
        counts, self.rows = zip(*self._made, strict=True) if self._made else ((), ())
        return torch.cat([*counts, lost, twice])

    def placed(self):
        """Return how many points of each list are at sites, and how many are lost; wait."""
        return [int((inverse >= 0).sum()) for inverse in self._inverses], sum(map(int, self._lost))

    def lists(self):
        """Return the name of each list, and the rows that it had in the last call."""
        names = (
            f"layer {name!r}" if name else f"list {number} of sites"
            for number, name in enumerate(self._names)
        )
        return list(zip(names, self.rows, strict=True))
