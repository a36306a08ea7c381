"""site_features_grad: the gradient of the features of a convolution over a kernel map.

It is the convolution of the gradient of the result over the map in the other direction, by weights
whose channels are swapped. Kernel: cuda_src/submanifold/site_conv.cu, on CuPy arrays; what packs
the weights swaps them.
"""

import numpy as np

from ..core.arrays import empty, namespace
from ..core.checks import check_array, check_contiguous, check_result
from ..core.graph_memory import memory_of_graphs
from ..core.operator import Operator, Plan
from ..dense.conv2d import check_precision
from ..errors import ShapeError
from .feature_rows import check_dtype, check_rows
from .site_conv import SiteConv, sums
from .site_conv_launch import OrderedPlan, plan_back_kernel, swap_channels
from .site_kernels import by_kernels


def features_grad(grad_y, w, made, groups, precision):
    """Return the gradient of the features, ``[N, C]``, from that of the result of a convolution.

    ``w`` is ``[taps, C / groups, K]``, ``made`` the KernelMap; native arrays.
    """
    back = made if made.is_symmetric() else made.transposed()
    w = namespace(w).ascontiguousarray(w)
    arrays, options = (grad_y, w, back.rows, None), (groups, back is made, precision)
    plan = SITE_FEATURES_GRAD.plan_for(arrays, options)
    out = empty(plan.shape, grad_y.dtype, grad_y)
    order = (back._ordered(plan),) if isinstance(plan, OrderedPlan) else ()
    plan.run(*arrays[:-1], out, *order)
    return out


def _resolve(specs, options):
    """Check all arguments; return the convolution that the gradient is, and the result's spec."""
    grad_y, w, back, out = specs
    groups, _, precision = options
    check_precision(precision)
    check_rows(grad_y, back, "grad_y")
    check_array("w", w, ndim=3, like=grad_y)
    taps, c, k = w.shape
    if (taps, k) != (back.shape[0], grad_y.shape[1]) or groups < 1 or k % groups:
        raise ShapeError(
            f"w must have shape ({back.shape[0]}, C / groups, {grad_y.shape[1]}), K a positive "
            f"multiple of groups, {groups}, got {w.shape}"
        )
    check_dtype("w", w, grad_y, of="grad_y")
    check_contiguous("w", w)
    result = grad_y.new((back.shape[1], c * groups))
    check_result(out, result)
    return SiteConv(taps, groups, k, c * groups, None, precision == "tf32"), result


def _infer(specs, options):
    return _resolve(specs, options)[1:]


def _plan(specs, options):
    (problem, result), (groups, reverse, _) = _resolve(specs, options), options
    if not result.size:
        return Plan((result,), lambda *arrays: None)
    grad_y, w, back, out = specs
    if by_kernels(grad_y):
        plan = plan_back_kernel(problem, grad_y, w, back, reverse, out or result)
        if plan is not None:
            return plan

    def run(grad_y, w, back, out):
        with memory_of_graphs(grad_y), np.errstate(all="ignore"):
            turned = swap_channels(w, groups, reverse)
            out[...] = sums(grad_y, turned, back, groups, problem.tf32)

    return Plan((result,), run)


# ``back`` is the table of the map in the other direction; if ``reverse``, that of the map itself,
# which is the same with its taps in reverse order.
SITE_FEATURES_GRAD = Operator(
    "site_features_grad",
    arrays=("grad_y", "w", "back", "out"),
    options=("groups", "reverse", "precision"),
    infer=_infer,
    plan=_plan,
    linear=("grad_y",),
    lengths={"grad_y": 0, "back": 1, "out": 0},
)
