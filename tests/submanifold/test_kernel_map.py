"""kernel_map against loops over a dictionary of sites, by both of its searches."""

import copy
import itertools
import pickle
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sbnet_cupy as sb
from sbnet_cupy.submanifold import kernel_map as kernel_map_module
from support import site_cases, site_oracles
from support.assertions import assert_same, to_numpy


@pytest.fixture(params=["sorted cells", "sorted keys"], scope="module")
def search(request):
    """Which search finds rows on NumPy; that by keys is CuPy's, and that of the largest grids."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "sorted keys":
            patch.setattr(kernel_map_module, "read_rows", lambda *args: None)
        yield request.param


def rows_of(coordinates):
    """Return the rows of sites as tuples, None for those that hold none."""
    indices, valid = to_numpy(coordinates.indices).tolist(), to_numpy(coordinates.valid())
    return [tuple(row) if there else None for row, there in zip(indices, valid, strict=True)]


def expected_rows(source, target, reads):
    """Return the rows of a map, of which ``reads`` are functions from a site to what it reads."""
    at = {site: row for row, site in enumerate(rows_of(source)) if site is not None}
    return [
        [-1 if site is None else at.get(read(site), -1) for site in rows_of(target)]
        for read in reads
    ]


def reads_of(kernel, stride, padding, dilation):
    """Return, for each tap, the function from a site to the site that it reads."""

    def read(cell):
        def of(site):
            position = site_oracles.reads(site[1:], cell, stride, padding, dilation)
            return (site[0], *position)

        return of

    return [read(cell) for cell in site_oracles.cells(kernel)]


def offset_reads(offsets):
    return [
        lambda site, offset=offset: (
            site[0], *(p + o for p, o in zip(site[1:], offset, strict=True))
        )
        for offset in offsets
    ]  # fmt: skip


@given(data=st.data())
def test_windows(xp, search, data):
    sites = data.draw(site_cases.sites(dimensions=(1, 2, 3, 4)))
    x = sites.tensor(sites.features(np.random.default_rng(0), 1), xp.asarray)
    kernel, stride, padding, dilation = data.draw(site_cases.windows(sites.dimensions))
    options = {"stride": stride, "padding": padding, "dilation": dilation}
    onto = data.draw(st.sampled_from([None, x.coordinates]))
    made = sb.kernel_map(x.coordinates, kernel, onto=onto, **options)
    reads = reads_of(kernel, stride, padding, dilation)
    assert to_numpy(made.rows).tolist() == expected_rows(made.source, made.target, reads)
    back = made.transposed()
    assert (back.source, back.target) == (made.target, made.source)
    pairs = to_numpy(made.rows)
    for tap, row in zip(*np.nonzero(pairs >= 0), strict=True):
        assert int(back.rows[tap, pairs[tap, row]]) == row
    assert made.pairs() == back.pairs()
    up = sb.kernel_map(made.target, kernel, onto=made.source, transposed=True, **options)
    assert_same(up.rows, back.rows)
    assert_same(up.transposed().rows, made.rows)


@given(data=st.data())
def test_offsets(xp, search, data):
    """Any list: opposite offsets, the same one twice, and far away."""
    sites = data.draw(site_cases.sites(dimensions=(1, 2, 3)))
    x = sites.tensor(sites.features(np.random.default_rng(0), 1), xp.asarray)
    step = st.sampled_from([-9, -2, -1, 0, 1, 1, 2])
    offsets = data.draw(st.lists(st.tuples(*[step] * sites.dimensions), min_size=1, max_size=9))
    made = sb.kernel_map(x.coordinates, offsets=offsets)
    expected = expected_rows(made.source, made.target, offset_reads(offsets))
    assert to_numpy(made.rows).tolist() == expected
    assert made.kernel_size == (len(offsets),) and made.target is made.source


@pytest.mark.parametrize("make", [lambda rows: rows, list, tuple])
def test_offsets_are_numpy_arrays_whatever_library_the_sites_are_of(lib, make):
    rows = np.array([[0, 1, 2], [0, 1, 3]], np.int32)
    offsets = np.array([[0, 1], [0, 0]])
    expected, _ = sb.coordinate_map(rows, spatial_shape=(8, 8))
    sites, _ = sb.coordinate_map(lib.make(rows), spatial_shape=(8, 8))
    found = sb.kernel_map(sites, offsets=make(offsets))
    assert_same(to_numpy(found.rows), sb.kernel_map(expected, offsets=offsets).rows)
    with pytest.raises(sb.ShapeError, match="must have at least one row, got none"):
        sb.kernel_map(sites, offsets=offsets[:0])


def test_offsets_stand_alone():
    sites, _ = sb.coordinate_map(np.array([[0, 1], [0, 2]]), spatial_shape=8)
    for name, value in (("kernel_size", 3), ("transposed", True), ("output_padding", 1)):
        with pytest.raises(ValueError, match=f"offsets must not be given with .*{name}"):
            sb.kernel_map(sites, offsets=[[1]], **{name: value})
    for far in (2**31, -(2**31) - 1, 2**63):
        with pytest.raises(sb.ShapeError, match="offsets must be numbers of 32 bits"):
            sb.kernel_map(sites, offsets=np.array([[far]]))
    for name in ("stride", "dilation", "output_padding"):
        with pytest.raises(ValueError, match="offsets must not be given with"):
            sb.kernel_map(sites, offsets=[[1]], **{name: np.array([1, 1])})
    with pytest.raises(sb.ShapeError, match="offsets must be rows of 1 integers, got"):
        sb.kernel_map(sites, offsets=[[1], [1, 2]])
    for none in (np.zeros((0, 1), int), []):
        with pytest.raises(sb.ShapeError, match="must have at least one row, got none"):
            sb.kernel_map(sites, offsets=none)
    assert sb.kernel_map(sites, offsets=[[-(2**31)], [2**31 - 1]]).rows.max() == -1


CUBE = list(itertools.product(range(4), repeat=3))
LAST = 2**20 - 1
ADVERSARIAL = {
    "all in one leaf": CUBE[::3],
    "one in each leaf": [(4 * i, 4 * j, 4 * k) for i, j, k in CUBE],
    "a full cube": list(itertools.product(range(5), repeat=3)),
    "a line": [(3, 3, k) for k in range(130)],
    "a diagonal": [(k, k, k) for k in range(70)],
    "the largest coordinates": [(LAST - i, LAST - j, LAST - k) for i, j, k in CUBE],
    "opposite corners": [(0, 0, 0), (0, 0, 1), (LAST, LAST, LAST), (LAST, LAST, LAST - 1)],
    "one": [(7, 0, 2)],
    "none": [],
}


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_adversarial_sites(xp, search, name):
    """In the middle of a batch of 3, of which the other samples are empty."""
    listed = [(1, *position) for position in ADVERSARIAL[name]]
    rows = xp.asarray(np.array(listed, np.int32).reshape(-1, 4))
    sites, _ = sb.coordinate_map(rows, spatial_shape=(LAST + 1,) * 3, batch_size=3)
    same = sb.kernel_map(sites, 3, onto=sites)
    reads = reads_of((3,) * 3, (1,) * 3, (1,) * 3, (1,) * 3)
    assert to_numpy(same.rows).tolist() == expected_rows(sites, sites, reads)
    coarse = sb.kernel_map(sites, 3, stride=2, padding=1)
    reads = reads_of((3,) * 3, (2,) * 3, (1,) * 3, (1,) * 3)
    assert to_numpy(coarse.rows).tolist() == expected_rows(sites, coarse.target, reads)
    touched = {
        (1, *half)
        for _, *position in listed
        for half in itertools.product(*((p // 2, (p + 1) // 2) for p in position))
        if max(half) <= LAST // 2
    }
    assert sorted(rows_of(coarse.target)) == sorted(touched)


def test_cells_that_need_more_than_63_bits():
    """Then the cells of a box cannot be numbered; keys have room for the grid, not for its rim."""
    edge = 2**21 - 1
    rows = np.array([[0, 0, 0, 0], [0, 0, 0, 1], [0, edge, edge, edge]], np.int32)
    sites, _ = sb.coordinate_map(rows, spatial_shape=(2**21,) * 3, batch_size=1)
    assert kernel_map_module.read_rows(sites, sites, lambda p, axis: p - 1, [(0, 0, 0)]) is None
    made = sb.kernel_map(sites, 3, onto=sites)
    reads = reads_of((3,) * 3, (1,) * 3, (1,) * 3, (1,) * 3)
    assert made.rows.tolist() == expected_rows(sites, sites, reads)
    assert made.pairs() == 5


@pytest.mark.parametrize("shape, batch, stride", [
    ((2**30,) * 2, 2, 2), ((2**30,) * 2, 4, 2), ((2**20,) * 3, 2, 2), ((2**20,) * 3, 2, 2**14),
], ids=str)  # fmt: skip
def test_a_stride_that_makes_a_grid_too_large_for_sites_is_named(shape, batch, stride):
    rows, w = np.ones((1, 1 + len(shape)), np.int32), np.ones((2,) * len(shape) + (1, 1))
    x = sb.sparse_tensor(np.ones((1, 1)), rows, spatial_shape=shape, batch_size=batch)
    words = rf"stride and padding must give a grid of .* by kernel_size .*, stride \({stride},"
    with pytest.raises(sb.ShapeError, match=words):
        sb.transposed_conv(x, w, stride=stride)
    with pytest.raises(sb.ShapeError, match=r"must give a grid of .* and padding \(1073741"):
        sb.strided_conv(x, w, stride=1, padding=2**30)


def test_new_sites_where_the_shape_is_not_known(xp):
    largest = 2**17 - 1  # 17 bits for each of three axes
    near = xp.asarray(np.array([[0, 1, 2, 3]], np.int32))
    far = xp.asarray(np.array([[0, 1, 2, largest]], np.int32))
    sites, _ = sb.coordinate_map(near, batch_size=2**12 - 1)
    assert sb.kernel_map(sites, 2, stride=2, transposed=True).target.number() == 8
    sites, _ = sb.coordinate_map(far, batch_size=2**12 - 1)
    with pytest.raises(sb.ShapeError, match="new sites must be at positions below 131072"):
        sb.kernel_map(sites, 2, stride=2, transposed=True)
    roomy = sb.kernel_map(sites, 2, stride=2, transposed=True, capacity=8).target
    with pytest.raises(sb.CapacityError, match="inside a grid"):
        roomy.check()


def test_new_sites_of_far_taps_take_little_memory():
    """Places are tried for each tap of a kernel, not for each cell between its taps."""
    sites, _ = sb.coordinate_map(np.array([[0, 900, 900]]))
    tracemalloc.start()
    try:
        made = sb.kernel_map(sites, 3, stride=(1, 2), dilation=(300, 450)).target
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 16
    places = itertools.product([300, 600, 900], [0, 225, 450])
    assert sorted(made.indices[:, 1:].tolist()) == [list(place) for place in places]


@given(data=st.data())
def test_translation(xp, data):
    """Sites that are moved by whole leaves have the same map."""
    sites = data.draw(site_cases.sites(dimensions=(1, 2, 3), spare=False))
    by = data.draw(st.tuples(*[st.sampled_from([0, 64, 128])] * sites.dimensions))
    moved = sites.indices + np.array([0, *by], np.int32)
    shape = tuple(n + b for n, b in zip(sites.shape, by, strict=True))
    maps = []
    for rows, grid in ((sites.indices, sites.shape), (moved, shape)):
        made, _ = sb.coordinate_map(xp.asarray(rows), spatial_shape=grid, batch_size=sites.batch)
        maps.append(sb.kernel_map(made, 3, onto=made))
    assert_same(maps[0].rows, maps[1].rows)


@given(data=st.data())
def test_capacity(xp, data):
    """With rows to spare, new sites and maps are those of the exact form."""
    sites = data.draw(site_cases.sites(dimensions=(1, 2, 3), spare=False))
    kernel, stride, padding, dilation = data.draw(site_cases.windows(sites.dimensions))
    options = {"stride": stride, "padding": padding, "dilation": dilation}
    x = sites.tensor(sites.features(np.random.default_rng(0), 1), xp.asarray)
    exact = sb.kernel_map(x.coordinates, kernel, **options)
    count = exact.target.number()
    roomy = sb.kernel_map(x.coordinates, kernel, capacity=count + 3, **options)
    assert roomy.target.number() == count
    assert_same(roomy.rows[:, :count].copy(), exact.rows)
    assert (to_numpy(roomy.rows)[:, count:] == -1).all()
    assert_same(roomy.target.indices[:count], exact.target.indices)
    if count:
        short = sb.kernel_map(x.coordinates, kernel, capacity=count - 1, **options)
        assert short.target.overflowed and short.target.number() == count
        assert_same(short.target.indices, exact.target.indices[: count - 1])
        with pytest.raises(sb.CapacityError, match="larger capacity"):
            short.target.check()


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))]
)
def test_copies_keep_no_maps(duplicate):
    """Maps are kept by the identity of lists of sites, which is another one for a copy."""
    x = sb.sparse_tensor(np.ones((3, 2)), np.array([[0, 1], [0, 2], [0, 5]]), spatial_shape=8)
    made = sb.kernel_map(x.coordinates, 3, onto=x.coordinates)
    made.transposed()
    same, same_map = duplicate(x), duplicate(made)
    assert (same.coordinates is x.coordinates) == (duplicate is copy.copy) and not same_map._kept
    assert_same(same.features, x.features)
    assert_same(same.indices, x.indices)
    assert_same(same_map.rows, made.rows)
    assert (same_map.source is same_map.target) == (made.source is made.target)
    assert repr(same) == repr(x) and repr(same_map) == repr(made)
    again = sb.kernel_map(same.coordinates, 3, onto=same.coordinates)
    assert_same(again.rows, made.rows)
    assert not duplicate(x.coordinates)._kept


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))]
)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_copies_tell_of_lists_before_them_that_had_too_few_rows(duplicate, library):
    module, array = sb, np.array
    if library == "torch":
        array = pytest.importorskip("torch").tensor
        module = pytest.importorskip("sbnet_cupy.torch")
    rows = array([[0, 0], [0, 3], [0, 6]])
    fine = module.coordinate_map(rows, spatial_shape=8)[0]
    short = module.kernel_map(fine, 2, stride=2, capacity=2).target
    coarse = module.kernel_map(short, 2, stride=2, capacity=2).target
    window = module.kernel_map(coarse, 1, onto=coarse)
    for copied in (duplicate(coarse), duplicate(duplicate(coarse)), duplicate(window).target):
        with pytest.raises(sb.CapacityError, match="got 2 for 3 sites of a list that these were"):
            copied.check()
        copied.clear()
        with pytest.raises(sb.CapacityError, match="larger capacity where it was made"):
            copied.check()
    duplicate(fine).check()


def test_sites_that_were_pickled_together_do_not_keep_what_made_them():
    x = sb.sparse_tensor(np.ones((3, 1)), np.array([[0, 1], [0, 2], [0, 5]]), spatial_shape=8)
    w = np.ones((2, 1, 1))
    fine, coarse = pickle.loads(pickle.dumps((x, sb.strided_conv(x, w, stride=2))))
    with pytest.raises(ValueError, match="sites that were pickled, do not keep it"):
        sb.inverse_conv(coarse, w, onto=fine)
    with pytest.raises(ValueError, match="sites that were pickled, do not keep it"):
        sb.sparse_unpool(coarse, onto=fine)
    assert sb.inverse_conv(sb.strided_conv(fine, w, stride=2), w, onto=fine).features.any()


@pytest.mark.parametrize("options", [{}, {"dilation": 2}], ids=str)
def test_an_odd_kernel_on_the_same_sites_is_symmetric(options):
    rows = np.unique(np.random.default_rng(0).integers(0, 6, (60, 3)) * [0, 1, 1], axis=0)
    sites, _ = sb.coordinate_map(rows, spatial_shape=(6, 6))
    made = sb.kernel_map(sites, (3, 5), onto=sites, **options)
    assert made.is_symmetric()
    assert_same(made.transposed().rows, made.rows[::-1].copy())
    assert not made.transposed().is_symmetric()
    for kernel, more in ((2, {"onto": sites}), (3, {"padding": 1}), (3, {"stride": 2})):
        assert not sb.kernel_map(sites, kernel, **more).is_symmetric()


def test_sites_may_be_those_of_a_sparse_tensor(xp):
    """In place of coordinates, and of the sites of a result; the map is the one that is kept."""
    x = sb.dense_to_sparse(xp.asarray(np.eye(6, dtype=np.float32)[None, :, :, None]))
    made = sb.kernel_map(x, 3, onto=x)
    assert made.rows is sb.kernel_map(x.coordinates, 3, onto=x.coordinates).rows
    assert made.source is made.target is x.coordinates
    w = xp.asarray(np.ones((3, 3, 1, 2), np.float32))
    down = sb.strided_conv(x, w, stride=2, padding=1, onto=x)
    assert down.coordinates is x.coordinates
    same = sb.strided_conv(x, w, stride=2, padding=1, onto=x.coordinates)
    assert_same(to_numpy(down.features), to_numpy(same.features))
    pooled = sb.sparse_max_pool(x, 3, padding=1, onto=x)
    assert pooled.coordinates is x.coordinates


def test_pairs_are_of_rows_that_there_are():
    sites, _ = sb.coordinate_map(np.array([[0, 1], [0, 2]]), spatial_shape=4)
    rows = np.array([[0, 99], [-1, 1]], np.int32)
    assert sb.KernelMap(rows, sites, sites, (2,)).pairs() == 2


def test_a_kernel_of_too_many_cells_is_refused():
    """Before the memory of its table is asked for."""
    sites, _ = sb.coordinate_map(np.array([[0, 1, 1], [0, 2, 3]]), spatial_shape=(4, 4))
    with pytest.raises(sb.ShapeError, match="kernel_size must have at most 1048576 cells"):
        sb.kernel_map(sites, 2**20, stride=2)


def test_sites_made_of_a_list_with_too_few_rows_say_so(xp):
    """However far they are from it, in copies, and when what they keep was freed."""
    rows = np.argwhere(np.random.default_rng(0).random((1, 9, 9)) < 0.5).astype(np.int32)
    for capacity, is_left_out in ((5, True), (len(rows), False)):
        options = {"spatial_shape": (9, 9), "batch_size": 1, "capacity": capacity}
        sites, _ = sb.coordinate_map(xp.asarray(rows), **options)
        coarse = sb.kernel_map(sites, 2, stride=2, capacity=100).target
        fine = sb.kernel_map(coarse, 2, stride=2, transposed=True, capacity=400).target
        chosen, _ = fine.select(fine.valid(), capacity=400)
        chosen.clear()
        for made in (coarse, fine, chosen, fine._mapped(lambda array: array.copy())):
            if not is_left_out:
                assert made.check() is made
                continue
            with pytest.raises(sb.CapacityError, match=f"got 5 for {len(rows)} sites of a list"):
                made.check()


def test_the_coarsest_list_tells_what_a_result_at_finer_sites_does_not(xp):
    rows = np.argwhere(np.random.default_rng(0).random((1, 8, 8)) < 0.5).astype(np.int32)
    ones, w = xp.asarray(np.ones((len(rows), 1))), xp.asarray(np.ones((2, 2, 1, 1)))
    x = sb.sparse_tensor(ones, xp.asarray(rows), spatial_shape=(8, 8))
    down = sb.strided_conv(x, w, stride=2, capacity=3)
    coarsest = sb.strided_conv(down, w, stride=2, capacity=9)
    up = sb.inverse_conv(sb.inverse_conv(coarsest, w, onto=down), w, onto=x)
    assert up.coordinates.check() is x.coordinates and not up.coordinates.overflowed
    for made in (down, coarsest):
        with pytest.raises(sb.CapacityError, match=r"got 3 for 1\d sites"):
            made.coordinates.check()


@pytest.mark.parametrize("name", ["kernel_size", "stride", "dilation", "padding"])
def test_sizes_in_an_array_are_refused_with_what_to_pass(name):
    sites, _ = sb.coordinate_map(np.array([[0, 1, 1], [0, 1, 2]]), spatial_shape=(4, 4))
    options = {"kernel_size": 3, name: np.array([2, 2])}
    with pytest.raises(sb.ShapeError, match=rf"{name} must .* 2 of them in a tuple.*tolist\(\)$"):
        sb.kernel_map(sites, **options)
