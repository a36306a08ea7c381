"""sparse_gather: copy the active blocks of an image into a stack."""

import functools

import numpy as np

from ...core import launch as kernels
from ...core.arrays import array_function, compute_dtype, empty, is_cupy, is_float, namespace
from ...core.checks import check_array, check_result, check_written
from ...core.compile import cpp_name
from ...core.device import shared_bytes, sm_count
from ...core.half_floats import widen
from ...core.operator import Operator, Plan
from ...dense.activation import ACTIVATIONS, apply_affine, check_activation
from ...errors import DTypeError, ShapeError
from ..checks import check_image, check_indices
from ..corners import chunks, clear_outside, find_corners, row_index, swap_layout
from ..grid import resolve_grid, resolve_layout
from .config import configure_copy


@array_function
def sparse_gather(
    x,
    bin_counts,
    active_block_indices,
    *,
    bsize,
    boffset=(0, 0),
    bstride=None,
    transpose=False,
    data_format="NHWC",
    scale=None,
    shift=None,
    activation=None,
    out=None,
):
    """Copy the active blocks of an image into a block stack.

    ``blocks[b, i, j, c] = x[n, h0 + i, w0 + j, c]`` with ``(n, hi, wi) = active_block_indices[b]``,
    ``h0 = boffset[0] + bstride[0] * hi``, ``w0 = boffset[1] + bstride[1] * wi``; 0 outside the
    image, in rows at or past ``bin_counts``, and where ``n`` is not an image of the batch.

    With ``scale``, ``shift`` or ``activation`` the value read becomes
    ``activation(x * scale + shift)``, computed in float32 (float64 for float64) and rounded once;
    what lies outside the image stays 0.

    Parameters
    ----------
    x : array, shape (N, H, W, C), or (N, C, H, W) with ``data_format="NCHW"``
        Image. Any dtype of 1, 2, 4, 8 or 16 bytes. C-contiguous; a NumPy array that is not is
        copied.
    bin_counts : int32 array, shape (1,)
        Number of active blocks, as :func:`reduce_mask` returns it.
    active_block_indices : int32 array, shape (M, 3)
        Rows ``(n, hi, wi)``, as :func:`reduce_mask` returns them.
    bsize : int or (int, int)
        Block size ``(h, w)`` in pixels.
    boffset : (int, int)
        Corner of block (0, 0) in the image; negative for padding.
    bstride : (int, int), optional
        Distance between block corners; ``bsize`` by default.
    transpose : bool
        Give the blocks the other layout: NCHW blocks of an NHWC image, and the reverse.
    data_format : "NHWC" or "NCHW"
        Layout of ``x``.
    scale, shift : float array, shape (C,), optional
        Factor and offset per channel, for example a folded batch norm.
    activation : None, "relu", "silu" or "gelu"
        Applied after scale and shift.
    out : array, optional
        Receives the blocks; it is returned, and nothing is allocated.

    Returns
    -------
    blocks : array, shape (M, bsize[0], bsize[1], C), or (M, C, bsize[0], bsize[1])
        Channels where ``x`` has them, or where ``transpose`` puts them. In the library and on the
        device of ``x``.

    Raises
    ------
    ShapeError
        If a size is wrong, an array is not contiguous or ``out`` does not fit.
    DTypeError
        If a dtype is wrong, or ``scale``, ``shift``, ``activation`` meet an integer image.
    DeviceError
        If arrays belong to different libraries or devices.

    Source: Ren et al. 2018, arXiv:1801.02108, section 3.2.
    Kernel: cuda_src/block_sparse/gather_scatter/sparse_gather.cu

    Examples
    --------
    >>> import numpy as np
    >>> x = np.arange(36.0).reshape(1, 6, 6, 1)
    >>> counts, indices = np.array([1], np.int32), np.array([[0, 1, 1]], np.int32)
    >>> sparse_gather(x, counts, indices, bsize=2, bstride=2)[0, :, :, 0]
    array([[14., 15.],
           [20., 21.]])
    """
    arrays = (x, bin_counts, active_block_indices, out, scale, shift)
    options = (bsize, boffset, bstride, transpose, data_format, activation)
    plan = GATHER.plan_for(arrays, options)
    if out is None:
        out = empty(plan.shape, x.dtype, x)
    else:
        check_written(out, _READ, (x, bin_counts, active_block_indices, scale, shift))
    plan.run(x, bin_counts, active_block_indices, out, scale, shift)
    return out


