"""The residual unit of ResNet, pre-activation and with a bottleneck, on the active blocks only."""

import numpy as np

from .._arrays import array_function, check_out, namespace
from ..blocks import calc_block_params_res_block, output_size, pair
from ..ops._copy_plan import same_memory
from ..ops.bottleneck_weights import check_unit
from ..ops.conv2d import check_precision, conv2d
from ..ops.sparse_gather import sparse_gather
from ..ops.sparse_scatter import sparse_scatter
from .sparse_conv import check_base, check_block_params, check_method, split_indices

KERNELS = [1, 3, 1]


@array_function
def sparse_res_block_bottleneck(
    x,
    weights,
    indices,
    block_params,
    *,
    strides=(1, 1),
    w_project=None,
    base=None,
    out=None,
    precision=None,
    method="auto",
):
    """Apply a residual unit where the blocks of an image are active.

    ``y = x + conv3(a3(conv2(a2(conv1(a1(x))))))`` with ``a_i(t) = relu(t * scale_i + shift_i)`` and
    SAME padding of ``conv2``: inside active blocks exactly the dense unit, at image borders too,
    where zeros pad ``a2(...)``. Elsewhere y is x, or its projection, or ``base``.

    Parameters
    ----------
    x : array, shape (N, H, W, Cin)
        Images; float16, bfloat16, float32 or float64. C-contiguous.
    weights : BottleneckWeights
        Kernels of the dtype of ``x``; scales and shifts of any floating dtype.
    indices : ActiveBlocks or (bin_counts, active_block_indices)
        What :func:`reduce_mask` returns for the grid of ``block_params``.
    block_params : BlockParams
        ``calc_block_params_res_block(x.shape, bsize, [1, 3, 1], strides)``.
    strides : int or (int, int)
        Strides of ``conv2``, and of the projection.
    w_project : array, shape (1, 1, Cin, Cout), optional
        Makes the shortcut ``conv2d(x, w_project, strides)`` instead of ``x``; needed where the unit
        changes the size or the number of channels.
    base : array, shape (N, H', W', Cout), optional
        Values outside active blocks. Modified only when it is also ``out``.
    out : array, shape (N, H', W', Cout), optional
        Receives the result, and is returned. ``out=x`` works in place where the shortcut is x;
        ``out=base`` works always.
    precision : None, "ieee" or "tf32"
        As for :func:`conv2d`.
    method : "auto", "gather" or "fused"
        As for :func:`sparse_conv2d`.

    Returns
    -------
    y : array, shape (N, H', W', Cout)
        In the dtype, in the library and on the device of ``x``.

    Raises
    ------
    ShapeError
        If ``block_params`` does not belong to this unit, sizes do not fit together, or
        ``w_project`` is missing.
    DTypeError
        If dtypes differ or are not floating.
    NotImplementedError
        If ``method`` is "fused".

    Source: He et al. 2016, arXiv:1603.05027, for the unit; Ren et al. 2018, arXiv:1801.02108,
    section 3.3, for its block-sparse form.

    Examples
    --------
    >>> from sbnet_cupy import BottleneckWeights, calc_block_params_res_block, reduce_mask
    >>> x = np.ones((1, 32, 32, 16), np.float32)
    >>> mask = np.zeros((1, 32, 32), bool)
    >>> mask[0, 5, 5] = True
    >>> params = calc_block_params_res_block(x.shape, 10, [1, 3, 1])
    >>> grid = {"bsize": params.bsize, "boffset": params.boffset, "bstride": params.bstride}
    >>> active = reduce_mask(mask, params.bcount, **grid)
    >>> y = sparse_res_block_bottleneck(x, BottleneckWeights.random(16, 4), active, params)
    >>> y.shape, bool((y != x).any()), bool((y[:, 8:] == x[:, 8:]).all())
    ((1, 32, 32, 16), True, True)
    """
    check_method(method)
    check_precision(precision)
    strides = pair(strides, "strides")
    cout = check_unit(x, weights, w_project, strides)
    image_hw = x.shape[1:3]
    calculated = (image_hw, KERNELS, strides, "SAME")
    check_block_params(block_params, calc_block_params_res_block, *calculated)
    shape = (x.shape[0], *output_size(image_hw, (3, 3), strides, "SAME"), cout)
    check_base(base, shape, x)
    if out is not None:
        _check_out(out, shape, x, weights, w_project, base)
    indices = split_indices(indices)

    residual = _residual(x, weights, indices, block_params, strides, precision)
    bsize = block_params.bsize_out
    if base is not None:
        blocks = _shortcut_blocks(x, w_project, indices, block_params, strides, precision)
        out = shortcut = sparse_scatter(blocks, *indices, base, bsize=bsize, out=out)
    elif w_project is not None:
        out = shortcut = conv2d(x, w_project, strides=strides, precision=precision, out=out)
    else:
        shortcut = x
    return sparse_scatter(residual, *indices, shortcut, bsize=bsize, add=True, out=out)


