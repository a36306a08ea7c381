"""Masks: every function against loops written from its definition, on every array library."""

import doctest
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sbnet_cupy.block_sparse.mask import birds_eye as birds_eye_module
from sbnet_cupy.block_sparse.mask import masks
from sbnet_cupy.errors import DeviceError, DTypeError, ShapeError
from support.assertions import assert_same

sizes = st.integers(0, 9)
bool_masks = hnp.arrays(bool, st.tuples(st.integers(0, 2), sizes, sizes))
shapes = st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(0, 30))
densities = st.floats(0, 1)
picture_dtypes = st.sampled_from(
    [bool, np.uint8, np.int8, np.uint16, np.int32, np.int64, np.float16, np.float32, np.float64]
)


@st.composite
def pictures(draw, count=1):
    """Frames of one shape and dtype, with 2, 3 or 4 axes; NaN, infinities and extremes included."""
    shape = draw(hnp.array_shapes(min_dims=2, max_dims=4, min_side=0, max_side=4))
    dtype = draw(picture_dtypes)
    frames = [draw(hnp.arrays(dtype, shape)) for _ in range(count)]
    return frames[0] if count == 1 else frames


def run(xp, function, *arrays, **kwargs):
    """Call on the arrays of a library; the result must be a bool array of that library."""
    result = function(*(xp.asarray(a) for a in arrays), **kwargs)
    result = xp.to_numpy(result)
    assert result.dtype == bool
    assert result.ndim == 3
    return result


def any_channel(picture, test):
    """[N, H, W] of ``test(value)`` in any channel, by loops."""
    if picture.ndim == 2:
        picture = picture[None, :, :, None]
    elif picture.ndim == 3:
        picture = picture[None]
    mask = np.zeros(picture.shape[:3], bool)
    for at in np.ndindex(*mask.shape):
        mask[at] = any(test(value) for value in picture[at].tolist())
    return mask


# --- made up ------------------------------------------------------------------------------------


@given(shape=shapes, density=densities)
@example(shape=(1, 30, 30), density=0.01)
@example(shape=(1, 10, 30), density=0.09)
def test_top_left_is_the_smallest_rectangle_of_the_density(shape, density):
    mask = masks.top_left(shape, density)
    rows, columns = (math.ceil(math.sqrt(density) * size - 1e-9) for size in shape[1:])
    expected = np.zeros(shape, bool)
    for at in np.ndindex(*shape):
        expected[at] = at[1] < rows and at[2] < columns
    assert_same(mask, expected)
    assert mask.sum() >= density * mask.size - 1e-6 * (mask.size + 1)


def test_top_left_of_round_densities():
    assert masks.top_left((1, 30, 30), 0.01).sum() == 9
    assert masks.top_left((2, 100, 200), 0.25).sum(axis=(1, 2)).tolist() == [5000, 5000]
    assert masks.top_left((7, 5), 1).all()
    assert not masks.top_left((7, 5), 0).any()
    assert masks.top_left((7, 5), 0.5, dtype=np.float32).dtype == np.float32


@given(shape=shapes, density=densities, sigma=st.floats(0, 50), seed=st.integers(0, 3))
def test_blobs_have_the_exact_density_and_repeat(shape, density, sigma, seed):
    mask = masks.blobs(shape, density, sigma=sigma, seed=seed)
    n, h, w = shape
    assert mask.shape == shape
    assert mask.dtype == bool
    assert mask.sum(axis=(1, 2)).tolist() == [round(density * h * w)] * n
    assert_same(masks.blobs(shape, density, sigma=sigma, seed=seed), mask)


def test_blobs_differ_by_seed_and_by_image_and_are_smooth():
    mask = masks.blobs((2, 128, 128), 0.2, sigma=6, seed=1)
    assert (mask[0] != mask[1]).any()
    assert (mask != masks.blobs((2, 128, 128), 0.2, sigma=6, seed=2)).any()
    edges = (mask[:, 1:] != mask[:, :-1]).mean()
    noise = masks.blobs((2, 128, 128), 0.2, sigma=0, seed=1)
    assert edges < 0.2 * (noise[:, 1:] != noise[:, :-1]).mean()


