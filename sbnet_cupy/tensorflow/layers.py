"""sparse_conv2d and sparse_res_block_bottleneck for TensorFlow: gather, tf.nn.conv2d, scatter."""

import tensorflow as tf

from .._arrays import check_array, compute_dtype
from ..blocks import calc_block_params, calc_block_params_res_block, output_size, pair
from ..errors import ShapeError
from ..layers.sparse_conv import check_base, check_block_params, split_indices
from ..ops.bottleneck_weights import BottleneckWeights, check_unit
from ..ops.conv2d import check_precision, resolve_problem
from ._tensors import stand_ins, tensors
from .ops import affine, sparse_gather, sparse_scatter


def sparse_conv2d(
    x,
    w,
    indices,
    block_params,
    *,
    strides=(1, 1),
    padding="SAME",
    bias=None,
    activation=None,
    base=None,
    data_format="NHWC",
    w_format="HWIO",
    precision=None,
    method="auto",
):
    """Convolve an image where its blocks are active: :func:`sbnet_cupy.sparse_conv2d`.

    Differentiable with respect to ``x``, ``w``, ``bias`` and ``base``. Half floats are convolved in
    float32 and rounded once.

    Parameters
    ----------
    x : tf.Tensor, shape (N, H, W, C), or (N, C, H, W) with ``data_format="NCHW"``
        In a graph only N may be unknown.
    w, indices, block_params, strides, padding, bias, activation, base, data_format, w_format
        As for :func:`sbnet_cupy.sparse_conv2d`.
    precision : None, "ieee" or "tf32"
        No effect: a CPU has one.
    method : "auto", "gather" or "fused"
        "fused" raises NotImplementedError.

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
    >>> from sbnet_cupy import calc_block_params
    >>> from sbnet_cupy.tensorflow import reduce_mask
    >>> x, w = tf.ones((1, 8, 8, 3)), tf.Variable(tf.ones((3, 3, 3, 5)))
    >>> params = calc_block_params((8, 8), 6, 3)
    >>> grid = {"bsize": params.bsize, "boffset": params.boffset, "bstride": params.bstride}
    >>> active = reduce_mask(tf.eye(8)[None, ::-1] * tf.eye(8), params.bcount, **grid)
    >>> active.count()
    0
    >>> active = reduce_mask(tf.ones((1, 8, 8)), params.bcount, **grid)
    >>> with tf.GradientTape() as tape:
    ...     y = tf.reduce_sum(sparse_conv2d(x, w, active, params))
    >>> int(tape.gradient(y, w)[1, 1, 0, 0])
    64
    """
    _check_method(method)
    counts, rows = split_indices(indices)
    x, w, bias, base = tensors(x=x, w=w, bias=bias, base=base)
    shown = _known(x, *stand_ins(x, w, bias, base, batch=_images(x, base)))
    options = (strides, padding, activation, data_format, w_format, precision)
    problem = resolve_problem(*shown[:2], *options)
    image_hw = x.shape[1:3] if problem.channels_last else x.shape[2:]
    calculated = (tuple(image_hw), problem.kernel, problem.strides, padding)
    check_block_params(block_params, calc_block_params, *calculated)
    if bias is not None:
        check_array("bias", shown[2], shape=(problem.channels_out,), kinds="f")
    check_base(shown[3], (shown[0].shape[0], *problem.out_shape), shown[0])

    layout = {"data_format": data_format, "transpose": not problem.channels_last}  # NHWC stacks
    blocks = sparse_gather(x, counts, rows, **_input_grid(block_params), **layout)
    w = w if w_format == "HWIO" else tf.transpose(w, (2, 3, 1, 0))
    blocks = affine(_convolve(blocks, w, problem.strides, "VALID"), None, bias, activation)
    if base is None:
        base = _zeros(x, problem.out_shape)
    blocks = tf.cast(blocks, x.dtype)
    return sparse_scatter(blocks, counts, rows, base, bsize=block_params.bsize_out, **layout)


