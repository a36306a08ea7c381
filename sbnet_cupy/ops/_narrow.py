"""float16 and bfloat16 in NumPy, by operations on whole vectors.

NumPy converts halves one at a time, and knows bfloat16 only through ml_dtypes. Here the bits of a
half are moved up by 13, which makes them a float32 that is 2^-112 times the half: exactly, for the
subnormal ones too. Every result is NumPy's, bit by bit; pieces with numbers that need more care
(infinities, NaN, sums near overflow) are left to it.
"""

import numpy as np

from .._arrays import compute_dtype, dtype_name

_PIECE = 1 << 17  # elements; the temporaries of a piece stay in the second-level cache
_MOVED_BITS = np.int32(0x8FFFE000 - 2**32)  # sign, exponent and fraction of a half that was moved
_UNSCALE = np.float32(2.0**112)
_SMALLEST = np.uint32(1).view(np.float32)
_INFINITY = {"float16": np.uint16(0x7C00), "bfloat16": np.uint16(0x7F80)}  # their bits


def greater_than(dtype, threshold):
    """Return a function ``(array, out)`` that writes ``array > threshold``.

    ``array`` is of the float dtype, which can hold the threshold.
    """
    limit = np.asarray(threshold).astype(dtype)
    infinity = _INFINITY.get(dtype_name(dtype)) if dtype.isnative else None
    if infinity is None:
        return lambda array, out: np.greater(array, limit, out)
    if threshold < 0:

        def greater(array, out):
            with np.errstate(invalid="ignore"):  # NaN is not above any threshold
                np.greater(array, limit, out)

        return greater
    # From 0 on, floats are in the order of their bits: those above are in (threshold, infinity].
    first = abs(limit).view(np.uint16) + np.uint16(1)
    count = infinity - abs(limit).view(np.uint16)
    return lambda array, out: np.less(array.view(np.uint16) - first, count, out)


def add_rounded(a, b):
    """Return ``a + b`` for two arrays of one shape and dtype.

    16-bit floats are added in float32 and rounded to their dtype. Rounding twice is as good as
    once, because float32's 24 bits are at least two times 11, and 2 more (Figueroa 1995).
    """
    name = dtype_name(a.dtype)
    if name == "bfloat16":
        return (a.astype(np.float32) + b.astype(np.float32)).astype(a.dtype)
    if name != "float16" or _flushes_subnormals():
        return a + b
    total = np.empty(a.shape, a.dtype)
    a, b, flat = np.ascontiguousarray(a).reshape(-1), b.reshape(-1), total.reshape(-1)
    for piece in _pieces(flat):
        if _all_below(a[piece], 0x7800) and _all_below(b[piece], 0x7800):
            wide = _moved(a[piece])
            wide += _moved(b[piece])
            flat[piece] = _rounded(wide.view(np.int32))
        else:
            np.add(a[piece], b[piece], out=flat[piece])
    return total


def widen(array):
    """Return a fresh float32 copy of a float array, or float64 where it is float64."""
    if dtype_name(array.dtype) != "float16" or _flushes_subnormals():
        return array.astype(compute_dtype(array.dtype))
    wide = np.empty(array.shape, np.float32)
    array, flat = np.ascontiguousarray(array).reshape(-1), wide.reshape(-1)
    for piece in _pieces(flat):
        if _all_below(array[piece], 0x7C00):
            np.multiply(_moved(array[piece]), _UNSCALE, out=flat[piece])
        else:
            flat[piece] = array[piece]
    return wide


def _pieces(flat):
    return [slice(start, start + _PIECE) for start in range(0, len(flat), _PIECE)]


def _flushes_subnormals():
    """Whether this thread's processor takes subnormal float32 for 0, as some programs ask it to."""
    return _SMALLEST + _SMALLEST == 0


def _all_below(halves, bits):
    """Whether all numbers are less in size than the half with these bits."""
    bits_without_sign = halves.view(np.uint16) << 1
    return int(np.maximum.reduce(bits_without_sign)) < 2 * bits


def _moved(halves):
    """Return finite halves, times 2^-112, as float32."""
    bits = halves.view(np.int16).astype(np.int32)
    bits <<= 13
    bits &= _MOVED_BITS
    return bits.view(np.float32)


def _rounded(bits):
    """Round to the nearest halves, of two the even one, the inverse of :func:`_moved`, in place."""
    added = bits >> 13  # brings the last bit that stays down to bit 0, the sign to bit 28 too
    added &= 0x10000001  # where the exponent ends, and the sign of a half will be
    bits += added
    bits += 0xFFF
    bits >>= 13
    return bits.astype(np.int16).view(np.float16)
