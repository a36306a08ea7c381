"""Values of whole images in evaluation on a GPU: products with a matrix wait for their activation.

Squeeze and excitation pools each image, ``[N, C, 1, 1]``, multiplies it by two small matrices, and
the stack by the result. PyTorch runs a kernel for each product, bias and activation, of which none
has more than a moment's work. An :class:`ImageValues` is a tensor like any other. Functions that it
does not know get the plain tensor.
"""

import weakref

import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from . import cuda, cuda_affine

_MOST_IMAGES = 8  # each reads the matrix again
_ACTIVATIONS = {
    F.relu: "relu", torch.relu: "relu", F.silu: "silu", F.relu6: "relu6",
    F.hardswish: "hardswish", F.hardsigmoid: "hardsigmoid", torch.sigmoid: "sigmoid",
    torch.Tensor.sigmoid: "sigmoid",
}  # fmt: skip


class ImageValues(torch.Tensor):
    """A tensor that a product may still have to be written to, before anything reads it.

    ``plain`` is the tensor, ``product`` the arguments of what waits, or None, and ``readers`` are
    references to those that wait and read this one.
    """

    @staticmethod
    def __new__(cls, plain, product=None):
        """Make one of a tensor, which a product that waits is to be written to."""
        self = torch.Tensor._make_subclass(cls, plain)
        self.plain, self.product, self.readers = plain, product, []
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
        elif func in _ACTIVATIONS and len(args) == 1 and set(kwargs) <= {"inplace"}:
            result = _activation(args[0], _ACTIVATIONS[func], **kwargs)
        if result is not None:
            return result
        return func(*tree_map(plainly, args), **tree_map(plainly, kwargs))


def plainly(x):
    """Return the plain tensor of an ImageValues, computed; anything else as it is."""
    if type(x) is not ImageValues:
        return x
    if x.product is not None:
        _compute(x.product, None, x.plain)
        x.product = None
    for ref in x.readers:  # who asks for the tensor may write to it
        reader = ref()
        if reader is not None:
            plainly(reader)
    x.readers = []
    return x.plain


def image_values(pooled, table):
    """Return a pooled image as ImageValues where products may wait, otherwise as it is."""
    waits = (
        table.weights is not None
        and table.weights.keeps
        and table.tape is None
        and table.trace is None
        and type(pooled) is torch.Tensor
        and cuda.serves(pooled)
        and 0 < pooled.shape[0] <= _MOST_IMAGES
        and not torch.is_autocast_enabled(pooled.device.type)
    )
    return ImageValues(pooled) if waits else pooled


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
    """Return a product that waits, or None where the kernel does not compute it."""
    given = [t for t in (weight, bias) if t is not None]
    fits = all(
        type(t) is torch.nn.Parameter
        and t.dtype == x.plain.dtype and t.device == x.plain.device
        and t.is_contiguous() and t.data_ptr() % 16 == 0
        for t in given
    )  # fmt: skip
    source = plainly(x) if x.product is not None else x.plain
    fits = fits and source.is_contiguous() and weight.shape[1] == source.shape[1]
    if not fits or cuda.records(source, *given):
        return None
    out = torch.empty(
        source.shape[0], weight.shape[0], *pixel, dtype=source.dtype, device=source.device
    )
    waiting = ImageValues(out, (source, weight, bias))
    x.readers.append(weakref.ref(waiting))
    return waiting


def _activation(x, name, inplace=False):
    """Return the activation of a product that waits, computed with it; None of anything else."""
    if type(x) is not ImageValues or x.product is None:
        return None
    out = x.plain if inplace else torch.empty_like(x.plain)
    _compute(x.product, name, out)
    if not inplace:
        return ImageValues(out)
    x.product = None
    return x


def _compute(product, activation, out):
    cuda_affine.image_linear(*product, activation, out)
