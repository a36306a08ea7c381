"""site_max: the largest of the rows that each row of a map reads, with its derivatives.

Kernels: cuda_src/submanifold/site_pool.cu, for CuPy arrays.
"""

import numpy as np

from ..core.arrays import compute_dtype, is_cupy, namespace
from ..core.checks import check_array, check_result
from ..core.graph_memory import memory_of_graphs
from ..core.operator import Operator, Plan
from ..dense.conv2d import check_choice
from .feature_rows import check_dtype, check_rows, reads
from .site_conv import add, take
from .site_pool_launch import has_kernel, prepare_max_grad, prepare_pool

TIES = ("first", "all")


def _largest(features, rows):
    """Return the largest value of each window, -inf where it is empty."""
    xp, least = namespace(features), features.dtype.type(-np.inf)
    largest = xp.full((rows.shape[1], features.shape[1]), least, features.dtype)
    for read in rows if len(features) else ():
        taken, here = take(features, read)
        if here is None:
            largest = xp.maximum(largest, taken)
        elif is_cupy(features):
            largest = xp.maximum(largest, xp.where(here, taken, least))
        else:
            largest[here] = np.maximum(largest[here], taken)
    return largest


def _winners(features, y, rows, ties):
    """Yield, for each tap, the rows read and where they hold the value ``y`` of their window.

    With ``ties`` "first" that is the first tap that holds it, with "all" each of them.
    """
    xp = namespace(features)
    left = xp.ones(y.shape, bool)
    for read in rows if len(features) else ():
        here = reads(read, len(features))
        place = xp.where(here, read, 0)
        taken = features[place]
        same = (taken == y) | ((taken != taken) & (y != y))
        mine = left & same & here[:, None]
        if ties == "first":
            left &= ~mine
        yield place, mine


def _infer(specs, options):
    features, rows, valid, out = specs
    check_choice("ties", options[1], TIES)
    check_rows(features, rows)
    check_array("valid", valid, shape=(rows.shape[1],), like=rows)
    result = features.new((rows.shape[1], features.shape[1]))
    check_result(out, result)
    return (result,)


def _plan(specs, options):
    results, (floor, _) = _infer(specs, options), options
    features, rows, valid, out = specs
    if results[0].size and has_kernel(features, rows):
        with np.errstate(over="ignore"):
            least = None if floor is None else features.dtype.type(floor)
        launch = prepare_pool(features, rows, valid, out, "largest", least)
        return Plan(results, launch, launch=launch, operands=(0, 1, 2, 3))

    def run(features, rows, valid, out):
        with memory_of_graphs(features), np.errstate(all="ignore"):
            largest, xp = _largest(features, rows), namespace(features)
            nothing = largest.dtype.type(0 if floor is None else floor)
            largest = xp.where(reads(rows, len(features)).any(axis=0)[:, None], largest, nothing)
            if floor is not None:
                largest = xp.maximum(largest, nothing)
            out[...] = xp.where(valid[:, None], largest, largest.dtype.type(0))

    return Plan(results, run)


def _check_tangent(name, tangent, like, features, y, rows, ties):
    """Check the arguments of a derivative."""
    check_choice("ties", ties, TIES)
    check_rows(features, rows)
    check_array("y", y, shape=(rows.shape[1], features.shape[1]), like=features)
    check_array(name, tangent, shape=like.shape, like=features)
    for other, array in (("y", y), (name, tangent)):
        check_dtype(other, array, features)


def _infer_grad(specs, options):
    grad_y, features, y, rows, back, out = specs
    _check_tangent("grad_y", grad_y, y, features, y, rows, *options)
    check_array("back", back, shape=(rows.shape[0], features.shape[0]), like=rows)
    result = features.new(features.shape)
    check_result(out, result)
    return (result,)


def _plan_grad(specs, options):
    results, (ties,) = _infer_grad(specs, options), options
    if results[0].size and has_kernel(specs[1], specs[3], specs[4]):
        launch = prepare_max_grad(*specs, ties)
        return Plan(results, launch, launch=launch, operands=(0, 1, 2, 3, 4, 5))

    def run(grad_y, features, y, rows, back, out):
        xp, wide = namespace(features), compute_dtype(features.dtype)
        with memory_of_graphs(features), np.errstate(all="ignore"):
            total = xp.zeros(features.shape, wide)
            for readers, (_, mine) in zip(back, _winners(features, y, rows, ties), strict=False):
                share = xp.where(mine, grad_y.astype(wide, copy=False), wide.type(0))
                if len(share):
                    taken, here = take(share, readers)
                    add(total, here, taken)
            out[...] = total

    return Plan(results, run)


def _infer_tangent(specs, options):
    tangent, features, y, rows, out = specs
    _check_tangent("tangent", tangent, features, features, y, rows, *options)
    result = features.new(y.shape)
    check_result(out, result)
    return (result,)


def _plan_tangent(specs, options):
    results, (ties,) = _infer_tangent(specs, options), options

    def run(tangent, features, y, rows, out):
        xp, wide = namespace(features), compute_dtype(features.dtype)
        with memory_of_graphs(features), np.errstate(all="ignore"):
            total = xp.zeros(y.shape, wide)
            for place, mine in _winners(features, y, rows, ties):
                taken = tangent[place].astype(wide, copy=False)
                total += xp.where(mine, taken, wide.type(0))
            out[...] = total

    return Plan(results, run)


SITE_MAX = Operator(
    "site_max",
    arrays=("features", "rows", "valid", "out"),
    options=("floor", "ties"),  # which of equal values the gradient goes to
    infer=_infer,
    plan=_plan,
)

# The gradient of site_max, of which ``y`` is the result and ``back`` the transposed map; and the
# transpose of that. Both are linear in their first array.
SITE_MAX_GRAD = Operator(
    "site_max_grad",
    arrays=("grad_y", "features", "y", "rows", "back", "out"),
    options=("ties",),
    infer=_infer_grad,
    plan=_plan_grad,
    linear=("grad_y",),
)

SITE_MAX_TANGENT = Operator(
    "site_max_tangent",
    arrays=("tangent", "features", "y", "rows", "out"),
    options=("ties",),
    infer=_infer_tangent,
    plan=_plan_tangent,
    linear=("tangent",),
)