def sparse_res_block_bottleneck(
    x,
    weights,
    indices,
    block_params,
    *,
    strides=(1, 1),
    w_project=None,
    base=None,
    precision=None,
    method="auto",
):
    """Apply a residual unit on active blocks: :func:`sbnet_cupy.sparse_res_block_bottleneck`.

    Differentiable with respect to ``x``, ``weights``, ``w_project`` and ``base``.

    Parameters
    ----------
    x : tf.Tensor, shape (N, H, W, Cin)
        In a graph only N may be unknown.
    weights : BottleneckWeights
        Of tensors or variables.
    indices, block_params, strides, w_project, base
        As for :func:`sbnet_cupy.sparse_res_block_bottleneck`.
    precision, method
        As for :func:`sparse_conv2d`.

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
    >>> from sbnet_cupy import BottleneckWeights, calc_block_params_res_block
    >>> from sbnet_cupy.tensorflow import reduce_mask
    >>> x = tf.ones((1, 32, 32, 16))
    >>> weights = BottleneckWeights(*map(tf.Variable, BottleneckWeights.random(16, 4)._arrays()))
    >>> params = calc_block_params_res_block((32, 32), 10, [1, 3, 1])
    >>> grid = {"bsize": params.bsize, "boffset": params.boffset, "bstride": params.bstride}
    >>> mask = tf.one_hot([5], 32)[:, :, None] * tf.one_hot([5], 32)[:, None]
    >>> active = reduce_mask(mask, params.bcount, **grid)
    >>> y = sparse_res_block_bottleneck(x, weights, active, params)
    >>> y.shape, bool(tf.reduce_all(y[:, 8:] == 1))
    (TensorShape([1, 32, 32, 16]), True)
    """
    _check_method(method)
    check_precision(precision)
    indices = split_indices(indices)
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
    check_block_params(
        block_params, calc_block_params_res_block, image_hw, [1, 3, 1], strides, "SAME"
    )
    shape = (*output_size(image_hw, (3, 3), strides, "SAME"), cout)
    check_base(under, (image.shape[0], *shape), image)

    blocks = _residual(x, weights, indices, block_params, strides)
    bsize = block_params.bsize_out
    if base is not None:
        shortcut = _shortcut_blocks(x, w_project, indices, block_params, strides)
        shortcut = sparse_scatter(shortcut, *indices, base, bsize=bsize)
    elif w_project is not None:
        shortcut = tf.cast(_convolve(x, w_project, strides, "SAME"), x.dtype)
    else:
        shortcut = x
    return sparse_scatter(blocks, *indices, shortcut, bsize=bsize, add=True)


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


def _check_method(method):
    """Raise unless the gather route will do."""
    if method == "fused":
        raise NotImplementedError(
            "method 'fused' has no kernel in sbnet_cupy.tensorflow; use 'auto' or 'gather'"
        )
    if method not in ("auto", "gather"):
        raise ValueError(f"method must be 'auto', 'gather' or 'fused', got {method!r}")


def _residual(x, weights, indices, block_params, strides):
    """Return the stack ``conv3(a3(conv2(a2(conv1(a1(x))))))``, one value per output pixel."""
    first = {"scale": weights.scale1, "shift": weights.shift1, "activation": "relu"}
    blocks = sparse_gather(x, *indices, **_input_grid(block_params), **first)
    blocks = _convolve(blocks, weights.w1, (1, 1), "VALID")
    blocks = affine(blocks, weights.scale2, weights.shift2, "relu")
    inside = _inside(indices[1], block_params, x.shape[1:3])
    blocks = tf.where(inside[..., None], blocks, tf.zeros((), blocks.dtype))  # pads conv2
    blocks = _convolve(tf.cast(blocks, x.dtype), weights.w2, strides, "VALID")
    blocks = tf.cast(affine(blocks, weights.scale3, weights.shift3, "relu"), x.dtype)
    return tf.cast(_convolve(blocks, weights.w3, (1, 1), "VALID"), x.dtype)


def _shortcut_blocks(x, w_project, indices, block_params, strides):
    """Return the stack of the shortcut's values, one per output pixel of the active blocks."""
    size = block_params.bsize_out
    if w_project is None:
        return sparse_gather(x, *indices, bsize=size)
    axes = list(zip(size, strides, strict=True))
    blocks = sparse_gather(  # SAME pads a 1x1 kernel with nothing: output p reads input p * stride
        x,
        *indices,
        bsize=tuple((n - 1) * s + 1 for n, s in axes),
        bstride=tuple(n * s for n, s in axes),
    )
    return tf.cast(_convolve(blocks, w_project, strides, "VALID"), x.dtype)


def _inside(active_block_indices, block_params, image_hw):
    """Return bool ``[M, bh, bw]``: which pixels of the stack lie in the image."""
    axes = []
    for axis, size in enumerate(image_hw):
        corner = active_block_indices[:, 1 + axis] * block_params.bstride[axis]
        pixel = tf.range(block_params.bsize[axis]) + block_params.boffset[axis]
        pixel = corner[:, None] + pixel
        axes.append((pixel >= 0) & (pixel < size))
    return axes[0][:, :, None] & axes[1][:, None, :]


def _input_grid(block_params):
    names = ("bsize", "boffset", "bstride")
    return {name: getattr(block_params, name) for name in names}


def _zeros(x, shape):
    """Return zeros of a static shape but for the batch, which is that of x."""
    zeros = tf.zeros(tf.stack([tf.shape(x)[0], *shape]), x.dtype)
    return tf.ensure_shape(zeros, (x.shape[0], *shape))


def _convolve(x, w, strides, padding):
    """Convolve NHWC images or stacks; half floats give float32, not yet rounded."""
    dtype = compute_dtype(x.dtype.as_numpy_dtype)
    return tf.nn.conv2d(tf.cast(x, dtype), tf.cast(w, dtype), strides, padding)
