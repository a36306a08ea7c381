"""Values of whole images in evaluation on a GPU: products with a matrix by a kernel of their own.

Squeeze and excitation pools each image, ``[N, C, 1, 1]``, multiplies it by two small matrices, and
the stack by the result; a classifier multiplies it by a large one. PyTorch runs several kernels for
a product of few rows, its bias and an activation. An :class:`ImageValues` is a tensor like any
other, by which products with it are known; a product waits for the activation after it.
"""

import threading
import weakref

import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from . import cuda, cuda_affine

_MOST_IMAGES = 8  # each reads the matrix again
_ACTIVATIONS = {  # whose results are such values again, by the names of epilogue.py
    F.relu: "relu", torch.relu: "relu", F.silu: "silu", F.relu6: "relu6", F.gelu: "gelu",
    F.hardswish: "hardswish", F.hardsigmoid: "hardsigmoid", torch.sigmoid: "sigmoid",
    torch.Tensor.sigmoid: "sigmoid",
}  # fmt: skip
_VIEWS = {torch.flatten, torch.Tensor.flatten, torch.Tensor.view, torch.Tensor.reshape}
_SIZES = {torch.Tensor.dim, torch.Tensor.size, torch.Tensor.numel, torch.Tensor.is_floating_point}
_ATTRIBUTES = {"shape", "dtype", "device", "ndim", "is_cuda", "requires_grad"}


class _Waiting(threading.local):
    """The products that wait, each by a weak reference."""

    def __init__(self):
        self.values = []

    def flush(self):
        """Compute all: something may be written that one of them reads."""
        values, self.values = self.values, []
        for ref in values:
            value = ref()
            if value is not None:
                value.compute()


_WAITING = _Waiting()


class ImageValues(torch.Tensor):
    """A tensor of a value for each channel of each image; ``plain`` is the tensor itself.

    ``product`` is (x, weight, bias, activation) where the tensor is still to be computed.
    """

    @staticmethod
    def __new__(cls, plain, product=None):
        """Make one of a tensor, in its memory."""
        self = torch.Tensor._make_subclass(cls, plain)
        self._plain, self._product = plain, product
        if product is not None:
            _WAITING.values = [ref for ref in _WAITING.values if ref() is not None]
            _WAITING.values.append(weakref.ref(self))
        return self

    def compute(self):
        """Compute the product that waits, if one does."""
        if self._product is not None:
            product, self._product = self._product, None
            cuda_affine.image_linear(*product, self._plain)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        """Run a function of PyTorch that was called with one."""
        kwargs = kwargs or {}
        owner = getattr(func, "__self__", None)  # of an attribute that is read
        if func in _SIZES or getattr(owner, "__name__", None) in _ATTRIBUTES:
            return func(*tree_map(_memory, args), **kwargs)
        result = None
        if func is F.conv2d:
            result = _conv2d(*args, **kwargs)
        elif func is F.linear:
            result = _linear(*args, **kwargs)
        elif func in _ACTIVATIONS:
            result = _activation(_ACTIVATIONS[func], *args, **kwargs)
        elif func in _VIEWS:
            result = _view(func, *args, **kwargs)
        elif func is F.dropout and not _is_training(*args, **kwargs):
            result = args[0]
        if result is not None:
            return result
        if _may_write(func.__name__, args, kwargs):
            _WAITING.flush()
        result = func(*tree_map(plainly, args), **tree_map(plainly, kwargs))
        return ImageValues(result) if func in _ACTIVATIONS else result


def _may_write(name, args, kwargs):
    """Whether a function may change an argument."""
    if any(a is True for a in args) or kwargs.get("inplace") or kwargs.get("out") is not None:
        return True
    inplace = name.startswith("__i") or name == "__setitem__"
    return inplace or (name.endswith("_") and not name.endswith("__"))


def _memory(x):
    return x._plain if type(x) is ImageValues else x


def plainly(x):
    """Return the plain tensor of ImageValues, computed; anything else as it is."""
    if type(x) is not ImageValues:
        return x
    x.compute()
    return x._plain


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
    one_pixel = type(x) is ImageValues and x._plain.dim() == 4
    one_pixel = one_pixel and tuple(x._plain.shape[2:]) == (1, 1)
    if not one_pixel or type(padding) is str or groups != 1:
        return None
    if tuple(weight.shape[2:]) != (1, 1) or padding not in (0, (0, 0), [0, 0]):
        return None
    return _product(x, weight, bias, (1, 1))


def _linear(x, weight, bias=None):
    if type(x) is not ImageValues or x._plain.dim() != 2:
        return None
    return _product(x, weight, bias, ())


def _product(x, weight, bias, pixel):
    """Return a product that waits, or None where the kernel does not compute it."""
    source, given = x._plain, [t for t in (weight, bias) if t is not None]
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
    x.compute()
    shape = source.shape[0], weight.shape[0], *pixel
    out = torch.empty(shape, dtype=source.dtype, device=source.device)
    return ImageValues(out, (source, weight, bias, None))


def _activation(name, x, inplace=False, **more):
    """Return a product with its activation, which waits too; None where x is no such product.

    One that others read without the activation is computed for them by itself.
    """
    if type(x) is not ImageValues or x._product is None or x._product[3] or more:
        return None
    product = (*x._product[:3], name)
    if inplace:
        x._product = product
        return x
    return ImageValues(torch.empty_like(x._plain), product)


def _view(func, x, *args, **kwargs):
    """Return the values as ``[N, C]``, or None for any other view."""
    if type(x) is not ImageValues or tuple(x._plain.shape[2:]) not in ((), (1, 1)):
        return None
    x.compute()
    result = func(x._plain, *args, **kwargs)
    same = tuple(result.shape) == tuple(x._plain.shape[:2]) and result.is_contiguous()
    return ImageValues(result) if same else result


def _is_training(x, p=0.5, training=True, inplace=False):
    return training
