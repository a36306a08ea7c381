"""Layers between lists of points, or dense grids, and SparseConvNetTensors."""

import operator

import torch
from torch.nn import Module

from ...core.sizes import is_integer
from ...errors import DTypeError, ShapeError
from ...submanifold.coordinate_map import CoordinateMap
from ...submanifold.site_arguments import check_capacity
from .. import submanifold as sites
from .._native import no_tensor
from ..submanifold.operations import rows_of
from ..submanifold.sites import with_inverse
from .points import check_distinct, check_inside, check_keys, whole_numbers
from .tensors import (
    Metadata,
    SparseConvNetTensor,
    check_dimension,
    check_input,
    check_number_of_planes,
    grid_size,
    size_key,
    with_planes,
)

_MODES = ("unique", "first", "last", "sum", "mean")
_BL_MODES = ("unique", "last", "first", "sum", "mean")


def tensor_of_points(rows, features, spatial_size, batch_size, mode, capacity=None):
    """Return the SparseConvNetTensor of rows ``(sample, *position)``; negative samples are none.

    Its sites are in the order in which the rows first name them.
    """
    size = size_key(spatial_size)
    x, inverse = with_inverse(features, rows, size, batch_size, mode, capacity=capacity)
    old, device = x.coordinates, rows.device
    n, listed = old.capacity, inverse >= 0
    site = torch.where(listed, inverse, n).long()  # n for rows that were left out
    numbers = torch.arange(len(rows), device=device)
    first = torch.full((n + 1,), len(rows), device=device).scatter_reduce(0, site, numbers, "amin")
    order = first[:n].argsort(stable=True)  # rows that hold no site stay last
    rank = torch.full((n + 1,), -1, device=device)
    rank = rank.index_copy(0, order, torch.arange(n, device=device))
    made = CoordinateMap(x.indices[order], old.count, size, x.batch_size, old.status)
    metadata = Metadata(len(size))
    metadata.grids[size] = made
    metadata.input_size, metadata.inverse = size, rank[site]
    if mode in ("first", "last"):  # of the points of a site, the one whose features it has
        chosen = first
        if mode == "last":
            chosen = torch.full_like(first, -1).scatter_reduce(0, site, numbers, "amax")
        metadata.inverse = torch.where(chosen[site] == numbers, metadata.inverse, -1)
    return SparseConvNetTensor(rows_of(x.features, order), metadata, spatial_size)


def read_points(name, points, most=3):
    """Return coordinates and features of a list of both, as input layers take it, or raise.

    It may hold the number of samples, too, if ``most`` is 3.
    """
    kinds = (list, tuple, InputLayerInput)
    if not isinstance(points, kinds) or not 2 <= len(points) <= most:
        got = f"{len(points)} items" if isinstance(points, kinds) else type(points).__name__
        more = " or [coords, features, batch_size]" if most == 3 else ""
        raise DTypeError(f"{name} must be a list [coords, features]{more}, got {got}")
    coords, features = points[0], points[1]
    for part, value in (("coords", coords), ("features", features)):
        if not isinstance(value, torch.Tensor):
            raise no_tensor(part, value)
    return coords, features


class _Input(Module):
    """What the input layers have in common."""

    most_items = 3  # of an input

    def __init__(self, dimension, spatial_size, mode=3):
        super().__init__()
        if not is_integer(mode) or mode not in range(5):
            raise ValueError(f"mode must be 0, 1, 2, 3 or 4, got {mode!r}")
        self.dimension = dimension
        self.spatial_size = grid_size(dimension, spatial_size)
        self.mode = mode
        self.device = None

    def to(self, device):
        """Let the features be moved to a device."""
        self.device = device
        return self

    def _points(self, input):
        """Return coordinates and features on the device of the layer."""
        coords, features = read_points("input", input, self.most_items)
        features = features if self.device is None else features.to(self.device)
        return whole_numbers(coords.to(features.device)), features

    def _at_sites(self, coords, rows, listed, features, samples, mode, capacity=None):
        """Return the SparseConvNetTensor of rows, or raise an error that names ``coords``.

        Rows are those of ``coords``, or those that are ``listed``.
        """
        try:
            return tensor_of_points(rows, features, self.spatial_size, samples, mode, capacity)
        except ValueError:
            if capacity is None:  # with one, no values of rows are an error, and nothing may wait
                numbers = torch.arange(len(rows), device="cpu") if listed is None else listed.cpu()
                given = "coords", coords, rows.cpu(), numbers
                check_inside(*given, self.spatial_size)
                if mode == "unique":
                    check_distinct(*given)
            check_keys(size_key(self.spatial_size), samples)
            raise

    def input_spatial_size(self, out_size):
        """Return the spatial size of the points."""
        return out_size


