"""What max and average pooling of a stack share: windows over blocks with their rims."""

import math
from numbers import Real

import numpy as np

from ...core.arrays import compute_dtype, empty, is_cupy, namespace, vector_bytes
from ...core.checks import check_flag, check_out, check_result, check_written
from ...core.compile import cpp_name
from ...core.operator import Plan
from ...errors import ShapeError
from ..corners import CHUNK_BYTES
from .block_table import TABLE_ARRAYS, BlockTable, split_table
from .checks import check_like, check_stack, computing
from .fetch import fetch
from .neighbours import Places, add_back
from .stack_pool_launch import StackPool
from .stages import resolve_window
from .taps import Taps


def resolve_pool(x, table, kernel, strides, padding, dilation, ceil_mode):
    """Check the arguments of a pooling; return its Window."""
    check_stack("x", x, table)
    check_flag("ceil_mode", ceil_mode)
    strides = kernel if strides is None else strides
    return resolve_window(table, kernel, strides, padding, dilation, ceil_mode=bool(ceil_mode))


def prepare_out(out, shape, x, table):
    """Allocate the result, or check ``out``."""
    if out is None:
        return empty(shape, x.dtype, x)
    check_out(out, shape, x.dtype, x, (("x", x), ("table", table.grid)))
    return out


def resolve_call(specs, sizes, window_options):
    """Check the arguments of a pooling; return the specs of result and table, and the Window."""
    x, *arrays, out = specs
    table = BlockTable(*arrays, *sizes)
    window = resolve_pool(x, table, *window_options)
    result = x.new((x.shape[0], *window.coarse.block_size, x.shape[3]))
    check_result(out, result)
    return result, table, window


def plan_call(specs, resolved, prepare, body):
    """Return the plan of a checked pooling: the kernel that ``prepare`` launches, or array code.

    ``body`` takes x, the table and the receiving array.
    """
    result, table, window = resolved
    if not result.size:
        return Plan((result,), lambda *arrays: None)
    x, *_, out = specs
    launch = prepare(describe_pool(x, table, window, out or result)) if x.on_gpu else None
    return run_plan(result, table, launch, body)


def run_plan(result, table, launch, body):
    """Return the plan that runs a launch, or ``body`` where there is none."""
    if launch is not None:
        single = launch if hasattr(launch, "on") else None  # several kernels have no address
        operands = (0, 1, 2, 3, 4)
        return Plan((result,), launch, single, operands=operands, by_kernels=True)
    sizes = table.block_size, table.image_size

    def run(x, bin_counts, active_block_indices, grid, out):
        with computing(x):
            body(x, BlockTable(bin_counts, active_block_indices, grid, *sizes), out)

    return Plan((result,), run)


def call_pool(operator, x, table, options, out):
    """Call the operator of a pooling on native arrays."""
    arrays, sizes = split_table(table)
    plan = operator.plan_for((x, *arrays, out), (*sizes, *options))
    if out is None:
        out = empty(plan.shape, x.dtype, x)
    else:
        check_written(out, ("x", *TABLE_ARRAYS), (x, *arrays))
    plan.run(x, *arrays, out)
    return out


def window_taps(window):
    """Return the window's taps along both axes."""
    return [
        Taps(-before, s, d, k, b)
        for before, s, d, k, b in zip(
            window.before, window.strides, window.dilation, window.kernel,
            window.coarse.block_size, strict=True,
        )
    ]  # fmt: skip


def parts(places, x, window):
    """Cut the rows into slices whose blocks with rims fit in a cache; on a GPU there is one."""
    halo = [axis.halo().count for axis in window_taps(window)]
    itemsize = compute_dtype(x.dtype).itemsize
    return slices_of(places, x, 2 * halo[0] * halo[1] * x.shape[3] * itemsize)


