"""Launches of the kernels of a convolution over a kernel map.

Kernels: cuda_src/submanifold/site_conv.cu.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..core import launch as kernels
from ..core.arrays import empty, namespace, vector_bytes
from ..core.compile import cpp_name
from ..core.device import current_device
from ..core.graph_memory import memory_of_graphs
from ..core.operator import Plan
from ..core.packed import Pack, PackedPlan, dtype_of_tables
from ..dense.activation import ACTIVATIONS
from ..dense.packed_weights import PackedWeights
from .site_conv_instances import (
    COPIERS,
    FmaPlan,
    OncePlan,
    PipelinedPlan,
    SiteConvSizes,
    TilesPlan,
)
from .site_conv_plan import overlaps, plan_site_conv, rounded
from .site_order import SiteOrder, site_order
from .site_tiles import SiteTiles, TileShape, site_tiles

_FILE = "submanifold/site_conv"


def plan_kernel(problem, kernel_size, features, w, rows, scale, bias, residual, out, result):
    """Return the Plan of a call by a kernel; None where there is none. All arrays are specs."""
    if not (w.contiguous and rows.contiguous and features.size):
        return None
    conv = describe(problem, features, w, rows, residual, out)
    tables = dtype_of_tables(w.dtype, (scale, bias))
    return _plan_sized(conv, kernel_size, tables, result, conv.sources, conv.targets)


def _plan_sized(conv, kernel_size, tables, result, sources, targets, *_):
    """Return the plan of such a convolution with so many sites; None where there is no kernel."""
    again = functools.partial(_plan_sized, conv, kernel_size, tables, result)
    conv = conv._replace(sources=sources, targets=targets)
    result = result.new((targets, conv.channels_out))
    plan = plan_site_conv(rounded(conv), current_device())
    if plan is None:
        return None
    if isinstance(plan, FmaPlan):
        return Plan((result,), _by_fma(conv, plan), resized=again, by_kernels=True)
    steps = (0, conv.channels * conv.channels_out, conv.channels_out, 1)
    pack = _pack(_without_sites(conv), _whole(conv, plan), tables, steps, result.device)
    multiply, multiply_early = _by_tensor_cores(conv, plan)
    how = ("site_conv", conv.element, conv.steps(_whole(conv, plan)))
    sort = _sort(conv, plan, kernel_size)

    partials = _partial_bytes(conv, plan)

    def run(features, rows, valid, w, scale, bias, residual, out, order=None):
        if order is None:
            order = sort(rows)
        rest = *order, valid, residual, out, *parts_of_tiles(partials, features)
        if isinstance(w, PackedWeights):
            multiply(features, w.packed(how, pack), *rest)
        else:
            multiply_early(features, pack(w, scale, bias), *rest)

    return OrderedPlan(
        (result,), run, launch=multiply, operands=_operands(plan, 8, (2, 6, 7)), pack=pack, how=how,
        weights=(3, 4, 5), early_launch=multiply_early, order=plan.order, sort=sort,
        partials=partials, resized=again, by_kernels=True,
    )  # fmt: skip


def plan_back_kernel(problem, grad_y, w, back, reverse, out):
    """Return the Plan of a gradient of features by a kernel; None where there is none.

    ``problem`` is the convolution of ``grad_y`` over the map ``back`` that it is, and ``w`` has the
    weights of the one that is differentiated, in ``reverse`` order of its taps or not.
    """
    if not (w.contiguous and back.contiguous and grad_y.size):
        return None
    conv = describe(problem, grad_y, None, back, None, out)
    return _plan_back_sized(conv, w.dtype, reverse, out, conv.sources, conv.targets)


def _plan_back_sized(conv, dtype, reverse, out, sources, targets, *_):
    """Return the plan of such a gradient with so many sites; None where there is no kernel."""
    again = functools.partial(_plan_back_sized, conv, dtype, reverse, out)
    conv = conv._replace(sources=sources, targets=targets)
    out = out.new((targets, conv.channels_out))
    plan = plan_site_conv(rounded(conv), current_device())
    if plan is None:
        return None
    if isinstance(plan, FmaPlan):
        multiply = _by_fma(conv, plan)

        def run_fma(grad_y, w, back, out):
            with memory_of_graphs(grad_y):
                turned = swap_channels(w, conv.groups, reverse)
            multiply(grad_y, back, None, turned, None, None, None, out)

        return Plan((out,), run_fma, resized=again, by_kernels=True)
    step = conv.channels * conv.channels_out
    start, tap_step = ((conv.taps - 1) * step, -step) if reverse else (0, step)
    steps, only = (start, tap_step, 1, conv.channels), True
    pack = _pack(_without_sites(conv), _whole(conv, plan), dtype, steps, out.device, only)
    _, multiply = _by_tensor_cores(conv, plan)
    sort, partials = _sort(conv, plan, (conv.taps,)), _partial_bytes(conv, plan)

    def run(grad_y, w, back, out, order=None):
        order = sort(back) if order is None else order
        multiply(grad_y, pack(w), *order, None, None, out, *parts_of_tiles(partials, grad_y))

    return OrderedPlan(
        (out,), run, launch=multiply, operands=_operands(plan, 4, (None, None, 3)), pack=pack,
        weights=(1,), order=plan.order, sort=sort, partials=partials, resized=again,
        by_kernels=True,
    )  # fmt: skip


def swap_channels(w, groups, reverse):
    """Return ``[taps, C / groups, K]`` as the kernel of the transposed convolution.

    That is ``[taps, K / groups, C]``, its taps in ``reverse`` order or not.
    """
    taps, c, k = w.shape
    w = w[::-1] if reverse else w
    w = w.reshape(taps, c, groups, k // groups).transpose(0, 3, 2, 1)
    return namespace(w).ascontiguousarray(w).reshape(taps, k // groups, groups * c)


@dataclass(eq=False, slots=True)
class OrderedPlan(PackedPlan):
    """The plan of a call that may be given the SiteOrder or SiteTiles of its map; else it sorts.

    Among the ``operands`` of the launch their arrays follow the packed weights. Where thread blocks
    share tiles, the last operand is the memory of the parts of tiles.

    Parameters
    ----------
    order : bool or TileShape
        Whether rows are sorted by their taps; or the shape of the tiles.
    sort : function
        Of the rows of the map, and of the target's indices and the map's offsets where they are
        known: the SiteOrder or SiteTiles.
    partials : int
        Bytes of the parts of tiles that thread blocks share; not needed after the call.
    """

    order: bool | TileShape = False
    sort: Callable | None = None
    partials: int = 0


def bound_launch(plan, decided):
    """Return the launch of an OrderedPlan, bound to its packed weights, order and valid rows.

    It takes what is left: the features, a residual, the result, and the parts of tiles, if any.
    """
    left = (None,) * (3 if plan.partials else 2)
    places = range(len(decided) + 1, len(decided) + 1 + len(left))
    return plan.launch.bound((None, *decided, *left), (0, *places))


def parts_of_tiles(nbytes, like):
    """Return the memory of the parts of tiles: an array like another, if there are any."""
    if not nbytes:
        return ()
    with memory_of_graphs(like):
        return (empty((nbytes,), np.uint8, like),)


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


def _whole(conv, plan):
    """Return what the steps of a tap are a multiple of in packed weights."""
    return plan.whole(conv) if isinstance(plan, TilesPlan) else 1


def _sort(conv, plan, kernel_size):
    """Return a function of the rows of a map, which gives the order that a plan reads.

    It may be given the indices of the target and the map's offsets too, for site_tiles.
    """
    if isinstance(plan, TilesPlan):
        return lambda rows, *sites: site_tiles(rows, conv.sources, plan.order, *sites)
    return lambda rows, *sites: site_order(rows, conv.sources, kernel_size, plan.order)


def _operands(plan, packed, others):
    """Return the places of the arrays of a launch; those of packed weights and of the last ones."""
    kind = SiteTiles if isinstance(plan, TilesPlan) else SiteOrder
    end = packed + 1 + len(kind._fields)
    return (0, *range(packed, end), *others, *([end] if _is_shared(plan) else ()))


def _is_shared(plan):
    return isinstance(plan, PipelinedPlan) and plan.shared


def _partial_bytes(conv, plan):
    """Return the bytes of the parts of tiles that thread blocks of a plan share."""
    return plan.partial_bytes(conv, current_device().multiprocessors) if _is_shared(plan) else 0


def _without_sites(conv):
    """Return sizes that do not go with the number of sites, which decide how weights are packed."""
    return conv._replace(sources=0, targets=0, alignment_in=16, alignment_out=16, activation=0)


@functools.lru_cache(maxsize=1024)
def _pack(conv, whole, tables, steps, place, only_weights=False):
    """Return what packs weights, with scale and bias of a dtype unless it is ``only_weights``.

    ``steps`` say where they are: the first, and what is from one tap, input and output channel to
    the next. ``place`` is the current device.
    """
    size = conv.packed_bytes(whole)
    launch = kernels.prepare(
        _FILE, "pack_site_weights",
        (conv.element, cpp_name(tables, "scale and bias"), conv.element == "float"),
        min(-(-size // (16 * 256)), 2**16), 256, 4,
        (conv.taps, conv.channels, conv.channels_out, whole, *steps), dependent=True,
    )  # fmt: skip
    if only_weights:
        return Pack(launch.bound((None,) * 4, (0, 3)), size, 1, 0, tables)
    return Pack(launch, size, 1, 2, tables)


def _by_tensor_cores(conv, plan):
    """Return two launches that multiply, of which most plans use one.

    The second is for a call that packs: it begins while the kernel that packs runs, and may read
    all else at once.
    """
    sizes, shares = _targets(conv), current_device().multiprocessors
    if isinstance(plan, TilesPlan):
        sizes = (*sizes, plan.order.most)
    else:
        sizes = (conv.sources, *sizes, shares)
    shared, pointers = _is_shared(plan), len(_operands(plan, 0, (0, 0, 0)))

    def multiply(template, dependent):
        launch = kernels.prepare(
            _FILE, plan.kernel, template, shares if shared else plan.tiles(conv), plan.threads,
            pointers, sizes, shared=plan.shared_bytes(conv), persistent=not shared,
            dependent=dependent,
        )  # fmt: skip
        return _with_sum(conv, plan, shares, launch, pointers) if shared else launch

    # On an H200 launches that overlap took 0.3 to 0.5 us less, but up to 8% more where there are
    # more thread blocks than the GPU holds at once: those of the next one take places of these.
    if isinstance(plan, TilesPlan | OncePlan) and overlaps(plan, conv, current_device()):
        both = multiply(plan.template(conv, overlap=True), True)
        return both, both
    return tuple(
        kernels.Later(functools.partial(multiply, plan.template(conv), dependent))
        for dependent in (False, True)
    )


def _targets(conv):
    return conv.targets, conv.taps, conv.channels, conv.channels_out


def _with_sum(conv, plan, shares, multiply, pointers):
    """Return the launch of thread blocks that share tiles, and of what adds up their parts."""
    rows, columns = plan.tile
    threads = plan.threads - COPIERS
    slices = rows * columns * conv.element_bytes // (2 * 16 * threads)
    blocks = -(-conv.channels_out // columns) * (shares - 1) * slices
    add_up = kernels.prepare(
        _FILE, "site_conv_sum", plan.sum_template(conv), blocks, threads, 7,
        (*_targets(conv), shares), dependent=True,
    )  # fmt: skip
    _, packed, _, order, _, _, cuts, valid, residual, out, partials = range(pointers)
    places = (partials, packed, cuts, order, valid, residual, out)
    return kernels.Series((multiply, range(pointers)), (add_up, places))


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