class InputLayer(_Input):
    """Put a list of points at their sites.

    Called with ``[coords, features]`` or ``[coords, features, batch_size]``: ``coords`` is
    LongTensor ``[N, dimension]`` for one sample, or ``[N, dimension + 1]`` with the sample in the
    last column; ``features`` is ``[N, C]``; ``batch_size`` is the least number of samples.

    Parameters
    ----------
    dimension : int
        Axes of the grid.
    spatial_size : int, sequence of int or LongTensor
        Cells along each axis.
    mode : int
        What points at the same site become: 0 promises that there are none; 1 is the first point, 2
        the last one, as SparseConvNet computes it (its comment says the reverse), 3 the sum, 4 the
        mean.
    capacity : int, optional
        Rows of the sites; see :func:`set_capacities`. With it ``batch_size`` is the number of
        samples, and must be given where ``coords`` tells the sample.
    """

    def __init__(self, dimension, spatial_size, mode=3, *, capacity=None):
        super().__init__(dimension, spatial_size, mode)
        check_capacity(capacity)
        self.capacity = capacity

    def forward(self, input):
        """Return the SparseConvNetTensor of a list of points."""
        coords, features = self._points(input)
        if coords.dim() != 2 or coords.shape[1] not in (self.dimension, self.dimension + 1):
            raise ShapeError(
                f"coords must have shape (N, {self.dimension}) or (N, {self.dimension + 1}), got "
                f"{tuple(coords.shape)}"
            )
        if features.dim() != 2 or len(features) != len(coords):
            raise ShapeError(
                f"features must have shape ({len(coords)}, C), got {tuple(features.shape)}"
            )
        sample = coords.new_zeros((len(coords), 1))
        if coords.shape[1] > self.dimension:
            sample = coords[:, -1:]
        rows = torch.cat([sample, coords[:, : self.dimension]], 1)
        if self.capacity is None or coords.shape[1] == self.dimension:
            batch = self.least_samples(input)
        elif len(input) < 3:
            raise ValueError(
                "input must be [coords, features, batch_size] for an InputLayer with a capacity, "
                "got no batch_size; give the number of samples"
            )
        else:
            batch = _samples_of(input)
        how = batch, _MODES[self.mode], self.capacity
        return self._at_sites(input[0], rows, None, features, *how)

    def least_samples(self, input):
        """Return the number of samples of an input: what it says, or more if its points do."""
        coords, given = input[0], _samples_of(input)
        if coords.shape[1] == self.dimension:
            return max(given, 1)
        return max(given, int(whole_numbers(coords[:, -1]).max()) + 1 if len(coords) else 0)


def _samples_of(input):
    """Return the number of samples that an input gives, 0 for none; or raise."""
    if len(input) < 3:
        return 0
    try:
        samples = operator.index(input[2])
    except TypeError:
        samples = -1
    if not 0 <= samples < 2**31:
        raise ValueError(
            "input must be [coords, features] or [coords, features, batch_size], batch_size a "
            f"non-negative integer below 2**31, got {input[2]!r}"
        )
    return samples


class BLInputLayer(_Input):
    """Put lists of points, one for each sample, at their sites.

    Called with ``[coords, features]``: ``coords`` is LongTensor ``[B, L, dimension]``, negative
    where there is no point; ``features`` is ``[B, L, C]``.

    Parameters
    ----------
    dimension, spatial_size
        As for :class:`InputLayer`.
    mode : int
        As for :class:`InputLayer`, but 1 is the last point and 2 the first one, as SparseConvNet
        computes it. With 0 all points must be there.
    """

    most_items = 2

    def forward(self, input):
        """Return the SparseConvNetTensor of lists of points."""
        coords, features = self._points(input)
        if coords.dim() != 3 or coords.shape[2] != self.dimension:
            raise ShapeError(
                f"coords must have shape (B, L, {self.dimension}), got {tuple(coords.shape)}"
            )
        batch, length = coords.shape[:2]
        if features.dim() != 3 or tuple(features.shape[:2]) != (batch, length):
            raise ShapeError(
                f"features must have shape ({batch}, {length}, C), got {tuple(features.shape)}"
            )
        sample = torch.arange(batch, device=coords.device).repeat_interleave(length)
        rows = torch.cat([sample[:, None], coords.reshape(-1, self.dimension)], 1)
        here = (rows[:, 1] >= 0).nonzero()[:, 0]
        if self.mode == 0 and len(here) < len(rows):
            raise ValueError("coords must not be negative in mode 0; use another mode")
        listed = rows_of(features.flatten(0, 1), here)
        mode = _BL_MODES[self.mode]
        x = self._at_sites(input[0], rows[here], here, listed, batch, mode)
        inverse = torch.full((len(rows),), -1, device=coords.device)
        x.metadata.inverse = inverse.index_copy(0, here, x.metadata.inverse).view(batch, length)
        return x


