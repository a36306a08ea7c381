"""SparseConvNetTensor: features, and the sites of all scales that they went through."""

import copy

import torch

from ...core.sizes import is_integer
from ...errors import DeviceError, DTypeError, ShapeError
from ...submanifold.coordinate_map import CoordinateMap
from ...submanifold.kernel_map import KernelMap
from ...submanifold.sparse_tensor import SparseTensor
from ..submanifold import kernel_map
from ..submanifold.maps import same_map
from ..submanifold.operations import transposed_rows


def toLongTensor(dimension, x):
    """Return ``x``, an int or one for each dimension, as a LongTensor of ``[dimension]``."""
    return sizes_of("x", dimension, x)


def sizes_of(name, dimension, x):
    """Return one integer for each dimension, of an argument of this name, as a LongTensor."""
    check_dimension(dimension)
    if isinstance(x, torch.Tensor):
        x = x.tolist()
    sizes = tuple(x) if isinstance(x, list | tuple) else (x,) * dimension
    if len(sizes) != dimension or not all(map(is_integer, sizes)):
        raise ShapeError(f"{name} must be an integer or {dimension} of them, got {x!r}")
    return torch.tensor(sizes, dtype=torch.int64, device="cpu")


def check_dimension(dimension):
    """Raise unless an argument is a number of axes."""
    if not is_integer(dimension) or dimension < 1:
        raise ShapeError(f"dimension must be a positive integer, got {dimension!r}")


def grid_size(dimension, spatial_size):
    """Return the spatial size of a grid as a LongTensor, or raise."""
    sizes = sizes_of("spatial_size", dimension, spatial_size)
    if not all(0 <= size < 2**31 for size in sizes.tolist()):
        raise ShapeError(
            f"spatial_size must be non-negative and below 2**31, got {spatial_size!r}"
        )
    return sizes


def window_sizes(name, dimension, x):
    """Return the size or stride of windows along each dimension as a LongTensor."""
    sizes = sizes_of(name, dimension, x)
    if (sizes < 1).any():
        raise ShapeError(f"{name} must be positive, got {x!r}")
    return sizes


def check_input(input, dimension=None, sites=True):
    """Raise unless the input of a layer is a SparseConvNetTensor.

    Also if it has no sites though the layer needs them, or those of a grid of other dimensions.
    """
    if not isinstance(input, SparseConvNetTensor):
        raise DTypeError(
            f"input must be a SparseConvNetTensor, got {type(input).__name__}; make one with an "
            "InputLayer"
        )
    if input.features is None or (sites and input.metadata is None):
        raise ValueError(
            "input must have features and metadata, got a SparseConvNetTensor without; make one "
            "with an InputLayer"
        )
    if dimension is not None and len(input.spatial_size) != dimension:
        raise ShapeError(
            f"input must have the {dimension} dimensions of the layer, got spatial size "
            f"{size_key(input.spatial_size)}"
        )


def check_list(name, tensors):
    """Raise unless an argument is a list of SparseConvNetTensors, and not empty."""
    if not isinstance(tensors, (list, tuple)):
        raise DTypeError(
            f"{name} must be a list of SparseConvNetTensors, got {type(tensors).__name__}"
        )
    if not tensors:
        raise ValueError(f"{name} must hold at least one SparseConvNetTensor, got none")
    for x in tensors:
        if not isinstance(x, SparseConvNetTensor):
            raise DTypeError(f"{name} must hold SparseConvNetTensors, got {type(x).__name__}")


def check_number_of_planes(name, planes):
    """Raise unless an argument is a number of planes."""
    if not is_integer(planes) or planes < 1:
        raise ShapeError(f"{name} must be a positive integer, got {planes!r}")


def check_planes(features, planes, name="input"):
    """Raise unless features have so many planes."""
    if features.shape[1] != planes:
        raise ShapeError(f"{name} must have {planes} planes, got {features.shape[1]}")


def with_planes(input, planes):
    """Return a SparseConvNetTensor of so many planes, or raise.

    An InputBatch without sites has none yet: any number will do.
    """
    features = input.features
    if not features.shape[1] and not len(features):
        return input.replace(features.new_empty((0, planes)))
    check_planes(features, planes)
    return input