@pytest.mark.parametrize("make", [masks.top_left, masks.blobs])
def test_made_up_masks_are_the_same_in_every_library(make, xp):
    mask = make((2, 33, 20), 0.3, xp=xp.module)
    assert_same(xp.to_numpy(mask), make((2, 33, 20), 0.3))


# --- from data ----------------------------------------------------------------------------------


@given(picture=pictures(), level=st.sampled_from([-1e9, -1, 0, 0.5, 1, 3, 200, 1e9, math.inf]))
@example(picture=np.array([[2**53 + 1, 2**53]]), level=2**53)
@example(picture=np.array([[2**53 + 1, 2**53]]), level=2.0**53)
@example(picture=np.array([[2**63 - 1, -(2**63)]]), level=2**63 - 2)
@example(picture=np.array([[2**63 - 1, -(2**63)]]), level=-(2.0**63))
@example(picture=np.array([[2**64 - 1, 0]], np.uint64), level=-0.5)
@example(picture=np.array([[2**64 - 1, 0]], np.uint64), level=2.0**64)
@example(picture=np.array([[0, -1]], np.int8), level=-0.5)
@example(picture=np.array([[0.1, 0.3, -0.3]], np.float32), level=0.1)
@example(picture=np.array([[0.1, 0.3, -0.3]], np.float32), level=-0.3)
@example(picture=np.array([[2.0**24, np.inf]], np.float32), level=2**24 - 1)
@example(picture=np.array([[np.inf, 3e38, -np.inf]], np.float32), level=1e300)
@example(picture=np.array([[np.inf, -3e38, -np.inf]], np.float32), level=-1e300)
@example(picture=np.array([[2.0**53, np.nan]]), level=2**53 + 1)
@example(picture=np.array([[2.0**53 + 2, np.nan]]), level=2**53 + 1)
@example(picture=np.array([[0.1, -0.1]], np.float16), level=0.0999755859)
def test_threshold_is_strictly_greater(picture, level, xp):
    expected = any_channel(picture, lambda value: value > level)  # exact, in Python
    assert_same(run(xp, masks.threshold, picture, level=level), expected)


@given(frames=pictures(2), level=st.sampled_from([-1, 0, 0.5, 1, 100, 254, 70000]))
@example(frames=[np.uint8([[0]]), np.uint8([[255]])], level=254)
@example(frames=[np.int8([[-128]]), np.int8([[127]])], level=254)
@example(frames=[np.int64([[-(2**62)]]), np.int64([[2**62]])], level=70000)
@example(frames=[np.float16([[-65504]]), np.float16([[65504]])], level=70000)
@example(frames=[np.float32([[np.inf]]), np.float32([[np.inf]])], level=0)
def test_change_compares_the_true_distance(frames, level, xp):
    previous, current = frames
    wide = object if previous.dtype.kind in "biu" else np.float64
    with np.errstate(all="ignore"):
        distance = abs(current.astype(wide) * 1 - previous.astype(wide) * 1)
        if previous.dtype in (np.float16, np.float32):
            distance = distance.astype(np.float32)
    assert_same(
        run(xp, masks.change, previous, current, level=level),
        any_channel(distance, lambda value: value > level),
    )


def test_pictures_of_bfloat16(xp):
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    picture = np.array([[0.5, 1, -3]], bfloat16)
    assert run(xp, masks.threshold, picture, level=0.5).tolist() == [[[False, True, False]]]
    moved = run(xp, masks.change, picture, np.zeros_like(picture), level=0.5)
    assert moved.tolist() == [[[False, True, True]]]


coordinate = st.one_of(
    st.integers(-9, 9).map(lambda quarter: quarter / 4),
    st.floats(-3, 3, width=32),
    st.sampled_from([math.nan, math.inf, -math.inf]),
)


