"""Capacities: lists of sites whose number of rows is fixed, so that nothing waits for a GPU."""

import contextlib
import math

import torch

from ...core.scalars import as_number
from ...errors import DTypeError, ShapeError
from ..submanifold.unchanged import evaluated
from .convolutions import _NewSites
from .inputs import DenseToSparse, InputLayer
from .pooling import _Down
from .sparsify import Sparsify, SparsifyFCS

_NO_INPUTS = "inputs must not be empty; pass some as large as those to come"
_MAKE_SITES = (InputLayer, DenseToSparse, _NewSites, _Down, Sparsify, SparsifyFCS)


def set_capacities(net, inputs, slack=0.25):
    """Fix the number of rows of each list of sites that a network makes.

    Without a capacity a layer that makes sites waits for their number, and results have as many
    rows. With one nothing waits and shapes stay, as CUDA graphs and compilers need it: rows past
    the number of sites are never read, and left out by :class:`OutputLayer` and
    :class:`SparseToDense`. Sites past a capacity are dropped; ``output.metadata.check()`` raises
    CapacityError then, and waits.

    Parameters
    ----------
    net : Module
        Its layers with a ``capacity`` (InputLayer, DenseToSparse, Convolution, FullConvolution,
        poolings and Sparsify) get one. It is run in evaluation, without gradients.
    inputs : iterable
        Inputs of the network, as large as those to come.
    slack : float
        Share of rows beyond the most that an input needed.

    Returns
    -------
    net : Module
        The same.

    Raises
    ------
    ShapeError
        If slack is negative or infinite.
    ValueError
        If there are no inputs.

    Examples
    --------
    >>> net = Sequential(InputLayer(2, 9), MaxPooling(2, 3, 2))
    >>> points = [torch.tensor([[1, 1, 0], [5, 6, 0]]), torch.ones(2, 1), 1]
    >>> net = set_capacities(net, [points], slack=1)
    >>> net[0].capacity, net(points).features.shape[0]
    (4, 6)
    """
    for layer, capacity in measured(net, inputs, slack).items():
        layer.capacity = capacity
    return net


def measured(net, inputs, slack):
    """Return the capacity of each layer that makes sites, as :func:`set_capacities` chooses it."""
    _check_slack(slack)
    layers = [m for m in net.modules() if isinstance(m, _MAKE_SITES)]
    most, runs = dict.fromkeys(layers, 0), 0

    def seen(layer, _, output):
        most[layer] = max(most[layer], output.coordinates.capacity)

    hooks = [layer.register_forward_hook(seen) for layer in layers]
    try:
        with with_capacities(dict.fromkeys(layers)), evaluated(net), torch.no_grad():
            for x in inputs:
                _check_listed(net, x)
                net(x)
                runs += 1
    finally:
        for hook in hooks:
            hook.remove()
    if not runs:
        raise ValueError(_NO_INPUTS)
    return {layer: math.ceil(n * (1 + slack)) for layer, n in most.items()}


def check_inputs(net, inputs, slack):
    """Raise what :func:`measured` would of a list of inputs, before it calls the network."""
    _check_slack(slack)
    if not inputs:
        raise ValueError(_NO_INPUTS)
    for x in inputs:
        _check_listed(net, x)


def _check_slack(slack):
    if not 0 <= as_number("slack", slack, nan=False) < math.inf:
        raise ShapeError(f"slack must not be negative or infinite, got {slack!r}")


def _check_listed(net, x):
    """Raise if an input of a network that begins with an InputLayer is a part of one."""
    while isinstance(net, torch.nn.Sequential) and len(net):
        net = net[0]
    if isinstance(net, InputLayer) and isinstance(x, torch.Tensor):
        raise DTypeError(
            "inputs must hold lists [coords, features], got a Tensor; pass one input as "
            "[[coords, features]]"
        )


@contextlib.contextmanager
def with_capacities(capacities):
    """Give layers these capacities for a while."""
    before = {layer: layer.capacity for layer in capacities}
    try:
        for layer, capacity in capacities.items():
            layer.capacity = capacity
        yield
    finally:
        for layer, capacity in before.items():
            layer.capacity = capacity