def check_fits(features, weight):
    """Raise unless features have the device and, but for autocast, the dtype of a weight."""
    if features.device != weight.device:
        raise DeviceError(
            f"input must be on the device of the layer's weight, {weight.device}, got "
            f"{features.device}; move one of them by .to(device)"
        )
    if features.dtype != weight.dtype and not torch.is_autocast_enabled(weight.device.type):
        raise DTypeError(
            f"input must have features of the dtype of the layer's weight, {weight.dtype}, got "
            f"{features.dtype}; convert them by input.type(dtype), or the layer by layer.to(dtype)"
        )


def size_key(size):
    """Return a spatial size as a tuple of int."""
    return tuple(size.tolist()) if isinstance(size, torch.Tensor) else tuple(map(int, size))


class Metadata:
    """The sites at each spatial size, and the maps between them.

    As in SparseConvNet, layers of the same spatial size share their sites, and a
    :class:`Deconvolution` finds those that a :class:`Convolution` read by their size. Where unlike
    layers made several lists of sites of one size, the tensor that a layer returned and what is
    made of it by :meth:`SparseConvNetTensor.replace` keep their own; the size alone tells none.

    Layers whose sites are no longer those of the Metadata ``before`` begin another one.
    """

    def __init__(self, dimension, before=()):
        self.dimension = dimension
        # Copies, which keep no maps: only check() reads them.
        self.before = [copy.copy(sites) for metadata in before for sites in metadata.lists()]
        self.grids = {}  # spatial size -> CoordinateMap
        self.origins = {}  # spatial size -> key of the windows that made its sites
        self.unlike = set()  # spatial sizes of which there are several lists
        self.windows = {}  # (spatial size, kernel, stride) -> list of KernelMap
        self.input_size = None  # of an input layer: its spatial size
        self.inverse = None  # and the site of each of its rows

    def coordinates(self, spatial_size, device=None):
        """Return the sites of a spatial size; bring all to a device if it is another one."""
        size = size_key(spatial_size)
        if size not in self.grids:
            raise ShapeError(
                f"spatial_size must be one that the tensor went through, got {size}; there are "
                f"{sorted(self.grids)}"
            )
        if size in self.unlike:
            raise ValueError(
                f"spatial_size must be one of which there is one list of sites, got {size}, of "
                "which layers with unlike windows or inputs made several; take tensors as layers "
                "return them, on their device, and x.replace(features) for others at their sites"
            )
        if device is not None and self.grids[size].indices.device != device:
            self._move(device)
        return self.grids[size]

    def _move(self, device):
        """Move all sites; maps are found anew."""
        self.before = list(map(copy.copy, self.lists()))
        for size, old in self.grids.items():
            arrays = [array.to(device) for array in old._arrays()]
            made = CoordinateMap(*arrays[:2], old.spatial_shape, old.batch_size, *arrays[2:])
            self.grids[size] = made
        self.windows.clear()
        if self.inverse is not None:
            self.inverse = self.inverse.to(device)

    def lists(self):
        """Return all lists of sites, also those of the Metadata before."""
        made = [made.target for kept in self.windows.values() for made in kept]
        return list(dict.fromkeys([*self.before, *self.grids.values(), *made]))

    def check(self):
        """Return self, or raise what :meth:`CoordinateMap.check` does for any list of sites."""
        for coordinates in self.lists():
            coordinates.check()
        return self

    def window(self, source, spatial_size, kernel, stride, capacity=None):
        """Return the map of a convolution or pooling; it fits the spatial size exactly.

        The layer that makes it says the ``capacity`` of its sites. Windows that keep the spatial
        size have one cell, and keep the sites.
        """
        key = size_key(spatial_size), kernel, stride
        smaller = fitted(*key)
        if smaller == key[0]:
            return same_map(source, kernel)
        made = self.known(key, source=source)
        if made is None:
            made = kernel_map(source, kernel, stride=stride, capacity=capacity)
            self.keep(key, made, smaller)
        return made

    def known(self, key, **ends):
        """Return the map of a key with these sites as its source or its target; None for none.

        Layers of other windows may have made other sites of the same spatial size.
        """
        for made in self.windows.get(key, ()):
            if all(getattr(made, end) is sites for end, sites in ends.items()):
                return made
        return None

    def keep(self, key, made, smaller):
        """Keep a map, and its target as the sites of the smaller spatial size."""
        self.windows.setdefault(key, []).append(made)
        if smaller not in self.grids:
            self.origins[smaller] = key
        if self.origins.get(smaller) != key or key[0] in self.unlike:
            self.unlike.add(smaller)
        self.grids[smaller] = made.target

    def window_back(self, coarse, spatial_size, kernel, stride):
        """Return the map back to the sites that a convolution or pooling read, and their size."""
        size = size_key(spatial_size)
        larger = enlarged(size, kernel, stride)
        if larger == size:
            return same_map(coarse, kernel), larger
        made = self.known((larger, kernel, stride), target=coarse)
        if made is None:
            raise ValueError(
                f"input must come from a Convolution or pooling of size {kernel} and stride "
                f"{stride} of sites of spatial size {larger}; there was none: use FullConvolution, "
                "or put such a layer before"
            )
        rows = transposed_rows(made.rows, made.source.capacity)
        return KernelMap(rows, coarse, made.source, made.kernel_size), larger


