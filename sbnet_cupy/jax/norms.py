"""Batch norm over sites for JAX: rows past the count do not enter the statistics."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.arrays import compute_dtype
from ..errors import DTypeError
from ..submanifold.norm_arguments import read_norm
from ..submanifold.sparse_tensor import SparseTensor
from . import _namespace as ops
from ._sites import valid_rows
from ._specs import spec_of
from .sites import check_sites, number_of, sites_of


def masked_batch_norm(
    x, running_mean=None, running_var=None, weight=None, bias=None, training=False,
    momentum: Any = 0.1, eps=1e-5, activation=None,
):  # fmt: skip
    """Normalise each channel by its statistics over the sites.

    That of :mod:`sbnet_cupy.torch`, but for the running statistics, which are results here: JAX
    arrays are never written. Statistics are in float32 (float64 for float64). Differentiable any
    number of times with respect to the features and all tables; new running statistics have no
    gradient.

    Parameters
    ----------
    x : SparseTensor
        Of JAX arrays.
    running_mean, running_var : jax.Array, shape (C,), optional
        Of a float dtype. Without them the statistics are always those of ``x``.
    weight, bias : jax.Array, shape (C,), optional
        Factor and offset per channel, of a float dtype.
    training : bool
        Whether to normalise by the statistics of ``x`` rather than by the running ones; static.
    momentum : float or jax.Array, shape ()
        Share of the new statistics in the running ones.
    eps : float
        Added to the variance; static.
    activation : {None, "relu", "silu", "gelu"}
        Applied to the result.

    Returns
    -------
    y : SparseTensor
        In the dtype of ``x``, 0 in rows past the count.
    running_mean, running_var : jax.Array, shape (C,), or None
        In training the new ones, in the dtype of the old ones and with the unbiased variance, as
        ``torch.nn.BatchNorm1d`` has it. In evaluation, and where there is no site, those given.

    Raises
    ------
    DTypeError
        If ``x`` is no SparseTensor of floats, a table no JAX array of floats, ``momentum`` or
        ``eps`` no number, or ``training`` or ``eps`` is not known while JAX traces.
    ShapeError
        If a table has not one value per channel.
    DeviceError
        If ``x`` or a table is of arrays of another library.
    ValueError
        If the activation is none of these, one of the running statistics is given alone, or
        ``momentum`` or ``eps`` is NaN.

    Source: S. Ioffe, C. Szegedy 2015, arXiv:1502.03167.

    Examples
    --------
    >>> import functools, jax, jax.numpy as jnp
    >>> from sbnet_cupy.jax import masked_batch_norm, sparse_tensor
    >>> rows = jnp.array([[0, 1], [0, 2]])
    >>> x = sparse_tensor(jnp.array([[1.0], [3.0]]), rows, spatial_shape=8, capacity=4)
    >>> norm = jax.jit(functools.partial(masked_batch_norm, training=True, momentum=0.5, eps=0.0))
    >>> y, mean, variance = norm(x, jnp.zeros(1), jnp.ones(1))
    >>> y.features.ravel().tolist(), mean.tolist(), variance.tolist()
    ([-1.0, 1.0, 0.0, 0.0], [1.0], [1.5])
    """
    sites = sites_of(x)
    check_sites("coordinates", sites)
    features = spec_of("features", x.features)
    tables = {"running_mean": running_mean, "running_var": running_var, "weight": weight,
              "bias": bias}  # fmt: skip
    specs = {name: spec_of(name, table) for name, table in tables.items()}
    eps = read_norm(x.replace(features), specs, eps, activation)
    momentum = number_of("momentum", momentum, nan=False)
    if isinstance(training, jax.core.Tracer):
        raise DTypeError(
            f"training must be a bool that is known while JAX traces, got {training!r}; make it a "
            "static argument"
        )
    wide, holds = compute_dtype(features.dtype), valid_rows(sites)[:, None]
    z = jnp.where(holds, x.features, 0).astype(wide)
    if training or running_mean is None:
        mean, variance, number = _moments(z, holds)
    else:
        mean, variance, number = running_mean.astype(wide), running_var.astype(wide), None
    scale = jax.lax.rsqrt(variance + eps)
    scale = scale if weight is None else scale * weight.astype(wide)
    y = ops.affine(z - mean, scale, bias, activation)
    y = SparseTensor(jnp.where(holds, y, 0).astype(features.dtype), sites)
    if running_mean is not None and number is not None:
        some = number.astype(wide)
        unbiased = variance * (some / jnp.maximum(some - 1, 1))
        running_mean = _moved(running_mean, mean, momentum, number)
        running_var = _moved(running_var, unbiased, momentum, number)
    return y, running_mean, running_var


def _moments(z, holds):
    """Return mean and variance of each channel over the sites, and how many sites there are.

    Where there is none, they are 0 and 1: no gradient is then a product of 0 and infinity.
    """
    number = holds.sum(dtype=jnp.int32)
    some = jnp.maximum(number, 1).astype(z.dtype)
    mean = z.sum(axis=0) / some
    variance = jnp.square(jnp.where(holds, z - mean, 0)).sum(axis=0) / some
    return mean, jnp.where(number > 0, variance, 1), number


def _moved(kept, new, share, number):
    """Return a running statistic with its share of a new one, if there is a site."""
    wide = np.promote_types(compute_dtype(kept.dtype), new.dtype)
    old = kept.astype(wide)
    moved = old + jnp.asarray(share, wide) * (new.astype(wide) - old)
    return jax.lax.stop_gradient(jnp.where(number > 0, moved.astype(kept.dtype), kept))
