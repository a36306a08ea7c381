"""Batch norms of a unit: folded, or with the statistics of the pixels of a stack of blocks."""

import torch

from ..block_sparse import compositions
from . import _namespace as ops


def fold(weight, bias, mean, variance, eps):
    """Return the scale and shift per channel that a batch norm is; weight and bias may be None."""
    scale = torch.rsqrt(variance + eps)
    if weight is not None:
        scale = scale * weight
    shift = -mean * scale
    return scale, shift if bias is None else shift + bias


def fold_running(bn):
    """Return the scale and shift of a batch norm with its running statistics."""
    return fold(bn.weight, bn.bias, bn.running_mean, bn.running_var, bn.eps)


def fold_batch(bn, z, counted):
    """Return the scale and shift of a batch norm with the statistics of a stack's counted pixels.

    Its running statistics are kept as its own ``forward`` keeps them. A mask with no active pixel
    leaves them as they are.
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
    return fold(bn.weight, bn.bias, mean, variance, bn.eps)


class StackOps:
    """The namespace of a unit with statistics of the batch, in which a scale may be a function.

    Of the values, as they are multiplied, and of the shift: it returns the scale and the shift.
    Which pixels lie in the image is found once.
    """

    convolve, scatter = staticmethod(ops.convolve), staticmethod(ops.scatter)

    def __init__(self, x, active, params):
        self.inside = compositions.pixels_read(ops, x, *active, *compositions.grid_of(params))

    def gather(self, x, *where, scale, shift, activation):
        """Return blocks whose pixels in the image are transformed."""
        z = ops.affine(ops.gather(x, *where), scale, shift, activation)
        return torch.where(self.inside, z, 0).to(x.dtype)

    def zero_outside(self, blocks, *where):
        """Return the stack with zeros outside the image."""
        return torch.where(self.inside, blocks, 0)

    def counted(self, x, out_hw, active, params):
        """Return which pixels of the blocks, and of those of the result, count in statistics.

        Both are bool, ``[M, bh, bw, 1]``: the pixels in the image, each once though blocks overlap.
        """
        rows, columns = (  # those that are not the halo of a neighbour
            torch.arange(size, device=x.device).add(offset).div(step, rounding_mode="floor") == 0
            for size, offset, step in zip(params.bsize, params.boffset, params.bstride, strict=True)
        )
        image = x.new_empty((x.shape[0], *out_hw, 1))
        shown = compositions.pixels_read(ops, image, *active, params.bsize_out)
        return self.inside & (rows[:, None] & columns)[..., None], shown