def fitted(size, kernel, stride):
    """Return the spatial size of the result of a convolution; raise unless it fits exactly."""
    smaller = tuple((n - k) // s + 1 for n, k, s in _axes(size, kernel, stride))
    if enlarged(smaller, kernel, stride) != size or min(smaller) < 1:
        raise ShapeError(
            f"spatial_size must be (n - 1) * {stride} + {kernel} for whole n, got {size}; "
            "choose the input size by input_spatial_size"
        )
    return smaller


def enlarged(size, kernel, stride):
    """Return the spatial size of the input of a convolution."""
    return tuple((n - 1) * s + k for n, k, s in _axes(size, kernel, stride))


def _axes(size, kernel, stride):
    """Return spatial size, kernel and stride along each axis."""
    return zip(size, kernel, stride, strict=True)


class SparseConvNetTensor:
    """Features at the sites of a spatial size, with the sites of all sizes before.

    Parameters
    ----------
    features : tensor, shape (N, C)
        One row for each site.
    metadata : Metadata
        The sites.
    spatial_size : LongTensor, shape (dimension,)
        Cells of the grid along each axis.
    coordinates : CoordinateMap, optional
        The sites of the features. By default those of the spatial size in the metadata.
    """

    def __init__(self, features=None, metadata=None, spatial_size=None, coordinates=None):
        self.features = features
        self.metadata = metadata
        self.spatial_size = spatial_size
        self._coordinates = coordinates

    @property
    def coordinates(self):
        """The CoordinateMap of the sites, on the device of the features."""
        device, known = self.features.device, self._coordinates
        if known is None or known.indices.device != device:
            self._coordinates = self.metadata.coordinates(self.spatial_size, device)
        return self._coordinates

    @property
    def sparse(self):
        """The SparseTensor of the functions of :mod:`sbnet_cupy.torch`."""
        return SparseTensor(self.features, self.coordinates)

    def replace(self, features):
        """Return other features at the same sites."""
        where = (self.metadata, self.spatial_size, self._coordinates)
        return SparseConvNetTensor(features, *where)

    def at(self, features, spatial_size, coordinates):
        """Return features at the sites of another spatial size."""
        size = torch.tensor(spatial_size, dtype=torch.int64, device="cpu")
        return SparseConvNetTensor(features, self.metadata, size, coordinates)

    def get_spatial_locations(self, spatial_size=None):
        """Return the sites on the CPU: int64, ``(*position, sample)`` in each row."""
        size = self.spatial_size if spatial_size is None else spatial_size
        if is_integer(size):
            size = sizes_of("spatial_size", len(self.spatial_size), size)
        same = spatial_size is None or size_key(size) == size_key(self.spatial_size)
        rows = (self.coordinates if same else self.metadata.coordinates(size)).indices
        return torch.cat([rows[:, 1:], rows[:, :1]], 1).long().cpu()

    def batch_size(self):
        """Return the number of samples."""
        return self.coordinates.batch_size

    def to(self, device):
        """Move the features; the sites follow when they are needed."""
        self.features = self.features.to(device)
        return self

    def cuda(self):
        """Move the features to the current GPU."""
        return self.to("cuda")

    def cpu(self):
        """Move the features to the CPU."""
        return self.to("cpu")

    def type(self, t=None):
        """Convert the features, or return the name of their type."""
        if t is None:
            return self.features.type()
        self.features = self.features.type(t)
        return self

    def detach(self):
        """Return the tensor with its features detached."""
        return self.replace(self.features.detach())

    @property
    def requires_grad(self):
        """Whether the features require a gradient."""
        return self.features.requires_grad

    def __repr__(self):
        if self.metadata is None:
            return f"SparseConvNetTensor(features={self.features!r})"
        return (
            f"SparseConvNetTensor: {tuple(self.features.shape)} features, {self.features.dtype}, "
            f"on a grid of {size_key(self.spatial_size)}, batch of {self.batch_size()}"
        )