def _residual(x, weights, indices, block_params, strides, precision):
    """Return the stack ``conv3(a3(conv2(a2(conv1(a1(x))))))``, one value per output pixel."""
    blocks = sparse_gather(
        x,
        *indices,
        bsize=block_params.bsize,
        boffset=block_params.boffset,
        bstride=block_params.bstride,
        scale=weights.scale1,
        shift=weights.shift1,
        activation="relu",
    )
    options = {"padding": "VALID", "precision": precision, "activation": "relu"}
    second = {"scale": weights.scale2, "bias": weights.shift2}
    blocks = conv2d(blocks, weights.w1, **second, **options)
    outside = ~inside_image(indices[1], block_params, x.shape[1:3])
    namespace(x).copyto(blocks, 0.0, where=outside[..., None])  # the padding of conv2
    third = {"scale": weights.scale3, "bias": weights.shift3}
    blocks = conv2d(blocks, weights.w2, strides=strides, **third, **options)
    return conv2d(blocks, weights.w3, padding="VALID", precision=precision)


def inside_image(active_block_indices, block_params, image_hw):
    """Return bool ``[M, bh, bw]``: which pixels of the stack lie in the image."""
    xp = namespace(active_block_indices)
    axes = []
    for axis, size in enumerate(image_hw):
        first = active_block_indices[:, 1 + axis].astype(np.int64) * block_params.bstride[axis]
        pixel = first[:, None] + (xp.arange(block_params.bsize[axis]) + block_params.boffset[axis])
        axes.append((pixel >= 0) & (pixel < size))
    return axes[0][:, :, None] & axes[1][:, None, :]


def _shortcut_blocks(x, w_project, indices, block_params, strides, precision):
    """Return the stack of the shortcut's values, one per output pixel of the active blocks."""
    if w_project is None:
        return sparse_gather(x, *indices, bsize=block_params.bsize_out)
    blocks = sparse_gather(x, *indices, **shortcut_grid(block_params, strides))
    return conv2d(blocks, w_project, strides=strides, padding="VALID", precision=precision)


def shortcut_grid(block_params, strides):
    """Return the blocks of x that the projection reads.

    SAME pads a 1x1 kernel with nothing: output p reads input p * stride.
    """
    axes = list(zip(block_params.bsize_out, strides, strict=True))
    return {
        "bsize": tuple((n - 1) * s + 1 for n, s in axes),
        "bstride": tuple(n * s for n, s in axes),
    }


def _check_out(out, shape, x, weights, w_project, base):
    """Check ``out``: it may be base, or x where x is the shortcut, and overlap nothing else."""
    inputs = [("weights", array) for array in weights._arrays()]
    inputs.append(("w_project", w_project))
    if w_project is not None or not same_memory(out, x):
        inputs.append(("x", x))
    if base is not None and not same_memory(out, base):
        inputs.append(("base", base))
    check_out(out, shape, x.dtype, x, inputs)
