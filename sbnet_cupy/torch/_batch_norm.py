"""Batch norms on a stack of blocks: folded, or with the statistics of the stack's own pixels."""

from functools import partial

import torch

from ..block_sparse import compositions
from ..block_sparse.bottleneck.weights import plain_of
from . import _namespace as ops


def normalised_stack(x, kernels, norms, active, params, strides, out_hw, precision):
    """Return the residual stack of a unit whose norms see all values at once.

    As ``compositions.residual_stack``, but a norm is a function: of a stack in float, and of which
    of its pixels to count in statistics: those in the image, each once though blocks overlap.
    Kernels are OIHW.
    """
    grid = compositions.grid_of(params)
    inside = compositions.pixels_read(ops, x, *active, *grid)
    image = x.new_empty((x.shape[0], *out_hw, 1))
    shown = compositions.pixels_read(ops, image, *active, params.bsize_out)
    counted = inside & _own(params, x.device)
    convolve = partial(ops.convolve, w_format="OIHW", precision=precision)

    def activated(norm, z, counted):
        return torch.relu(norm(ops.wide(z), counted))

    z = ops.gather(x, *active, *grid)
    a = torch.where(inside, activated(norms[0], z, counted), 0).to(x.dtype)
    z = convolve(a, kernels[0])
    a = torch.where(inside, activated(norms[1], z, counted), 0).to(x.dtype)
    z = convolve(a, kernels[1], strides=strides)
    a = activated(norms[2], z, shown).to(x.dtype)
    return convolve(a, kernels[2])


def _own(params, device):
    """Return bool ``[bh, bw, 1]``: the pixels of a block that are not its neighbours' halo."""
    rows, columns = (
        torch.arange(size, device=device).add(offset).div(step, rounding_mode="floor") == 0
        for size, offset, step in zip(params.bsize, params.boffset, params.bstride, strict=True)
    )
    return (rows[:, None] & columns)[..., None]


def folded(bn):
    """Return a batch norm with its running statistics, as a norm of a stack."""
    return _affine(*fold(bn.weight, bn.bias, bn.running_mean, bn.running_var, bn.eps))


def unfolded(weights, project):
    """Return the kernels of folded weights and of a shortcut, OIHW, and the norms."""
    w1, w2, w3, *tables = plain_of(weights)._arrays()
    kernels = [w if w is None else w.permute(3, 2, 0, 1) for w in (w1, w2, w3, project)]
    return kernels, [_affine(*tables[i : i + 2]) for i in (0, 2, 4)]


def _affine(scale, shift):
    return lambda z, counted: ops.affine(z, scale, shift, None)


def fold(weight, bias, mean, variance, eps):
    """Return the scale and shift per channel that a batch norm is; weight and bias may be None."""
    scale = torch.rsqrt(variance + eps)
    if weight is not None:
        scale = scale * weight
    shift = -mean * scale
    return scale, shift if bias is None else shift + bias


def normalise(bn, z, counted):
    """Normalise a stack by the statistics of its counted pixels; keep running ones as bn does.

    A mask with no active pixel leaves the running statistics as they are.
    """
    number = counted.sum()
    some = number.clamp(min=1).to(z.dtype)
    mean = torch.where(counted, z, 0).sum((0, 1, 2)) / some
    variance = torch.where(counted, (z - mean).square(), 0).sum((0, 1, 2)) / some
    if bn.training and bn.running_mean is not None:
        with torch.no_grad():
            bn.num_batches_tracked.add_((number > 0).to(torch.int64))
            share = (number > 0).to(bn.running_mean.dtype)
            if bn.momentum is None:  # the plain average of all batches
                share = share / bn.num_batches_tracked.clamp(min=1)
            else:
                share = share * bn.momentum
            unbiased = variance * (some / (some - 1).clamp(min=1))
            for kept, new in ((bn.running_mean, mean), (bn.running_var, unbiased)):
                kept.add_(share * (new.to(kept.dtype) - kept))
    return ops.affine(z, *fold(bn.weight, bn.bias, mean, variance, bn.eps), None)
