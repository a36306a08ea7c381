"""Pooling with SparseConvNet's names and arguments."""

from ...core.sizes import is_integer
from ...errors import ShapeError
from ...submanifold.site_arguments import check_capacity
from ..submanifold.maps import valid
from ..submanifold.operations import site_max, site_sum
from .convolutions import SiteModule
from .tensors import check_input, fitted, size_key, sizes_of, toLongTensor, window_sizes


class _Pooling(SiteModule):
    """Size and stride of windows, and the planes that are dropped."""

    def __init__(self, dimension, pool_size, pool_stride, nFeaturesToDrop=0):
        super().__init__()
        self.dimension = dimension
        self.pool_size = window_sizes("pool_size", dimension, pool_size)
        self.pool_stride = window_sizes("pool_stride", dimension, pool_stride)
        self.nFeaturesToDrop = nFeaturesToDrop

    def _kept(self, input):
        """Return the features without the planes that are dropped."""
        planes, dropped = input.features.shape[1], self.nFeaturesToDrop
        if not is_integer(dropped) or not 0 <= dropped <= planes:
            raise ShapeError(f"nFeaturesToDrop must be from 0 to {planes} planes, got {dropped!r}")
        return input.features[:, dropped:]

    @property
    def _window(self):
        return size_key(self.pool_size), size_key(self.pool_stride)

    def extra_repr(self):
        """Describe the layer."""
        return "pool_size={}, pool_stride={}".format(*self._window)


class _Down(_Pooling):
    """A pooling: new sites, or those of a layer before with the same windows."""

    def __init__(self, dimension, pool_size, pool_stride, nFeaturesToDrop=0, *, capacity=None):
        super().__init__(dimension, pool_size, pool_stride, nFeaturesToDrop)
        check_capacity(capacity)
        self.capacity = capacity

    def forward(self, input):
        """Pool a SparseConvNetTensor."""
        check_input(input, self.dimension)
        given = input.coordinates, input.spatial_size, *self._window, self.capacity
        made = input.metadata.window(*given)
        smaller = fitted(size_key(input.spatial_size), *self._window)
        values = self._pool(self._kept(input), made.rows, valid(made.target))
        return input.at(values, smaller, made.target)

    def input_spatial_size(self, out_size):
        """Return the spatial size of the input."""
        size = sizes_of("out_size", self.dimension, out_size)
        return (size - 1) * self.pool_stride + self.pool_size


class MaxPooling(_Down):
    """The largest value of each window, and at least 0.

    Its gradient goes to all equal values, as SparseConvNet's does.

    Parameters
    ----------
    dimension : int
        Axes of the grid.
    pool_size, pool_stride : int, sequence of int or LongTensor
        Cells of a window, and distance between windows; they must cover the spatial size exactly.
    nFeaturesToDrop : int
        Planes at the beginning that are left out.
    capacity : int, optional
        Rows of the new sites; see :func:`set_capacities`.
    """

    def _pool(self, features, rows, holds):
        return site_max(features, rows, holds, 0.0, "all")


class AveragePooling(_Down):
    """The sum of each window, divided by the number of its cells.

    Parameters
    ----------
    dimension, pool_size, pool_stride, nFeaturesToDrop, capacity
        As for :class:`MaxPooling`.
    """

    def _pool(self, features, rows, holds):
        return site_sum(features, rows, holds, "volume")


class UnPooling(_Pooling):
    """Undo the sites of a pooling or Convolution: each site gets the values of its windows.

    Parameters
    ----------
    dimension, pool_size, pool_stride, nFeaturesToDrop
        As for :class:`MaxPooling`, as they were given to that layer.
    """

    def forward(self, input):
        """Bring a SparseConvNetTensor back to the sites that a layer read."""
        check_input(input, self.dimension)
        made, larger = input.metadata.window_back(
            input.coordinates, input.spatial_size, *self._window
        )
        values = site_sum(self._kept(input), made.rows, valid(made.target))
        return input.at(values, larger, made.target)

    def input_spatial_size(self, out_size):
        """Return the spatial size of the input."""
        size = sizes_of("out_size", self.dimension, out_size)
        return toLongTensor(self.dimension, fitted(size_key(size), *self._window))
