"""The layers on tensors, with their gradients, and the dense convolution that checks them.

Backward passes gather the images again, rather than keep stacks of blocks, and convolve backwards
with PyTorch.
"""

from typing import Any

import torch

from ..block_sparse import layer_gradients as gradients
from ..block_sparse.active_grid import check_active_grid
from ..block_sparse.block_params import calc_block_params, calc_block_params_res_block
from ..block_sparse.bottleneck import res_block
from ..block_sparse.bottleneck.weights import (
    WEIGHTS,
    BottleneckWeights,
    PackedBottleneck,
    plain_of,
    resolve_precision,
)
from ..block_sparse.checks import arrays_of_list, plain_params
from ..block_sparse.conv import mask_conv2d as masked_conv
from ..block_sparse.conv import sparse_conv2d as sparse_conv
from ..block_sparse.from_mask import find_blocks, images_of_mask, is_mask, takes_blocks_from
from ..core.documentation import documented_as
from ..dense.packed_weights import PackedWeights, arrays_of_weights
from . import _dispatch_state as state
from . import _namespace as ops
from ._call import call
from ._conv_on_cpu import conv_on_cpu
from ._native import check_not_traced, check_tensors, native_weights, spec_of
from ._operation import Operation, resolve_sizes
from .ops import reduce_mask


@documented_as(sparse_conv.sparse_conv2d, "tensor")
def sparse_conv2d(
    x, w, indices, block_params=None, *, bsize=None, strides=(1, 1), padding: Any = "SAME",
    bias=None, activation=None, base=None, data_format="NHWC", w_format="HWIO", precision=None,
    out=None, method="auto", capacity=None,
):  # fmt: skip
    """Convolve an image where its blocks are active: :func:`sbnet_cupy.sparse_conv2d` on tensors.

    Differentiable, twice and more, with respect to ``x``, ``w``, ``bias`` and ``base``. The stack
    is not kept for the backward pass but gathered again. Under ``torch.autocast`` the float tensors
    are cast as for ``torch.nn.functional.conv2d``. Precision is what ``precision`` says, forwards
    and backwards; ``torch.backends`` is not asked. On a CPU PyTorch convolves float32 stacks, NumPy
    others. Where gradients are recorded ``out`` is written by a copy. For an NCHW tensor in
    channels_last memory pass ``x.permute(0, 2, 3, 1)``, as ``nn.SparseConv2d`` does.

    On a GPU the fused method packs ``w`` at each call, so every change of it is seen. A
    :class:`sbnet_cupy.PackedWeights` of tensors that need no gradient, and without ``scale``, is
    packed once; of changes in place it is told by ``refresh()``.

    Examples
    --------
    >>> x, w = torch.ones(1, 8, 8, 3), torch.ones(3, 3, 3, 5, requires_grad=True)
    >>> mask = torch.zeros(1, 8, 8)
    >>> mask[0, 1, 1] = 1
    >>> y = sparse_conv2d(x, w, mask, bsize=4)
    >>> y.sum().backward()
    >>> w.grad[1, 1, 0, 0]
    tensor(16.)
    """
    packed = w if isinstance(w, PackedWeights) else None
    w, scale, bias, w_format, precision = arrays_of_weights(w, None, bias, w_format, precision)
    if scale is not None:
        raise NotImplementedError(
            "the scale of a PackedWeights must be None for tensors; multiply w by it"
        )
    x, w, bias, base = autocast(x, w, bias, base)
    if takes_blocks_from(indices, bsize, capacity):
        sizes = (w, strides, padding, data_format, w_format)
        indices, block_params = _blocks(x, sizes, indices, block_params, bsize, capacity)
    active, params = _listed(x, indices, block_params, calc_block_params)
    options = (params, strides, padding, activation, data_format, w_format, precision, method)
    tensors = (x, w, *active, None, bias, base, out)
    return call(_CONV, tensors, options, _entered(packed, w))


