"""Arrays at the door: which library they belong to, where they are, how they pass.

``@array_function`` lets a function written for NumPy and CuPy arrays take those of PyTorch, JAX,
TensorFlow and any other DLPack library, without a copy, on the caller's device and stream.
Inside such a function every array is native: ``numpy.ndarray`` or ``cupy.ndarray``.
"""

import ctypes
import functools
import inspect
import math
import sys
from typing import TypeVar

import numpy as np

from ..errors import DeviceError
from . import libraries

_ALIGNMENT = 64  # bytes; what JAX and TensorFlow need to share NumPy's memory
_address, _first_byte = ctypes.addressof, ctypes.c_char.from_buffer
_LIBRARY_OF_TYPE = {}
_Function = TypeVar("_Function")


class ArrayContainer:
    """Base of the classes that hold arrays and pass through the door with them."""

    copies_strided = False  # whether NumPy arrays in it are copied where they are not contiguous

    @property
    def _device(self):
        """Where the arrays are, as :func:`device_of_all` tells it."""
        return device_of_all(self._arrays())

    def _arrays(self):
        """Return the arrays held."""
        raise NotImplementedError

    def _map_arrays(self, function):
        """Return a copy with ``function`` applied to every array held."""
        raise NotImplementedError

    def __getstate__(self):
        """Return what ``copy`` and ``pickle`` take over: not what was found out of the arrays."""
        kind = type(self)
        return {
            name: value
            for name, value in vars(self).items()
            if not isinstance(getattr(kind, name, None), functools.cached_property)
        }


def library_of(value):
    """Return the array library that ``value`` belongs to, or None when it is not an array."""
    kind = type(value)
    try:
        return _LIBRARY_OF_TYPE[kind]
    except KeyError:
        return _LIBRARY_OF_TYPE.setdefault(kind, libraries.classify(kind))


def array_function(function: _Function, takes_strided=False) -> _Function:
    """Make a function of native arrays take and return the arrays of any library.

    NumPy arrays that are not C-contiguous are copied, but for ``out`` and what shares its memory;
    unless the function ``takes_strided`` arrays. Those of other libraries are left to the checks.
    """
    signature = inspect.signature(function)

    def run(*args, **kwargs):
        device = device_of_all((*args, *kwargs.values()))
        if device is _HOST or device is _NOWHERE or (
            device is not None and device == sys.modules["cupy"].cuda.runtime.getDevice()
        ):  # fmt: skip
            return function(*args, **kwargs)
        first = library = place = None
        for value in (*args, *kwargs.values()):
            found = library_of(value)
            if found is None:
                if not isinstance(value, _CONTAINERS):
                    continue
                if type(value) is tuple and value and type(value[0]) is int:
                    continue  # a size
                for array in _arrays_in(value):
                    if first is None:
                        first, library = array, library_of(array)
                        place = library.place(array)
                    elif library_of(array) is not library or library.place(array) != place:
                        return _with_native_mask(call, signature, args, kwargs)
            elif first is None:
                first, library = value, found
                place = library.place(value)
            elif found is not library or library.place(value) != place:
                return _with_native_mask(call, signature, args, kwargs)
        if library is None or library is libraries.NUMPY:
            if not takes_strided:
                args, kwargs = contiguous_inputs(args, kwargs)
            return function(*args, **kwargs)
        if library is libraries.CUPY:
            return _on_device(place, function, args, kwargs)
        return _through_door(library, first, function, signature, args, kwargs)

    @functools.wraps(function)
    def call(*args, **kwargs):
        if "torch._dynamo" in sys.modules and libraries.is_followed(function.__name__):
            return libraries.apart(run)(*args, **kwargs)
        return run(*args, **kwargs)

    return call


def contiguous_inputs(args, kwargs):
    """Copy the NumPy arrays that are not C-contiguous, but for ``out`` and what shares its memory.

    The checks refuse those: a copy would not be written, or would hide that the original is.
    """
    out = kwargs.get("out")
    native_out = library_of(out) is libraries.NUMPY

    def is_strided(array):
        return library_of(array) is libraries.NUMPY and not array.flags.c_contiguous

    def copied(array):
        if not is_strided(array) or (native_out and np.may_share_memory(out, array)):
            return array
        return np.ascontiguousarray(array)

    def mapped(value):
        looked_into = not isinstance(value, ArrayContainer) or value.copies_strided
        if looked_into and any(map(is_strided, _arrays_in(value))):
            return _map_value(value, copied)
        return value

    return [mapped(value) for value in args], {k: mapped(value) for k, value in kwargs.items()}


