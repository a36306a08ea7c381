"""Lists of sites, kernel maps and sparse tensors on tensors."""

import math
from typing import Any

import torch

from ...core.checks import check_array
from ...core.spec import CPU, ArraySpec
from ...core.torch_memory import to_tensor
from ...submanifold import coordinate_map as core
from ...submanifold import dense_conversion
from ...submanifold.adapted import ADAPTED
from ...submanifold.distinct import row_of_site
from ...submanifold.sparse_tensor import SparseTensor, check_rows
from ...submanifold.voxelize import check_points, find_voxels
from .._native import check_tensors, numpy_dtype, views
from .maps import (
    check_floats,
    check_not_recorded,
    check_sparse,
    kernel_map_of,
    native,
    of_native,
    sites_of,
    untraced,
)
from .operations import filled, reduce_features, rows_of
from .rooms import note, room
from .site_branch import find_beside, natively


def coordinate_map(
    indices, *, spatial_shape=None, batch_size=None, mode="unique", order="leaf", capacity=None
):
    """List the distinct sites of rows: :func:`sbnet_cupy.coordinate_map` on a tensor.

    Parameters
    ----------
    indices : int32 or int64 tensor, shape (n, 1 + d)
        Rows ``(sample, *position)``.
    spatial_shape, batch_size, mode, order, capacity
        As for :func:`sbnet_cupy.coordinate_map`; the shape may be a LongTensor on the CPU, too.

    Returns
    -------
    coordinates : CoordinateMap
        Of tensors on the device of ``indices``.
    inverse : int32 tensor, shape (n,)

    Raises
    ------
    ShapeError, DTypeError, ValueError
        As :func:`sbnet_cupy.coordinate_map`; DTypeError also for what is no tensor.

    Source: Graham et al. 2018, arXiv:1711.10275.

    Examples
    --------
    >>> sites, inverse = coordinate_map(torch.tensor([[0, 5, 5], [0, 1, 2]]))
    >>> sites.indices
    tensor([[0, 1, 2],
            [0, 5, 5]], dtype=torch.int32)
    """
    check_tensors(indices=indices)
    options = batch_size, mode, order, capacity
    return _listed(_in_grid(spatial_shape), options, indices, reduces=False)[:2]


def _sizes(shape):
    """Return a spatial shape that is a tensor of one axis on the CPU as a list."""
    is_listed = isinstance(shape, torch.Tensor) and shape.dim() == 1 and shape.device.type == "cpu"
    return shape.tolist() if is_listed else shape


def _in_grid(spatial_shape):
    """Return what reduces rows to the sites of a grid, as ``_listed`` takes it."""
    shape = _sizes(spatial_shape)
    return lambda rows, *options: core.reduce_rows(rows, shape, *options)


def _listed(reduce, options, *tensors, drops=False, reduces=True):
    """Return the sites, the site of each row, and the tensors that reduce features.

    These are the row of each site, or the arrays of a Reduction; None unless it ``reduces`` some.
    ``reduce`` is a function of native arrays and the options, as ``reduce_rows``, or one that
    ``drops`` what is outside on purpose.
    """
    check_not_recorded(*tensors)
    return _found(reduce, options, drops, reduces, *tensors)


@untraced
def _found(reduce, options, drops, reduces, *tensors):
    given, mode, order, capacity = options
    capacity, batch_size = room(capacity, given)

    def find():
        made, inverse, reduction = reduce(*views(*tensors), batch_size, mode, order, capacity)
        if reduces and mode not in ("sum", "mean"):
            reduction = row_of_site(reduction, made.capacity, mode)
        return made, inverse, reduction

    made, inverse, reduction = find_beside(find, *tensors)
    sites, inverse = of_native(made), to_tensor(inverse)
    rows = None if drops else tensors[0]
    sample = tensors[1] if drops and given is None and len(tensors) > 1 else None
    note(sites, inverse, rows, sample)
    if not reduces:
        return sites, inverse, None
    if mode in ("sum", "mean"):  # in a capture beside what finds the first maps
        order, site, _, _, starts = natively(reduction.sorted, tensors[0])
        return sites, inverse, tuple(map(to_tensor, (order, site, starts[None])))
    return sites, inverse, to_tensor(reduction)


