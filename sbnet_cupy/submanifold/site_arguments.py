"""Arguments of lists of sites: rows of coordinates, sizes of a grid, capacities."""

import functools
import re

import numpy as np

from ..core.byte_order import check_byte_order
from ..core.checks import check_array
from ..core.sizes import is_integer
from ..errors import DTypeError, ShapeError

MODES = ("unique", "first", "last", "sum", "mean")  # what rows with the same site become


def takes_sizes(function):
    """Make a function take NumPy arrays as ``spatial_shape`` and ``offsets``, given by name.

    Whatever library its arrays are of: it is for functions at the door, which would take one for
    such an array.
    """

    @functools.wraps(function)
    def call(*args, **kwargs):
        for name in ("spatial_shape", "offsets"):
            if name in kwargs:
                kwargs[name] = _listed(kwargs[name])
        return function(*args, **kwargs)

    return call


def _listed(sizes):
    """Return a NumPy array as a list, also in a list or tuple, and anything else as it is."""
    if isinstance(sizes, np.ndarray) and sizes.ndim:
        return sizes.tolist()
    return type(sizes)(map(_listed, sizes)) if type(sizes) in (list, tuple) else sizes


def check_indices(indices):
    """Raise unless ``indices``, an array or its spec, is a list of rows ``(sample, *position)``."""
    check_array("indices", indices, ndim=2)
    if indices.dtype not in (np.int32, np.int64):
        if indices.dtype.kind == "i":
            check_byte_order({"indices": indices})
        raise DTypeError(f"indices must be int32 or int64, got {indices.dtype}; convert them")
    if indices.shape[1] < 2:
        raise ShapeError(
            f"indices must have shape (n, 1 + d), d at least 1, got {indices.shape}; rows are "
            "(sample, *position)"
        )


def check_int32(name, array, maker):
    """Raise unless an array of any library is of int32, as the ``maker`` makes it."""
    dtype = getattr(array, "dtype", None)
    if not _is_int32(dtype):
        raise DTypeError(f"{name} must be of int32, got {dtype}; use {maker}")


_INT32 = {}  # dtypes that were asked about; of a function with a cache torch.compile warns


def _is_int32(dtype):
    """Whether a dtype of any library is int32."""
    known = _INT32.get(dtype)
    if known is None:
        known = _INT32[dtype] = re.findall(r"\w+", str(dtype))[-1:] == ["int32"]
    return known


def check_capacity(capacity):
    """Raise unless ``capacity`` is None or a number of rows."""
    if capacity is not None and not (is_integer(capacity) and 0 <= capacity < 2**31):
        raise ShapeError(
            "capacity must be a non-negative integer below 2**31, because rows are numbered in "
            f"int32, got {capacity!r}"
        )


def check_grid(spatial_shape, batch_size, dimensions):
    """Return the sizes of a grid as a tuple and an int, None where not known; or raise."""
    if spatial_shape is not None:
        given, sizes = spatial_shape, _listed(spatial_shape)
        sizes = tuple(sizes) if isinstance(sizes, tuple | list) else (sizes,) * dimensions
        if len(sizes) != dimensions or not all(is_integer(n) and 0 <= n < 2**31 for n in sizes):
            raise ShapeError(
                f"spatial_shape must be a non-negative integer below 2**31 or {dimensions} of them "
                f"for indices of {dimensions + 1} columns (sample, *position), got {given!r}"
            )
        spatial_shape = tuple(map(int, sizes))
    if batch_size is not None:
        if not is_integer(batch_size) or not 0 <= batch_size < 2**31:
            raise ShapeError(
                f"batch_size must be a non-negative integer below 2**31, got {batch_size!r}"
            )
        batch_size = int(batch_size)
    return spatial_shape, batch_size
