"""Capacities: lists of sites whose number of rows is fixed, so that nothing waits for a GPU."""

import math

import torch

from ...errors import ShapeError


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
        If slack is negative.
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
    if slack < 0:
        raise ShapeError(f"slack must not be negative, got {slack!r}")
    layers = [m for m in net.modules() if hasattr(m, "capacity")]
    before, modes = [m.capacity for m in layers], {m: m.training for m in net.modules()}
    most, runs = dict.fromkeys(layers, 0), 0

    def seen(layer, _, output):
        most[layer] = max(most[layer], output.coordinates.capacity)

    hooks = [layer.register_forward_hook(seen) for layer in layers]
    for layer in layers:
        layer.capacity = None
    try:
        with torch.no_grad():
            net.eval()
            for x in inputs:
                net(x)
                runs += 1
        if not runs:
            raise ValueError("inputs must not be empty; pass some that are as large as any")
        before = [math.ceil(most[layer] * (1 + slack)) for layer in layers]
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in modes.items():
            module.training = training
        for layer, capacity in zip(layers, before, strict=True):
            layer.capacity = capacity
    return net
