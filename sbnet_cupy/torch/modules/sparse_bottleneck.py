"""SparseBottleneck: a pre-activation residual unit of ordinary modules, where a mask is set."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from ...block_sparse import compositions
from ...block_sparse.active_grid import check_active_grid
from ...block_sparse.block_params import calc_block_params_res_block
from ...block_sparse.bottleneck.weights import BottleneckWeights, PackedBottleneck, plain_of
from ...core.sizes import output_size, padding_pairs
from ...errors import ShapeError
from .. import _dispatch_state as state
from ..layers import autocast, sparse_res_block_bottleneck
from ..network.weights import Weights
from .batch_norm import StackOps, fold, fold_batch
from .block_module import BlockModule, check_nchw, is_channels_last, params_of
from .sparse_conv2d import check_conv, check_no_hooks, refusal

_PARTS = ("bn1", "conv1", "bn2", "conv2", "bn3", "conv3")
_TENSORS = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
_PADS = ((1, 1), (1, 1))


class SparseBottleneck(BlockModule):
    """A pre-activation residual unit on active blocks.

    ``x + conv3(relu(bn3(conv2(relu(bn2(conv1(relu(bn1(x)))))))))`` with kernels 1x1, 3x3 (padding
    1, ``stride``) and 1x1, all without bias, as He et al. 2016 (arXiv:1603.05027) have it; where
    the unit changes channels or size, the shortcut is ``downsample(x)``, a 1x1 convolution. Inside
    active blocks the result is the dense unit's, elsewhere it is the shortcut.

    In evaluation the batch norms are folded into the unit. The folded weights are kept until a call
    records gradients, ``train()`` or ``eval()`` is called, or autograd's version of a parameter or
    buffer changes. Three changes leave no version: a write to ``parameter.data``, one by another
    process that shares the memory, and the step of a fused optimizer of PyTorch that trains the
    parameters through another module. Call ``eval()`` after them. :meth:`freeze` looks for no
    changes.

    In training the batch norms use the statistics of the active pixels, each counted once, and keep
    running ones of them: on a full mask exactly what the dense unit does. (Pixels outside active
    blocks are not computed, so they cannot count.) Those that are in evaluation by themselves keep
    to their running statistics.

    Parameters
    ----------
    in_channels, mid_channels : int
        Channels of the input and of the bottleneck.
    out_channels : int, optional
        ``in_channels`` by default.
    stride : int or (int, int)
        Of the 3x3 convolution and of the shortcut.
    block_size, capacity, precision, method
        As for :class:`SparseConv2d`; blocks are input windows of the whole unit.
    device, dtype
        Of the parameters.

    The state dict has ``bn1, conv1, bn2, conv2, bn3, conv3`` and, where there is one,
    ``downsample``.

    Examples
    --------
    >>> unit = SparseBottleneck(16, 4, block_size=10).eval()
    >>> x, mask = torch.randn(1, 16, 32, 32), torch.zeros(1, 32, 32, dtype=torch.bool)
    >>> mask[:, 4, 4] = True
    >>> y = unit(x, mask)
    >>> torch.equal(y[:, :, 16:], x[:, :, 16:]), torch.equal(y, x)
    (True, False)
    """

    def __init__(
        self, in_channels, mid_channels, out_channels=None, stride: Any = 1, *, block_size,
        capacity=None, precision=None, method="auto", device=None, dtype=None,
    ):  # fmt: skip
        super().__init__()
        out_channels = in_channels if out_channels is None else out_channels
        norm = partial(nn.BatchNorm2d, device=device, dtype=dtype)
        conv = partial(nn.Conv2d, bias=False, device=device, dtype=dtype)
        self.bn1, self.conv1 = norm(in_channels), conv(in_channels, mid_channels, 1)
        self.bn2 = norm(mid_channels)
        self.conv2 = conv(mid_channels, mid_channels, 3, stride, padding=1)
        self.bn3, self.conv3 = norm(mid_channels), conv(mid_channels, out_channels, 1)
        self.downsample = None
        if out_channels != in_channels or self.conv2.stride != (1, 1):
            self.downsample = conv(in_channels, out_channels, 1, stride)
        self._configure(block_size, capacity, precision, method)

    @classmethod
    def from_dense(cls, unit, *, block_size, capacity=None, precision=None, method="auto"):
        """Make a sparse unit of a dense one; it shares the very modules, and their parameters.

        ``unit`` is a module with the attributes ``bn1, conv1, bn2, conv2, bn3, conv3`` and, if the
        shortcut is a convolution, ``downsample`` (or ``project`` or ``shortcut``); or a sequence of
        the six modules and that convolution, in this order, in which ReLUs are passed over. Its
        ``forward`` is not looked at: it must be the formula above.
        """
        parts = _parts_of(unit)
        sparse = cls.__new__(cls)
        nn.Module.__init__(sparse)
        for name, module in zip((*_PARTS, "downsample"), parts, strict=True):
            setattr(sparse, name, module)
        _check_unit(sparse)
        sparse._configure(block_size, capacity, precision, method)
        sparse.training = parts[0].training
        return sparse

    def block_params(self, height, width):
        """Return the BlockParams of an image of this size."""
        image, strides = ((height, width), self.block_size), self.conv2.stride
        sizes = (3, 3), strides, (1, 3, 1), strides, _PADS
        return params_of(calc_block_params_res_block, *image, *sizes)

    def forward(self, x, mask, params=None):
        """Apply the unit where ``mask`` is set, or in active blocks that were listed before.

        Arguments are those of :meth:`SparseConv2d.forward`. An image in channels_last memory is
        used where it lies, any other is copied.
        """
        check_nchw(self.conv1, x)
        table, params = self._blocks(x, mask, params)
        last, strides = is_channels_last(x), self.conv2.stride
        image = x.permute(0, 2, 3, 1).contiguous()
        made = self._frozen or self._folded()
        options = {"strides": strides, "precision": self.precision}
        if made is None or padding_pairs(tuple(x.shape[2:]), (3, 3), strides, "SAME") != _PADS:
            y = self._composed(image, table, params, made, options)
        else:
            weights, project = made
            y = sparse_res_block_bottleneck(
                image, weights, table, params, w_project=project, method=self.method, **options
            )
        y = y.permute(0, 3, 1, 2)
        return y if last else y.contiguous()

    def _composed(self, image, table, params, made, options):
        """Return the unit by way of the stack: for statistics of the batch, if nothing is folded.

        Also for strides, where PyTorch pads one pixel on each side and SAME none before.
        """
        check_active_grid(table, image.shape[0], params.bcount)
        stack = StackOps(image, table, params)
        if made is None:
            out_hw = output_size(tuple(image.shape[1:3]), (3, 3), options["strides"], _PADS)
            weights, project = self._weights(*stack.counted(image, out_hw, table, params))
        else:
            weights, project = plain_of(made[0]), made[1]
        w1, w2, w3, *tables = weights._arrays()
        image, w1, w2, w3, project = autocast(image, w1, w2, w3, project)
        weights = BottleneckWeights(w1, w2, w3, *tables)
        return compositions.residual_unit(
            stack, image, weights, project, tuple(table), params, None, **options
        )

    def _parts(self):
        """Return the four kernels, OIHW, of which the shortcut's may be None, and the norms."""
        kernels = [conv.weight for conv in (self.conv1, self.conv2, self.conv3)]
        kernels.append(None if self.downsample is None else _only_conv(self.downsample).weight)
        return kernels, (self.bn1, self.bn2, self.bn3)

    def _weights(self, inside=None, shown=None):
        """Return the BottleneckWeights and the kernel of the shortcut, or None; kernels are HWIO.

        A batch norm that takes the statistics of the batch is in them as the namespace has it: a
        function of a stack, in place of the scale, and of the pixels that count: ``inside`` of the
        blocks that are read, ``shown`` of the result.
        """
        kernels, norms = self._parts()
        *kernels, project = (k if k is None else k.permute(2, 3, 1, 0) for k in kernels)
        tables = []
        for bn, pixels in zip(norms, (inside, inside, shown), strict=True):
            if _sees_batch(bn):
                tables += partial(fold_batch, bn), pixels
            else:
                tables += fold(bn, bn.running_mean, bn.running_var)
        return BottleneckWeights(*kernels, *tables), project

    def _packed(self):
        """Return the folded weights, to be packed once, and the kernel of the shortcut."""
        copied = partial(torch.clone, memory_format=torch.contiguous_format)
        with torch.no_grad():
            weights, project = self._weights()
            packed = PackedBottleneck(weights._map_arrays(copied), precision=self.precision)
            return packed, None if project is None else copied(project)

    def _frozen_weights(self):
        if any(map(_sees_batch, self._parts()[1])):
            raise RuntimeError(
                "a SparseBottleneck can be frozen if its batch norms use running statistics; one "
                "takes those of the batch"
            )
        return self._packed()

    def _folded(self):
        """Return the unit's weights with the batch norms folded in, and the shortcut's kernel.

        None where a batch norm takes the statistics of the batch. What was made of the same tensors
        in evaluation is kept, unless it may be out of date: not in a CUDA graph, which may outlive
        it.
        """
        kernels, norms = self._parts()
        if any(map(_sees_batch, norms)):
            return None
        tables = (getattr(bn, name) for bn in norms for name in _TENSORS)
        given = [t for t in (*kernels, *tables) if t is not None]
        recorded = torch.is_grad_enabled() and any(t.requires_grad for t in given)
        if recorded:
            self._kept = None
        key = (*map(id, given), *(bn.eps for bn in norms), self.precision)
        kept = self._kept  # other threads may replace it
        known = kept is not None and key in kept.kept  # which keeps them alive
        keeps = not recorded and state.thread_is_plain()
        if keeps and not known:  # tensors in inference mode have no version
            keeps = all(state.is_plain(t) and not t.is_inference() for t in given)
        if not keeps or (given[0].is_cuda and torch.cuda.is_current_stream_capturing()):
            return self._weights()
        if not known:  # parametrizations make new tensors at each call
            kept = self._kept = Weights()
        return kept.made(key, given, self._packed)


