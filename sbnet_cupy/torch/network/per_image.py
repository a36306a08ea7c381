"""Values of blocks and of images: sums over the blocks of an image, and the way back.

Each is the other's gradient, so no gradient is added up in the order in which threads arrive. Where
``torch.func`` or forward-mode derivatives follow the calls, they are differentiated as PyTorch does
an index: on a GPU in the order of a sort.
"""

import torch
from torch.autograd import Function

from .._dispatch_state import has_forward_mode, has_function_transforms


def add_up(rows, image, place):
    """Sum ``[M, ...]`` over the blocks of each image.

    ``image [M]`` is that of each row, ``place [N, h, w]`` the row at each place, M for none.
    """
    if _is_recorded(rows):
        return _AddUp.apply(rows, image, place)
    return _sums(rows, place)


def repeat(per_image, image, place):
    """Repeat what is given for each image for each of its rows."""
    if _is_recorded(per_image):
        return _Repeat.apply(per_image, image, place)
    return per_image[image] if _is_transformed() else per_image.index_select(0, image)


def _is_recorded(values):
    """Whether a function of autograd's is to record the gradient of values."""
    return torch.is_grad_enabled() and values.requires_grad and not _is_transformed()


def _is_transformed():
    return has_function_transforms() or has_forward_mode()


def _sums(rows, place):
    zero = rows.new_zeros(1, *rows.shape[1:])
    return torch.cat([rows, zero])[place.reshape(place.shape[0], -1)].sum(1)


class _AddUp(Function):
    @staticmethod
    def forward(ctx, rows, image, place):
        ctx.of = image, place
        return _sums(rows, place)

    @staticmethod
    def backward(ctx, grad):
        return repeat(grad, *ctx.of), None, None


class _Repeat(Function):
    @staticmethod
    def forward(ctx, per_image, image, place):
        ctx.of = image, place
        return per_image.index_select(0, image)

    @staticmethod
    def backward(ctx, grad):
        return add_up(grad, *ctx.of), None, None
