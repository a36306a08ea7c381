"""Batch norm over sites for TensorFlow, of eager tensors."""

from typing import Any

import numpy as np
import tensorflow as tf

from ..core.arrays import compute_dtype
from ..core.scalars import as_number
from ..errors import DTypeError
from ..submanifold.norm_arguments import read_norm
from ..submanifold.sparse_tensor import SparseTensor, check_tensor
from . import _namespace as ops
from ._eager import eager
from ._tensors import spec_of


def masked_batch_norm(
    x, running_mean=None, running_var=None, weight=None, bias=None, training=False,
    momentum: Any = 0.1, eps=1e-5, activation=None,
):  # fmt: skip
    """Normalise each channel by its statistics over the sites.

    That of :mod:`sbnet_cupy.torch`, of TensorFlow's own operations. Statistics are in float32
    (float64 for float64). Differentiable with respect to the features and all tables.

    Parameters
    ----------
    x : SparseTensor
        Of eager tensors.
    running_mean, running_var : tf.Variable, shape (C,), optional
        Of a float dtype. Updated in training, with the unbiased variance, as
        ``torch.nn.BatchNorm1d`` does; where there is no site they stay. Tensors serve in
        evaluation, too. Without them the statistics are always those of ``x``. A Keras layer of
        mixed precision adds them as weights with ``autocast=False``, as Keras's own norms do.
    weight, bias : tensor or tf.Variable, shape (C,), optional
        Factor and offset per channel, of a float dtype.
    training : bool
        Whether to normalise by the statistics of ``x`` rather than by the running ones.
    momentum : float or tensor, shape ()
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
        If ``x`` is no SparseTensor of eager tensors of floats, a table no tensor of floats, a
        running statistic in training no variable, or ``momentum`` or ``eps`` no number.
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
    >>> import tensorflow as tf
    >>> from sbnet_cupy.tensorflow import masked_batch_norm, sparse_tensor
    >>> rows = tf.constant([[0, 1], [0, 2]])
    >>> x = sparse_tensor(tf.constant([[1.0], [3.0]]), rows, spatial_shape=8, capacity=4)
    >>> mean, variance = tf.Variable([0.0]), tf.Variable([1.0])
    >>> y = masked_batch_norm(x, mean, variance, training=True, momentum=0.5, eps=0.0)
    >>> y.features.numpy().ravel().tolist(), float(mean[0]), float(variance[0])
    ([-1.0, 1.0, 0.0, 0.0], 1.0, 1.5)
    """
    check_tensor(x)
    features = eager("features", x.features)
    eager("coordinates.indices", x.indices)
    variables = {"running_mean": running_mean, "running_var": running_var}
    given = {**variables, "weight": weight, "bias": bias}
    tables = {name: eager(name, table) for name, table in given.items()}
    tables |= {name: _unrounded(tables[name], variable) for name, variable in variables.items()}
    specs = {name: spec_of(table) for name, table in tables.items()}
    eps = read_norm(x.replace(spec_of(features)), specs, eps, activation)
    momentum = as_number("momentum", momentum, nan=False)
    known = running_mean is not None
    if training and known:
        for name, variable in variables.items():
            if not hasattr(variable, "assign"):
                raise DTypeError(
                    f"{name} must be a tf.Variable, to which training assigns, got "
                    f"{type(variable).__name__}; make one of it"
                )
    wide, holds = compute_dtype(features.dtype.as_numpy_dtype), x.coordinates.valid()[:, None]
    z = tf.cast(ops.where(holds, features, 0), wide)
    if training or not known:
        mean, variance, number = _moments(z, holds)
    else:
        mean, variance = (tf.cast(tables[name], wide) for name in variables)
    scale = tf.math.rsqrt(variance + eps)
    scale = scale if weight is None else scale * tf.cast(tables["weight"], wide)
    y = ops.affine(z - mean, scale, tables["bias"], activation)
    if training and known and number:
        unbiased = variance * (number / max(number - 1, 1))
        for (name, variable), new in zip(variables.items(), (mean, unbiased), strict=True):
            variable.assign(_moved(tables[name], new, momentum))
    return SparseTensor(tf.cast(ops.where(holds, y, 0), features.dtype), x.coordinates)


def _unrounded(value, variable):
    """Return the value of a running statistic in its own dtype.

    In a layer of mixed precision Keras gives its variables in the dtype that the layer computes in,
    unless they were added with ``autocast=False``.
    """
    kept = getattr(variable, "_value", None)  # TensorFlow's variable in one of Keras
    return value if kept is None or kept.dtype == value.dtype else tf.convert_to_tensor(kept)


def _moments(z, holds):
    """Return mean and variance of each channel over the sites, and how many sites there are.

    Where there is none, they are 0 and 1: no gradient is then a product of 0 and infinity.
    """
    number = int(tf.math.count_nonzero(holds))
    some = max(number, 1)
    mean = tf.reduce_sum(z, axis=0) / some
    centred = ops.where(holds, z - mean, 0)
    variance = tf.reduce_sum(tf.square(centred), axis=0) / some
    return mean, variance if number else tf.ones_like(variance), number


def _moved(kept, new, share):
    """Return a running statistic with its share of a new one."""
    wide = np.promote_types(*(compute_dtype(t.dtype.as_numpy_dtype) for t in (kept, new)))
    new, old = tf.cast(new, wide), tf.cast(kept, wide)
    return tf.cast(old + share * (new - old), kept.dtype)
