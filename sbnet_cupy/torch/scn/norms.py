"""Norms, activations and dropout: functions of the features of each site."""

import contextlib
import threading

import torch
from torch.nn import Parameter, functional

from ...core.scalars import as_number
from .. import _dispatch_state as state
from .._namespace import wide
from ..submanifold import masked_batch_norm
from ..submanifold.maps import valid
from .convolutions import TAKES_NORM, SiteModule
from .tensors import check_input, check_number_of_planes, with_planes


class _Pointwise(SiteModule):
    """A function of the features."""

    def forward(self, input):
        """Apply the function to the features of a SparseConvNetTensor."""
        check_input(input, sites=False)
        return input.replace(self._function(input.features))


class Sigmoid(_Pointwise):
    """The logistic function."""

    _function = staticmethod(torch.sigmoid)


class Tanh(_Pointwise):
    """The hyperbolic tangent."""

    _function = staticmethod(torch.tanh)


class ReLU(_Pointwise):
    """``max(x, 0)``."""

    _function = staticmethod(functional.relu)


class ELU(_Pointwise):
    """``x`` where it is positive, else ``exp(x) - 1``."""

    _function = staticmethod(functional.elu)


class SELU(_Pointwise):
    """The scaled ELU."""

    _function = staticmethod(functional.selu)


class LeakyReLU(_Pointwise):
    """``x`` where it is positive, else ``leak * x``."""

    def __init__(self, leak=1 / 3):
        super().__init__()
        self.leak = as_number("leak", leak)

    def _function(self, features):
        return functional.leaky_relu(features, self.leak)


class Dropout(_Pointwise):
    """Zero each value with probability p; in evaluation multiply by 1 - p, as SparseConvNet."""

    def __init__(self, p=0.5):
        super().__init__()
        self.p = _share("p", p, "a probability")

    def _function(self, features):
        if not self.training:
            return features * (1 - self.p)
        return features * torch.bernoulli(torch.full_like(self._like(features), 1 - self.p))

    def _like(self, features):
        return features


class BatchwiseDropout(Dropout):
    """Dropout with one mask of the planes for the whole batch."""

    def _like(self, features):
        return features.new_empty((1, features.shape[1]))


_COMPUTED_AGAIN = threading.local()


@contextlib.contextmanager
def computed_again(is_again):
    """Leave running statistics as they are where a backward pass computes activations again."""
    before = _is_again()
    _COMPUTED_AGAIN.value = before or is_again
    try:
        yield
    finally:
        _COMPUTED_AGAIN.value = before


def _is_again():
    return getattr(_COMPUTED_AGAIN, "value", False)


class BatchNormalization(SiteModule):
    """Batch norm over the sites of all samples, with an activation.

    Parameters
    ----------
    nPlanes : int
        Planes of the input.
    eps : float
        Added to the variance.
    momentum : float
        Share of the old running statistics in the new: 0.99 is PyTorch's 0.01.
    affine : bool
        Whether there are a weight and a bias.
    leakiness : float
        Slope for negative values: 0 for ReLU, 1 for none.
    """

    def __init__(self, nPlanes, eps=1e-4, momentum=0.99, affine=True, leakiness=1):
        super().__init__()
        check_number_of_planes("nPlanes", nPlanes)
        self.nPlanes, self.eps = nPlanes, as_number("eps", eps)
        self.momentum = _share("momentum", momentum, "a share of the old statistics")
        self.affine, self.leakiness = affine, as_number("leakiness", leakiness)
        self.register_buffer("running_mean", torch.zeros(nPlanes))
        self.register_buffer("running_var", torch.ones(nPlanes))
        self.register_parameter("weight", Parameter(torch.ones(nPlanes)) if affine else None)
        self.register_parameter("bias", Parameter(torch.zeros(nPlanes)) if affine else None)

    def forward(self, input):
        """Normalise a SparseConvNetTensor."""
        check_input(input)
        input = with_planes(input, self.nPlanes)
        tables = self.tables()
        if self.training and _is_again():
            tables = (None, None, *tables[2:])
        found = masked_batch_norm(
            input.sparse, *tables, training=self.training, momentum=1 - self.momentum,
            eps=self.eps, activation=None if self.leakiness else "relu",
        )  # fmt: skip
        features = found.features
        return input.replace(self.activated(features) if self.leakiness else features)

    def tables(self):
        """Return mean, variance, weight and bias of each plane; the last two may be None."""
        return self.running_mean, self.running_var, self.weight, self.bias

    def activated(self, features):
        """Return the activation of features."""
        return _leaky(features, self.leakiness)

    def extra_repr(self):
        """Describe the layer."""
        return (
            f"{self.nPlanes}, eps={self.eps}, momentum={self.momentum}, affine={self.affine}, "
            f"leakiness={self.leakiness}"
        )


