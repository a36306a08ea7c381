"""Functions of tensors of points and sites, with SparseConvNet's names."""

import torch

from ...submanifold.coordinate_map import CoordinateMap
from ..submanifold import coordinate_map
from ..submanifold.operations import reduce_features, rows_of
from .convolutions import SiteModule
from .tensors import Metadata, SparseConvNetTensor, size_key


def append_tensors(tensors):
    """Return the samples of several SparseConvNetTensors of one spatial size as one batch."""
    sizes = {size_key(x.spatial_size) for x in tensors}
    if len(sizes) != 1:
        raise ValueError(f"tensors must have one spatial size, got {sorted(sizes)}")
    listed, samples, count = [], 0, 0
    for x in tensors:
        sites = x.coordinates
        listed.append(sites.indices + torch.tensor([samples] + [0] * sites.dimensions).to(
            sites.indices))  # fmt: skip
        samples, count = samples + sites.batch_size, count + sites.count
    (size,) = sizes
    metadata = Metadata(len(size))
    metadata.grids[size] = CoordinateMap(torch.cat(listed), count, size, samples)
    features = torch.cat([x.features for x in tensors])
    return SparseConvNetTensor(features, metadata, tensors[0].spatial_size)


class AddCoords(SiteModule):
    """Append the position of each site, from -1 to 1 on each axis, to its features."""

    def forward(self, input):
        """Append positions to a SparseConvNetTensor."""
        half = (input.spatial_size.to(input.features) - 1) / 2
        position = input.coordinates.indices[:, 1:].to(input.features) / half - 1
        return input.replace(torch.cat([input.features, position], 1))


def compare_sparse(x, y):
    """Return the mean, over the sites of both tensors, of the squared distance of their features.

    Where only one of them has a site, the other counts as 0.
    """
    rows = torch.cat([x.coordinates.indices, y.coordinates.indices])
    batch = max(x.batch_size(), y.batch_size())
    both, site = coordinate_map(
        rows, spatial_shape=size_key(x.spatial_size), batch_size=batch, mode="first"
    )
    n = x.coordinates.capacity
    distance = _at(x, site[:n], both.capacity) - _at(y, site[n:], both.capacity)
    return distance.square().sum() / both.capacity


def _at(x, site, number):
    """Return the features of a tensor at sites of a longer list, 0 where it has none."""
    row = torch.full((number,), -1, device=site.device)
    return rows_of(x.features, row.index_copy(0, site.long(), torch.arange(len(site)).to(row)))


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


def pad_with_batch_idx(x, idx):
    """Append a column with the number of a sample to coordinates."""
    return torch.cat([x, x.new_full((len(x), 1), idx)], 1)


def batch_location_tensors(location_tensors):
    """Return the coordinates of several samples as one list, with the sample in the last column."""
    listed = [pad_with_batch_idx(x, i) for i, x in enumerate(location_tensors) if x.numel()]
    return torch.cat(listed)


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
    pad = torch.nn.utils.rnn.pad_sequence
    coords, features = zip(*batch, strict=True)
    return [pad(coords, batch_first=True, padding_value=-1), pad(features, batch_first=True)]
