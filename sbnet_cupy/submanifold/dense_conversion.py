"""dense_to_sparse and sparse_to_dense: between whole grids and features at sites."""

import math

import numpy as np

from ..core.arrays import array_function, namespace
from ..core.checks import check_array, check_float
from ..core.graph_memory import memory_of_graphs
from ..core.list_cells import list_cells
from ..core.scalars import as_number, as_number_in
from ..dense.conv2d import check_choice
from ..errors import ShapeError
from .coordinate_map import CoordinateMap
from .site_arguments import check_capacity, check_grid, takes_sizes
from .sparse_tensor import SparseTensor, check_tensor

FORMATS = ("channels_last", "channels_first")
_MOST_NUMBERS = 2**60  # of 8 bytes


@array_function
def dense_to_sparse(x, *, tol=0.0, mask=None, capacity=None, data_format="channels_last"):
    """List the cells of a grid that are not 0, with their features.

    Parameters
    ----------
    x : array, shape (N, *spatial, C), or (N, C, *spatial) for "channels_first"
        float16, bfloat16, float32 or float64.
    tol : float
        Cells are listed where a channel is larger than this in magnitude, or NaN.
    mask : array, shape (N, *spatial), optional
        bool or number; cells are listed where it is not 0, in place of ``tol``.
    capacity : int, optional
        Number of rows of the result. With it nothing waits for a GPU; see :func:`coordinate_map`.
    data_format : "channels_last" or "channels_first"
        Where the channels of ``x`` are.

    Returns
    -------
    SparseTensor
        Sites in raster order.

    Raises
    ------
    ShapeError, DTypeError, ValueError
        If ``x`` is no grid of floats, ``mask`` has another shape, ``tol`` is no number, or an
        option is none of those above.

    Source: the DenseToSparse of B. Graham's SparseConvNet.

    Examples
    --------
    >>> import numpy as np
    >>> image = np.zeros((1, 4, 4, 1))
    >>> image[0, 1, 2] = 5.0
    >>> dense_to_sparse(image).indices.tolist()
    [[0, 1, 2]]
    """
    x, tol = _channels_last(x, data_format), read_tol(tol)
    check_capacity(capacity)
    batch, *spatial, channels = x.shape
    if mask is None:
        with np.errstate(over="ignore"):  # a tol that is infinite in the dtype of x
            listed = ~(abs(x) <= tol).all(axis=-1)
    else:
        check_array("mask", mask, shape=x.shape[:-1], like=x)
        listed = mask != 0
    with memory_of_graphs(x):
        indices, count, cells = list_cells(listed, capacity)
        coordinates = CoordinateMap(indices, count, tuple(spatial), batch)
        return SparseTensor(_rows_of(x, cells, channels), coordinates)


@array_function
def dense_to_sparse_grad(grad_y, x, *, data_format="channels_last"):
    """Compute the gradient of dense_to_sparse: features put back at their cells.

    Parameters
    ----------
    grad_y : array, shape (N, C)
        Gradient of the features of the result.
    x : SparseTensor
        The result of :func:`dense_to_sparse`.
    data_format : "channels_last" or "channels_first"
        Layout of the grid.

    Returns
    -------
    grad_x : array
        Of the shape of the grid, 0 in cells that are not listed.

    Raises
    ------
    ShapeError, DTypeError, ValueError
        As :func:`sparse_to_dense` does.

    Examples
    --------
    >>> import numpy as np
    >>> x = dense_to_sparse(np.array([[0.0, 2.0, 3.0]])[..., None])
    >>> dense_to_sparse_grad(np.array([[10.0], [20.0]]), x)[0, :, 0]
    array([ 0., 10., 20.])
    """
    check_tensor(x)
    check_array("grad_y", grad_y)
    if tuple(grad_y.shape) != tuple(x.features.shape):
        raise ShapeError(
            f"grad_y must have shape {tuple(x.features.shape)}, that of the features, got "
            f"{tuple(grad_y.shape)}"
        )
    return sparse_to_dense(SparseTensor(grad_y, x.coordinates), data_format=data_format)


@takes_sizes
@array_function
def sparse_to_dense(x, *, fill=0.0, data_format="channels_last", spatial_shape=None):
    """Put features at their cells of a whole grid.

    Parameters
    ----------
    x : SparseTensor
        Of a known batch size.
    fill : float
        What all other cells hold, rounded to the dtype of the features; of integers and bool one
        that they hold.
    data_format : "channels_last" or "channels_first"
        Layout of the result.
    spatial_shape : tuple of int, optional
        Cells of the grid, in place of that of ``x``. Sites outside are left out.

    Returns
    -------
    array, shape (N, *spatial, C), or (N, C, *spatial) for "channels_first"
        In the dtype of the features.

    Raises
    ------
    ShapeError
        If the shape of the grid or the batch size is not known.
    DTypeError, ValueError
        If ``x`` is no SparseTensor, ``fill`` no number that the features hold, or ``data_format``
        none of those above.

    Source: the SparseToDense of B. Graham's SparseConvNet.

    Examples
    --------
    >>> import numpy as np
    >>> x = sparse_tensor(np.array([[3.0], [1]]), np.array([[0, 0], [0, 2]]), spatial_shape=4)
    >>> sparse_to_dense(x)[0, :, 0]
    array([3., 0., 1., 0.])
    """
    shape = grid_of(x, spatial_shape, data_format)
    fill = read_fill(fill, x.features.dtype)
    xp, cells = namespace(x.features), cells_of(x.coordinates, shape)
    with memory_of_graphs(x.features), np.errstate(over="ignore"):
        out = xp.full((np.prod(shape, dtype=np.int64) + 1, x.channels), fill, x.features.dtype)
        out[cells] = x.features  # rows that are no site go to the last place
        out = out[:-1].reshape(*shape, x.channels)
        return xp.ascontiguousarray(xp.moveaxis(out, -1, 1)) if _first(data_format) else out


