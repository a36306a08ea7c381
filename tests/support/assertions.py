"""Comparisons that raise: library, shape, dtype, device and every bit, or a derived tolerance.

NaN never passes by accident, no shape broadcasts, and nothing returns a boolean to drop.
"""

import numpy as np


def assert_same(actual, expected, *, allow_nan=False, signed_zero=True):
    """Assert that two arrays are the same to the bit, in the same library and on the same device.

    ``allow_nan`` lets NaN be compared by its bits; ``signed_zero=False`` lets -0 equal +0.
    """
    _assert_same_kind(actual, expected)
    a, e = to_numpy(actual), to_numpy(expected)
    if not allow_nan:
        _assert_no_nan(a, e)
    same = _same_bits(a, e)
    if not signed_zero:
        same |= (a == 0) & (e == 0)
    if not same.all():
        raise AssertionError(_first_difference(a, e, ~same))


def assert_close(actual, expected, *, terms, dtype, magnitude=None):
    """Assert that ``actual`` is a sum of ``terms`` products, computed in ``dtype``, then rounded.

    With unit roundoff u = eps(dtype) / 2 the error of such a sum, in any order of summation, is to
    first order at most ``(terms + 1) * u * sum|products|`` (Higham 2002, section 3.1; the one more
    is for the products themselves); rounding it to the dtype of ``actual`` adds one more roundoff.
    ``magnitude`` is that sum|products|, an array or a number; without it the largest absolute
    expected value stands in. ``expected`` is a NumPy array of a wider dtype, or an array of the
    library of ``actual``. Infinities must be equal.
    """
    if type(expected) is not np.ndarray:
        assert_same_library(actual, expected)
    a, e = to_numpy(actual), to_numpy(expected)
    if a.shape != e.shape:
        raise AssertionError(f"shape {a.shape}, expected {e.shape}")
    _assert_no_nan(a, e)
    sum_unit, out_unit = epsilon(dtype) / 2, epsilon(a.dtype) / 2
    tiny = smallest_subnormal(a.dtype)
    a, e = a.astype(np.float64), e.astype(np.float64)
    finite = np.isfinite(a) & np.isfinite(e)
    size = np.abs(np.where(finite, e, 0))
    scale = size.max(initial=0) if magnitude is None else np.asarray(magnitude, np.float64)
    bound = (terms + 1) * sum_unit * scale
    bound = np.broadcast_to(bound + out_unit * (size + bound) + tiny, e.shape)
    error = np.abs(np.where(finite, a, 0) - np.where(finite, e, 0))
    wrong = np.where(finite, ~(error <= bound), a != e)
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise AssertionError(
            f"{wrong.sum()} of {wrong.size} beyond the bound; first at {at}: "
            f"{a[at]!r}, expected {e[at]!r} +- {bound[at]:.3g}"
        )


def assert_same_library(actual, expected):
    """Assert that two arrays belong to the same library and device."""
    for name, read in (("library", library), ("device", device)):
        a, e = read(actual), read(expected)
        if a != e:
            raise AssertionError(f"{name} {a}, expected {e}")


def library(array):
    """Name of the library that an array belongs to; a Python list or number has none and raises."""
    if not hasattr(array, "dtype") or isinstance(array, np.generic):
        raise AssertionError(f"expected an array, got {type(array).__name__}")
    return type(array).__module__.split(".")[0]


def device(array):
    """Where an array lives, as text."""
    if library(array) == "numpy":
        return "cpu"
    return str(array.device)


def to_numpy(array):
    """Copy an array of any library to NumPy, dtype and bits unchanged."""
    name = library(array)
    if name == "numpy":
        return array
    if name == "cupy":
        return array.get()
    if name == "torch":
        import torch

        if array.dtype == torch.bfloat16:
            import ml_dtypes

            return array.detach().cpu().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return array.detach().cpu().numpy()
    return np.asarray(array)  # JAX, TensorFlow


def epsilon(dtype):
    """Distance from 1 to the next float of ``dtype``."""
    dtype = np.dtype(dtype)
    if dtype.name == "bfloat16":
        return 2.0**-7
    return float(np.finfo(dtype).eps)


def smallest_subnormal(dtype):
    """Smallest positive float of ``dtype``."""
    dtype = np.dtype(dtype)
    if dtype.name == "bfloat16":
        return 2.0**-133
    return float(np.finfo(dtype).smallest_subnormal)


def _assert_same_kind(actual, expected):
    assert_same_library(actual, expected)
    for name in ("shape", "dtype"):
        a, e = getattr(actual, name), getattr(expected, name)
        if a != e:
            raise AssertionError(f"{name} {a}, expected {e}")


def _assert_no_nan(actual, expected):
    for name, array in (("actual", actual), ("expected", expected)):
        if array.dtype.kind in "fcV" and (array != array).any():
            raise AssertionError(f"{name} holds NaN")


def _same_bits(actual, expected):
    def raw(array):
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return flat.reshape(*array.shape, array.dtype.itemsize)

    return (raw(actual) == raw(expected)).all(axis=-1)


def _first_difference(actual, expected, wrong):
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    return (
        f"{wrong.sum()} of {wrong.size} elements differ; first at {at}: "
        f"{actual[at]!r}, expected {expected[at]!r}"
    )
