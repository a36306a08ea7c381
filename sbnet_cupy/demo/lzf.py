"""Decompress LZF, the compression of PCD files.

The data is a sequence of two kinds of runs. A byte below 32 says how many bytes, less one, follow
as they are. Any other byte starts a copy from what has been decompressed: its upper three bits are
the length less two, to which a further byte is added when they are all set; its lower five bits and
the next byte are how far back the copy starts, less one. A copy may overlap its own result.

Source: M. Lehmann, LibLZF, the format of ``lzf_d.c``.
"""

from .inputs import DemoError

_LITERAL = 32
_LONG = 7


def decompress(data, size):
    """Return the ``size`` bytes that ``data`` decompresses to, or raise DemoError."""
    result, position = bytearray(), 0
    try:
        while position < len(data):
            control = data[position]
            position += 1
            if control < _LITERAL:
                run = data[position : position + control + 1]
                position += control + 1
                result += run
            else:
                length, position = _length(data, control >> 5, position)
                start = len(result) - ((control & 31) << 8) - data[position] - 1
                position += 1
                if start < 0:
                    raise IndexError
                _copy(result, start, length)
            if len(result) > size:
                break
    except IndexError:  # a run reaches past the data, or a copy starts before it
        raise DemoError("must hold LZF data, got damaged data") from None
    if len(result) != size:
        raise DemoError(f"must hold {size} bytes of LZF data, got {len(result)}")
    return bytes(result)


def _length(data, code, position):
    if code == _LONG:
        return code + data[position] + 2, position + 1
    return code + 2, position


def _copy(result, start, length):
    """Append ``length`` bytes from ``start``; repeat them where they reach the end."""
    piece = result[start : start + length]
    if len(piece) < length:
        piece = (piece * (length // len(piece) + 1))[:length]
    result += piece