class OutputLayer(Module):
    """Give each point of the InputLayer the features of its site: ``[N, C]``.

    In modes 1 and 2 the points that the sites do not have the features of get 0.
    """

    def __init__(self, dimension):
        super().__init__()
        check_dimension(dimension)
        self.dimension = dimension

    def forward(self, input):
        """Return the features of the points."""
        check_input(input, self.dimension)
        inverse = input.metadata.inverse
        if inverse is None:
            raise ValueError("input must come from an InputLayer or BLInputLayer")
        size = size_key(input.spatial_size)
        if size != input.metadata.input_size:
            raise ShapeError(
                f"input must have the spatial size of the InputLayer, {input.metadata.input_size}, "
                f"got {size}; put Deconvolution or UnPooling layers before"
            )
        inverse = inverse.to(input.features.device)
        found = rows_of(input.features, inverse.reshape(-1))
        return found.unflatten(0, inverse.shape) if inverse.dim() > 1 else found

    def input_spatial_size(self, out_size):
        """Return the spatial size of the input."""
        return out_size


class BLOutputLayer(OutputLayer):
    """Give each point of the BLInputLayer the features of its site: ``[B, L, C]``.

    In modes 1 and 2 the points that the sites do not have the features of get 0.
    """


class InputLayerInput:
    """Coordinates and features, as an InputLayer takes them."""

    def __init__(self, coords, features):
        self.x = [coords, features]

    def __getitem__(self, n):
        return self.x[n]

    def __len__(self):
        return 2

    def cuda(self):
        """Move the features to the current GPU."""
        self.x[1] = self.x[1].cuda()
        return self


class DenseToSparse(Module):
    """List the cells of dense ``[N, C, *spatial]`` that are not 0.

    ``capacity`` is as for :class:`Convolution`.
    """

    def __init__(self, dimension, *, capacity=None):
        super().__init__()
        check_dimension(dimension)
        check_capacity(capacity)
        self.dimension, self.capacity = dimension, capacity

    def forward(self, input):
        """Return the SparseConvNetTensor of a dense tensor."""
        if isinstance(input, torch.Tensor) and input.dim() != self.dimension + 2:
            raise ShapeError(
                f"input must have the {self.dimension} dimensions of the layer, (N, C, *spatial), "
                f"got shape {tuple(input.shape)}"
            )
        how = {"data_format": "channels_first", "capacity": self.capacity}
        x = sites.dense_to_sparse(input, **how)
        metadata = Metadata(self.dimension)
        metadata.grids[x.spatial_shape] = x.coordinates
        size = torch.tensor(x.spatial_shape, dtype=torch.int64, device="cpu")
        return SparseConvNetTensor(x.features, metadata, size)

    def input_spatial_size(self, out_size):
        """Return the spatial size of the input."""
        return out_size

    def extra_repr(self):
        """Describe the layer."""
        return str(self.dimension)


class SparseToDense(Module):
    """Put features at their cells of dense ``[N, nPlanes, *spatial]``, 0 elsewhere."""

    def __init__(self, dimension, nPlanes):
        super().__init__()
        check_dimension(dimension)
        check_number_of_planes("nPlanes", nPlanes)
        self.dimension, self.nPlanes = dimension, nPlanes

    def forward(self, input):
        """Return the dense tensor."""
        check_input(input, self.dimension)
        input = with_planes(input, self.nPlanes)
        return sites.sparse_to_dense(input.sparse, data_format="channels_first")

    def input_spatial_size(self, out_size):
        """Return the spatial size of the input."""
        return out_size

    def extra_repr(self):
        """Describe the layer."""
        return f"{self.dimension}, {self.nPlanes}"
