"""Whether raw float32 values are points of so many columns.

A file read with the wrong number of columns is no error to NumPy: it gives points, in stripes.
But values of one column are more alike than values of different columns, for independent draws
from distributions F and G always: ``2 E|f - g| >= E|f - f'| + E|g - g'|``. So the mean difference
of values in a column is least for the right number of columns, and for its multiples. Points that
follow each other in a scan are more alike still, unless several sensors take turns; then a
multiple has less difference, and for multiples only points in random order are compared.

Source: Szekely and Rizzo 2013, Energy statistics, for the inequality.
"""

import string

import numpy as np

from .inputs import DemoError

CANDIDATES = range(3, 11)
FEWEST = 1000  # values; fewer say nothing reliable
CLEARLY = 0.8  # another number of columns must bring the mean difference below this share
LARGEST, SMALLEST = 1e5, 1e-7  # metres; what most coordinates that are not 0 lie between
MOST_READ = 1 << 18  # values that are looked at

_NAMES = ("x", "y", "z", "intensity", "ring")


def check_whole(data, columns, default):
    """Raise DemoError unless the bytes are a whole number of points, and no text."""
    if data and all(byte in _TEXT for byte in data[:4096]):
        raise DemoError("must hold raw float32 values, got text; save it as .npy, or as .pcd")
    if not data or len(data) % (4 * columns):
        hint = ""
        if default and data:
            others = [n for n in CANDIDATES if len(data) % (4 * n) == 0]
            hint = f"; --columns {others[0]} would divide it" if others else ""
        raise DemoError(
            f"must hold whole points of {4 * columns} bytes (float32 {_columns_text(columns)}), "
            f"got {len(data)} bytes{hint}"
        )


def check_plausible(values, columns):
    """Raise DemoError, with the reason, where values do not look like points of ``columns``."""
    with np.errstate(invalid="ignore"):  # signalling NaNs
        values = values[: MOST_READ - MOST_READ % columns].astype(np.float64)
    likely = likely_columns(values, columns)
    reading = f"does not look like points of {columns} float32 columns, as its name says"
    anyway = f"--columns {columns} reads it so all the same"
    if likely != columns:
        raise DemoError(
            f"{reading}: values {likely} apart are alike, values {columns} apart are not; "
            f"try --columns {likely} ({anyway})"
        )
    xyz = values.reshape(-1, columns)[:, :3]
    size = np.abs(xyz[np.isfinite(xyz).all(axis=1)])
    odd = np.mean((size > LARGEST) | ((size < SMALLEST) & (size > 0))) if size.size else 0
    if odd > 0.1:
        raise DemoError(
            f"{reading}: {odd:.0%} of x, y and z are beyond {LARGEST:g} m or below {SMALLEST:g} m; "
            f"is it another format? ({anyway})"
        )


def likely_columns(values, columns):
    """Return ``columns``, or a number of columns that fits the values clearly better."""
    if len(values) < FEWEST:
        return columns
    with np.errstate(invalid="ignore"):
        scaled = np.arcsinh(values)  # linear near 0, logarithmic beyond: no outlier decides
    shuffled = {n: _shuffled_difference(scaled, n) for n in CANDIDATES}
    least = {n: min(shuffled[n], _difference(scaled[n:], scaled[:-n])) for n in CANDIDATES}
    better = [
        n
        for n in CANDIDATES
        for spread in (least if n % columns else shuffled,)
        if spread[n] < CLEARLY * spread[columns]
    ]
    lowest = min((least[n] for n in better), default=0)
    return next((n for n in better if least[n] <= 1.1 * lowest), columns)


def _shuffled_difference(values, columns):
    """Return the mean difference of values of the same column in points drawn at random."""
    points = values[: len(values) // columns * columns].reshape(-1, columns)
    order = np.random.default_rng(0).permutation(len(points))
    return _difference(points, points[order])


def _difference(a, b):
    """Return the mean absolute difference of two arrays, where it is finite."""
    with np.errstate(invalid="ignore"):
        differences = np.abs(a - b)
    finite = differences[np.isfinite(differences)]
    return float(finite.mean()) if finite.size else 0.0


def _columns_text(columns):
    named = ", ".join(_NAMES[:columns])
    return named if columns <= len(_NAMES) else f"{named} and {columns - len(_NAMES)} more"


_TEXT = frozenset(string.printable.encode())
