"""Layers that drop sites."""

import torch

from ...submanifold.coordinate_map import CoordinateMap
from .containers import Sequential
from .convolutions import NetworkInNetwork, SiteModule
from .norms import Sigmoid
from .tensors import Metadata, SparseConvNetTensor, size_key


def select(input, active):
    """Return the rows of a SparseConvNetTensor where a mask is set, in a new Metadata."""
    rows, old = active.nonzero()[:, 0], input.coordinates
    count = torch.full_like(old.count, len(rows))
    made = CoordinateMap(old.indices[rows], count, old.spatial_shape, old.batch_size)
    metadata = Metadata(old.dimensions)
    metadata.grids[size_key(input.spatial_size)] = made
    return SparseConvNetTensor(input.features[rows], metadata, input.spatial_size)


class SparsifyFCS(SiteModule):
    """Keep the sites whose first plane is positive."""

    def __init__(self, dimension):
        super().__init__()
        self.dimension = dimension

    def forward(self, input):
        """Drop sites of a SparseConvNetTensor."""
        return select(input, input.features[:, 0] > 0)


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
    """

    def __init__(self, dimension, nIn, activation=None):
        super().__init__()
        ends = {None: None, "sigmoid": Sigmoid, "fakeGradHardSigmoid": FakeGradHardSigmoid}
        if activation not in ends:
            raise ValueError(f"activation must be one of {tuple(ends)}, got {activation!r}")
        self.dimension, self.activation = dimension, activation
        linear, end = NetworkInNetwork(nIn, 1, True), ends[activation]
        self.net = linear if end is None else Sequential(linear, end())
        self.threshold = 0.5 if activation else 0

    def forward(self, input):
        """Drop sites of a SparseConvNetTensor."""
        mask = self.net(input).features.view(-1)
        output = select(input, mask > self.threshold)
        output.mask = mask
        return output
