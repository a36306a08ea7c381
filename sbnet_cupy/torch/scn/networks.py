"""Networks, made of layers in the order of SparseConvNet's, so that its checkpoints load."""

from ...errors import ShapeError
from .containers import AddTable, ConcatTable, Identity, JoinTable, Sequential
from .convolutions import Convolution, Deconvolution, NetworkInNetwork, SubmanifoldConvolution
from .norms import ELU, BatchNormalization, BatchNormLeakyReLU, BatchNormReLU
from .pooling import MaxPooling, UnPooling


def BatchNormELU(nPlanes, eps=1e-4, momentum=0.9):
    """Return a Sequential of a batch norm (see :class:`BatchNormalization`) and an ELU."""
    return Sequential().add(BatchNormalization(nPlanes, eps, momentum)).add(ELU())


def SparseVggNet(dimension, nInputPlanes, layers):
    """Return a network in the style of VGG.

    Parameters
    ----------
    dimension : int
        Axes of the grid.
    nInputPlanes : int
        Planes of the input.
    layers : list
        ``"MP"`` or ``["MP", size, stride]`` for max pooling, 3/2 by default; ``["C", n]`` for a
        submanifold convolution to n planes with batch norm and ReLU; ``"C3/2"`` or
        ``["C3/2", n]`` for one of size 3 and stride 2; ``["C", n, m, ...]`` for a submanifold
        convolution to n planes beside branches, of which the i-th has its planes and goes down and
        up again i times.

    Returns
    -------
    Sequential

    Examples
    --------
    >>> SparseVggNet(2, 1, [["C", 8], "MP"]).input_spatial_size(torch.tensor([5, 5]))
    tensor([11, 11])
    """
    net, planes = Sequential(), nInputPlanes
    for layer in layers:
        kind, *numbers = layer if isinstance(layer, list | tuple) and layer else [layer]
        if kind == "MP" and len(numbers) in (0, 2):
            net.add(MaxPooling(dimension, *(numbers or (3, 2))))
            continue
        if kind == "C3/2" and len(numbers) < 2:
            after = numbers[0] if numbers else planes
            net.add(Convolution(dimension, planes, after, 3, 2, False))
        elif kind == "C" and numbers:
            same = SubmanifoldConvolution(dimension, planes, numbers[0], 3, False)
            branches = [_branch(dimension, planes, n, i) for i, n in enumerate(numbers[1:], 1)]
            if branches:
                net.add(ConcatTable(same, *branches)).add(JoinTable())
            else:
                net.add(same)
            after = sum(numbers)
        else:
            raise ValueError(
                "layers must be 'MP', ['MP', size, stride], 'C3/2', ['C3/2', n] or "
                f"['C', n, ...], got {layer!r}"
            )
        planes = after
        net.add(BatchNormReLU(planes))
    return net


def _branch(dimension, before, planes, depth):
    """Return layers that go down and up again by convolutions of size 3 and stride 2."""
    window = (3, 2, False)
    layers = Sequential()

    def same():
        layers.add(BatchNormReLU(planes))
        layers.add(SubmanifoldConvolution(dimension, planes, planes, 3, False))
        layers.add(BatchNormReLU(planes))

    for level in range(depth):
        layers.add(Convolution(dimension, planes if level else before, planes, *window))
        same()
    for level in range(depth):
        if level:
            same()
        layers.add(Deconvolution(dimension, planes, planes, *window))
    return layers


def SparseResNet(dimension, nInputPlanes, layers):
    """Return a network of pre-activated residual blocks.

    Parameters
    ----------
    dimension, nInputPlanes
        As for :func:`SparseVggNet`.
    layers : list of ("basic", planes, repetitions, stride)
        The first block of each has the stride.
    """
    net, planes = Sequential(), nInputPlanes
    for layer in layers:
        if len(layer) != 4 or not str(layer[0]).startswith("b"):
            raise ValueError(
                f"layers must be ('basic', planes, repetitions, stride), got {layer!r}"
            )
        _, n, repetitions, stride = layer
        for number in range(repetitions):
            step = stride if number == 0 else 1
            branch = Sequential()
            # The shortcut of a first block reads the activated input, too.
            (net if number == 0 else branch).add(BatchNormReLU(planes))
            branch.add(_changing(dimension, planes, n, step)).add(BatchNormReLU(n))
            branch.add(SubmanifoldConvolution(dimension, n, n, 3, False))
            same = _shortcut(planes, n)
            shortcut = same if step == 1 else _changing(dimension, planes, n, step)
            net.add(ConcatTable(branch, shortcut)).add(AddTable())
            planes = n
    return net.add(BatchNormReLU(planes))


def _changing(dimension, before, after, stride):
    if stride > 1:
        return Convolution(dimension, before, after, 3, stride, False)
    return SubmanifoldConvolution(dimension, before, after, 3, False)


def _shortcut(before, after):
    return Identity() if before == after else NetworkInNetwork(before, after, False)


