"""Convolutions with SparseConvNet's names, arguments and parameters.

In evaluation without gradients their weights are packed once, and a batch norm that follows in a
``Sequential`` is part of the convolution.
"""

import math

import torch
from torch.nn import Module, Parameter

from ...core.sizes import is_integer
from ...dense.packed_weights import PackedWeights
from ...errors import ShapeError
from ...submanifold.site_arguments import check_capacity
from .. import _dispatch_state as state
from ..network.weights import Weights, scale_and_shift
from ..submanifold import kernel_map, site_conv
from ..submanifold.maps import same_map
from .tensors import (
    Metadata,
    SparseConvNetTensor,
    check_fits,
    check_input,
    check_number_of_planes,
    enlarged,
    fitted,
    size_key,
    sizes_of,
    window_sizes,
    with_planes,
)


class SiteModule(Module):
    """A layer that computes at sites: sizes, and what it does to the spatial size."""

    dimension = None

    def input_spatial_size(self, out_size):
        """Return the spatial size of the input that makes an output of this size."""
        return out_size


class _Convolution(SiteModule):
    """Weights ``[volume, groups, nIn / groups, nOut / groups]`` and a bias."""

    def __init__(self, dimension, nIn, nOut, volume, bias, groups):
        super().__init__()
        whole = all(map(is_integer, (nIn, nOut, groups))) and min(nIn, nOut, groups) > 0
        if not whole or nIn % groups or nOut % groups:
            raise ShapeError(
                f"nIn and nOut must be positive multiples of groups, {groups!r}, got {nIn!r} and "
                f"{nOut!r}"
            )
        self.dimension, self.nIn, self.nOut, self.groups = dimension, nIn, nOut, groups
        self.filter_volume = volume
        std = math.sqrt(2.0 * groups / nIn / volume)
        shape = (volume, groups, nIn // groups, nOut // groups)
        self.weight = Parameter(torch.empty(shape).normal_(0, std))
        self.register_parameter("bias", Parameter(torch.zeros(nOut)) if bias else None)
        self._packed = Weights()

    def _convolve(self, input, made, norm=None):
        """Return the features of the convolution over a map, and of a batch norm after it."""
        input = with_planes(input, self.nIn)
        check_fits(input.features, self.weight)
        if not self.is_evaluated():
            self._packed.clear()  # not all that trains weights shows in them
            options = {"groups": self.groups, "bias": self.bias}
            return site_conv(input.features, self._laid_out(), made, **options)
        activation = "relu" if norm is not None and norm.leakiness == 0 else None
        options = {"groups": self.groups, "activation": activation}
        features = site_conv(input.features, self._weights_with(norm), made, **options)
        return features if norm is None or activation else norm.activated(features)

    def is_evaluated(self):
        """Whether calls take weights that were packed before."""
        by_hand = torch.is_grad_enabled() or torch.is_autocast_enabled(self.weight.device.type)
        return not (self.training or by_hand or state.in_transform())

    def _laid_out(self):
        """Return the weights as site_conv takes them."""
        return self.weight.permute(0, 2, 1, 3).reshape(self.filter_volume, -1, self.nOut)

    def _weights_with(self, norm):
        """Return weights and bias, with a batch norm after them or None, as PackedWeights."""
        tables = () if norm is None else norm.tables()
        tensors = self.weight, self.bias, *tables

        def make():
            with torch.no_grad():
                scale, shift = None, self.bias
                if norm is not None:
                    scale, shift = scale_and_shift((*tables, norm.eps), self.bias)
                shift = None if shift is None else shift.detach()
                return (PackedWeights(self._laid_out().detach(), scale=scale, bias=shift),)

        if not all(t is None or isinstance(t, Parameter) for t in tensors[:2]):
            return make()[0]  # of a parametrization, which makes tensors at each call
        key = (*map(id, tensors), None if norm is None else norm.eps)
        return self._packed.made(key, [t for t in tensors if t is not None], make)[0]

    def train(self, mode=True):
        """Set the layer to training or evaluation."""
        self._packed.clear()
        return super().train(mode)

    def _load_from_state_dict(self, state, prefix, *args, **kwargs):
        """Take weights of before SparseConvNet had groups, ``[volume, nIn, nOut]``, too."""
        weight = state.get(prefix + "weight")
        if weight is not None and weight.dim() == 3 and self.groups == 1:
            state[prefix + "weight"] = weight[:, None]
        super()._load_from_state_dict(state, prefix, *args, **kwargs)

    def extra_repr(self):
        """Describe the layer."""
        sizes = [f"{self.nIn}->{self.nOut}"]
        for name in ("filter_size", "filter_stride"):
            if hasattr(self, name):
                sizes.append(f"{name}={size_key(getattr(self, name))}")
        return ", ".join(sizes + ([f"groups={self.groups}"] if self.groups > 1 else []))


class SubmanifoldConvolution(_Convolution):
    """A convolution at the sites of its input.

    The window of an axis begins ``filter_size // 2`` cells before the site, also for even sizes.

    Parameters
    ----------
    dimension : int
        Axes of the grid.
    nIn, nOut : int
        Planes of input and output.
    filter_size : int, sequence of int or LongTensor
        Cells of the kernel along each axis.
    bias : bool
        Whether to add one.
    groups : int
        Groups of planes that are convolved apart.
    """

    def __init__(self, dimension, nIn, nOut, filter_size, bias, groups=1):
        size = window_sizes("filter_size", dimension, filter_size)
        super().__init__(dimension, nIn, nOut, math.prod(size.tolist()), bias, groups)
        self.filter_size = size

    def forward(self, input, norm=None):
        """Convolve a SparseConvNetTensor; ``norm`` is a batch norm in evaluation after it."""
        check_input(input, self.dimension)
        made = same_map(input.coordinates, size_key(self.filter_size))
        return input.replace(self._convolve(input, made, norm))


class ValidConvolution(SubmanifoldConvolution):
    """The SubmanifoldConvolution under its old name."""


class _Strided(_Convolution):
    """A convolution with a stride."""

    def __init__(self, dimension, nIn, nOut, filter_size, filter_stride, bias, groups=1):
        size = window_sizes("filter_size", dimension, filter_size)
        super().__init__(dimension, nIn, nOut, math.prod(size.tolist()), bias, groups)
        self.filter_size = size
        self.filter_stride = window_sizes("filter_stride", dimension, filter_stride)

    @property
    def _window(self):
        return size_key(self.filter_size), size_key(self.filter_stride)


class _NewSites(_Strided):
    """One that makes sites, with room for so many if it has a capacity."""

    def __init__(
        self, dimension, nIn, nOut, filter_size, filter_stride, bias, groups=1, *, capacity=None
    ):
        super().__init__(dimension, nIn, nOut, filter_size, filter_stride, bias, groups)
        check_capacity(capacity)
        self.capacity = capacity


class Convolution(_NewSites):
    """A convolution with a stride: every site whose window meets one of the input.

    Where windows are of one cell and keep the spatial size, the sites are those of the input. So
    they are for all layers with windows.

    Parameters
    ----------
    dimension, nIn, nOut, filter_size, bias, groups
        As for :class:`SubmanifoldConvolution`.
    filter_stride : int, sequence of int or LongTensor
        Distance between windows. They must cover the spatial size exactly: ShapeError otherwise.
    capacity : int, optional
        Rows of the new sites; see :func:`set_capacities`.
    """

    def forward(self, input, norm=None):
        """Convolve a SparseConvNetTensor; ``norm`` is a batch norm in evaluation after it."""
        check_input(input, self.dimension)
        given = input.coordinates, input.spatial_size, *self._window, self.capacity
        made = input.metadata.window(*given)
        smaller = fitted(size_key(input.spatial_size), *self._window)
        return input.at(self._convolve(input, made, norm), smaller, made.target)

    def input_spatial_size(self, out_size):
        """Return the spatial size of the input."""
        size = sizes_of("out_size", self.dimension, out_size)
        return (size - 1) * self.filter_stride + self.filter_size


class _Back(_Strided):
    def input_spatial_size(self, out_size):
        """Return the spatial size of the input."""
        size = sizes_of("out_size", self.dimension, out_size)
        return torch.tensor(fitted(size_key(size), *self._window), device="cpu")


class Deconvolution(_Back):
    """Undo the sites of a Convolution of the same size and stride: back to those that it read.

    Parameters
    ----------
    dimension, nIn, nOut, filter_size, filter_stride, bias, groups
        As for :class:`Convolution`. A ValueError says that there was no such convolution.
    """

    def forward(self, input, norm=None):
        """Convolve a SparseConvNetTensor; ``norm`` is a batch norm in evaluation after it."""
        check_input(input, self.dimension)
        made, larger = input.metadata.window_back(
            input.coordinates, input.spatial_size, *self._window
        )
        return input.at(self._convolve(input, made, norm), larger, made.target)


class FullConvolution(_NewSites, _Back):
    """A transposed convolution: every site that one of the input reaches, in a new Metadata.

    Parameters
    ----------
    dimension, nIn, nOut, filter_size, filter_stride, bias, groups, capacity
        As for :class:`Convolution`.
    """

    def forward(self, input, norm=None):
        """Convolve a SparseConvNetTensor; ``norm`` is a batch norm in evaluation after it."""
        check_input(input, self.dimension)
        (kernel, stride), size = self._window, size_key(input.spatial_size)
        larger = enlarged(size, kernel, stride)
        if larger == size:  # windows of one cell
            made = same_map(input.coordinates, kernel)
        else:
            how = {"stride": stride, "transposed": True, "capacity": self.capacity}
            made = kernel_map(input.coordinates, kernel, **how)
        metadata = Metadata(self.dimension, [input.metadata])
        metadata.grids[larger] = made.target
        features = self._convolve(input, made, norm)
        return SparseConvNetTensor(features, metadata, torch.tensor(larger, device="cpu"))


TransposeConvolution = FullConvolution
TAKES_NORM = (
    SubmanifoldConvolution, ValidConvolution, Convolution, Deconvolution, FullConvolution,
)  # fmt: skip


class NetworkInNetwork(SiteModule):
    """A linear function of the features of each site; its weight is ``[nIn, nOut]``."""

    def __init__(self, nIn, nOut, bias):
        super().__init__()
        check_number_of_planes("nIn", nIn)
        check_number_of_planes("nOut", nOut)
        self.nIn, self.nOut = nIn, nOut
        self.weight = Parameter(torch.empty(nIn, nOut).normal_(0, math.sqrt(2.0 / nIn)))
        self.register_parameter("bias", Parameter(torch.zeros(nOut)) if bias else None)

    def forward(self, input):
        """Transform the features of a SparseConvNetTensor."""
        check_input(input, sites=False)
        input = with_planes(input, self.nIn)
        check_fits(input.features, self.weight)
        weight = self.weight.T
        return input.replace(torch.nn.functional.linear(input.features, weight, self.bias))

    def extra_repr(self):
        """Describe the layer."""
        return f"{self.nIn}->{self.nOut}"
