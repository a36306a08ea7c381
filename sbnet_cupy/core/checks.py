"""What an array argument must look like: library, device, shape, dtype, contiguity, memory.

The checks take the :class:`ArraySpec` of an array, or whatever was passed where an array belongs:
they work where there is no memory yet. (An array will do, and is described first.)
"""

import numpy as np

from ..errors import DeviceError, DTypeError, ShapeError
from .arrays import dtype_kind, is_float
from .scalars import as_number
from .spec import ArraySpec, spec_of


def check_flag(name, value):
    """Raise ValueError unless ``value`` is True or False."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} must be True or False, got {value!r}")


def check_tolerance(tol):
    """Return ``tol`` as a float, or raise."""
    return as_number("tol", tol, nan=False, hint="; use 0 for 'any pixel set'")


def check_array(name, spec, *, ndim=None, shape=None, kinds=None, like=None):
    """Raise unless ``spec`` is that of an array of the given dimensions, shape and dtype kind.

    ``ndim`` is an int or a tuple of allowed ones; ``shape`` may hold None where any size will do;
    ``kinds`` are NumPy's letters; ``like`` is the spec whose library and device it must share.
    """
    spec, like = spec_of(spec), spec_of(like)
    if not isinstance(spec, ArraySpec):
        instead = getattr(type(spec), "instead", "convert it with numpy.asarray or cupy.asarray")
        raise DTypeError(
            f"{name} must be an array (NumPy, CuPy, PyTorch, JAX or DLPack), "
            f"got {type(spec).__name__}; {instead}"
        )
    if ndim is not None and spec.ndim not in (ndim if isinstance(ndim, tuple) else (ndim,)):
        wanted = choice(ndim if isinstance(ndim, tuple) else (ndim,))
        raise ShapeError(f"{name} must have {wanted} dimensions, got shape {spec.shape}")
    if shape is not None and (
        len(shape) != spec.ndim
        or any(want is not None and want != n for want, n in zip(shape, spec.shape, strict=True))
    ):
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        wanted += "," if len(shape) == 1 else ""
        raise ShapeError(f"{name} must have shape ({wanted}), got {spec.shape}")
    if kinds is not None and dtype_kind(spec.dtype) not in kinds:
        wanted = choice(dict.fromkeys(_KIND_NAMES[kind] for kind in kinds))
        raise DTypeError(f"{name} must have a {wanted} dtype, got {spec.dtype}; convert it")
    if like is not None and spec.device != like.device:
        raise DeviceError(
            f"{name} must be {_library_and_place(like)} like the other arrays, "
            f"got {_library_and_place(spec)}"
        )


_KIND_NAMES = {"b": "bool", "i": "integer", "u": "integer", "f": "float", "c": "complex"}


def choice(values):
    """Return "a, b or c"."""
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last


def _library_and_place(spec):
    return f"cupy on cuda:{spec.device}" if spec.on_gpu else "numpy on cpu"


def hint_of_order(shape, channels, wanted, others):
    """Return what an error about weights adds where their axes may be in another order.

    ``channels`` are those that they must have; ``wanted`` is an order as a letter for each axis, I
    of which is that of the channels; ``others`` has a name for each other order.
    """
    for name, order in others.items():
        if len(order) == len(shape) and shape[order.index("I")] == channels and order != wanted:
            axes = tuple(map(order.index, wanted))
            return f"; it fits if its axes are {name}: use transpose{axes} (permute in PyTorch)"
    return ""


PYTORCH_ORDERS = {"OIHW, as in PyTorch": "OIHW", "HWIO": "HWIO"}


def check_float(name, dtype):
    """Raise unless a dtype is one in which convolutions are computed."""
    if not is_float(dtype):
        raise DTypeError(
            f"{name} must be float16, bfloat16, float32 or float64, got {dtype}; convert it, for "
            "example to float32"
        )


def check_contiguous(name, spec):
    """Raise unless an array is C-contiguous."""
    spec = spec_of(spec)
    if not spec.contiguous:
        raise ShapeError(
            f"{name} must be C-contiguous, got shape {spec.shape} with strides {spec.strides}; "
            "call ascontiguousarray (or .contiguous()) first"
        )


def check_result(out, result):
    """Raise unless ``out``, if it is given, can receive a result: both are specs."""
    if out is None:
        return
    check_array("out", out, like=result)
    if out.shape != result.shape:
        raise ShapeError(f"out must have shape {result.shape}, got {out.shape}")
    if out.dtype != result.dtype:
        raise DTypeError(f"out must have dtype {result.dtype}, got {out.dtype}")
    check_contiguous("out", out)


def check_out(out, shape, dtype, like, inputs=()):
    """Raise unless the array ``out`` can receive a result and is apart from the named ``inputs``.

    For functions that are no operators: :func:`check_result`, then :func:`check_written`.
    """
    check_result(spec_of(out), spec_of(like).new(shape, dtype))
    inputs = list(inputs)
    check_written(out, [name for name, _ in inputs], [array for _, array in inputs])


def check_written(out, names, inputs):
    """Raise unless the array ``out`` is writable and shares no memory with the named inputs.

    Unlike the other checks this one takes arrays: it is made at each call.
    """
    if isinstance(out, np.ndarray):
        if not out.flags.writeable:
            raise ShapeError(
                "out must be writable, got a read-only array; JAX and TensorFlow arrays never "
                "are: use the returned array instead"
            )
        overlap = np.may_share_memory
    else:
        start = out.data.ptr
        end = start + out.nbytes
        for array in inputs:
            if array is not None:
                low = array.data.ptr
                if low < end and start < low + array.nbytes:
                    break
        else:
            return
        overlap = _overlap_on_gpu
    for name, array in zip(names, inputs, strict=True):
        if array is not None and overlap(out, array):
            raise ShapeError(f"out must not share memory with {name}; pass a separate array")


def _overlap_on_gpu(a, b):
    low, start = a.data.ptr, b.data.ptr
    return bool(a.nbytes and b.nbytes) and low < start + b.nbytes and start < low + a.nbytes
