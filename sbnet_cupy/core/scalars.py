"""Numbers that are options, as users write them."""

from numbers import Real

import numpy as np

from ..errors import DTypeError


def as_number(name, value, *, nan=True, hint=""):
    """Return an option that is a number, or an array of no axes that holds one, as a float.

    Raise for anything else, and for NaN unless ``nan`` allows it; ``hint`` says what to do then.
    """
    number = value if type(value) is float else _float(name, value)
    if not nan and number != number:
        raise ValueError(f"{name} must not be NaN, got nan{hint}")
    return number


def _float(name, value):
    number = _held_by(name, value) if getattr(value, "shape", None) == () else value
    if not isinstance(number, Real):
        raise DTypeError(f"{name} must be a number, got {value!r}")
    try:
        return float(number)
    except OverflowError:
        raise DTypeError(f"{name} must be a number that a float can hold, got {value!r}") from None


def _held_by(name, array):
    """Return the number that an array of no axes holds; TensorFlow's have no ``item``."""
    try:
        return array.item() if hasattr(array, "item") else np.asarray(array).item()
    except (TypeError, NotImplementedError):  # what JAX and TensorFlow raise while they trace
        raise DTypeError(
            f"{name} must be a number that is known while a framework traces, got {array!r}; give "
            "a Python number, or make it a static argument"
        ) from None
