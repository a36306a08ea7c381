"""Maps of sites by the CUDA kernels, on the CPU, are those of the array operations, bit for bit."""

import itertools
import math

import numpy as np
import pytest

import sbnet_cupy as sb
from sbnet_cupy.submanifold import map_kernels
from sbnet_cupy.submanifold.transposed_rows import TRANSPOSED_ROWS
from support import site_on_host
from support.assertions import assert_close, assert_same
from support.exhaustive import thinned
from support.site_map_cases import (
    LISTS,
    MAPS,
    assert_same_map,
    assert_same_sites,
    draw_sites,
    make_maps,
)


def both(function):
    """Return what a function returns by array operations, and by kernels."""
    expected = function()
    with site_on_host.by_kernels():
        return expected, function()


@pytest.mark.parametrize("case", thinned(itertools.product(LISTS, (None, 1000, 20)), 7), ids=str)
def test_distinct_sites(case):
    name, capacity = case
    rows, shape, batch = LISTS[name]
    options = {"spatial_shape": shape, "batch_size": batch, "capacity": capacity}
    expected, found = both(lambda: sb.coordinate_map(rows, **options))
    assert_same_sites(found[0], expected[0])
    assert_same(found[1], expected[1])
    assert "place_sites" in site_on_host.LAUNCHED


@pytest.mark.parametrize("capacity", [None, 70, 33], ids=str)
@pytest.mark.parametrize("mode", ["first", "last", "sum", "mean"])
def test_rows_of_one_site(mode, capacity):
    rng = np.random.default_rng(11)
    rows = rng.integers(0, 4, (150, 4)).astype(np.int32) % (2, 5, 4, 4)
    features = rng.standard_normal((150, 3)).astype(np.float32)
    options = {"spatial_shape": (5, 4, 4), "batch_size": 2, "mode": mode, "capacity": capacity}
    expected, found = both(lambda: sb.sparse_tensor(features, rows.astype(np.int32), **options))
    assert_same_sites(found.coordinates, expected.coordinates)
    if mode in ("first", "last"):
        assert_same(found.features, expected.features)
    else:
        assert_close(found.features, expected.features, terms=20, dtype=np.float32)


@pytest.mark.parametrize("capacity", [None, 60, 33], ids=str)
@pytest.mark.parametrize("mode", ["first", "last", "sum", "mean"])
@pytest.mark.parametrize("count", [300, 0, 5])
def test_points_become_sites(count, mode, capacity):
    """Points outside, of other samples, and without numbers are dropped, and flag nothing."""
    rng = np.random.default_rng(13)
    points = rng.uniform(-2, 3, (count, 4)).astype(np.float32)
    points[:2, 0] = (np.nan, np.inf)[:count]
    sample = rng.integers(-1, 3, count)
    options = {
        "ranges": [(-1.0, 1.5), (0.0, 2.0), (-0.5, 0.5)], "voxel_size": (0.5, 0.5, 0.4),
        "sample": sample, "batch_size": 2, "mode": mode, "capacity": capacity,
    }  # fmt: skip
    (expected, into), (found, same) = both(lambda: sb.voxelize(points, **options))
    assert not count or "place_sites" in site_on_host.LAUNCHED
    assert_same_sites(found.coordinates, expected.coordinates)
    assert not found.coordinates.status.any()
    assert_same(same, into)
    if mode in ("first", "last"):
        assert_same(found.features, expected.features)
    else:
        assert_close(found.features, expected.features, terms=20, dtype=np.float32)


def test_bad_rows_are_dropped_and_flagged():
    rows = np.array(
        [[0, 1, 1], [0, 8, 0], [2, 0, 0], [-1, 3, 3], [0, 1, 1], [1, -5, 2], [1, 7, 7],
         [-(2**62), 2**62, 2**40], [0, 2**32 + 1, 1]],
    )  # fmt: skip
    options = {"spatial_shape": (8, 8), "batch_size": 2, "capacity": 6}
    expected, found = both(lambda: sb.coordinate_map(rows, **options))
    assert_same_sites(found[0], expected[0])
    assert_same(found[1], expected[1])
    assert int(found[0].status[0]) == 3 and found[1].tolist() == [0, -1, -1, -1, 0, -1, 1, -1, -1]


def test_rows_that_raise_do_so_by_name():
    rows = np.array([[0, 1], [0, 5], [0, 1]])
    with site_on_host.by_kernels():
        with pytest.raises(ValueError, match="equal rows 0 and 2"):
            sb.coordinate_map(rows, spatial_shape=8)
        with pytest.raises(sb.ShapeError, match=r"\[0, 5\] in row 1"):
            sb.coordinate_map(rows, spatial_shape=5, mode="first")


