"""Calls of a network at sites by a CUDA graph: points are padded, and room for sites is watched."""

import copy
import math

import torch
from torch.nn.functional import pad
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointError

from ...errors import CapacityError
from ...submanifold.coordinate_map import CoordinateMap
from ...submanifold.map_kernels import LISTS
from ...submanifold.sparse_tensor import SparseTensor
from ..network.ends import warn
from ..network.graphs import capture
from ..network.recordings import settings
from ..network.rehearsal import differentiate, rehearse_once
from ..network.state import State
from ..network.training_graphs import Graphs, check_replayable, refuse_hooks, settings_of
from .kept_weights import KeptWeights
from .unchanged import put_back, unchanged

_NEAR = 0.05  # of the norm: less than a few rows that do not belong there make
_ROUNDINGS = 16  # of a number, one after the other


class Replayed:
    """Calls of a network with tensors, of which the first and others have a row for each point.

    Parameters
    ----------
    call : Module
        Calls the network with padded tensors. ``call.alone(*tensors)`` does with others, of any
        number of points; ``call.check_rows(few, padded)`` raises where rows without a point are at
        sites. ``call.most`` is an int32 tensor of the most that was seen in calls: the sites of
        each list, points that are at none, and whether sites were listed twice.
        ``call.lists()`` returns the name of each list and its rows, and ``call.unique`` says where
        no site may be listed twice.
    net : Module
        The network.
    tensors : sequence of tensor
        Those of a call.
    room : int
        Rows that the tensors of points get.
    fills : sequence of float or None
        What rows without a point hold, for each of the tensors; None for one that is not of points.
    hint : str
        What to do where a result has no tensors.
    """

    def __init__(self, call, net, tensors, room, fills, hint):
        refuse_hooks(net)
        self.net, self.room, self._call, self._fills = net, room, call, fills
        self.device = tensors[0].device
        with torch.cuda.device(self.device):
            self._form = _Form(hint)
            self._of_points = self._leaves_of_points(tensors)
            self._seen = torch.zeros(call.most.shape, dtype=torch.int32, pin_memory=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        self._warned = False
        own = _padded(tensors, fills, room)
        if net.training:
            self._graphs = Graphs(_Tensors(call, self._form), own, net)
        else:
            self._own = [tensor.detach().clone() for tensor in own]
            self._capture()
        call.most.zero_()

    def _capture(self):
        """Capture a call in evaluation."""
        self._weights = KeptWeights(self.net)  # which the graph reads

        def call():
            return self._form.taken_apart(self._call(*self._own))

        with torch.no_grad(), self._weights.used(), put_back(self.net, self.device):
            check_replayable(self.net, self.device, call)
            self.graph, self._leaves = capture(call, self._own[0])
        self._state, self._modes = State(self.net, most=math.inf), self._modes_now()

    def _modes_now(self):
        return [module.training for module in self.net.modules()]

    def _leaves_of_points(self, tensors):
        """Return which tensors of the result have a row for each point; raise if others are wrong.

        Those that have one row more where there is room for one point more. What is neither, nor
        are sites or has a row for each place of a grid, such as a mean of all points, counts rows
        that are no points: it differs from what the network makes of as few points alone.

        Where a network draws random numbers, but for dropout, its results cannot be compared.
        """
        few = half_of(tensors, self._fills)
        rows = len(few[0])
        padded, longer = (_padded(few, self._fills, self.room + more) for more in (0, 1))
        with unchanged(self.net, self.device) as again:
            with torch.no_grad():
                found, other = self._call(*padded), self._call(*longer)
                shapes = [[t.shape for t in self._form.taken_apart(y)] for y in (found, other)]
                of_points = [a != b for a, b in zip(*shapes, strict=True)]
                if again():
                    return of_points
                self._call.check_rows(few, padded)
                again()
                self._compare(found, self._call.alone(*few), of_points, rows)
                again()
            if self.net.training:
                found = self._call(*padded)
                again()
                self._check_gradients(found, self._call.alone(*few), of_points, rows)
        return of_points

    def _check_gradients(self, found, alone, of_points, rows):
        """Raise if rows that are no points change gradients of parameters."""
        both = self._cut(found, alone, of_points, rows)
        try:
            grads = list(map(self._gradient, both))
        except CheckpointError as error:
            raise RuntimeError(
                "lists of sites must not be made in what torch.utils.checkpoint computes again, "
                "where they have no room of their own; make them outside of it, and compute "
                "features again alone"
            ) from error
        if not _are_near(*grads, _largest(both[1])):
            raise ValueError(
                "gradients of the network's parameters must not depend on how many rows are no "
                "points; norms over sites are masked_batch_norm, and what rows without a point "
                "hold must be finite where it is multiplied by weights"
            )

    def _gradient(self, leaves):
        """Return the gradient of all parameters, of a sum of these tensors with weights."""
        total = sum(
            (x * torch.arange(x.numel(), device=x.device).view(x.shape).cos()).sum()
            for x in leaves
            if x.requires_grad
        )
        wanted = [p for p in self.net.parameters() if p.requires_grad]
        if not wanted or not isinstance(total, torch.Tensor):
            return torch.zeros(1)
        grads = torch.autograd.grad(total, wanted, allow_unused=True)
        grads = [g.flatten() for g in grads if g is not None]
        return torch.cat(grads) if grads else torch.zeros(1)

    def _cut(self, found, alone, of_points, rows):
        """Return the tensors of two results without rows that hold no site or, the first, point."""
        cut = []
        for result, by_points in ((found, of_points), (alone, [False] * len(of_points))):
            tensors, sites = self._form.taken_apart(result), self._form.sites()
            cut.append([
                tensor[:rows] if by_point
                else tensor[: int(tensors[sites[number]])] if number in sites
                else tensor
                for number, (tensor, by_point) in enumerate(zip(tensors, by_points, strict=True))
            ])  # fmt: skip
        return cut

    def _compare(self, found, alone, of_points, rows):
        """Raise unless a result without rows that hold nothing is what the points alone give."""
        found, alone = self._cut(found, alone, of_points, rows)
        most = _largest(alone)
        if not all(_are_near(*pair, most) for pair in zip(found, alone, strict=True)):
            raise ValueError(
                "the network's result must have a row for each point, be a SparseTensor, or not "
                "depend on how many rows are no points; use masked_batch_norm for norms over "
                "sites, and reduce over points outside of what is graphed"
            )

    def __call__(self, tensors):
        """Return what the network does of tensors that were checked."""
        self._warn()
        rows = len(tensors[0])
        with torch.cuda.device(self.device):
            if self.net.training:
                leaves = self._graphs.replay(*self._taken(self._graphs.own, tensors, rows))
                leaves = [self._rows(*x, rows) for x in enumerate(leaves)]
            else:
                if not self._state.holds():
                    if self._modes != self._modes_now():
                        self._of_points = self._leaves_of_points(tensors)
                    self._capture()
                with torch.no_grad():
                    self._taken(self._own, tensors, rows)
                    self.graph.replay()
                    leaves = [self._rows(*x, rows).clone() for x in enumerate(self._leaves)]
            self._seen.copy_(self._call.most, non_blocking=True)
            self._copied.record()
        return self._form.put_together(leaves)

    def _taken(self, own, tensors, rows):
        """Return tensors with as many rows as there is room for, as a graph takes them.

        Copied to where it reads them, its ``own``, unless they are to have gradients.
        """
        taken = []
        for mine, tensor, fill in zip(own, tensors, self._fills, strict=True):
            if mine.requires_grad:
                mine = tensor if fill is None else _with_rows(tensor, self.room, fill)
            elif fill is None:
                mine.copy_(tensor)
            else:
                mine[:rows].copy_(tensor)
                mine[rows:].fill_(fill)
            taken.append(mine)
        return taken

    def _rows(self, number, leaf, rows):
        return leaf[:rows] if self._of_points[number] else leaf

    def check(self):
        """Raise CapacityError if sites were dropped since the last check; wait."""
        most = self._call.most.tolist()
        self._call.most.zero_()
        self._warned = False
        self._seen.zero_()
        lacking = self._lacking(most)
        if lacking:
            raise CapacityError(lacking)

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
            f"{name} had {n} sites, with room for {rows}"
            for (name, rows), n in zip(self._call.lists(), counts, strict=True)
            if n > rows
        ]
        if outside:
            found.append(f"{outside} points lay outside of the grid or the samples")
        if twice:
            found.append(f"sites were listed twice {self._call.unique}")
        return f"{', '.join(found)}; what there was no room for was dropped" if found else ""


