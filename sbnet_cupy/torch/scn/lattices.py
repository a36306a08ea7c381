"""Convolutions on other lattices, windows at random places, and shape contexts."""

import itertools
from typing import Any

import torch

from ...core.sizes import is_integer
from ...core.torch_memory import to_tensor
from ...errors import ShapeError
from ...submanifold.coordinate_map import reduce_columns
from ...submanifold.kernel_map import KernelMap
from .._native import views
from ..submanifold import kernel_map
from ..submanifold.maps import of_native, untraced, valid
from ..submanifold.operations import rows_of
from ..submanifold.site_branch import find_beside
from .containers import ConcatTable, JoinTable, Sequential
from .convolutions import Convolution, SiteModule, _Convolution
from .norms import BatchNormalization
from .pooling import AveragePooling, MaxPooling, UnPooling
from .tensors import (
    check_dimension,
    check_input,
    check_number_of_planes,
    fitted,
    size_key,
    window_sizes,
    with_planes,
)


def window_starts(size, kernel, stride, generator=None):
    """Return where the windows of an axis begin: a third each ``stride - 1`` and ``+ 1`` apart."""
    number = (size - kernel) // stride + 1
    if stride < 2:
        raise ShapeError(f"filter_stride must be at least 2 to be random, got {stride}")
    steps = torch.full((number - 1,), stride, device="cpu")
    third = number // 3
    steps[:third] -= 1
    steps[third : 2 * third] += 1
    steps = steps[torch.randperm(number - 1, generator=generator, device="cpu")]
    return torch.cat([steps.new_zeros(1), steps.cumsum(0)])


def random_window(coordinates, size, kernel, stride, capacity=None, generator=None):
    """Return the KernelMap of windows that begin at random places, a stride apart on average.

    With a ``capacity``, the rows of its target, nothing waits for a GPU.
    """
    smaller, there = fitted(size, kernel, stride), valid(coordinates)
    rows = torch.where(there[:, None], coordinates.indices, 0).long()
    readers = []  # on each axis, which window begins at a cell, -1 for none
    for n, k, s in zip(size, kernel, stride, strict=True):
        starts = window_starts(n, k, s, generator)
        windows = torch.arange(len(starts), device="cpu")
        reader = torch.full((n,), -1, device="cpu").index_copy(0, starts, windows)
        readers.append(_on_device_of(rows, reader))
    kept, places = [], []
    for cell in itertools.product(*map(range, kernel)):
        read, place = there, [rows[:, 0]]
        for axis, (reader, offset) in enumerate(zip(readers, cell, strict=True), 1):
            start = rows[:, axis] - offset
            window = reader[start.clamp(min=0)]
            read = read & (start >= 0) & (window >= 0)
            place.append(window.clamp(min=0))
        kept.append(read)
        places.append(place)
    columns = map(torch.cat, zip(*places, strict=True))
    target, site = _sites_of_columns(coordinates, torch.cat(kept), columns, smaller, capacity)
    taps, n, targets = len(places), len(rows), target.capacity
    tap = torch.arange(taps, device=rows.device).repeat_interleave(n)
    entry = torch.where(site >= 0, tap * targets + site, taps * targets)  # the last for no site
    table = torch.full((taps * targets + 1,), -1, dtype=torch.int32, device=rows.device)
    row = torch.arange(n, dtype=torch.int32, device=rows.device).repeat(taps)
    table = table.index_copy(0, entry, row)[:-1].view(taps, targets)
    return KernelMap(table, coordinates, target, kernel)


def _on_device_of(like, tensor):
    """Return a tensor of the CPU where another one is, without a wait for a GPU."""
    if like.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(like.device, non_blocking=True)


@untraced
def _sites_of_columns(source, kept, columns, spatial_shape, capacity):
    """Return the sites that the columns of ``kept`` rows list, found from others, and each row's.

    That is -1 for a row that is not kept, and for one whose site is past the capacity.
    """
    how, columns = (spatial_shape, source.batch_size, "first", "leaf", capacity), list(columns)

    def find():
        rows, *listed = views(kept, *columns)
        return reduce_columns(rows, listed, *how)[:2]

    made, site = find_beside(find, kept, *columns)
    return of_native(made, source), to_tensor(site)


class RandomWindows:
    """A layer with a stride whose windows are at random places in training."""

    generator = None  # a torch.Generator on the CPU, for the same windows again

    def _random(self, input):
        size, window = size_key(input.spatial_size), self._window
        key, smaller = (size, *window), fitted(size, *window)
        if smaller != size and input.metadata.known(key, source=input.coordinates) is None:
            made = random_window(
                input.coordinates, size, *window, self.capacity, self.generator
            )
            input.metadata.keep(key, made, smaller)

    def forward(self, input):
        """Compute on a SparseConvNetTensor."""
        check_input(input, self.dimension)
        if self.training:
            self._random(input)
        return super().forward(input)


class RandomizedStrideConvolution(RandomWindows, Convolution):
    """A Convolution whose windows are at random places in training, as in fractional pooling.

    The distances between windows are ``filter_stride``, and one more or less for a third of them
    each. A Deconvolution undoes it. Set ``generator`` to a ``torch.Generator`` for the same windows
    on each run.

    Parameters
    ----------
    dimension, nIn, nOut, filter_size, filter_stride, bias, groups, capacity
        As for :class:`Convolution`; the stride is at least 2. :func:`set_capacities` counts sites
        in evaluation: random windows may meet some more or fewer, for which its slack is.
    """