@given(
    points=st.lists(st.tuples(coordinate, coordinate, coordinate, coordinate), max_size=30),
    x_range=st.sampled_from([(0, 2), (-1.5, 1), (-0.25, 2)]),
    y_range=st.sampled_from([(-2, 2), (0.5, 1.25)]),
    z_range=st.sampled_from([None, (-1, 1), (0.25, 0.5)]),
    cell=st.sampled_from([0.25, 0.5, 1.0, 8]),
    min_points=st.integers(1, 3),
    columns=st.integers(3, 4),
)
def test_birds_eye_counts_points_per_cell(
    points, x_range, y_range, z_range, cell, min_points, columns, xp
):
    cloud = np.array(points, np.float32).reshape(-1, 4)[:, :columns]
    h, w = (math.ceil((high - low) / cell) for low, high in (x_range, y_range))
    counts = np.zeros((1, h, w), int)
    for x, y, z, *_ in cloud.tolist():
        inside = x_range[0] <= x < x_range[1] and y_range[0] <= y < y_range[1]
        if z_range is not None:
            inside = inside and z_range[0] <= z < z_range[1]
        if inside and math.isfinite(z):
            counts[0, int((x - x_range[0]) / cell), int((y - y_range[0]) / cell)] += 1
    mask = run(
        xp, masks.birds_eye, cloud, x_range=x_range, y_range=y_range, cell=cell,
        z_range=z_range, min_points=min_points,
    )  # fmt: skip
    assert_same(mask, counts >= min_points)


def test_birds_eye_of_a_lidar_grid_has_its_usual_size():
    just_inside = np.nextafter(np.float64(70.4), 0)
    cloud = np.array([[0, -40, 0], [just_inside, 39.99, 0], [70.4, 0, 0], [1, 40, 0]])
    mask = masks.birds_eye(cloud, x_range=(0, 70.4), y_range=(-40, 40), cell=0.1)
    assert mask.shape == (1, 704, 800)
    assert np.argwhere(mask).tolist() == [[0, 0, 0], [0, 703, 799]]


@pytest.mark.parametrize("columns", range(3, 8))
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int16", "uint8", ">f4"])
def test_birds_eye_takes_points_of_any_layout(columns, dtype):
    rng = np.random.default_rng(columns)
    points = rng.uniform(0, 9, (60, columns)).astype(dtype)
    points[:, 3:] = rng.integers(0, 200, (60, columns - 3))  # further columns do not matter
    grid = {"x_range": (0, 9), "y_range": (1, 8), "cell": 1.5}
    expected = np.zeros((1, 6, 5), bool)
    for x, y, _ in points[:, :3].tolist():
        if x < 9 and 1 <= y < 8:
            expected[0, int(x / 1.5), int((y - 1) / 1.5)] = True
    spread = np.full((60, 2 * columns), 77, dtype)
    spread[:, ::2] = points
    for view in (points, np.asfortranarray(points), points[::-1], spread[:, ::2], points[:, :3]):
        before = view.copy()
        assert_same(masks.birds_eye(view, **grid), expected)
        assert np.array_equal(view, before)


# --- from a mask --------------------------------------------------------------------------------


@given(mask=bool_masks, radius=st.tuples(st.integers(0, 12), st.integers(0, 12)))
def test_dilate_looks_at_the_square_around(mask, radius, xp):
    expected = np.zeros_like(mask)
    for n, i, j in np.ndindex(*mask.shape):
        rows = slice(max(i - radius[0], 0), i + radius[0] + 1)
        columns = slice(max(j - radius[1], 0), j + radius[1] + 1)
        expected[n, i, j] = mask[n, rows, columns].any()
    assert_same(run(xp, masks.dilate, mask, radius=radius), expected)


