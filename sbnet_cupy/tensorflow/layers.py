"""The layers for TensorFlow: checks, and which way they go."""

from typing import Any

import tensorflow as tf

from ..block_sparse.active_grid import check_active_grid
from ..block_sparse.block_params import calc_block_params, calc_block_params_res_block
from ..block_sparse.bottleneck.res_block import goes_fused, what_is_uncovered
from ..block_sparse.bottleneck.weights import BottleneckWeights, check_unit
from ..block_sparse.checks import check_method, plain_params, split_indices
from ..block_sparse.conv.mask_conv2d import masked_convolution, resolve_mask_conv
from ..block_sparse.from_mask import find_blocks, images_of_mask, is_mask, takes_blocks_from
from ..core.arrays import compute_dtype
from ..core.sizes import pair
from ..dense.conv2d import resolve_problem
from . import _namespace as ops
from ._layers import CONV, UNIT, gathered_conv, gathered_unit
from ._tensors import known_spec, tensor_of
from .ops import MASK_SIZES, reduce_mask


def sparse_conv2d(
    x,
    w,
    indices,
    block_params=None,
    *,
    bsize=None,
    strides=(1, 1),
    padding: Any = "SAME",
    bias=None,
    activation=None,
    base=None,
    data_format="NHWC",
    w_format="HWIO",
    precision=None,
    method="auto",
    capacity=None,
):
    """Convolve an image where its blocks are active: :func:`sbnet_cupy.sparse_conv2d`.

    Differentiable with respect to ``x``, ``w``, ``bias`` and ``base``; the gradient goes by way of
    the stack, whatever the method. Half floats are convolved in float32 and rounded once.

    Parameters
    ----------
    x : tf.Tensor, shape (N, H, W, C), or (N, C, H, W) with ``data_format="NCHW"``
        In a graph only N may be unknown.
    w, indices, block_params, bsize, strides, padding, bias, activation, base, capacity
        As for :func:`sbnet_cupy.sparse_conv2d`.
    data_format, w_format
        As for :func:`sbnet_cupy.sparse_conv2d`.
    precision : None, "ieee" or "tf32"
        No effect: a CPU has one.
    method : "auto", "gather" or "fused"
        "gather" gathers blocks, convolves the stack with TensorFlow and scatters the results;
        "fused" is :func:`sbnet_cupy.fused_conv`, which on a CPU bounds the memory and saves no
        time. "auto" is "gather", as for all arrays on a CPU.

    Returns
    -------
    y : tf.Tensor, shape (N, H', W', K), or (N, K, H', W')

    Raises
    ------
    ShapeError, DTypeError, DeviceError, NotImplementedError
        As :func:`sbnet_cupy.sparse_conv2d`; DeviceError also for arrays that are not TensorFlow's.

    Examples
    --------
    >>> import tensorflow as tf
    >>> x, w = tf.ones((1, 8, 8, 3)), tf.Variable(tf.ones((3, 3, 3, 5)))
    >>> mask = tf.ones((1, 8, 8))
    >>> with tf.GradientTape() as tape:
    ...     y = tf.reduce_sum(sparse_conv2d(x, w, mask, bsize=4))
    >>> int(tape.gradient(y, w)[1, 1, 0, 0])
    64
    """
    check_method(method)
    x, w = tensor_of("x", x), tensor_of("w", w)
    convolution = (strides, padding, activation, data_format, w_format, precision)
    problem = resolve_problem(_known(x), _known_kernel("w", w), *convolution)
    if takes_blocks_from(indices, bsize, capacity):
        image_hw = x.shape[1:3] if problem.channels_last else x.shape[2:]
        where = ((x.shape[0], *image_hw), problem.kernel, problem.strides, problem.pads)
        indices, block_params = _blocks(where, indices, block_params, bsize, capacity)
    params = plain_params(block_params, calc_block_params)
    tensors = CONV.read((x, w, *split_indices(indices), None, bias, base, None))
    options = (params, *convolution, method)
    _, shape = CONV.infer(tensors, options)
    check_active_grid(indices, x.shape[0], block_params.bcount)
    if method == "fused":
        return CONV.compute(tensors, options, shape)
    return gathered_conv(tensors, options, shape)


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
    precision=None,
    method="auto",
    capacity=None,
):
    """Apply a residual unit on active blocks: :func:`sbnet_cupy.sparse_res_block_bottleneck`.

    Differentiable with respect to ``x``, ``weights``, ``w_project`` and ``base``.

    Parameters
    ----------
    x : tf.Tensor, shape (N, H, W, Cin)
        In a graph only N may be unknown.
    weights : BottleneckWeights
        Of tensors or variables.
    indices, block_params, bsize, strides, w_project, base, capacity
        As for :func:`sbnet_cupy.sparse_res_block_bottleneck`.
    precision
        As for :func:`sparse_conv2d`.
    method : "auto", "gather" or "fused"
        As for :func:`sparse_conv2d`, with :func:`sbnet_cupy.fused_bottleneck`: strides 1, no
        projection.

    Returns
    -------
    y : tf.Tensor, shape (N, H', W', Cout)

    Raises
    ------
    ShapeError, DTypeError, DeviceError, NotImplementedError
        As :func:`sparse_conv2d`.

    Examples
    --------
    >>> import tensorflow as tf
    >>> from sbnet_cupy import BottleneckWeights
    >>> x = tf.ones((1, 32, 32, 16))
    >>> weights = BottleneckWeights(*map(tf.Variable, BottleneckWeights.random(16, 4)._arrays()))
    >>> mask = tf.one_hot([5], 32)[:, :, None] * tf.one_hot([5], 32)[:, None]
    >>> y = sparse_res_block_bottleneck(x, weights, mask, bsize=8)
    >>> y.shape, bool(tf.reduce_all(y[:, 8:] == 1))
    (TensorShape([1, 32, 32, 16]), True)
    """
    check_method(method)
    if not isinstance(weights, BottleneckWeights):
        raise TypeError(f"weights must be a BottleneckWeights, got {type(weights).__name__}")
    x, w_project = tensor_of("x", x), tensor_of("w_project", w_project)
    named = {"weights." + name: value for name, value in vars(weights).items()}
    weights = BottleneckWeights(*map(tensor_of, named, named.values()))
    strides = pair(strides, "strides")
    specs = BottleneckWeights(*map(_known_kernel, named, weights._arrays()))
    check_unit(_known(x), specs, _known_kernel("w_project", w_project), strides)
    if takes_blocks_from(indices, bsize, capacity):
        where = (tuple(x.shape[:3]), (3, 3), strides, "SAME")
        indices, block_params = _blocks(where, indices, block_params, bsize, capacity)
    params = plain_params(block_params, calc_block_params_res_block)
    active = split_indices(indices)
    tensors = UNIT.read((x, *weights._arrays(), w_project, *active, base, None))
    options = (params, strides, precision, method, False)
    _, shape = UNIT.infer(tensors, options)
    check_active_grid(indices, x.shape[0], block_params.bcount)
    if goes_fused(method, False, what_is_uncovered(strides, w_project), ()):
        return UNIT.compute(tensors, options, shape)
    return gathered_unit(tensors, options, shape)


