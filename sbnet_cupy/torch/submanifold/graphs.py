"""A network at sites as a CUDA graph, from points to result: little host time is left."""

import math

import torch
from torch.nn import Module

from ...core.scalars import as_number, as_number_in
from ...errors import DeviceError, DTypeError, ShapeError
from .._native import no_tensor, numpy_dtype
from ..network import casts
from ..network.training_graphs import check_module, check_settings
from .replay import Replayed, half_of, rehearse_graph
from .rooms import Rooms
from .unchanged import unchanged

_HINT = "return tensors and SparseTensors alone"


def graphed(net, inputs, slack=0.25, fill=None):
    """Return ``run(*tensors)``: the network as a CUDA graph, for different numbers of points.

    Replaying a graph takes much less of the host's time than an eager call, which takes
    milliseconds. Write the network as for eager calls: lists of sites need no ``capacity``. It is
    called with each of ``inputs``, and the graph has room for a quarter more points, and sites of
    each list, than the largest of them needed. With more points ``run`` raises ShapeError. With
    more sites than there is room for, the last ones are dropped: a later call warns of that, and
    ``run.check()``, which waits, raises CapacityError.

    In evaluation the graph computes the result only, with the weights of convolutions packed once.
    It is captured again when weights or attributes have changed; but changes that autograd's
    versions do not count, through ``weight.data`` or NumPy, are not noticed: make a new graph then.
    In training there is a graph for gradients, too. There is memory for one call: compute its
    gradients before the next call, and once. Parameters that affect only results outside the loss
    have the gradient 0, not None. Making the graph changes neither the network nor the state of the
    random generators. On a CPU there is no graph, and ``run`` calls the network.

    Parameters
    ----------
    net : Module
        Called with tensors. Its result is made of tensors and SparseTensors, in tuples, lists and
        dicts. A tensor has a row for each point, or a shape that does not depend on them; a
        SparseTensor has as many rows as there is room for, and its ``coordinates.valid()`` says
        which hold a site.
    inputs : iterable of tensor, or of tuple of tensor
        Arguments of the network, as large as in the calls to come; ``[tensor]`` for one input of
        one tensor. Tensors that have as many rows as the first one, in each of the inputs, have a
        row for each point; the others must have the same shape in all inputs.
    slack : float
        Room beyond the most that an input needed, as a share of it.
    fill : float or sequence of float, optional
        Value of rows without a point; a sequence has one for each tensor of an input. By default
        NaN for the first tensor of an input and 0 for others, if they are floating; -1 for signed
        integers, the largest value for unsigned ones, and False for bool. :func:`voxelize` drops
        points with a NaN, and :func:`sparse_tensor` and :func:`coordinate_map` drop rows of a
        negative sample. Where the points are also multiplied by weights choose a number outside
        ``ranges``, and for labels the ``ignore_index`` of the loss.

    Returns
    -------
    run : callable
        Takes and returns what the network does. Where ``batch_size`` is not given to a list of
        sites, it is the largest of ``inputs``.

    Raises
    ------
    DTypeError, ShapeError, DeviceError
        If inputs are not made of tensors, or of tensors that differ in more than their number of
        points; or slack is negative or infinite.
    ValueError
        If there are no inputs, or results or gradients depend on rows that are no points, such as
        a norm over all rows of ``features``.
    TypeError
        If ``net`` is no module, or its result is not made of tensors.
    RuntimeError
        If the network has forward hooks, makes another number of lists of sites in each call, or
        some in what ``torch.utils.checkpoint`` computes again, draws random numbers on the host,
        replaces a buffer in each call, or waits for the GPU though its lists have capacities.

    Source: B. Graham's SparseConvNet for the layers; CUDA graphs for the rest.

    Examples
    --------
    >>> class Net(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.w = torch.nn.Parameter(torch.ones(3, 3, 1, 4))
    ...     def forward(self, points, values):
    ...         grid = {"ranges": [(0, 8), (0, 8)], "voxel_size": 1}
    ...         x, voxel = voxelize(points, values, **grid)
    ...         return submanifold_conv(x, self.w).features[voxel]  # a row for each point
    >>> scan = torch.tensor([[1.5, 1.5], [1.5, 2.5], [6.0, 3.0]]), torch.ones(3, 1)
    >>> run = graphed(Net().eval(), [scan])
    >>> run(scan[0][:2], scan[1][:2]).shape
    torch.Size([2, 4])
    """
    check_module(net)
    if isinstance(inputs, torch.Tensor):
        raise DTypeError(
            "inputs must be a list of inputs of the network, got a Tensor; pass [tensor] for one"
        )
    with torch.inference_mode(False):  # calls outside of it write to what a graph reads
        return _Run(net, [_tensors_of(given) for given in inputs], slack, fill)


