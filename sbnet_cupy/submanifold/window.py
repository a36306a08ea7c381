"""Window: kernel, stride, dilation and padding, as arguments say them; shapes of grids."""

import itertools
import math
from typing import NamedTuple

import numpy as np

from ..core.sizes import is_integer
from ..errors import ShapeError

_MOST_TAPS = 2**20


class Window(NamedTuple):
    """Kernel, stride, dilation and padding along each axis; in the key of a kept map."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...]

    def axes(self):
        """Return (kernel, stride, dilation, padding) of each axis."""
        return list(zip(*self, strict=True))

    def is_symmetric(self):
        """Whether a place reads those that read it, at the same distance the other way."""
        return all(s == 1 and 2 * pad == (k - 1) * dil for k, s, dil, pad in self.axes())

    def offsets(self):
        """Return where each tap reads, from the beginning of the window on."""
        steps = zip(self.kernel, self.dilation, strict=True)
        return list(itertools.product(*(range(0, k * dilation, dilation) for k, dilation in steps)))


def coarse_shape(shape, window):
    """Return the shape of the grid of a convolution's result; None for None."""
    return shape and tuple(
        max((n + 2 * pad - dil * (k - 1) - 1) // s + 1, 0)
        for n, (k, s, dil, pad) in zip(shape, window.axes(), strict=True)
    )


def fine_shape(shape, window, output_padding):
    """Return the shape of the grid of a transposed convolution's result; None for None."""
    return shape and tuple(
        max((n - 1) * s - 2 * pad + dil * (k - 1) + 1 + more, 0)
        for n, more, (k, s, dil, pad) in zip(shape, output_padding, window.axes(), strict=True)
    )


def read_window(
    coordinates, onto, kernel_size, stride, dilation, padding, transposed, output_padding
):
    """Return the Window and the output padding that arguments of kernel_map say, or raise."""
    d = coordinates.dimensions
    if kernel_size is None:
        raise ShapeError("kernel_size must be given unless offsets are, got None")
    kernel = axes(kernel_size, d, "kernel_size")
    if math.prod(kernel) > _MOST_TAPS:
        raise ShapeError(
            f"kernel_size must have at most {_MOST_TAPS} cells, each a row of the map's table, got "
            f"{kernel}; use a smaller kernel, or one with a dilation"
        )
    stride, dilation = axes(stride, d, "stride"), axes(dilation, d, "dilation")
    output_padding = axes(output_padding, d, "output_padding", minimum=0)
    if padding is None:
        centre = tuple(k // 2 * dil for k, dil in zip(kernel, dilation, strict=True))
        padding = centre if onto is coordinates else 0
    padding = axes(padding, d, "padding", minimum=0)
    if any(output_padding) and (not transposed or onto is not None):
        raise ValueError(
            f"output_padding must be 0 unless transposed is True, with no onto, got "
            f"{output_padding}"
        )
    if onto is not None and onto.dimensions != d:
        raise ShapeError(f"onto must have the {d} dimensions of coordinates, got {onto.dimensions}")
    return Window(kernel, stride, dilation, padding), output_padding


def read_offsets(
    coordinates, onto, offsets, kernel_size, stride, dilation, padding, transposed, output_padding
):
    """Return the offsets of a map on the same sites, int64 ``[taps, d]``, or raise."""
    ones = all(is_integer(step) and step == 1 for step in (stride, dilation))
    none = kernel_size is None and padding is None
    if not (ones and none) or transposed or not is_integer(output_padding) or output_padding:
        raise ValueError(
            "offsets must not be given with kernel_size, stride, dilation, padding, transposed or "
            "output_padding"
        )
    if onto not in (None, coordinates):
        raise ValueError("onto must be coordinates, or None, where offsets are given")
    d = coordinates.dimensions
    try:
        given = np.asarray(offsets)
    except ValueError:  # of rows that differ in length
        raise ShapeError(f"offsets must be rows of {d} integers, got {offsets!r}") from None
    if given.ndim and not len(given):
        raise ShapeError(
            "offsets must have at least one row, got none; pass the offset 0 for the site itself "
            "alone"
        )
    if given.ndim != 2 or given.shape[1] != d or given.dtype.kind not in "iu":
        raise ShapeError(
            f"offsets must be integers of shape (taps, {d}), got {given.dtype} of shape "
            f"{given.shape}"
        )
    if not -(2**31) <= int(given.min()) <= int(given.max()) < 2**31:
        raise ShapeError(
            f"offsets must be numbers of 32 bits, got {int(given.min())} to {int(given.max())}"
        )
    return given.astype(np.int64)


def axes(value, dimensions, name, minimum=1):
    """Read an int or one for each axis as a tuple, or raise ShapeError."""
    if type(value) is int and minimum <= value < 2**31:
        return (value,) * dimensions
    given = value
    value = (value,) * dimensions if is_integer(value) else value
    if (
        isinstance(value, tuple | list)
        and len(value) == dimensions
        and all(is_integer(v) and minimum <= v < 2**31 for v in value)
    ):
        return tuple(map(int, value))
    kind = "positive" if minimum else "non-negative"
    hint = f"; use {name}.tolist()" if getattr(given, "shape", ()) else ""
    raise ShapeError(
        f"{name} must be a {kind} integer below 2**31, or {dimensions} of them in a tuple, got "
        f"{given!r}{hint}"
    )