@documented_as(res_block.sparse_res_block_bottleneck, "tensor")
def sparse_res_block_bottleneck(
    x, weights, indices, block_params=None, *, bsize=None, strides=(1, 1), w_project=None,
    base=None, out=None, precision=None, method="auto", capacity=None,
):  # fmt: skip
    """Apply a residual unit to active blocks: the function of :mod:`sbnet_cupy` on tensors.

    Differentiable, twice and more, with respect to ``x``, all of ``weights``, ``w_project`` and
    ``base``. The backward pass computes the unit's stacks again rather than keep them. Under
    ``torch.autocast`` the image and the kernels are cast; scales and shifts are not. Weights are
    packed, and ``out`` is written, as by :func:`sparse_conv2d`.

    Examples
    --------
    >>> from sbnet_cupy import BottleneckWeights
    >>> x = torch.ones(1, 32, 32, 16)
    >>> arrays = BottleneckWeights.random(16, 4)
    >>> weights = BottleneckWeights(*(torch.from_numpy(a) for a in vars(arrays).values()))
    >>> sparse_res_block_bottleneck(x, weights, torch.eye(32), bsize=8).shape
    torch.Size([1, 32, 32, 16])
    """
    packed = weights if isinstance(weights, PackedBottleneck) else None
    weights, precision = plain_of(weights), resolve_precision(weights, precision)
    if not isinstance(weights, BottleneckWeights):
        raise TypeError(f"weights must be a BottleneckWeights, got {type(weights).__name__}")
    if takes_blocks_from(indices, bsize, capacity):
        check_tensors(**{"weights.w2": weights.w2})
        sizes = (weights.w2, strides, "SAME", "NHWC", "HWIO")
        indices, block_params = _blocks(x, sizes, indices, block_params, bsize, capacity)
    active, params = _listed(x, indices, block_params, calc_block_params_res_block)
    w1, w2, w3, *tables = weights._arrays()
    x, w1, w2, w3, w_project, base = autocast(x, w1, w2, w3, w_project, base)
    tensors = (x, w1, w2, w3, *tables, w_project, *active, base, out)
    options = (params, strides, precision, method)
    return call(_UNIT, tensors, options, _entered(packed, w1))


@torch.compiler.disable
@documented_as(masked_conv.mask_conv2d, "tensor")
def mask_conv2d(x, w, mask, strides=(1, 1), padding: Any = "SAME", *, precision=None):
    """Convolve densely, then multiply by the pooled mask: :func:`sbnet_cupy.mask_conv2d`.

    Differentiable with respect to ``x``, ``w`` and a float ``mask``. PyTorch computes all of it;
    ``torch.compile`` leaves it out of its graphs.

    Examples
    --------
    >>> mask = torch.eye(3, dtype=torch.bool)[None]
    >>> y = mask_conv2d(torch.ones(1, 3, 3, 2), torch.ones(1, 1, 2, 1), mask, 1, "VALID")
    >>> y[0, :, :, 0]
    tensor([[2., 0., 0.],
            [0., 2., 0.],
            [0., 0., 2.]])
    """
    check_not_traced()
    check_tensors(x=x, w=w, mask=mask)
    mask, (x, w) = images_of_mask(mask), autocast(x, w)
    specs = (spec_of(x), spec_of(w), spec_of(mask))
    problem = masked_conv.resolve_mask_conv(*specs, strides, padding, precision)
    mask = mask.reshape(*x.shape[:3], 1).to(ops.wide(x).dtype)
    return masked_conv.masked_convolution(ops, x, w, mask, problem, precision)


def _entered(packed, w):
    """Return packed weights as calls take them, or None: also where w, their first, was cast."""
    if packed is None or torch.compiler.is_compiling() or packed._given()[0] is not w:
        return None
    return native_weights(packed)


def _listed(x, indices, block_params, calculate):
    """Return the two arrays of a list of blocks, and the fields of the BlockParams of its grid."""
    arrays, fields = arrays_of_list(indices), plain_params(block_params, calculate)
    if isinstance(x, torch.Tensor) and x.dim():  # another x is for other checks
        check_active_grid(indices, x.shape[0], block_params.bcount)
    return arrays, fields


def _blocks(x, sizes, indices, *given):
    """Return the list of blocks and the BlockParams of a call that gives a mask, or ``bsize``."""
    check_not_traced()
    check_tensors(("indices",), x=x, w=sizes[0], indices=indices if is_mask(indices) else None)
    return find_blocks(indices, *given, resolve_sizes(x, *sizes), reduce_mask)


def autocast(x, *tensors):
    """Cast float tensors as torch's convolutions do under autocast; float64 stays."""
    if not state.has_autocast():
        return x, *tensors
    kind = x.device.type if isinstance(x, torch.Tensor) else None
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return x, *tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        t.to(dtype)
        if isinstance(t, torch.Tensor) and t.is_floating_point() and t.dtype != torch.float64
        else t
        for t in (x, *tensors)
    )


_CONV = Operation(
    sparse_conv.SPARSE_CONV2D, ops, gradient=gradients.conv_gradient, saves=gradients.conv_saves,
    unused=("scale",), on_cpu=conv_on_cpu,
)  # fmt: skip
_UNIT = Operation(
    res_block.RES_BLOCK, ops, gradient=gradients.unit_gradient, saves=gradients.unit_saves,
    prefixes=dict.fromkeys(WEIGHTS, "weights."), weights=slice(1, 1 + len(WEIGHTS)),
)  # fmt: skip
