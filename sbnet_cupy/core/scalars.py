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


def as_number_in(name, value, dtype, hint):
    """Return an option that is a number as one that arrays of a dtype hold, or raise.

    Floats round it, so any will do. Integers and bool hold it as it is; ``hint`` says what to do
    where they do not.
    """
    if dtype.kind not in "biu":
        return as_number(name, value)
    number = _held_by(name, value) if getattr(value, "shape", None) == () else value
    low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    if not isinstance(number, Real) or not low <= number <= high or number != int(number):
        raise DTypeError(
            f"{name} must be an integer that {dtype} holds, from {low} to {high}, got {value!r}; "
            f"{hint}"
        )
    return int(number)


def generator_of(seed):
    """Return NumPy's generator of random numbers that a seed starts, or raise."""
    try:
        return np.random.default_rng(seed)
    except (TypeError, ValueError):
        raise ValueError(f"seed must be a non-negative integer, got {seed!r}") from None


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