def mask_conv2d(x, w, mask, strides=(1, 1), padding: Any = "SAME", *, precision=None):
    """Convolve densely, then multiply by the pooled mask: :func:`sbnet_cupy.mask_conv2d`.

    Differentiable with respect to ``x``, ``w`` and a float ``mask``. TensorFlow computes all of
    it: a check for other results, not the fast path.

    Parameters
    ----------
    x : tf.Tensor, shape (N, H, W, C)
        In a graph only N may be unknown.
    w, mask, strides, padding
        As for :func:`sbnet_cupy.mask_conv2d`.
    precision
        As for :func:`sparse_conv2d`.

    Returns
    -------
    y : tf.Tensor, shape (N, H', W', K)

    Raises
    ------
    ShapeError, DTypeError, DeviceError
        As :func:`sbnet_cupy.mask_conv2d`; DeviceError also for arrays that are not TensorFlow's.

    Examples
    --------
    >>> import tensorflow as tf
    >>> y = mask_conv2d(tf.ones((1, 3, 3, 2)), tf.ones((1, 1, 2, 1)), tf.eye(3)[None])
    >>> y[0, :, :, 0].numpy().tolist()
    [[2.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 2.0]]
    """
    x, w, mask = tensor_of("x", x), tensor_of("w", w), images_of_mask(tensor_of("mask", mask))
    sizes = [each.shape[0] for each in (x, mask) if each is not None and each.shape.rank]
    count = next((size for size in sizes if size is not None), 1)
    spec = known_spec("mask", mask, count, MASK_SIZES)
    convolution = _known(x, count), _known_kernel("w", w), spec
    problem = resolve_mask_conv(*convolution, strides, padding, precision)
    mask = mask if mask.shape.rank == 4 else mask[..., None]
    mask = ops.cast(mask, compute_dtype(x.dtype.as_numpy_dtype))
    return masked_convolution(ops, x, w, mask, problem, precision)


def _blocks(where, indices, *given):
    """Return the list of blocks and the BlockParams of a call that gives a mask, or ``bsize``."""
    if is_mask(indices) or tf.is_tensor(indices):  # whose rank may be unknown
        indices = tensor_of("indices", indices)
        known_spec("indices, where it is a mask,", indices, what=MASK_SIZES)
    return find_blocks(indices, *given, where, reduce_mask)


def _known(x, count=1):
    """Return the spec of an image, or raise where too little is known of it."""
    return known_spec("x", x, count, "a known height, width and number of channels")


def _known_kernel(name, w):
    """Return the spec of an array of weights, or raise where a size is not known."""
    return known_spec(name, w, count=None)
