"""Values of whole images in evaluation on a GPU: products with a matrix by a kernel of their own.

Squeeze and excitation pools each image, ``[N, C, 1, 1]``, multiplies it by two small matrices, and
the stack by the result; a classifier multiplies it by a large one. PyTorch runs several kernels for
a product of few rows, its bias and an activation. An :class:`ImageValues` stands for a tensor, by
which products with it are known; a product waits for the batch norm and the activation after it.
Spatial pyramids pool few windows of each image, too, and interpolate what they make of them to an
image: it is interpolated where it is read, in the active blocks; of one pixel there is only that.
"""

import threading
import weakref

import torch
from torch.nn import functional as F

from .._dispatch_state import plainly as without_subclass
from .._dispatch_state import without_memory
from . import casts, cuda, cuda_affine, cuda_pool
from .aten import public
from .epilogue import finish
from .handlers import is_of_shape
from .tensor import StackTensor
from .trees import tree_leaves, tree_map

_MOST_IMAGES = 8  # each reads the matrix again
_MOST_VALUES = 64  # of a channel, where images have several
_MOST_READ = 1 << 24  # bytes of a matrix that these read again and again
_ACTIVATIONS = {  # whose results are such values again, by the names of epilogue.py
    F.relu: "relu", torch.relu: "relu", F.silu: "silu", F.relu6: "relu6", F.gelu: "gelu",
    F.hardswish: "hardswish", F.hardsigmoid: "hardsigmoid", torch.sigmoid: "sigmoid",
    torch.Tensor.sigmoid: "sigmoid",
}  # fmt: skip
_VIEWS = {torch.flatten, torch.Tensor.flatten, torch.Tensor.view, torch.Tensor.reshape}


class _Waiting(threading.local):
    """The products that wait, and values that are read later, each by a weak reference."""

    def __init__(self):
        self.values = []

    def flush(self):
        """Compute all: something may be written that one of them reads."""
        values, self.values = self.values, []
        for ref in values:
            value = ref()
            if value is not None:
                value.compute()

    def append(self, value):
        """Note one more."""
        self.values = [ref for ref in self.values if ref() is not None]
        self.values.append(weakref.ref(value))


_WAITING = _Waiting()


def flush():
    """Compute the products that wait in this thread."""
    _WAITING.flush()


class Held:
    """The tensor that ImageValues stand for, as it is now, for who reads it later."""

    def __init__(self, values):
        self.tensor = values.compute()
        _WAITING.append(self)

    def compute(self):
        """Keep a copy: something may be written to the tensor."""
        self.tensor = self.tensor.clone()


def held(values):
    """Return a Held of ImageValues, or None where something may be written to them unseen."""
    return Held(values) if type(values) is ImageValues and not values._read[0] else None


class ImageValues(torch.Tensor):
    """Stands for ``plain``, a tensor of few values for each channel of each image; has no memory.

    ``product`` is (x, weight, bias, activation) where the tensor is still to be computed; there is
    only its ``shape`` then. It is computed at the end of a call at the latest, with the weights as
    they are when it is. Where ``shape`` has more pixels than ``plain``, they are interpolated when
    they are read: bilinearly, with corners that are ``aligned`` or not; of one pixel all are like
    it. Functions get the tensor itself, whether PyTorch passes them on or they are called below its
    functions, in a scripted function, say.
    """

    _layer = None  # of a convolution that waits: its weight and bias, and to what they are cast

    @staticmethod
    def __new__(cls, plain, weights, product=None, shape=None, read=None, aligned=None):
        """Make one of a tensor, or of a product and its shape; ``weights`` are those of the call.

        ``read`` is shared by those of the same memory: [whether a view of it was given out].
        """
        like = plain if product is None else product[0]
        shape = tuple(like.shape if shape is None else shape)
        self = without_memory(cls, shape, like.dtype, like.device, False)
        self._plain, self._product, self._shape, self._weights = plain, product, shape, weights
        self._read, self._aligned = [False] if read is None else read, aligned
        if product is not None or shape != like.shape:
            _WAITING.append(self)
        return self

    def compute(self):
        """Return the tensor; compute the product that waits, or make the pixels, if need be."""
        if self._product is not None:
            product, self._product = self._product, None
            self._plain = _multiplied(*product, self._shape)
        elif self._plain.shape != self._shape:
            self._plain = self._enlarged()
        return self._plain

    def _enlarged(self):
        if self.is_one_pixel:
            return self._plain.expand(self._shape).contiguous()
        options = {"mode": "bilinear", "align_corners": self._aligned}
        return F.interpolate(self._plain, self._shape[2:], **options).contiguous()

    @property
    def is_larger(self):
        """Whether there is a tensor of fewer pixels than this stands for."""
        return self._product is None and self._plain.shape != self._shape

    @property
    def is_one_pixel(self):
        """Whether the tensor has one pixel; it has been computed."""
        return self._plain.shape[2:] == (1, 1)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        """Run a function of PyTorch that was called with one; activations have their own way."""
        if StackTensor in types:
            return NotImplemented
        func, args, kwargs = public(func, args, kwargs or {})
        if is_of_shape(func):
            return without_subclass(func, *args, **kwargs)
        result = None
        if func is F.conv2d:
            result = _conv2d(*args, **kwargs)
        elif func is F.linear:
            result = _linear(*args, **kwargs)
        elif func is F.batch_norm:
            result = _batch_norm(*args, **kwargs)
        elif func is F.interpolate:
            result = _interpolate(*args, **kwargs)
        elif func in _ACTIVATIONS:
            result = _activation(_ACTIVATIONS[func], *args, **kwargs)
        elif func in _VIEWS:
            result = _view(func, *args, **kwargs)
        elif func is F.dropout and not _is_training(*args, **kwargs):
            result = kwargs["input"] if "input" in kwargs else args[0]
        if result is not None:
            return result
        if _may_write(getattr(func, "__name__", ""), args, kwargs):
            flush()
        result = func(*tree_map(plainly, args), **tree_map(plainly, kwargs))
        _note_views(result, (args, kwargs))
        if func not in _ACTIVATIONS:
            return result
        return ImageValues(result, (kwargs["input"] if "input" in kwargs else args[0])._weights)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        """Run an operator that was called below PyTorch's functions."""
        flush()
        result = func(*tree_map(plainly, args), **tree_map(plainly, kwargs or {}))
        _note_views(result, (args, kwargs))
        return result


