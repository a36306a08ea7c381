"""sparse_scatter: put a block stack back into an image."""

import functools

import numpy as np

from ...core import launch as kernels
from ...core.arrays import (
    array_function,
    empty,
    same_memory,
    whole_pieces,
)
from ...core.byte_order import check_byte_orders
from ...core.checks import check_array, check_flag, check_result, check_written
from ...core.copy_image import copy_image
from ...core.device import shared_bytes, sm_count
from ...core.half_floats import adder
from ...core.operator import Operator, Plan
from ...errors import DTypeError, ShapeError
from ..checks import check_image, check_indices
from ..compositions import last_writer
from ..corners import (
    chunks,
    find_corners,
    inside_pieces,
    meeting,
    row_index,
    sub_images,
    swap_layout,
)
from ..grid import resolve_grid, resolve_layout
from .config import configure_copy
from .overlap import combination, put, scatter_overlap_cuda, scatter_pixels, scratch_sizes


@array_function
def sparse_scatter(
    blocks,
    bin_counts,
    active_block_indices,
    x,
    *,
    bsize,
    boffset=(0, 0),
    bstride=None,
    add=False,
    atomic=False,
    transpose=False,
    data_format="NHWC",
    out=None,
):
    """Write the blocks over a copy of an image, or add them to it.

    ``y[n, h0 + i, w0 + j, c] = blocks[b, i, j, c]`` (``+=`` with ``add``) with
    ``(n, hi, wi) = active_block_indices[b]``, ``h0 = boffset[0] + bstride[0] * hi``; elsewhere
    ``y`` is ``x``. What falls outside the image is dropped, and so are rows at or past
    ``bin_counts`` and rows whose ``n`` is not an image of the batch.

    Where blocks overlap, the later row wins; with ``add`` the rows are added one after another, in
    their order and in the dtype of ``x``. Either way the result is the same bits on every run.

    Parameters
    ----------
    blocks : array, shape (M, bsize[0], bsize[1], C), or (M, C, bsize[0], bsize[1])
        Block stack, laid out as :func:`sparse_gather` with the same ``transpose`` and
        ``data_format`` gives it; of the dtype of ``x``. C-contiguous; a NumPy array that is not is
        copied.
    bin_counts : int32 array, shape (1,)
        Number of active blocks, as :func:`reduce_mask` returns it.
    active_block_indices : int32 array, shape (M, 3)
        Rows ``(n, hi, wi)``, as :func:`reduce_mask` returns them: no row twice, unless ``atomic``.
    x : array, shape (N, H, W, C), or (N, C, H, W) with ``data_format="NCHW"``
        Image under the blocks. C-contiguous; a NumPy array that is not is copied. Modified only
        when it is also ``out``.
    bsize : int or (int, int)
        Block size ``(h, w)`` in pixels.
    boffset : (int, int)
        Corner of block (0, 0) in the image; negative for padding.
    bstride : (int, int), optional
        Distance between block corners; ``bsize`` by default.
    add : bool
        Add the blocks to the image instead of writing over it.
    atomic : bool
        The same pixel may be written more than once. Needed with ``add`` where blocks overlap
        (``bstride < bsize``); and for a list of indices that holds a row twice.
    transpose : bool
        The blocks have the other layout: NCHW blocks for an NHWC image, and the reverse.
    data_format : "NHWC" or "NCHW"
        Layout of ``x``.
    out : array, optional
        Receives the result, and is returned; ``out=x`` works in place, with no copy.

    Returns
    -------
    y : array of the shape and dtype of ``x``
        In the library and on the device of ``x``.

    Raises
    ------
    ShapeError
        If a size is wrong, an array is not contiguous, ``out`` does not fit, or overlapping blocks
        are added without ``atomic``.
    DTypeError
        If ``blocks`` and ``x`` differ in dtype, or the dtype cannot be added.
    DeviceError
        If arrays belong to different libraries or devices.

    Source: Ren et al. 2018, arXiv:1801.02108, section 3.2.
    Kernel: cuda_src/block_sparse/gather_scatter/sparse_scatter.cu

    Examples
    --------
    >>> import numpy as np
    >>> counts, indices = np.array([1], np.int32), np.array([[0, 0, 1]], np.int32)
    >>> y = sparse_scatter(np.ones((1, 2, 2, 1)), counts, indices, np.zeros((1, 2, 4, 1)), bsize=2)
    >>> y[0, :, :, 0]
    array([[0., 0., 1., 1.],
           [0., 0., 1., 1.]])
    """
    options = (bsize, boffset, bstride, add, atomic, transpose, data_format)
    plan = SCATTER.plan_for((blocks, bin_counts, active_block_indices, x, out), options)
    under = x
    if out is None:
        out = empty(plan.shape, x.dtype, x)
    elif out is x or same_memory(out, x):
        check_written(out, _READ[:3], (blocks, bin_counts, active_block_indices))
        under = None  # it is there already
    else:
        check_written(out, _READ, (blocks, bin_counts, active_block_indices, x))
    plan.run(blocks, bin_counts, active_block_indices, under, out)
    return out


