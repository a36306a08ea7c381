"""Layers that drop sites."""

import torch

from ...submanifold.coordinate_map import CoordinateMap
from ...submanifold.site_arguments import check_capacity
from ...submanifold.sources import note_source
from ..submanifold.maps import valid
from ..submanifold.operations import rows_of
from .containers import Sequential
from .convolutions import NetworkInNetwork, SiteModule
from .norms import Sigmoid
from .tensors import Metadata, SparseConvNetTensor, check_input, size_key


def select(input, active, capacity=None):
    """Return the sites of a SparseConvNetTensor where a mask is set, in a new Metadata."""
    old = input.coordinates
    active = active & valid(old)
    if capacity is None:
        rows = active.nonzero()[:, 0]
    else:  # the active ones first, in their order
        rows = torch.argsort((~active).byte(), stable=True)[:capacity]
        rows = torch.nn.functional.pad(rows, (0, capacity - len(rows)), value=-1)
    count = active.sum(dtype=old.count.dtype).view(1)
    rows = torch.where(torch.arange(len(rows), device=rows.device) < count, rows, -1)
    indices = torch.where((rows >= 0)[:, None], old.indices[rows], -1)
    grid = old.spatial_shape, old.batch_size
    made = note_source(CoordinateMap(indices, count, *grid, old.status), old)
    metadata = Metadata(old.dimensions, [input.metadata])
    metadata.grids[size_key(input.spatial_size)] = made
    return SparseConvNetTensor(rows_of(input.features, rows), metadata, input.spatial_size)


class SparsifyFCS(SiteModule):
    """Keep the sites whose first plane is positive; ``capacity`` as for :class:`Convolution`."""

    def __init__(self, dimension, *, capacity=None):
        super().__init__()
        check_capacity(capacity)
        self.dimension, self.capacity = dimension, capacity

    def forward(self, input):
        """Drop sites of a SparseConvNetTensor."""
        check_input(input)
        return select(input, input.features[:, 0] > 0, self.capacity)


class _StepFunction(torch.autograd.Function):
    """1 where positive, else 0; the gradient passes as it is."""

    @staticmethod
    def forward(ctx, x):
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad


class FakeGradHardSigmoid(SiteModule):
    """1 where a value is positive, else 0; its gradient is passed as if it were the identity."""

    def forward(self, input):
        """Apply the step to the features of a SparseConvNetTensor."""
        return input.replace(_StepFunction.apply(input.features))


class Sparsify(SiteModule):
    """Keep the sites at which a learnt linear function is large; it is ``mask`` of the result.

    Parameters
    ----------
    dimension : int
        Axes of the grid.
    nIn : int
        Planes of the input.
    activation : None, "sigmoid" or "fakeGradHardSigmoid"
        What follows the linear function. Sites are kept above 0.5, with None above 0.
    capacity : int, optional
        Rows of the sites that are kept; see :func:`set_capacities`.
    """

    def __init__(self, dimension, nIn, activation=None, *, capacity=None):
        super().__init__()
        check_capacity(capacity)
        self.capacity = capacity
        ends = {None: None, "sigmoid": Sigmoid, "fakeGradHardSigmoid": FakeGradHardSigmoid}
        if activation not in ends:
            raise ValueError(f"activation must be one of {tuple(ends)}, got {activation!r}")
        self.dimension, self.activation = dimension, activation
        linear, end = NetworkInNetwork(nIn, 1, True), ends[activation]
        self.net = linear if end is None else Sequential(linear, end())
        self.threshold = 0.5 if activation else 0

    def forward(self, input):
        """Drop sites of a SparseConvNetTensor."""
        check_input(input)
        mask = self.net(input).features.view(-1)
        output = select(input, mask > self.threshold, self.capacity)
        output.mask = mask
        return output
