"""sparse_conv2d and sparse_res_block_bottleneck for TensorFlow: checks, and which way they go."""

import tensorflow as tf

from ..block_sparse.active_grid import check_active_grid
from ..block_sparse.block_params import calc_block_params, calc_block_params_res_block
from ..block_sparse.bottleneck.res_block import goes_fused, what_is_uncovered
from ..block_sparse.bottleneck.res_block import sparse_res_block_bottleneck as core_unit
from ..block_sparse.bottleneck.weights import BottleneckWeights, check_unit
from ..block_sparse.checks import (
    check_base,
    check_block_params,
    check_indices,
    check_method,
    split_indices,
)
from ..block_sparse.conv.sparse_conv2d import sparse_conv2d as core_conv2d
from ..block_sparse.from_mask import find_blocks, is_mask, takes_blocks_from
from ..core.checks import check_array
from ..core.sizes import output_size, pair
from ..dense.conv2d import check_precision, resolve_problem
from ..errors import ShapeError
from ._gathered import gathered_conv, gathered_unit
from ._tensors import present, run, stand_ins, tensors
from .ops import reduce_mask


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
    x, w, bias, base = tensors(x=x, w=w, bias=bias, base=base)
    shown = _known(x, *stand_ins(x, w, bias, base, batch=_images(x, base)))
    options = (strides, padding, activation, data_format, w_format, precision)
    problem = resolve_problem(*shown[:2], *options)
    image_hw = x.shape[1:3] if problem.channels_last else x.shape[2:]
    where = ((x.shape[0], *image_hw), problem.kernel, problem.strides, problem.pads)
    listed, block_params = _blocks(where, indices, block_params, bsize, capacity)
    indices = _checked_indices(listed)
    calculated = (tuple(image_hw), problem.kernel, problem.strides, padding)
    check_block_params(block_params, calc_block_params, *calculated)
    check_active_grid(listed, x.shape[0], block_params.bcount)
    if bias is not None:
        check_array("bias", shown[2], shape=(problem.channels_out,), kinds="f")
    check_base(shown[3], (shown[0].shape[0], *problem.out_shape), shown[0])

    given = {"x": x, "w": w} | present(bias=bias, base=base)

    def gathered(x, w, **more):
        return gathered_conv(x, w, indices, block_params, problem, **more)

    if method != "fused":
        return gathered(**given)

    def fused(counts, rows, x, w, **more):
        return core_conv2d(
            x, w, (counts, rows), block_params, strides=strides, padding=padding, method="fused",
            activation=activation, data_format=data_format, w_format=w_format, **more,
        )  # fmt: skip

    return _fused(fused, gathered, indices, given, (x.shape[0], *problem.out_shape))


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
    check_precision(precision)
    x, w_project, base = tensors(x=x, w_project=w_project, base=base)
    image, projection, under = _known(x, *stand_ins(x, w_project, base, batch=_images(x, base)))
    if isinstance(weights, BottleneckWeights):
        named = {f"weights.{name}": value for name, value in vars(weights).items()}
        weights = BottleneckWeights(*tensors(**named))
        shown = BottleneckWeights(*stand_ins(*weights._arrays()))
    else:
        shown = weights  # the checks say what it must be
    strides = pair(strides, "strides")
    cout = check_unit(image, shown, projection, strides)
    image_hw = image.shape[1:3]
    where = ((x.shape[0], *image_hw), (3, 3), strides, "SAME")
    listed, block_params = _blocks(where, indices, block_params, bsize, capacity)
    indices = _checked_indices(listed)
    check_block_params(
        block_params, calc_block_params_res_block, image_hw, [1, 3, 1], strides, "SAME"
    )
    check_active_grid(listed, x.shape[0], block_params.bcount)
    shape = (*output_size(image_hw, (3, 3), strides, "SAME"), cout)
    check_base(under, (image.shape[0], *shape), image)

    uncovered = what_is_uncovered(strides, w_project)
    if not goes_fused(method, False, uncovered, ()):
        return gathered_unit(x, weights, indices, block_params, strides, w_project, base)
    given = {"x": x, **vars(weights)} | present(base=base)

    def gathered(x, base=None, **weights):
        weights = BottleneckWeights(**weights)
        return gathered_unit(x, weights, indices, block_params, strides, base=base)

    def fused(counts, rows, x, base=None, **weights):
        weights = BottleneckWeights(**weights)
        options = {"base": base, "precision": precision, "method": "fused"}
        return core_unit(x, weights, (counts, rows), block_params, **options)

    return _fused(fused, gathered, indices, given, (x.shape[0], *shape))


def _fused(core, gathered, indices, given, shape):
    """Call a layer of the package; its gradient is that of the same layer gathered.

    ``core`` takes the indices and, by name, what is ``given``, as arrays; ``gathered`` takes the
    latter as tensors.
    """

    @tf.custom_gradient
    def layer(*tensors):
        def named(counts, rows, *arrays):
            return core(counts, rows, **dict(zip(given, arrays, strict=True)))

        y = run(named, [*indices, *tensors], tensors[0].dtype, shape)

        def backward(grad):
            with tf.GradientTape() as tape:
                tape.watch(tensors)
                again = gathered(**dict(zip(given, tensors, strict=True)))
            return tape.gradient(again, tensors, grad, tf.UnconnectedGradients.ZERO)

        return y, backward

    return layer(*given.values())


def _blocks(where, indices, *given):
    """Return the list of blocks and the BlockParams of a call, which may give a mask."""
    if not takes_blocks_from(indices, *given[1:]):
        return indices, given[0]
    if is_mask(indices):
        (indices,) = tensors(indices=indices)
    return find_blocks(indices, *given, where, reduce_mask)


def _checked_indices(indices):
    """Return the table of blocks as tensors; what a graph does not know, it checks when it runs."""
    counts, rows = split_indices(indices)
    indices = tensors(bin_counts=counts, active_block_indices=rows)
    shown = stand_ins(*indices)
    if all(array is not None for array in shown):
        check_indices(*shown, like=shown[0])
    return indices


def _images(*tensors):
    """Return the number of images that one of the tensors tells, or 1."""
    told = [t.shape[0] for t in tensors if t is not None and t.shape.rank]
    return next((size for size in told if size is not None), 1)


def _known(x, *shown):
    """Return the stand-ins, or raise where that of the image is missing."""
    if shown[0] is None and x is not None:
        raise ShapeError(
            "x must have a known height, width and number of channels inside tf.function, "
            f"got {x.shape}; call set_shape first"
        )
    return shown
