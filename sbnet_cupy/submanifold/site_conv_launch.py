"""Launches of the kernels of a convolution over a kernel map.

Kernels: cuda_src/submanifold/site_conv.cu.
"""

from dataclasses import dataclass

import numpy as np

from ..core import launch as kernels
from ..core.arrays import namespace, vector_bytes
from ..core.compile import cpp_name
from ..core.device import current_device
from ..core.graph_memory import memory_of_graphs
from ..core.operator import Plan
from ..core.packed import Pack
from ..dense.activation import ACTIVATIONS
from .site_conv_plan import FmaPlan, SiteConvSizes, plan_site_conv
from .site_order import site_order

_FILE = "submanifold/site_conv"


def plan_kernel(problem, kernel_size, features, w, rows, residual, out, result):
    """Return the Plan of a call by a kernel; None where there is none. All arrays are specs."""
    if not (w.contiguous and rows.contiguous and features.size):
        return None
    conv = describe(problem, features, w, rows, residual, out)
    plan = plan_site_conv(conv, current_device())
    if plan is None:
        return None
    by_fma = isinstance(plan, FmaPlan)
    launch = (_by_fma if by_fma else _by_tensor_cores)(conv, plan)

    def run(features, w, rows, valid, scale, bias, residual, out, order=None):
        valid = None if valid is None else valid.view(np.uint8)
        with memory_of_graphs(features):
            if order is None and not by_fma:
                order = site_order(rows, conv.sources, kernel_size, plan.by_taps)
            launch(features, w, rows, valid, scale, bias, residual, out, order)

    if by_fma:
        return Plan((result,), run)
    return OrderedPlan((result,), run, by_taps=plan.by_taps)


@dataclass(eq=False, slots=True)
class OrderedPlan(Plan):
    """The plan of a call that may be given the SiteOrder of its map; else it sorts the table.

    Parameters
    ----------
    by_taps : bool
        Whether the call is faster over sorted rows.
    """

    by_taps: bool = False


def describe(problem, features, w, rows, residual, out):
    """Return the sizes of a convolution of these specs."""
    itemsize = features.dtype.itemsize

    def alignment(channels, *specs):
        return vector_bytes(channels * itemsize, *(s.alignment for s in specs if s is not None))

    return SiteConvSizes(
        element=cpp_name(features.dtype, "features"),
        sources=features.shape[0],
        targets=rows.shape[1],
        taps=problem.taps,
        channels=problem.channels,
        channels_out=problem.channels_out,
        groups=problem.groups,
        activation=ACTIVATIONS.index(problem.activation),
        tf32=problem.tf32,
        alignment_in=alignment(problem.channels, features),
        alignment_out=alignment(problem.channels_out, w, residual, out),
    )


def _by_tensor_cores(conv, plan):
    """Return the launches that pack weights and multiply."""
    pack = Pack(
        kernels.prepare(
            _FILE, "pack_site_weights", (conv.element, conv.element == "float"),
            min(-(-conv.packed_bytes // (16 * 256)), 2**16), 256, 4,
            (conv.taps, conv.channels, conv.channels_out),
        ),
        conv.packed_bytes, 1, 2,
    )  # fmt: skip
    multiply = kernels.prepare(
        _FILE, plan.kernel, plan.template(conv), plan.tiles(conv), plan.threads, 8,
        (conv.sources, conv.targets, conv.taps, conv.channels, conv.channels_out),
        shared=plan.shared_bytes(conv), persistent=True, dependent=True,
    )  # fmt: skip

    def launch(features, w, rows, valid, scale, bias, residual, out, order):
        multiply(features, pack(w, scale, bias), *order, valid, residual, out)

    return launch


def _by_fma(conv, plan):
    """Return the launch that multiplies number by number."""
    multiply = kernels.prepare(
        _FILE, plan.kernel, plan.template(conv), plan.blocks(conv), 256, 8,
        (conv.sources, conv.targets, conv.taps, conv.channels, conv.channels_out, conv.groups),
        persistent=True,
    )  # fmt: skip
    table = np.float64 if conv.element == "double" else np.float32

    def launch(features, w, rows, valid, scale, bias, residual, out, order):
        scale, bias = (_as_table(array, table) for array in (scale, bias))
        multiply(features, w, rows, valid, scale, bias, residual, out)

    return launch


def _as_table(array, dtype):
    """Return a scale or bias, if there is one, as a kernel reads it."""
    if array is None or (array.dtype == dtype and array.flags.c_contiguous):
        return array
    return namespace(array).ascontiguousarray(array, dtype)
