"""Launches of the kernels of the gradient of a convolution's weights over a kernel map.

Kernels: cuda_src/submanifold/site_conv_grad.cu.
"""

import functools

import numpy as np

from ..core import launch as kernels
from ..core.arrays import compute_dtype, empty, vector_bytes, whole_pieces
from ..core.compile import cpp_name
from ..core.device import current_device
from ..core.graph_memory import memory_of_graphs
from ..core.operator import Plan
from .site_conv_grad_plan import FmaPlan, WeightGradSizes, plan_weight_grad
from .site_conv_plan import rounded

_FILE = "submanifold/site_conv_grad"


def plan_kernels(features, grad_y, rows, out, groups, tf32):
    """Return the Plan of a call on arrays of these specs by kernels; None where there are none.

    ``out`` is what receives the result.
    """
    if not (rows.contiguous and features.size and grad_y.size and rows.size):
        return None
    conv = describe(features, grad_y, rows, groups, tf32)
    return _plan_sized(conv, out, conv.sources, conv.targets)


def _plan_sized(conv, out, sources, targets, *_):
    """Return the plan of such a gradient with so many sites; None where there is no kernel."""
    again = functools.partial(_plan_sized, conv, out)
    conv = conv._replace(sources=sources, targets=targets)
    plan = plan_weight_grad(rounded(conv), current_device())
    if plan is None:
        return None
    (each, middle), by_fma = plan.shares(conv), isinstance(plan, FmaPlan)
    slices = middle + each * (conv.taps - 1)  # matrices of partial sums
    sizes = (conv.sources, conv.targets, conv.taps, conv.channels, conv.channels_out)
    sizes += (conv.groups, each, middle, plan.lanes(conv)) if by_fma else (each, middle)
    multiply = kernels.prepare(
        _FILE, plan.kernel, plan.template(conv), slices * plan.tiles(conv), plan.threads, 4, sizes,
        shared=plan.shared_bytes(conv), dependent=True,
    )  # fmt: skip
    matrix = conv.weights // conv.taps
    add_up = prepare_sums(out.dtype, matrix, conv.taps, each, middle, out.alignment)
    nbytes = slices * matrix * compute_dtype(out.dtype).itemsize
    launch = kernels.Series((multiply, (0, 1, 2, 4)), (add_up, (4, 3)))

    def run(features, grad_y, rows, out):
        with memory_of_graphs(features):
            launch(features, grad_y, rows, out, empty((nbytes,), np.uint8, features))

    return Plan(
        (out,), run, launch, operands=(0, 1, 2, 3, 4), scratch=whole_pieces(nbytes),
        resized=again, by_kernels=True,
    )  # fmt: skip


def prepare_sums(dtype, matrix, taps, shares, middle_shares, alignment=0, parts=4):
    """Return the launch that adds shares of matrices up, and rounds: of each tap so many.

    ``matrix`` is how many numbers of ``dtype`` one has, and ``alignment`` the result's address
    modulo 16. ``parts`` threads share a sum.
    """
    wide = compute_dtype(dtype).itemsize
    vector = vector_bytes(matrix * wide, alignment * wide // dtype.itemsize) // wide
    blocks = -(-taps * matrix // (vector * 256 // parts))
    return kernels.prepare(
        _FILE, "sum_shares", (cpp_name(dtype, "sums"), vector, parts), blocks, 256, 2,
        (matrix, taps, shares, middle_shares), dependent=True,
    )  # fmt: skip


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
