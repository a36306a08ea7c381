"""PackedWeights: the weights of a convolution, laid out once for many calls."""

import functools
import math
from functools import partial

import numpy as np

from ..core.arrays import array_function, compute_dtype
from ..core.checks import check_array, check_float
from ..core.packed import Packed
from ..core.readable import describe_array
from ..core.spec import spec_of
from ..errors import ShapeError
from .conv2d import check_choice, check_per_channel, check_precision


class PackedWeights(Packed):
    r"""Weights of a convolution, with the scale and bias after it, packed once for many calls.

    For :func:`fused_conv` and the layers made of it, and for convolutions at sites.

    They are packed when a call first needs them and kept, in a form that suits the device. After
    the arrays were changed in place call :meth:`refresh`; until then results are those of the old
    weights, or, where a call is the first of its kind, of the new ones.

    Parameters
    ----------
    w : array, shape (R, S, C, K), or (K, C, R, S) with ``w_format="OIHW"``
        Kernel; float16, bfloat16, float32 or float64. Referred to, not copied. For convolutions at
        sites, (\*kernel_size, C / groups, K).
    scale, bias : float array, shape (K,), optional
        Factor and offset per output channel, for example a folded batch norm.
    w_format : "HWIO" or "OIHW"
        Layout of ``w``.
    precision : None, "ieee" or "tf32"
        How float32 is multiplied, as for :func:`conv2d`.

    Raises
    ------
    ShapeError
        If ``w`` has fewer than three dimensions, or with "OIHW" not four, or ``scale`` or ``bias``
        not one value per channel.
    DTypeError
        If a dtype is not floating.

    Examples
    --------
    >>> weights = PackedWeights(np.ones((3, 3, 2, 4), np.float32), bias=np.ones(4, np.float32))
    >>> weights
    PackedWeights: float32 (3, 3, 2, 4) on cpu, HWIO, precision None, with bias
    """

    def __init__(self, w, *, scale=None, bias=None, w_format="HWIO", precision=None):
        super().__init__()
        _check_arrays(w, scale, bias, w_format, precision)
        self.w, self.scale, self.bias = w, scale, bias
        self.w_format, self.precision = w_format, precision

    @classmethod
    def of(cls, arrays, w_format="HWIO", precision=None, forms=()):
        """Return weights of w, scale and bias, or of what stands for them, unchecked.

        ``forms`` are pairs of what names a form, and what was packed of these weights in it.
        """
        made = object.__new__(cls)
        Packed.__init__(made)
        made.w, made.scale, made.bias = arrays
        made.w_format, made.precision = w_format, precision
        for how, packed in forms:
            made.keep(how, packed)
        return made

    def __repr__(self):
        """Tell the array, the layout and what comes after the convolution; nothing is read."""
        after = [name for name in ("scale", "bias") if getattr(self, name) is not None]
        return (
            f"PackedWeights: {describe_array(self.w)}, {self.w_format}, precision "
            f"{self.precision}" + (f", with {' and '.join(after)}" if after else "")
        )

    @functools.cached_property
    def kernel_size(self):
        """Sizes of all axes of ``w`` but the last two, as plain integers."""
        return tuple(map(int, self.w.shape[:-2]))

    def _given(self):
        return self.w, self.scale, self.bias

    def _entered_with(self, function):
        w, scale, bias = map(function, self._given())
        options = {"w_format": self.w_format, "precision": self.precision}
        return PackedWeights(w, scale=scale, bias=bias, **options)

    def plain(self):
        """Return w (HWIO), scale and bias in the dtype to compute in, for NumPy."""
        return self.packed("plain", partial(plain_weights, w_format=self.w_format))

    def copied(self):
        """Return copies of w, scale and bias, for array operations."""
        return self.packed("copied", _copied)


def _copied(w, scale, bias, copies=None):
    """Return copies of arrays, or fill ``copies``."""
    arrays = (w, scale, bias)
    if copies is not None:
        return _filled(copies, arrays)
    return tuple(array if array is None else array.copy() for array in arrays)


def plain_weights(w, scale, bias, copies=None, *, w_format):
    """Return w (HWIO), scale and bias in the dtype to compute in, for NumPy, or fill ``copies``."""
    if w_format != "HWIO":
        w = w.transpose(tuple(map(w_format.index, "HWIO")))
    if copies is not None:
        return _filled(copies, (w, scale, bias))
    plain = partial(np.array, dtype=compute_dtype(w.dtype), order="C")
    return plain(w), scale if scale is None else plain(scale), bias if bias is None else plain(bias)


def _filled(copies, arrays):
    """Write the values of arrays to their copies; return these."""
    for copy, array in zip(copies, arrays, strict=True):
        if copy is not None:
            copy[...] = array
    return copies


def arrays_of_weights(w, scale, bias, w_format, precision):
    """Return w, scale, bias, w_format and precision: those of a PackedWeights, or else as given.

    What stands beside a PackedWeights must not contradict it.
    """
    if not isinstance(w, PackedWeights):
        return w, scale, bias, w_format, precision
    for name, value in (("scale", scale), ("bias", bias)):
        if value is not None:
            raise ValueError(f"{name} must be None where w is a PackedWeights; pass it to that one")
    if w_format != "HWIO" and w_format != w.w_format:
        raise _contradiction("w_format", w.w_format, w_format)
    if precision is not None and precision != w.precision:
        raise _contradiction("precision", w.precision, precision)
    return w.w, w.scale, w.bias, w.w_format, w.precision


def steps_of_weights(w_format, *sizes):
    """Return the steps of a kernel along H, W, I and O, whose ``sizes`` are given, in elements."""
    size_of = dict(zip("HWIO", sizes, strict=True))
    inner = {letter: w_format[i + 1 :] for i, letter in enumerate(w_format)}
    return tuple(math.prod(map(size_of.get, inner[letter])) for letter in "HWIO")


def _contradiction(name, own, given):
    return ValueError(f"{name} must be {own!r}, that of the PackedWeights w, got {given!r}")


@partial(array_function, takes_strided=True)
def _check_arrays(w, scale, bias, w_format, precision):
    """Check weights that are arrays of any library, of a kernel of any number of axes."""
    w, scale, bias = map(spec_of, (w, scale, bias))
    check_array("w", w)
    if w_format == "HWIO" and w.ndim != 4:
        if w.ndim < 3:
            raise ShapeError(f"w must have shape (*kernel_size, C, K), got {w.shape}")
        _check_values(w, scale, bias, w.shape[-1], precision)
    else:
        check_weights(w, scale, bias, w_format, precision)


def check_weights(w, scale, bias, w_format, precision=None):
    """Check weights of a kernel of two axes, which are specs, and their options."""
    check_choice("w_format", w_format, ("HWIO", "OIHW"))
    check_array("w", w, ndim=4)
    _check_values(w, scale, bias, w.shape[w_format.index("O")], precision)


def _check_values(w, scale, bias, channels, precision):
    """Check what does not depend on the layout of the weights."""
    check_precision(precision)
    check_float("w", w.dtype)
    check_per_channel(scale, bias, channels, like=w)