class RandomizedStrideMaxPooling(RandomWindows, MaxPooling):
    """A MaxPooling whose windows are at random places in training.

    Parameters
    ----------
    dimension, pool_size, pool_stride, nFeaturesToDrop, capacity
        As for :class:`MaxPooling`; the stride is at least 2. See RandomizedStrideConvolution.
    """


def permutohedral_basis(dimension):
    """Return two matrices ``[dimension, dimension]``, each other's inverse.

    ``coordinates @ inverse`` are coordinates on the permutohedral lattice, whose nearest sites are
    all 1 apart.
    """
    check_dimension(dimension)
    basis = torch.zeros(dimension, dimension)
    for i in range(dimension):
        for j in range(i):
            basis[i, j] = (0.5 - basis[i] @ basis[j]) / basis[j, j]
        basis[i, i] = (1 - basis[i] @ basis[i]).sqrt()
    return basis, torch.inverse(basis)


def permutohedral_offsets(dimension):
    """Return the cells at most 1 from the origin of the lattice, in SparseConvNet's order.

    Its first cell is always the origin itself. In two dimensions, where its list begins with
    another cell, the origin comes twice, and that cell, (0, -1), not at all.
    """
    near = []
    for cell in itertools.product((-1, 0, 1), repeat=dimension):
        cell = cell[::-1]  # the first axis is the fastest
        products = sum(a * b for i, a in enumerate(cell) for b in cell[: i + 1])
        if products <= 1:
            near.append(cell)
    origin = (0,) * dimension
    if dimension == 2:
        return [origin, *near[1:]]
    return [origin, *(cell for cell in near if cell != origin)]


class PermutohedralSubmanifoldConvolution(_Convolution):
    """A submanifold convolution on the permutohedral lattice, with ``d * d + d + 1`` taps.

    Parameters
    ----------
    dimension, nIn, nOut, bias, groups
        As for :class:`SubmanifoldConvolution`.
    """

    def __init__(self, dimension, nIn, nOut, bias, groups=1):
        check_dimension(dimension)
        volume = dimension**2 + dimension + 1
        super().__init__(dimension, nIn, nOut, volume, bias, groups)

    def forward(self, input):
        """Convolve a SparseConvNetTensor."""
        check_input(input, self.dimension)
        made = kernel_map(input.coordinates, offsets=permutohedral_offsets(self.dimension))
        return input.replace(self._convolve(input, made))


class ShapeContext(SiteModule):
    """The features of all cells of a window side by side, 0 where there is no site.

    Parameters
    ----------
    dimension : int
        Axes of the grid.
    nIn : int
        Planes of the input; the output has as many for each cell.
    filter_size : int, sequence of int or LongTensor
        Cells of the window along each axis.
    """

    def __init__(self, dimension, nIn, filter_size: Any = 3):
        super().__init__()
        check_number_of_planes("nIn", nIn)
        self.dimension, self.nIn = dimension, nIn
        self.filter_size = window_sizes("filter_size", dimension, filter_size)
        self.filter_volume = int(self.filter_size.prod())
        self.nOut = nIn * self.filter_volume
        weight = torch.eye(self.nOut).view(self.filter_volume, nIn, self.nOut)
        self.register_buffer("weight", weight)  # of checkpoints; it is not read

    def forward(self, input):
        """Gather the windows of a SparseConvNetTensor."""
        check_input(input, self.dimension)
        input = with_planes(input, self.nIn)
        same = input.coordinates
        made = kernel_map(same, size_key(self.filter_size), onto=same)
        return input.replace(torch.cat([rows_of(input.features, read) for read in made.rows], 1))


def MultiscaleShapeContext(
    dimension, n_features=1, n_layers=3, shape_context_size: Any = 3, downsample_size: Any = 2,
    downsample_stride: Any = 2, bn=True,
):  # fmt: skip
    """Return a layer with shape contexts of several scales side by side.

    Each scale is made of averages of the one before.

    Parameters
    ----------
    dimension : int
        Axes of the grid.
    n_features : int
        Planes of the input.
    n_layers : int
        Number of scales.
    shape_context_size, downsample_size, downsample_stride : int, sequence of int or LongTensor
        Cells of the window of a :class:`ShapeContext`; size and stride of the average pooling
        between scales.
    bn : bool
        Whether a batch norm follows.
    """
    if not is_integer(n_layers) or n_layers < 1:
        raise ShapeError(f"n_layers must be a positive integer, got {n_layers!r}")
    context = ShapeContext(dimension, n_features, shape_context_size)
    if n_layers == 1:
        layers = Sequential(context)
    else:
        scale = (dimension, downsample_size, downsample_stride)
        coarser = MultiscaleShapeContext(
            dimension, n_features, n_layers - 1, shape_context_size, *scale[1:], False
        )
        below = Sequential(AveragePooling(*scale), coarser, UnPooling(*scale))
        layers = Sequential(ConcatTable(context, below), JoinTable())
    if bn:
        layers.add(BatchNormalization(context.nOut * n_layers))
    return layers
