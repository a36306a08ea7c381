"""SparseTensor: features at the sites of a CoordinateMap."""

from dataclasses import dataclass
from typing import Any

from ..core.arrays import (
    ArrayContainer,
    array_function,
    device_of_all,
    namespace,
)
from ..core.checks import check_array, check_float
from ..core.graph_memory import memory_of_graphs
from ..core.readable import dtype_name, shape_of
from ..errors import DTypeError, ShapeError
from .adapted import adapted
from .coordinate_map import CoordinateMap, reduce_rows
from .distinct import ChosenRows
from .feature_rows import check_dtype
from .reduce_features import REDUCE_FEATURES
from .site_arguments import takes_sizes


@dataclass(frozen=True, eq=False, repr=False)
class SparseTensor(ArrayContainer):
    """Features at sites. Unpacks as the pair ``features, coordinates``.

    Parameters
    ----------
    features : array, shape (N, C)
        One row for each row of ``coordinates.indices``. Rows past the count are never read.
    coordinates : CoordinateMap
        Where the rows live.

    Examples
    --------
    >>> import numpy as np
    >>> x = sparse_tensor(np.ones((2, 3)), np.array([[0, 1, 1], [0, 2, 0]]), spatial_shape=(4, 4))
    >>> x
    SparseTensor: 2 sites of 3 channels, float64, on a grid of (4, 4), batch of 1
    >>> features, coordinates = x
    """

    features: Any
    coordinates: CoordinateMap

    copies_strided = True
    instead = "pass its .features"  # what the error says where an array belongs

    def __post_init__(self):
        if not isinstance(self.coordinates, CoordinateMap):
            raise DTypeError(
                "coordinates must be a CoordinateMap, got "
                f"{type(self.coordinates).__name__}; make one with coordinate_map"
            )
        if not hasattr(self.features, "shape"):
            raise DTypeError(
                f"features must be an array of shape ({self.coordinates.capacity}, C), got "
                f"{type(self.features).__name__}"
            )
        shape = tuple(self.features.shape)
        if len(shape) != 2 or shape[0] != self.coordinates.capacity:
            raise ShapeError(
                f"features must have shape ({self.coordinates.capacity}, C), one row for each row "
                f"of the coordinates, got {shape}"
            )

    @classmethod
    def computed(cls, features, coordinates):
        """Return a SparseTensor of features that were computed for the sites: nothing to check."""
        made = cls.__new__(cls)
        own = made.__dict__  # which takes half the time of object.__setattr__
        own["features"], own["coordinates"] = features, coordinates
        return made

    def __iter__(self):
        return iter((self.features, self.coordinates))

    @property
    def _device(self):
        return device_of_all((self.features, self.coordinates))

    def _arrays(self):
        return (self.features, *self.coordinates._arrays())

    def _map_arrays(self, function):
        return SparseTensor(function(self.features), self.coordinates._map_arrays(function))

    def __repr__(self):
        """Tell the number of sites, as that of a CoordinateMap does."""
        where, shape = self.coordinates, getattr(self.features, "shape", ())
        if not isinstance(where, CoordinateMap) or not where._is_readable() or len(shape) != 2:
            return f"SparseTensor: features {shape_of(self.features)}, coordinates {where!r}"
        return (
            f"SparseTensor: {where._told()} of {self.channels} channels, "
            f"{dtype_name(self.features)}, on a grid of {where.spatial_shape}, batch of "
            f"{where.batch_size}"
        )

    @property
    def channels(self):
        """Number of channels of the features."""
        return int(self.features.shape[1])

    @property
    def indices(self):
        """Rows ``(sample, *position)`` of the sites."""
        return self.coordinates.indices

    @property
    def spatial_shape(self):
        """Cells of the grid along each axis, or None."""
        return self.coordinates.spatial_shape

    @property
    def batch_size(self):
        """Number of samples, or None."""
        return self.coordinates.batch_size

    def replace(self, features):
        """Return other features at the same sites."""
        return SparseTensor(features, self.coordinates)

    def dense(self, **options):
        """Return the whole grid; see :func:`sparse_to_dense`.

        Features of PyTorch, JAX and TensorFlow go to the function of their adapter, which has
        gradients, if that is imported.
        """
        from .dense_conversion import sparse_to_dense  # which returns sparse tensors, too

        return adapted("sparse_to_dense", sparse_to_dense, self.features)(self, **options)


