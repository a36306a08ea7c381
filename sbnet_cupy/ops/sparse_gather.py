"""sparse_gather: copy the active blocks of an image into a stack."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .. import _kernels
from .._arrays import (
    array_function,
    check_apart,
    check_array,
    check_out,
    compute_dtype,
    empty,
    is_cupy,
    is_float,
    namespace,
)
from ..errors import DTypeError, ShapeError
from ._copy_plan import plan_copy
from ._grid import (
    channels_last_view,
    check_image,
    check_indices,
    chunks,
    find_corners,
    pixels,
    resolve_grid,
    resolve_layout,
    split_inside,
    windows,
)
from ._plans import Plans
from .activation import ACTIVATIONS, apply_activation, check_activation


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
        Image. Any dtype of 1, 2, 4, 8 or 16 bytes. C-contiguous.
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

    Source: Ren et al. 2018, arXiv:1801.02108, section 3.2. Kernel: cuda_src/sparse_gather.cu

    Examples
    --------
    >>> import numpy as np
    >>> x = np.arange(36.0).reshape(1, 6, 6, 1)
    >>> counts, indices = np.array([1], np.int32), np.array([[0, 1, 1]], np.int32)
    >>> sparse_gather(x, counts, indices, bsize=2, bstride=2)[0, :, :, 0]
    array([[14., 15.],
           [20., 21.]])
    """
    arrays = (x, bin_counts, active_block_indices, scale, shift)
    options = (bsize, boffset, bstride, transpose, data_format, activation)
    key = _PLANS.key((*arrays, out), options) if is_cupy(x) else None
    launch = _PLANS.get(key)
    if launch is not None:
        if out is None:
            out = empty(launch.shape, x.dtype, x)
        else:
            check_apart(out, zip(_ARRAY_NAMES, arrays, strict=True))
        launch.run(x, bin_counts, active_block_indices, out, scale, shift)
        return out

    shape, layout, grid = resolve_gather(*arrays, *options)
    if out is None:
        out = empty(shape, x.dtype, x)
    else:
        check_out(out, shape, x.dtype, x, zip(_ARRAY_NAMES, arrays, strict=True))
    if not x.size:
        out[...] = 0 if is_cupy(out) else np.zeros((), out.dtype)
    elif is_cupy(x):
        scale, shift = _same_dtype(scale, shift, compute_dtype(x.dtype))
        launch = _Launch(shape, _sparse_gather_cuda(x, out, layout, grid, scale, shift, activation))
        launch.run(x, bin_counts, active_block_indices, out, scale, shift)
        if scale is arrays[3] and shift is arrays[4]:  # else they are converted at each call
            _PLANS.keep(key, launch)
    else:
        affine = None
        if scale is not None or shift is not None or activation is not None:
            affine = (scale, shift, activation)
        _sparse_gather_numpy(x, bin_counts, active_block_indices, out, layout, grid, affine)
    return out


class _Launch(NamedTuple):
    """A checked call: the shape of the blocks, and the kernel with its parameters."""

    shape: tuple
    run: Callable


_PLANS = Plans()
_ARRAY_NAMES = ("x", "bin_counts", "active_block_indices", "scale", "shift")


def resolve_gather(
    x, bin_counts, active_block_indices, scale, shift,
    bsize, boffset, bstride, transpose, data_format, activation,
):  # fmt: skip
    """Check all arguments but ``out``; return the shape of the blocks, the layout and the grid."""
    grid = resolve_grid(bsize, boffset, bstride)
    check_image("x", x)
    check_indices(bin_counts, active_block_indices, like=x)
    layout = resolve_layout(x, data_format, transpose)
    _check_affine(x, layout.C, scale, shift, activation)
    return layout.blocks_shape(len(active_block_indices), grid.bsize), layout, grid


def _check_affine(x, channels, scale, shift, activation):
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


def _sparse_gather_numpy(x, bin_counts, active_block_indices, out, layout, grid, affine):
    """Copy windows of the image; blocks that cross its edge go pixel by pixel index."""
    corners = find_corners(bin_counts, active_block_indices, layout, grid)
    if len(corners.rows) < len(out):
        out[...] = np.zeros((), out.dtype)  # rows that no image fills
    inside, edge = split_inside(corners, layout, grid.bsize)
    block_bytes = out[:1].nbytes
    swap = (0, 3, 1, 2) if layout.channels_last else (0, 2, 3, 1)
    keep = layout.channels_last == layout.blocks_channels_last

    if len(inside.rows):
        every = windows(x, layout, grid.bsize)
        for part in chunks(inside, block_bytes):
            blocks = _apply_affine(every[part.n, part.h0, part.w0], layout, affine)
            out[part.rows] = blocks if keep else blocks.transpose(swap)
    image = channels_last_view(x, layout.channels_last)
    for part in chunks(edge, block_bytes):
        flat, valid = pixels(part, layout, grid.bsize)
        n, hw = np.divmod(flat, layout.H * layout.W)
        blocks = image[n, hw // layout.W, hw % layout.W]
        if affine:
            blocks = _apply_affine(blocks, layout._replace(channels_last=True), affine)
        blocks[~valid] = np.zeros((), blocks.dtype)
        out[part.rows] = blocks if layout.blocks_channels_last else blocks.transpose(0, 3, 1, 2)


def _apply_affine(blocks, layout, affine):
    """Return ``activation(blocks * scale + shift)`` rounded to the blocks' dtype."""
    if affine is None:
        return blocks
    scale, shift, activation = affine
    dtype = compute_dtype(blocks.dtype)
    values = blocks.astype(dtype)
    per_channel = (-1,) if layout.channels_last else (-1, 1, 1)
    if scale is not None:
        values *= scale.astype(dtype).reshape(per_channel)
    if shift is not None:
        values += shift.astype(dtype).reshape(per_channel)
    return apply_activation(values, activation).astype(blocks.dtype)


def _sparse_gather_cuda(x, out, layout, grid, scale, shift, activation):
    """Prepare one launch over all rows; see cuda_src/sparse_gather.cu."""
    transform, element = "Move", None
    tables = [table for table in (scale, shift) if table is not None]
    if tables or activation is not None:
        parameter = _kernels.cpp_name(tables[0].dtype, "scale") if tables else "float"
        element = _kernels.cpp_name(x.dtype, "x")
        transform = f"Affine<{element}, {parameter}, {ACTIVATIONS.index(activation)}>"
    plan = plan_copy(
        x, out, layout, grid, _kernels.sm_count(), element=element, per_channel=element is not None
    )
    return _kernels.prepare(
        "sparse_gather",
        plan.kernel("gather"),
        (*plan.template, transform),
        plan.grid,
        plan.block,
        6,
        plan.scalars,
        persistent=True,
    )


def _same_dtype(scale, shift, dtype):
    """Bring scale and shift to one dtype when they differ; the usual case copies nothing."""
    if scale is None or shift is None or scale.dtype == shift.dtype:
        return scale, shift
    xp = namespace(scale)
    return xp.asarray(scale, dtype), xp.asarray(shift, dtype)