def sparse_tensor(
    features, indices, *, spatial_shape=None, batch_size=None, mode="unique", order="leaf",
    capacity=None,
):  # fmt: skip
    """Put features at their sites: :func:`sbnet_cupy.sparse_tensor` on tensors.

    Differentiable with respect to ``features``.

    Parameters
    ----------
    features : tensor, shape (n, C)
        Of a float dtype; a row for each row of ``indices``.
    indices : int32 or int64 tensor, shape (n, 1 + d)
        Rows ``(sample, *position)``.
    spatial_shape, batch_size, mode, order, capacity
        As for :func:`sbnet_cupy.sparse_tensor`; the shape may be a LongTensor on the CPU, too.

    Returns
    -------
    SparseTensor
        Of tensors.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ValueError
        As :func:`sbnet_cupy.sparse_tensor`; DTypeError also for what is no tensor.

    Source: the input layers of B. Graham's SparseConvNet.

    Examples
    --------
    >>> rows = torch.tensor([[0, 2, 2], [0, 0, 1], [0, 2, 2]])
    >>> x = sparse_tensor(torch.tensor([[1.0], [2], [3]]), rows, spatial_shape=4, mode="mean")
    >>> x.indices.tolist(), x.features.tolist()
    ([[0, 0, 1], [0, 2, 2]], [[2.0], [2.0]])
    """
    return with_inverse(features, indices, spatial_shape, batch_size, mode, order, capacity)[0]


def with_inverse(features, indices, spatial_shape, batch_size, mode, order="leaf", capacity=None):
    """Return what sparse_tensor does, and the site of each row."""
    check_tensors(features=features, indices=indices)
    check_array("features", spec_of_tensor(features), ndim=2)
    check_floats(features)
    check_array("indices", spec_of_tensor(indices), ndim=2)
    check_rows(features, indices)
    options = batch_size, mode, order, capacity
    coordinates, inverse, how = _listed(_in_grid(spatial_shape), options, indices)
    return SparseTensor(_reduced(features, how, mode), coordinates), inverse


def _reduced(features, how, mode):
    """Return the features of sites, by what ``_listed`` says of them."""
    if mode in ("sum", "mean"):
        return reduce_features(features, *how, mode)
    return rows_of(features, how)


def voxelize(
    points, features=None, *, ranges, voxel_size, sample=None, batch_size=None, mode="mean",
    order="leaf", capacity=None,
):  # fmt: skip
    """Put the points of a cloud into voxels: :func:`sbnet_cupy.voxelize` on tensors.

    Differentiable with respect to ``features``; which voxel a point is in has no gradient.

    Parameters
    ----------
    points : tensor, shape (P, d) or more columns
        Coordinates in the first d columns, in the unit of ``ranges``.
    features : tensor, shape (P, C), optional
        Of a float dtype. By default all columns of ``points``.
    sample : int32 or int64 tensor, shape (P,), optional
        Number of the sample that each point belongs to.
    ranges, voxel_size, batch_size, mode, order, capacity
        As for :func:`sbnet_cupy.voxelize`.

    Returns
    -------
    x : SparseTensor
        Of tensors: one row for each voxel that holds a point.
    inverse : int32 tensor, shape (P,)
        The row of the voxel of each point, -1 for points that were dropped.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ValueError
        As :func:`sbnet_cupy.voxelize`; DTypeError also for what is no tensor.

    Source: Y. Zhou, O. Tuzel, "VoxelNet", CVPR 2018, arXiv:1711.06396 (the grid).

    Examples
    --------
    >>> points = torch.tensor([[0.2, 1.6], [0.4, 1.8], [3.5, 0.1], [9.0, 0.0]])
    >>> features = torch.tensor([[1.0], [2], [3], [4]], requires_grad=True)
    >>> x, inverse = voxelize(points, features, ranges=[(0, 4), (0, 2)], voxel_size=0.5)
    >>> x.features.ravel().tolist(), inverse.tolist()
    ([1.5, 3.0], [0, 0, 1, -1])
    >>> x.features.sum().backward()
    >>> features.grad.ravel()
    tensor([0.5000, 0.5000, 1.0000, 0.0000])
    """
    check_tensors(("features", "sample"), points=points, features=features, sample=sample)
    features = points if features is None else features
    _check_points(points, features)
    options = batch_size, mode, order, capacity

    def find(points, *rest):
        *number, batch_size, mode, order, capacity = rest
        of_points = (*number, None)[0], batch_size, mode, order, capacity
        return find_voxels(points, ranges, voxel_size, *of_points)

    given = (points,) if sample is None else (points, sample)
    coordinates, inverse, how = _listed(find, options, *given, drops=True)
    return SparseTensor(_reduced(features, how, mode), coordinates), inverse


