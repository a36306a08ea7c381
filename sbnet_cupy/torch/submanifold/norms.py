"""Batch norm over the sites alone: rows past the count do not enter the statistics."""

import torch

from ...errors import ShapeError
from ...submanifold.sparse_tensor import SparseTensor
from .._namespace import wide
from .maps import check_sparse, valid


def masked_batch_norm(
    x, running_mean=None, running_var=None, weight=None, bias=None, training=False, momentum=0.1,
    eps=1e-5,
):  # fmt: skip
    """Normalise each channel by its statistics over the sites.

    ``torch.nn.functional.batch_norm`` of the rows before the count, which nothing waits for.

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

    Returns
    -------
    SparseTensor
        In the dtype of ``x``, 0 in rows past the count.

    Raises
    ------
    DTypeError
        If ``x`` is no SparseTensor of tensors.
    ShapeError
        If a tensor has not one value per channel.

    Source: S. Ioffe, C. Szegedy 2015, arXiv:1502.03167.

    Examples
    --------
    >>> rows = torch.tensor([[0, 1], [0, 2]])
    >>> x = sparse_tensor(torch.tensor([[1.0], [3.0]]), rows, spatial_shape=8, capacity=4)
    >>> masked_batch_norm(x, eps=0.0).features.ravel()
    tensor([-1.,  1.,  0.,  0.])
    """
    check_sparse(x)
    tables = {"running_mean": running_mean, "running_var": running_var, "weight": weight,
              "bias": bias}  # fmt: skip
    for name, table in tables.items():
        if table is not None and tuple(table.shape) != (x.channels,):
            raise ShapeError(f"{name} must have shape ({x.channels},), got {tuple(table.shape)}")
    holds = valid(x.coordinates)[:, None]
    z = torch.where(holds, wide(x.features), 0)
    mean, variance = running_mean, running_var
    if training or running_mean is None:
        running = None if running_mean is None else (running_mean, running_var)
        mean, variance = masked_moments(z, holds, running, momentum)
    scale = torch.rsqrt(variance.to(z.dtype) + eps)
    z = (z - mean.to(z.dtype)) * (scale if weight is None else scale * weight.to(z.dtype))
    z = z if bias is None else z + bias.to(z.dtype)
    return SparseTensor(torch.where(holds, z, 0).to(x.features.dtype), x.coordinates)


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
