"""A network on lists of points as a CUDA graph, from points to result: little host time is left."""

import math

import torch
from torch.nn import Module
from torch.nn.functional import pad
from torch.utils._pytree import tree_flatten, tree_unflatten

from ...errors import CapacityError, DeviceError, DTypeError, ShapeError
from ...submanifold.coordinate_map import DUPLICATE
from ..network.ends import warn
from ..network.graphs import capture
from ..network.state import State
from ..network.training_graphs import Graphs, check_settings, refuse_hooks, settings_of
from .capacities import evaluated, measured, with_capacities
from .inputs import InputLayer, read_points
from .lattices import RandomWindows
from .points import whole_numbers


def graphed(net, inputs, slack=0.25):
    """Return ``run(points)``: the network, replayed as a CUDA graph on points of any number.

    An eager call takes milliseconds on the host, a replay some microseconds. The graph has room for
    a quarter more points, and sites of each layer, than the largest of ``inputs`` needed. Of more
    points ``run`` raises ShapeError; of more sites than there is room for the last ones are
    dropped: a later call warns of that, and ``run.check()``, which waits, raises CapacityError.

    In evaluation the graph holds a call, and is captured again when weights or attributes have
    changed; gradients are not computed. Of a network in training it holds results and gradients.
    There is memory for one call: its gradients must be computed before the next call, and once.
    To make it changes neither the network nor the state of the random generators. On a CPU there is
    no graph, and ``run`` calls the network.

    Parameters
    ----------
    net : Module
        Called with ``[coords, features]`` or ``[coords, features, batch_size]``, as an
        :class:`InputLayer` is; its result is made of tensors in tuples, lists and dicts, with a row
        for each point or of a shape that does not depend on them. What you add to the layers of
        this package must leave out rows past the number of sites, as they do.
    inputs : iterable
        Inputs of the network, as large as those to come.
    slack : float
        Share of room beyond the most that an input needed.

    Returns
    -------
    run : callable
        Takes and returns what the network does. ``batch_size`` is the largest of ``inputs``.

    Raises
    ------
    ShapeError
        If slack is negative or infinite, or inputs differ in their columns.
    ValueError
        If there are no inputs, the network has no InputLayer, or its result depends on rows that
        are no points.
    TypeError
        If the result is not made of tensors.
    RuntimeError
        If the network has forward hooks, draws windows at random places in training, or waits for
        the GPU where layers have capacities.

    Examples
    --------
    >>> net = Sequential(InputLayer(2, 9, mode=3), SubmanifoldConvolution(2, 1, 4, 3, False))
    >>> net = Sequential(net, OutputLayer(2)).eval()
    >>> points = [torch.tensor([[1, 1], [5, 6], [1, 1]]), torch.ones(3, 1)]
    >>> run = graphed(net, [points])
    >>> run([points[0][:2], points[1][:2]]).shape
    torch.Size([2, 4])
    """
    inputs = list(inputs)
    kind = _Replayed if inputs and inputs[0][1].is_cuda else _Run
    return kind(net, inputs, slack)


_NEAR = 0.05  # of the norm: less than a few rows that do not belong there make