@untraced  # Dynamo would warn of the functions that keep names of dtypes
def _check_points(points, features):
    """Check points and their features; what follows breaks a compiled function's graph, too."""
    check_points(spec_of_tensor(points), spec_of_tensor(features))


def spec_of_tensor(tensor):
    """Return the ArraySpec of a tensor, its gaps closed."""
    device = CPU if tensor.get_device() < 0 else tensor.get_device()
    return ArraySpec(tuple(tensor.shape), numpy_dtype(tensor.dtype, "tensor"), device)


def kernel_map(
    coordinates, kernel_size=None, *, stride: Any = 1, dilation: Any = 1, padding=None, onto=None,
    transposed=False, output_padding: Any = 0, offsets=None, capacity=None,
):  # fmt: skip
    """Find which rows a convolution reads: :func:`sbnet_cupy.kernel_map` on tensors.

    Parameters
    ----------
    coordinates : CoordinateMap or SparseTensor
        Of tensors. It keeps the map: asking again is free.
    kernel_size, stride, dilation, padding, transposed, output_padding, offsets, capacity
        As for :func:`sbnet_cupy.kernel_map`.
    onto : CoordinateMap or SparseTensor, optional
        Of tensors.

    Returns
    -------
    KernelMap
        Of tensors.

    Raises
    ------
    ShapeError, DTypeError, ValueError
        As :func:`sbnet_cupy.kernel_map`.

    Source: Graham et al. 2018, arXiv:1711.10275, section 3.

    Examples
    --------
    >>> sites, _ = coordinate_map(torch.tensor([[0, 1], [0, 2], [0, 5]]), spatial_shape=8)
    >>> kernel_map(sites, 3, onto=sites).rows.tolist()
    [[-1, 0, -1], [0, 1, 2], [1, -1, -1]]
    """
    coordinates = sites_of(coordinates, "coordinates")
    return kernel_map_of(
        coordinates, kernel_size, onto, stride=stride, dilation=dilation, padding=padding,
        transposed=transposed, output_padding=output_padding, offsets=offsets, capacity=capacity,
    )  # fmt: skip


def dense_to_sparse(x, *, tol=0.0, mask=None, capacity=None, data_format="channels_last"):
    """List the cells of a grid that are not 0: :func:`sbnet_cupy.dense_to_sparse` on tensors.

    Differentiable with respect to ``x``.

    Parameters
    ----------
    x : tensor, shape (N, *spatial, C), or (N, C, *spatial) for "channels_first"
        Of a float dtype.
    tol, capacity, data_format
        As for :func:`sbnet_cupy.dense_to_sparse`.
    mask : tensor, shape (N, *spatial), optional
        Cells are listed where it is not 0, in place of ``tol``.

    Returns
    -------
    SparseTensor
        Sites in raster order.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, ValueError
        As :func:`sbnet_cupy.dense_to_sparse`; DTypeError also for what is no tensor.

    Source: the DenseToSparse of B. Graham's SparseConvNet.

    Examples
    --------
    >>> image = torch.zeros(1, 4, 4, 1)
    >>> image[0, 1, 2] = 5.0
    >>> dense_to_sparse(image).indices.tolist()
    [[0, 1, 2]]
    """
    check_tensors(("mask",), x=x, mask=mask)
    check_not_recorded(x, mask)
    coordinates, cells = _cells_listed(x, tol, mask, capacity, data_format)
    last = x if data_format == "channels_last" else x.movedim(1, -1)
    features = rows_of(last.flatten(0, -2), cells)
    return SparseTensor(features, coordinates)