def _sees_batch(bn):
    """Whether a batch norm takes the statistics of the batch."""
    return bn.training or bn.running_mean is None


def _parts_of(unit):
    """Return the six modules of a dense unit, and its shortcut or None."""
    if all(hasattr(unit, name) for name in _PARTS):
        shortcuts = [n for n in ("downsample", "project", "shortcut") if hasattr(unit, n)]
        parts = [getattr(unit, name) for name in (*_PARTS, *shortcuts[:1])]
    elif isinstance(unit, Iterable):
        parts = [module for module in unit if not isinstance(module, nn.ReLU)]
    else:
        raise TypeError(
            f"unit must have the attributes {', '.join(_PARTS)}, or hold those modules in order, "
            f"got {type(unit).__name__}"
        )
    if len(parts) not in (6, 7):
        raise TypeError(
            f"unit must hold {', '.join(_PARTS)} and perhaps a shortcut, got {len(parts)} modules"
        )
    return parts if len(parts) == 7 else [*parts, None]


def _only_conv(shortcut):
    """Return the convolution that a shortcut is, or holds and nothing else."""
    inner = [m for m in shortcut.modules() if not isinstance(m, nn.Sequential | nn.Identity)]
    if len(inner) == 1 and isinstance(inner[0], nn.Conv2d):
        return inner[0]
    raise NotImplementedError(
        "the shortcut of a SparseBottleneck must be one 1x1 convolution without bias, got "
        f"{shortcut}; a batch norm in it can be folded into the convolution"
    )


