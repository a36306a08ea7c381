"""The layers for JAX: what they take, and which way they go."""

from typing import Any

from ..block_sparse.active_grid import check_active_grid
from ..block_sparse.block_params import calc_block_params, calc_block_params_res_block
from ..block_sparse.bottleneck.res_block import goes_fused as goes_fused_unit
from ..block_sparse.bottleneck.res_block import what_is_uncovered
from ..block_sparse.bottleneck.weights import BottleneckWeights, check_unit
from ..block_sparse.checks import plain_params, split_indices
from ..block_sparse.conv.mask_conv2d import masked_convolution, resolve_mask_conv
from ..block_sparse.conv.sparse_conv2d import goes_fused as goes_fused_conv
from ..block_sparse.from_mask import find_blocks, images_of_mask, is_mask, takes_blocks_from
from ..core.arrays import compute_dtype
from ..core.sizes import pair
from ..dense.conv2d import resolve_problem
from . import _namespace as ops
from ._layers import CONV, UNIT
from ._operation import spelled
from ._specs import computes_on_gpu, spec_of
from .ops import reduce_mask


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
    convolution = (strides, padding, activation, data_format, w_format, precision)
    problem = resolve_problem(spec_of("x", x), spec_of("w", w), *convolution)
    if takes_blocks_from(indices, bsize, capacity):
        image_hw = x.shape[1:3] if problem.channels_last else x.shape[2:]
        where = ((x.shape[0], *image_hw), problem.kernel, problem.strides, problem.pads)
        indices, block_params = _blocks(where, indices, block_params, bsize, capacity)
    params = plain_params(block_params, calc_block_params)
    arrays = (x, w, *split_indices(indices), None, bias, base, None)
    options = (params, *convolution, method)
    (image, *_), _ = CONV.infer(arrays, options)
    check_active_grid(indices, x.shape[0], block_params.bcount)
    kernel_for = (image, problem, block_params.bsize_out, len(arrays[3]))
    if goes_fused_conv(method, computes_on_gpu(x), kernel_for) and x.size:
        return CONV.fused(arrays, options)
    return CONV.gathered(arrays, spelled(CONV.operator, options))


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
    if not isinstance(weights, BottleneckWeights):
        raise TypeError(f"weights must be a BottleneckWeights, got {type(weights).__name__}")
    strides = pair(strides, "strides")
    if takes_blocks_from(indices, bsize, capacity):
        named = (("weights." + name, value) for name, value in vars(weights).items())
        specs = BottleneckWeights(*(spec_of(name, value) for name, value in named))
        check_unit(spec_of("x", x), specs, spec_of("w_project", w_project), strides)
        where = (x.shape[:3], (3, 3), strides, "SAME")
        indices, block_params = _blocks(where, indices, block_params, bsize, capacity)
    params = plain_params(block_params, calc_block_params_res_block)
    active = split_indices(indices)
    arrays = (x, *weights._arrays(), w_project, *active, base, None)
    options = (params, strides, precision, method, False)
    (image, *specs), _ = UNIT.infer(arrays, options)
    check_active_grid(indices, x.shape[0], block_params.bcount)
    specs = BottleneckWeights(*specs[:9])
    kernel_for = (image, specs, block_params.bsize_out, len(active[1]), precision)
    uncovered = what_is_uncovered(strides, w_project)
    if goes_fused_unit(method, computes_on_gpu(x), uncovered, kernel_for):
        return UNIT.fused(arrays, options)
    return UNIT.gathered(arrays, spelled(UNIT.operator, options))


def mask_conv2d(x, w, mask, strides=(1, 1), padding: Any = "SAME", *, precision=None):
    """Convolve densely, then multiply by the pooled mask: :func:`sbnet_cupy.mask_conv2d` for JAX.

    Differentiable with respect to ``x``, ``w`` and a float ``mask``. XLA computes all of it: a
    check for other results, not the fast path.

    Parameters
    ----------
    x : jax.Array, shape (N, H, W, C)
    w, mask, strides, padding
        As for :func:`sbnet_cupy.mask_conv2d`.
    precision
        As for :func:`sparse_conv2d`.

    Returns
    -------
    y : jax.Array, shape (N, H', W', K)

    Raises
    ------
    ShapeError, DTypeError
        As :func:`sbnet_cupy.mask_conv2d`.
    DeviceError
        If an array is not JAX's.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> y = mask_conv2d(jnp.ones((1, 3, 3, 2)), jnp.ones((1, 1, 2, 1)), jnp.eye(3)[None])
    >>> y[0, :, :, 0].tolist()
    [[2.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 2.0]]
    """
    mask = images_of_mask(mask)
    specs = (spec_of("x", x), spec_of("w", w), spec_of("mask", mask))
    problem = resolve_mask_conv(*specs, strides, padding, precision)
    mask = mask.reshape(*x.shape[:3], 1).astype(compute_dtype(x.dtype))
    return masked_convolution(ops, x, w, mask, problem, precision)


def _blocks(where, indices, *given):
    """Return the list of blocks and the BlockParams of a call that gives a mask, or ``bsize``."""
    if is_mask(indices):
        spec_of("indices", indices)
    return find_blocks(indices, *given, where, reduce_mask)
