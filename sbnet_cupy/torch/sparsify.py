"""sparsify: the convolutions of a whole network, on active blocks only."""

import copy
import math

import torch
from torch import nn
from torch.nn import functional as F

from ..errors import DTypeError, ShapeError
from ._conv_module import SparseConv2d, refusal
from ._masks import check_nchw, find_active
from .layers import fields_of

# Computed everywhere, and cheap: one pass over the image, or nothing.
_ELEMENTWISE = (
    nn.BatchNorm2d, nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SiLU,
    nn.GELU, nn.Hardswish, nn.Hardsigmoid, nn.Sigmoid, nn.Tanh, nn.Dropout, nn.Dropout2d,
)  # fmt: skip


def sparsify(model, *, block_size, capacity=None, precision=None, method="auto"):
    """Return a network whose convolutions compute only where a mask of its input is set.

    Each ``torch.nn.Conv2d`` without groups and dilation becomes an :class:`SparseConv2d`: a ResNet,
    for example, as it is. The mask of each stage is that of the input, max-pooled to the stage's
    size. Everything else stays as it is and computes everywhere; what of it is not elementwise is
    named in ``dense_layers``, with the reason, and ``print(sparse.table())`` shows every layer.
    After a call ``sparse.computed()`` says which share of its blocks each convolution computed.

    On a full mask the result equals that of ``model``, up to rounding. On others, values outside
    active blocks are those that the layers make of zeros, and near a block's edge they enter the
    convolutions that follow; in training, batch norms count all pixels.

    Parameters
    ----------
    model : torch.nn.Module
        Called with one image ``[N, C, H, W]``. It is not changed; the result shares its parameters
        and buffers, so that training one trains the other.
    block_size : int or (int, int)
        Input block of each convolution in pixels of its own stage, halo included; larger where a
        kernel needs it.
    capacity : None, int or float
        As for :class:`SparseConv2d`; a share of all blocks suits every stage.
    precision, method
        As for :func:`sbnet_cupy.sparse_conv2d`.

    Returns
    -------
    SparseModel
        Called as ``sparse(x, mask)``; ``sparse.model`` is the network, with the state dict of the
        dense one.

    Raises
    ------
    TypeError
        If ``model`` is no module.
    ValueError
        If there is no convolution to make sparse.

    Source: Ren et al. 2018, arXiv:1801.02108, section 4: the mask is pooled from stage to stage.

    Examples
    --------
    >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, 2, padding=1), torch.nn.ReLU())
    >>> sparse = sparsify(net, block_size=9)
    >>> x, full = torch.randn(1, 3, 32, 32), torch.ones(1, 32, 32, dtype=torch.bool)
    >>> torch.allclose(sparse(x, full), net(x), atol=1e-5)
    True
    >>> print(sparse.table())
    layer  kind    runs
    0      Conv2d  sparse: blocks of 9x9
    1      ReLU    dense: elementwise
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    kept = [*model.parameters(), *model.buffers()]
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in kept})
    stages = _Stages(capacity)
    options = {
        "block_size": block_size, "capacity": capacity, "precision": precision, "method": method,
    }  # fmt: skip
    replaced, runs = {}, {}
    for name, module in list(twin.named_modules(remove_duplicate=False)):
        if isinstance(module, nn.Conv2d) and module not in replaced:
            why = "a SparseConv2d already" if isinstance(module, SparseConv2d) else refusal(module)
            if why is None:
                replaced[module] = _StageConv2d.of_stage(module, name, stages, options)
                twin = _put(twin, name, replaced[module])
            runs[name] = (module, why)
        elif module in replaced:
            twin = _put(twin, name, replaced[module])
            runs[name] = (module, None)
        elif not list(module.children()):
            elementwise = isinstance(module, _ELEMENTWISE)
            runs[name] = (module, "elementwise" if elementwise else "has no block-sparse form")
    if not replaced:
        raise ValueError(
            "model must hold a torch.nn.Conv2d without groups and dilation, got "
            f"{type(model).__name__} with none"
        )
    return SparseModel(twin, stages, runs)


class SparseModel(nn.Module):
    """What :func:`sparsify` returns: a network that is called with an image and a mask.

    Parameters
    ----------
    model : torch.nn.Module
        The network; its sparse convolutions look their blocks up in ``stages``.
    stages
        The mask of the call under way, at each stage.
    runs : dict
        Name of each layer: (the dense module, why it is not sparse, or None).

    Attributes
    ----------
    sparse_layers : list of str
        Names of the convolutions that compute active blocks only.
    dense_layers : dict of str to str
        Name of each layer that computes everywhere and is not elementwise, and why.

    Examples
    --------
    >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU())
    >>> sparse, mask = sparsify(net, block_size=10), torch.zeros(1, 32, 32)
    >>> mask[:, 3:12, 3:6] = 1
    >>> y = sparse(torch.randn(1, 3, 32, 32), mask)
    >>> sparse.computed()  # 2 of 4 times 4 blocks
    {'0': 0.125}
    """

    def __init__(self, model, stages, runs):
        super().__init__()
        self.model = model
        self._stages = stages
        self._rows = [
            (name, type(module).__name__, _how(model, name, why))
            for name, (module, why) in runs.items()
        ]
        self.sparse_layers = [name for name, (_, why) in runs.items() if why is None]
        self._layer_of = {name: model.get_submodule(name).layer for name in self.sparse_layers}
        self.dense_layers = {
            name: f"{type(module).__name__} {why}"
            for name, (module, why) in runs.items()
            if why not in (None, "elementwise")
        }

    def forward(self, x, mask):
        """Run the network where ``mask`` (``[N, H, W]`` or ``[N, 1, H, W]``) is set."""
        self._stages.begin(x, mask)
        try:
            return self.model(x)
        finally:
            self._stages.end()

    def computed(self):
        """Return what of each sparse layer the last call computed, as a share of its blocks.

        The calls only keep the counts, on the device, and never wait; this reads them, and does. A
        replay of a CUDA graph counts as a call. Blocks that ``capacity`` left no room for were not
        computed. A layer that ran more than once has one share for all its runs.

        Returns
        -------
        shares : dict of str to float
            For each name of ``sparse_layers`` that ran, 0 to 1; empty before the first call.
        """
        shares = {layer: _share(runs) for layer, runs in self._stages.listed.items()}
        return {n: shares[layer] for n, layer in self._layer_of.items() if layer in shares}

    def table(self):
        """Return a table of all layers: name, kind, and whether and why they run dense."""
        rows = [("layer", "kind", "runs"), *self._rows]
        widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
        return "\n".join(f"{a:{widths[0]}}  {b:{widths[1]}}  {c}" for a, b, c in rows)


def _share(runs):
    """Return the share of blocks that were computed in runs (count, room, blocks)."""
    computed = sum(min(int(count), room) for count, room, _ in runs)
    return computed / max(sum(blocks for *_, blocks in runs), 1)


class _Stages:
    """The mask of the call under way, pooled to the sizes asked for, and the blocks it activates.

    Layers of one size and grid share one list of blocks. ``listed`` holds for each layer that ran
    in the last call (count of active blocks on the device, room for blocks, blocks of the grid).
    """

    def __init__(self, capacity):
        self.capacity = capacity
        self.listed = {}
        self.end()

    def begin(self, x, mask):
        """Take the mask of a call."""
        check_nchw(x, None)
        if not isinstance(mask, torch.Tensor):
            raise DTypeError(f"mask must be a torch.Tensor, got {type(mask).__name__}")
        n, _, h, w = x.shape
        if tuple(mask.shape) not in ((n, h, w), (n, 1, h, w)):
            raise ShapeError(
                f"mask must have shape ({n}, {h}, {w}) or ({n}, 1, {h}, {w}), the size of x, got "
                f"{tuple(mask.shape)}"
            )
        self.mask = (mask.reshape(n, 1, h, w) > 0).to(torch.float32)
        self.masks, self.blocks, self.listed = {}, {}, {}

    def end(self):
        """Forget the call: of its tensors, the counts alone outlive it."""
        self.mask = self.masks = self.blocks = None

    def active(self, layer, image, params):
        """Return the active blocks of a layer's grid, and note how many they are."""
        if self.mask is None:
            raise RuntimeError(
                "a layer of a sparsified network was called on its own; call the network that "
                "sparsify returned, with an image and a mask"
            )
        size = tuple(image.shape[2:])
        if size not in self.masks:
            self.masks[size] = _pool(self.mask, size)
        key = (*size, fields_of(params))
        if key not in self.blocks:
            self.blocks[key] = find_active(self.masks[size], image, params, self.capacity)
        found = self.blocks[key]
        if not _is_exporting():
            noted = found.bin_counts, found.active_block_indices.shape[0], math.prod(found.grid)
            self.listed.setdefault(layer, []).append(noted)
        return found