def _check_unit(unit):
    """Raise unless the modules are what a unit is made of; an empty shortcut becomes None."""
    shortcut, stride = unit.downsample, unit.conv2.stride
    if isinstance(shortcut, nn.Sequential | nn.Identity) and not len(list(shortcut.children())):
        unit.downsample = shortcut = None
    for name in ("bn1", "bn2", "bn3"):
        kind = type(getattr(unit, name))
        if kind is not nn.BatchNorm2d:
            raise TypeError(f"unit.{name} must be a BatchNorm2d, got {kind.__name__}")
        check_no_hooks(f"unit.{name}", getattr(unit, name))
    convs = [(name, getattr(unit, name)) for name in ("conv1", "conv2", "conv3")]
    if shortcut is not None:
        convs.append(("downsample", _only_conv(shortcut)))
    for name, conv in convs:
        check_conv(f"unit.{name}", conv)
        k, pad = (3, 1) if name == "conv2" else (1, 0)
        sizes = (k, k), stride if name in ("conv2", "downsample") else (1, 1), (pad, pad)
        found = conv.kernel_size, conv.stride, conv.padding
        if found != sizes or conv.bias is not None or refusal(conv):
            raise NotImplementedError(
                "unit.{} must have kernel {}, stride {}, padding {} and no bias, groups or "
                "dilation, got {}".format(name, *sizes, conv)
            )
    before = None
    for i in (1, 2, 3):
        bn, conv = getattr(unit, f"bn{i}"), getattr(unit, f"conv{i}")
        if bn.num_features != conv.in_channels or before not in (None, conv.in_channels):
            raise ShapeError(
                f"unit.bn{i} must have the channels that unit.conv{i} reads, as in a unit that "
                f"normalizes first (pre-activation), got {bn.num_features} for "
                f"{conv.in_channels} after {before or conv.in_channels}"
            )
        before = conv.out_channels
    cin, cout = unit.conv1.in_channels, unit.conv3.out_channels
    if shortcut is None and (cin != cout or stride != (1, 1)):
        raise ShapeError(
            f"unit.downsample must be given where the unit changes channels or size, got none for "
            f"{cin} to {cout} channels and stride {stride}"
        )