class _Run:
    """Calls of a network with points like those that it was made of."""

    def __init__(self, net, inputs, slack, fill):
        if not 0 <= as_number("slack", slack, nan=False) < math.inf:
            raise ShapeError(f"slack must not be negative or infinite, got {slack!r}")
        if not inputs:
            raise ValueError("inputs must not be empty; pass some as large as those to come")
        self.net, self._like = net, inputs[0]
        self._of_points = [
            all(t.dim() and len(given) > k and given[k].dim() and len(given[k]) == len(given[0])
                for given in inputs)
            for k, t in enumerate(self._like)
        ]  # fmt: skip
        for given in inputs:
            self._check_like(given)
        self._like = max(inputs, key=lambda given: len(given[0]))  # which shows most of a network
        self.room = math.ceil(len(self._like[0]) * (1 + slack))
        self._settings = self._settings_of(self._like)
        fills = self._fills(fill)
        device = self._like[0].device

        def measured(net):
            rooms = Rooms(net, slack)
            checked = [half_of(self._like, fills)] if self._replays() else []
            for given in (*inputs, *checked):
                with rooms.measured():
                    net(*given)
            return _Call(net, rooms, device)

        if self._replays():
            rehearse_graph(net, measured, self._like, self.room, fills)
        with unchanged(net, device), torch.no_grad():
            call = measured(net)
        self._replayed = None
        if self._replays():
            self._replayed = Replayed(call, net, self._like, self.room, fills, _HINT)

    def _replays(self):
        """Whether there are graphs where the tensors are."""
        return self._like[0].is_cuda

    def __call__(self, *tensors):
        """Return what the network does of the tensors."""
        self._check_like(tensors)
        if len(tensors[0]) > self.room:
            raise ShapeError(
                f"points must be at most {self.room}, for which there is room, got "
                f"{len(tensors[0])}; graph the network with larger inputs, or call it itself"
            )
        check_settings(self._settings, self._settings_of(tensors), "a tensor")
        return self.net(*tensors) if self._replayed is None else self._replayed(tensors)

    def check(self):
        """Return self; raise CapacityError if sites were dropped since the last check."""
        if self._replayed is not None:
            self._replayed.check()
        return self

    def _settings_of(self, tensors):
        needs = [t.requires_grad for t in tensors]
        return self.net.training, casts.dtype_for(self._like[0]), needs

    def _fills(self, fill):
        """Return what each tensor holds in rows without a point, None for one without points."""
        if isinstance(fill, list | tuple):
            if len(fill) != len(self._like):
                raise ShapeError(
                    f"fill must be a number, or one for each of the {len(self._like)} tensors of "
                    f"an input, got {len(fill)}"
                )
            given = fill
        else:
            given = [fill] * len(self._like)
        given = [None if number is None else as_number("fill", number) for number in given]
        return [
            _fill_of(k, tensor.dtype, number) if of_points else None
            for k, (tensor, number, of_points)
            in enumerate(zip(self._like, given, self._of_points, strict=True))
        ]  # fmt: skip

    def _check_like(self, tensors):
        """Raise unless tensors differ from the first input in nothing but the number of points."""
        if len(tensors) != len(self._like):
            raise ShapeError(
                f"the network must be called with {len(self._like)} tensors, as of the first of "
                f"inputs, got {len(tensors)}"
            )
        for k, (tensor, like) in enumerate(zip(tensors, self._like, strict=True)):
            if not isinstance(tensor, torch.Tensor):
                raise no_tensor(f"tensor {k}", tensor)
            shape, of_points = tuple(like.shape), self._of_points[k]
            if of_points and k:
                shape = (len(tensors[0]), *shape[1:])
            elif of_points and tensor.dim():
                shape = (len(tensor), *shape[1:])
            if tuple(tensor.shape) != shape:
                raise ShapeError(
                    f"tensor {k} must have shape {shape}{', a row for each point' * of_points}, "
                    f"got {tuple(tensor.shape)}"
                )
            if tensor.dtype != like.dtype:
                raise DTypeError(
                    f"tensor {k} must be {like.dtype}, as that of the first of inputs, got "
                    f"{tensor.dtype}; convert it"
                )
            if tensor.device != self._like[0].device:
                raise DeviceError(
                    f"tensor {k} must be on {self._like[0].device}, as the first tensor of "
                    f"inputs, got {tensor.device}; move it"
                )


