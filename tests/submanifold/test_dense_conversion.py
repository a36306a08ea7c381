"""dense_to_sparse and sparse_to_dense are each other's inverse, with their gradients."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sbnet_cupy as sb
from support import site_cases
from support.assertions import assert_same, to_numpy

FORMATS = ("channels_last", "channels_first")


@pytest.mark.parametrize("data_format", FORMATS)
@given(data=st.data())
def test_there_and_back(xp, data_format, data):
    sites = data.draw(site_cases.sites())
    dtype, rng = data.draw(site_cases.float_dtypes()), data.draw(site_cases.generators())
    features = sites.features(rng, 2, dtype)
    image = np.full((sites.batch, *sites.shape, 2), 0, dtype)
    image[tuple(sites.indices.T)] = features
    x = sites.tensor(features, xp.asarray)
    dense = sb.sparse_to_dense(x, data_format=data_format)
    expected = image if data_format == "channels_last" else np.moveaxis(image, -1, 1)
    assert_same(to_numpy(dense), np.ascontiguousarray(expected))
    found = sb.dense_to_sparse(dense, data_format=data_format)
    order = np.lexsort(sites.indices.T[::-1])
    assert_same(to_numpy(found.indices), sites.indices[order])
    assert_same(to_numpy(found.features), features[order])
    grad = rng.standard_normal(image.shape).astype(dtype)
    given_grad = grad if data_format == "channels_last" else np.moveaxis(grad, -1, 1).copy()
    dx = sb.sparse_to_dense_grad(xp.asarray(given_grad), x, data_format=data_format)
    back = to_numpy(dx)[: len(sites.indices)]
    assert_same(back, grad[tuple(to_numpy(x.indices)[: len(back)].T)])
    rows = xp.asarray(features[order])
    assert_same(sb.dense_to_sparse_grad(rows, found, data_format=data_format), dense)


def test_what_is_listed(xp):
    image = np.zeros((1, 2, 3, 2), np.float32)
    image[0, 0, 1] = 0.5, 0
    image[0, 1, 2] = 0, -2
    image[0, 1, 0] = np.nan, 0
    x = xp.asarray(image)
    assert to_numpy(sb.dense_to_sparse(x).indices).tolist() == [[0, 0, 1], [0, 1, 0], [0, 1, 2]]
    assert to_numpy(sb.dense_to_sparse(x, tol=1.0).indices).tolist() == [[0, 1, 0], [0, 1, 2]]
    mask = xp.asarray(np.array([[[1, 0, 0], [0, 0, 1]]]))
    listed = sb.dense_to_sparse(x, mask=mask)
    assert to_numpy(listed.indices).tolist() == [[0, 0, 0], [0, 1, 2]]
    assert to_numpy(listed.features).tolist() == [[0, 0], [0, -2]]
    few = sb.dense_to_sparse(x, capacity=2)
    assert few.coordinates.overflowed and to_numpy(few.indices).tolist() == [[0, 0, 1], [0, 1, 0]]
    roomy = sb.dense_to_sparse(x, capacity=5)
    assert to_numpy(roomy.indices)[3:].tolist() == [[-1, -1, -1]] * 2
    assert not to_numpy(roomy.features)[3:].any()


def test_fill_and_another_shape(xp):
    rows = xp.asarray(np.array([[0, 1, 1], [0, 3, 0]], np.int32))
    x = sb.sparse_tensor(xp.asarray(np.ones((2, 1))), rows, spatial_shape=(4, 4))
    dense = to_numpy(x.dense(fill=7.0, spatial_shape=(2, 3)))
    assert dense[0, :, :, 0].tolist() == [[7, 7, 7], [7, 1, 7]]


def test_numbers_beyond_the_range_of_the_dtype_are_infinite(xp):
    rows = xp.asarray(np.array([[0, 1]], np.int32))
    x = sb.sparse_tensor(xp.asarray(np.ones((1, 1), np.float16)), rows, spatial_shape=2)
    assert to_numpy(x.dense(fill=-1e9)).ravel().tolist() == [-np.inf, 1]
    assert to_numpy(sb.sparse_max_pool(x, 2, floor=1e9).features).ravel().tolist() == [np.inf]
    window = sb.kernel_map(x.coordinates, 2, onto=x.coordinates)
    assert to_numpy(sb.sparse_unfold(x.features, window, fill=1e9)).ravel().tolist() == [np.inf, 1]
    assert sb.dense_to_sparse(x.dense(), tol=1e9).coordinates.number() == 0


UNHELD = [("u1", -1), ("u1", 256), ("i4", 0.5), ("i8", float("nan")), ("i2", 1e300), ("?", 2)]


@pytest.mark.parametrize("dtype, fill", UNHELD)
def test_a_fill_that_labels_cannot_hold(xp, dtype, fill):
    """It was wrapped around, in silence."""
    sites, _ = sb.coordinate_map(xp.asarray(np.array([[0, 1]], np.int32)), spatial_shape=2)
    x = sb.SparseTensor(xp.asarray(np.ones((1, 1), dtype)), sites)
    with pytest.raises(sb.DTypeError, match=r"^fill must be an integer that .* holds, from .* got"):
        x.dense(fill=fill)
    assert to_numpy(x.dense(fill=np.float64(1))).ravel().tolist() == [1, 1]


def test_a_fill_of_labels_is_not_rounded(xp):
    sites, _ = sb.coordinate_map(xp.asarray(np.array([[0, 1]], np.int32)), spatial_shape=2)
    x = sb.SparseTensor(xp.asarray(np.ones((1, 1), np.int64)), sites)
    assert to_numpy(x.dense(fill=2**53 + 1)).ravel().tolist() == [2**53 + 1, 1]


@pytest.mark.parametrize("shape", [(1, 2, 2, 0), (0, 2, 2, 3), (2, 0, 3, 1)], ids=str)
@pytest.mark.parametrize("capacity", [None, 2])
def test_nothing_to_list(xp, shape, capacity):
    x = sb.dense_to_sparse(xp.asarray(np.zeros(shape)), capacity=capacity)
    assert x.features.shape == (capacity or 0, shape[-1]) and x.coordinates.number() == 0
    assert x.dense().shape == shape


def test_a_grid_that_is_not_known(xp):
    rows = xp.asarray(np.array([[0, 1, 1]], np.int32))
    x = sb.sparse_tensor(xp.asarray(np.ones((1, 1))), rows, capacity=2)
    with pytest.raises(sb.ShapeError, match="known shape"):
        x.dense()
    with pytest.raises(sb.ShapeError, match="batch size"):
        sb.global_pool(x)


def test_a_grid_that_no_array_can_hold():
    rows = np.array([[0, 1, 1, 1]], np.int32)
    x = sb.sparse_tensor(np.ones((1, 2), np.float32), rows, spatial_shape=2**20)
    for call in (sb.sparse_to_dense, lambda x: sb.sparse_to_dense_grad(np.ones((1, 2)), x)):
        with pytest.raises(sb.ShapeError, match=r"fewer than 2\*\*60 numbers, got 1 samples of"):
            call(x)
    assert sb.sparse_to_dense(x, spatial_shape=2).shape == (1, 2, 2, 2, 2)


def test_masks_of_numbers_and_rows_that_are_no_cells(xp):
    image = xp.asarray(np.arange(1.0, 5.0).reshape(1, 4, 1))
    x = sb.dense_to_sparse(image, mask=xp.asarray(np.array([[0, -1, 2, 0]], np.int32)))
    assert x.indices.tolist() == [[0, 1], [0, 2]]
    rows, count = np.array([[0, 1], [1, -1], [0, 2]], np.int32), np.array([2], np.int32)
    sites = sb.CoordinateMap(xp.asarray(rows), xp.asarray(count), (4,), 2)
    dense = sb.sparse_to_dense(sb.SparseTensor(xp.asarray(np.ones((3, 1))), sites))
    assert dense.ravel().tolist() == [0, 1, 0, 0, 0, 0, 0, 0]  # without the row past the count


def test_channels_count_for_the_size_of_a_grid():
    x = sb.sparse_tensor(np.ones((1, 4)), np.array([[0, 0, 0]]), spatial_shape=(2**29, 2**29))
    with pytest.raises(sb.ShapeError, match=r"fewer than 2\*\*60 numbers, got 1 samples of"):
        sb.sparse_to_dense(x)
