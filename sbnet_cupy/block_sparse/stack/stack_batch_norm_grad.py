"""stack_batch_norm_grad: gradients of stack_batch_norm. As there, no checks are made here."""

from typing import Any, NamedTuple

import numpy as np

from ...core.arrays import compute_dtype, empty, is_cupy, namespace
from ...core.graph_memory import keep_if_capturing
from ...dense.activation import ACTIVATIONS, activation_grad
from .checks import computing
from .stack_batch_norm import before_activation, describe_norm, parameter_of, pixels_inside
from .stack_norm_launch import prepare_stack_norm_grad, prepare_stack_norm_sums


class NormGradients(NamedTuple):
    """Gradients of x, weight, bias and residual."""

    x: Any
    weight: Any
    bias: Any
    residual: Any


def stack_batch_norm_grad(grad, x, table, statistics, *, y=None, activation=None, dtype=None):
    """Return the gradients of :func:`stack_batch_norm` for the gradient of its ``y``.

    With ``g = grad * activation'(...)`` in the ``n`` pixels of the image that are in rows that are
    blocks, and 0 in all others, ``x_hat = (x - mean) / sqrt(variance + eps)``::

        dresidual = g,  dbias = sum g,  dweight = sum g * x_hat
        dx = scale * (g - dbias / n - x_hat * dweight / n)

    Parameters
    ----------
    grad, x, y : array, shape (M, b_h, b_w, C)
        Of one dtype. ``y`` is given where a residual was added before the activation, which then is
        None or "relu"; elsewhere the activation's input is computed from ``x``.
    table, activation
        As they were given to :func:`stack_batch_norm`.
    statistics : array
        As it returned them.
    dtype : dtype, optional
        That of the parameters; by default that of the statistics.

    Returns
    -------
    NormGradients

    Source: the chain rule. Kernels: cuda_src/block_sparse/stack/stack_batch_norm_grad.cu

    Examples
    --------
    >>> import sbnet_cupy
    >>> from sbnet_cupy.block_sparse.stack.stack_batch_norm import stack_batch_norm
    >>> table = sbnet_cupy.block_table(np.ones((1, 1, 2)), (1, 2))
    >>> x = np.array([1.0, 3]).reshape(1, 1, 2, 1)
    >>> found = stack_batch_norm_grad(x, x, table, stack_batch_norm(x, table, eps=0.0).statistics)
    >>> found.weight, found.bias
    (array([2.]), array([4.]))
    """
    wide, channels = compute_dtype(x.dtype), x.shape[3]
    dtype = np.dtype(dtype or wide)
    dx, dresidual = (empty(x.shape, x.dtype, x) for _ in range(2))
    dweight, dbias = (empty((channels,), dtype, x) for _ in range(2))
    if is_cupy(x) and x.size:
        norm, kind = describe_norm(x, table), ACTIVATIONS.index(activation)
        partials, factors = (empty((n,), wide, x) for n in (norm.partials, 2 * channels))
        for array in (partials, factors):
            keep_if_capturing(array)
        lists = table.bin_counts, table.active_block_indices
        find = prepare_stack_norm_sums(norm, parameter_of((dweight,), wide), kind)
        find(grad, x, y, statistics, *lists, partials, dweight, dbias, factors)
        apply = prepare_stack_norm_grad(norm, kind)
        apply(grad, x, y, statistics, factors, *lists, dx, dresidual)
        return NormGradients(dx, dweight, dbias, dresidual)
    with computing(x):
        xp = namespace(x)
        mean, _, deviation, scale, _ = statistics[:-1].reshape(5, -1).astype(np.float64)
        mask, number = pixels_inside(x, table), max(statistics[-1], 1)
        g = grad.astype(wide)
        if activation is not None:
            t = before_activation(x, statistics, None) if y is None else y.astype(wide)
            g = activation_grad(g, t, activation)
        g = xp.where(mask, g, wide.type(0))
        dresidual[...] = g
        hat = xp.where(mask, (x.astype(np.float64) - mean) * deviation, 0.0)
        sums, products = (t.sum(axis=(0, 1, 2), dtype=np.float64) for t in (g, g * hat))
        dweight[...], dbias[...] = products, sums
        dx[...] = xp.where(mask, scale * (g - sums / number - hat * (products / number)), 0.0)
    return NormGradients(dx, dweight, dbias, dresidual)
