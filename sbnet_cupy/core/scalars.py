"""Numbers that are options, as users write them."""

import math
from numbers import Real

from ..errors import DTypeError


def as_number(name, value, *, nan=True, hint=""):
    """Return an option that is a number, or an array of no axes that holds one, as a float.

    Raise for anything else, and for NaN unless ``nan`` allows it; ``hint`` says what to do then.
    """
    number = value.item() if getattr(value, "shape", None) == () else value
    try:
        if not isinstance(number, Real):
            raise TypeError
        number = float(number)
    except (TypeError, OverflowError):
        raise DTypeError(f"{name} must be a number that a float can hold, got {value!r}") from None
    if not nan and math.isnan(number):
        raise ValueError(f"{name} must not be NaN, got nan{hint}")
    return number
