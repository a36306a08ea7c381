"""sparse_conv2d and sparse_res_block_bottleneck for JAX: what they take, and which way they go."""

from ..block_sparse.active_grid import check_active_grid
from ..block_sparse.block_params import calc_block_params, calc_block_params_res_block
from ..block_sparse.bottleneck.res_block import goes_fused as goes_fused_unit
from ..block_sparse.bottleneck.res_block import what_is_uncovered
from ..block_sparse.bottleneck.weights import BottleneckWeights, check_unit
from ..block_sparse.checks import (
    check_base,
    check_block_params,
    check_indices,
    check_method,
    split_indices,
)
from ..block_sparse.conv.sparse_conv2d import goes_fused as goes_fused_conv
from ..block_sparse.from_mask import find_blocks, is_mask, takes_blocks_from
from ..core.checks import check_array
from ..core.sizes import output_size, pair
from ..dense.conv2d import check_precision, resolve_problem
from ._arguments import computes_on_gpu, stand_ins
from ._fused import conv_op, unit_op
from ._gathered import ConvSpec, UnitSpec, gathered_conv, gathered_unit
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
    """Convolve an image where its blocks are active: :func:`sbnet_cupy.sparse_conv2d` for JAX.

    Differentiable with respect to ``x``, ``w``, ``bias`` and ``base``. The gradient goes by way of
    the stack, whatever the method; the image is gathered for it again.

    Parameters
    ----------
    x : jax.Array, shape (N, H, W, C), or (N, C, H, W) with ``data_format="NCHW"``
    w, indices, block_params, bsize, strides, padding, bias, activation, base
        As for :func:`sbnet_cupy.sparse_conv2d`.
    data_format, w_format
        As for :func:`sbnet_cupy.sparse_conv2d`.
    precision : None, "ieee" or "tf32"
        How a GPU multiplies float32: "tf32" rounds the factors, None and "ieee" do not.
    method : "auto", "gather" or "fused"
        "gather" gathers blocks, convolves the stack with XLA and scatters the results; on a GPU
        half floats are rounded after the convolution, and again after the activation. "fused" is
        :func:`sbnet_cupy.fused_conv`, from image to image, which lays ``w`` out anew whenever it
        runs. "auto" is "fused" on a GPU where that has a kernel, else "gather".
    capacity : int, optional
        With a mask, the number of blocks to make room for; needed inside ``jit``, as for
        :func:`reduce_mask`.

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
    >>> x, w = jnp.ones((1, 8, 8, 3)), jnp.ones((3, 3, 3, 5))
    >>> mask = jnp.zeros((1, 8, 8), bool).at[0, 1, 1].set(True)
    >>> grad = jax.grad(lambda w: sparse_conv2d(x, w, mask, bsize=4, capacity=4).sum())(w)
    >>> int(grad[1, 1, 0, 0])
    16
    """
    check_method(method)
    shown = stand_ins(x=x, w=w, bias=bias, base=base)
    options = (strides, padding, activation, data_format, w_format, precision)
    problem = resolve_problem(*shown[:2], *options)
    image_hw = x.shape[1:3] if problem.channels_last else x.shape[2:]
    where = ((x.shape[0], *image_hw), problem.kernel, problem.strides, problem.pads)
    indices, block_params = _blocks(where, indices, block_params, bsize, capacity)
    calculated = (image_hw, problem.kernel, problem.strides, padding)
    check_block_params(block_params, calc_block_params, *calculated)
    if bias is not None:
        check_array("bias", shown[2], shape=(problem.channels_out,), kinds="f")
    check_active_grid(indices, x.shape[0], block_params.bcount)
    shape = (x.shape[0], *problem.out_shape)
    check_base(shown[3], shape, shown[0])
    _check_indices(indices, shown[0])

    kernel_for = (shown[0], problem, block_params.bsize_out, len(indices[1]))
    arrays = (base, x, *indices, w, bias)
    spec = ConvSpec(problem, block_params, method)
    if goes_fused_conv(method, computes_on_gpu(x), kernel_for) and x.size:
        return conv_op(spec)(*arrays)
    return gathered_conv(spec, *arrays)


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

    Differentiable with respect to ``x``, ``weights``, ``w_project`` and ``base``; the gradient with
    respect to the weights is a :class:`BottleneckWeights`, which is a pytree.

    Parameters
    ----------
    x : jax.Array, shape (N, H, W, Cin)
    weights, indices, block_params, bsize, strides, w_project, base
        As for :func:`sbnet_cupy.sparse_res_block_bottleneck`.
    precision, capacity
        As for :func:`sparse_conv2d`.
    method : "auto", "gather" or "fused"
        As for :func:`sparse_conv2d`, with :func:`sbnet_cupy.fused_bottleneck`: strides 1, no
        projection, and on a GPU float32 with "tf32" only.

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
    >>> import functools, jax, jax.numpy as jnp
    >>> from sbnet_cupy import BottleneckWeights
    >>> x, weights = jnp.ones((1, 32, 32, 16)), BottleneckWeights.random(16, 4, xp=jnp)
    >>> mask = jnp.zeros((1, 32, 32), bool).at[0, 5, 5].set(True)
    >>> unit = functools.partial(sparse_res_block_bottleneck, bsize=8, capacity=4)
    >>> y = jax.jit(unit)(x, weights, mask)
    >>> y.shape, bool((y[:, :8, :8] != 1).all()), bool((y[:, 8:] == 1).all())
    ((1, 32, 32, 16), True, True)
    """
    check_method(method)
    check_precision(precision)
    image, projection, under = stand_ins(x=x, w_project=w_project, base=base)
    strides = pair(strides, "strides")
    shown = _weight_stand_ins(weights)
    cout = check_unit(image, shown, projection, strides)
    image_hw = x.shape[1:3]
    where = (x.shape[:3], (3, 3), strides, "SAME")
    indices, block_params = _blocks(where, indices, block_params, bsize, capacity)
    check_block_params(
        block_params, calc_block_params_res_block, image_hw, [1, 3, 1], strides, "SAME"
    )
    check_active_grid(indices, x.shape[0], block_params.bcount)
    shape = (x.shape[0], *output_size(image_hw, (3, 3), strides, "SAME"), cout)
    check_base(under, shape, image)

    _check_indices(indices, image)

    kernel_for = (image, shown, block_params.bsize_out, len(indices[1]), precision)
    uncovered = what_is_uncovered(strides, w_project)
    spec = UnitSpec(block_params, strides, precision, method)
    if goes_fused_unit(method, computes_on_gpu(x), uncovered, kernel_for):
        return unit_op(spec)(base, x, *indices, *weights._arrays())
    return gathered_unit(spec, base, x, *indices, weights, w_project)


def _blocks(where, indices, *given):
    """Return the list of blocks and the BlockParams of a call, which may give a mask."""
    if takes_blocks_from(indices, *given[1:]):
        stand_ins(indices=indices if is_mask(indices) else None)
        indices, block_params = find_blocks(indices, *given, where, reduce_mask)
        return split_indices(indices), block_params
    return split_indices(indices), given[0]


def _check_indices(indices, image):
    """Check the table of blocks."""
    names = ("bin_counts", "active_block_indices")
    check_indices(*stand_ins(**dict(zip(names, indices, strict=True))), like=image)


def _weight_stand_ins(weights):
    """Return the weights of stand-ins; what is not a BottleneckWeights is left to the checks."""
    if not isinstance(weights, BottleneckWeights):
        return weights
    named = {f"weights.{name}": value for name, value in vars(weights).items()}
    return BottleneckWeights(*stand_ins(**named))
