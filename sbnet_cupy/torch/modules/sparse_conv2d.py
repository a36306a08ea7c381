"""SparseConv2d: torch.nn.Conv2d where a mask is set."""

from typing import Any

import torch

from ...block_sparse.block_params import calc_block_params
from ...core.sizes import pair
from ...dense.packed_weights import PackedWeights
from .._dispatch_state import HOOKS, parameters_of
from ..layers import sparse_conv2d
from .block_module import BlockModule, check_nchw, is_channels_last, params_of


class SparseConv2d(BlockModule, torch.nn.Conv2d):
    """A ``torch.nn.Conv2d`` that convolves active blocks only.

    Inside them the result is that of the dense convolution, elsewhere it is 0 (without the bias),
    or ``base``. A block is active when its input window, halo included, touches the mask.

    Parameters
    ----------
    in_channels, out_channels, kernel_size, stride, padding, bias, device, dtype
        As for ``torch.nn.Conv2d``; ``padding`` may be "same" or "valid". Groups, dilation and
        padding modes other than zeros are refused.
    block_size : int or (int, int)
        Input block in pixels, halo included. Where kernel and stride do not fit into it, the next
        larger size that fits is used.
    activation : None, "relu", "silu" or "gelu"
        Applied to the result inside active blocks.
    capacity : None, int or float
        Blocks to make room for, or the share of all blocks. None reads the number from the device;
        with a capacity nothing waits, as ``torch.compile(fullgraph=True)`` and CUDA graphs need it,
        and blocks past it are left out.
    precision, method
        As for :func:`sbnet_cupy.sparse_conv2d`.

    The state dict is that of ``torch.nn.Conv2d``: ``weight`` and ``bias``. On a GPU each call packs
    the weights; :meth:`freeze` does it once.

    Examples
    --------
    >>> conv = SparseConv2d(3, 8, 3, padding=1, block_size=10)
    >>> x, mask = torch.randn(1, 3, 32, 32), torch.zeros(1, 32, 32, dtype=torch.bool)
    >>> mask[:, 4, 4] = True
    >>> y = conv(x, mask)
    >>> y.shape, bool(y[:, :, 16:].any())
    (torch.Size([1, 8, 32, 32]), False)
    """

    def __init__(
        self, in_channels, out_channels, kernel_size, stride: Any = 1, padding: Any = 0, bias=True,
        *, block_size, activation=None, capacity=None, precision=None, method="auto",
        dilation: Any = 1, groups=1, padding_mode="zeros", device=None, dtype=None,
    ):  # fmt: skip
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias,
            padding_mode, device, dtype,
        )  # fmt: skip
        why = refusal(self)
        if why is not None:
            raise NotImplementedError(f"SparseConv2d has no {why}; keep this convolution dense")
        pair(self.kernel_size, "kernel_size")
        pair(self.stride, "stride")
        self._configure(block_size, capacity, precision, method)
        self.activation = activation

    @classmethod
    def from_dense(
        cls, conv, *, block_size, activation=None, capacity=None, precision=None, method="auto"
    ):
        """Make a sparse convolution of a ``torch.nn.Conv2d``.

        It shares the very parameters of ``conv``: training one trains the other. For parameters of
        its own pass ``copy.deepcopy(conv)``. A convolution with arithmetic of its own is refused:
        a subclass with its own ``forward``, parametrizations, hooks.
        """
        check_conv("conv", conv)
        for name in ("weight", "bias"):
            if name not in conv._parameters:
                raise TypeError(
                    f"conv must have its {name} as a parameter, got a parametrization; remove it, "
                    "or use sparsify"
                )
        sparse = cls(
            conv.in_channels, conv.out_channels, conv.kernel_size, conv.stride, conv.padding,
            conv.bias is not None, block_size=block_size, activation=activation, capacity=capacity,
            precision=precision, method=method, dilation=conv.dilation, groups=conv.groups,
            padding_mode=conv.padding_mode, device="meta", dtype=conv.weight.dtype,
        )  # fmt: skip
        sparse.weight, sparse.bias = conv.weight, conv.bias
        return sparse.train(conv.training)

    def block_params(self, height, width):
        """Return the BlockParams of an image of this size."""
        sizes = self.kernel_size, self.stride
        image = (height, width), self.block_size
        return params_of(calc_block_params, *image, *sizes, *sizes, self._pads())

    def forward(self, x, mask, params=None, *, base=None):
        """Convolve ``x`` where ``mask`` is set, or in active blocks that were listed before.

        Parameters
        ----------
        x : tensor, shape (N, in_channels, H, W)
            In the dtype of the weight. Contiguous or channels_last; one that is neither is copied.
        mask : tensor, shape (N, H, W) or (N, 1, H, W), or ActiveBlocks with ``params``
            True, or over 0, where to compute; also (H, W) for one image.
        params : BlockParams, optional
            That of the listed blocks; its ``bsize`` may differ from ``block_size``. Both are what
            :meth:`active_blocks` returns.
        base : tensor, shape (N, out_channels, H', W'), optional
            Result outside active blocks.

        Returns
        -------
        y : tensor, shape (N, out_channels, H', W')
            channels_last if ``x`` is.

        Raises
        ------
        ShapeError, DTypeError, DeviceError
            If a size, dtype or device does not fit.
        TypeError
            If a list of blocks comes without ``params``.
        """
        check_nchw(self, x)
        active, params = self._blocks(x, mask, params)
        last = is_channels_last(x)
        if last:
            x = x.permute(0, 2, 3, 1)
            base = None if base is None else base.permute(0, 2, 3, 1)
        frozen = self._frozen
        w, bias = parameters_of(self, "weight", "bias") if frozen is None else (frozen, None)
        y = sparse_conv2d(
            x, w, active, params, strides=self.stride, padding=self._pads(),
            bias=bias, activation=self.activation, base=base,
            data_format="NHWC" if last else "NCHW", w_format="OIHW", precision=self.precision,
            method=self.method,
        )  # fmt: skip
        return y.permute(0, 3, 1, 2) if last else y

    def _frozen_weights(self):
        w, bias = (t if t is None else t.detach().clone() for t in (self.weight, self.bias))
        return PackedWeights(w.contiguous(), bias=bias, w_format="OIHW", precision=self.precision)

    def _pads(self):
        """Return the padding as ((top, bottom), (left, right))."""
        if isinstance(self.padding, str):
            totals = [k - 1 if self.padding == "same" else 0 for k in self.kernel_size]
            return tuple((total // 2, total - total // 2) for total in totals)
        height, width = self.padding
        return (height, height), (width, width)


def check_conv(name, conv):
    """Raise unless a module of this name computes as ``torch.nn.Conv2d`` does."""
    kind = type(conv)
    if not isinstance(conv, torch.nn.Conv2d):
        raise TypeError(f"{name} must be a torch.nn.Conv2d, got {kind.__name__}")
    usual = torch.nn.Conv2d
    if kind.forward is not usual.forward or kind._conv_forward is not usual._conv_forward:
        raise TypeError(
            f"{name} must compute as torch.nn.Conv2d does, got {kind.__name__} with a forward of "
            "its own; keep it dense, or use sparsify"
        )
    check_no_hooks(name, conv)


def check_no_hooks(name, module):
    """Raise if a module has hooks, which would not be called."""
    if any(getattr(module, hooks) for hooks in HOOKS):
        raise TypeError(
            f"{name} must have no hooks, which would not be called, got {type(module).__name__} "
            "with some; remove them, or use sparsify"
        )


def refusal(conv):
    """Return what of a ``torch.nn.Conv2d`` has no block-sparse form, or None."""
    if conv.groups != 1:
        return f"groups, got groups={conv.groups}"
    if tuple(conv.dilation) != (1, 1):
        return f"dilation, got dilation={conv.dilation}"
    if conv.padding_mode != "zeros":
        return f"padding but zeros, got padding_mode={conv.padding_mode!r}"
    return None