class _Form:
    """How a result is made of tensors."""

    def __init__(self, hint):
        self.hint = hint

    def taken_apart(self, result):
        """Return the tensors of a result; remember how it was made of them."""
        leaves, self._tree = tree_flatten(result)
        tensors, self._leaves, self._maps = [], [], {}
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                self._leaves.append((len(tensors), None))
                tensors.append(leaf)
            elif isinstance(leaf, SparseTensor | CoordinateMap):
                features, sites = None, leaf
                if isinstance(leaf, SparseTensor):
                    features, sites = len(tensors), leaf.coordinates
                    tensors.append(leaf.features)
                self._leaves.append((features, id(sites)))
                if id(sites) not in self._maps:
                    arrays = sites._arrays()
                    grid = sites.spatial_shape, sites.batch_size
                    self._maps[id(sites)] = slice(len(tensors), len(tensors) + len(arrays)), grid
                    tensors += arrays
            else:
                raise TypeError(
                    "the network's result must be made of tensors in tuples, lists and dicts to "
                    f"come out of a CUDA graph, got a {type(leaf).__name__}; {self.hint}"
                )
        return tensors

    def put_together(self, tensors):
        """Return a result like the last one, of other tensors."""
        maps, leaves = {}, []
        for number, (place, grid) in self._maps.items():
            indices, count, *status = tensors[place]
            maps[number] = CoordinateMap(indices, count, *grid, *status)
        for features, sites in self._leaves:
            if sites is None:
                leaves.append(tensors[features])
            elif features is None:
                leaves.append(maps[sites])
            else:
                leaves.append(SparseTensor(tensors[features], maps[sites]))
        return tree_unflatten(leaves, self._tree)

    def sites(self):
        """Return which tensors are of sites, and which of these is the count, as pairs."""
        found = {}
        for features, number in self._leaves:
            if number is not None:
                place = self._maps[number][0]
                found[place.start] = place.start + 1
                if features is not None:
                    found[features] = place.start + 1
        return found


