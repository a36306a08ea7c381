"""Tensor maps: descriptions of arrays from which the copy engine of a GPU brings boxes."""

import ctypes
import functools
from typing import NamedTuple

from .device import driver

AXES = 3
_BYTES, _ALIGNMENT = 128, 64  # of a CUtensorMap
# Of the driver's enumerations: integers of 2 and 4 bytes, which are copied as they are; the
# 128-byte swizzle; sectors of 256 bytes in the second-level cache; zeros outside of the array.
_TYPES = {2: 1, 4: 2}
_SWIZZLE_128, _PROMOTE_256 = 3, 3


class TensorMap(NamedTuple):
    """An array of three axes in global memory, innermost first, and the size of a box of it.

    A row of a box has at most 128 bytes; ``strides`` are multiples of 16 bytes, and so is the
    array's address. ``array`` says which of a launch's arrays it is.
    """

    array: int
    itemsize: int  # bytes of an element: 2 or 4
    sizes: tuple[int, int, int]  # elements
    strides: tuple[int, int]  # bytes, of the second and the third axis
    box: tuple[int, int, int]  # elements


@functools.lru_cache(maxsize=4096)
def encode(tensor_map, address):
    """Return the driver's description of the array at an address; a launch copies its bytes."""
    room = ctypes.create_string_buffer(_BYTES + _ALIGNMENT)
    begin = -ctypes.addressof(room) % _ALIGNMENT
    made = (ctypes.c_char * _BYTES).from_buffer(room, begin)
    status = driver().cuTensorMapEncodeTiled(
        made,
        _TYPES[tensor_map.itemsize],
        AXES,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * AXES)(*tensor_map.sizes),
        (ctypes.c_uint64 * (AXES - 1))(*tensor_map.strides),
        (ctypes.c_uint32 * AXES)(*tensor_map.box),
        (ctypes.c_uint32 * AXES)(*(1,) * AXES),
        0,
        _SWIZZLE_128,
        _PROMOTE_256,
        0,
    )
    if status:
        raise RuntimeError(f"cuTensorMapEncodeTiled failed with CUresult {status}: {tensor_map}")
    return made