@given(mask=bool_masks, factor=st.tuples(st.integers(1, 11), st.integers(1, 11)))
def test_downsample_looks_at_the_pixels_under(mask, factor, xp):
    n, h, w = mask.shape
    expected = np.zeros((n, -(-h // factor[0]), -(-w // factor[1])), bool)
    for image, i, j in np.argwhere(mask):
        expected[image, i // factor[0], j // factor[1]] = True
    assert_same(run(xp, masks.downsample, mask, factor=factor), expected)


@pytest.mark.parametrize("factor", [(2**20, 2**20), (2**70, 3)])
def test_downsample_to_one_pixel_takes_no_more_memory_for_large_factors(xp, factor):
    mask = np.zeros((2, 5, 3), bool)
    mask[1, 4, 2] = True
    result = run(xp, masks.downsample, mask, factor=factor)
    assert_same(result, np.array([[[False]], [[True]]]))


@given(mask=bool_masks)
def test_neutral_sizes_copy(mask):
    for result in (masks.dilate(mask, 0), masks.downsample(mask, 1)):
        assert_same(result, mask)
        assert not np.shares_memory(result, mask)


@given(mask=bool_masks, radius=st.integers(0, 4))
def test_dilations_add_up(mask, radius):
    assert_same(masks.dilate(masks.dilate(mask, radius), 1), masks.dilate(mask, radius + 1))


# --- other libraries, and errors ----------------------------------------------------------------


def test_torch_tensors_come_back_as_torch_tensors(require):
    torch = require("torch")
    picture = torch.tensor([[0, 3, 9]], dtype=torch.uint8)
    mask = masks.dilate(masks.threshold(picture, 5), (0, 1))
    assert isinstance(mask, torch.Tensor)
    assert mask.tolist() == [[[False, True, True]]]
    points = torch.tensor([[0.5, 0.5, 0.0]])
    seen = masks.birds_eye(points, x_range=(0, 1), y_range=(0, 2), cell=1)
    assert seen.tolist() == [[[True, False]]]
    with pytest.raises(DeviceError):
        masks.change(picture, picture.numpy(), 1)


GRID = {"x_range": (0, 1), "y_range": (0, 1), "cell": 0.5}
POINTS = np.zeros((2, 3), np.float32)
PICTURE = np.zeros((3, 3), np.float32)
MASK = np.zeros((1, 3, 3), bool)


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "error", "name"),
    [
        (masks.top_left, ((3,), 0.5), {}, ShapeError, "shape"),
        (masks.top_left, ((3, 2.5), 0.5), {}, ShapeError, "shape"),
        (masks.top_left, ((3, -1), 0.5), {}, ShapeError, "shape"),
        (masks.top_left, (9, 0.5), {}, ShapeError, "shape"),
        (masks.top_left, ((3, 3), 1.5), {}, ValueError, "density"),
        (masks.top_left, ((3, 3), math.nan), {}, ValueError, "density"),
        (masks.top_left, ((3, 3), "half"), {}, ValueError, "density"),
        (masks.top_left, ((3, 3), 0.5), {"xp": math}, ValueError, "xp"),
        (masks.blobs, ((3, 3), -0.1), {}, ValueError, "density"),
        (masks.blobs, ((3, 3), 0.5), {"sigma": -1}, ValueError, "sigma"),
        (masks.blobs, ((3, 3), 0.5), {"sigma": math.inf}, ValueError, "sigma"),
        (masks.blobs, ((3, 3), 0.5), {"seed": -1}, ValueError, "seed"),
        (masks.blobs, ((3, 3), 0.5), {"seed": "a"}, ValueError, "seed"),
        (masks.threshold, ([[1, 2]], 1), {}, DTypeError, "picture"),
        (masks.threshold, (np.zeros(3), 1), {}, ShapeError, "picture"),
        (masks.threshold, (PICTURE.astype(complex), 1), {}, DTypeError, "picture"),
        (masks.threshold, (PICTURE, None), {}, ValueError, "level"),
        (masks.threshold, (PICTURE, math.nan), {}, ValueError, "level"),
        (masks.change, (PICTURE, PICTURE[:2], 1), {}, ShapeError, "current"),
        (masks.change, (PICTURE, PICTURE.astype(int), 1), {}, DTypeError, "current"),
        (masks.change, (PICTURE.astype("U1"), PICTURE, 1), {}, DTypeError, "previous"),
        (masks.change, (PICTURE, PICTURE, True), {}, ValueError, "level"),
        (masks.birds_eye, (POINTS[:, :2],), GRID, ShapeError, "points"),
        (masks.birds_eye, (POINTS[0],), GRID, ShapeError, "points"),
        (masks.birds_eye, (POINTS > 0,), GRID, DTypeError, "points"),
        (masks.birds_eye, (POINTS,), GRID | {"cell": 0}, ValueError, "cell"),
        (masks.birds_eye, (POINTS,), GRID | {"cell": math.inf}, ValueError, "cell"),
        (masks.blobs, ((3, 3), 0.5), {"sigma": 10**400}, ValueError, "sigma"),
        (masks.birds_eye, (POINTS,), GRID | {"cell": 10**400}, ValueError, "cell"),
        (masks.birds_eye, (POINTS,), GRID | {"x_range": (0, 10**400)}, ValueError, "x_range"),
        (masks.birds_eye, (POINTS,), GRID | {"x_range": (1, 1)}, ValueError, "x_range"),
        (masks.birds_eye, (POINTS,), GRID | {"y_range": (0, math.inf)}, ValueError, "y_range"),
        (masks.birds_eye, (POINTS,), GRID | {"z_range": 3}, ValueError, "z_range"),
        (masks.birds_eye, (POINTS,), GRID | {"z_range": (0, None)}, ValueError, "z_range"),
        (masks.birds_eye, (POINTS,), GRID | {"min_points": 0}, ValueError, "min_points"),
        (masks.birds_eye, (POINTS,), GRID | {"min_points": 1.5}, ValueError, "min_points"),
        (masks.dilate, (MASK[0, 0], 1), {}, ShapeError, "mask"),
        (masks.dilate, (MASK.astype(int), 1), {}, DTypeError, "mask"),
        (masks.dilate, (MASK, -1), {}, ShapeError, "radius"),
        (masks.dilate, (MASK, 1.5), {}, ShapeError, "radius"),
        (masks.downsample, (MASK[0, 0], 2), {}, ShapeError, "mask"),
        (masks.downsample, (MASK.astype(np.uint8), 2), {}, DTypeError, "mask"),
        (masks.downsample, (MASK, 0), {}, ShapeError, "factor"),
        (masks.downsample, (MASK, (2, 2, 2)), {}, ShapeError, "factor"),
    ],
)
def test_a_bad_call_names_its_argument(function, args, kwargs, error, name):
    with pytest.raises(error, match=rf"\b{name} must"):
        function(*args, **kwargs)


@pytest.mark.parametrize("module", [masks, birds_eye_module])
def test_the_examples_in_the_docstrings_run(module):
    result = doctest.testmod(module)
    assert result.failed == 0
    assert result.attempted > 0


@pytest.mark.parametrize("cell", [1e-300, 1e-10, np.float32(1e-10), Fraction(1, 10**10)])
def test_cells_that_no_grid_has_room_for(cell):
    with pytest.raises(ShapeError, match=r"fewer than 2\*\*31 cells along an axis, got a range"):
        masks.birds_eye(POINTS, **GRID | {"cell": cell})


@pytest.mark.parametrize("dtype", [bool, int, np.uint8, np.float16, np.float32, np.float64])
@pytest.mark.parametrize("level", [10**400, Fraction(10**400, 3)])
def test_levels_that_no_float_holds(xp, level, dtype):
    """All finite numbers lie between, and the infinities outside."""
    values = [0, 1] if np.dtype(dtype).kind != "f" else [-np.inf, -1, 0, 1, np.inf, np.nan]
    picture = np.array([values], dtype)
    for far in (level, -level):
        expected = np.array([[[bool(v > far) for v in picture[0].tolist()]]])
        assert_same(xp.to_numpy(masks.threshold(xp.asarray(picture), far)), expected)
    changes = masks.change(xp.asarray(picture[:, :2]), xp.asarray(picture[:, :2]), level)
    assert not xp.to_numpy(changes).any()


def test_blobs_wider_than_any_image():
    widest = masks.blobs((2, 9, 8), 0.25, sigma=1e300)
    assert widest.sum(axis=(1, 2)).tolist() == [18, 18]
    assert_same(widest, masks.blobs((2, 9, 8), 0.25, sigma=1e100))
