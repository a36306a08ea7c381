"""float16 and bfloat16 arithmetic through float32, a vector of numbers at a time."""

import numpy as np

from .._arrays import compute_dtype


def widen(array):
    """Return a float array as fresh float32, or float64 where it is float64."""
    return array.astype(compute_dtype(array.dtype))


def narrow(wide, dtype):
    """Round what :func:`widen` returned, and was computed with, to ``dtype``."""
    return wide.astype(dtype, copy=False)


def add_rounded(a, b):
    """Return ``a + b`` in their common dtype."""
    return a + b
