"""Launches of the kernels of the gradient of a convolution's weights over a kernel map.

Kernels: cuda_src/submanifold/site_conv_grad.cu.
"""

from ..core import launch as kernels
from ..core.arrays import compute_dtype, empty, vector_bytes
from ..core.compile import cpp_name
from ..core.device import current_device
from ..core.graph_memory import memory_of_graphs
from .site_conv_grad_plan import FmaPlan, WeightGradSizes, plan_weight_grad

_FILE = "submanifold/site_conv_grad"


def plan_kernels(features, grad_y, rows, groups, tf32):
    """Return what computes a call on arrays of these specs by kernels; None where there are none.

    It takes features, grad_y, rows and the array for the result.
    """
    if not (rows.contiguous and features.size and grad_y.size and rows.size):
        return None
    conv = describe(features, grad_y, rows, groups, tf32)
    plan = plan_weight_grad(conv, current_device())
    if plan is None:
        return None
    shares, by_fma = plan.shares(conv), isinstance(plan, FmaPlan)
    sizes = (conv.sources, conv.targets, conv.taps, conv.channels, conv.channels_out)
    sizes += (groups, shares, plan.lanes(conv)) if by_fma else (shares,)
    multiply = kernels.prepare(
        _FILE, plan.kernel, plan.template(conv), shares * conv.taps * plan.tiles(conv),
        plan.threads, 4, sizes, shared=plan.shared_bytes(conv),
    )  # fmt: skip
    add_up = kernels.prepare(
        _FILE, "sum_shares", (conv.element,), -(-conv.weights // 64), 256, 2,
        (conv.weights, shares),
    )  # fmt: skip
    wide = compute_dtype(features.dtype)

    def run(features, grad_y, rows, out):
        with memory_of_graphs(features):
            partial = empty((shares, conv.weights), wide, features)
            multiply(features, grad_y, rows, partial)
            add_up(partial, out)

    return run


def describe(features, grad_y, rows, groups, tf32):
    """Return the sizes of a gradient of weights of arrays of these specs."""
    item = features.dtype.itemsize
    return WeightGradSizes(
        element=cpp_name(features.dtype, "features"),
        sources=features.shape[0],
        targets=rows.shape[1],
        taps=rows.shape[0],
        channels=features.shape[1],
        channels_out=grad_y.shape[1],
        groups=groups,
        tf32=tf32,
        alignment_in=vector_bytes(features.shape[1] * item, features.alignment),
        alignment_out=vector_bytes(grad_y.shape[1] * item, grad_y.alignment),
    )
