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
    return type(array).__name__ if shape is None else str(shape)
