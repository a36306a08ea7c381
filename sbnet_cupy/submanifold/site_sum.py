"""site_sum: the sum or average of the rows that each row of a map reads.

Average pooling and unpooling are such sums, and so are their gradients. Kernel:
cuda_src/submanifold/site_pool.cu, for CuPy arrays.
"""

import numpy as np

from ..core.arrays import compute_dtype, namespace
from ..core.checks import check_result
from ..core.graph_memory import memory_of_graphs
from ..core.operator import Operator, Plan
from ..dense.conv2d import check_choice
from .feature_rows import check_rows, reads
from .site_conv import add, take
from .site_pool_launch import COUNTS, has_kernel, prepare_pool


def sum_rows(features, rows):
    """Return the sum over the taps of ``features[rows[t]]``: float32 or float64, ``[M, C]``."""
    xp, wide = namespace(features), compute_dtype(features.dtype)
    total = xp.zeros((rows.shape[1], features.shape[1]), wide)
    for read in rows if len(features) else ():
        taken, here = take(features, read)
        add(total, here, taken.astype(wide, copy=False))
    return total


def divisor(rows, sites, count):
    """Return what the sums are divided by: the taps, or how many of them read a row."""
    xp = namespace(rows)
    if count == "volume":
        return xp.full((1, 1), max(rows.shape[0], 1))
    return xp.maximum(reads(rows, sites).sum(axis=0), 1)[:, None]


def _infer(specs, options):
    features, rows, _, out = specs
    (count,) = options
    check_choice("count", count, COUNTS)
    check_rows(features, rows)
    result = features.new((rows.shape[1], features.shape[1]))
    check_result(out, result)
    return (result,)


def _plan(specs, options):
    results, (count,) = _infer(specs, options), options
    features, rows, valid, out = specs
    if results[0].size and has_kernel(features, rows):
        launch = prepare_pool(features, rows, valid, out, count)
        return Plan(results, launch, launch=launch, operands=(0, 1, 2, 3))

    def run(features, rows, valid, out):
        xp = namespace(features)
        with memory_of_graphs(features), np.errstate(all="ignore"):
            total = sum_rows(features, rows)
            if count != "one":
                total /= divisor(rows, len(features), count).astype(total.dtype)
            if valid is not None:
                total = xp.where(valid[:, None], total, total.dtype.type(0))
            out[...] = total

    return Plan(results, run)


SITE_SUM = Operator(
    "site_sum",
    arrays=("features", "rows", "valid", "out"),
    options=("count",),
    infer=_infer,
    plan=_plan,
    linear=("features",),
)
