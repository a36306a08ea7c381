"""sparse_conv2d and sparse_res_block_bottleneck for JAX: gather, XLA's convolution, scatter."""

import functools

import jax
import jax.numpy as jnp

from .._arrays import check_array
from ..blocks import calc_block_params, calc_block_params_res_block, output_size, pair
from ..layers.sparse_conv import check_base, check_block_params, split_indices
from ..ops.bottleneck_weights import BottleneckWeights, check_unit
from ..ops.conv2d import check_precision, resolve_problem
from ._arguments import stand_ins
from ._operations import affine
from .ops import sparse_gather, sparse_scatter


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
    """Convolve an image where its blocks are active: :func:`sbnet_cupy.sparse_conv2d` for JAX.

    Differentiable with respect to ``x``, ``w``, ``bias`` and ``base``. The convolution is XLA's,
    with float32 sums; on a GPU half floats are rounded after it, and again after the activation.

    Parameters
    ----------
    x : jax.Array, shape (N, H, W, C), or (N, C, H, W) with ``data_format="NCHW"``
    w, indices, block_params, strides, padding, bias, activation, base, data_format, w_format
        As for :func:`sbnet_cupy.sparse_conv2d`.
    precision : None, "ieee" or "tf32"
        How a GPU multiplies float32: "tf32" lets XLA round the factors, None and "ieee" do not.
    method : "auto", "gather" or "fused"
        "fused" raises NotImplementedError.

    Returns
    -------
    y : jax.Array, shape (N, H', W', K), or (N, K, H', W')

    Raises
    ------
    ShapeError, DTypeError, NotImplementedError
        As :func:`sbnet_cupy.sparse_conv2d`.
    DeviceError
        If an array is not JAX's.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from sbnet_cupy import calc_block_params
    >>> from sbnet_cupy.jax import reduce_mask
    >>> x, w = jnp.ones((1, 8, 8, 3)), jnp.ones((3, 3, 3, 5))
    >>> params = calc_block_params(x.shape, 6, w.shape)
    >>> grid = {"bsize": params.bsize, "boffset": params.boffset, "bstride": params.bstride}
    >>> mask = jnp.zeros((1, 8, 8), bool).at[0, 1, 1].set(True)
    >>> active = reduce_mask(mask, params.bcount, capacity=4, **grid)
    >>> grad = jax.grad(lambda w: sparse_conv2d(x, w, active, params).sum())(w)
    >>> int(grad[1, 1, 0, 0])
    16
    """
    _check_method(method)
    counts, rows = split_indices(indices)
    shown = stand_ins(x=x, w=w, bias=bias, base=base)
    options = (strides, padding, activation, data_format, w_format, precision)
    problem = resolve_problem(*shown[:2], *options)
    image_hw = x.shape[1:3] if problem.channels_last else x.shape[2:]
    calculated = (image_hw, problem.kernel, problem.strides, padding)
    check_block_params(block_params, calc_block_params, *calculated)
    if bias is not None:
        check_array("bias", shown[2], shape=(problem.channels_out,), kinds="f")
    shape = (x.shape[0], *problem.out_shape)
    check_base(shown[3], shape, shown[0])

    layout = {"data_format": data_format, "transpose": not problem.channels_last}  # NHWC stacks
    blocks = sparse_gather(x, counts, rows, **_input_grid(block_params), **layout)
    blocks = _convolve(blocks, w, problem.strides, "VALID", precision, w_format)
    blocks = affine(blocks, None, bias, activation).astype(x.dtype)
    base = jnp.zeros(shape, x.dtype) if base is None else base
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

    Differentiable with respect to ``x``, ``weights``, ``w_project`` and ``base``; the gradient with
    respect to the weights is a :class:`BottleneckWeights`, which is a pytree.

    Parameters
    ----------
    x : jax.Array, shape (N, H, W, Cin)
    weights, indices, block_params, strides, w_project, base
        As for :func:`sbnet_cupy.sparse_res_block_bottleneck`.
    precision, method
        As for :func:`sparse_conv2d`.

    Returns
    -------
    y : jax.Array, shape (N, H', W', Cout)

    Raises
    ------
    ShapeError, DTypeError, NotImplementedError
        As :func:`sbnet_cupy.sparse_res_block_bottleneck`.
    DeviceError
        If an array is not JAX's.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from sbnet_cupy import BottleneckWeights, calc_block_params_res_block
    >>> from sbnet_cupy.jax import reduce_mask
    >>> x, weights = jnp.ones((1, 32, 32, 16)), BottleneckWeights.random(16, 4, xp=jnp)
    >>> params = calc_block_params_res_block(x.shape, 10, [1, 3, 1])
    >>> grid = {"bsize": params.bsize, "boffset": params.boffset, "bstride": params.bstride}
    >>> mask = jnp.zeros((1, 32, 32), bool).at[0, 5, 5].set(True)
    >>> active = reduce_mask(mask, params.bcount, capacity=4, **grid)
    >>> y = jax.jit(sparse_res_block_bottleneck)(x, weights, active, params)
    >>> y.shape, bool((y[:, :8, :8] != 1).all()), bool((y[:, 8:] == 1).all())
    ((1, 32, 32, 16), True, True)
    """
    _check_method(method)
    check_precision(precision)
    indices = split_indices(indices)
    image, projection, under = stand_ins(x=x, w_project=w_project, base=base)
    strides = pair(strides, "strides")
    cout = check_unit(image, _weight_stand_ins(weights), projection, strides)
    image_hw = x.shape[1:3]
    check_block_params(
        block_params, calc_block_params_res_block, image_hw, [1, 3, 1], strides, "SAME"
    )
    shape = (x.shape[0], *output_size(image_hw, (3, 3), strides, "SAME"), cout)
    check_base(under, shape, image)

    blocks = _residual(x, weights, indices, block_params, strides, precision)
    bsize = block_params.bsize_out
    if base is not None:
        shortcut = _shortcut_blocks(x, w_project, indices, block_params, strides, precision)
        shortcut = sparse_scatter(shortcut, *indices, base, bsize=bsize)
    elif w_project is not None:
        shortcut = _convolve(x, w_project, strides, "SAME", precision).astype(x.dtype)
    else:
        shortcut = x
    return sparse_scatter(blocks, *indices, shortcut, bsize=bsize, add=True)


def _weight_stand_ins(weights):
    """Return the weights of stand-ins; what is not a BottleneckWeights is left to the checks."""
    if not isinstance(weights, BottleneckWeights):
        return weights
    named = {f"weights.{name}": value for name, value in vars(weights).items()}
    return BottleneckWeights(*stand_ins(**named))


def _check_method(method):
    """Raise unless the gather route will do."""
    if method == "fused":
        raise NotImplementedError(
            "method 'fused' has no kernel in sbnet_cupy.jax; use 'auto' or 'gather'"
        )
    if method not in ("auto", "gather"):
        raise ValueError(f"method must be 'auto', 'gather' or 'fused', got {method!r}")


def _residual(x, weights, indices, block_params, strides, precision):
    """Return the stack ``conv3(a3(conv2(a2(conv1(a1(x))))))``, one value per output pixel."""
    first = {"scale": weights.scale1, "shift": weights.shift1, "activation": "relu"}
    blocks = sparse_gather(x, *indices, **_input_grid(block_params), **first)
    blocks = _convolve(blocks, weights.w1, (1, 1), "VALID", precision)
    blocks = affine(blocks, weights.scale2, weights.shift2, "relu")
    inside = _inside(indices[1], block_params, x.shape[1:3])
    blocks = jnp.where(inside[..., None], blocks, 0).astype(x.dtype)  # the padding of conv2
    blocks = _convolve(blocks, weights.w2, strides, "VALID", precision)
    blocks = affine(blocks, weights.scale3, weights.shift3, "relu").astype(x.dtype)
    return _convolve(blocks, weights.w3, (1, 1), "VALID", precision).astype(x.dtype)


def _shortcut_blocks(x, w_project, indices, block_params, strides, precision):
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
    return _convolve(blocks, w_project, strides, "VALID", precision).astype(x.dtype)


def _inside(active_block_indices, block_params, image_hw):
    """Return bool ``[M, bh, bw]``: which pixels of the stack lie in the image."""
    axes = []
    for axis, size in enumerate(image_hw):
        corner = active_block_indices[:, 1 + axis] * block_params.bstride[axis]
        pixel = jnp.arange(block_params.bsize[axis], dtype=jnp.int32) + block_params.boffset[axis]
        pixel = corner[:, None] + pixel
        axes.append((pixel >= 0) & (pixel < size))
    return axes[0][:, :, None] & axes[1][:, None, :]


def _input_grid(block_params):
    names = ("bsize", "boffset", "bstride")
    return {name: getattr(block_params, name) for name in names}


def _convolve(x, w, strides, padding, precision, w_format="HWIO"):
    """Convolve NHWC images or stacks; half floats give float32.

    On a CPU that is not rounded yet. On a GPU it is: the tensor cores take half floats, and XLA has
    them give half floats.
    """
    convolve = functools.partial(
        jax.lax.conv_general_dilated,
        window_strides=strides,
        padding=padding,
        dimension_numbers=("NHWC", w_format, "NHWC"),
        precision=jax.lax.Precision("default" if precision == "tf32" else "highest"),
    )
    if x.dtype.itemsize > 2:
        return convolve(x, w)

    def widened(x, w):
        return convolve(x.astype(jnp.float32), w.astype(jnp.float32))

    def rounded(x, w):
        return convolve(x, w).astype(jnp.float32)

    return jax.lax.platform_dependent(x, w, cpu=widened, default=rounded)
