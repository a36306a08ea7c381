"""Features at sites for TensorFlow: lists of sites, maps, pools and whole grids, with gradients."""

import functools
from typing import Any

import tensorflow as tf

import sbnet_cupy as core

from ..core.documentation import documented_as
from ..submanifold.adapted import ADAPTED
from ..submanifold.sparse_tensor import SparseTensor, check_tensor, put_at_sites
from ._eager import differentiable, eager

_documented = functools.partial(documented_as, array="tensor")


@_documented(core.coordinate_map)
def coordinate_map(
    indices, *, spatial_shape=None, batch_size=None, mode="unique", order="leaf", capacity=None
):
    """List the distinct sites of rows of coordinates, as tensors.

    Examples
    --------
    >>> import tensorflow as tf
    >>> sites, inverse = coordinate_map(tf.constant([[0, 5, 5], [0, 1, 2]]), spatial_shape=(8, 8))
    >>> sites.indices.numpy().tolist(), inverse.numpy().tolist()
    ([[0, 1, 2], [0, 5, 5]], [1, 0])
    """
    return core.coordinate_map(
        eager("indices", indices), spatial_shape=spatial_shape, batch_size=batch_size, mode=mode,
        order=order, capacity=capacity,
    )  # fmt: skip


@_documented(core.sparse_tensor)
def sparse_tensor(
    features, indices, *, spatial_shape=None, batch_size=None, mode="unique", order="leaf",
    capacity=None,
):  # fmt: skip
    """Put features at sites; differentiable with respect to the features.

    Examples
    --------
    >>> import tensorflow as tf
    >>> rows = tf.constant([[0, 1], [0, 4], [0, 1]])
    >>> x = sparse_tensor(tf.ones((3, 2)), rows, spatial_shape=8, mode="sum")
    >>> x.features.numpy().tolist()
    [[2.0, 2.0], [1.0, 1.0]]
    """
    indices = eager("indices", indices)
    options = {"spatial_shape": spatial_shape, "batch_size": batch_size, "mode": mode,
               "order": order, "capacity": capacity}  # fmt: skip
    return _put(lambda features: put_at_sites(features, indices, **options), features, mode)[0]


def _put(find, features, mode):
    """Return the SparseTensor that ``find`` makes of features, and the site of each row."""
    found = []

    @tf.custom_gradient
    def put(features):
        y, inverse = find(features)
        found[:] = y.coordinates, inverse
        return y.features, lambda grad: _spread(grad, inverse, mode)

    features = put(eager("features", features))
    return SparseTensor(features, found[0]), found[1]


@_documented(core.voxelize)
def voxelize(
    points, features=None, *, ranges, voxel_size, sample=None, batch_size=None, mode="mean",
    order="leaf", capacity=None,
):  # fmt: skip
    """Put the points of a cloud into voxels; differentiable with respect to the features.

    Examples
    --------
    >>> import tensorflow as tf
    >>> points = tf.constant([[0.2, 1.6], [0.4, 1.8], [3.5, 0.1], [9.0, 0.0]])
    >>> x, inverse = voxelize(points, ranges=[(0, 4), (0, 2)], voxel_size=0.5, mode="first")
    >>> x.indices.numpy().tolist(), inverse.numpy().tolist()
    ([[0, 0, 3], [0, 7, 0]], [0, 0, 1, -1])
    """
    points, sample = eager("points", points), eager("sample", sample)

    def find(features):
        return core.voxelize(
            points, features, ranges=ranges, voxel_size=voxel_size, sample=sample,
            batch_size=batch_size, mode=mode, order=order, capacity=capacity,
        )  # fmt: skip

    return _put(find, points if features is None else features, mode)


@_documented(core.kernel_map)
def kernel_map(
    coordinates, kernel_size=None, *, stride: Any = 1, dilation: Any = 1, padding=None, onto=None,
    transposed=False, output_padding: Any = 0, offsets=None, capacity=None,
):  # fmt: skip
    """Find which sites a convolution reads for each site of its result.

    Examples
    --------
    >>> import tensorflow as tf
    >>> sites, _ = coordinate_map(tf.constant([[0, 1], [0, 2], [0, 5]]), spatial_shape=8)
    >>> kernel_map(sites, 3, onto=sites).rows.numpy().tolist()
    [[-1, 0, -1], [0, 1, 2], [1, -1, -1]]
    """
    return core.kernel_map(
        coordinates, kernel_size, stride=stride, dilation=dilation, padding=padding, onto=onto,
        transposed=transposed, output_padding=output_padding, offsets=offsets, capacity=capacity,
    )  # fmt: skip


@_documented(core.sparse_max_pool)
def sparse_max_pool(
    x, kernel_size, *, stride=None, padding: Any = 0, dilation: Any = 1, floor=None, ties="first",
    onto=None, capacity=None,
):  # fmt: skip
    """Take the largest feature in each window; differentiable.

    Examples
    --------
    >>> import tensorflow as tf
    >>> rows = tf.constant([[0, 1], [0, 2], [0, 3]])
    >>> x = sparse_tensor(tf.constant([[1.0], [5.0], [3.0]]), rows, spatial_shape=8)
    >>> sparse_max_pool(x, 2).features.numpy().ravel().tolist()
    [1.0, 5.0]
    """
    options = {"stride": stride, "padding": padding, "dilation": dilation, "floor": floor,
               "ties": ties, "onto": onto, "capacity": capacity}  # fmt: skip
    return _pooled(core.sparse_max_pool, core.sparse_max_pool_grad, x, kernel_size, **options)