def _may_write(name, args, kwargs):
    """Whether a function may change an argument, as far as its name tells."""
    if any(a is True for a in args) or kwargs.get("inplace") or kwargs.get("out") is not None:
        return True
    name = name.split(".")[0]  # of an operator, an overload follows
    inplace = not name or name.startswith("__i") or name == "__setitem__"
    return inplace or (name.endswith("_") and not name.endswith("__"))


def _note_views(result, given):
    """Note of values whose memory a result shares that somebody may write to it unseen."""
    values = [v for v in tree_leaves(given) if type(v) is ImageValues]
    for tensor in tree_leaves(result):
        if type(tensor) is torch.Tensor:
            for v in values:
                if tensor.untyped_storage().data_ptr() == v.compute().untyped_storage().data_ptr():
                    v._read[0] = True
                    flush()


def plainly(x):
    """Return the tensor that ImageValues stand for, computed; anything else as it is."""
    return x.compute() if type(x) is ImageValues else x


def expanded(x):
    """Return an image of pixels that are all the same as a view of one; anything else as it is."""
    is_one = type(x) is ImageValues and x.is_larger and x.is_one_pixel
    return x._plain.expand(x._shape) if is_one else x


def at_blocks(x, table, block, size):
    """Return an image of this size that is to be interpolated as a stack; None of anything else."""
    if type(x) is not ImageValues or not x.is_larger or x.is_one_pixel:
        return None
    if (x._shape[0], *x._shape[2:]) != (table.batch, *size) or table.whole:
        return None
    corners = (x._aligned,) * 2
    steps = tuple(map(cuda_pool.step, x._plain.shape[2:], size, (None, None), corners))
    mode = "bilinear corners" if x._aligned else "bilinear"
    return cuda_pool.interpolate_images(x._plain, table, block, mode, steps)


def _rows(x):
    """Return values as ``[values, C]``, a view, or None where they lie in another order."""
    x = x.permute(0, 2, 3, 1) if x.dim() == 4 else x
    return x.flatten(0, -2) if x.is_contiguous() else None


def _multiplied(x, weight, bias, activation, shape):
    """Return ``activation(x @ weight.T + bias)`` for each value of x."""
    values = x.shape[0] * x.shape[2:].numel()
    if values > _MOST_IMAGES and values * weight.numel() * weight.element_size() > _MOST_READ:
        return finish(F.conv2d(x, weight, bias), None, activation)
    order = torch.channels_last if len(shape) == 4 else torch.contiguous_format
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=order)
    cuda_affine.image_linear(_rows(x), weight, bias, activation, _rows(y))
    return y


def image_values(pooled, table):
    """Return a pooled image as ImageValues where the kernel serves, otherwise as it is."""
    served = (
        table.weights is not None
        and table.weights.keeps
        and not table.whole  # torch.compile, which sees no kernels, may trace whole images
        and table.tape is None
        and type(pooled) is torch.Tensor
        and cuda.serves(pooled)
        and 0 < pooled.shape[0] <= _MOST_IMAGES
        and pooled.shape[0] * pooled.shape[2:].numel() <= _MOST_VALUES
    )
    return ImageValues(pooled, table.weights) if served else pooled


