"""Vectorised arithmetic on float16 and bfloat16 in NumPy.

NumPy converts half floats one at a time, and supports bfloat16 only through ml_dtypes. Here the
bits of a half are shifted left by 13, which gives a float32 that is exactly 2^-112 times the half,
for subnormal numbers too. Every result has the same bits as NumPy's. Pieces with numbers that need
more care (infinities, NaN, sums near overflow) are left to NumPy.
"""

import numpy as np

from .arrays import compute_dtype, dtype_name

_PIECE = 1 << 17  # elements; the temporaries of a piece fit in the second-level cache
_DISTANCE = np.int32(13)
_MOVED_BITS = np.int32(0x8FFFE000 - 2**32)  # sign, exponent and fraction of a shifted half
_LAST_AND_SIGN = np.int32(0x10000001)
_BELOW_HALF = np.int32(0xFFF)
_UNSCALE = np.float32(2.0**112)
_SMALLEST = np.uint32(1).view(np.float32)
_INFINITY = {"float16": np.uint16(0x7C00), "bfloat16": np.uint16(0x7F80)}  # their bits


def greater_than(dtype, threshold):
    """Return a function ``(array, out)`` that writes ``array > threshold``.

    ``array`` has the float dtype ``dtype``, which can represent the threshold.
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
    # Non-negative floats are ordered like their bits: those above are in (threshold, infinity].
    first = abs(limit).view(np.uint16) + np.uint16(1)
    count = infinity - abs(limit).view(np.uint16)
    return lambda array, out: np.less(array.view(np.uint16) - first, count, out)


def adder(dtype):
    """Return a function ``(total, values)`` that adds ``values`` to a contiguous array in place.

    Both have this dtype and the same shape. 16-bit floats are added in float32 and rounded to their
    dtype. The result is as if rounded once, because float32's 24 bits are at least 2 * 11 + 2
    (Figueroa 1995).
    """
    name = dtype_name(dtype)
    if name == "bfloat16":
        return _add_wide
    if name != "float16" or not _moves(dtype):
        return lambda total, values: np.add(total, values, total)
    memory = np.empty((2, 0), np.int32)

    def add(total, values):
        nonlocal memory
        if total.size > memory.shape[1]:
            memory = np.empty((2, min(total.size, _PIECE)), np.int32)
        total, values = total.reshape(-1), values.reshape(-1)
        for piece in _pieces(total):
            _add_halves(total[piece], values[piece], memory)

    return add


def _add_wide(total, values):
    total[...] = (total.astype(np.float32) + values.astype(np.float32)).astype(total.dtype)


def _add_halves(a, b, memory):
    if not (_all_below(a, 0x7800) and _all_below(b, 0x7800)):
        np.add(a, b, a)
        return
    bits, others = memory[:, : len(a)]
    wide = _move(a, bits)
    wide += _move(b, others)
    _round(bits, others, a)


def widen(array):
    """Return a new float32 copy of a float array; float64 for float64."""
    if dtype_name(array.dtype) != "float16" or not _moves(array.dtype):
        return array.astype(compute_dtype(array.dtype))
    wide = np.empty(array.shape, np.float32)
    array, flat = np.ascontiguousarray(array).reshape(-1), wide.reshape(-1)
    for piece in _pieces(flat):
        if _all_below(array[piece], 0x7C00):
            wide_piece = flat[piece]
            _move(array[piece], wide_piece.view(np.int32))
            wide_piece *= _UNSCALE
        else:
            flat[piece] = array[piece]
    return wide


def _pieces(flat):
    return [slice(start, start + _PIECE) for start in range(0, len(flat), _PIECE)]


def _moves(dtype):
    """Whether half floats can be shifted into float32.

    Not if their bytes are swapped, or if the processor flushes small float32 numbers to 0, which
    some programs switch on.
    """
    return dtype.isnative and bool(_SMALLEST + _SMALLEST != 0)


def _all_below(halves, bits):
    """Whether all magnitudes are less than that of the half with these bits."""
    # The bits as signed integers have the positive halves last; as unsigned ones, the negative.
    return bool(
        np.maximum.reduce(halves.view(np.int16)) < bits
        and np.maximum.reduce(halves.view(np.uint16)) < 0x8000 + bits
    )


def _move(halves, bits):
    """Write finite halves times 2^-112 as the bits of float32; return them as float32."""
    bits[...] = halves.view(np.int16)
    bits <<= _DISTANCE
    bits &= _MOVED_BITS
    return bits.view(np.float32)


def _round(bits, added, halves):
    """Round to the nearest halves, ties to even, and write them: the inverse of :func:`_move`.

    ``bits`` and ``added``, which has the same size, are overwritten.
    """
    np.right_shift(bits, _DISTANCE, added)  # the last bit that stays down to bit 0, the sign to 28,
    added &= _LAST_AND_SIGN  # where the exponent ends, and the sign of a half will be
    bits += added
    bits += _BELOW_HALF
    bits >>= _DISTANCE
    halves.view(np.int16)[...] = bits
