"""Sequences and tables of layers."""

import torch
import torch.utils.checkpoint

from ...errors import ShapeError
from ..submanifold.ahead import compile_before
from .norms import computed_again, folds
from .tensors import SparseConvNetTensor, check_list, size_key


class _Added:
    """``add``, which returns the container."""

    def add(self, module):
        """Append a layer; return the container."""
        self.add_module(str(len(self)), module)
        return self


class Sequential(_Added, torch.nn.Sequential):
    """Layers one after the other; ``add`` appends one and returns the sequence.

    In evaluation without gradients a batch norm right after a convolution is computed with it. On a
    GPU, before a call with points, ``[coords, features]``, of a size that it was not called with
    before, the kernels of the call that are not on disk are compiled at once, if all its layers are
    of this package or PyTorch's.
    """

    def forward(self, input):
        """Call the layers one after the other."""
        if isinstance(input, list | tuple) and not torch.compiler.is_compiling():
            compile_before(self, input)
        layers = list(self)
        while layers:
            layer = layers.pop(0)
            if layers and folds(layer, layers[0]):
                input = layer(input, layers.pop(0))
            else:
                input = layer(input)
        return input

    def input_spatial_size(self, out_size):
        """Return the spatial size of the input that makes an output of this size."""
        for module in reversed(self):
            out_size = module.input_spatial_size(out_size)
        return out_size


class CheckpointedSequential(Sequential):
    """A Sequential that computes its activations again in the backward pass, to save memory.

    Running statistics of batch norms are updated once, when it is called.
    """

    def forward(self, x):
        """Call the layers one after the other."""
        at_sites, ends = isinstance(x, SparseConvNetTensor), []

        def run(given):
            with computed_again(bool(ends)):
                y = Sequential.forward(self, x.replace(given) if at_sites else given)
            ends.append(y.replace(None) if at_sites else None)
            return y.features if at_sites else y

        given = x.features if at_sites else x
        found = torch.utils.checkpoint.checkpoint(run, given, use_reentrant=False)
        return ends[0].replace(found) if at_sites else found


class Identity(torch.nn.Module):
    """Its input."""

    def forward(self, input):
        """Return the input."""
        return input

    def input_spatial_size(self, out_size):
        """Return the spatial size of the input."""
        return out_size


class ConcatTable(_Added, torch.nn.Sequential):
    """The list of what its layers make of one input."""

    def forward(self, input):
        """Call each layer with the input."""
        return [module(input) for module in self]

    def input_spatial_size(self, out_size):
        """Return the spatial size of the input."""
        return self[0].input_spatial_size(out_size)


def _features_of(tensors):
    """Return the features of a list of tensors; raise unless they are at the same sites."""
    check_list("input", tensors)
    if any(x.coordinates is not tensors[0].coordinates for x in tensors):
        lists = {x.coordinates: f"{len(x.features)} on {size_key(x.spatial_size)}" for x in tensors}
        raise ValueError(
            f"input must be tensors at the same sites, got {len(lists)} lists of sites, "
            f"{', '.join(lists.values())}; begin with one InputLayer, and use layers that keep its "
            "sites or come back to them"
        )
    return [x.features for x in tensors]


def _sum(features):
    """Return the sum of features; those of one plane are added to each of the others."""
    planes = {x.shape[1] for x in features} - {1}
    if len(planes) > 1:
        raise ShapeError(f"input must be tensors of as many planes, got {sorted(planes)}")
    return sum(features)


class JoinTable(torch.nn.Sequential):
    """The features of a list of tensors at the same sites, side by side."""

    def forward(self, input):
        """Join a list of SparseConvNetTensors."""
        features = torch.cat(_features_of(input), 1)
        return input[0].replace(features)

    def input_spatial_size(self, out_size):
        """Return the spatial size of the input."""
        return out_size


class AddTable(torch.nn.Sequential):
    """The sum of a list of tensors at the same sites."""

    def forward(self, input):
        """Add a list of SparseConvNetTensors."""
        features = _sum(_features_of(input))
        return input[0].replace(features)

    def input_spatial_size(self, out_size):
        """Return the spatial size of the input."""
        return out_size


def concatenate_feature_planes(input):
    """Return the features of a list of tensors at the same sites, side by side."""
    return JoinTable()(input)


def add_feature_planes(input):
    """Return the sum of a list of tensors at the same sites."""
    return AddTable()(input)
