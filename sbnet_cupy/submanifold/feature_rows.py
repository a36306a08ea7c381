"""Rows of features, as all operations over a kernel map take them."""

from ..core.byte_order import check_byte_orders
from ..core.checks import check_array, check_contiguous, check_float
from ..errors import DTypeError, ShapeError


def reads(rows, sites):
    """Return which entries of a map's table name one of so many rows; -1 names none.

    Neither does a number that is too large, as in a table that was made by hand.
    """
    return rows.view(f"u{rows.dtype.itemsize}") < sites


def check_dtype(name, array, features, of="features"):
    """Raise unless an array has the dtype of the features."""
    if array.dtype != features.dtype:
        check_byte_orders({of: features, name: array})
        owner = "the features" if of == "features" else of
        raise DTypeError(
            f"{name} must have the dtype of {owner}, {features.dtype}, got {array.dtype}; "
            "convert it"
        )


def check_rows(features, rows, name="features", sites=None):
    """Raise unless ``features`` are rows of floats, and ``rows`` a table of a map.

    With ``sites`` there must be so many rows of features: as many as the map's source has.
    """
    check_array("rows", rows, ndim=2)
    check_array(name, features, ndim=2, like=rows)
    check_contiguous(name, features)
    check_float(name, features.dtype)
    if sites is not None and features.shape[0] != sites:
        raise ShapeError(
            f"{name} must have the {sites} rows of the map's source, got {features.shape[0]}"
        )
