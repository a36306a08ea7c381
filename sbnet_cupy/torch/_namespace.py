"""The namespace of ``block_sparse/compositions.py`` for tensors; all of it can be differentiated.

Gather and scatter are linear, and each other's transposes: their gradients, which the core
declares, are made of themselves, and can be differentiated again, any number of times.
"""

import sys

import torch
from torch.nn import functional

from ..block_sparse import compositions
from ..block_sparse.gather_scatter import sparse_gather, sparse_scatter
from . import _dispatch_state as state
from ._call import call
from ._convolve import convolve as _convolve
from ._convolve import convolve_backward as _convolve_backward
from ._operation import Operation

where, cast, maximum = torch.where, torch.Tensor.to, torch.maximum


def move_channels_first(stack):
    """Return an NHWC stack as NCHW."""
    return stack.permute(0, 3, 1, 2)


def gather(
    x, bin_counts, active_block_indices, bsize, boffset=(0, 0), bstride=None, *,
    transpose=False, data_format="NHWC", scale=None, shift=None, activation=None,
):  # fmt: skip
    """Return the active blocks of an image; a transformation is made by torch's arithmetic."""
    grid, layout = (bsize, boffset, bstride), (transpose, data_format)
    if scale is None and shift is None and activation is None:
        tensors = (x, bin_counts, active_block_indices, None, None, None)
        return call(GATHER, tensors, (*grid, *layout, None))
    return compositions.transformed_gather(
        _HERE, x, bin_counts, active_block_indices, *grid, transpose=transpose,
        data_format=data_format, scale=scale, shift=shift, activation=activation,
    )  # fmt: skip


def scatter(
    blocks, bin_counts, active_block_indices, x, bsize, boffset=(0, 0), bstride=None, *,
    add=False, atomic=False, transpose=False, data_format="NHWC", out=None,
):  # fmt: skip
    """Return an image with the blocks in it."""
    tensors = (blocks, bin_counts, active_block_indices, x, out)
    return call(SCATTER, tensors, (bsize, boffset, bstride, add, atomic, transpose, data_format))


def convolve(
    x, w, *, strides=(1, 1), padding="VALID", scale=None, bias=None, activation=None,
    w_format="HWIO", precision=None, bin_counts=None, out=None,
):  # fmt: skip
    """Return the convolution of an NHWC stack, or of an image with a 1x1 kernel: with no padding.

    All blocks are computed, and the result is new.
    """
    kernel = w.permute([w_format.index(letter) for letter in "OIHW"])
    y = _convolve(x, kernel, strides, precision)
    if scale is None and bias is None and activation is None:
        return y
    return cast(affine(y, scale, bias, activation), x.dtype)


def convolve_backward(grad, x, w, for_x, for_w, *, strides, w_format, precision):
    """Return the gradients of x and w of :func:`convolve`; one not asked for has no elements."""
    kernel = w.permute([w_format.index(letter) for letter in "OIHW"])
    dx, dw = _convolve_backward(grad, x, kernel, strides, precision, for_x, for_w)
    return dx, dw.permute(["OIHW".index(letter) for letter in w_format]) if for_w else dw


def zero_outside(blocks, bin_counts, active_block_indices, grid, image_hw):
    """Return the NHWC stack with zeros where it is outside the image."""
    inside = compositions.inside(_HERE, active_block_indices, grid, image_hw)
    return where(inside[..., None], blocks, 0)


def affine(values, scale, shift, activation, channels_last=True):
    """Return ``activation(values * scale + shift)`` in the dtype to compute in.

    A scale may be a function instead: of the values and the shift, it returns scale and shift.
    """
    z, per_channel = wide(values), (-1,) if channels_last else (-1, 1, 1)
    if scale is not None and not isinstance(scale, torch.Tensor):
        scale, shift = scale(z, shift)
    if scale is not None:
        z = z * scale.to(z.dtype).view(per_channel)
    if shift is not None:
        z = z + shift.to(z.dtype).view(per_channel)
    return z if activation is None else _ACTIVATIONS[activation](z)


_ACTIVATIONS = {"relu": torch.relu, "silu": functional.silu, "gelu": functional.gelu}


def pad(image, pads, number):
    """Return an NHWC image with a number around it."""
    (top, bottom), (left, right) = pads
    return functional.pad(image, (0, 0, left, right, top, bottom), value=number)


def shape(tensor):
    """Return the sizes of a tensor."""
    return tensor.shape


def zeros(shape, dtype, like):
    """Return zeros."""
    return like.new_zeros(shape, dtype=dtype)


def ones(shape, dtype, like):
    """Return ones; a dtype may be Python's bool."""
    return like.new_ones(shape, dtype=torch.bool if dtype is bool else dtype)


def arange(size, like):
    """Return 0, 1, 2... as int32."""
    return torch.arange(size, dtype=torch.int32, device=like.device)


def wide(tensor):
    """Return a tensor in the dtype to compute in: float64 as it is, all others float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.to(torch.float32)


def activation_backward(grad, z, name):
    """Return the gradient at z of ``activate(z, name)``; the derivative of relu at 0 is 0."""
    if name == "relu":
        return torch.where(z > 0, grad, 0)
    if name == "silu":
        s = torch.sigmoid(z)  # aten.silu_backward cannot be differentiated again
        return grad * (s * (1 + z * (1 - s)))
    if name == "gelu":
        return torch.ops.aten.gelu_backward(grad, z)
    return grad


def gradients_of(function, arrays, wanted, grad):
    """Return ``{name: gradient}`` of a function of arrays by name, made of what is here.

    What it computes is computed again, so that only arrays need be saved for it. ``grad`` is the
    gradient of its result.
    """
    if state.has_function_transforms():  # which leave no way to ask for gradients of a tensor
        names = list(wanted)

        def of_wanted(*values):
            return function(**arrays | dict(zip(names, values, strict=True)))

        back = torch.func.vjp(of_wanted, *map(arrays.get, names))[1]
        return dict(zip(names, back(grad), strict=True))
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        leaves = {name: arrays[name].view_as(arrays[name]).requires_grad_() for name in wanted}
        y = function(**arrays | leaves)
        found = torch.autograd.grad(y, list(leaves.values()), grad, create_graph=again)
    return dict(zip(leaves, found, strict=True))


def _gather_saves(arrays, options):
    if arrays["scale"] is arrays["shift"] is options["activation"] is None:
        return {"bin_counts", "active_block_indices"}
    return {"x", "bin_counts", "active_block_indices", "scale", "shift"}


def _gather_gradient(ops, arrays, options, grad, wanted, result):
    """That of the declaration where the gather is linear."""
    if arrays[4] is arrays[5] is options[-1] is None:
        return GATHER.operator.gradient(ops, arrays, options, grad, wanted)
    named = dict(zip(GATHER.operator.arrays, arrays, strict=True))
    named |= dict(zip(GATHER.operator.options, options, strict=True))
    del named["out"]
    return gradients_of(gather, named, wanted, grad)


_HERE = sys.modules[__name__]
GATHER = Operation(sparse_gather.GATHER, _HERE, gradient=_gather_gradient, saves=_gather_saves)
SCATTER = Operation(sparse_scatter.SCATTER, _HERE)
