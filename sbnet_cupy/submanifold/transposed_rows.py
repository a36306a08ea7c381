"""transposed_rows: the table of a kernel map, read in the other direction."""

import numpy as np

from ..core.arrays import namespace
from ..core.checks import check_array, check_result
from ..core.graph_memory import memory_of_graphs
from ..core.operator import Operator, Plan
from ..core.sizes import is_integer
from ..errors import DTypeError, ShapeError
from . import map_kernels
from .feature_rows import reads
from .site_kernels import by_kernels


def _infer(specs, options):
    rows, out = specs
    (sites,) = options
    check_array("rows", rows, ndim=2)
    if rows.dtype != np.int32:
        raise DTypeError(f"rows must be int32, got {rows.dtype}; use kernel_map")
    if not is_integer(sites) or sites < 0:
        raise ShapeError(f"sites must be a non-negative integer, got {sites!r}")
    result = rows.new((rows.shape[0], sites))
    check_result(out, result)
    return (result,)


def _plan(specs, options):
    results, (sites,) = _infer(specs, options), options

    def run(rows, out):
        xp = namespace(rows)
        with memory_of_graphs(rows):
            if by_kernels(rows) and len(rows) <= map_kernels.MOST_LINES:
                map_kernels.transpose_rows(rows, out)
                return
            own = xp.arange(rows.shape[1], dtype=np.int32)
            back = xp.full(sites + 1, -1, np.int32)  # what reads nothing goes to the last place
            for read, into in zip(rows, out, strict=True):
                back.fill(-1)
                back[xp.where(reads(read, sites), read, sites)] = own
                into[...] = back[:-1]

    return Plan(results, run)


# ``out[t, n]`` is the row ``m`` with ``rows[t, m] = n``, -1 where there is none.
TRANSPOSED_ROWS = Operator(
    "transposed_rows",
    arrays=("rows", "out"),
    options=("sites",),
    infer=_infer,
    plan=_plan,
)