class _Tensors(torch.nn.Module):
    """A call whose result is a list of tensors."""

    def __init__(self, call, form):
        super().__init__()
        self.call, self._form = call, form

    def forward(self, *tensors):
        """Call the network."""
        return self._form.taken_apart(self.call(*tensors))


def rehearse_graph(net, measured, tensors, room, fills):
    """Compile at once the kernels of a network's graph, and of the calls that it is checked by.

    ``measured(net)`` measures a network and returns what a Replayed calls.
    """

    def calls():
        twin = copy.deepcopy(net)
        with torch.no_grad():
            call = measured(twin)
        with torch.set_grad_enabled(net.training):
            for result in call(*padded), call.alone(*few):
                differentiate(_Form("").taken_apart(result), (*padded, *twin.parameters()))

    padded, few = _padded(tensors, fills, room), half_of(tensors, fills)
    sizes = [(t.shape, t.dtype, t.requires_grad) for t in tensors]
    kind = ("graphed", sizes, room, *settings_of(net, tensors[0]), *settings())
    rehearse_once(net, kind, calls, tensors[0], lambda: not State(net).hooked, (LISTS,))


def half_of(tensors, fills):
    """Return tensors of half of their points, with which a network is checked."""
    rows = (len(tensors[0]) + 1) // 2
    pairs = zip(tensors, fills, strict=True)
    return [tensor if fill is None else tensor[:rows] for tensor, fill in pairs]


def _padded(tensors, fills, room):
    """Return tensors of as many points as there is room for."""
    return [
        tensor if fill is None else _with_rows(tensor, room, fill)
        for tensor, fill in zip(tensors, fills, strict=True)
    ]


def _with_rows(tensor, rows, fill):
    """Return a tensor with more rows, which hold a number."""
    before = (0, 0) * (tensor.dim() - 1)
    return pad(tensor, (*before, 0, rows - len(tensor)), value=fill)


def _are_near(found, expected, most):
    """Whether two tensors are the same up to what other sums of numbers may make of them.

    The norm of what they are made of is up to ``most``, which rounding goes by where sums cancel.
    """
    if found.shape != expected.shape:
        return False
    if not all(torch.equal(is_so(found), is_so(expected)) for is_so in (torch.isnan, torch.isinf)):
        return False
    eps = torch.finfo(found.dtype).eps if found.is_floating_point() else 0
    found, expected = _exact(found), _exact(expected)
    bound = max(_NEAR * float(expected.norm()), _ROUNDINGS * eps * most)
    return float((found - expected).norm()) <= bound


def _largest(tensors):
    """Return the largest norm of one of the tensors of floats."""
    return max((float(_exact(x).norm()) for x in tensors if x.is_floating_point()), default=0.0)


def _exact(tensor):
    """Return numbers in float64, 0 where they are not finite."""
    return tensor.detach().double().nan_to_num(0, 0, 0)
