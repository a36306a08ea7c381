"""Sizes as users write them, and the size of a convolution's output. Integers only, no arrays."""

from numbers import Integral

import numpy as np

from ..errors import ShapeError


def is_integer(value):
    """Whether ``value`` is a whole number of an integer type; bool is not one."""
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def _plain(value):
    """Return NumPy's integers as int; others, which may be symbolic in a trace, as they are."""
    return int(value) if isinstance(value, np.integer) else value


def pair(value, name, *, minimum=1):
    """Read an int, a pair or TensorFlow's ``[1, h, w, 1]`` as ``(h, w)``, or raise ShapeError."""
    if (
        type(value) is tuple
        and len(value) == 2
        and type(value[0]) is type(value[1]) is int
        and (minimum is None or (value[0] >= minimum and value[1] >= minimum))
    ):
        return value  # the usual case, at once
    given = value
    if is_integer(value):
        value = (value, value)
    elif isinstance(value, (list, tuple)) and len(value) == 4 and value[0] == 1 == value[3]:
        value = value[1:3]
    if (
        isinstance(value, (list, tuple))
        and len(value) == 2
        and all(is_integer(v) for v in value)
        and (minimum is None or min(value) >= minimum)
    ):
        return _plain(value[0]), _plain(value[1])
    kind = {1: "a positive integer", 0: "a non-negative integer", None: "an integer"}[minimum]
    raise ShapeError(f"{name} must be {kind} or a pair of them, got {given!r}{hint_for(given)}")


def hint_for(value):
    """Return what to give in place of an array, which may be symbolic in a trace."""
    return "; give Python integers, as static arguments in jit" if hasattr(value, "shape") else ""


def kernel_pair(ksize, name="ksize"):
    """Read an int, a pair or ``[kh, kw, cin, cout]`` as ``(kh, kw)``, or raise ShapeError."""
    if isinstance(ksize, (list, tuple)) and len(ksize) == 4 and all(is_integer(v) for v in ksize):
        return pair(tuple(ksize[:2]), name)
    return pair(ksize, name)


def image_size(in_size):
    """Read ``(N, H, W, C)`` or ``(H, W)`` as ``(H, W)``, or raise ShapeError."""
    if (
        isinstance(in_size, (list, tuple))
        and len(in_size) in (2, 4)
        and all(is_integer(v) and v >= 0 for v in in_size)
    ):
        h, w = in_size if len(in_size) == 2 else in_size[1:3]
        return _plain(h), _plain(w)
    raise ShapeError(f"in_size must be (N, H, W, C) or (H, W), non-negative, got {in_size!r}")


def padding_pairs(in_hw, ksize, strides, padding):
    """Resolve padding to ``((top, bottom), (left, right))``.

    It is "SAME" or "VALID", also in lower case; an int for all four sides; a pair of ints, for the
    rows and the columns; or the four numbers.
    """
    name = padding if isinstance(padding, str) else None
    if name in ("VALID", "valid"):
        return (0, 0), (0, 0)
    if name in ("SAME", "same"):
        totals = [
            max((-(-n // s) - 1) * s + k - n, 0) if n else 0
            for n, k, s in zip(in_hw, ksize, strides, strict=True)
        ]
        return tuple((total // 2, total - total // 2) for total in totals)
    if is_integer(padding):
        padding = (padding, padding)
    if isinstance(padding, (list, tuple)) and len(padding) == 2:
        return tuple(pair(axis, "padding", minimum=0) for axis in padding)
    raise ShapeError(
        "padding must be 'SAME', 'VALID', an int, (int, int) or ((top, bottom), (left, right)), "
        f"got {padding!r}"
    )


def output_size(in_hw, ksize, strides, padding):
    """Size ``(H', W')`` of the convolution's output; 0 where the kernel does not fit."""
    pads = padding_pairs(in_hw, ksize, strides, padding)
    return tuple(
        max((n + before + after - k) // s + 1, 0)
        for n, k, s, (before, after) in zip(in_hw, ksize, strides, pads, strict=True)
    )
