"""sparse_conv2d and sparse_res_block_bottleneck on tensors."""

import torch

from ..block_sparse.active_grid import check_active_grid, grid_of
from ..block_sparse.bottleneck.weights import BottleneckWeights
from ..block_sparse.checks import split_indices
from ..block_sparse.from_mask import find_blocks, is_mask, takes_blocks_from
from ..core.sizes import padding_pairs, pair
from ..errors import DTypeError, ShapeError
from ._bottleneck import CALLS as UNIT_CALLS
from ._bottleneck import UNIT, UNIT_INTO, keep_unit, same_size, unit_again
from ._convolution import CALLS as CONV_CALLS
from ._convolution import (
    SPARSE_CONV2D,
    SPARSE_CONV2D_INTO,
    conv_again,
    flatten_params,
    keep_conv,
    result_shape,
)
from ._native import check_tensors
from .ops import call, check_out, reduce_mask


def sparse_conv2d(
    x,
    w,
    indices,
    block_params=None,
    *,
    bsize=None,
    strides=(1, 1),
    padding="SAME",
    bias=None,
    activation=None,
    base=None,
    data_format="NHWC",
    w_format="HWIO",
    precision=None,
    out=None,
    method="auto",
    capacity=None,
):
    """Convolve an image where its blocks are active: :func:`sbnet_cupy.sparse_conv2d` on tensors.

    Differentiable, twice and more, with respect to ``x``, ``w``, ``bias`` and ``base``. The stack
    is not kept for the backward pass but gathered again. Under ``torch.autocast`` the float tensors
    are cast as for ``torch.nn.functional.conv2d``. Precision is what ``precision`` says, forwards
    and backwards; ``torch.backends`` is not asked.

    Parameters
    ----------
    x : tensor, shape (N, H, W, C), or (N, C, H, W) with ``data_format="NCHW"``
        Images. One that is not contiguous is copied. For an NCHW tensor in channels_last memory
        pass ``x.permute(0, 2, 3, 1)``, which is contiguous, as ``nn.SparseConv2d`` does.
    w : tensor, shape (R, S, C, K), or (K, C, R, S) with ``w_format="OIHW"``
        Kernel, of the dtype of ``x``; the latter is the layout of ``torch.nn.Conv2d``. On a GPU the
        fused method packs it: at each call if it requires grad, else after a call in which it did,
        and after a change that autograd's version counter shows, as that of an operation does.
        After a write behind it, such as to ``w.data``, call
        ``torch.autograd.graph.increment_version(w)``.
    indices, block_params, bsize, strides, padding, bias, activation, base, capacity
        As for :func:`sbnet_cupy.sparse_conv2d`. ``indices`` may be a mask on the device of ``x``;
        without ``capacity`` the call then waits for a GPU, as :func:`reduce_mask` does.
    data_format, w_format, precision, method
        As for :func:`sbnet_cupy.sparse_conv2d`.
    out : tensor, optional
        Receives the result, and is returned; contiguous. ``out=base`` works in place. Where
        gradients are recorded it is written by a copy.

    Returns
    -------
    y : tensor, shape (N, H', W', K), or (N, K, H', W')

    Raises
    ------
    ShapeError, DTypeError, DeviceError, NotImplementedError
        As :func:`sbnet_cupy.sparse_conv2d`; DTypeError also for what is no tensor.

    Source: Ren et al. 2018, arXiv:1801.02108, section 3.

    Examples
    --------
    >>> x, w = torch.ones(1, 8, 8, 3), torch.ones(3, 3, 3, 5, requires_grad=True)
    >>> mask = torch.zeros(1, 8, 8)
    >>> mask[0, 1, 1] = 1
    >>> y = sparse_conv2d(x, w, mask, bsize=4)
    >>> y.sum().backward()
    >>> w.grad[1, 1, 0, 0]
    tensor(16.)
    """
    if takes_blocks_from(indices, bsize, capacity):
        check_tensors(w=w)
        _check_4d(w=w)
        _check_formats(data_format, w_format)
        where = (x, data_format, _kernel_size(w, w_format), strides, padding)
        indices, block_params = _blocks(*where, indices, block_params, bsize, capacity)
    (counts, table), made_for = split_indices(indices), grid_of(indices)
    params = flatten_params(block_params)
    options = (params, strides, padding, activation, data_format, w_format, precision, method)
    tensors, spelled = (x, counts, table, base, out), (*options, made_for)
    key, known = CONV_CALLS.find(tensors, spelled, (w, None, bias))
    if known is not None:
        y = conv_again(key, known, x, w, counts, table, bias, base, out)
        if y is not None:
            return y
    check_tensors(
        x=x, w=w, bin_counts=counts, active_block_indices=table, bias=bias, base=base, out=out
    )
    _check_4d(x=x, w=w)
    check_active_grid(indices, x.shape[0], block_params.bcount)
    _check_formats(data_format, w_format)
    x, w, bias, base = autocast(x, w, bias, base)
    image_hw = _image_hw(x, data_format)
    kernel = _kernel_size(w, w_format)
    strides = pair(strides, "strides")
    (top, bottom), (left, right) = padding_pairs(image_hw, kernel, strides, padding)
    pads = (top, bottom, left, right)
    arguments = (
        x, w, counts, table, params, strides, pads, bias, activation, base, data_format, w_format,
        precision, method,
    )  # fmt: skip
    if out is not None:
        check_out(out, result_shape(x, w, strides, pads, data_format, w_format), x)
    y = call(SPARSE_CONV2D, SPARSE_CONV2D_INTO, arguments, (x, w, bias, base), out)
    if key is not None:
        keep_conv(key, arguments, y)
    return y