_READ = ("x", "bin_counts", "active_block_indices", "scale", "shift")


def _resolve(specs, options):
    """Check all arguments; return the spec of the blocks, the layout and the grid."""
    x, bin_counts, active_block_indices, out, scale, shift = specs
    bsize, boffset, bstride, transpose, data_format, activation = options
    grid = resolve_grid(bsize, boffset, bstride)
    check_image("x", x)
    check_indices(bin_counts, active_block_indices, like=x)
    layout = resolve_layout(x, data_format, transpose)
    check_affine(x, layout.C, scale, shift, activation)
    blocks = x.new(layout.blocks_shape(active_block_indices.shape[0], grid.bsize))
    check_result(out, blocks)
    return blocks, layout, grid


def _infer(specs, options):
    """Check all arguments; return the spec of the blocks."""
    return _resolve(specs, options)[:1]


def _plan(specs, options):
    """Check all arguments; return the plan of the call."""
    return plan_gather(specs, *_resolve(specs, options), options[-1])


def plan_gather(specs, blocks, layout, grid, activation):
    """Return the plan of a checked call that gives such blocks."""
    x, _, _, out, scale, shift = specs
    if not x.size:
        return Plan((blocks,), _nothing_gathered)
    if not x.on_gpu:
        fixed = {"layout": layout, "grid": grid, "activation": activation}
        return Plan((blocks,), functools.partial(gather_numpy, **fixed))
    wide = compute_dtype(x.dtype)
    tables = [table for table in (scale, shift) if table is not None]
    dtype = tables[0].dtype if tables else wide
    if all(table.dtype == dtype and table.contiguous for table in tables):
        launch = _sparse_gather_cuda(x, out or blocks, layout, grid, dtype, tables, activation)
        return Plan((blocks,), launch, launch, operands=tuple(range(6)))
    launch = _sparse_gather_cuda(x, out or blocks, layout, grid, wide, tables, activation)

    def run(x, bin_counts, active_block_indices, out, scale, shift):
        """Bring the tables to one dtype, and to contiguous memory, before the launch."""
        xp = namespace(x)
        tables = (t if t is None else xp.ascontiguousarray(t, wide) for t in (scale, shift))
        launch(x, bin_counts, active_block_indices, out, *tables)

    return Plan((blocks,), run)


def _nothing_gathered(x, bin_counts, active_block_indices, out, scale, shift):
    """Gather from an image with no pixels."""
    out[...] = 0 if is_cupy(out) else np.zeros((), out.dtype)


def check_affine(x, channels, scale, shift, activation):
    """Check the fused transformation."""
    check_activation(activation)
    for name, value in (("scale", scale), ("shift", shift)):
        if value is not None:
            check_array(name, value, kinds="f", like=x)
            if value.shape != (channels,):
                raise ShapeError(f"{name} must have shape ({channels},), got {value.shape}")
    fused = {"scale": scale, "shift": shift, "activation": activation}
    given = [name for name, value in fused.items() if value is not None]
    if given and not is_float(x.dtype):
        raise DTypeError(f"{given[0]} must be None for an image x of dtype {x.dtype}; use floats")


def gather_numpy(
    x, bin_counts, active_block_indices, out, scale, shift, *, layout, grid, activation
):
    """Take pixels by their numbers, some blocks at a time, and clear what is outside the image.

    A pixel is its ``C`` channels, or one element where the image has its channels first.
    """
    affine = None
    if scale is not None or shift is not None or activation is not None:
        affine = (scale, shift, activation)
    corners = find_corners(bin_counts, active_block_indices, grid)
    rows = len(corners.rows)
    out[rows:] = np.zeros((), out.dtype)
    if not rows or not out.size:
        return
    firsts, offsets, pixel = _pixel_numbers(corners, layout, grid.bsize)
    image = x.reshape(-1, pixel)
    direct = affine is None and layout.channels_last == layout.blocks_channels_last
    block_bytes = offsets.nbytes + (0 if direct else out[:1].nbytes)
    if affine is not None:
        block_bytes += out[0].size * _TRANSFORM_BYTES[affine[2]]
    for part in chunks(corners, block_bytes):
        numbers = (firsts[row_index(part.rows), None] + offsets).reshape(-1)
        stack = out[row_index(part.rows)]
        taken = stack.reshape(-1, pixel) if direct else np.empty((len(numbers), pixel), x.dtype)
        np.take(image, numbers, axis=0, out=taken, mode="clip")
        if not direct:
            _finish(taken, stack, layout, affine)
    clear_outside(out[:rows], corners, layout, grid.bsize)