class _Run:
    """Calls of a network with points like those that it was made of."""

    def __init__(self, net, inputs, slack):
        layer = next((m for m in net.modules() if isinstance(m, InputLayer)), None)
        if layer is None:
            raise ValueError("net must have an InputLayer to take points, got one without")
        self.net, self.layer, self.dimension = net, layer, layer.dimension
        self.capacities = measured(net, inputs, slack)
        coords, features = inputs[0][:2]
        self.device, self.columns = features.device, coords.shape[1]
        self.channels, self.dtype = features.shape[1], features.dtype
        for points in inputs:
            self._check_like(points)
        self.samples = max(1, *map(layer.least_samples, inputs))
        self.room = math.ceil(max(len(points[0]) for points in inputs) * (1 + slack))
        self._settings = settings_of(net, features)

    def __call__(self, points):
        """Return what the network does of the points."""
        self._check_call(points)
        return self.net([*points[:2], self.samples])

    def check(self):
        """Return self; raise CapacityError if sites were dropped since the last check."""
        return self

    def _check_like(self, points):
        coords, features = read_points("points", points)
        if coords.dim() != 2 or coords.shape[1] != self.columns:
            raise ShapeError(
                f"coords must have shape (N, {self.columns}), as those that the graph was made of, "
                f"got {tuple(coords.shape)}"
            )
        if tuple(features.shape) != (len(coords), self.channels):
            raise ShapeError(
                f"features must have shape ({len(coords)}, {self.channels}), got "
                f"{tuple(features.shape)}"
            )
        if features.dtype != self.dtype:
            raise DTypeError(f"features must be {self.dtype}, got {features.dtype}; convert them")
        if features.device != self.device:
            raise DeviceError(
                f"features must be on {self.device}, as those that the graph was made of, got "
                f"{features.device}; move them"
            )

    def _check_call(self, points):
        self._check_like(points)
        if len(points[0]) > self.room:
            raise ShapeError(
                f"points must be at most {self.room}, for which there is room, got "
                f"{len(points[0])}; graph the network with larger inputs, or call it itself"
            )
        if len(points) > 2 and int(points[2]) > self.samples:
            raise ShapeError(
                f"batch_size must be at most {self.samples}, as of the inputs that the graph was "
                f"made of, got {points[2]}"
            )
        check_settings(self._settings, settings_of(self.net, points[1]), "features")