def slices_of(places, x, row_bytes):
    """Cut the rows into slices of temporaries that fit in a cache; on a GPU there is one."""
    if is_cupy(x):
        return [slice(0, len(places))]
    step = max(1, CHUNK_BYTES // max(row_bytes, 1))
    return [slice(i, min(i + step, len(places))) for i in range(0, len(places), step)]


def read_windows(x, places, window, dtype, fill=0):
    """Return the blocks of some rows with all pixels that the windows read."""
    down, across = (axis.halo() for axis in window_taps(window))
    halo = namespace(x).empty((len(places), down.count, across.count, x.shape[3]), dtype)
    fetch(x, places, down, across, halo, fill)
    return halo


def tap_slices(window, axis):
    """Return, for each tap along an axis, the lines of the halo that the outputs read."""
    taps = window_taps(window)[axis]
    length = (taps.outputs - 1) * taps.stride + 1
    starts = [taps.dilation * r for r in range(taps.count)]
    return [slice(start, start + length, taps.stride) for start in starts]


def reduce_windows(halo, window, ufunc):
    """Reduce each window: along its height, then along its width."""
    first, *others = (halo[:, lines] for lines in tap_slices(window, 0))
    total = first.copy()
    for lines in others:
        ufunc(total, lines, out=total)
    first, *others = (total[:, :, lines] for lines in tap_slices(window, 1))
    result = first.copy()
    for lines in others:
        ufunc(result, lines, out=result)
    return result


def pixels_in_windows(places, window, axis, padded=False):
    """Return int64 [m, P]: how many pixels of the image each window has along an axis.

    If ``padded``, those of the padding count too: for windows without dilation.
    """
    taps = window_taps(window)[axis]
    xp, size = namespace(places.n), window.fine.image_size[axis]
    start = places.first_pixels(axis)[:, None] + taps.first + taps.stride * xp.arange(taps.outputs)
    if padded:
        end = xp.minimum(start + taps.count, size + window.pads[axis][1])
        return xp.maximum(end - start, 0)
    count = xp.zeros(start.shape, np.int64)
    for tap in range(taps.count):
        pixel = start + taps.dilation * tap
        count += (pixel >= 0) & (pixel < size)
    return count


def describe_pool(x, table, window, out):
    """Return a pooling of these specs as its launch takes it."""
    return StackPool(
        element=cpp_name(x.dtype, "x"),
        element_bytes=x.dtype.itemsize,
        rows=table.capacity,
        images=table.batch,
        grid=tuple(map(int, table.grid.shape[1:])),
        channels=x.shape[3],
        block=window.fine.block_size,
        image=window.fine.image_size,
        block_out=window.coarse.block_size,
        kernel=window.kernel,
        strides=window.strides,
        dilation=window.dilation,
        pads=window.pads,
        alignment=vector_bytes(x.alignment, out.alignment),
    )


def check_pool_grad(grad_y, x, table, window):
    """Raise unless ``grad_y`` is a stack of the pooling's result."""
    after = table.at(*window.coarse)
    check_stack("grad_y", grad_y, after, channels=x.shape[3])
    check_like("grad_y", grad_y, x)
    return after


def spread(grad_halo, x, table, window, fill=0):
    """Return the gradient of ``x`` from that of its blocks with rims, in the dtype of ``x``."""
    places = Places.of(table)
    down, across = (axis.halo() for axis in window_taps(window))
    total = namespace(x).zeros((len(places), *x.shape[1:]), grad_halo.dtype)
    add_back(grad_halo, places, down, across, total, fill)
    dx = empty(x.shape, x.dtype, x)
    dx[: len(places)] = total
    dx[len(places) :] = namespace(x).zeros((), x.dtype)
    return dx


def check_divisor(divisor):
    """Raise unless ``divisor`` is None or a number other than 0 that a float can hold."""
    is_number = isinstance(divisor, Real) and not isinstance(divisor, bool)
    if divisor is not None and not (is_number and divisor != 0 and _is_float(divisor)):
        raise ShapeError(
            f"divisor must be None or a number other than 0 that a float can hold, got {divisor!r}"
        )


def _is_float(number):
    try:
        return not math.isnan(number)
    except OverflowError:
        return False