_CONTAINERS = (tuple, list, ArrayContainer)
_PLAIN = frozenset({type(None), bool, int, float, str})
_HOST, _NOWHERE = "host", "nowhere"


def device_of_all(values):
    """Return the device of the arrays among some arguments, if they are the usual ones.

    These are CuPy arrays on one device (its number), or C-contiguous NumPy arrays (``_HOST``),
    alone, in tuples and in containers; or no arrays (``_NOWHERE``). For anything else it is None.
    """
    device = _NOWHERE
    for value in values:
        kind = type(value)
        if kind in _PLAIN or (kind is tuple and value and type(value[0]) is int):
            continue
        if kind is np.ndarray:
            own = _HOST if value.flags.c_contiguous else None
        elif isinstance(value, ArrayContainer):
            own = value._device
        elif kind is tuple or kind is list:
            own = device_of_all(value)
        else:
            library = _LIBRARY_OF_TYPE.get(kind, libraries.DLPACK)
            if library is None:
                continue  # an option
            own = value.data.device_id if library is libraries.CUPY else None
        if own is None or (own is not device and device is not _NOWHERE and own != device):
            return None
        if own is not _NOWHERE:
            device = own
    return device


def _arrays_in(value):
    """Return the arrays in an argument: itself, or those of a container."""
    if library_of(value) is not None:
        return [value]
    if isinstance(value, ArrayContainer):
        return [array for item in value._arrays() for array in _arrays_in(item)]
    if isinstance(value, tuple | list):
        return [array for item in value for array in _arrays_in(item)]
    return []


def _map_value(value, function):
    """Return ``value`` with ``function`` applied to the arrays in it."""
    if library_of(value) is not None:
        return function(value)
    if isinstance(value, ArrayContainer):

        def inside(x):
            return function(x) if library_of(x) is not None else x

        inside.exports = getattr(function, "exports", False)
        return value._map_arrays(inside)
    if isinstance(value, tuple | list) and _arrays_in(value):
        items = [_map_value(item, function) for item in value]
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    return value


def _on_device(device, function, args, kwargs):
    """Call with CuPy arrays, on their device if it is not the current one."""
    cupy = sys.modules["cupy"]
    if device == cupy.cuda.runtime.getDevice():
        return function(*args, **kwargs)
    with cupy.cuda.Device(device):
        return function(*args, **kwargs)


def _through_door(library, first, function, signature, args, kwargs):
    """Import the arguments, call, and export the results."""
    bound = signature.bind(*args, **kwargs)
    originals, out = {}, bound.arguments.get("out")

    with library.stream(first):
        for name, value in bound.arguments.items():

            def enter(array, name=name):
                native = library.enter(array, name)
                originals[id(native)] = (native, array)
                return native

            bound.arguments[name] = _map_value(value, enter)

        def leave(native):
            if id(native) in originals:  # an argument comes back as the caller's own object
                return originals[id(native)][1]
            return library.leave(native, first)

        leave.exports = True  # what a container may have been made of already
        result = _map_value(function(*bound.args, **bound.kwargs), leave)
        library.finish([native for native, _ in originals.values()], out)
        return result


def _with_native_mask(call, signature, args, kwargs):
    """Call again with a mask of another library, beside native arrays of its device, as native.

    PyTorch's masks are so: its place names are those of native arrays. All else is an error. Layers
    of blocks take a mask as their indices; indices of sites are none.
    """
    bound = signature.bind(*args, **kwargs)
    names = ("indices", "mask") if "block_params" in signature.parameters else ("mask",)
    name = next((name for name in names if name in bound.arguments), None)
    mask = bound.arguments.get(name)
    library = library_of(mask)
    arrays = [a for key, v in bound.arguments.items() if key != name for a in _arrays_in(v)]
    if library is None or library.native or not all(library_of(a).native for a in arrays):
        raise _mixed(signature, args, kwargs)
    if {place_name(array) for array in arrays} != {place_name(mask)}:
        raise _mixed(signature, args, kwargs)
    if not is_cupy(arrays[0]):
        bound.arguments[name] = library.enter(mask, name)
        return call(*bound.args, **bound.kwargs)
    native = libraries.DLPACK.enter(mask, name)  # CuPy's current stream waits for the mask
    bound.arguments[name] = native
    try:
        return call(*bound.args, **bound.kwargs)
    finally:
        libraries.DLPACK.finish([native])


