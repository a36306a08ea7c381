"""What an array argument must look like: library, device, shape, dtype, contiguity, memory."""

import numpy as np

from ..errors import DeviceError, DTypeError, ShapeError
from . import libraries
from .arrays import dtype_kind, is_cupy, library_of, place_name


def check_array(name, value, *, ndim=None, shape=None, kinds=None, like=None):
    """Raise unless ``value`` is a native array of the given dimensions, shape and dtype kind.

    ``ndim`` is an int or a tuple of allowed ones; ``shape`` may hold None where any size will do;
    ``kinds`` are NumPy's letters; ``like`` is an array whose library and device it must share.
    """
    library = library_of(value)
    if library is None or not library.native:
        raise DTypeError(
            f"{name} must be an array (NumPy, CuPy, PyTorch, JAX or DLPack), "
            f"got {type(value).__name__}; convert it with numpy.asarray or cupy.asarray"
        )
    if ndim is not None and value.ndim not in (ndim if isinstance(ndim, tuple) else (ndim,)):
        raise ShapeError(f"{name} must have {_either(ndim)} dimensions, got shape {value.shape}")
    if shape is not None and (
        len(shape) != value.ndim
        or any(want not in (None, n) for want, n in zip(shape, value.shape, strict=True))
    ):
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        raise ShapeError(f"{name} must have shape ({wanted}), got {value.shape}")
    if kinds is not None and dtype_kind(value.dtype) not in kinds:
        wanted = _either(tuple(_KIND_NAMES[kind] for kind in kinds))
        raise DTypeError(f"{name} must be of a {wanted} dtype, got {value.dtype}; use astype")
    if like is not None and (
        library is not library_of(like) or library.place(value) != library.place(like)
    ):
        raise DeviceError(
            f"{name} must be {library_of(like).name} on {place_name(like)} like the other arrays, "
            f"got {library.name} on {place_name(value)}"
        )


_KIND_NAMES = {"b": "bool", "i": "signed", "u": "unsigned", "f": "float", "c": "complex"}


def _either(choices):
    return " or ".join(map(str, choices)) if isinstance(choices, tuple) else str(choices)


def check_contiguous(name, value):
    """Raise unless ``value`` is C-contiguous."""
    if not value.flags.c_contiguous:
        raise ShapeError(
            f"{name} must be C-contiguous, got shape {value.shape} with strides {value.strides}; "
            "call ascontiguousarray (or .contiguous()) first"
        )


def check_out(out, shape, dtype, like, inputs=()):
    """Raise unless ``out`` can receive a result and shares no memory with the named ``inputs``."""
    check_array("out", out, like=like)
    if out.shape != tuple(shape):
        raise ShapeError(f"out must have shape {tuple(shape)}, got {out.shape}")
    if out.dtype != dtype:
        raise DTypeError(f"out must have dtype {dtype}, got {out.dtype}")
    check_contiguous("out", out)
    if not is_cupy(out) and not out.flags.writeable:
        raise ShapeError(
            "out must be writable, got a read-only array; JAX and TensorFlow arrays never are: "
            "use the returned array instead"
        )
    check_apart(out, inputs)


def check_apart(out, inputs):
    """Raise if ``out`` shares memory with one of the named ``inputs``."""
    overlap = _overlap_on_gpu if is_cupy(out) else np.may_share_memory
    for name, value in inputs:
        if value is not None and overlap(out, value):
            raise ShapeError(f"out must not share memory with {name}; pass a separate array")


def _overlap_on_gpu(a, b):
    (start, end), (low, high) = _extent(a), _extent(b)
    return low < end and start < high


def apart(out, inputs):
    """Whether CuPy's ``out`` is surely apart from ``inputs``: :func:`check_apart`, at less cost."""
    start = out.data.ptr
    end = start + out.nbytes
    for array in inputs:
        if array is not None:
            low = array.data.ptr
            if low < end and start < low + array.nbytes:
                return False
    return True


def extents(arrays):
    """Return where the arrays lie, for :func:`apart_from`."""
    return tuple(_extent(array) for array in arrays)


def apart_from(out, extents):
    """Whether CuPy's ``out`` shares no memory with what lies at ``extents``."""
    start = out.data.ptr
    end = start + out.nbytes
    return all(low >= end or high <= start for low, high in extents)


def _extent(array):
    """Return the first address of an array's memory and the one past its last; (0, 0) if empty."""
    if library_of(array) is libraries.CUPY:
        start = array.data.ptr
        return (start, start + array.nbytes) if array.nbytes else (0, 0)
    return np.lib.array_utils.byte_bounds(array) if array.size else (0, 0)
