"""reduce_features: the sum or mean of the rows of each site, in the order of the list.

Kernel: cuda_src/submanifold/reduce_features.cu, on CuPy arrays of rows that kernels listed.
"""

import numpy as np

from ..core import launch as kernels
from ..core.arrays import compute_dtype, is_cupy, namespace
from ..core.checks import check_array, check_contiguous, check_result
from ..core.compile import cpp_name
from ..core.graph_memory import memory_of_graphs
from ..core.operator import Operator, Plan
from ..dense.conv2d import check_choice
from .feature_rows import check_rows
from .site_kernels import by_kernels, lanes_of

_AT_ONCE = 32  # rows of a site, on a CPU


def _infer(specs, options):
    features, order, site, starts, out = specs
    check_choice("mode", options[0], ("sum", "mean"))
    check_array("order", order, ndim=1, like=features)
    check_rows(features, starts)
    for name, spec in (("order", order), ("site", site)):
        check_array(name, spec, shape=features.shape[:1], like=features)
    result = features.new((starts.shape[1] - 1, features.shape[1]))
    check_result(out, result)
    return (result,)


def _plan(specs, options):
    results, (mode,) = _infer(specs, options), options
    features, *listed, _ = specs
    if by_kernels(features) and all(spec.dtype == np.int32 for spec in listed) and features.size:
        return _plan_kernel(features, listed, results, mode)

    def run(features, order, site, starts, out):
        xp, wide = namespace(features), compute_dtype(features.dtype)
        (starts,) = starts
        with memory_of_graphs(features), np.errstate(all="ignore"):
            if is_cupy(features):
                sums = _sums_on_gpu(features[order].astype(wide, copy=False), site, len(out))
            else:
                sums = _sums(features.astype(wide, copy=False), order, starts)
            if mode == "mean":
                sums /= xp.maximum(starts[1:] - starts[:-1], 1)[:, None].astype(wide)
            out[...] = sums

    return Plan(results, run)


def _plan_kernel(features, listed, results, mode):
    """Return the plan of a call by the kernel."""
    named = zip(("features", "order", "site", "starts"), (features, *listed), strict=True)
    for name, spec in named:
        check_contiguous(name, spec)
    n, channels = features.shape
    sites = results[0].shape[0]
    template = cpp_name(features.dtype, "features"), lanes_of(channels)
    launch = kernels.prepare(
        "submanifold/reduce_features", "sum_rows", template,
        -(-sites // 8), 256, 5, (n, sites, channels, int(mode == "mean")), dependent=True,
    )  # fmt: skip
    return Plan(results, launch, launch=launch, operands=(0, 1, 2, 3, 4))


def _sums(features, order, starts):
    """Return the sum of the rows of each site, added in their order; 0 where there is no site.

    With the sites of most rows in front, those that have a first row are one slice, those that have
    a second one another, and so on. What is left of sites with very many is added row by row.
    """
    count = np.diff(starts)
    most = np.minimum(count, _AT_ONCE + 1).astype(np.uint8)
    sites = np.argsort(_AT_ONCE + 1 - most, kind="stable")
    begin, sums = starts[:-1][sites], np.zeros((len(count), features.shape[1]), features.dtype)
    for number in range(_AT_ONCE):
        some = np.count_nonzero(most > number)
        if not some:
            break
        rows = features.take(order[begin[:some] + number], 0)
        sums[:some] = sums[:some] + rows if number else rows
    some = np.count_nonzero(most > _AT_ONCE)
    if some:
        left = count[sites[:some]] - _AT_ONCE
        first = np.cumsum(left) - left
        places = np.arange(left.sum()) + np.repeat(begin[:some] + _AT_ONCE - first, left)
        np.add.at(sums, np.repeat(np.arange(some), left), features.take(order[places], 0))
    place = np.empty_like(sites)
    place[sites] = np.arange(len(sites))
    return sums.take(place, 0)


def _sums_on_gpu(listed, site, rows):
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
    last = xp.concatenate([site[1:] != site[:-1], xp.ones(min(len(site), 1), bool)])
    out = xp.zeros((rows + 1, listed.shape[1]), listed.dtype)
    out[xp.where(last, site, rows)] = listed
    return out[:rows]


# Of the arrays of a Reduction (see coordinate_map.py); ``starts`` is [1, sites + 1].
REDUCE_FEATURES = Operator(
    "reduce_features",
    arrays=("features", "order", "site", "starts", "out"),
    options=("mode",),
    infer=_infer,
    plan=_plan,
    linear=("features",),
)
