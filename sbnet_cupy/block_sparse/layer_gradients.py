"""Gradients of the layers on a stack, for adapters that record them, once for every library.

They take a namespace ``ops`` as that of :mod:`.compositions`, which also has ``wide(array)``,
``activation_backward(grad, z, name)``, ``convolve_backward(grad, x, w, for_x, for_w, *, strides,
w_format, precision)`` and ``gradients_of(function, arrays, wanted, grad)``; and the arrays and
options of the layer's operator, the gradient of the result, the names of the wanted gradients and
the result. Arrays whose values they do not need may be shapes and dtypes alone.
"""

from .block_params import BlockParams
from .bottleneck.res_block import RES_BLOCK
from .bottleneck.weights import BottleneckWeights
from .compositions import grid_of, layout_of_stack, residual_unit, zero_unread


def conv_saves(arrays, options):
    """Return the names of the arrays that the gradient reads, by arrays and options by name.

    The result shows where relu let through; for other activations z is computed again.
    """
    names = {"x", "w", "bin_counts", "active_block_indices"}
    if options["activation"] is None:
        return names
    return names | {"result" if options["activation"] == "relu" else "bias"}


def conv_gradient(ops, arrays, options, grad, wanted, result):
    """Gather, differentiate the convolution of the stack, add up."""
    x, w, *active, _, bias, _, _ = arrays
    params, strides, _, activation, data_format, w_format, precision, _ = options
    params, layout = BlockParams(*params), layout_of_stack(data_format == "NHWC")
    grid, shown = grid_of(params), params.bsize_out
    how = {"strides": strides, "w_format": w_format, "precision": precision}
    stack, found = ops.gather(grad, *active, shown, **layout), {}
    if "base" in wanted:
        zeros = ops.zeros(stack.shape, stack.dtype, like=stack)
        found["base"] = ops.scatter(zeros, *active, grad, shown, **layout)
    if not wanted - {"base"}:
        return found
    blocks = ops.gather(x, *active, *grid, **layout)
    sizes = slice(1, 3) if data_format == "NHWC" else slice(2, 4)
    blocks = zero_unread(ops, blocks, active, params, strides, x.shape[sizes], grad.shape[sizes])
    if activation == "relu":
        y = ops.gather(result, *active, shown, **layout)
        stack = ops.activation_backward(stack, y, "relu")
    elif activation is not None:
        z = ops.affine(ops.convolve(blocks, w, **how), None, bias, None)
        stack = ops.cast(ops.activation_backward(ops.wide(stack), z, activation), x.dtype)
    if "bias" in wanted:
        found["bias"] = ops.cast(ops.wide(stack).sum((0, 1, 2)), bias.dtype)
    for_x, for_w = "x" in wanted, "w" in wanted
    if for_x or for_w:
        dx, dw = ops.convolve_backward(stack, blocks, w, for_x, for_w, **how)
    if for_x:
        image = ops.zeros(x.shape, x.dtype, like=x)
        found["x"] = ops.scatter(dx, *active, image, *grid, add=True, atomic=True, **layout)
    if for_w:
        found["w"] = dw
    return found


def unit_saves(arrays, options):
    """All but what only gives its shape."""
    return set(arrays) - {"base", "out"}


def unit_gradient(ops, arrays, options, grad, wanted, result):
    """Differentiate the unit made of differentiable operators, computed again."""
    named = dict(zip(RES_BLOCK.arrays, arrays, strict=True))
    if named["base"] is not None:  # its values do not matter
        named["base"] = ops.zeros(grad.shape, grad.dtype, like=grad)

    def unit(x, w_project, bin_counts, active_block_indices, base, out, **weights):
        return residual_unit(
            ops, x, BottleneckWeights(**weights), w_project, (bin_counts, active_block_indices),
            BlockParams(*options[0]), base, strides=options[1], precision=options[2],
        )  # fmt: skip

    return ops.gradients_of(unit, named, wanted, grad)