@untraced
def _cells_listed(x, tol, mask, capacity, data_format):
    """Return the sites of a grid, and the flat cell of each, -1 for rows that are no site."""
    capacity, _ = room(capacity)

    def find():
        image, where = views(x, mask)
        options = {"tol": tol, "mask": where, "capacity": capacity, "data_format": data_format}
        return dense_conversion.dense_to_sparse(image, **options).coordinates

    made = find_beside(find, x, mask)
    coordinates = of_native(made)
    note(coordinates)
    shape = (made.batch_size, *made.spatial_shape)
    cells = _cells(coordinates, shape)
    return coordinates, torch.where(cells < math.prod(shape), cells, -1)


def sparse_to_dense(x, *, fill=0.0, data_format="channels_last", spatial_shape=None):
    """Put features at their cells of a whole grid: :func:`sbnet_cupy.sparse_to_dense` on tensors.

    Differentiable with respect to the features.

    Parameters
    ----------
    x : SparseTensor
        Of tensors, and of a known batch size.
    fill, data_format, spatial_shape
        As for :func:`sbnet_cupy.sparse_to_dense`.

    Returns
    -------
    tensor, shape (N, *spatial, C), or (N, C, *spatial) for "channels_first"

    Raises
    ------
    ShapeError, DTypeError, ValueError
        As :func:`sbnet_cupy.sparse_to_dense`; DTypeError also for what is no tensor.

    Source: the SparseToDense of B. Graham's SparseConvNet.

    Examples
    --------
    >>> x = sparse_tensor(torch.tensor([[3.0], [1]]), torch.tensor([[0, 0], [0, 2]]),
    ...                   spatial_shape=4)
    >>> sparse_to_dense(x)[0, :, 0]
    tensor([3., 0., 1., 0.])
    """
    check_sparse(x)
    fill = dense_conversion.read_fill(fill, numpy_dtype(x.features.dtype, "features"))
    shape = dense_conversion.grid_of(x, _sizes(spatial_shape), data_format)
    cells, total = _cells(x.coordinates, shape), math.prod(shape)
    out = filled(x.features, (total + 1, x.channels), fill)
    out = out.index_copy(0, cells, x.features)  # rows that are no site go to the last place
    out = out[:-1].reshape(*shape, x.channels)
    return out.movedim(-1, 1).contiguous() if data_format == "channels_first" else out


ADAPTED["torch", "sparse_to_dense"] = sparse_to_dense


@untraced
def _select(coordinates, mask, capacity):
    """See :meth:`sbnet_cupy.CoordinateMap.select`."""
    capacity, _ = room(capacity)
    if not isinstance(mask, torch.Tensor):
        return core.select_sites(coordinates, mask, capacity)
    spec = spec_of_tensor(coordinates.indices)
    core.check_selection(spec_of_tensor(mask), coordinates.capacity, spec)
    sites = native(coordinates)
    made, rows = find_beside(
        lambda: core.select_sites(sites, *views(mask), capacity), mask, coordinates.indices
    )
    chosen = of_native(made, coordinates)
    note(chosen)
    return chosen, to_tensor(rows)


ADAPTED["torch", "select"] = _select


@untraced
def _cells(coordinates, shape):
    """Return the flat cell of each site in a grid, as a tensor that the coordinates keep."""
    kept, key = coordinates._kept, ("cells", shape)
    if key not in kept:
        sites = native(coordinates)

        def find():
            return dense_conversion.cells_of(sites, shape)

        kept[key] = to_tensor(find_beside(find, coordinates.indices))
    return kept[key]