@takes_sizes
@array_function
def sparse_tensor(
    features, indices, *, spatial_shape=None, batch_size=None, mode="unique", order="leaf",
    capacity=None,
):  # fmt: skip
    """Put features at their sites.

    Parameters
    ----------
    features : array, shape (n, C)
        float16, bfloat16, float32 or float64; a row for each row of ``indices``.
    indices, spatial_shape, batch_size, order, capacity
        As for :func:`coordinate_map`.
    mode : "unique", "first", "last", "sum" or "mean"
        Features of rows with the same site: there are none such; those of the first or of the last
        row; their sum or mean, in float32 (float64 for float64): the same bits on every run.

    Returns
    -------
    SparseTensor
        One row of features for each site, 0 in rows past the count.

    Raises
    ------
    ShapeError, DTypeError, ValueError
        As :func:`coordinate_map` does; or if ``features`` has not a row for each row of
        ``indices``, or is not of a floating dtype.

    Source: the input layers of B. Graham's SparseConvNet.

    Examples
    --------
    >>> import numpy as np
    >>> points = np.array([[0, 2, 2], [0, 0, 1], [0, 2, 2]])
    >>> x = sparse_tensor(np.array([[1.0], [2], [3]]), points, spatial_shape=(4, 4), mode="mean")
    >>> x.indices.tolist(), x.features.tolist()
    ([[0, 0, 1], [0, 2, 2]], [[2.0], [2.0]])
    """
    given = (features, indices, spatial_shape, batch_size, mode, order, capacity)
    return _put_at_sites(*given)[0]


def _put_at_sites(features, indices, spatial_shape, batch_size, mode, order, capacity):
    """Do what sparse_tensor does; return the row of each row's site, too."""
    check_feature_rows(features, indices)
    grid = spatial_shape, batch_size
    coordinates, inverse, reduction = reduce_rows(indices, *grid, mode, order, capacity)
    rows = features_of_sites(features, reduction, coordinates.capacity, mode)
    return SparseTensor(rows, coordinates), inverse


put_at_sites = takes_sizes(array_function(_put_at_sites))  # for adapters, which differentiate it


def check_feature_rows(features, indices):
    """Raise unless ``features`` are floats, with a row for each row of ``indices``."""
    check_array("features", features, ndim=2)
    check_float("features", features.dtype)
    check_array("indices", indices, ndim=2, like=features)
    check_rows(features, indices)


def check_rows(features, indices):
    """Raise unless there are as many rows of features as of indices."""
    if len(features) != len(indices):
        raise ShapeError(
            f"features must have a row for each of the {len(indices)} rows of indices, got "
            f"{len(features)}"
        )


def sites_of(value):
    """Return the coordinates of a SparseTensor, or what is none as it is."""
    return value.coordinates if isinstance(value, SparseTensor) else value


def check_tensor(x, name="x"):
    """Raise unless ``x`` is a SparseTensor."""
    if not isinstance(x, SparseTensor):
        raise DTypeError(
            f"{name} must be a SparseTensor, got {type(x).__name__}; make one with sparse_tensor"
        )


def check_float_tensor(x):
    """Raise unless ``x`` is a SparseTensor of floats."""
    check_tensor(x)
    check_float("features", x.features.dtype)


def check_grad(grad_y, x, shape):
    """Raise unless ``grad_y`` has this shape, and the dtype of the features of ``x``."""
    check_array("grad_y", grad_y)
    if tuple(grad_y.shape) != shape:
        raise ShapeError(
            f"grad_y must have shape {shape}, that of the result, got {tuple(grad_y.shape)}"
        )
    check_dtype("grad_y", grad_y, x.features)


def features_of_sites(features, reduction, rows, mode):
    """Return the features of the sites that rows of features are reduced to."""
    if mode in ("sum", "mean"):
        order, site, _, _, starts = reduction.sorted()
        return REDUCE_FEATURES((features, order, site, starts[None], None), (mode,))
    with memory_of_graphs(features):
        return _chosen_features(features, reduction, rows, mode)


def _chosen_features(features, reduction, rows, mode):
    """Return the features of the first or last row of each site."""
    xp = namespace(features)
    if isinstance(reduction, ChosenRows):
        if not len(features):
            return xp.zeros((rows, features.shape[1]), features.dtype)
        there = (reduction.rows >= 0)[:, None]  # a mask of rows as an index waits for its count
        taken = features[xp.maximum(reduction.rows, 0)]
        taken = xp.where(there, taken, xp.zeros((), taken.dtype))
        return taken.astype(features.dtype, copy=False)  # CuPy makes float32 of bfloat16
    order, site, first, last, _ = reduction
    out = xp.zeros((rows + 1, features.shape[1]), features.dtype)
    chosen = last if mode == "last" else first
    out[xp.where(chosen, site, rows)] = features[order]
    return xp.ascontiguousarray(out[:rows])