def sparse_res_block_bottleneck(
    x,
    weights,
    indices,
    block_params=None,
    *,
    bsize=None,
    strides=(1, 1),
    w_project=None,
    base=None,
    out=None,
    precision=None,
    method="auto",
    capacity=None,
):
    """Apply a residual unit to active blocks: the function of :mod:`sbnet_cupy` on tensors.

    Differentiable, twice and more, with respect to ``x``, all of ``weights``, ``w_project`` and
    ``base``. The backward pass computes the unit's stacks again rather than keep them. Under
    ``torch.autocast`` the image and the kernels are cast; scales and shifts are not.

    Parameters
    ----------
    x : tensor, shape (N, H, W, Cin)
        Images. One that is not contiguous is copied.
    weights : BottleneckWeights
        Of tensors. Those that do not require grad are packed as those of :func:`sparse_conv2d`.
    indices, block_params, bsize, strides, w_project, base, precision, method, capacity
        As for :func:`sbnet_cupy.sparse_res_block_bottleneck`; a mask as for :func:`sparse_conv2d`.
    out : tensor, optional
        Receives the result, and is returned; contiguous. Where gradients are recorded it is written
        by a copy.

    Returns
    -------
    y : tensor, shape (N, H', W', Cout)

    Raises
    ------
    ShapeError, DTypeError, DeviceError, NotImplementedError
        As :func:`sbnet_cupy.sparse_res_block_bottleneck`; DTypeError also for what is no tensor.

    Source: He et al. 2016, arXiv:1603.05027; Ren et al. 2018, arXiv:1801.02108, section 3.3.

    Examples
    --------
    >>> from sbnet_cupy import BottleneckWeights
    >>> x = torch.ones(1, 32, 32, 16)
    >>> arrays = BottleneckWeights.random(16, 4)
    >>> weights = BottleneckWeights(*(torch.from_numpy(a) for a in vars(arrays).values()))
    >>> sparse_res_block_bottleneck(x, weights, torch.eye(32), bsize=8).shape
    torch.Size([1, 32, 32, 16])
    """
    if not isinstance(weights, BottleneckWeights):
        raise TypeError(f"weights must be a BottleneckWeights, got {type(weights).__name__}")
    if takes_blocks_from(indices, bsize, capacity):
        where = (x, "NHWC", (3, 3), strides, "SAME")
        indices, block_params = _blocks(*where, indices, block_params, bsize, capacity)
    (counts, table), made_for = split_indices(indices), grid_of(indices)
    params, given = flatten_params(block_params), weights._arrays()
    options = (params, strides, precision, method)
    tensors, spelled = (x, counts, table, base, out, w_project), (*options, made_for)
    key, known = UNIT_CALLS.find(tensors, spelled, given)
    if known is not None:
        y = unit_again(key, known, x, given, counts, table, base, out)
        if y is not None:
            return y
    held = dict(zip(_WEIGHTS, given, strict=True))
    check_tensors(
        x=x, bin_counts=counts, active_block_indices=table, w_project=w_project, base=base, out=out,
        **{f"weights.{name}": value for name, value in held.items()},
    )  # fmt: skip
    _check_4d(x=x, **{f"weights.{name}": held[name] for name in _WEIGHTS[:3]})
    check_active_grid(indices, x.shape[0], block_params.bcount)
    w1, w2, w3, *tables = held.values()
    x, w1, w2, w3, w_project, base = autocast(x, w1, w2, w3, w_project, base)
    strides = pair(strides, "strides")
    arguments = (
        x, w1, w2, w3, *tables, counts, table, params, strides, w_project, base, precision, method,
    )  # fmt: skip
    if out is not None:
        check_out(out, (x.shape[0], *same_size(x.shape[1:3], strides), w3.shape[3]), x)
    learning = (x, w1, w2, w3, *tables, w_project, base)
    y = call(UNIT, UNIT_INTO, arguments, learning, out)
    if key is not None:
        keep_unit(key, arguments, y)
    return y