@pytest.mark.parametrize("many", [0, 1 << 16])
@pytest.mark.parametrize("case", thinned(MAPS, 23, sanitized=11), ids=str)
def test_kernel_maps(case, many, monkeypatch):
    """Also by the kernel for many rows."""
    monkeypatch.setattr(map_kernels, "_MANY_ROWS", many)
    monkeypatch.setattr(map_kernels, "_MANY_PLACES", 0)
    expected, found = both(lambda: make_maps(case))
    for one, other in zip(found, expected, strict=True):
        assert_same_map(one, other)


def test_sites_in_an_order_of_their_own():
    """A CoordinateMap that no function made: any order, spare rows of anything, equal rows."""
    rng = np.random.default_rng(12)
    rows, inside = np.split(rng.permutation(draw_sites(13, 47, (9, 9))), [40])
    spare = np.concatenate([np.full((7, 3), 10**9, np.int32), inside])
    listed = np.concatenate([rows, rows[:3], spare])
    count = np.array([43], np.int32)

    def maps():
        sites = sb.CoordinateMap(listed, count, (9, 9), 2)
        return sb.kernel_map(sites, 3, onto=sites), sb.kernel_map(sites, 3, stride=2, padding=1)

    expected, found = both(maps)
    for a, b in zip(found, expected, strict=True):
        assert_same(a.rows, b.rows)
        assert_same(a.target.indices, b.target.indices)
    assert_same(found[0].source._kept["valid"], np.arange(len(listed)) < 43)


def test_most_places_of_a_window():
    """The most sites that read one, or that one reads, wherever it is."""
    for kernel, stride, dilation in itertools.product((1, 2, 3, 7), (1, 2, 3, 4), (1, 2, 4, 6)):
        reads = [{p * stride + r * dilation for r in range(kernel)} for p in range(200)]
        readers = max(sum(p in places for places in reads) for p in range(100, 124))
        window = (kernel,), (stride,), (dilation,), (0,)
        assert map_kernels.most_places(window, readers=True) == readers
        assert map_kernels.most_places(window, readers=False) == kernel


@pytest.mark.parametrize("transposed", [False, True])
def test_targets_of_any_numbers(transposed, monkeypatch):
    """Rows of a list that no function made: those far outside of the grid read nothing."""
    monkeypatch.setattr(map_kernels, "_MANY_ROWS", 0)
    monkeypatch.setattr(map_kernels, "_MANY_PLACES", 0)
    least, most = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    wild = [least, least + 1, -2, -1, 0, 1, 8, 9, most - 1, most]
    rows = np.array([(sample, *place) for sample in (0, 1, 5, most, -1, least)
                     for place in itertools.product(wild, wild)], np.int32)  # fmt: skip
    sites = draw_sites(18, 40, (9, 9))

    def make():
        source, _ = sb.coordinate_map(sites, spatial_shape=(9, 9), batch_size=2)
        onto = sb.CoordinateMap(rows, np.array([len(rows)], np.int32), (9, 9), 2)
        return sb.kernel_map(source, 3, padding=1, onto=onto, transposed=transposed)

    expected, found = both(make)
    inside = ((rows >= 0) & (rows < (2, 9, 9))).all(axis=1)
    assert_same(found.rows[:, inside], expected.rows[:, inside])
    far = ((rows < (0, -2, -2)) | (rows > (1, 10, 10))).any(axis=1)
    assert inside.any() and far.any() and (found.rows[:, far] == -1).all()


@pytest.mark.parametrize("stride", [2**23, 2**25])
def test_long_strides(stride, monkeypatch):
    """Numbers of places in a window that are far apart."""
    monkeypatch.setattr(map_kernels, "_MANY_ROWS", 0)
    monkeypatch.setattr(map_kernels, "_MANY_PLACES", 0)

    rows = np.array([[0, 0], [0, 5], [0, 30], [1, 29], [1, 30]])

    def maps():
        sites, _ = sb.coordinate_map(rows, spatial_shape=31)
        fine = sb.kernel_map(sites, 3, stride=stride, transposed=True)
        return fine, sb.kernel_map(fine.target, 2, stride=stride)

    expected, found = both(maps)
    for a, b in zip(found, expected, strict=True):
        assert_same_map(a, b)


def test_new_sites_in_leaves_of_their_own():
    """Around sites in corners of leaves: each has eight leaves, and words of the tree."""
    rows = draw_sites(17, 60, (19, 19, 19)) * (1, 4004, 8008, 4096)

    def maps():
        sites, _ = sb.coordinate_map(rows, spatial_shape=(80000, 160000, 80000), batch_size=2)
        return [sb.kernel_map(sites, 3, padding=1, transposed=way) for way in (True, False)]

    expected, found = both(maps)
    for a, b in zip(found, expected, strict=True):
        assert_same_map(a, b)


