"""InputBatch: a batch that is put together sample by sample, on the CPU."""

import torch

from ...errors import ShapeError
from ...submanifold.coordinate_map import CoordinateMap
from .._native import no_tensor
from .points import check_inside, whole_numbers
from .tensors import Metadata, SparseConvNetTensor, grid_size, size_key, sizes_of


class InputBatch(SparseConvNetTensor):
    """A SparseConvNetTensor that is put together sample by sample.

    Where a site is set again, its vector stays, unless ``overwrite`` is True. Sites are in the
    order in which they were first set.

    Parameters
    ----------
    dimension : int
        Axes of the grid.
    spatial_size : int, sequence of int or LongTensor
        Cells along each axis.

    Examples
    --------
    >>> batch = InputBatch(2, 8)
    >>> batch.add_sample()
    >>> batch.set_location(torch.tensor([1, 2]), torch.tensor([5.0]))
    >>> batch.features, batch.get_spatial_locations()
    (tensor([[5.]]), tensor([[1, 2, 0]]))
    """

    def __init__(self, dimension, spatial_size):
        self._made = None
        self._rows, self._vectors, self._overwrite = [], [], []
        self._samples, self._coordinates = 0, None
        self.dimension = dimension
        self.spatial_size = grid_size(dimension, spatial_size)

    def add_sample(self):
        """Begin another sample."""
        self._samples += 1
        self._made = None

    def set_location(self, location, vector, overwrite=False):
        """Set one site of the current sample: ``[dimension]`` and ``[C]``."""
        for name, value in (("location", location), ("vector", vector)):
            if not isinstance(value, torch.Tensor) or value.dim() != 1:
                got = tuple(getattr(value, "shape", ())) or type(value).__name__
                raise ShapeError(f"{name} must be a tensor of one axis, got {got}")
        self.set_locations(location[None], vector[None], overwrite)

    def set_locations(self, locations, vectors, overwrite=False):
        """Set sites: ``[n, dimension]`` of the current sample, or with the sample as last column.

        Parameters
        ----------
        locations : LongTensor
            The sites.
        vectors : tensor, shape (n, C)
            Their features.
        overwrite : bool
            Whether sites that are set already get the new features.
        """
        d = self.dimension
        for name, value in (("locations", locations), ("vectors", vectors)):
            if not isinstance(value, torch.Tensor):
                raise no_tensor(name, value)
        if locations.dim() != 2 or locations.shape[1] not in (d, d + 1):
            raise ShapeError(
                f"locations must have shape (n, {d}) or (n, {d + 1}), got {tuple(locations.shape)}"
            )
        if vectors.dim() != 2 or len(vectors) != len(locations):
            raise ShapeError(
                f"vectors must have shape ({len(locations)}, C), got {tuple(vectors.shape)}"
            )
        if self._vectors and vectors.shape[1] != self._vectors[0].shape[1]:
            raise ShapeError(
                f"vectors must have {self._vectors[0].shape[1]} planes, as those before, got "
                f"{vectors.shape[1]}"
            )
        given, locations = locations, whole_numbers(locations.cpu())
        if locations.shape[1] > d:
            sample = locations[:, d:]
        elif not self._samples:
            raise ValueError("locations must belong to a sample; call add_sample first")
        else:
            sample = torch.full((len(locations), 1), self._samples - 1, device="cpu")
        rows = torch.cat([sample, locations[:, :d]], 1)
        numbers = torch.arange(len(rows), device="cpu")
        check_inside("locations", given, rows, numbers, self.spatial_size)
        if len(rows):
            self._samples = max(self._samples, int(rows[:, 0].max()) + 1)
        self._rows.append(rows)
        self._vectors.append(vectors.detach().to("cpu", copy=True))
        self._overwrite.append(torch.full((len(locations),), bool(overwrite), device="cpu"))
        self._made = None

    set_location_, set_locations_ = set_location, set_locations
    setLocation, setLocations = set_location, set_locations
    setLocation_, setLocations_ = set_location, set_locations

    def add_sample_from_tensor(self, tensor, offset, threshold=0):
        """Add a sample of the cells of ``[*spatial, C]`` that are above a threshold in magnitude.

        Parameters
        ----------
        tensor : tensor
            A dense grid.
        offset : LongTensor, shape (dimension,)
            Where its first cell is. Cells outside of the spatial size are left out.
        threshold : float
            Cells with a larger value are listed.
        """
        self.add_sample()
        place = (tensor.abs() > threshold).any(-1).nonzero().cpu()
        vectors = tensor[tuple(place.T)]
        position = place + sizes_of("offset", self.dimension, offset)
        inside = ((position >= 0) & (position < self.spatial_size)).all(1)
        self.set_locations(position[inside], vectors[inside])

    addSample, addSampleFromTensor = add_sample, add_sample_from_tensor

    def precompute_metadata(self, size):
        """Do nothing: maps are found when layers need them. Kept for scripts."""

    precomputeMetadata = precompute_metadata

    def _build(self):
        """Return the features and the metadata of what was set."""
        if self._made is None:
            d, n, cpu = self.dimension, sum(map(len, self._rows)), torch.device("cpu")
            none = torch.empty((0, d + 1), dtype=torch.int64, device=cpu)
            rows = torch.cat([none, *self._rows])
            vectors = torch.cat(self._vectors or [torch.empty((0, 0), device=cpu)])
            later = torch.cat([torch.empty(0, dtype=torch.bool, device=cpu), *self._overwrite])
            _, site = torch.unique(rows, dim=0, return_inverse=True) if n else (None, rows[:, 0])
            number, count = torch.arange(n, device=cpu), int(site.max()) + 1 if n else 0
            first = torch.full((count,), n, device=cpu).scatter_reduce(0, site, number, "amin")
            last = torch.where(later, number, -1)
            last = torch.full((count,), -1, device=cpu).scatter_reduce(0, site, last, "amax")
            order = first.argsort()
            chosen = torch.maximum(first, last)[order]
            size = size_key(self.spatial_size)
            metadata = Metadata(d)
            indices = rows[first[order]].int()
            number = torch.tensor([count], dtype=torch.int32, device=cpu)
            metadata.grids[size] = CoordinateMap(indices, number, size, self._samples)
            self._made = [vectors[chosen], metadata]
        return self._made

    @property
    def features(self):
        """Features of the sites, ``[N, C]``."""
        return self._build()[0]

    @features.setter
    def features(self, features):
        self._build()[0] = features

    @property
    def metadata(self):
        """The sites."""
        return self._build()[1]

    @property
    def coordinates(self):
        """The CoordinateMap of the sites, on the device of the features."""
        return self.metadata.coordinates(self.spatial_size, self.features.device)
