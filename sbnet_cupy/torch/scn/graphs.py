"""A network on lists of points as a CUDA graph, from points to result: little host time is left."""

import math

import torch
from torch.nn import Module
from torch.nn.functional import pad

from ...errors import DeviceError, DTypeError, ShapeError
from ...submanifold.coordinate_map import DUPLICATE
from ..network.training_graphs import check_settings, settings_of
from ..submanifold.replay import Replayed, rehearse_graph
from .capacities import check_inputs, measured, with_capacities
from .inputs import InputLayer, read_points
from .lattices import RandomWindows
from .points import whole_numbers


def graphed(net, inputs, slack=0.25):
    """Return ``run(points)``: the network as a CUDA graph, for different numbers of points.

    Replaying a graph takes much less of the host's time than an eager call, which takes
    milliseconds. The graph has room for a quarter more points, and sites of each layer, than the
    largest of ``inputs`` needed. With more points ``run`` raises ShapeError. With more sites than
    there is room for, the last ones are dropped: a later call warns of that, and ``run.check()``,
    which waits, raises CapacityError.

    In evaluation the graph computes the result only, and is captured again when weights or
    attributes have changed. In training there is a graph for gradients, too. There is memory for
    one call: compute its gradients before the next call, and once. Making the graph changes neither
    the network nor the state of the random generators. On a CPU there is no graph, and ``run``
    calls the network.

    Parameters
    ----------
    net : Module
        Called with ``[coords, features]`` or ``[coords, features, batch_size]``, as an
        :class:`InputLayer` is; its result is made of tensors in tuples, lists and dicts, with a row
        for each point or of a shape that does not depend on them. What you add to the layers of
        this package must leave out rows past the number of sites, as they do.
    inputs : iterable
        Inputs of the network, as large as those to come; ``[[coords, features]]`` for one.
    slack : float
        Room beyond the most that an input needed, as a share of it.

    Returns
    -------
    run : callable
        Takes and returns what the network does. ``batch_size`` is the largest of ``inputs``.

    Raises
    ------
    ShapeError
        If slack is negative or infinite, or inputs differ in their columns.
    ValueError
        If there are no inputs, the network has no InputLayer, or results or gradients depend on
        rows that are no points.
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
    kind = _OfPoints if inputs and inputs[0][1].is_cuda else _Run
    return kind(net, inputs, slack)


_FILLS = -1, 0  # of the samples and features of rows without a point
_HINT = "end the network with an OutputLayer or SparseToDense"


class _Run:
    """Calls of a network with points like those that it was made of."""

    def __init__(self, net, inputs, slack):
        layer = next((m for m in net.modules() if isinstance(m, InputLayer)), None)
        if layer is None:
            raise ValueError("net must have an InputLayer to take points, got one without")
        check_inputs(net, inputs, slack)
        self.net, self.layer, self.dimension = net, layer, layer.dimension
        coords, features = read_points("points", inputs[0])[:2]
        self.device, self.columns = features.device, coords.shape[1]
        self.channels, self.dtype = features.shape[1], features.dtype
        for points in inputs:
            self._check_like(points)
        self.samples = max(1, *map(layer.least_samples, inputs))
        self.room = math.ceil(max(len(points[0]) for points in inputs) * (1 + slack))
        self._settings = settings_of(net, features)
        self._prepare(inputs, slack)

    def _prepare(self, inputs, slack):
        """Call the network with the inputs: errors that calls would raise come now."""
        measured(self.net, inputs, slack)

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


class _OfPoints(_Run):
    """The same by a graph, on a GPU."""

    def _prepare(self, inputs, slack):
        """See how many sites the layers have, and capture the graph; compile its kernels before."""
        net, tensors = self.net, self._tensors_of(inputs[0])

        def call_of(net):
            return _Call(net, self.samples, measured(net, inputs, slack), self.device)

        rehearse_graph(net, call_of, tensors, self.room, _FILLS)
        call = call_of(net)
        drawn = [
            name for name, module in net.named_modules()
            if module.training and isinstance(module, RandomWindows)
        ]  # fmt: skip
        if drawn:
            raise RuntimeError(
                "layers whose windows are drawn on the host at each call have no CUDA graph in "
                f"training, as replays would not draw any, got {', '.join(drawn)}; call the "
                "network itself"
            )
        self._replayed = Replayed(call, net, tensors, self.room, _FILLS, _HINT)

    def _tensors_of(self, points):
        """Return points as the graph takes them, with their sample."""
        coords = whole_numbers(points[0].to(self.device))
        if self.columns == self.dimension:
            coords = pad(coords, (0, 1))
        return coords, points[1]

    def __call__(self, points):
        """Return what the network does of the points."""
        self._check_call(points)
        return self._replayed(self._tensors_of(points))

    def check(self):
        """Return self; raise CapacityError if sites were dropped since the last check; wait."""
        self._replayed.check()
        return self


class _Call(Module):
    """A call of a network with tensors alone.

    ``most`` are the most of all calls: the sites of each layer, points outside, and whether sites
    were listed twice.
    """

    unique = "in mode 0"

    def __init__(self, net, samples, capacities, device):
        super().__init__()
        layer = next(m for m in net.modules() if isinstance(m, InputLayer))
        self.net, self.samples, self.capacities, self._input = net, samples, capacities, [layer]
        self._names = {module: name for name, module in net.named_modules()}
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

    def alone(self, coords, features):
        """Call the network, with as many rows as sites."""
        return self.net([coords, features, self.samples])

    def check_rows(self, few, padded):
        """Raise if rows without a point are put at sites: none is, as their sample is -1."""

    def lists(self):
        """Return the name of each layer that makes sites, and its rows."""
        return [(f"layer {self._names[m]!r}", rows) for m, rows in self.capacities.items()]