@takes_sizes
@array_function
def sparse_to_dense_grad(grad_y, x, *, data_format="channels_last", spatial_shape=None):
    """Compute the gradient of sparse_to_dense: the cells at which the sites are.

    Parameters
    ----------
    grad_y : array
        Gradient of the result.
    x, data_format, spatial_shape
        As they were given to :func:`sparse_to_dense`; the values of the features do not matter.

    Returns
    -------
    grad_x : array, shape (N, C)
        In the dtype of ``grad_y``, 0 in rows that are no site.

    Raises
    ------
    ShapeError, DTypeError, ValueError
        As :func:`sparse_to_dense` does, or if ``grad_y`` has not the shape of its result.

    Examples
    --------
    >>> import numpy as np
    >>> x = sparse_tensor(np.array([[3.0], [1]]), np.array([[0, 0], [0, 2]]), spatial_shape=4)
    >>> sparse_to_dense_grad(np.arange(4.0).reshape(1, 4, 1), x).ravel()
    array([0., 2.])
    """
    shape = grid_of(x, spatial_shape, data_format)
    grad = _channels_last(grad_y, data_format, name="grad_y")
    if grad.shape != (*shape, x.channels):
        raise ShapeError(
            f"grad_y must be a grid of {shape} with {x.channels} channels, got {grad_y.shape}"
        )
    total = np.prod(shape, dtype=np.int64)
    cells = cells_of(x.coordinates, shape)
    with memory_of_graphs(grad_y):
        return _rows_of(grad, namespace(grad).where(cells < total, cells, -1), x.channels)


def read_tol(tol):
    """Return the ``tol`` of a dense_to_sparse as a float, or raise."""
    return as_number("tol", tol, nan=False, hint="; use 0 for cells that are not 0")


def read_fill(fill, dtype):
    """Return the ``fill`` of a sparse_to_dense for features of this dtype, or raise."""
    return as_number_in("fill", fill, dtype, "convert the features")


def _first(data_format):
    return data_format == "channels_first"


def _channels_last(x, data_format, name="x"):
    """Check a grid; view it with its channels last."""
    check_grid_array(name, x, data_format)
    return namespace(x).moveaxis(x, 1, -1) if _first(data_format) else x


def check_grid_array(name, x, data_format):
    """Raise unless ``x``, an array or its spec, is a grid of floats."""
    check_choice("data_format", data_format, FORMATS)
    check_array(name, x)
    if len(x.shape) < 3:
        raise ShapeError(f"{name} must have at least 3 dimensions, (N, *spatial, C), got {x.shape}")
    check_float(name, x.dtype)


def _rows_of(x, cells, channels):
    """Return the rows of a grid at flat cells, 0 where a cell is negative."""
    xp = namespace(x)
    rows = x.reshape(math.prod(x.shape[:-1]), channels)
    if not len(rows):
        return xp.zeros((len(cells), channels), x.dtype)
    taken = rows[xp.maximum(cells, 0)]
    rows = xp.where((cells >= 0)[:, None], taken, xp.zeros((), x.dtype))
    return rows.astype(x.dtype, copy=False)  # CuPy makes float32 of bfloat16


def grid_of(x, spatial_shape, data_format):
    """Return ``(batch, *spatial)`` of a dense result, or raise."""
    check_tensor(x)
    if data_format is None:
        raise ValueError(f"data_format must be one of {FORMATS}, got None")
    check_choice("data_format", data_format, FORMATS)
    shape, batch = x.spatial_shape, x.batch_size
    if spatial_shape is not None:
        shape, _ = check_grid(spatial_shape, batch, x.coordinates.dimensions)
    if shape is None or batch is None:
        raise ShapeError(
            f"x must have a known shape and batch size, got {shape} and {batch}; pass "
            "spatial_shape and batch_size to sparse_tensor"
        )
    if (math.prod((batch, *shape)) + 1) * max(x.channels, 1) >= _MOST_NUMBERS:
        raise ShapeError(
            "x must be on a grid of which an array can hold all cells, fewer than 2**60 numbers, "
            f"got {batch} samples of {shape} with {x.channels} channels; pass a smaller "
            "spatial_shape, or split the grid"
        )
    return (batch, *shape)


def cells_of(coordinates, shape):
    """Return the flat cell of each site: int64, the number of cells for rows that have none."""
    xp = namespace(coordinates.indices)
    inside = coordinates.valid()
    flat = xp.zeros(coordinates.capacity, np.int64)
    for column, size in zip(coordinates.indices.T, shape, strict=True):
        inside = inside & (column >= 0) & (column < size)
        flat = flat * size + column
    return xp.where(inside, flat, np.prod(shape, dtype=np.int64))
