"""What the stack operations check alike."""

import contextlib

import numpy as np

from ...core.arrays import dtype_kind
from ...core.checks import check_array, check_contiguous, check_float
from ...core.graph_memory import memory_of_graphs
from ...core.scalars import as_number, as_number_in
from ...errors import DTypeError, ShapeError
from .block_table import check_table


@contextlib.contextmanager
def computing(like):
    """Within, overflow is infinity with no warning, and a captured graph keeps all memory."""
    with memory_of_graphs(like), np.errstate(all="ignore"):
        yield


def check_stack(name, x, table, *, channels=None, floats=True):
    """Raise unless ``x`` is a stack ``[M, b_h, b_w, C]`` of the stage of ``table``."""
    check_table(table)
    check_array(name, x, ndim=4, like=table.grid)
    wanted = (table.capacity, *table.block_size, x.shape[3] if channels is None else channels)
    if x.shape != wanted:
        raise ShapeError(
            f"{name} must have shape ({', '.join(map(str, wanted[:3]))}, "
            f"{'C' if channels is None else channels}), a stack of the table's stage, got {x.shape}"
            "; pass the table of its own stage (table.after_conv(...) after a stride)"
        )
    check_contiguous(name, x)
    if floats:
        check_float(name, x.dtype)


def check_like(name, value, x):
    """Raise unless ``value`` has the dtype of ``x``."""
    if value.dtype != x.dtype:
        raise DTypeError(
            f"{name} must have the dtype of x, {x.dtype}, got {value.dtype}; convert it"
        )


def background_number(value, dtype):
    """Return a number that images of this dtype can hold, rounded if they are floats; or raise."""
    if not isinstance(value, int | float | np.number | np.bool_):
        raise DTypeError(f"background must be a number or an array, got {type(value).__name__}")
    kind = dtype_kind(dtype)
    if kind == "f":
        return as_number("background", value)
    if kind in "iu":
        return as_number_in("background", value, dtype, "convert the stack with astype")
    return value