_WEIGHTS = ("w1", "w2", "w3", "scale1", "shift1", "scale2", "shift2", "scale3", "shift3")


def _check_formats(data_format, w_format="HWIO"):
    if data_format not in ("NHWC", "NCHW"):
        raise ValueError(f"data_format must be 'NHWC' or 'NCHW', got {data_format!r}")
    if w_format not in ("HWIO", "OIHW"):
        raise ValueError(f"w_format must be 'HWIO' or 'OIHW', got {w_format!r}")


def _image_hw(x, data_format):
    return tuple(x.shape[1:3] if data_format == "NHWC" else x.shape[2:])


def _kernel_size(w, w_format):
    return tuple(w.shape[w_format.index(letter)] for letter in "HW")


def _blocks(x, data_format, kernel, strides, padding, indices, *given):
    """Return the list of blocks and the BlockParams of a call that gives a mask, or ``bsize``."""
    mask = indices if is_mask(indices) else None
    check_tensors(x=x, indices=mask)
    _check_4d(x=x)
    image_hw, strides = _image_hw(x, data_format), pair(strides, "strides")
    pads = padding_pairs(image_hw, kernel, strides, padding)
    convolution = ((x.shape[0], *image_hw), kernel, strides, pads)
    return find_blocks(indices, *given, convolution, reduce_mask)


def autocast(*tensors):
    """Cast float tensors as torch's convolutions do under autocast; float64 stays."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        t.to(dtype) if t is not None and t.is_floating_point() and t.dtype != torch.float64 else t
        for t in tensors
    )


def _check_4d(**tensors):
    """Check what the shapes of results are computed from; the rest is checked with the arrays."""
    for name, value in tensors.items():
        if value.dim() != 4:
            raise ShapeError(f"{name} must have 4 dimensions, got shape {tuple(value.shape)}")
        if not value.is_floating_point():
            raise DTypeError(f"{name} must be of a float dtype, got {value.dtype}; use .to")
