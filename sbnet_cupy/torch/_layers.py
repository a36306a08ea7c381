"""The layers as operators, with their gradients.

Backward passes gather the images again, rather than keep stacks of blocks, and convolve backwards
with PyTorch.
"""

import torch

from ..block_sparse import compositions
from ..block_sparse.block_params import BlockParams
from ..block_sparse.bottleneck.res_block import RES_BLOCK
from ..block_sparse.bottleneck.weights import WEIGHTS, BottleneckWeights
from ..block_sparse.conv import sparse_conv2d
from . import _namespace as ops
from ._convolve import convolve, convolve_backward
from ._namespace import activation_backward, wide
from ._operation import Operation


def _conv_saves(arrays, options):
    """The result shows where relu let through; for other activations z is computed again."""
    names = {"x", "w", "bin_counts", "active_block_indices"}
    if options["activation"] is None:
        return names
    return names | {"result" if options["activation"] == "relu" else "bias"}


def _conv_gradient(arrays, options, grad, wanted, result):
    """Gather, differentiate the convolution of the stack, add up."""
    x, w, bin_counts, active_block_indices, _, bias, _, _ = arrays
    params, strides, _, activation, data_format, w_format, precision, _ = options
    params, active = BlockParams(*params), (bin_counts, active_block_indices)
    layout = compositions.layout_of_stack(data_format == "NHWC")
    gradients = {}
    if "base" in wanted:
        channels = grad.shape[3 if data_format == "NHWC" else 1]
        zeros = grad.new_zeros((active_block_indices.shape[0], *params.bsize_out, channels))
        gradients["base"] = ops.scatter(zeros, *active, grad, params.bsize_out, **layout)
    if not wanted - {"base"}:
        return gradients
    grid = compositions.grid_of(params)
    kernel = w.permute([w_format.index(letter) for letter in "OIHW"])
    grad = ops.gather(grad, *active, params.bsize_out, **layout)
    blocks = ops.gather(x, *active, *grid, **layout)
    if activation == "relu":
        shown = ops.gather(result, *active, params.bsize_out, **layout)
        grad = activation_backward(grad, shown, "relu")
    elif activation is not None:
        z = wide(convolve(blocks, kernel, strides, precision))
        z = z if bias is None else z + bias.to(z.dtype)
        grad = activation_backward(wide(grad), z, activation).to(x.dtype)
    if "bias" in wanted:
        gradients["bias"] = wide(grad).sum((0, 1, 2)).to(bias.dtype)
    both = "x" in wanted, "w" in wanted
    if any(both):
        for_x, for_w = convolve_backward(grad, blocks, kernel, strides, precision, *both)
        if both[0]:
            image = x.new_zeros(x.shape)
            flags = {"add": True, "atomic": True}
            gradients["x"] = ops.scatter(for_x, *active, image, *grid, **flags, **layout)
        if both[1]:
            gradients["w"] = for_w.permute(["OIHW".index(letter) for letter in w_format])
    return gradients


def _unit_saves(arrays, options):
    return set(arrays) - {"base", "out"}


def _unit_gradient(arrays, options, grad, wanted, result):
    """Differentiate the unit made of differentiable operators, computed again."""
    named = dict(zip(RES_BLOCK.arrays, arrays, strict=True))
    params, active = BlockParams(*options[0]), (named["bin_counts"], named["active_block_indices"])
    gradients, again = {}, torch.is_grad_enabled()
    if "base" in wanted:
        shape = (active[1].shape[0], *params.bsize_out, grad.shape[3])
        zeros = grad.new_zeros(shape)
        gradients["base"] = ops.scatter(zeros, *active, grad, params.bsize_out)
    names = [name for name in RES_BLOCK.arrays if name in wanted and name != "base"]
    if not names:
        return gradients
    with torch.enable_grad():
        for name in names:
            named[name] = named[name].view_as(named[name])
        outputs, of_outputs = _linear_parts(named, active, params, grad, *options[1:3])
        leaves = [named[name] for name in names]
        found = torch.autograd.grad(outputs, leaves, of_outputs, create_graph=again)
    return gradients | dict(zip(names, found, strict=True))


def _linear_parts(named, active, params, grad, strides, precision):
    """Return what the result is linear in, the stack and the shortcut, and their gradients."""
    x, w_project = named["x"], named["w_project"]
    weights = BottleneckWeights(*(named[name] for name in WEIGHTS))
    options = {"strides": strides, "precision": precision}
    stack = compositions.residual_stack(ops, x, weights, active, params, **options)
    of_stack = ops.gather(grad, *active, params.bsize_out)
    if named["base"] is not None:
        shortcut = compositions.shortcut_stack(ops, x, w_project, active, params, **options)
        return (stack + shortcut,), (of_stack,)
    shortcut = x if w_project is None else ops.convolve(x, w_project, **options)
    if not shortcut.requires_grad:
        return (stack,), (of_stack,)
    return (stack, shortcut), (of_stack, grad)


SPARSE_CONV2D = Operation(
    sparse_conv2d.SPARSE_CONV2D,
    gradient=_conv_gradient,
    saves=_conv_saves,
    floats=("x", "w"),
)
UNIT = Operation(
    RES_BLOCK,
    gradient=_unit_gradient,
    saves=_unit_saves,
    prefixes=dict.fromkeys(WEIGHTS, "weights."),
    floats=("x", "weights.w1", "weights.w2", "weights.w3"),
)
