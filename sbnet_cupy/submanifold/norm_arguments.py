"""What a batch norm over sites takes: the checks of the adapters, which compute it."""

from ..core.checks import check_array
from ..core.scalars import as_number
from ..dense.activation import check_activation
from ..errors import ShapeError
from .sparse_tensor import check_float_tensor


def read_norm(x, tables, eps, activation):
    """Raise unless the arguments of a batch norm fit each other; return ``eps`` as a float.

    ``x`` is a SparseTensor of the spec of its features, ``tables`` are specs by name, or None.
    """
    check_float_tensor(x)
    check_activation(activation)
    for name, table in tables.items():
        if table is not None:
            check_array(name, table, kinds="f")
    check_tables(x, tables)
    return as_number("eps", eps, nan=False)


def check_tables(x, tables):
    """Raise unless each table has a value per channel, and both running statistics are there."""
    for name, table in tables.items():
        if table is not None and tuple(table.shape) != (x.channels,):
            raise ShapeError(f"{name} must have shape ({x.channels},), got {tuple(table.shape)}")
    if (tables["running_mean"] is None) != (tables["running_var"] is None):
        raise ValueError("running_mean and running_var must be given together")