def _levels(nPlanes, downsample):
    """Return the planes of each level of a network, and the windows between them, or raise."""
    planes = list(nPlanes) if hasattr(nPlanes, "__iter__") else []
    if not planes:
        raise ShapeError(f"nPlanes must list the planes of one level or more, got {nPlanes!r}")
    if not isinstance(downsample, list | tuple) or len(downsample) != 2:
        raise ShapeError(f"downsample must be (size, stride), got {downsample!r}")
    return planes, downsample


def _block(net, dimension, before, after, residual, norm):
    """Add a block of a U-Net: a residual one, or a convolution."""
    layers = Sequential(norm(before), SubmanifoldConvolution(dimension, before, after, 3, False))
    if residual:
        layers.add(norm(after))
        layers.add(SubmanifoldConvolution(dimension, after, after, 3, False))
        net.add(ConcatTable(_shortcut(before, after), layers)).add(AddTable())
    else:
        net.add(layers)


def UNet(
    dimension, reps, nPlanes, residual_blocks=False, downsample=(2, 2), leakiness=0,
    n_input_planes=-1,
):  # fmt: skip
    """Return a U-Net, whose result has the sites of its input.

    Parameters
    ----------
    dimension : int
        Axes of the grid.
    reps : int
        Blocks at each level, on the way down and up.
    nPlanes : list of int
        Planes of each level; those of the result are ``nPlanes[0]``.
    residual_blocks : bool
        Whether blocks are residual.
    downsample : (int, int)
        Size and stride of the convolutions between levels.
    leakiness : float
        Slope of activations for negative values.
    n_input_planes : int
        Planes of the input, ``nPlanes[0]`` by default.

    Returns
    -------
    Sequential
        For inputs whose spatial size fits the convolutions between levels: with ``downsample=[2,
        2]`` a multiple of ``2 ** (len(nPlanes) - 1)``.

    Examples
    --------
    >>> points = torch.tensor([[1, 1], [5, 6]]), torch.ones(2, 4)
    >>> net = Sequential(InputLayer(2, 8), UNet(2, 1, [4, 8]), OutputLayer(2))
    >>> net(points).shape
    torch.Size([2, 4])
    """
    nPlanes, downsample = _levels(nPlanes, downsample)

    def norm(planes):
        return BatchNormLeakyReLU(planes, leakiness=leakiness)

    def level(planes, before):
        net, (first, *rest) = Sequential(), planes
        for number in range(reps):
            _block(net, dimension, first if number else before, first, residual_blocks, norm)
        if rest:
            below = Sequential(
                norm(first), Convolution(dimension, first, rest[0], *downsample, False),
                level(rest, rest[0]),
                norm(rest[0]), Deconvolution(dimension, rest[0], first, *downsample, False),
            )  # fmt: skip
            net.add(ConcatTable(Identity(), below)).add(JoinTable())
            for number in range(reps):
                before = first if number else 2 * first
                _block(net, dimension, before, first, residual_blocks, norm)
        return net

    return level(nPlanes, nPlanes[0] if n_input_planes == -1 else n_input_planes)


def FullyConvolutionalNet(dimension, reps, nPlanes, residual_blocks=False, downsample=(2, 2)):
    """Return a network whose result has the planes of all levels, brought to the input's sites.

    Parameters
    ----------
    dimension, reps, nPlanes, residual_blocks, downsample
        As for :func:`UNet`. The result has ``sum(nPlanes)`` planes.
    """
    nPlanes, downsample = _levels(nPlanes, downsample)

    def level(planes):
        net, (first, *rest) = Sequential(), planes
        for _ in range(reps):
            _block(net, dimension, first, first, residual_blocks, BatchNormReLU)
        if rest:
            below = Sequential(
                BatchNormReLU(first), Convolution(dimension, first, rest[0], *downsample, False),
                level(rest), UnPooling(dimension, *downsample),
            )  # fmt: skip
            net.add(ConcatTable(Identity(), below)).add(JoinTable())
        return net

    return level(nPlanes)


def FullConvolutionalNetIntegratedLinear(
    dimension, reps, nPlanes, nClasses=-1, residual=False, downsample=(2, 2), leakiness=0
):
    """Return a network that adds up linear functions of all levels, brought to the input's sites.

    Parameters
    ----------
    dimension, reps, nPlanes, downsample, leakiness
        As for :func:`UNet`.
    nClasses : int
        Planes of the result, ``nPlanes[0]`` by default.
    residual : bool
        Whether blocks are residual.
    """
    nPlanes, downsample = _levels(nPlanes, downsample)
    classes = nPlanes[0] if nClasses == -1 else nClasses

    def norm(planes):
        return BatchNormLeakyReLU(planes, leakiness=leakiness)

    def level(planes):
        net, (first, *rest) = Sequential(), planes
        for _ in range(reps):
            _block(net, dimension, first, first, residual, norm)
        linear = (norm(first), NetworkInNetwork(first, classes, not rest))
        if not rest:
            return net.add(linear[0]).add(linear[1])
        below = Sequential(
            norm(first), Convolution(dimension, first, rest[0], *downsample, False),
            level(rest), UnPooling(dimension, *downsample),
        )  # fmt: skip
        return net.add(ConcatTable(Sequential(*linear), below)).add(AddTable())

    return level(nPlanes)