# Bytes that an element takes while it is transformed.
_TRANSFORM_BYTES = {None: 8, "relu": 8, "silu": 24, "gelu": 56}


def _pixel_numbers(corners, layout, bsize):
    """Return (number of each block's first pixel, those of its others from there, pixel's size).

    Numbers outside the image are those of other pixels, or of none.
    """
    images, pixel = (1, layout.C) if layout.channels_last else (layout.C, 1)
    firsts = (corners.n * images * layout.H + corners.h0) * layout.W + corners.w0
    offsets = np.arange(bsize[0])[:, None] * layout.W + np.arange(bsize[1])
    planes = np.arange(images) * (layout.H * layout.W)
    return firsts, (planes[:, None] + offsets.reshape(-1)).reshape(-1), pixel


def _finish(taken, stack, layout, affine):
    """Transform the pixels taken for some blocks, and lay them out as the stack has them."""
    area = stack.size // (len(stack) * layout.C)
    inner = (area, layout.C) if layout.channels_last else (layout.C, area)
    taken = taken.reshape(len(stack), *inner)
    if affine is not None:
        taken = _apply_affine(taken, layout, affine)
    if layout.channels_last == layout.blocks_channels_last:
        stack.reshape(taken.shape)[...] = taken
    else:
        swap_layout(stack.reshape(len(stack), *inner[::-1]), taken)


def _apply_affine(blocks, layout, affine):
    """Return ``activation(blocks * scale + shift)`` rounded to the blocks' dtype."""
    scale, shift, activation = affine
    wide = widen(blocks)
    axis = -1 if layout.channels_last else 1
    return apply_affine(wide, scale, shift, activation, axis).astype(blocks.dtype, copy=False)


def _sparse_gather_cuda(x, out, layout, grid, dtype, tables, activation):
    """Prepare one launch over all rows; see sparse_gather.cu.

    ``dtype`` is that of the ``tables``: of the scale and the shift that there are.
    """
    transform, element = "Move", None
    if tables or activation is not None:
        parameter = cpp_name(dtype, "scale") if tables else "float"
        element = cpp_name(x.dtype, "x")
        transform = f"Affine<{element}, {parameter}, {ACTIVATIONS.index(activation)}>"
    config = configure_copy(
        x,
        out,
        layout,
        grid,
        (sm_count(), shared_bytes()),
        gathers=True,
        element=element,
        per_channel=element is not None,
    )
    return kernels.prepare(
        "block_sparse/gather_scatter/sparse_gather",
        config.kernel("gather"),
        (*config.template, transform),
        config.grid,
        config.block,
        6,
        config.scalars,
        config.shared,
        persistent=True,
        dependent=True,
    )


def _gradient(ops, arrays, options, grad, wanted):
    """Return the gradient of x for a gather with no scale, shift or activation.

    Blocks are added up where they were read. A gather may list a block twice, hence ``atomic``.
    """
    x, bin_counts, active_block_indices, *_ = arrays
    *grid, transpose, data_format, _ = options
    if "x" not in wanted:
        return {}
    image = ops.zeros(ops.shape(x), x.dtype, like=grad)
    layout = {"transpose": transpose, "data_format": data_format}
    return {
        "x": ops.scatter(
            grad, bin_counts, active_block_indices, image, *grid, add=True, atomic=True, **layout
        )
    }


GATHER = Operator(
    "sparse_gather",
    arrays=("x", "bin_counts", "active_block_indices", "out", "scale", "shift"),
    options=("bsize", "boffset", "bstride", "transpose", "data_format", "activation"),
    infer=_infer,
    plan=_plan,
    gradient=_gradient,
    linear=("x",),
)
