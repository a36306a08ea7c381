"""Whether the contents of an array can be read now, as ``repr`` of a container would like to."""

import sys

from .arrays import library_of


def can_be_read(array):
    """Whether an array's contents are there to be read: not while tracing or capturing."""
    library = library_of(array)
    if library is None:  # a framework builds containers of stand-ins
        return False
    if library.name == "torch":
        torch = sys.modules["torch"]
        capturing = array.is_cuda and torch.cuda.is_current_stream_capturing()
        return type(array) is torch.Tensor and not (capturing or torch.compiler.is_compiling())
    if library.name == "jax":
        return not (isinstance(array, sys.modules["jax"].core.Tracer) or array.is_deleted())
    if library.name == "cupy":
        return not sys.modules["cupy"].cuda.get_current_stream().is_capturing()
    return library.place(array) != "traced"


def is_readable_int32(array, ndim):
    """Whether ``int32`` numbers with so many axes can be read from an array, or a stand-in."""
    if not can_be_read(array) or len(array.shape) != ndim:
        return False
    return dtype_name(array) == "int32"


def dtype_name(array):
    """Return the name of an array's element type, as "float32" in every library."""
    return getattr(array.dtype, "name", str(array.dtype)).removeprefix("torch.")


def shape_of(array):
    """Return the shape of an array as a text, or the name of its type where it has none."""
    shape = getattr(array, "shape", None)
    if isinstance(shape, tuple):  # torch.Size is one
        return str(tuple(shape))
    return type(array).__name__ if shape is None else str(shape)


def is_on_host(array):
    """Whether an array's contents can be read now, and without waiting for a device."""
    return can_be_read(array) and place_of(array) == "cpu"


def place_of(array):
    """Return the device of an array as a text; "" of what is none, or is nowhere."""
    library = library_of(array)
    if library is None or (library.name == "jax" and not can_be_read(array)):
        return ""
    place = library.place(array)
    return f"cuda:{place}" if library.name == "cupy" else str(place)


def describe_array(array):
    """Return the dtype, shape and device of an array as a text; nothing of it is read."""
    if library_of(array) is None:
        return shape_of(array)
    place = place_of(array)
    return f"{dtype_name(array)} {shape_of(array)}" + (f" on {place}" if place else "")
