"""What the modules share: their blocks, from a mask to the list of the active ones."""

import functools

import torch

from ...block_sparse.active_blocks import ActiveBlocks
from ...block_sparse.checks import blocks_of_capacity, check_capacity
from ...block_sparse.from_mask import as_batch
from ...core.sizes import pair
from ...errors import DTypeError, ShapeError
from .._native import check_not_traced, check_tensors
from ..ops import reduce_mask

_LISTS = (ActiveBlocks, tuple)


class BlockModule(torch.nn.Module):
    """Base of modules that compute active blocks; a subclass has ``block_params``.

    What it makes of its weights is dropped when they may change: those that are frozen, and those
    that are kept as long as they look the same.
    """

    _frozen = _kept = None

    def freeze(self):
        """Pack the weights once for all calls to come; return the module.

        In evaluation only. The weights of the moment are copied, and are constants from then on:
        what changes parameters or buffers is not seen, and they get no gradient, until ``train()``
        or ``eval()`` is called, a state dict is loaded, or the module is converted by ``to()`` and
        the like. Copies of the module are not frozen. A CUDA graph that was captured needs the
        module to stay frozen.
        """
        if self.training:
            raise RuntimeError(
                f"a {type(self).__name__} can be frozen in evaluation alone; call eval() first"
            )
        with torch.no_grad():
            self._frozen, self._kept = self._frozen_weights(), None
        return self

    def train(self, mode=True):
        """Set the module to training or evaluation; forget what was made of its weights."""
        self._frozen = self._kept = None
        return super().train(mode)

    def _apply(self, *args, **kwargs):
        self._frozen = self._kept = None
        return super()._apply(*args, **kwargs)

    def _load_from_state_dict(self, *args, **kwargs):
        self._frozen = self._kept = None
        return super()._load_from_state_dict(*args, **kwargs)

    def __getstate__(self):
        state = super().__getstate__()
        return {k: v for k, v in state.items() if k not in ("_frozen", "_kept")}

    def _configure(self, block_size, capacity, precision, method):
        """Set the options of every module, or raise."""
        self.block_size = pair(block_size, "block_size")
        self.capacity, self.precision, self.method = check_capacity(capacity), precision, method

    def active_blocks(self, x, mask):
        """Return what ``module(x, mask)`` works on, to list it once: (active, params)."""
        return self._blocks(x, mask, None)

    def _blocks(self, x, mask, params):
        """Return (active blocks, BlockParams) of a call; ``mask`` may be the list of blocks.

        A block touches a mask with its input window, halo included; where strides skip pixels
        between the windows, with the pixels up to the next one too, so that none is lost.
        """
        if isinstance(mask, _LISTS):
            if params is None:
                raise TypeError(
                    "params must be given with a list of active blocks, got None; call module(x, "
                    "active, params) with the BlockParams that reduce_mask was given, or "
                    "module(x, mask)"
                )
            return mask, params
        if mask is None:
            raise DTypeError("mask must be a torch.Tensor, or a list of active blocks, got None")
        check_not_traced()
        check_tensors(x=x, mask=mask)
        mask = as_batch("mask", mask, (x.shape[0], *x.shape[2:]))
        params = self.block_params(*x.shape[2:]) if params is None else params
        total = x.shape[0] * params.bcount[0] * params.bcount[1]
        window = tuple(map(max, params.bsize, params.bstride))
        grid = {"bsize": window, "boffset": params.boffset, "bstride": params.bstride}
        capacity = blocks_of_capacity(self.capacity, total)
        return reduce_mask(mask, params.bcount, **grid, capacity=capacity), params

    def extra_repr(self):
        """Describe the module as PyTorch does, and its blocks."""
        return ", ".join(filter(None, (super().extra_repr(), f"block_size={self.block_size}")))


def params_of(calculate, size, *sizes):
    """Return what ``calculate`` makes of an image and the smallest block that fits a kernel.

    ``sizes`` are the least block, the kernel and its strides, and more for ``calculate``.
    """
    kept = type(size[0]) is type(size[1]) is int and not torch.compiler.is_compiling()
    make = _params_of if kept else _params_of.__wrapped__
    return make(calculate, size, *(tuple(s) if type(s) is list else s for s in sizes))


@functools.lru_cache(maxsize=1024)
def _params_of(calculate, size, block_size, kernel, strides, *more):
    axes = zip(block_size, kernel, strides, strict=True)
    block = tuple(k + -(-max(b - k, 0) // s) * s for b, k, s in axes)
    return calculate(size, block, *more)


def check_nchw(conv, x):
    """Raise unless x is an image for a first convolution: of its channels, in its dtype."""
    channels = conv.in_channels
    is_image = isinstance(x, torch.Tensor) and x.dim() == 4 and x.shape[1] == channels
    if is_image and x.layout is torch.strided:
        weight = conv._parameters.get("weight", x)  # it may be computed: that is checked later
        if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
            raise DTypeError(
                f"x must have the dtype of the module's weights, {weight.dtype}, got {x.dtype}; "
                f"use x.to({weight.dtype})"
            )
        return
    check_tensors(x=x)
    shape = tuple(x.shape)
    hint = "; use x.permute(0, 3, 1, 2)" if len(shape) == 4 and shape[3] == channels else ""
    hint = "; use x[None]" if len(shape) == 3 and shape[0] == channels else hint
    raise ShapeError(f"x must have shape (N, {channels}, H, W), got {shape}{hint}")


def is_channels_last(x):
    """Whether an NCHW image lies in memory as NHWC; one that lies as both does not."""
    return not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