def _is_exporting():
    """Whether torch.export traces the call, with tensors that stand for no numbers."""
    if torch.compiler.is_dynamo_compiling():  # for which PyTorch 2.11 says that it exports
        return False
    return getattr(torch.compiler, "is_exporting", bool)()  # PyTorch 2.6 cannot tell


def _pool(mask, size):
    """Max-pool a mask to a stage's size; no active pixel is lost.

    After strides a coarse pixel covers the pixels under it, as in ``sbnet_cupy.masks.downsample``;
    for a size that no stride makes, the share of the image that it stands for.
    """
    full = tuple(mask.shape[2:])
    if full == size:
        return mask
    factors = tuple(map(_stride_between, full, size))
    if None in factors:
        return F.adaptive_max_pool2d(mask, size)
    return F.max_pool2d(mask, factors, factors, ceil_mode=True)


def _stride_between(fine, coarse):
    """Return the stride from one size to another, ``coarse = ceil(fine / stride)``, or None.

    Where several would do, a power of two, as networks have them, else the smallest.
    """
    smallest = -(-fine // max(coarse, 1))
    power = 1 << max(smallest - 1, 0).bit_length()
    return next((s for s in (power, smallest) if s and -(-fine // s) == coarse), None)


class _StageConv2d(SparseConv2d):
    """A sparse convolution called like a dense one: the network's call knows the mask."""

    @classmethod
    def of_stage(cls, conv, layer, stages, options):
        """Make one of a dense convolution; ``layer`` is its first name."""
        sparse = cls.from_dense(conv, **options)
        sparse.layer, sparse._stages = layer, stages
        return sparse

    def forward(self, x):
        """Convolve the active blocks of the call under way."""
        check_nchw(x, self.in_channels)
        params = self.block_params(*x.shape[2:])
        return super().forward(x, self._stages.active(self.layer, x, params), params)


def _put(root, name, module):
    """Set the submodule of a name; return the root, which is the module itself for no name."""
    if not name:
        return module
    parent, _, child = name.rpartition(".")
    setattr(root.get_submodule(parent), child, module)
    return root


def _how(model, name, why):
    """Say in the table how a layer runs."""
    if why is None:
        conv = model.get_submodule(name)
        return "sparse: blocks of {}x{}".format(*conv.block_params(0, 0).bsize)
    return f"dense: {why}"
