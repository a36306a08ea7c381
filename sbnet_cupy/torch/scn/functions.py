"""Functions of tensors of points and sites, with SparseConvNet's names."""

import torch

from ...errors import ShapeError
from ...submanifold.coordinate_map import CoordinateMap
from .._namespace import wide
from .._native import no_tensor
from ..submanifold import coordinate_map
from ..submanifold.maps import valid
from ..submanifold.operations import reduce_features, rows_of
from .convolutions import SiteModule
from .tensors import (
    Metadata,
    SparseConvNetTensor,
    check_input,
    check_list,
    check_planes,
    size_key,
)


def append_tensors(tensors):
    """Return the samples of several SparseConvNetTensors of one spatial size as one batch."""
    check_list("tensors", tensors)
    sizes = {size_key(x.spatial_size) for x in tensors}
    if len(sizes) != 1:
        raise ValueError(f"tensors must have one spatial size, got {sorted(sizes)}")
    listed, samples, count, missing, status = [], 0, 0, 0, None
    for x in tensors:
        sites = x.coordinates
        first = sites.indices.new_tensor([samples] + [0] * sites.dimensions)
        listed.append(torch.where(valid(sites)[:, None], sites.indices + first, -1))
        samples, count = samples + sites.batch_size, count + sites.count
        missing = missing + (sites.count - sites.capacity).clamp(min=0)
        if sites.status is not None:
            status = sites.status if status is None else status | sites.status
    (size,) = sizes
    if len({x.features.shape[1] for x in tensors}) != 1:
        planes = [x.features.shape[1] for x in tensors]
        raise ShapeError(f"tensors must have as many planes, got {planes}")
    rows = torch.cat(listed)
    count = torch.where(missing > 0, len(rows) + missing, count).to(count.dtype)
    order = (rows[:, 0] < 0).byte().argsort(stable=True)  # rows that hold no site come last
    metadata = Metadata(len(size), [x.metadata for x in tensors])
    metadata.grids[size] = CoordinateMap(rows[order], count, size, samples, status)
    features = torch.cat([x.features for x in tensors])[order]
    return SparseConvNetTensor(features, metadata, tensors[0].spatial_size)


class AddCoords(SiteModule):
    """Append the position of each site, from -1 to 1 on each axis, to its features.

    It is 0 on an axis of one cell.
    """

    def forward(self, input):
        """Append positions to a SparseConvNetTensor."""
        check_input(input)
        like = wide(input.features)
        half = (input.spatial_size.to(like) - 1) / 2
        position = input.coordinates.indices[:, 1:].to(like)
        position = torch.where(half > 0, position / half - 1, 0)
        return input.replace(torch.cat([input.features, position.to(input.features)], 1))


def compare_sparse(x, y):
    """Return the mean, over the sites of both tensors, of the squared distance of their features.

    Where only one of them has a site, the other counts as 0. Without sites it is 0.
    """
    check_list("x and y", [x, y])
    if size_key(x.spatial_size) != size_key(y.spatial_size):
        sizes = size_key(x.spatial_size), size_key(y.spatial_size)
        raise ShapeError(f"x and y must have one spatial size, got {sizes[0]} and {sizes[1]}")
    check_planes(y.features, x.features.shape[1], "y")
    (rows_x, at_x), (rows_y, at_y) = map(_there, (x, y))
    batch, n = max(x.batch_size(), y.batch_size()), len(rows_x)
    both, site = coordinate_map(
        torch.cat([rows_x, rows_y]), spatial_shape=size_key(x.spatial_size), batch_size=batch,
        mode="first",
    )  # fmt: skip
    distance = _at(at_x, site[:n], both.capacity) - _at(at_y, site[n:], both.capacity)
    return distance.square().sum() / max(both.capacity, 1)


def _there(x):
    """Return the rows of a tensor that hold a site, and their features."""
    there = valid(x.coordinates).nonzero()[:, 0]
    return x.coordinates.indices[there], x.features[there]


def _at(features, site, number):
    """Return features at sites of a longer list, 0 where there are none."""
    row = torch.full((number,), -1, device=site.device)
    listed = torch.arange(len(site), device=site.device)
    return rows_of(features, row.index_copy(0, site.long(), listed))


def voxelize_pointcloud(
    xyz, rgb, average=True, accumulate=False, return_inverse=False, return_counts=False
):
    """Return the distinct rows of ``xyz``, sorted, and what becomes of their rows of ``rgb``.

    Parameters
    ----------
    xyz : tensor, shape (n, d)
        Points.
    rgb : tensor, shape (n, C)
        Their features, as float32 in the result.
    average, accumulate : bool
        Take the mean of the features of equal points, or else their sum, or else those of the first
        one. Sums are added in the order of the rows.
    return_inverse, return_counts : bool
        Whether to return the row of the result of each point, and the points of each row.

    Returns
    -------
    list
        The distinct points, the features, and what was asked for.
    """
    _check_lists("xyz", xyz, "rgb", rgb)
    points, inverse, counts = torch.unique(xyz, dim=0, return_inverse=True, return_counts=True)
    order = inverse.argsort(stable=True)
    site = inverse[order]
    ends = counts.cumsum(0)
    starts = torch.cat([ends.new_zeros(1), ends])
    if average or accumulate:
        mode = "mean" if average else "sum"
        features = reduce_features(rgb.float(), order, site, starts[None], mode)
    else:
        features = rgb.float()[order[starts[:-1]]]
    result = [points, features]
    return result + [inverse] * return_inverse + [counts] * return_counts


def _check_lists(name, rows, other, values):
    """Raise unless two arguments of these names are tensors of two axes with as many rows."""
    for each, value in ((name, rows), (other, values)):
        if not isinstance(value, torch.Tensor):
            raise no_tensor(each, value)
        if value.dim() != 2:
            raise ShapeError(f"{each} must have two axes, (n, columns), got {tuple(value.shape)}")
    if len(values) != len(rows):
        raise ShapeError(
            f"{other} must have a row for each of the {len(rows)} of {name}, got {len(values)}"
        )


def pad_with_batch_idx(x, idx):
    """Append the number of a sample to coordinates: ``[n, d]`` to ``[n, d + 1]``."""
    return torch.cat([x, x.new_full((len(x), 1), idx)], 1)


def batch_location_tensors(location_tensors):
    """Join the coordinates of samples, a list of ``[n_i, d]``, to ``[sum(n_i), d + 1]``.

    The last column is the number of the sample.
    """
    listed = [pad_with_batch_idx(x, i) for i, x in enumerate(location_tensors) if x.numel()]
    empty = [pad_with_batch_idx(x, 0) for x in location_tensors if x.dim() == 2 and not x.numel()]
    if not (listed or empty):
        raise ValueError("location_tensors must hold a tensor of shape (n, dimension), got none")
    return torch.cat(listed or empty)


def prepare_BLInput(batch):
    """Return pairs of coordinates and features, one for each sample, as a BLInputLayer takes them.

    Parameters
    ----------
    batch : list of (LongTensor ``[n, d]``, tensor ``[n, C]``)
        The samples.

    Returns
    -------
    list
        Coordinates ``[B, L, d]``, -1 where a sample has fewer points, and features ``[B, L, C]``.
    """
    if not batch:
        raise ValueError("batch must hold at least one sample, got none")
    for number, (coords, features) in enumerate(batch):
        _check_lists(f"coords of sample {number}", coords, f"features of sample {number}", features)
    pad = torch.nn.utils.rnn.pad_sequence
    coords, features = zip(*batch, strict=True)
    return [pad(coords, batch_first=True, padding_value=-1), pad(features, batch_first=True)]