def _mixed(signature, args, kwargs):
    """Build the error for arguments of different libraries or devices."""
    places = []
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        for array in _arrays_in(value):
            place = place_name(array)
            if place == "traced":  # beside concrete arrays: the error that names the adapter
                library_of(array).enter(array, name)
            places.append(f"{name} is {library_of(array).name} on {place}")
    return DeviceError(
        "all arrays must belong to one library and be on one device: "
        + ", ".join(dict.fromkeys(places))  # a SparseTensor has several arrays
        + "; convert them first"
    )


def place_name(array):
    """Return where an array is, for messages."""
    place = library_of(array).place(array)
    return f"cuda:{place}" if is_cupy(array) else place


def is_cupy(array):
    """Whether a native array is CuPy's."""
    return type(array) is not np.ndarray and library_of(array) is libraries.CUPY


def namespace(array):
    """Return the module, numpy or cupy, that a native array belongs to."""
    if type(array) is np.ndarray or not is_cupy(array):
        return np
    return sys.modules["cupy"]


def empty(shape, dtype, like):
    """Allocate an array of the library of ``like``; NumPy memory is 64-byte aligned."""
    if type(like) is not np.ndarray and is_cupy(like):
        return sys.modules["cupy"].ndarray(shape, dtype)
    dtype = np.dtype(dtype)
    buffer = np.empty(math.prod(shape) * dtype.itemsize + _ALIGNMENT, np.uint8)
    # The address, at a quarter of what buffer.ctypes takes.
    return np.ndarray(shape, dtype, buffer, -_address(_first_byte(buffer)) % _ALIGNMENT)


def whole_pieces(nbytes):
    """Return the bytes that an allocation takes of memory for several: a multiple of 256."""
    return -(-nbytes // 256) * 256


def empties(like, *specs):
    """Allocate an array for each (shape, dtype), and None for None, of the library of ``like``.

    On a GPU they share an allocation, which takes the calling thread about as long as a launch.
    """
    if not is_cupy(like):
        return [spec and empty(*spec, like) for spec in specs]
    cupy, starts, total = sys.modules["cupy"], [], 0
    for spec in specs:
        starts.append(total)
        if spec is not None:
            total += whole_pieces(math.prod(spec[0]) * _itemsize(spec[1]))
    memory = cupy.cuda.alloc(total)
    return [
        spec and cupy.ndarray(*spec, memory + start)
        for spec, start in zip(specs, starts, strict=True)
    ]


@functools.lru_cache(256)
def _itemsize(dtype):
    return np.dtype(dtype).itemsize


def zeros(shape, dtype, like):
    """Allocate zeros likewise; on a GPU at a third of what CuPy's own take the calling thread."""
    out = empty(shape, dtype, like)
    if is_cupy(like):
        out.data.memset_async(0, out.nbytes)
    else:
        out.fill(0)
    return out


@functools.lru_cache(256)  # NumPy spells a name anew each time, which takes a microsecond
def dtype_name(dtype):
    """Return the usual name of a dtype: "float16", "bfloat16", "uint8"..."""
    return np.dtype(dtype).name


def is_float(dtype):
    """Whether a dtype is float16, bfloat16, float32 or float64."""
    return dtype_name(dtype) in ("float16", "bfloat16", "float32", "float64")


@functools.lru_cache(256)
def compute_dtype(dtype):
    """Return the dtype to accumulate in: float64 for float64, float32 for the smaller floats."""
    return np.dtype(np.float64 if dtype_name(dtype) == "float64" else np.float32)


def dtype_kind(dtype):
    """Return the NumPy kind letter of a dtype, with bfloat16 a float like the others."""
    return "f" if dtype_name(dtype) == "bfloat16" else dtype.kind


def address(array):
    """Address of the first element of a native array."""
    return array.data.ptr if is_cupy(array) else array.ctypes.data


def same_memory(a, b):
    """Whether two arrays of one library are the same elements in the same order."""
    return (
        type(a) is type(b)
        and (a.shape, a.dtype) == (b.shape, b.dtype)
        and address(a) == address(b)
    )


def vector_bytes(*multiples):
    """Return the widest access, up to 16 bytes, that divides every one of the byte counts."""
    combined = 16
    for value in multiples:
        combined = math.gcd(combined, value)
    return combined


def channels_last_view(x, channels_last):
    """View an image or stack as ``[..., C]`` whatever its layout."""
    return x if channels_last else x.transpose(0, 2, 3, 1)
