"""ArraySpec: what checks, shape rules and planners know of an array, without the array itself."""

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from .arrays import library_of

CPU = "cpu"  # the device of NumPy arrays; that of CuPy arrays is a number
_VECTOR = 16  # bytes: the widest access of a kernel


class ArraySpec(NamedTuple):
    """Shape, dtype, device, layout and alignment of an array: all that a plan may depend on.

    A spec is a tuple: it is immutable, hashable, and cheap to compare. It never holds contents.

    Parameters
    ----------
    shape : tuple of int
        Sizes. An adapter that traces may put symbolic sizes here: checks only compare them.
    dtype : numpy.dtype
        Element type.
    device : "cpu" or int
        ``"cpu"`` for arrays in host memory, else the number of the GPU.
    strides : tuple of int, optional
        Strides in bytes of an array that is not C-contiguous; None for one that is.
    alignment : int
        Address modulo 16: 0 for an array whose 16-byte vectors are aligned. Always 0 on a CPU,
        where nothing depends on it.

    Examples
    --------
    >>> spec = spec_of(np.zeros((2, 3), np.float32))
    >>> spec.shape, spec.device, spec.contiguous, spec.nbytes
    ((2, 3), 'cpu', True, 24)
    """

    shape: tuple
    dtype: Any
    device: Any = CPU
    strides: tuple | None = None
    alignment: int = 0

    @property
    def ndim(self):
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self):
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self):
        """Number of bytes of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def contiguous(self):
        """Whether the array is C-contiguous."""
        return self.strides is None

    @property
    def on_gpu(self):
        """Whether the array is in the memory of a GPU."""
        return self.device != CPU

    def new(self, shape, dtype=None):
        """Return the spec of a new array on the same device; the same dtype by default."""
        dtype = self.dtype if dtype is None else np.dtype(dtype)
        return ArraySpec(tuple(shape), dtype, self.device)


class SpecGroup:
    """Specs of several arrays as one entry of a key, which is hashed and compared by identity.

    Groups of equal specs are one object: make them with :func:`group_of`.
    """

    __slots__ = ("specs",)

    def __init__(self, specs):
        self.specs = specs


@functools.lru_cache(1024)
def group_of(specs):
    """Return the SpecGroup of a tuple of specs (or None)."""
    return SpecGroup(specs)


def fields_of(array):
    """Return the fields of an array's spec as a plain tuple, which is equal to the spec.

    Making a tuple takes a fifth of the time of making an ArraySpec, and both are the same key of a
    dictionary. For None it is None, for a spec or a group of specs that, and for what is no native
    array its type.
    """
    if array is None:
        return None
    if type(array) is np.ndarray:
        strides = None if array.flags.c_contiguous else array.strides
        return array.shape, array.dtype, CPU, strides, 0
    if type(array) is ArraySpec or type(array) is SpecGroup:
        return array
    try:
        memory = array.data
        strides = None if array._c_contiguous else array.strides
        return array.shape, array.dtype, memory.device_id, strides, memory.ptr % _VECTOR
    except (AttributeError, ValueError):  # not a CuPy array; the data of some dtypes is no buffer
        return _fields_of_other(array)


def _fields_of_other(value):
    """Return the fields of an instance of a subclass of ``numpy.ndarray``; else the type."""
    library = library_of(value)
    if library is None or not library.native:
        return type(value)
    strides = None if value.flags.c_contiguous else value.strides
    return value.shape, value.dtype, CPU, strides, 0


def spec_of(array):
    """Return the ArraySpec of a NumPy or CuPy array; anything else comes back as it is.

    The checks, which take specs, then name the type of what is no array. A spec comes back, too.
    """
    fields = fields_of(array)
    return ArraySpec(*fields) if type(fields) is tuple else array
