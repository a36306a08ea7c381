"""Arrays in the byte order of another machine, such as the big-endian ones of FITS files.

Functions that only move or compare elements take them. Where one must have the dtype of another
array, dtypes that differ in this alone are told apart here, and the message says what to convert.
"""

from ..errors import DTypeError


def check_byte_order(arrays):
    """Raise DTypeError for the first of the named arrays in a byte order that is not native."""
    for name, array in arrays.items():
        if not array.dtype.isnative:
            order = {">": "big-endian", "<": "little-endian"}[array.dtype.byteorder]
            raise DTypeError(
                f"{name} must be in this machine's byte order, got a {order} array; pass "
                f"{name}.astype({name}.dtype.newbyteorder('='))"
            )


def check_byte_orders(arrays):
    """Raise likewise, unless none of the named arrays is in the native byte order."""
    if any(array.dtype.isnative for array in arrays.values()):
        check_byte_order(arrays)
