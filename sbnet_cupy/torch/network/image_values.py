"""Values of whole images in evaluation on a GPU: products with a matrix by a kernel of their own.

Squeeze and excitation pools each image, ``[N, C, 1, 1]``, multiplies it by two small matrices, and
the stack by the result. PyTorch runs several kernels for a product of few rows and its bias. An
:class:`ImageValues` is a tensor like any other, by which products with it are known.
"""

import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from . import cuda, cuda_affine

_MOST_IMAGES = 8  # each reads the matrix again
_ACTIVATIONS = {  # whose results are such values again
    F.relu, torch.relu, F.silu, F.relu6, F.hardswish, F.hardsigmoid, torch.sigmoid,
    torch.Tensor.sigmoid,
}  # fmt: skip


class ImageValues(torch.Tensor):
    """A tensor of a value for each channel of each image; ``plain`` is the tensor itself."""

    @staticmethod
    def __new__(cls, plain):
        """Make one of a tensor, in its memory."""
        self = torch.Tensor._make_subclass(cls, plain)
        self.plain = plain
        return self

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        """Run a function of PyTorch that was called with one."""
        kwargs = kwargs or {}
        result = None
        if func is F.conv2d:
            result = _conv2d(*args, **kwargs)
        elif func is F.linear:
            result = _linear(*args, **kwargs)
        if result is None:
            result = func(*tree_map(plainly, args), **tree_map(plainly, kwargs))
            if func not in _ACTIVATIONS:
                return result
        return ImageValues(result)


def plainly(x):
    """Return the plain tensor of ImageValues; anything else as it is."""
    return x.plain if type(x) is ImageValues else x


def image_values(pooled, table):
    """Return a pooled image as ImageValues where the kernel serves, otherwise as it is."""
    served = (
        table.weights is not None
        and table.weights.keeps
        and table.tape is None
        and table.trace is None
        and type(pooled) is torch.Tensor
        and cuda.serves(pooled)
        and 0 < pooled.shape[0] <= _MOST_IMAGES
        and not torch.is_autocast_enabled(pooled.device.type)
    )
    return ImageValues(pooled) if served else pooled


def _conv2d(x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    one_pixel = type(x) is ImageValues and x.plain.dim() == 4 and tuple(x.plain.shape[2:]) == (1, 1)
    if not one_pixel or type(padding) is str or groups != 1:
        return None
    if tuple(weight.shape[2:]) != (1, 1) or padding not in (0, (0, 0), [0, 0]):
        return None
    return _product(x, weight, bias, (1, 1))


def _linear(x, weight, bias=None):
    if type(x) is not ImageValues or x.plain.dim() != 2:
        return None
    return _product(x, weight, bias, ())


def _product(x, weight, bias, pixel):
    """Return a product, or None where the kernel does not compute it."""
    source, given = x.plain, [t for t in (weight, bias) if t is not None]
    fits = all(
        type(t) is torch.nn.Parameter
        and t.dtype == source.dtype and t.device == source.device
        and t.is_contiguous() and t.data_ptr() % 16 == 0
        for t in given
    )  # fmt: skip
    fits = fits and source.is_contiguous() and weight.shape[1] == source.shape[1]
    fits = fits and (bias is None or tuple(bias.shape) == tuple(weight.shape[:1]))
    if not fits or cuda.records(source, *given):
        return None
    if torch.is_autocast_enabled(source.device.type):
        return None
    shape = source.shape[0], weight.shape[0], *pixel
    out = torch.empty(shape, dtype=source.dtype, device=source.device)
    cuda_affine.image_linear(source, weight, bias, out)
    return out