def test_which_lists_have_kernels():
    """Numbers of rows and of places fit 32 bits, and lines of a window the grid of a launch."""
    has, ones = map_kernels.has_kernel, ((1, 1),) * 3
    assert has(4, 10) and not has(5, 10)
    assert has(3, 2**31 - 2**16 - 1) and not has(3, 2**31 - 2**16)
    assert has(2, 2**27, ((3, 5), *ones)) and not has(2, 2**27, ((3, 6), *ones))
    assert has(2, 1, ((2**16 - 1, 2), *ones)) and not has(2, 1, ((2**16, 2), *ones))


def test_a_map_is_read_in_the_other_direction():
    rows = np.array([[2, -1, 0, 5], [-1, -1, 3, 1]], np.int32)
    expected, found = both(lambda: TRANSPOSED_ROWS((rows, None), (6,)))
    assert_same(found, expected)
    assert found.tolist() == [[2, -1, 0, -1, -1, 3], [-1, 3, -1, 2, -1, -1]]
    assert "transpose_rows" in site_on_host.LAUNCHED


def test_five_axes_and_raster_order_go_by_array_operations():
    rows = draw_sites(14, 30, (3, 3, 3, 3, 3))
    with site_on_host.by_kernels():
        sb.coordinate_map(rows, spatial_shape=(3,) * 5)
        sb.coordinate_map(draw_sites(15, 30, (9, 9)), spatial_shape=(9, 9), order="raster")
        assert not site_on_host.LAUNCHED


def test_new_sites_past_all_keys_raise():
    rows = np.array([[0, 2**21 - 1, 0, 0]])

    def grow():
        sites, _ = sb.coordinate_map(rows, batch_size=1)
        return sb.kernel_map(sites, 2, stride=2, transposed=True)

    for context in (site_on_host.by_kernels(), pytest.MonkeyPatch.context()):
        with context, pytest.raises(sb.ShapeError, match="new sites must be at positions below"):
            grow()


@pytest.mark.parametrize("dimensions", [1, 2, 3, 4])
def test_trees_have_no_more_levels_than_they_need(dimensions):
    from sbnet_cupy.submanifold.keys import packing_of

    small = map_kernels.tree_shape(packing_of((8,) * dimensions, 1, dimensions), 10)
    assert small.levels == 1 and small.level_words == 10
    whole = map_kernels.tree_shape(packing_of(None, None, dimensions), 10)
    few, _ = map_kernels._MOST_TOP
    assert whole.top <= few
    levels = whole.levels - 1
    assert whole.top << 6 > few and levels >= 1
    odd = packing_of((2 ** (56 // dimensions) + 1,) * dimensions, 3, dimensions)
    shape = map_kernels.tree_shape(odd, 10)
    each, leaves = 64 ** (shape.levels - 1), math.prod(map_kernels._leaves(odd))
    assert (shape.top - 1) * each < leaves <= shape.top * each
    empty = map_kernels.tree_shape(packing_of((0,) * dimensions, 0, dimensions), 0)
    assert empty.top == empty.level_words == 1


def test_each_thread_block_has_a_sum_of_its_own():
    """Also where a level has more words than the highest one."""
    for shape in (map_kernels.TreeShape(3, 2049, 8), map_kernels.TreeShape(3, 8, 2049)):
        assert map_kernels._blocks(shape) == 2
        assert map_kernels._cleared(shape, 0) == shape.words + 3
        assert map_kernels._cleared(shape, 3) == shape.words + 5  # and those that list rows


def test_many_sites_have_fewer_levels():
    from sbnet_cupy.submanifold.keys import packing_of

    packing = packing_of((512, 512, 512), 1, 3)  # 2^21 leaves
    few, many, most = (map_kernels.tree_shape(packing, 1 << n) for n in (18, 19, 40))
    assert (few.levels, many.levels) == (2, 1) and many.top == 1 << 21
    assert most.top <= map_kernels._MOST_TOP[1]


def test_ranks_go_on_from_thread_block_to_thread_block():
    """Many thread blocks in one level, which wait for the counts of those before them."""
    from sbnet_cupy.submanifold.keys import packing_of

    rng = np.random.default_rng(1)
    shape = (4096, 2048)  # 64 thread blocks of the highest level
    assert map_kernels._blocks(map_kernels.tree_shape(packing_of(shape, 1, 2), 900)) == 64
    rows = np.unique(rng.integers(0, 2048, (900, 3)) % (1, 2048, 2048), axis=0) * (1, 2, 1)
    expected, found = both(lambda: sb.coordinate_map(rows, spatial_shape=shape, batch_size=1))
    assert_same_sites(found[0], expected[0])
    assert_same(found[1], expected[1])