_READ = ("blocks", "bin_counts", "active_block_indices", "x")


def sparse_scatter_var(blocks, bin_counts, active_block_indices, x, **options):
    """Scatter in place: :func:`sparse_scatter` with ``out=x``, under the original's name.

    Parameters
    ----------
    blocks, bin_counts, active_block_indices, x, **options
        As for :func:`sparse_scatter`; ``x`` is written, and ``out`` may not be given.

    Returns
    -------
    x : array
        The very array that was passed.

    Raises
    ------
    ShapeError, DTypeError, DeviceError
        As :func:`sparse_scatter`.

    Source: Ren et al. 2018, arXiv:1801.02108, section 3.2.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.zeros((1, 2, 2, 1))
    >>> counts, indices = np.array([1], np.int32), np.zeros((1, 3), np.int32)
    >>> sparse_scatter_var(np.ones((1, 1, 1, 1)), counts, indices, x, bsize=1) is x
    True
    """
    return sparse_scatter(blocks, bin_counts, active_block_indices, x, out=x, **options)


def _resolve(specs, options):
    """Check all arguments; return the layout and the grid."""
    blocks, bin_counts, active_block_indices, x, out = specs
    bsize, boffset, bstride, add, atomic, transpose, data_format = options
    grid = resolve_grid(bsize, boffset, bstride)
    check_flag("add", add)
    check_flag("atomic", atomic)
    check_image("x", x)
    check_image("blocks", blocks, like=x)
    check_indices(bin_counts, active_block_indices, like=x)
    layout = resolve_layout(x, data_format, transpose)
    rows = active_block_indices.shape[0]
    check_array("blocks", blocks, shape=layout.blocks_shape(rows, grid.bsize))
    if blocks.dtype != x.dtype:
        check_byte_orders({"x": x, "blocks": blocks})
        raise DTypeError(f"blocks must have the dtype of x, {x.dtype}, got {blocks.dtype}")
    if add and grid.overlaps and not atomic:
        raise ShapeError(
            f"atomic must be True to add blocks that overlap, got bstride {grid.bstride} under "
            f"bsize {grid.bsize}; pass atomic=True (the result is reproducible all the same)"
        )
    if add:
        _check_addable(x)
    check_result(out, x.new(x.shape))
    return layout, grid


def _infer(specs, options):
    """Check all arguments; return the spec of the result."""
    _resolve(specs, options)
    return (specs[3].new(specs[3].shape),)


def _plan(specs, options):
    """Check all arguments; return the plan of the call."""
    layout, grid = _resolve(specs, options)
    _, _, _, add, atomic, _, _ = options
    return plan_scatter(specs, layout, grid, bool(add), bool(grid.overlaps or atomic))


def plan_scatter(specs, layout, grid, add, overlap):
    """Return the plan of a checked call; blocks may share pixels where ``overlap`` is set.

    What it runs takes None in place of x where ``out`` holds it already.
    """
    blocks, _, active_block_indices, x, out = specs
    results, fixed = (x.new(x.shape),), {"layout": layout, "grid": grid, "add": add}
    if not x.size or not blocks.size:  # no pixel to write, or none to write it with
        return Plan(results, _nothing_scattered, base=(3,))
    if not x.on_gpu:
        run = functools.partial(scatter_numpy, **fixed, overlap=overlap)
        return Plan(results, run, base=(3,))
    if overlap:
        sizes = scratch_sizes(active_block_indices.shape[0], layout, grid)

        def run(blocks, bin_counts, active_block_indices, x, out):
            _copy_below(x, out)
            scatter_overlap_cuda(blocks, bin_counts, active_block_indices, out, **fixed)

        return Plan(results, run, scratch=sum(map(whole_pieces, sizes)), base=(3,))
    launch = _sparse_scatter_cuda(blocks, out or results[0], layout, grid, add)

    def run(blocks, bin_counts, active_block_indices, x, out):
        _copy_below(x, out)
        launch(out, bin_counts, active_block_indices, blocks)

    return Plan(results, run, launch, operands=(4, 1, 2, 0), base=(3,))


