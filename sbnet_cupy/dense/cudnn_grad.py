"""Gradients of a convolution by cuDNN: graphs with one node each, dgrad and wgrad."""

from ..core.arrays import dtype_name, namespace
from .cudnn import W, X, Y, describe, parts_of, run, takes


def data_gradient(grad_y, w, dx, problem):
    """Write the gradient of the images to ``dx``; return the slices of the batch that are left."""
    if not takes(dx, grad_y):
        return [slice(0, len(dx))]
    xp = namespace(dx)
    w = xp.ascontiguousarray(w.transpose(problem.weight_axes(_order(problem))))
    dx[...] = 0  # kernels may leave pixels that no output reads unwritten
    left = []
    for part in parts_of(dx, grad_y):
        arrays = {X: dx[part], W: w, Y: grad_y[part]}
        if not run(describe(arrays, X, problem), arrays):
            left.append(part)
    return left


def weight_gradient(x, grad_y, dw, problem):
    """Add the gradient of the kernel to ``dw``, which is HWIO; return the slices that are left.

    The sum over each part of the batch is in float32 if cuDNN has a kernel for that, otherwise it
    is rounded to the dtype of ``x``.
    """
    if not takes(x, grad_y):
        return [slice(0, len(x))]
    xp, order = namespace(x), _order(problem)
    to_hwio = tuple(map(order.index, "HWIO"))
    shape = [dw.shape["HWIO".index(letter)] for letter in order]
    wanted = dict.fromkeys(("float32", dtype_name(x.dtype)))
    sums = {name: xp.empty(shape, x.dtype if name != "float32" else dw.dtype) for name in wanted}
    left = []
    for part in parts_of(x, grad_y):
        for name in wanted:
            arrays = {X: x[part], W: sums[name], Y: grad_y[part]}
            if run(describe(arrays, W, problem), arrays):
                dw += sums[name].transpose(to_hwio).astype(dw.dtype, copy=False)
                break
        else:
            left.append(part)
    return left


def _order(problem):
    """Return the order of the kernel's axes in the graphs: packed like the images."""
    return "OHWI" if problem.channels_last else "OIHW"
