"""Batch norm over the sites alone: rows past the count do not enter the statistics.

On a GPU the kernels of a stack's batch norms compute it: sites are blocks of one pixel.
"""

from typing import Any

import torch

from ...core.scalars import as_number
from ...dense.activation import check_activation
from ...submanifold.norm_arguments import check_tables
from ...submanifold.sparse_tensor import SparseTensor
from .. import _dispatch_state as state
from .._namespace import wide
from .._native import no_tensor
from ..network import cuda_norm, gradients
from ..network.epilogue import finish
from ..network.table import Table
from .maps import check_floats, check_sparse, valid

_PIXEL = (1, 1)


def masked_batch_norm(
    x, running_mean=None, running_var=None, weight=None, bias=None, training=False,
    momentum: Any = 0.1, eps=1e-5, activation=None,
):  # fmt: skip
    """Normalise each channel by its statistics over the sites.

    ``torch.nn.functional.batch_norm`` of the rows before the count. Nothing waits for that count.

    Parameters
    ----------
    x : SparseTensor
        Of tensors.
    running_mean, running_var : tensor, shape (C,), optional
        Updated in training, with the unbiased variance, as ``torch.nn.BatchNorm1d`` does; where
        there is no site they stay. Without them the statistics are always those of ``x``.
    weight, bias : tensor, shape (C,), optional
        Factor and offset per channel.
    training : bool
        Whether to normalise by the statistics of ``x`` rather than by the running ones.
    momentum : float or 0-dimensional tensor
        Share of the new statistics in the running ones.
    eps : float
        Added to the variance.
    activation : {None, "relu", "silu", "gelu"}
        Applied to the result.

    Returns
    -------
    SparseTensor
        In the dtype of ``x``, 0 in rows past the count.

    Raises
    ------
    DTypeError
        If ``x`` is no SparseTensor of tensors of floats, another argument no tensor, or
        ``momentum`` or ``eps`` no number.
    ShapeError
        If a tensor has not one value per channel.
    ValueError
        If the activation is none of these, or one of the running statistics is given alone.

    Source: S. Ioffe, C. Szegedy 2015, arXiv:1502.03167.
    Kernels: cuda_src/block_sparse/stack/stack_batch_norm.cu and stack_batch_norm_grad.cu

    Examples
    --------
    >>> rows = torch.tensor([[0, 1], [0, 2]])
    >>> x = sparse_tensor(torch.tensor([[1.0], [3.0]]), rows, spatial_shape=8, capacity=4)
    >>> masked_batch_norm(x, eps=0.0).features.ravel()
    tensor([-1.,  1.,  0.,  0.])
    """
    check_floats(check_sparse(x).features)
    check_activation(activation)
    tables = {"running_mean": running_mean, "running_var": running_var, "weight": weight,
              "bias": bias}  # fmt: skip
    for name, table in tables.items():
        if table is not None and not isinstance(table, torch.Tensor):
            raise no_tensor(name, table)
    check_tables(x, tables)
    eps = as_number("eps", eps, nan=False)
    if not isinstance(momentum, torch.Tensor):
        momentum = as_number("momentum", momentum, nan=False)
    training = training or running_mean is None
    call = (weight, bias, running_mean, running_var), training, momentum, eps, activation
    features = _by_kernels(x, *call)
    if features is None:
        features = _by_torch(x, *call)
    return SparseTensor(features, x.coordinates)


def _by_torch(x, parameters, training, momentum, eps, activation):
    """Return the normalised features by PyTorch's operations."""
    weight, bias, *running = parameters
    holds = valid(x.coordinates)[:, None]
    z = torch.where(holds, wide(x.features), 0)
    if training:
        known = None if running[0] is None else running
        mean, variance = masked_moments(z, holds, known, momentum)
    else:
        mean, variance = running
    scale = torch.rsqrt(variance.to(z.dtype) + eps)
    z = (z - mean.to(z.dtype)) * (scale if weight is None else scale * weight.to(z.dtype))
    z = finish(z if bias is None else z + bias.to(z.dtype), None, activation)
    return torch.where(holds, z, 0).to(x.features.dtype)


def _by_kernels(x, parameters, training, momentum, eps, activation):
    """Return the normalised features, or None where PyTorch's operations have to find them."""
    if isinstance(momentum, torch.Tensor) or state.in_transform():
        return None
    features, where = x.features, (_Rows(x.coordinates), _PIXEL, _PIXEL)
    given = (features, *parameters[:2])
    records = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given)
    if not training and records:
        return None
    stack = features.view(*features.shape, *_PIXEL)
    if not cuda_norm.serves(stack, *where, parameters):
        return None
    stack = cuda_norm.aligned(stack.contiguous())
    if training:
        found = cuda_norm.statistics(stack, *where, parameters, momentum, eps)
        call = *parameters[:2], None, found, where, activation, eps
        stack = gradients.Norm.apply(stack, *call)
    else:
        found = cuda_norm.running(stack, *where, parameters, eps)
        stack = cuda_norm.normalize(stack, *where, found, None, activation)
    return stack.flatten(1)


class _Rows(Table):
    """Sites as blocks of one pixel: what the batch norms of a stack ask its table."""

    known_live = False

    def __init__(self, coordinates):
        super().__init__((1, *_PIXEL), _PIXEL, _PIXEL, coordinates.indices.device)
        self.coordinates = coordinates
        self.counts, self.indices = coordinates.count, None  # rows below the count are sites

    def inside(self, block, size):
        """Return which rows are sites, as pixels of a stack."""
        return valid(self.coordinates)[:, None, None]


def masked_moments(z, counted, running, momentum):
    """Return mean and variance of each channel, the last axis, over the values that count.

    The running ones, if there are any, take their share of them; with the unbiased variance.
    """
    axes, number = tuple(range(z.dim() - 1)), counted.sum()
    some = number.clamp(min=1).to(z.dtype)
    mean = torch.where(counted, z, 0).sum(axes) / some
    variance = torch.where(counted, (z - mean).square(), 0).sum(axes) / some
    if running is not None:
        with torch.no_grad():
            share = momentum * (number > 0).to(running[0].dtype)
            unbiased = variance * (some / (some - 1).clamp(min=1))
            for kept, new in zip(running, (mean, unbiased), strict=True):
                kept.add_(share * (new.to(kept.dtype) - kept))
    return mean, variance
