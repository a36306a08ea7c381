"""Launches of the kernels of a convolution over a kernel map.

Kernels: cuda_src/submanifold/site_conv.cu.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..core import launch as kernels
from ..core.arrays import namespace, vector_bytes
from ..core.compile import cpp_name
from ..core.device import current_device
from ..core.graph_memory import memory_of_graphs
from ..core.operator import Plan
from ..core.packed import Pack, PackedPlan, dtype_of_tables
from ..dense.activation import ACTIVATIONS
from ..dense.packed_weights import PackedWeights
from .site_conv_plan import (
    FmaPlan,
    OncePlan,
    SiteConvSizes,
    TilesPlan,
    all_resident,
    plan_site_conv,
)
from .site_order import SiteOrder, site_order
from .site_tiles import SiteTiles, TileShape, site_tiles

_FILE = "submanifold/site_conv"


def plan_kernel(problem, kernel_size, features, w, rows, scale, bias, residual, out, result):
    """Return the Plan of a call by a kernel; None where there is none. All arrays are specs."""
    if not (w.contiguous and rows.contiguous and features.size):
        return None
    conv = describe(problem, features, w, rows, residual, out)
    plan = plan_site_conv(conv, current_device())
    if plan is None:
        return None
    if isinstance(plan, FmaPlan):
        return Plan((result,), _by_fma(conv, plan))
    tiled = isinstance(plan, TilesPlan)
    whole = plan.whole(conv) if tiled else 1
    tables = dtype_of_tables(w.dtype, (scale, bias))
    pack, multiply, multiply_early = _by_tensor_cores(conv, plan, whole, tables)
    how = ("site_conv", conv.element, conv.steps(whole))
    order_operands = range(9, 9 + len((SiteTiles if tiled else SiteOrder)._fields))

    def sort(rows):
        listed = site_tiles if tiled else site_order
        return listed(rows, conv.sources, kernel_size, plan.order)

    def run(features, rows, valid, w, scale, bias, residual, out, order=None):
        if order is None:
            order = sort(rows)
        if isinstance(w, PackedWeights):
            multiply(features, w.packed(how, pack), *order, valid, residual, out)
        else:
            multiply_early(features, pack(w, scale, bias), *order, valid, residual, out)

    return OrderedPlan(
        (result,), run, launch=multiply, operands=(0, 8, *order_operands, 2, 6, 7), pack=pack,
        how=how, weights=(3, 4, 5), early_launch=multiply_early, order=plan.order, sort=sort,
    )  # fmt: skip


@dataclass(eq=False, slots=True)
class OrderedPlan(PackedPlan):
    """The plan of a call that may be given the SiteOrder or SiteTiles of its map; else it sorts.

    Among the ``operands`` of the launch their arrays follow the packed weights.

    Parameters
    ----------
    order : bool or TileShape
        Whether rows are sorted by their taps; or the shape of the tiles.
    sort : function
        Of the rows of the map: the SiteOrder or SiteTiles.
    """

    order: bool | TileShape = False
    sort: Callable | None = None


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


def _by_tensor_cores(conv, plan, whole, tables):
    """Return what packs weights, with scale and bias of a dtype, and two launches that multiply.

    The second is for a call that packs: it begins while the kernel that packs runs, and may read
    all else at once.
    """
    size = conv.packed_bytes(whole)
    pack = Pack(
        kernels.prepare(
            _FILE, "pack_site_weights",
            (conv.element, cpp_name(tables, "scale and bias"), conv.element == "float"),
            min(-(-size // (16 * 256)), 2**16), 256, 4,
            (conv.taps, conv.channels, conv.channels_out, whole), dependent=True,
        ),
        size, 1, 2, tables,
    )  # fmt: skip
    pointers, sizes = 8, (conv.targets, conv.taps, conv.channels, conv.channels_out)
    if isinstance(plan, TilesPlan):
        pointers, sizes = 9, (*sizes, plan.order.most)
    else:
        sizes = (conv.sources, *sizes)

    def multiply(template, dependent):
        return kernels.prepare(
            _FILE, plan.kernel, template, plan.tiles(conv), plan.threads, pointers, sizes,
            shared=plan.shared_bytes(conv), persistent=True, dependent=dependent,
        )  # fmt: skip

    # On an H200 launches that overlap took 0.3 to 0.5 us less, but up to 8% more where there are
    # more thread blocks than the GPU holds at once: those of the next one take places of these.
    if isinstance(plan, TilesPlan | OncePlan) and all_resident(plan, conv, current_device()):
        both = multiply(plan.template(conv, overlap=True), True)
        return pack, both, both
    return pack, *(multiply(plan.template(conv), dependent) for dependent in (False, True))


def _by_fma(conv, plan):
    """Return what multiplies number by number, of the arrays of the operator."""
    multiply = kernels.prepare(
        _FILE, plan.kernel, plan.template(conv), plan.blocks(conv), 256, 8,
        (conv.sources, conv.targets, conv.taps, conv.channels, conv.channels_out, conv.groups),
        persistent=True,
    )  # fmt: skip
    table = np.float64 if conv.element == "double" else np.float32

    def run(features, rows, valid, w, scale, bias, residual, out):
        if isinstance(w, PackedWeights):
            w, scale, bias = w.copied()
        with memory_of_graphs(features):
            scale, bias = (_as_table(array, table) for array in (scale, bias))
        multiply(features, w, rows, valid, scale, bias, residual, out)

    return run


def _as_table(array, dtype):
    """Return a scale or bias, if there is one, as a kernel reads it."""
    if array is None or (array.dtype == dtype and array.flags.c_contiguous):
        return array
    return namespace(array).ascontiguousarray(array, dtype)
