"""stack_batch_norm: batch norm of a stack in training, with a sum and an activation after it.

A building block of networks in training: their checks are done, and so none are made here.
"""

from typing import Any, NamedTuple

import numpy as np

from ...core.arrays import compute_dtype, empty, is_cupy, namespace
from ...core.compile import cpp_name
from ...core.graph_memory import keep_if_capturing
from ...core.launch import Number
from ...dense.activation import ACTIVATIONS, apply_activation
from .checks import computing
from .neighbours import Places
from .stack_norm_launch import (
    STATISTICS,
    StackNorm,
    prepare_stack_norm,
    prepare_stack_statistics,
)
from .stack_pixel_mask import inside


class Normalized(NamedTuple):
    """A stack after a norm, and what its gradient needs.

    ``statistics`` holds a row of C numbers for each of mean, variance, one over the standard
    deviation, scale and shift, and at its end the number of pixels; float32, or float64.
    """

    y: Any
    statistics: Any


def stack_batch_norm(
    x, table, weight=None, bias=None, *, residual=None, activation=None, eps=1e-5,
    running_mean=None, running_var=None, momentum=0.1,
):  # fmt: skip
    """Return ``activation((x - mean) / sqrt(variance + eps) * weight + bias + residual)``.

    Mean and variance, the biased one, are those of each channel over the pixels of a stack that are
    in the image and in rows that are blocks; ``y`` is 0 in all others. The running statistics
    become ``(1 - momentum) * running + momentum * new``, with the unbiased variance, in place; with
    no pixel they stay as they are. Sums are in a fixed order.

    Parameters
    ----------
    x, residual : array, shape (M, b_h, b_w, C)
        Stacks of one dtype; there may be no residual.
    table : BlockTable
        Of the stage of ``x``.
    weight, bias, running_mean, running_var : array, shape (C,), or None
        Of one dtype.
    activation : None, "relu", "silu" or "gelu"
    eps, momentum : float

    Returns
    -------
    Normalized

    Source: Ioffe and Szegedy, "Batch Normalization" (2015). Kernels:
    cuda_src/block_sparse/stack/stack_batch_norm.cu

    Examples
    --------
    >>> import sbnet_cupy
    >>> table = sbnet_cupy.block_table(np.ones((1, 1, 3)), 2)
    >>> x = np.array([1.0, 2, 9, 9, 3, 9, 9, 9]).reshape(2, 2, 2, 1)
    >>> y, statistics = stack_batch_norm(x, table, eps=0.0, activation="relu")
    >>> y.ravel().round(4)
    array([0.    , 0.    , 0.    , 0.    , 1.2247, 0.    , 0.    , 0.    ])
    >>> statistics.round(4)
    array([ 2.    ,  0.6667,  1.2247,  1.2247, -2.4495,  3.    ])
    """
    wide, channels = compute_dtype(x.dtype), x.shape[3]
    y = empty(x.shape, x.dtype, x)
    statistics = empty((len(STATISTICS) * channels + 1,), wide, x)
    running = (running_mean, running_var)
    if is_cupy(x) and x.size:
        norm = describe_norm(x, table)
        parameter = parameter_of((weight, bias, *running), wide)
        partials = empty((norm.partials,), wide, x)
        keep_if_capturing(partials)
        lists = table.bin_counts, table.active_block_indices
        find = prepare_stack_statistics(norm, parameter, eps)
        find(x, *lists, weight, bias, *running, partials, statistics, Number(momentum))
        apply = prepare_stack_norm(norm, ACTIVATIONS.index(activation))
        apply(x, residual, statistics, *lists, y)
        return Normalized(y, statistics)
    with computing(x):
        mask = pixels_inside(x, table)
        found = statistics.astype(np.float64)
        _find(x, mask, weight, bias, eps, found)
        statistics[...] = found
        number = found[-1]
        if running_mean is not None and number > 0:
            mean, variance = found[: 2 * channels].reshape(2, -1)
            unbiased = variance * (number / max(number - 1, 1))
            for array, new in ((running_mean, mean), (running_var, unbiased)):
                array[...] = array.astype(np.float64) * (1 - momentum) + new * momentum
        t = before_activation(x, statistics, residual)
        y[...] = namespace(x).where(mask, apply_activation(t, activation), wide.type(0))
    return Normalized(y, statistics)


def _find(x, mask, weight, bias, eps, found):
    """Write the statistics of a stack, in float64."""
    xp, channels = namespace(x), x.shape[3]
    number = mask.sum()
    pixels = xp.where(mask, x, np.zeros((), x.dtype)).astype(np.float64)
    mean = pixels.sum(axis=(0, 1, 2)) / max(number, 1)
    apart = xp.where(mask, pixels - mean, 0.0)
    variance = (apart * apart).sum(axis=(0, 1, 2)) / max(number, 1)
    found[:-1] = statistics_of(mean, variance, weight, bias, eps)
    found[-1] = number
    assert found.size == len(STATISTICS) * channels + 1


def statistics_of(mean, variance, weight, bias, eps):
    """Return the rows of statistics that a mean and a variance of each channel make, in float64."""
    mean, variance = (array.astype(np.float64) for array in (mean, variance))
    deviation = 1 / namespace(mean).sqrt(variance + eps)
    scale = deviation if weight is None else deviation * weight.astype(np.float64)
    shift = -mean * scale if bias is None else bias.astype(np.float64) - mean * scale
    return namespace(mean).concatenate([mean, variance, deviation, scale, shift])


def pixels_inside(x, table):
    """Return bool [M, b_h, b_w, 1]: pixels of the image, in rows that are blocks."""
    places = Places.of(table)
    mask = namespace(x).zeros((*x.shape[:3], 1), bool)
    mask[: len(places)] = inside(places)
    return mask


def before_activation(x, statistics, residual):
    """Return ``x * scale + shift + residual``, each step rounded."""
    wide, channels = statistics.dtype, x.shape[3]
    scale, shift = statistics[3 * channels : 5 * channels].reshape(2, -1)
    t = x.astype(wide)
    t *= scale
    t += shift
    if residual is not None:
        t += residual.astype(wide)
    return t


def describe_norm(x, table):
    """Return the sizes of a norm as its launches take them."""
    return StackNorm(
        element=cpp_name(x.dtype, "x"), element_bytes=x.dtype.itemsize, rows=table.capacity,
        images=table.batch, grid=tuple(map(int, table.grid.shape[1:])), channels=x.shape[3],
        block=table.block_size, image=table.image_size,
    )  # fmt: skip


def parameter_of(arrays, default):
    """Return the C++ type of the parameters."""
    given = [a.dtype for a in arrays if a is not None]
    return cpp_name(given[0] if given else default, "weight")
