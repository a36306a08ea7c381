"""reduce_features: the sum or mean of the rows of each site, in the order of the list."""

import numpy as np

from ..core.arrays import compute_dtype, is_cupy, namespace
from ..core.checks import check_array, check_result
from ..core.graph_memory import memory_of_graphs
from ..core.operator import Operator, Plan
from ..dense.conv2d import check_choice
from .feature_rows import check_rows


def _infer(specs, options):
    features, order, site, last, starts, out = specs
    check_choice("mode", options[0], ("sum", "mean"))
    check_array("order", order, ndim=1, like=features)
    check_rows(features, starts)
    for name, spec in (("order", order), ("site", site), ("last", last)):
        check_array(name, spec, shape=features.shape[:1], like=features)
    result = features.new((starts.shape[1] - 1, features.shape[1]))
    check_result(out, result)
    return (result,)


def _plan(specs, options):
    results, (mode,) = _infer(specs, options), options

    def run(features, order, site, last, starts, out):
        xp, wide = namespace(features), compute_dtype(features.dtype)
        (starts,) = starts
        with memory_of_graphs(features), np.errstate(all="ignore"):
            listed = features[order].astype(wide, copy=False)
            if is_cupy(features):
                sums = _sums_on_gpu(listed, site, last, len(out))
            else:
                sums = _sums(listed, starts, len(out))
            if mode == "mean":
                sums /= xp.maximum(starts[1:] - starts[:-1], 1)[:, None].astype(wide)
            out[...] = sums

    return Plan(results, run)


def _sums(listed, starts, rows):
    """Return the sum of the rows of each site, added in their order; 0 where there is no site."""
    nothing = np.zeros((1, listed.shape[1]), listed.dtype)  # where rows begin that are not there
    return np.add.reduceat(np.concatenate([listed, nothing]), starts, axis=0)[:rows]


def _sums_on_gpu(listed, site, last, rows):
    """Return these sums in CuPy: a scan of runs, which adds rows 1, 2, 4... places apart.

    The order of the additions depends on the number of rows of a site only. Source: W. D. Hillis,
    G. L. Steele, "Data parallel algorithms", Communications of the ACM 29, 1986.
    """
    xp = namespace(listed)
    distance = 1
    while distance < len(listed):
        same = (site[distance:] == site[:-distance])[:, None]
        before = xp.where(same, listed[:-distance], listed.dtype.type(0))
        listed = xp.concatenate([listed[:distance], listed[distance:] + before])
        distance *= 2
    out = xp.zeros((rows + 1, listed.shape[1]), listed.dtype)
    out[xp.where(last, site, rows)] = listed
    return out[:rows]


# Of the arrays of a Reduction (see coordinate_map.py); ``starts`` is [1, sites + 1].
REDUCE_FEATURES = Operator(
    "reduce_features",
    arrays=("features", "order", "site", "last", "starts", "out"),
    options=("mode",),
    infer=_infer,
    plan=_plan,
    linear=("features",),
)