def _share(name, value, what):
    """Return an option that is a number from 0 to 1 as a float, or raise."""
    share = as_number(name, value)
    if not 0 <= share <= 1:
        raise ValueError(f"{name} must be {what} from 0 to 1, got {value!r}")
    return share


def _leaky(features, leakiness):
    if leakiness == 1:
        return features
    if leakiness == 0:
        return functional.relu(features)
    return functional.leaky_relu(features, leakiness)


class BatchNormReLU(BatchNormalization):
    """Batch norm, then ReLU."""

    def __init__(self, nPlanes, eps=1e-4, momentum=0.99):
        super().__init__(nPlanes, eps, momentum, True, 0)


class BatchNormLeakyReLU(BatchNormalization):
    """Batch norm, then a leaky ReLU."""

    def __init__(self, nPlanes, eps=1e-4, momentum=0.99, leakiness=0.333):
        super().__init__(nPlanes, eps, momentum, True, leakiness)


_FOLDED = (BatchNormalization, BatchNormReLU, BatchNormLeakyReLU)


def folds(layer, norm):
    """Whether a convolution can compute the batch norm after it, whose call nobody sees."""
    if type(layer) not in TAKES_NORM or type(norm) not in _FOLDED or norm.training:
        return False
    return layer.is_evaluated() and norm.nPlanes == layer.nOut and not state.are_hooked(layer, norm)


class MeanOnlyBNLeakyReLU(SiteModule):
    """Subtract the mean of each plane, add a bias, then a leaky ReLU.

    Parameters
    ----------
    nPlanes, affine, leakiness, momentum
        As for :class:`BatchNormalization`; affine is a bias alone.
    """

    def __init__(self, nPlanes, affine=True, leakiness=1, momentum=0.99):
        super().__init__()
        check_number_of_planes("nPlanes", nPlanes)
        self.nPlanes, self.affine = nPlanes, affine
        self.leakiness = as_number("leakiness", leakiness)
        self.momentum = _share("momentum", momentum, "a share of the old statistics")
        self.register_buffer("running_mean", torch.zeros(nPlanes))
        self.register_parameter("bias", Parameter(torch.zeros(nPlanes)) if affine else None)

    def forward(self, input):
        """Normalise a SparseConvNetTensor."""
        check_input(input)
        input = with_planes(input, self.nPlanes)
        features, mean = wide(input.features), self.running_mean
        holds = valid(input.coordinates)[:, None]
        if self.training:
            with torch.no_grad():
                number = holds.sum()
                mean = torch.where(holds, features, 0).sum(0) / number.clamp(min=1)
                if not _is_again():
                    share = (1 - self.momentum) * (number > 0).to(mean.dtype)
                    self.running_mean.add_(share * (mean - self.running_mean))
        features = features - mean
        features = features if self.bias is None else features + self.bias
        features = torch.where(holds, _leaky(features, self.leakiness), 0)
        return input.replace(features.to(input.features.dtype))


class SparseGroupNorm(torch.nn.GroupNorm):
    """``torch.nn.GroupNorm`` of the features of each site."""

    def forward(self, x):
        """Normalise a SparseConvNetTensor."""
        check_input(x, sites=False)
        return x.replace(super().forward(x.features))

    def input_spatial_size(self, out_size):
        """Return the spatial size of the input."""
        return out_size