def _copy_below(x, out):
    """Copy the image below the blocks, unless it is there already."""
    if x is not None and not same_memory(x, out):
        copy_image(x, out)


def _nothing_scattered(blocks, bin_counts, active_block_indices, x, out):
    """Copy the image: there is no pixel of a block."""
    _copy_below(x, out)


def _check_addable(x):
    """Raise unless elements of the dtype can be added."""
    if x.dtype.name != "bfloat16" and x.dtype.kind not in "buifc":
        raise DTypeError(f"x must be of a number dtype to add to it, got {x.dtype}")


def scatter_numpy(
    blocks, bin_counts, active_block_indices, x, y, *, layout, grid, add, overlap
):  # fmt: skip
    """Write parts of the image; overlapping blocks go by pixel number, in row order.

    ``x`` is None where ``y`` holds it already.
    """
    if x is not None:
        _copy_below(x, y)
    corners = find_corners(bin_counts, active_block_indices, grid)
    corners = meeting(corners, layout, grid.bsize)
    if not len(corners.rows):
        return
    add = adder(y.dtype) if add else None
    if overlap:
        scatter_pixels(blocks, corners, y, layout, grid.bsize, add)
        return
    # Sums of halves take two words for each of them besides: fewer are added at a time.
    part_bytes = blocks[:1].nbytes * (2 if add and y.dtype == np.float16 else 1)
    for (i0, i1), (j0, j1), cut in inside_pieces(corners, layout, grid.bsize):
        every = sub_images(y, layout, (i1 - i0, j1 - j0))
        inner = (slice(i0, i1), slice(j0, j1))
        inner = (*inner, slice(None)) if layout.blocks_channels_last else (slice(None), *inner)
        # A run of blocks that is only written needs no temporaries.
        swapped = layout.channels_last != layout.blocks_channels_last
        copied = add or swapped or not isinstance(row_index(cut.rows), slice)
        for part in chunks(cut, part_bytes) if copied else [cut]:
            values = blocks[(row_index(part.rows), *inner)]
            if swapped:
                values = _swapped(values, layout.blocks_channels_last)
            put(every, (part.n, part.h0 + i0, part.w0 + j0), values, add)


def _swapped(blocks, channels_last):
    """Return a copy of ``blocks``, given with their channels last or first, the other way round."""
    m, a, b, c = blocks.shape
    given, swapped = ((a * b, c), (c, a, b)) if channels_last else ((a, b * c), (b, c, a))
    copy = np.empty((m, *swapped), blocks.dtype)
    swap_layout(copy.reshape(m, *given[::-1]), blocks.reshape(m, *given))
    return copy


def _sparse_scatter_cuda(blocks, y, layout, grid, add):
    """Prepare one launch, for blocks that share no pixel; see sparse_scatter.cu."""
    element, functor = combination(y, add)
    device = sm_count(), shared_bytes()
    config = configure_copy(y, blocks, layout, grid, device, gathers=False, element=element)
    return kernels.prepare(
        "block_sparse/gather_scatter/sparse_scatter",
        config.kernel("scatter"),
        (*config.template, functor),
        config.grid,
        config.block,
        4,
        config.scalars,
        config.shared,
        persistent=True,
        dependent=True,
    )


def _gradient(ops, arrays, options, grad, wanted):
    """Return the gradients of blocks and x: each pixel's goes to what the result shows there."""
    blocks, bin_counts, active_block_indices, *_ = arrays
    *grid, add, atomic, transpose, data_format = options
    active = (bin_counts, active_block_indices)
    layout = {"transpose": transpose, "data_format": data_format}
    overlap = bool(atomic) or resolve_grid(*grid).overlaps
    gradients = {}
    if "blocks" in wanted:
        gradients["blocks"] = ops.gather(grad, *active, *grid, **layout)
        if overlap and not add:
            last = last_writer(ops, grad, *active, *grid, **layout)
            gradients["blocks"] = ops.where(last, gradients["blocks"], 0)
    if "x" in wanted and add:
        gradients["x"] = grad
    elif "x" in wanted:
        zeros = ops.zeros(ops.shape(blocks), blocks.dtype, like=grad)
        gradients["x"] = ops.scatter(zeros, *active, grad, *grid, atomic=overlap, **layout)
    return gradients


SCATTER = Operator(
    "sparse_scatter",
    arrays=(*_READ, "out"),
    options=("bsize", "boffset", "bstride", "add", "atomic", "transpose", "data_format"),
    infer=_infer,
    plan=_plan,
    gradient=_gradient,
    linear=("blocks", "x"),
)