def _conv2d(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    if type(input) is not ImageValues or len(input._shape) != 4 or input.is_larger:
        return None
    if type(padding) is str or groups != 1:
        return None
    if tuple(weight.shape[2:]) != (1, 1) or padding not in (0, (0, 0), [0, 0]):
        return None
    if input._shape[2:] != (1, 1) and stride not in (1, (1, 1), [1, 1]):
        return None
    return _product(input, weight, bias, input._shape[2:])


def _linear(input, weight, bias=None):
    if type(input) is not ImageValues or len(input._shape) != 2:
        return None
    return _product(input, weight, bias, ())


def _product(x, weight, bias, pixel):
    """Return a product that waits, or None where the kernel does not compute it."""
    source, given = x.compute(), [t for t in (weight, bias) if t is not None]
    to = casts.dtype_for(source)
    dtype = casts.after(source.dtype, to)
    fits = all(
        type(t) is torch.nn.Parameter
        and casts.after(t.dtype, to) == dtype and t.device == source.device
        for t in given
    )  # fmt: skip
    fits = fits and _rows(source) is not None and weight.shape[1] == source.shape[1]
    fits = fits and (bias is None or tuple(bias.shape) == tuple(weight.shape[:1]))
    if not fits or cuda.records(source, *given):
        return None
    layer, source = (weight, bias, to), casts.cast(source, to)
    weight, bias = (x._weights.cast(t, to) for t in (weight, bias))
    if not _is_aligned(weight, bias):
        return None
    shape = source.shape[0], weight.shape[0], *pixel
    result = ImageValues(None, x._weights, (source, weight, bias, None), shape)
    result._layer = layer if pixel else None
    return _seen(result, x)


def _is_aligned(*tensors):
    return all(t is None or (t.is_contiguous() and t.data_ptr() % 16 == 0) for t in tensors)


def _seen(result, x):
    """Return what reads x later; at once where something may be written to a view of it unseen."""
    if x._read[0]:
        result.compute()
    return result


def _batch_norm(
    input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1,
    eps=1e-5,
):  # fmt: skip
    """Return a product that waits with a batch norm in its weights; None of anything else."""
    waits = type(input) is ImageValues and input._product is not None and not input._product[3]
    if not waits or input._layer is None or training or running_mean is None:
        return None
    norm = running_mean, running_var, weight, bias
    if cuda.records(*(t for t in norm if t is not None)):
        return None
    (kernel, shift, to), source = input._layer, input._product[0]
    kernel, shift = input._weights.folded(kernel, shift, (*norm, float(eps)), to=to)
    if not _is_aligned(kernel, shift):
        return None
    return ImageValues(None, input._weights, (source, kernel, shift, None), input._shape)


def _interpolate(
    input, size=None, scale_factor=None, mode="nearest", align_corners=None,
    recompute_scale_factor=None, antialias=False,
):  # fmt: skip
    """Return an image that is made of the input where it is read, or None for any other."""
    if type(input) is not ImageValues or len(input._shape) != 4 or input.is_larger or antialias:
        return None
    given = isinstance(size, (tuple, list)) and len(size) == 2
    given = given and all(type(n) is int and n > 0 for n in size)
    is_one = input._shape[2:] == (1, 1)
    known = mode == "bilinear" or (is_one and mode == "nearest" and align_corners is None)
    if not given or not known or scale_factor is not None or recompute_scale_factor:
        return None
    plain = input.compute()
    plain = plain.to(casts.dtype_in(plain, F.interpolate, None, 2.0, mode))
    shape = (*plain.shape[:2], *size)
    image = ImageValues(plain, input._weights, shape=shape, aligned=bool(align_corners))
    return _seen(image, input)


def _activation(name, input, inplace=False, **more):
    """Return a product with its activation, which waits too; None where ``input`` is none.

    One that others read without the activation is computed for them by itself.
    """
    waits = type(input) is ImageValues and input._product is not None
    if not waits or input._product[3] or more:
        return None
    product = (*input._product[:3], name)
    if inplace:
        input._product = product
        return input
    return ImageValues(None, input._weights, product, input._shape)


def _view(func, input, *args, **kwargs):
    """Return the values as ``[N, C]``, or None for any other view."""
    if type(input) is not ImageValues or input._shape[2:] not in ((), (1, 1)):
        return None
    plain = input.compute()
    result = func(plain, *args, **kwargs)
    same = tuple(result.shape) == input._shape[:2] and result.is_contiguous()
    if not same:
        _note_views(result, input)
    return ImageValues(result, input._weights, read=input._read) if same else result


def _is_training(input, p=0.5, training=True, inplace=False):
    return training