@_documented(core.sparse_avg_pool)
def sparse_avg_pool(
    x, kernel_size, *, stride=None, padding: Any = 0, dilation: Any = 1, count="volume", onto=None,
    capacity=None,
):  # fmt: skip
    """Average the features in each window; differentiable.

    Examples
    --------
    >>> import tensorflow as tf
    >>> rows = tf.constant([[0, 1], [0, 2], [0, 3]])
    >>> x = sparse_tensor(tf.constant([[1.0], [5.0], [3.0]]), rows, spatial_shape=8)
    >>> sparse_avg_pool(x, 2, count="active").features.numpy().ravel().tolist()
    [1.0, 4.0]
    """
    options = {"stride": stride, "padding": padding, "dilation": dilation, "count": count,
               "onto": onto, "capacity": capacity}  # fmt: skip
    return _pooled(core.sparse_avg_pool, core.sparse_avg_pool_grad, x, kernel_size, **options)


@_documented(core.sparse_unpool)
def sparse_unpool(x, *, onto):
    """Copy features back to the sites that were pooled; differentiable.

    Examples
    --------
    >>> import tensorflow as tf
    >>> rows = tf.constant([[0, 1], [0, 2], [0, 3]])
    >>> x = sparse_tensor(tf.constant([[1.0], [5.0], [3.0]]), rows, spatial_shape=8)
    >>> sparse_unpool(sparse_max_pool(x, 2), onto=x).features.numpy().ravel().tolist()
    [1.0, 5.0, 5.0]
    """
    return _pooled(core.sparse_unpool, core.sparse_unpool_grad, x, onto=onto)


@_documented(core.global_pool)
def global_pool(x, reduce="max"):
    """Reduce the sites of each sample to one row; differentiable.

    Examples
    --------
    >>> import tensorflow as tf
    >>> rows = tf.constant([[0, 1], [0, 2], [1, 3]])
    >>> x = sparse_tensor(tf.constant([[1.0], [5.0], [3.0]]), rows, spatial_shape=8)
    >>> global_pool(x).numpy().ravel().tolist()
    [5.0, 3.0]
    """
    return _pooled(core.global_pool, core.global_pool_grad, x, reduce)


@_documented(core.sparse_to_dense)
def sparse_to_dense(x, *, fill=0.0, data_format="channels_last", spatial_shape=None):
    """Write the features into a whole grid; differentiable.

    Examples
    --------
    >>> import tensorflow as tf
    >>> x = sparse_tensor(tf.ones((2, 1)), tf.constant([[0, 1], [0, 3]]), spatial_shape=4)
    >>> sparse_to_dense(x).numpy().ravel().tolist()
    [0.0, 1.0, 0.0, 1.0]
    """
    options = {"data_format": data_format, "spatial_shape": spatial_shape}
    forward = functools.partial(core.sparse_to_dense, fill=fill)
    return _pooled(forward, core.sparse_to_dense_grad, x, **options)


ADAPTED["tensorflow", "sparse_to_dense"] = sparse_to_dense


@_documented(core.dense_to_sparse)
def dense_to_sparse(x, *, tol=0.0, mask=None, capacity=None, data_format="channels_last"):
    """List the sites of a whole grid that hold something; differentiable.

    Examples
    --------
    >>> import tensorflow as tf
    >>> x = dense_to_sparse(tf.constant([[[0.0], [2.0], [0.0], [3.0]]]))
    >>> x.indices.numpy().tolist(), x.features.numpy().ravel().tolist()
    ([[0, 1], [0, 3]], [2.0, 3.0])
    """
    options = {"tol": tol, "capacity": capacity, "data_format": data_format}
    mask, made = eager("mask", mask), []

    def forward(x):
        made.append(core.dense_to_sparse(x, mask=mask, **options))
        return made[0].features

    def differentiate(grad, x):
        return [core.dense_to_sparse_grad(grad, made[0], data_format=data_format)]

    features = differentiable(forward, differentiate, {"x": x})
    return SparseTensor(features, made[0].coordinates)


def _pooled(forward, backward, x, *args, **options):
    """Return a SparseTensor, or a tensor, that a function of the core makes of a SparseTensor."""
    check_tensor(x)
    made = []

    def compute(features):
        made.append(forward(SparseTensor(features, x.coordinates), *args, **options))
        return made[0].features if isinstance(made[0], SparseTensor) else made[0]

    def differentiate(grad, features):
        return [backward(grad, SparseTensor(features, x.coordinates), *args, **options)]

    y = differentiable(compute, differentiate, {"features": x.features})
    return SparseTensor(y, made[0].coordinates) if isinstance(made[0], SparseTensor) else y


def _spread(grad, inverse, mode):
    """Return the gradient of rows of features, given that of what the sites got of them."""
    if not grad.shape[0]:  # no site, to gather from
        return tf.zeros((inverse.shape[0], grad.shape[1]), grad.dtype)
    there = inverse >= 0
    site = tf.where(there, inverse, 0)
    count, number = tf.shape(grad)[0], tf.range(tf.shape(inverse)[0])
    if mode == "mean":
        rows = tf.math.unsorted_segment_sum(tf.ones_like(inverse), inverse, count)
        total = tf.float64 if grad.dtype == tf.float64 else tf.float32  # halves hold few counts
        shared = tf.cast(grad, total) / tf.cast(tf.maximum(rows, 1), total)[:, None]
        grad = tf.cast(shared, grad.dtype)
    elif mode != "sum":
        last = mode == "last"
        chosen = tf.math.unsorted_segment_max if last else tf.math.unsorted_segment_min
        there &= tf.gather(chosen(number, inverse, count), site) == number
    return tf.where(there[:, None], tf.gather(grad, site), tf.zeros((), grad.dtype))
