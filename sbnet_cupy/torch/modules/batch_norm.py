"""Batch norms of a unit: folded, or with the statistics of the pixels of a stack of blocks."""

import torch

from ...block_sparse import compositions
from .. import _namespace as ops
from ..submanifold.norms import masked_moments


def fold(bn, mean, variance):
    """Return the scale and shift per channel that a batch norm with such statistics is."""
    scale = torch.rsqrt(variance + bn.eps)
    if bn.weight is not None:
        scale = scale * bn.weight
    shift = -mean * scale
    return scale, shift if bn.bias is None else shift + bn.bias


def fold_batch(bn, z, counted):
    """Return the scale and shift of a batch norm with the statistics of a stack's counted pixels.

    Its running statistics are kept as its own ``forward`` keeps them. A mask with no active pixel
    leaves them as they are.
    """
    running, momentum = None, bn.momentum
    if bn.training and bn.running_mean is not None:
        running = bn.running_mean, bn.running_var
        bn.num_batches_tracked.add_(counted.any())
        if momentum is None:  # the plain average of all batches
            momentum = 1 / bn.num_batches_tracked.clamp(min=1).to(bn.running_mean.dtype)
    mean, variance = masked_moments(z, counted, running, momentum)
    return fold(bn, mean, variance)


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