class _Replayed(_Run):
    """The same by a graph, on a GPU."""

    def __init__(self, net, inputs, slack):
        super().__init__(net, inputs, slack)
        refuse_hooks(net)
        self._names = {module: name for name, module in net.named_modules()}
        random = (m for m in self._names if m.training and isinstance(m, RandomWindows))
        drawn = [self._names[m] for m in random]
        if drawn:
            raise RuntimeError(
                "layers whose windows are drawn on the host at each call have no CUDA graph in "
                f"training, as replays would not draw any, got {', '.join(drawn)}; call the "
                "network itself"
            )
        self._call = _Call(net, self.layer, self.samples, self.capacities, self.device)
        with torch.cuda.device(self.device):
            self._of_points = self._leaves_of_points(inputs[0])
            self._seen = torch.zeros(self._call.most.shape, dtype=torch.int32, pin_memory=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        self._warned = False
        own = self._padded(inputs[0])
        if net.training:
            self._graphs = Graphs(self._call, own, net)
        else:
            self._own = [tensor.detach().clone() for tensor in own]
            self._capture()
        self._call.most.zero_()

    def _capture(self):
        """Capture a call in evaluation."""

        def call():
            return self._call(*self._own)

        with torch.no_grad():
            self.graph, result = capture(call, self._own[1])
        self._leaves, self._tree = tree_flatten(result)
        self._state = State(self.net, most=math.inf)

    def _padded(self, points):
        """Return points as the graph takes them: with their sample, which is -1 where is none."""
        coords, features = whole_numbers(points[0].to(self.device)), points[1]
        missing = self.room - len(coords)
        if self.columns == self.dimension:
            coords = pad(coords, (0, 1))
        return pad(coords, (0, 0, 0, missing), value=-1), pad(features, (0, 0, 0, missing))

    def _leaves_of_points(self, points):
        """Return which tensors of the result have a row for each point; raise if others are wrong.

        Those that have one row more where there is room for one point more. What is neither nor
        has a row for each place of the grid, such as a mean of all points, counts rows that are no
        points: it differs from what the network makes of as few points alone.
        """
        rows = (len(points[0]) + 1) // 2
        few = [points[0][:rows], points[1][:rows]]
        padded = self._padded(few)
        longer = [pad(padded[0], (0, 0, 0, 1), value=-1), pad(padded[1], (0, 0, 0, 1))]
        with evaluated(self.net), torch.no_grad():
            alone, padded, longer = (
                tree_flatten(result)[0]
                for result in (
                    self.net([*few, self.samples]), self._call(*padded), self._call(*longer),
                )
            )  # fmt: skip
        for leaf in padded:
            if not isinstance(leaf, torch.Tensor):
                raise TypeError(
                    "the network's result must be made of tensors in tuples, lists and dicts to "
                    f"come out of a CUDA graph, got a {type(leaf).__name__}; end the network with "
                    "an OutputLayer or SparseToDense"
                )
        of_points = [a.shape != b.shape for a, b in zip(padded, longer, strict=True)]
        for expected, leaf, by_point in zip(alone, padded, of_points, strict=True):
            if not _are_near(leaf[:rows] if by_point else leaf, expected):
                raise ValueError(
                    "the network's result must have a row for each point, or not depend on how "
                    "many rows are no points; reduce over points outside of what is graphed"
                )
        return of_points

    def __call__(self, points):
        """Return what the network does of the points."""
        self._check_call(points)
        self._warn()
        rows, given = len(points[0]), self._padded(points)
        with torch.cuda.device(self.device):
            if self.net.training:
                leaves, tree = tree_flatten(self._graphs.replay(*given))
                leaves = [self._rows(i, leaf, rows) for i, leaf in enumerate(leaves)]
            else:
                if not self._state.holds():
                    self._capture()
                with torch.no_grad():
                    for own, new in zip(self._own, given, strict=True):
                        own.copy_(new)
                    self.graph.replay()
                    leaves = [self._rows(i, x, rows).clone() for i, x in enumerate(self._leaves)]
                tree = self._tree
            self._seen.copy_(self._call.most, non_blocking=True)
            self._copied.record()
        return tree_unflatten(leaves, tree)

    def _rows(self, number, leaf, rows):
        return leaf[:rows] if self._of_points[number] else leaf

    def check(self):
        """Return self; raise CapacityError if sites were dropped since the last check; wait."""
        most = self._call.most.tolist()
        self._call.most.zero_()
        self._warned = False
        self._seen.zero_()
        lacking = self._lacking(most)
        if lacking:
            raise CapacityError(lacking)
        return self

    def _warn(self):
        """Warn once of sites that calls have dropped, as far as their numbers have come."""
        if not self._warned and self._copied.query():
            lacking = self._lacking(self._seen.tolist())
            if lacking:
                self._warned = True
                warn(lacking)

    def _lacking(self, most):
        """Return what there was no room for, as a sentence, or nothing."""
        *counts, outside, twice = most
        found = [
            f"layer {self._names[layer]!r} had {n} sites, with room for {room}"
            for (layer, room), n in zip(self.capacities.items(), counts, strict=True)
            if n > room
        ]
        if outside:
            found.append(f"{outside} points lay outside of the grid or the samples")
        if twice:
            found.append("sites were listed twice in mode 0")
        if not found:
            return ""
        return f"{', '.join(found)}; what there was no room for was dropped"


class _Call(Module):
    """A call of a network with tensors alone.

    ``most`` are the most of all calls: the sites of each layer, points outside, and whether sites
    were listed twice.
    """

    def __init__(self, net, layer, samples, capacities, device):
        super().__init__()
        self.net, self.samples, self.capacities, self._input = net, samples, capacities, [layer]
        self.most = torch.zeros(len(capacities) + 2, dtype=torch.int32, device=device)
        self._size = torch.tensor([*layer.spatial_size.tolist(), samples], device=device)

    def forward(self, coords, features):
        """Call the network."""
        made = {}

        def seen(layer, _, output):
            made[layer] = output.coordinates

        hooks = [layer.register_forward_hook(seen) for layer in self.capacities]
        try:
            with with_capacities(self.capacities):
                result = self.net([coords, features, self.samples])
        finally:
            for hook in hooks:
                hook.remove()
        none = self.most.new_zeros(1)
        outside = ((coords < 0) | (coords >= self._size)).any(1) & (coords[:, -1] >= 0)
        counts = [made[layer].count if layer in made else none for layer in self.capacities]
        status = made[self._input[0]].status
        twice = none if status is None else status & DUPLICATE
        listed = torch.cat([*counts, outside.sum(0, True, dtype=torch.int32), twice])
        torch.maximum(self.most, listed, out=self.most)
        return result


def _are_near(found, expected):
    """Whether two tensors are the same up to what other sums may make of them."""
    if found.shape != expected.shape:
        return False
    found, expected = found.double().nan_to_num(), expected.double().nan_to_num()
    return bool((found - expected).norm() <= _NEAR * expected.norm())
