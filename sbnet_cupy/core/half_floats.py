"""float16 and bfloat16 in NumPy, by operations on whole vectors.

NumPy converts halves one at a time, and knows bfloat16 only through ml_dtypes. Here the bits of a
half are moved up by 13, which makes them a float32 that is 2^-112 times the half: exactly, for the
subnormal ones too. Every result is NumPy's, bit by bit; pieces with numbers that need more care
(infinities, NaN, sums near overflow) are left to it.
"""

import numpy as np

from .arrays import compute_dtype, dtype_name

_PIECE = 1 << 17  # elements; the temporaries of a piece stay in the second-level cache
_DISTANCE = np.int32(13)
_MOVED_BITS = np.int32(0x8FFFE000 - 2**32)  # sign, exponent and fraction of a half that was moved
_LAST_AND_SIGN = np.int32(0x10000001)
_BELOW_HALF = np.int32(0xFFF)
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


def adder(dtype):
    """Return a function ``(total, values)`` that adds to a contiguous array, in place.

    Both are of the dtype and of one shape. 16-bit floats are added in float32 and rounded to their
    dtype. Rounding twice is as good as once, because float32's 24 bits are at least two times 11,
    and 2 more (Figueroa 1995).
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
    """Return a fresh float32 copy of a float array, or float64 where it is float64."""
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
    """Whether halves can be moved: not where bytes are swapped, or where a float32 of their size is
    0 to the processor, as some programs ask it to be.
    """
    return dtype.isnative and bool(_SMALLEST + _SMALLEST != 0)


def _all_below(halves, bits):
    """Whether all numbers are less in size than the half with these bits."""
    # As signed numbers, the positive ones come last; as unsigned ones, the negative ones do.
    return bool(
        np.maximum.reduce(halves.view(np.int16)) < bits
        and np.maximum.reduce(halves.view(np.uint16)) < 0x8000 + bits
    )


def _move(halves, bits):
    """Write finite halves, times 2^-112, as the bits of float32; return these."""
    bits[...] = halves.view(np.int16)
    bits <<= _DISTANCE
    bits &= _MOVED_BITS
    return bits.view(np.float32)


def _round(bits, added, halves):
    """Write the nearest halves, of two the even one: the inverse of :func:`_move`.

    ``bits`` is overwritten, and ``added``, of its size.
    """
    np.right_shift(bits, _DISTANCE, added)  # the last bit that stays down to bit 0, the sign to 28,
    added &= _LAST_AND_SIGN  # where the exponent ends, and the sign of a half will be
    bits += added
    bits += _BELOW_HALF
    bits >>= _DISTANCE
    halves.view(np.int16)[...] = bits