class _Call(Module):
    """A call of a network whose lists of sites have room; ``most`` is the most of all calls."""

    unique = 'with mode="unique"'

    def __init__(self, net, rooms, device):
        super().__init__()
        self.net, self._rooms = net, rooms
        self.most = torch.zeros(len(rooms.most) + 2, dtype=torch.int32, device=device)

    def forward(self, *tensors):
        """Call the network."""
        with self._rooms.with_capacities():
            result = self.net(*tensors)
            torch.maximum(self.most, self._rooms.seen(self.most), out=self.most)
        return result

    def alone(self, *tensors):
        """Call the network, with as many rows as sites."""
        with self._rooms.alone():
            return self.net(*tensors)

    def check_rows(self, few, padded):
        """Raise if rows without a point are put at sites."""
        with self._rooms.alone():
            self.net(*few)
            expected, lost = self._rooms.placed()
        with self._rooms.with_capacities(keeps=True):
            self.net(*padded)
            found, more = self._rooms.placed()
        if found != expected:
            raise ValueError(
                "fill must be outside of the grid, so that rows without a point are at no site, "
                f"got {max(map(int.__sub__, found, expected))} that are"
            )
        if more != lost:
            raise ValueError(
                "fill must make the sample of rows without a point negative where they are listed, "
                f"got {more - lost} that are points outside of the grid or the samples; put them "
                "into voxels by voxelize, which drops those outside, or make their sample -1"
            )

    def lists(self):
        """Return the name of each list of sites, and its rows."""
        return self._rooms.lists()


def _fill_of(k, dtype, number):
    """Return what tensor k holds in rows without a point, as a number of its dtype."""
    if dtype.is_floating_point or dtype.is_complex:
        default = 0.0 if k else math.nan
        return default if number is None else number
    if number is None:
        unsigned = 0 if dtype == torch.bool else torch.iinfo(dtype).max
        return -1 if dtype.is_signed else unsigned
    hint = f"that is of tensor {k}: pass one number for each, such as fill=(1e4, -1)"
    return as_number_in("fill", number, numpy_dtype(dtype, "tensor"), hint)


def _tensors_of(given):
    """Return an input as a tuple of tensors, or raise."""
    tensors = (given,) if isinstance(given, torch.Tensor) else given
    if not isinstance(tensors, list | tuple) or not tensors:
        raise DTypeError(
            "inputs must hold tensors, or tuples of tensors, as the network is called with them, "
            f"got {type(given).__name__}"
        )
    for k, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise no_tensor(f"tensor {k}", tensor)
    if not tensors[0].dim():
        raise ShapeError("tensor 0 must have a row for each point, got a scalar")
    return tuple(tensors)
